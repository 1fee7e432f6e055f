"""Weights in four and eight bits: their values in any layout, beside transformers' own conversion."""

import json
import random

import numpy as np
import pytest
import safetensors.numpy

from gspmd.layouts import Layout
from gspmd_models.checkpoints import CheckpointError, load, model_config
from gspmd_models.checkpoints.files import Files
from gspmd_models.checkpoints.form import Form
from gspmd_models.transformer import arrays

OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 48, "hidden_size": 64,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 4, "max_position_embeddings": 64,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def codes(shape, rng):
    """Codes of four bits, two in a byte, and exponents that reach far up and down."""
    return rng.integers(0, 256, shape, np.uint8), rng.integers(110, 140, shape[:3], np.uint8)


def plain(blocks, scales):
    """The values [X, C, R] one by one, from the definition of the format (OCP Microscaling, section 5.3)."""
    found = np.empty((blocks.shape[0], blocks.shape[2] * 32, blocks.shape[1]))
    for x, row, group, byte in np.ndindex(*blocks.shape):
        for half, code in enumerate((blocks[x, row, group, byte] & 15, blocks[x, row, group, byte] >> 4)):
            exponent, fraction = int(code) >> 1 & 3, int(code) & 1
            size = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
            value = (-1) ** (int(code) >> 3) * size * 2.0 ** (int(scales[x, row, group]) - 127)
            found[x, group * 32 + 2 * byte + half, row] = value
    return found


@pytest.fixture
def oss(tmp_path):
    """A small gpt-oss as it is published, its plain tensors, and the values of its experts."""
    rng, tensors, values = np.random.default_rng(0), {}, {}
    E, F, X, H, K, D, V = 64, 32, 8, 4, 2, 8, 48
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj.weight": (H * D, E), "self_attn.k_proj.weight": (K * D, E),
            "self_attn.v_proj.weight": (K * D, E), "self_attn.o_proj.weight": (E, H * D),
            "self_attn.q_proj.bias": (H * D,), "self_attn.k_proj.bias": (K * D,), "self_attn.v_proj.bias": (K * D,),
            "self_attn.o_proj.bias": (E,), "self_attn.sinks": (H,), "input_layernorm.weight": (E,),
            "post_attention_layernorm.weight": (E,), "mlp.router.weight": (X, E), "mlp.router.bias": (X,),
            "mlp.experts.gate_up_proj_bias": (X, 2 * F), "mlp.experts.down_proj_bias": (X, E),
        }  # fmt: skip
        tensors |= {at + name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
        for name, shape in (("gate_up_proj", (X, 2 * F, E // 32, 16)), ("down_proj", (X, E, F // 32, 16))):
            blocks, scales = codes(shape, rng)
            tensors |= {f"{at}mlp.experts.{name}_blocks": blocks, f"{at}mlp.experts.{name}_scales": scales}
            values[f"{at}mlp.experts.{name}"] = plain(blocks, scales)
    ends = {"model.embed_tokens.weight": (V, E), "lm_head.weight": (V, E), "model.norm.weight": (E,)}
    tensors |= {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in ends.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(OSS | {"quantization_config": MXFP4}))
    return tmp_path, values


@pytest.mark.parametrize(("preset", "devices"), [("replicated", 1), ("weight-stationary-2d", 8), ("gshard", 8)])
def test_experts_of_four_bits_are_those_of_the_format(oss, preset, devices, make_mesh):
    folder, values = oss
    layout = Layout.load(preset)
    model, report = load(folder, layout, make_mesh(layout.mesh_for(devices)), "float32")
    held = arrays(model)
    for layer in range(2):
        place, at = ("0", layer) if "blocks.1.moe.w_in" not in held else (str(layer), 0)
        both = values[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        wanted = {"w_gate": both[..., ::2], "w_in": both[..., 1::2]}
        wanted["w_out"] = values[f"model.layers.{layer}.mlp.experts.down_proj"]
        for name, value in wanted.items():
            np.testing.assert_array_equal(np.asarray(held[f"blocks.{place}.moe.{name}"][at]), value, err_msg=name)
    assert report.bytes_read > 0


def test_four_bits_are_those_of_transformers(transformers):
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = codes((3, 8, 2, 16), np.random.default_rng(1))
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    np.testing.assert_array_equal(theirs.numpy(), plain(blocks, scales))


@pytest.mark.parametrize("number", range(12))
def test_eight_bits_in_blocks_are_codes_times_the_scale_of_their_block(tmp_path, number):
    """Any region of a tensor whose sizes no block divides, beside the whole of it in numpy."""
    import jax.numpy as jnp

    draw, rng = random.Random(number), np.random.default_rng(number)
    rows, columns = draw.randint(1, 400), draw.randint(1, 300)
    values = rng.normal(0, 100, (rows, columns)).astype(jnp.float8_e4m3fn)
    scales = rng.uniform(0.001, 3, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:rows, :columns] * values.astype(np.float32)
    header = {
        "w": {"dtype": "F8_E4M3", "shape": [rows, columns], "data_offsets": [0, values.size]},
        "w_scale_inv": {
            "dtype": "F32", "shape": [*scales.shape], "data_offsets": [values.size, values.size + scales.nbytes]
        },
    }  # fmt: skip
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + values.tobytes() + scales.tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    begin = [draw.randrange(size) for size in (rows, columns)]
    end = [draw.randint(at + 1, size) for at, size in zip(begin, (rows, columns))]
    out = np.empty([b - a for a, b in zip(begin, end)], np.float32)
    with Files(tmp_path) as files:
        assert files.tensors["w"].shape == (rows, columns)
        assert "w_scale_inv" not in files.tensors
        form = Form.whole((rows, columns))
        files.read_into(out, "w", form, [slice(a, b) for a, b in zip(begin, end)])
    np.testing.assert_array_equal(out, wide[begin[0] : end[0], begin[1] : end[1]])


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            "a quantization of weights that is not supported",
        ),
        ({"quant_method": "fp8"}, "a quantization of weights that is not supported"),
        ({"quant_method": "gptq"}, "a quantization of weights that is not supported"),
    ],
)
def test_other_forms_are_refused(tmp_path, entries, words):
    (tmp_path / "config.json").write_text(json.dumps(OSS | {"quantization_config": entries}))
    with pytest.raises(CheckpointError, match=words):
        model_config(tmp_path)


def test_rows_of_a_region_hold_all_of_it():
    for number in range(200):
        draw = random.Random(number)
        sizes = {letter: draw.randint(1, 4) for letter in "XKQDFE"}
        dims = draw.choice(["XFE", "(XF)E", "X(F|F)E", "(K(QD|D|D))E", "(F|F)E", "E(F(1|1))", "XE(F(1|1))", "1E"])
        part = draw.randrange(1 + dims.count("|"))
        form = Form.of(dims, part, sizes)
        numbers = np.arange(np.prod(form.shape)).reshape(form.shape)
        region = []
        for size in form.split:
            first = draw.randrange(size)
            region.append(slice(first, draw.randint(first + 1, size)))
        rows = {int(n) // max(1, numbers[0].size) for n in form.view(numbers)[tuple(region)].ravel()}
        first, last = form.rows(region)
        assert rows <= {*range(first, last)}, (number, dims)
