"""Loading: every parameter, byte and fault."""

import gc
import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import gspmd_models as models
from gspmd import LayoutError
from gspmd_models.checkpoints import CheckpointError, load, model_config
from gspmd_models.parameters import pad, parameters
from tests.models.checkpoints.small import tensors, write


def expected(values: dict[str, np.ndarray], embed: int = 16, head_size: int = 4) -> dict[str, np.ndarray]:
    """The parameters that the tensors of `small` make."""
    stack = lambda name: np.stack([values[f"model.layers.{n}.{name}.weight"] for n in range(2)])  # noqa: E731
    q, k, v = (stack(f"self_attn.{each}_proj").swapaxes(1, 2).reshape(2, embed, -1, head_size) for each in "qkv")
    return {
        "embedding.table": values["model.embed_tokens.weight"],
        "blocks.0.attention.norm": stack("input_layernorm"),
        "blocks.0.attention.w_q": q,
        "blocks.0.attention.w_k": k,
        "blocks.0.attention.w_v": v,
        "blocks.0.attention.w_o": stack("self_attn.o_proj").swapaxes(1, 2).reshape(2, -1, head_size, embed),
        "blocks.0.ffn.norm": stack("post_attention_layernorm"),
        "blocks.0.ffn.w_in": stack("mlp.up_proj").swapaxes(1, 2),
        "blocks.0.ffn.w_gate": stack("mlp.gate_proj").swapaxes(1, 2),
        "blocks.0.ffn.w_out": stack("mlp.down_proj").swapaxes(1, 2),
        "output.norm": values["model.norm.weight"],
        "output.table": values["lm_head.weight"],
    }


PRESETS = ("replicated", "weight-stationary-2d", "zero-3", "weight-gathered-xyz", "gshard")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_is_its_tensors_and_the_file_is_read_once(preset, placing, tmp_path):
    values = tensors("float16")
    layout, mesh = placing(preset)
    model, report = load(write(tmp_path, values, files=1 + PRESETS.index(preset) % 3), layout, mesh, "float32")
    arrays, wanted = models.arrays(model), expected(values)
    assert arrays.keys() == wanted.keys()
    specs = models.parameter_specs(model.config, layout)
    for path, value in arrays.items():
        np.testing.assert_array_equal(np.asarray(value), wanted[path].astype(np.float32), err_msg=path)
        assert value.sharding == jax.sharding.NamedSharding(mesh, specs[path][0].partition_spec())
    assert report.bytes_read == sum(value.nbytes for value in values.values())
    assert report.file_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert report.tensors == len(values)
    assert report.host_bytes == max(shard.data.nbytes for x in arrays.values() for shard in x.addressable_shards)
    assert re.fullmatch(
        r"21 tensors, [\d.]+ kB of [\d.]+ kB read in .*; .* of host memory besides the arrays", str(report)
    )


@pytest.mark.parametrize("padding", [{"K": 4, "V": 32}, {"H": 12, "K": 4, "F": 20}])
def test_padding_is_zero_and_the_rest_stands_where_the_model_has_it(padding, placing, tmp_path):
    values = tensors()
    layout, mesh = placing("megatron-1d", padding)
    model, report = load(write(tmp_path, values), layout, mesh, "float32")
    rows, wanted = parameters(model.config, layout), expected(values)
    assert any(each for row in rows.values() for each in row.padding)
    for path, value in models.arrays(model).items():
        np.testing.assert_array_equal(
            np.asarray(value), np.asarray(pad(wanted[path], rows[path].padding)), err_msg=path
        )
    assert report.bytes_read == sum(value.nbytes for value in values.values())


def test_matrices_have_the_dtype_that_is_asked_for_and_norms_are_float32(placing, tmp_path):
    model, _ = load(write(tmp_path, tensors()), *placing("replicated"), "bfloat16")
    dtypes = {path: str(value.dtype) for path, value in models.arrays(model).items()}
    assert {path for path, dtype in dtypes.items() if dtype == "float32"} == {p for p in dtypes if p.endswith("norm")}
    np.testing.assert_array_equal(
        np.asarray(models.arrays(model)["blocks.0.ffn.w_in"]),
        expected(tensors())["blocks.0.ffn.w_in"].astype(ml_dtypes.bfloat16),
    )


def test_host_memory_beside_the_arrays_is_what_the_report_says(placing, tmp_path):
    # Blocks of 4 MB, beside which the interpreter's own objects are small: what is planned or compiled anew, because
    # other tests in this process pushed it out of a cache, is some 0.4 MB.
    sizes = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1024}
    folder = write(tmp_path, tensors(**sizes), **sizes)
    layout, mesh = placing("zero-3")
    load(folder, layout, mesh, "float32")  # what is imported and planned once
    gc.disable()  # cycles that are collected halfway would count in the peak alone
    tracemalloc.start()
    try:
        model, report = load(folder, layout, mesh, "float32")
        now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert report.host_bytes == 16384 * 512 * 4 // 8
    assert most - now <= 1.25 * report.host_bytes
    del model


