"""Records of a step: one object in the file, and events of scalars, of layers, and of experts."""

import json
import struct
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from matplotlib import image
from tensorboardX.proto.event_pb2 import Event

from gspmd.training.reporting import plots
from gspmd.training.reporting.metrics import Metrics, best_validation, read
from gspmd.training.toml import ConfigError

FIGURES = {
    "loss": 2.0,
    "dropped": np.float32([0.125, 0.0]),
    "load": np.float32([[0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]),
    "absent": None,
}


def events(out):
    """The values in the events of a run, by tag."""
    (path,) = (out / "events").iterdir()
    data, at, found = path.read_bytes(), 0, {}
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + size])
        found |= {value.tag: value for value in event.summary.value}
        at += size + 16
    return found


def test_a_layer_has_events_of_its_own(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(3, FIGURES)
    found = events(tmp_path)
    assert found["loss"].simple_value == 2.0
    assert [found[f"dropped/layer_{layer}"].simple_value for layer in (1, 2)] == [0.125, 0.0]
    assert [found[f"load_largest/layer_{layer}"].simple_value for layer in (1, 2)] == [1.5, 2.25]
    assert "absent" not in found


def test_bucket_i_of_a_histogram_is_expert_i(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(3, FIGURES)
    histogram = events(tmp_path)["load/layer_2"].histo
    assert list(histogram.bucket_limit) == [0.5, 1.5, 2.5]
    assert list(histogram.bucket) == [0.0, 0.25, 0.75]
    assert (histogram.min, histogram.sum, histogram.sum_squares) == (-0.5, 1.75, 3.25)


def test_events_have_pictures_and_texts_too(tmp_path):
    rows = [{"step": step, "loss": 2.0 / step, "bits_per_byte": 3.0 / step} for step in (1, 2)]
    plots.loss_curve(rows, tmp_path / "loss.png")
    with Metrics(tmp_path, settings={"training": {"steps": 3}}) as metrics:
        metrics.picture(3, "loss curve", tmp_path / "loss.png")
        metrics.text(3, "sample", "def f(x):")
    found = events(tmp_path)
    picture = found["loss curve"].image
    assert picture.encoded_image_string == (tmp_path / "loss.png").read_bytes()
    height, width, _ = image.imread(tmp_path / "loss.png").shape
    assert (picture.height, picture.width) == (height, width)
    texts = {tag: value.tensor.string_val[0].decode() for tag, value in found.items() if value.HasField("tensor")}
    assert {tag.partition("/")[0]: text for tag, text in texts.items()} == {
        "settings": '```json\n{\n  "training": {\n    "steps": 3\n  }\n}\n```',
        "sample": "def f(x):",
    }


class Wandb(ModuleType):
    """Stands for the package wandb, which is not needed to test what is logged to it."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.begun, self.logged, self.finished = [], [], []
        self.Histogram = lambda np_histogram: ("histogram", *(each.tolist() for each in np_histogram))
        self.Image = lambda path: ("image", path)
        self.Table = lambda columns, data: ("table", columns, data)

    def init(self, **given):
        self.begun.append(given)
        log = lambda figures, step: self.logged.append((step, figures))  # noqa: E731
        return SimpleNamespace(log=log, finish=lambda: self.finished.append(True))


def test_weights_and_biases_gets_what_the_events_get(tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    out = tmp_path / "007"
    out.mkdir()
    with Metrics(out, settings={"steps": 3}, log="wandb") as metrics:
        metrics.write(3, FIGURES)
        metrics.picture(3, "loss curve", _png(out))
    (begun,) = wandb.begun
    assert begun == {"project": "gspmd", "name": "007", "group": "007", "dir": str(out), "config": {"steps": 3}}
    figures = {name: value for step, logged in wandb.logged if step == 3 for name, value in logged.items()}
    assert figures == {
        "loss": 2.0, "dropped/layer_1": 0.125, "dropped/layer_2": 0.0, "loss curve": ("image", str(out / "loss.png")),
        "load/layer_1": ("histogram", [0.5, 0.25, 0.25], [-0.5, 0.5, 1.5, 2.5]),
        "load/layer_2": ("histogram", [0.0, 0.25, 0.75], [-0.5, 0.5, 1.5, 2.5]),
    }  # fmt: skip
    assert wandb.finished == [True]


def _png(out):
    plots.loss_curve([{"step": 1, "bits_per_byte": 3.0}], out / "loss.png")
    return out / "loss.png"


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_without_wandb_it_is_one_message(tmp_path):
    with pytest.raises(ConfigError) as error:
        Metrics(tmp_path, log="wandb")
    assert str(error.value) == (
        "cannot log to Weights & Biases:\n  wandb is not installed. pip install wandb, or leave --log out."
    )


def test_the_file_has_the_arrays_themselves(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(3, FIGURES)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"step": 3, "loss": 2.0, "dropped": [0.125, 0.0], "absent": None} | {
        "load": [[0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]
    }


def test_a_resume_hides_the_events_after_its_checkpoint(tmp_path):
    with Metrics(tmp_path, resumed_at=4) as metrics:
        metrics.write(5, FIGURES)
    (path,) = (tmp_path / "events").iterdir()
    data, at, steps = path.read_bytes(), 0, []
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + size])
        steps += [event.step] if event.HasField("session_log") else []
        at += size + 16
    assert steps == [5]


def test_a_last_line_cut_short_is_left_out_and_any_other_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read(tmp_path) == [{"step": 1, "loss": 2.0}]
    for damaged in ('{"step": 2, "lo', "[2]", '{"loss": 3.0}', "\x00\x00"):
        path.write_text(f'{{"step": 1, "loss": 2.0}}\n{damaged}\n{{"step": 3, "loss": 2.0}}\n')
        with pytest.raises(ConfigError, match="line 2 is not a JSON object with a step"):
            read(tmp_path)
        before = path.read_text()
        with pytest.raises(ConfigError):
            Metrics(tmp_path, resumed_at=1)
        assert path.read_text() == before


def test_scores_between_updates_are_held_against_one_another(tmp_path):
    """A validation at the end reads more text, and stays in the file where a run goes on."""
    with Metrics(tmp_path) as metrics:
        metrics.write(1, {"loss": 2.0, "val_bits_per_byte": 3.0})
        metrics.write(2, {"loss": 2.0})
        metrics.write(2, {"val_bits_per_byte": 2.0})
    assert best_validation(tmp_path) == (2.0, 2)
    assert best_validation(tmp_path, of_updates=True) == (3.0, 1)


def test_a_disk_that_is_full_on_a_resume_costs_no_figures(tmp_path, small_files):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 2.0}}\n' for step in range(1, 400)))
    before = path.read_text()
    with small_files(4096), pytest.raises(OSError, match="File too large"):
        Metrics(tmp_path, resumed_at=399)
    assert path.read_text() == before
