"""What is shown: tables, pictures, the header and the sample."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from gspmd.annotate import Spec
from gspmd.training import plots, report, tables


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120)


def text(console, *things):
    for thing in things:
        console.print(thing)
    return console.file.getvalue()


def rows(steps=60, layers=2, experts=4):
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 5.0 / step + 1.5, "bits_per_byte": 7 / step + 2}
        layered = {name: rng.random(layers).tolist() for name in ("dropped", "entropy", "confidence")}
        yield row | layered | {"load": rng.dirichlet(np.ones(experts), layers).tolist()}
    yield {"step": steps, "val_bits_per_byte": 2.2, "gzip_bits_per_byte": 2.05}


def test_tensors_with_their_pieces(console):
    placed = {"ffn.w_in": (Spec.parse("E_xF_y"), (512, 2048)), "norm": (Spec.parse("E"), (512,))}
    shown = text(console, tables.tensors("Parameters", placed, {"x": 4, "y": 2}))
    assert "E_xF_y" in shown
    assert "128 × 1024" in shown
    assert "512.00 KiB" in shown
    assert "514.00 KiB" in shown


def test_collectives_with_the_most_bytes_first(console):
    sent = {("all-gather", ("x",)): (6, 2048), ("reduce-scatter", ("x", "y")): (1, 6144)}
    shown = text(console, tables.collectives("Step", sent))
    assert "6.00 KiB" in shown
    assert "x, y" in shown
    assert "8.00 KiB" in shown
    assert shown.index("reduce-scatter") < shown.index("all-gather")


def test_no_collectives_at_all(console):
    assert "0 B" in text(console, tables.collectives("Step", {}))


def test_pictures_are_drawn(tmp_path):
    plots.loss_curve(list(rows()), tmp_path / "loss.png")
    assert plots.expert_load(list(rows()), tmp_path / "experts.png")
    for name in ("loss.png", "experts.png"):
        pixels = image.imread(tmp_path / name)
        assert pixels.shape[1] > 800
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20


def test_a_short_run_can_be_drawn(tmp_path):
    plots.loss_curve(list(rows(steps=1)), tmp_path / "loss.png")
    assert plots.expert_load(list(rows(steps=1, layers=1)), tmp_path / "experts.png")


def test_a_long_run_has_no_column_narrower_than_a_reader_sees():
    found = list(rows(steps=1001))[:-1]
    edges, load = plots._binned(found)
    assert (len(edges), load.shape) == (241, (240, 2, 4))
    assert (edges[0], edges[-1]) == (0.5, 1001.5)
    widths = np.diff(edges)[:, None, None]
    every = np.array([row["load"] for row in found])
    np.testing.assert_allclose((load * widths).sum(0), every.sum(0), rtol=1e-12)


def test_the_end_of_a_layer_is_the_mean_of_its_last_tenth():
    found = [{"dropped": [step / 100, 0.0], "entropy": [1.0, 2.0]} for step in range(20)]
    assert plots._ending(found, 0) == "at the end: 18.5% dropped, entropy 1.00"
    assert plots._ending([{}], 0) == ""


def test_a_dense_model_has_no_load(tmp_path):
    assert not plots.expert_load([{"step": 1, "loss": 1.0}], tmp_path / "experts.png")
    assert not (tmp_path / "experts.png").exists()


def test_sample_may_hold_anything(console, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "bits_per_byte": 1.4}\n')
    report.finish(console, tmp_path, "def ", lambda: "def [/bold] f\x00\x07(x):\n    return")
    assert (tmp_path / "sample.txt").read_text() == "def [/bold] f\x00\x07(x):\n    return"
    shown = console.file.getvalue()
    assert "def [/bold] f" in shown
    assert "\x07" not in shown


def test_header(console):
    report.header(console, {"mesh": "x=4, y=2 [explicit]"})
    assert "x=4, y=2 [explicit]" in console.file.getvalue()


def test_bytes_are_those_of_the_compute_type(console):
    placed = {
        "embedding.tokens": (Spec.parse("BL"), (4, 8)),
        "ffn.hidden": (Spec.parse("BLF"), (4, 8, 2)),
        "output.logits": (Spec.parse("BLV"), (4, 8, 2)),
    }
    report.show_tensors(console, "Activations", placed, SimpleNamespace(shape={"x": 2}), "bfloat16")
    shown = {line.split()[0]: line.split()[-2:] for line in console.file.getvalue().splitlines() if "B " in f"{line} "}
    assert shown["embedding.tokens"] == ["128", "B"]
    assert shown["ffn.hidden"] == ["128", "B"]
    assert shown["output.logits"] == ["256", "B"]
    assert shown["all"] == ["512", "B"]
