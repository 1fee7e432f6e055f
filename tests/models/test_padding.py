"""Dimensions that a layout pads: the same model, wherever the padding stands and whatever it holds."""

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.layouts.initial import Normal
from gspmd.moe import MoEConfig
from gspmd_models.parameters import _compiled, pad, parameters
from gspmd_models.step import OptimizerConfig, initial_state, training_step
from tests.models.conftest import put

ODD = {"layers": 1, "heads": 6, "kv_heads": 3, "feed_forward": 20, "vocabulary": 60, "remat": False}
CASES = [
    # K grows to 4 and H with it; the two query heads of each key/value head stay together
    ("megatron-1d", {"H": 4, "K": 4, "F": 8, "V": 8}, {"ffn_bias": True, "qkv_bias": True}, "blocking", "explicit"),
    # one key/value head, three query heads more; tables are padded too
    ("weight-stationary-2d", {"H": 8, "F": 8, "V": 8}, {"kv_heads": 1, "block": "parallel"}, "xla", "explicit"),
]
EXPERTS = {"layers": 2, "ffn_bias": True, "moe": MoEConfig(experts=4, shared=1)}
MORE = [
    # every key/value head gets a third query head that is none
    ("megatron-1d", {"H": 9, "F": 9, "V": 9}, {"tied": False, "activation": "gelu"}, "blocking", "auto"),
    ("megatron-1d", CASES[0][1], EXPERTS, "blocking", "auto"),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
MESH = {"megatron-1d": {"x": 2, "y": 4, "z": 1}, "weight-stationary-2d": {"x": 2, "y": 2, "z": 2}}


def gather(padded: np.ndarray, row) -> np.ndarray:
    """The real entries of a padded parameter."""
    for at, each in enumerate(row.padding):
        if each:
            padded = np.take(padded, np.flatnonzero(each.origins >= 0), axis=at)
    return padded


@pytest.mark.turns(1)
@pytest.mark.parametrize(("preset", "padding", "changes", "lowering", "kind"), CASES)
def test_padding_has_no_effect_on_values_and_gets_no_gradient(
    config, make_mesh, tokens, preset, padding, changes, lowering, kind
):
    """Loss, logits and gradients are those without padding, even where the padding is not 0."""
    settings, mesh = config(**(ODD | changes)), MESH[preset]
    if padding.get("H") == 9:
        mesh = {"x": 2, "y": 1, "z": 3}
    layout = Layout.load(preset).override({f"padding.{dim}": size for dim, size in padding.items()})
    layout.check(settings.sizes(8, 16), mesh)
    found = []
    whole, alone = Layout.load("replicated"), {"x": 1, "y": 1, "z": 1}
    rows, drawn = parameters(settings, layout), None
    for at, on, under in ((whole, alone, "blocking"), (layout, mesh, lowering)):
        placed = make_mesh(on, kind)
        model = models.build(settings, at, placed, jax.random.key(0))
        values = {path: np.asarray(value) for path, value in models.arrays(model).items()}
        if drawn is None:
            drawn = values
        for path in values if at is layout else ():
            # Normal numbers near 0 are rounded as the uniform ones that they are made of, which have absolute errors.
            got, close = gather(values[path], rows[path]), 1e-7 * np.abs(drawn[path]).max()
            np.testing.assert_allclose(got, drawn[path], rtol=1e-6, atol=close, err_msg=path)
            assert values[path].shape == rows[path].shape
            is_real = pad(np.ones(rows[path].real_shape, bool), rows[path].padding)
            assert not np.any(values[path][~is_real])
            values[path] = np.where(is_real, values[path], 0.7)
        places = {path: value.sharding for path, value in models.arrays(model).items()}
        with jax.set_mesh(placed), gspmd.lowering(under):
            ids = put(tokens % 60, at, placed)
            run = jax.value_and_grad(lambda values, ids, m=model: models.loss(models.with_arrays(m, values), ids)[0])
            found.append(jax.jit(run)(jax.device_put(values, places), ids))
    (wanted, wanted_gradients), (loss, gradients) = found
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for path, gradient in gradients.items():
        gradient = np.asarray(gradient)
        is_real = np.asarray(pad(np.ones(rows[path].real_shape, bool), rows[path].padding))
        np.testing.assert_allclose(
            gather(gradient, rows[path]), wanted_gradients[path], rtol=2e-3, atol=2e-5, err_msg=path
        )
        assert not np.any(gradient[~is_real]), path


def test_training_leaves_padding_at_zero(config, make_mesh, tokens):
    settings = config(**ODD)
    layout = Layout.load("megatron-1d").override({"padding.H": "4", "padding.K": 4, "padding.F": 8, "padding.V": 8})
    mesh = make_mesh({"x": 2, "y": 4, "z": 1})
    optimizer = OptimizerConfig(weight_decay=0.1)
    with jax.set_mesh(mesh):
        model = models.build(settings, layout, mesh, jax.random.key(0))
        state = initial_state(model, optimizer, 10, mesh)
        step = jax.jit(training_step(model, optimizer, 10))
        for _ in range(2):
            state, _ = step(state, put(tokens % 60, layout, mesh), jax.random.key(1))
    for path, row in parameters(settings, layout).items():
        is_real = np.asarray(pad(np.ones(row.real_shape, bool), row.padding))
        value = np.asarray(state.params[path])
        assert not np.any(value[~is_real]), path
        assert np.any(value[is_real]), path


def test_drawing_a_padded_matrix_never_holds_the_whole(make_mesh):
    with jax.set_mesh(make_mesh({"x": 8})):
        padding = parameters(
            models.ModelConfig(vocabulary=1000, embed=2048), Layout.load("replicated").override({"padding.V": 1024})
        )["embedding.table"].padding
        drawer = _compiled(Normal(1.0), (1000, 2048), jax.P("x", None), False, padding)
        memory = drawer.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.output_size_in_bytes == 1024 * 2048 * 4 // 8
    assert memory.temp_size_in_bytes < 5 * memory.output_size_in_bytes
