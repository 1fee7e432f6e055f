"""`gspmd train` in rounds and of two stacks: validated, moved off stages, resumed, exported, as one device trains."""

import jax
import numpy as np
import pytest

import gspmd_models as models
from gspmd import host
from gspmd.commands import main
from gspmd.layouts import Layout
from gspmd.training.reporting import metrics
from gspmd_models import checkpoints

CONFIG = """
[model]
embed = 16
layers = 4
heads = 4
kv_heads = 4
head_size = 4
feed_forward = 32
[training]
data = ["text.txt"]
steps = 3
batch = 8
length = 8
validation_every = 2
validation_batches = 1
final_validation_batches = 0
sample_bytes = 0
save_every = 1
keep = 9
"""
IN_ROUNDS = ["--layout", "pipeline", "--mesh", "p=2,x=2", "--microbatches", "2", "--rounds", "2"]


def figures(out):
    """Losses and scores of validation: (step, name, value)."""
    rows, names = metrics.read(out), ("loss", "val_bits_per_byte")
    return [(row["step"], name, row[name]) for row in rows for name in names if name in row]


@pytest.mark.slow
def test_a_run_in_rounds_is_validated_moved_resumed_and_exported(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "start", lambda count, platform, host_devices=8: jax.devices()[: count or host_devices])
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog, and then it sleeps. " * 40)
    (tmp_path / "small.toml").write_text(CONFIG)
    small = ["train", "--config", "small.toml"]
    assert main.main([*small, "--layout", "replicated", "--devices", "1", "--out", "alone"]) == 0
    assert main.main([*small, *IN_ROUNDS, "--devices", "4", "--relayout", "2=zero-2", "--out", "run"]) == 0
    alone, whole = figures("alone"), figures("run")
    assert [each[:2] for each in whole] == [each[:2] for each in alone]
    assert {"val_bits_per_byte"} < {name for _, name, _ in whole}
    np.testing.assert_allclose([each[2] for each in whole], [each[2] for each in alone], atol=1e-4)
    # What a kill after the first step leaves: it goes on in rounds, and then without stages.
    assert main.main(["train", "--resume", "1", "--out", "run", "--devices", "4"]) == 0
    assert figures("run") == whole
    for run in ("alone", "run"):
        assert main.main(["export", run, f"{run}-out"]) == 0
    mesh, layout = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1]), Layout.load("replicated")
    wanted, found = (checkpoints.load(f"{run}-out", layout, mesh, "float32")[0] for run in ("alone", "run"))
    for (path, value), each in zip(models.arrays(found).items(), models.arrays(wanted).values(), strict=True):
        np.testing.assert_allclose(value, each, atol=1e-4, err_msg=path)


@pytest.mark.slow
def test_a_run_of_two_stacks_in_stages_is_validated_moved_and_samples(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "start", lambda count, platform, host_devices=8: jax.devices()[: count or host_devices])
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog, and then it sleeps. " * 80)
    model = 'vocabulary = 358\nstart_token = 257\nencoder_layers = 2\npositions = "relative"\nattention_scale = 1.0\n'
    changes = {
        "[model]\n": f"[model]\n{model}", "layers = 4": "layers = 2", "batch = 8": "batch = 16",
        "length = 8": "length = 16\nsource_length = 24",
        "sample_bytes = 0": 'sample_bytes = 4\nobjective = "span-corruption"\nprompt = "the"',
    }  # fmt: skip
    settings = CONFIG
    for before, after in changes.items():
        settings = settings.replace(before, after)
    (tmp_path / "small.toml").write_text(settings)
    small = ["train", "--config", "small.toml"]
    assert main.main([*small, "--layout", "replicated", "--devices", "1", "--out", "alone"]) == 0
    in_stages = ["--layout", "pipeline", "--mesh", "p=2,x=2,y=2", "--microbatches", "2", "--devices", "8"]
    assert main.main([*small, *in_stages, "--relayout", "2=zero-2", "--out", "run"]) == 0
    alone, whole = figures("alone"), figures("run")
    assert [each[:2] for each in whole] == [each[:2] for each in alone]
    np.testing.assert_allclose([each[2] for each in whole], [each[2] for each in alone], atol=1e-4)
