"""The models of examples/: one loss curve in every layout, and what is planned is what is compiled."""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import gspmd
from gspmd.training import OptimizerConfig
from gspmd.training.model import Own
from gspmd.training.state import shardings
from gspmd.training.step import Update, abstract_program, building, jit_step
from tests.house import ROOT

EXAMPLES, STEPS, BATCH, LENGTH = ROOT / "examples", 12, 16, 16
OPTIMIZER = OptimizerConfig(learning_rate=3e-3)


def _module(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODELS = {
    "recurrence": _module("recurrence").Recurrence(embed=16, channels=32, layers=2),
    "classifier": _module("classifier").Classifier(embed=16, heads=8, head_size=4, feed_forward=32, layers=2),
}
PLAIN = _module("plain_nnx")
WEIGHTS = {
    "recurrence": {
        "embedding.table": "VE", "recurrence.w_candidate": "EF", "recurrence.w_forget": "EF",
        "recurrence.w_gate": "EF", "recurrence.w_out": "FE", "recurrence.b_forget": "F",
    },
    "classifier": {
        "embedding.table": "VE", "encoder.w_q": "EHD", "encoder.w_k": "EHD", "encoder.w_v": "EHD",
        "encoder.w_o": "HDE", "encoder.w_in": "EF", "encoder.w_out": "FE", "encoder.b_in": "F",
    },
}  # fmt: skip
WHOLE = {
    "recurrence": {"recurrence.hidden": "B_xyLF", "recurrence.stream": "B_xyLE", "output.logits": "B_xyLV"},
    "classifier": {
        "encoder.heads": "B_xyLHD", "encoder.hidden": "B_xyLF", "encoder.stream": "B_xyLE", "head.pooled": "B_xyE",
        "head.logits": "B_xyY",
    },
}  # fmt: skip
SPREAD = {
    "recurrence": {
        "recurrence.stream": "BLE_x", "recurrence.norm": "E_x", "recurrence.w_candidate": "E_xF_y",
        "recurrence.w_forget": "E_xF_y", "recurrence.w_gate": "E_xF_y", "recurrence.hidden": "BLF_y",
        "recurrence.w_out": "F_yE_x", "output.norm": "E_x", "output.logits": "BLV_y", "embedding.table": "V_yE_x",
    },
    "classifier": {
        "encoder.stream": "BLE_x", "encoder.norm": "E_x", "encoder.norm_bias": "E_x", "encoder.w_q": "E_xH_yD",
        "encoder.w_k": "E_xH_yD", "encoder.w_v": "E_xH_yD", "encoder.heads": "BLH_yD", "encoder.w_o": "H_yDE_x",
        "encoder.w_in": "E_xF_y", "encoder.hidden": "BLF_y", "encoder.w_out": "F_yE_x", "head.pooled": "BE_x",
        "head.w": "E_xY", "head.logits": "BY",
    },
}  # fmt: skip


def data_parallel(name):
    """The batch over both mesh axes, weights whole."""
    return {"embedding.tokens": "B_xyL", **WHOLE[name], **WEIGHTS[name]}


def fully_sharded(name):
    """Return data parallelism with every weight over all devices, gathered where it is used (ZeRO-3)."""
    return data_parallel(name) | {key: f"{dims[0]}_xy{dims[1:]}" for key, dims in WEIGHTS[name].items()}


def partial_gradients(name):
    """Return data parallelism whose gradients stay partial sums until the sharded optimizer (ZeRO-2)."""
    matrices = {key: dims for key, dims in WEIGHTS[name].items() if len(dims) > 1}
    gradients = {f"gradients.{key}": f"{dims} partialsum-xy" for key, dims in matrices.items()}
    return data_parallel(name) | gradients | {f"optimizer.{key}": f"{d[0]}_xy{d[1:]}" for key, d in matrices.items()}


def spread(name):
    """Weights over two dimensions and activations over E: the 2D weight-stationary layout."""
    return {"embedding.tokens": "BL", **SPREAD[name]}


LAYOUTS = {
    "as-the-file": ({"x": 4, "y": 2}, lambda name: {}, {}, "explicit"),
    "data-parallel": ({"x": 4, "y": 2}, data_parallel, {}, "auto"),
    "fully-sharded": ({"x": 4, "y": 2}, fully_sharded, {}, "explicit"),
    "partial-gradients": ({"x": 2, "y": 2}, partial_gradients, {"microbatches": 2}, "explicit"),
    "spread": ({"x": 2, "y": 4}, spread, {}, "explicit"),
    "tensor-parallel": ({"x": 1, "y": 8}, lambda name: {}, {"microbatches": 4}, "auto"),
}


def _layout(name, overrides, mesh, subject):
    layout = gspmd.Layout.load(EXAMPLES / f"{name}.toml").override(overrides)
    subject.check(layout, mesh, BATCH, LENGTH)
    return layout


def _curve(name, case, make_mesh):
    """Return the losses of some updates, of an evaluation, and what was compiled and planned."""
    shape, overrides, more, kind = case
    subject, update, mesh = Own(MODELS[name]), Update(OPTIMIZER, STEPS, **more), make_mesh(shape, kind)
    layout = _layout(name, overrides(name), mesh, subject)
    rng, losses = np.random.default_rng(0), []
    with jax.set_mesh(mesh):
        step, *arguments = abstract_program(subject, update, BATCH, LENGTH)(layout, mesh)
        made = jit_step(step, arguments[0])
        plan, compiled = gspmd.trace(made, *arguments), made.lower(*arguments).compile()
        values = subject.initial(layout, mesh, jax.random.key(0))
        state = building.initial_state(subject, layout, values, update, mesh)
        for _ in range(STEPS):
            tokens = np.cumsum(rng.choice([1, 5, 40], size=(BATCH, LENGTH + 1)), axis=1).astype(np.int32) % 256
            tokens = jax.device_put(tokens, shardings(subject.batch_spec(layout), mesh))
            key = jax.device_put(jax.random.key(1), arguments[2].sharding)
            state, figures = compiled(state, tokens, key)
            losses.append(float(figures["loss"]))
        losses.append(float(jax.jit(building.evaluation_step(subject, layout))(state.params, tokens)))
    return np.array(losses), gspmd.ledger(compiled).compare(plan)


@pytest.fixture(scope="module")
def alone():
    """Return the losses of the models on one device, computed once."""
    found = {}

    def of(name, make_mesh):
        if name not in found:
            found[name] = _curve(name, ({"x": 1, "y": 1}, lambda name: {}, {}, "explicit"), make_mesh)[0]
        return found[name]

    return of


@pytest.mark.turns(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", LAYOUTS)
def test_a_layout_never_changes_a_loss_curve(alone, make_mesh, name, case):
    losses, comparison = _curve(name, LAYOUTS[case], make_mesh)
    np.testing.assert_allclose(losses, alone(name, make_mesh), rtol=1e-4)
    assert losses[-2] < losses[0] - 0.1
    if LAYOUTS[case][3] == "explicit":
        assert comparison.agrees, str(comparison)


PLAIN_LAYOUTS = {
    "as-the-file": ({"x": 4, "y": 2}, {}),
    "data-parallel": ({"x": 8, "y": 1}, {}),
    "tensor-parallel": ({"x": 1, "y": 8}, {}),
    "fully-sharded": (
        {"x": 4, "y": 2},
        {"student.w_in": "E_xF_y", "student.w_out": "F_yE_x", "student.w_first": "I_xE", "student.w_last": "E_xO"},
    ),
    "spread": (
        {"x": 2, "y": 4},
        {"student.inputs": "BI_x", "student.stream": "BE_x", "student.norm": "E_x", "student.w_in": "E_xF_y",
         "student.hidden": "BF_y", "student.w_out": "F_yE_x", "student.w_first": "I_xE", "student.w_last": "E_xO",
         "student.outputs": "BO"},
    ),
}  # fmt: skip


def _plain(make_mesh, shape, overrides):
    mesh, layout = make_mesh(shape), gspmd.Layout.load(EXAMPLES / "plain_nnx.toml").override(overrides)
    layout.check(PLAIN.SIZES, shape)
    losses = []
    with jax.set_mesh(mesh):
        step, arguments = PLAIN.begin(layout)
        plan, compiled = gspmd.trace(step, *arguments), jax.jit(step).lower(*arguments).compile()
        params, state, *_ = arguments
        for number in range(STEPS):
            params, state, value = jax.jit(step)(params, state, *PLAIN.batch(layout.section("student"), number))
            losses.append(float(value))
    return np.array(losses), gspmd.ledger(compiled).compare(plan)


@pytest.mark.turns(1)
@pytest.mark.parametrize("case", PLAIN_LAYOUTS)
def test_plain_modules_have_one_loss_curve_too(make_mesh, case):
    losses, comparison = _plain(make_mesh, *PLAIN_LAYOUTS[case])
    alone, _ = _plain(make_mesh, {"x": 1, "y": 1}, {})
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    assert losses[-1] < losses[0]
    assert comparison.agrees, str(comparison)


def test_examples_say_how_they_are_run():
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/{path.stem}" in path.read_text().split('"""')[1]
        assert (EXAMPLES / Path(path.stem).with_suffix(".toml")).exists()