_MEASURED = """
import sys
from pathlib import Path
from gspmd import host
host.use_host_devices(8)
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd_models.checkpoints import load
layout = Layout.load("zero-3")
mesh = jax.make_mesh(tuple(layout.mesh_for(8).values()), ("x", "y", "z"))
for device in jax.devices():
    jax.device_put(np.zeros(9), device).block_until_ready()
def most():
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmHWM"].split()[0]), 1024 * int(lines["VmRSS"].split()[0])
_, before = most()
model, report = load(sys.argv[1], layout, mesh, "bfloat16")
arrays = sum(shard.data.nbytes for x in models.arrays(model).values() for shard in x.addressable_shards)
print(most()[0] - before - arrays, report.host_bytes, arrays)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_the_process_grows_by_the_arrays_and_little_else(tmp_path):
    sizes = {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    heads = {"head_dim": 128, "num_key_value_heads": 8}
    folder = write(tmp_path, tensors("float16", **sizes, **heads), **sizes, **heads)
    command = [sys.executable, "-c", _MEASURED, str(folder)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    more, host, arrays = map(int, shown.stdout.split())
    assert arrays > 400_000_000
    assert host <= 16_000_000  # an eighth of 12 layers of one matrix
    assert more < host + 60_000_000  # a few tensors' pages, threads, and what the allocator keeps


def broken(folder, change) -> CheckpointError:
    """The error of loading the small checkpoint with some tensors changed."""
    values = tensors()
    change(values)
    with pytest.raises(CheckpointError) as error:
        load(write(folder, values), *change.placing, "float32")
    return error.value


def test_missing_unexpected_and_misshapen_tensors_are_all_named(placing, tmp_path, monkeypatch):
    def change(values):
        del values["model.norm.weight"], values["model.layers.1.mlp.up_proj.weight"]
        values["model.layers.2.mlp.up_proj.weight"] = np.zeros((32, 16))
        values["lm_head.weight"] = np.zeros((47, 16), np.float32)
        values["model.layers.0.self_attn.q_proj.weight"] = np.zeros((32, 16), np.int32)
        values["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2)  # old files have it

    change.placing = placing("replicated")
    monkeypatch.setattr("gspmd_models.checkpoints.files.Files.read_into", None)  # nothing is read
    assert broken(tmp_path, change).faults == (
        "model.layers.0.self_attn.q_proj.weight has dtype I32, which is not supported; F32, F16, BF16 are.",
        "model.layers.1.mlp.up_proj.weight is missing; the model needs it, of shape (32, 16).",
        "model.norm.weight is missing; the model needs it, of shape (16,).",
        "lm_head.weight has shape (47, 16) in the checkpoint, but the model needs (48, 16).",
        "model.layers.2.mlp.up_proj.weight is in the checkpoint, but the model has no such tensor.",
    )


FAULTY = [
    ("model.embed_tokens.weight", (47, 3), np.nan),
    ("model.norm.weight", (5,), -np.inf),
    ("model.layers.1.self_attn.k_proj.weight", (7, 0), np.inf),
    ("model.layers.0.mlp.down_proj.weight", (15, 31), -np.nan),
    ("lm_head.weight", (0, 0), np.inf),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("preset", "padding", "options"),
    [
        ("replicated", {}, {"dtype": "float32"}),
        ("zero-3", {}, {"dtype": "bfloat16"}),
        ("megatron-1d", {"K": 4}, {"dtype": "bfloat16", "int8": True}),
    ],
)
def test_a_value_that_is_not_finite_is_an_error_that_names_its_tensor(
    dtype, preset, padding, options, placing, tmp_path
):
    values = {
        name: value.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for name, value in tensors().items()
    }
    for name, at, value in FAULTY:
        values[name][at] = value
    folder = write(tmp_path, values, files=2)
    with pytest.raises(CheckpointError) as error:
        load(folder, *placing(preset, padding), **options)
    assert str(error.value).startswith(f"cannot load LlamaForCausalLM from '{folder}':\n")
    assert set(error.value.faults) == {
        f"{name} has 1 of {values[name].size} values that are NaN or infinite; use an intact copy."
        for name, _, _ in FAULTY
    }


def test_a_value_that_only_the_dtype_makes_infinite_is_told_so(placing, tmp_path):
    values = tensors()
    values["model.layers.1.mlp.up_proj.weight"][3, 4] = -3.4e38
    values["model.norm.weight"][1] = 3.4e38  # norms are float32
    folder = write(tmp_path, values)
    with pytest.raises(CheckpointError) as error:
        load(folder, *placing("replicated"), "bfloat16")
    assert error.value.faults == (
        "model.layers.1.mlp.up_proj.weight has 3.4e+38, but bfloat16 holds at most 3.38953e+38; use another dtype.",
    )
    load(folder, *placing("replicated"), "float32")


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_weights_in_eight_bits_are_refused_by_their_dtype(kind, placing, tmp_path):
    """So that a NaN among them is never read as a number."""
    name = "model.layers.0.mlp.up_proj.weight"
    header, path = {}, tmp_path / "model.safetensors"
    write(tmp_path, tensors())
    for tensor, value in tensors().items():
        start = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        size, dtype = (value.size, kind) if tensor == name else (value.nbytes, "F32")
        header[tensor] = {"dtype": dtype, "shape": value.shape, "data_offsets": [start, start + size]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\xff" * (start + size))
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, *placing("replicated"), "float32")
    assert error.value.faults == (f"{name} has dtype {kind}, which is not supported; F32, F16, BF16 are.",)


def test_a_tied_model_may_have_its_table_twice_in_the_file(placing, tmp_path):
    values = tensors()
    values["lm_head.weight"] = values["model.embed_tokens.weight"]
    folder = write(tmp_path, values, files=2, tie_word_embeddings=True)
    model, report = load(folder, *placing("replicated"), "float32")
    assert "output.table" not in models.arrays(model)
    assert report.bytes_read == sum(x.nbytes for name, x in tensors().items() if name != "lm_head.weight")


def test_a_tied_model_with_two_different_tables_is_not_tied_and_says_so(placing, tmp_path):
    values = tensors()
    folder = write(tmp_path, values, tie_word_embeddings=True)
    assert not model_config(folder).tied
    model, report = load(folder, *placing("replicated"), "float32")
    np.testing.assert_array_equal(models.arrays(model)["output.table"], values["lm_head.weight"])
    np.testing.assert_array_equal(models.arrays(model)["embedding.table"], values["model.embed_tokens.weight"])
    assert str(report).endswith(
        "; lm_head.weight is not model.embed_tokens.weight, so the model is not tied, though config.json says it is "
        "(tie_word_embeddings)"
    )


@pytest.mark.parametrize("tied", [True, False])
def test_multipliers_of_a_granite_are_in_its_parameters(tied, placing, tmp_path):
    """Also if config.json calls the model tied, and its two tables differ."""
    values, multipliers = tensors(), {"embedding_multiplier": 6, "residual_multiplier": 0.5, "logits_scaling": 4.0}
    if tied:
        del values["lm_head.weight"]
    entries = {"architectures": ["GraniteForCausalLM"], "tie_word_embeddings": True, **multipliers}
    model, _ = load(write(tmp_path, values, **entries), *placing("replicated"), "float32")
    assert (model.config.tied, model.config.attention_scale) == (tied, 1.0)
    of_table = 6 if tied else 1
    factors = {"embedding.table": 6, "output.norm": 0.25 / of_table}
    factors |= {"blocks.0.attention.w_o": 0.5, "blocks.0.ffn.w_out": 0.5}
    wanted = expected(values | {"lm_head.weight": values["model.embed_tokens.weight"]} if tied else values)
    for path, value in models.arrays(model).items():
        np.testing.assert_allclose(value, wanted[path] * factors.get(path, 1), rtol=1e-6, err_msg=path)


def test_a_layout_that_the_model_does_not_divide_by_is_refused_before_anything_is_read(placing, tmp_path, monkeypatch):
    monkeypatch.setattr("gspmd_models.checkpoints.files.Files.read_into", None)
    folder = write(tmp_path, tensors())
    with pytest.raises(LayoutError, match="dimension K has size 2, which mesh axes y and z"):
        load(folder, *placing("megatron-1d"), "float32")


@pytest.mark.parametrize("axes", [{"x": 8}, {"y": 1}, {"x": 2, "data": 4}])
def test_a_mesh_without_an_axis_of_the_layout_is_named(axes, placing, make_mesh, tmp_path, monkeypatch):
    monkeypatch.setattr("gspmd_models.checkpoints.files.Files.read_into", None)
    folder, layout = write(tmp_path, tensors()), placing("weight-stationary-2d")[0]
    with pytest.raises(LayoutError, match=r"has no (mesh )?axis"):
        load(folder, layout, make_mesh(axes), "float32")
    with pytest.raises(ValueError, match="the mesh has no axis"):
        models.abstract(model_config(folder), layout, make_mesh(axes))


@pytest.mark.parametrize("preset", ["replicated", "weight-stationary-2d"])
def test_int8_weights_are_those_of_the_model_quantized_after_loading(preset, placing, tmp_path):
    folder = write(tmp_path, tensors("float16"))
    layout, mesh = placing(preset)
    model, report = load(folder, layout, mesh, "bfloat16", int8=True)
    with jax.set_mesh(mesh):
        wanted = models.quantize(load(folder, layout, mesh, "float32")[0])
    assert model.config == wanted.config
    for path, value in models.arrays(wanted).items():
        np.testing.assert_array_equal(np.asarray(models.arrays(model)[path]), np.asarray(value), err_msg=path)
        assert models.arrays(model)[path].sharding == value.sharding, path
    assert report.bytes_read == sum(value.nbytes for value in tensors("float16").values())


def test_a_dtype_that_models_do_not_compute_in_is_refused(placing, tmp_path):
    with pytest.raises(CheckpointError, match="int8"):
        load(write(tmp_path, tensors()), *placing("replicated"), "int8")
