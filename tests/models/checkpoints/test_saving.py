"""Saving: models of our own training as checkpoints, which read back as the same function; nothing half-written."""

import json
import os

import jax
import numpy as np
import pytest
from safetensors import safe_open

import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.layouts.initial import nested
from gspmd.moe.config import MoEConfig
from gspmd_models.checkpoints import CheckpointError, byte_tokenizer, load, model_config, save, tokenizer
from gspmd_models.checkpoints.files import Files
from tests.models.checkpoints.small import tensors, write

SIZES = {
    "embed": 24,
    "layers": 2,
    "heads": 6,
    "kv_heads": 3,
    "head_size": 8,
    "feed_forward": 20,
    "vocabulary": 50,
    "vocabulary_multiple": 8,
}


@pytest.fixture
def trained(make_mesh):
    """A function (changes to the config) -> a model of ours with random parameters, on one device."""

    def make(**changes) -> models.Transformer:
        layout, draw = Layout.load("replicated"), np.random.default_rng(0).standard_normal
        config = models.ModelConfig(**(SIZES | changes))
        mesh = make_mesh(layout.mesh_for(1))
        values = {}
        for path, (spec, shape) in models.parameter_specs(config, layout).items():
            value = 0.2 * draw(shape, np.float32) + ("norm" in path)
            values[path] = jax.device_put(value, jax.NamedSharding(mesh, spec.partition_spec()))
        return models.Transformer(config, layout, nested(values), np.dtype("float32"))

    return make


def logits(model: models.Transformer) -> np.ndarray:
    """Logits of some tokens, on the model's own device, without padding."""
    tokens = jax.numpy.asarray(np.random.default_rng(1).integers(0, 50, (2, 9)), np.int32)
    mesh = models.arrays(model)["output.norm"].sharding.mesh
    with jax.set_mesh(mesh):
        program = jax.jit(lambda values: models.with_arrays(model, values)(tokens)[0])
        return np.asarray(program(models.arrays(model)))[..., :50]


SLOW = pytest.mark.slow
OWN = {
    "the default": {},
    "untied": {"tied": False},
    "top-k experts": {"moe": MoEConfig(experts=5, every=1, router="top-k", dispatch="dropless")},
    "unscaled geglu": {"scale_embedding": False, "activation": "geglu"},
}


@pytest.mark.parametrize("what", [pytest.param(what, marks=() if what == "the default" else SLOW) for what in OWN])
def test_a_model_of_our_own_is_read_back_as_the_same_function(what, trained, placing, tmp_path):
    model = trained(**OWN[what])
    save(model, tmp_path / "out")
    back, report = load(tmp_path / "out", *placing("replicated"), "float32")
    assert back.config.vocabulary == 50
    np.testing.assert_allclose(logits(back), logits(model), rtol=0, atol=2e-5)
    assert report.bytes_read + 8 < report.file_bytes < report.bytes_read + 8192


@pytest.mark.parametrize("preset", ["weight-stationary-2d", "zero-3"])
def test_a_placed_model_is_saved_tensor_by_tensor_as_it_was_read(preset, placing, tmp_path):
    values = tensors("float16")
    (tmp_path / "in").mkdir()
    layout, mesh = placing(preset)
    save(load(write(tmp_path / "in", values), layout, mesh, "float32")[0], tmp_path / "out", dtype="float16")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert {*file.keys()} == {*values}
        for name, value in values.items():
            np.testing.assert_array_equal(file.get_tensor(name), value, err_msg=name)


def test_a_large_model_is_several_files_with_an_index(placing, tmp_path):
    model, _ = load(write(tmp_path, tensors()), *placing("replicated"), "float32")
    save(model, tmp_path / "out", file_bytes=6000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    values = tensors()
    files = sorted({*index["weight_map"].values()})
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "np") as opened:
            np.testing.assert_array_equal(opened.get_tensor(name), values[name])
    with Files(tmp_path / "out") as read:
        assert {*read.tensors} == {*values}


def test_config_json_promises_the_length_and_the_dtype_and_has_the_tokenizer_beside_it(trained, tmp_path):
    save(trained(vocabulary=256), tmp_path / "out", tokenizer=byte_tokenizer(), dtype="bfloat16", length=512)
    entries = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (entries["max_position_embeddings"], entries["torch_dtype"], entries["vocab_size"]) == (512, "bfloat16", 256)
    assert tokenizer(tmp_path / "out").encode("é") == [195, 169]
    assert model_config(tmp_path / "out").layers == 2


def test_a_model_without_a_family_leaves_nothing(trained, tmp_path):
    with pytest.raises(CheckpointError, match=r"Mixtral: moe\.router is 'noisy-top-k', not 'top-k'"):
        save(trained(moe=MoEConfig(experts=5, every=1, router="noisy-top-k")), tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_values_beyond_the_dtype_are_all_named_and_nothing_is_written(placing, tmp_path):
    values = tensors()
    values["lm_head.weight"][3, 2] = -70000.0
    values["model.layers.1.mlp.up_proj.weight"][0, 0] = 65520.0  # half-way from the largest, which rounds up
    values["model.norm.weight"][:] = 65504.0
    (tmp_path / "in").mkdir()
    model, _ = load(write(tmp_path / "in", values), *placing("replicated"), "float32")
    with pytest.raises(CheckpointError) as caught:
        save(model, tmp_path / "out", dtype="float16")
    assert caught.value.faults == (
        "model.layers.1.mlp.up_proj.weight has 65520, but float16 holds at most 65504; use another dtype.",
        "lm_head.weight has 70000, but float16 holds at most 65504; use another dtype.",
    )
    assert [each.name for each in tmp_path.iterdir()] == ["in"]
    save(model, tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize("preset", ["replicated", "weight-stationary-2d"])
def test_nan_and_infinity_are_all_named_and_nothing_is_written(preset, placing, tmp_path):
    """A reader would refuse them, and so does the writer: a run that diverged is told when it is exported."""
    (tmp_path / "in").mkdir()
    model, _ = load(write(tmp_path / "in", tensors()), *placing(preset), "float32")
    values = models.arrays(model)
    faulty = {"blocks.0.ffn.w_in": {(1, 2, 3): np.nan, (1, 5, 1): -np.inf}, "output.norm": {3: np.inf}}
    for path, entries in faulty.items():
        value = np.array(values[path])
        for at, entry in entries.items():
            value[at] = entry
        values[path] = jax.device_put(value, values[path].sharding)
    with pytest.raises(CheckpointError) as caught:
        save(models.with_arrays(model, values), tmp_path / "out", dtype="bfloat16")
    told = "values that are NaN or infinite, as in the model; save an earlier state, from before training diverged."
    assert caught.value.faults == (
        f"model.layers.1.mlp.up_proj.weight has 2 of 512 {told}",
        f"model.norm.weight has 1 of 16 {told}",
    )
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_a_full_disk_leaves_nothing_and_says_so(trained, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device; nothing was written"):
        save(trained(), tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing(trained, tmp_path, monkeypatch):
    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(trained(), tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_not_overwritten(trained, tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(CheckpointError, match="it exists; give a new folder"):
        save(trained(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_int8_weights_are_refused(trained, tmp_path):
    with pytest.raises(CheckpointError, match="its weights are int8; save the model before it is quantized"):
        save(models.quantize(trained()), tmp_path / "out")


def test_an_unknown_dtype_is_refused(trained, tmp_path):
    with pytest.raises(CheckpointError, match="the dtype int32 is not one of float32, float16, bfloat16"):
        save(trained(), tmp_path / "out", dtype="int32")
