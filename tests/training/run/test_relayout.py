"""A run that changes layout and mesh between two steps: the same values there, bit for bit, and the same curve."""

import dataclasses
import json
from io import StringIO
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from gspmd import host
from gspmd.annotate import Spec
from gspmd.commands import main
from gspmd.training import ConfigError, ShardingConfig, TrainingConfig, fit
from gspmd.training.arrangement import arrange, check_same_form
from gspmd.training.reporting import metrics
from gspmd.training.run import loop

CONFIG = TrainingConfig(steps=12, batch=4, length=16, validation_every=5, validation_batches=2, save_every=4, keep=9)
TINY = str(Path(__file__).parents[3] / "configs" / "tiny.toml")


def losses(out):
    return [row["loss"] for row in metrics.read(out) if "loss" in row]


@pytest.fixture
def arranged(make_program):
    """A function of an empty list -> three programs by the step after which each is in force; it lists those made."""
    meshes = {0: ({"x": 8}, "VE_x", "E"), 4: ({"x": 2, "y": 4}, "V_yE_x", "E_y"), 7: ({"a": 8}, "V_aE", "E_a")}

    def programs(made):
        def make(step):
            made.append(step)
            sizes, table, bias = meshes[step]
            return make_program(sizes, steps=12, specs={"table": Spec.parse(table), "bias": Spec.parse(bias)})[0]

        return {step: lambda step=step: make(step) for step in meshes}

    return programs


@pytest.mark.filterwarnings("error:Some donated buffers")
def test_values_are_equal_at_a_change_and_the_curve_is_that_of_one_device(
    arranged, make_program, corpus, tmp_path, monkeypatch
):
    (tmp_path / "one").mkdir()
    moved, said = [], StringIO()

    def watched(state, like):
        before = jax.device_get(state)
        after = loop_move(state, like)
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(after))
        assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(lambda x: x.sharding, like)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        moved.append(int(after.step))
        return after

    loop_move = loop.move
    monkeypatch.setattr(loop, "move", watched)
    fit(dataclasses.replace(CONFIG, profile="4:5"), arranged([]), corpus, tmp_path, Console(file=said, width=500))
    assert moved == [4, 7]
    assert "step 5: profile written to " in said.getvalue()  # of steps on both sides of a change
    fit(CONFIG, make_program({"x": 1}, steps=12)[0], corpus, tmp_path / "one", Console(quiet=True))
    np.testing.assert_allclose(losses(tmp_path), losses(tmp_path / "one"), rtol=1e-4)
    assert [row["step"] for row in metrics.read(tmp_path)] == [*range(1, 13), 12]


def test_a_resume_goes_on_in_the_layout_that_is_in_force(arranged, corpus, tmp_path):
    """Saved after a change, and right at one."""
    fit(CONFIG, arranged([]), corpus, tmp_path, Console(quiet=True))
    whole = losses(tmp_path)
    for step, used in ((8, [7]), (4, [4, 7])):
        made, again = [], dataclasses.replace(CONFIG, resume=True, resume_step=step)
        state = fit(again, arranged(made), corpus, tmp_path, Console(quiet=True))
        assert made == used
        assert losses(tmp_path) == whole
        assert state.params["table"].sharding.spec[0] == "a"


def test_what_cannot_be_is_refused_before_training():
    wrong = {
        ("200",): "relayout must read STEP=LAYOUT, such as 200=zero-3 or 200=zero-3:x=8, but is '200'.",
        ("x=zero-3",): "relayout must read STEP=LAYOUT, such as 200=zero-3 or 200=zero-3:x=8, but is 'x=zero-3'.",
        ("9=zero-3:x=a",): "mesh 'x=a': mesh axis x has size 'a', which is not a whole number of at most 18 digits.",
        ("400=zero-3",): "relayout '400=zero-3' is after step 400, but the run has 400 steps; name an earlier one.",
        ("0=zero-3",): "relayout '0=zero-3' is after step 0, but 1 is the first step; name a later one.",
        (
            "9=zero-3",
            "9=gshard",
        ): "relayout '9=gshard' is after step 9, but the change before it is after step 9; name a",
    }
    for changes, words in wrong.items():
        with pytest.raises(ConfigError) as error:
            TrainingConfig(relayout=changes)
        assert len(error.value.faults) == 1
        assert words in error.value.faults[0]


@pytest.fixture
def started(monkeypatch):
    """Devices of this process, whose backend has started."""
    monkeypatch.setattr(host, "start", lambda count, platform, host_devices=8: jax.devices()[: count or host_devices])


@pytest.mark.parametrize(("change", "words"), [
    ("2=zero-33", "zero-33"),
    ("2=zero-3:x=4", "mesh x=4 has 4 devices, but the run has 8, and keeps all of them."),
    ("2=zero-3:w=8", "'w'|axis w"),
])  # fmt: skip
def test_a_layout_or_mesh_that_does_not_fit_is_one_error(started, change, words):
    with pytest.raises(ValueError, match=words):
        arrange(TrainingConfig(relayout=(change,)), ShardingConfig(), {"B": 8, "X": 8, "H": 8})


def test_layouts_that_pad_differently_are_refused(make_program):
    one, other = (make_program({"x": 2}, steps=2)[0].state for _ in range(2))
    check_same_form([("gshard", one), ("zero-3", other)])
    padded = dataclasses.replace(other, params=other.params | {"table": jax.ShapeDtypeStruct((8, 16), "float32")})
    with pytest.raises(
        ConfigError, match=r"params.table is float32 \(8, 8\) in gshard, but float32 \(8, 16\) in zero-3"
    ):
        check_same_form([("gshard", one), ("zero-3", padded)])


def test_a_batch_that_does_not_fit_a_later_layout_is_refused_before_training(started, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--config", TINY, "--devices", "8", "--microbatches", "2", "--layout", "megatron-1d"]
    assert main.main(["train", *flags, "--relayout", "1=zero-3", "--out", "run"]) == 2
    said = capsys.readouterr().err
    assert "cannot use layout 'zero-3' for the sizes B=8," in said
    assert "dimension B has size 4, which mesh axes" in said
    assert "That is the size of a microbatch, of which there are M=2." in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_changes_its_layout_and_resumes(started, monkeypatch, tmp_path, capsys):
    """Experts and a router with noise, against one device; and from a step after the change again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(2000)))
    flags = ["train", "--config", TINY, "--data", "a.txt", "--steps", "6", "--save-every", "4", "--keep", "9"]
    flags += ["--sample-bytes", "0", "--final-validation-batches", "1", "--model.moe.router", "gshard"]
    assert main.main([*flags, "--devices", "1", "--layout", "replicated", "--out", "one"]) == 0
    assert main.main([*flags, "--devices", "8", "--relayout", "3=zero-3:x=2,y=4", "--out", "run"]) == 0
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "one"), rtol=1e-4)
    assert json.loads((tmp_path / "run/config.json").read_text())["training"]["relayout"] == ["3=zero-3:x=2,y=4"]
    whole = losses(tmp_path / "run")
    capsys.readouterr()
    assert main.main(["train", "--resume", "4", "--devices", "8", "--mesh", "x=8", "--out", "run"]) == 0
    assert "After step 3: layout zero-3 on mesh x=" in capsys.readouterr().out
    np.testing.assert_allclose(losses(tmp_path / "run"), whole, rtol=1e-4)
