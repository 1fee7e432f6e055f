"""Tensors that hold several parameters: each is read from its own bytes, and written back into one tensor."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file

import gspmd_models as models
from gspmd_models.checkpoints import CheckpointError, load, save
from gspmd_models.checkpoints.families.family import Stored, fused
from gspmd_models.checkpoints.families.serial import LAYER, LLAMA
from gspmd_models.checkpoints.form import Form
from gspmd_models.parameters import pad, parameters
from tests.models.checkpoints.small import tensors, write
from tests.models.checkpoints.test_loading import expected

QKV = ("attention.w_q", "attention.w_k", "attention.w_v")
QKV_NAME, GATE_UP_NAME = f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.gate_up_proj.weight"
GATE_UP = ("ffn.w_gate", "ffn.w_in")

#: Name to the forms of both tensors, and how numpy makes them: of q [H, D, E], k, v [K, D, E], gate and up [F, E].
FORMS = {
    "in turn": (
        ("(HD|KD|KD)E", lambda q, k, v: np.concatenate([q, k, v]).reshape(-1, q.shape[-1])),
        ("(F|F)E", lambda gate, up: np.concatenate([gate, up])),
    ),
    "by group": (
        (
            "(K(QD|D|D))E",
            lambda q, k, v: np.concatenate(
                [q.reshape(k.shape[0], -1, *k.shape[1:]), k[:, None], v[:, None]], axis=1
            ).reshape(-1, q.shape[-1]),
        ),
        ("(F(1|1))E", lambda gate, up: np.stack([gate, up], axis=1).reshape(-1, gate.shape[1])),
    ),
    "transposed": (
        ("E(HD|KD|KD)", lambda q, k, v: np.concatenate([q, k, v]).reshape(-1, q.shape[-1]).T),
        ("E(F(1|1))", lambda gate, up: np.stack([gate, up], axis=1).reshape(-1, gate.shape[1]).T),
    ),
}


@pytest.fixture
def fused_llama(monkeypatch, tmp_path):
    """A function (name of a form, sizes) -> (the folder of a Llama with fused tensors, its plain and fused tensors)."""

    def make(name: str, **sizes: int):
        (qkv, join), (gate_up, stack) = FORMS[name]
        rows = fused(QKV_NAME, qkv, *QKV) | fused(GATE_UP_NAME, gate_up, *GATE_UP)
        family = dataclasses.replace(LLAMA, tensors={**LLAMA.tensors, **rows})
        monkeypatch.setattr("gspmd_models.checkpoints.config.FAMILIES", (family,))
        values = tensors("float16", **sizes)
        held = dict(values)
        for number in range(2):
            layer = f"model.layers.{number}"
            taken = lambda part, layer=layer: held.pop(f"{layer}.{part}_proj.weight")  # noqa: E731
            q, k, v = (taken(f"self_attn.{each}") for each in "qkv")
            in_heads = [each.reshape(-1, sizes["head_dim"], each.shape[1]) for each in (q, k, v)]
            held[QKV_NAME.format(N=number)] = np.ascontiguousarray(join(*in_heads))
            held[GATE_UP_NAME.format(N=number)] = np.ascontiguousarray(stack(taken("mlp.gate"), taken("mlp.up")))
        return write(tmp_path, held, files=2, **sizes), values, held

    return make


CASES = [
    ("replicated", {}, {"H": 6, "K": 3, "D": 2, "E": 10, "F": 7}),
    ("weight-stationary-2d", {}, {"H": 8, "K": 2, "D": 4, "E": 24, "F": 32}),
    ("weight-stationary-2d", {}, {"H": 12, "K": 3, "D": 4, "E": 16, "F": 32}),  # devices begin within a group of heads
    ("weight-stationary-2d", {"H": 12, "F": 48}, {"H": 9, "K": 3, "D": 12, "E": 16, "F": 36}),
    ("megatron-1d", {"K": 4, "F": 4}, {"H": 6, "K": 3, "D": 4, "E": 16, "F": 22}),
    ("megatron-1d", {"K": 4}, {"H": 3, "K": 3, "D": 6, "E": 8, "F": 24}),
    ("zero-3", {}, {"H": 8, "K": 8, "D": 4, "E": 24, "F": 16}),
]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("preset", "padding", "at"), CASES)
def test_parts_are_read_byte_by_byte_and_written_back(name, preset, padding, at, fused_llama, placing, tmp_path):
    sizes = {"num_attention_heads": at["H"], "num_key_value_heads": at["K"], "head_dim": at["D"]}
    sizes |= {"hidden_size": at["E"], "intermediate_size": at["F"]}
    folder, values, held = fused_llama(name, **sizes)
    layout, mesh = placing(preset, padding)
    model, report = load(folder, layout, mesh, "float32")
    rows = parameters(model.config, layout)
    for path, value in expected(values, at["E"], at["D"]).items():
        placed = np.asarray(pad(value.astype(np.float32), rows[path].padding))
        np.testing.assert_array_equal(np.asarray(models.arrays(model)[path]), placed, err_msg=path)
    assert report.tensors == len(held) < len(values)
    assert report.bytes_read == sum(value.nbytes for value in held.values())
    save(model, tmp_path / "out", dtype="float16", file_bytes=2000)
    back = {name: value for file in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(file).items()}
    assert back.keys() == held.keys()
    for name, value in held.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def test_random_forms_are_those_of_numpy():
    draw = np.random.default_rng(0)
    for _ in range(200):
        sizes = {letter: int(draw.integers(1, 6)) for letter in "HKQDEFX"}
        K, Q, D, E, F, X = (sizes[letter] for letter in "KQDEFX")
        parts = [draw.normal(size=(K, Q, D, E)), *draw.normal(size=(2, K, 1, D, E))]
        tensor = np.concatenate(parts, axis=1).reshape(-1, E)
        for part, value in enumerate(parts):
            form = Form.of("(K(QD|D|D))E", part, sizes)
            assert form.shape == tensor.shape
            np.testing.assert_array_equal(form.view(tensor), value if part == 0 else value[:, 0])
            assert np.shares_memory(form.view(tensor), tensor)
        both = draw.normal(size=(2, X, E, F))
        for dims, tensor in {
            "X(F|F)E": np.concatenate(both.swapaxes(2, 3), axis=1),
            "XE(F(1|1))": np.stack(both, axis=-1).reshape(X, E, 2 * F),
            "(F|F)XE": np.concatenate(both.transpose(0, 3, 1, 2)),
        }.items():
            for part, value in enumerate(both):
                form = Form.of(dims, part, sizes)
                order = ["XEF".index(dim) for dim in form.dims]
                assert form.shape == tensor.shape
                np.testing.assert_array_equal(form.view(tensor), value.transpose(order))


def test_a_fused_tensor_is_missing_or_misshapen_once(fused_llama, placing):
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2, "hidden_size": 10}
    folder, _, held = fused_llama("in turn", **sizes)
    first, second = (QKV_NAME.format(N=number) for number in range(2))
    del held[first]
    held[second] = held[second][:-1]
    with pytest.raises(CheckpointError) as error:
        load(write(folder, held, files=2, **sizes), *placing("replicated"), "float32")
    assert error.value.faults == (
        f"{first} is missing; the model needs it, of shape (24, 10).",
        f"{second} has shape (23, 10) in the checkpoint, but the model needs (24, 10).",
    )


def test_values_that_are_not_finite_are_counted_over_all_parts(fused_llama, placing, tmp_path):
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2, "hidden_size": 10}
    folder, _, held = fused_llama("by group", **sizes)
    name = QKV_NAME.format(N=1)
    held[name][[0, 5, 23], [1, 2, 3]] = np.nan
    with pytest.raises(CheckpointError) as error:
        load(write(folder, held, files=2, **sizes), *placing("replicated"), "float32")
    assert error.value.faults == (f"{name} has 3 of 240 values that are NaN or infinite; use an intact copy.",)


def test_a_row_says_its_part():
    assert fused("a", "(F|F)E", "ffn.w_gate", "ffn.w_in") == {
        "ffn.w_gate": Stored("a", "(F|F)E"),
        "ffn.w_in": Stored("a", "(F|F)E", part=1),
    }
