"""Dimensions that a layout pads: the same model, wherever the padding stands and whatever it holds."""

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd import ops
from gspmd.layouts import Layout
from gspmd.layouts.distributions import Normal
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
OTHERS = [
    # every key/value head gets a third query head that is none
    ("megatron-1d", {"H": 9, "F": 9, "V": 9}, {"tied": False, "activation": "gelu"}, "blocking", "auto"),
    ("megatron-1d", CASES[0][1], EXPERTS, "blocking", "auto"),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS]
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
    has_no_effect(settings, layout, mesh, lowering, kind, make_mesh, tokens)


# Key/value heads that are whole on every device, and those that only y shards.
WHOLE = {"attention.w_k": "EKD", "attention.w_v": "EKD", "attention.key": "B_xLKD"}
SPLIT = {"attention.w_k": "EK_yD", "attention.w_v": "EK_yD", "attention.key": "B_xLK_yD"}
GROUPS = [
    # 7, 7 and 6 query heads of each key/value head become 8, and a device has heads of one group only
    (14, 2, "megatron-1d", {"x": 1, "y": 8, "z": 1}, {"padding.H": 16, **WHOLE}),
    (28, 4, "megatron-1d", {"x": 1, "y": 4, "z": 2}, {"padding.H": 32, **SPLIT}),
    (12, 2, "megatron-1d", {"x": 1, "y": 2, "z": 4}, {"padding.H": 16, **SPLIT}),
    (12, 2, "megatron-1d", {"x": 1, "y": 8, "z": 1}, {"padding.K": 8}),  # six key/value heads that are none
    (14, 2, "weight-stationary-2d", {"x": 2, "y": 2, "z": 2}, {"padding.H": 16}),
    (28, 4, "zero-3", {"x": 2, "y": 2, "z": 2}, {}),
]


@pytest.mark.turns(1)
@pytest.mark.parametrize(("heads", "kv_heads", "preset", "mesh", "lines"), GROUPS)
def test_heads_are_padded_within_their_group(heads, kv_heads, preset, mesh, lines, config, make_mesh, tokens):
    """Pad 14 query and 2 key/value heads, 28 and 4, and 12 and 2 for 8 devices, with a vocabulary of 257."""
    settings = config(heads=heads, kv_heads=kv_heads, layers=1, remat=False, vocabulary=257, qkv_bias=True)
    layout = Layout.load(preset).override({"padding.V": 8} | lines)
    has_no_effect(settings, layout, mesh, "blocking", "explicit", make_mesh, tokens)
    wide, real = layout.padded(settings.sizes(8, 16)), settings.sizes(8, 16)
    assert wide["H"] // wide["K"] >= real["H"] // real["K"]
    row = parameters(settings, layout)["blocks.0.attention.w_q"]
    if each := row.padding[2]:
        groups = np.where(each.origins >= 0, each.origins // (heads // kv_heads), -1)
        assert (groups == np.where(groups >= 0, np.arange(each.size) * wide["K"] // wide["H"], -1)).all()


def has_no_effect(settings, layout, mesh, lowering, kind, make_mesh, tokens):
    """Compare loss, gradients and initial values with those of one device without padding."""
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
            ids = put(tokens % settings.vocabulary, at, placed)
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


def test_int8_weights_are_those_without_padding(config, make_mesh):
    """Also where only the padding makes a channel wider than those for which a scale of least error is searched."""
    settings = config(heads=14, kv_heads=2, head_size=18, layers=1, vocabulary=257, feed_forward=252)
    found = {}
    for name, changes, sizes in (
        ("replicated", {}, {"x": 1, "y": 1, "z": 1}),
        ("megatron-1d", {"padding.H": 16, "padding.V": 8, "padding.F": 64} | SPLIT, {"x": 1, "y": 2, "z": 4}),
    ):
        layout = Layout.load(name).override(changes)
        model = models.quantize(models.build(settings, layout, make_mesh(sizes), jax.random.key(0)))
        rows = parameters(model.config, layout)
        found[name] = {path: gather(np.asarray(x), rows[path]) for path, x in models.arrays(model).items()}
    assert found["replicated"]["blocks.0.attention.w_o"].dtype == np.int8
    for path, wanted in found["replicated"].items():
        np.testing.assert_allclose(found["megatron-1d"][path], wanted, rtol=1e-6, atol=1e-9, err_msg=path)


FILTERS = [{}, {"temperature": 100.0}, {"temperature": 1e-3}, {"temperature": 0}, {"top_k": 264}, {"min_p": 1e-9}]
MORE = [{"top_p": 0.999999}, {"top_k": 260, "top_p": 0.99, "min_p": 1e-9, "temperature": 3.0}]


@pytest.mark.parametrize("settings", [*FILTERS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
def test_ten_thousand_draws_give_no_token_of_the_padding(settings, make_mesh):
    """A vocabulary of 257 over 8 devices whose logits are all negative, down to those that a model cannot have."""
    count, rng = 10_000, np.random.default_rng(0)
    real = -rng.exponential(np.float32([1, 50, 1e4, 1e20, 1e28])[np.arange(count) % 5, None], (count, 257))
    logits = np.full((count, 264), -1e30, np.float32)
    logits[:, :257] = real
    with jax.set_mesh(make_mesh({"x": 8})):
        placed = gspmd.annotate(logits, "BV_x")
        rows = np.arange(count)
        drawn = jax.jit(lambda x: ops.sample(x, "BV_x", "V", seeds=rows, positions=rows * 0, **settings))(placed)
    drawn = np.asarray(drawn)
    assert drawn.min() >= 0
    assert drawn.max() < 257
    if settings.get("temperature") == 0:
        np.testing.assert_array_equal(drawn, np.argmax(logits[:, :257], axis=1))
    elif settings == {"temperature": 100.0}:  # nearly even in a fifth of the rows, whose last device has one real token
        assert 1 <= np.sum(drawn[::5] == 256) <= 25


def test_drawing_a_padded_matrix_never_holds_the_whole(make_mesh):
    with jax.set_mesh(make_mesh({"x": 8})):
        padding = parameters(
            models.ModelConfig(vocabulary=1000, embed=2048), Layout.load("replicated").override({"padding.V": 1024})
        )["embedding.table"].padding
        drawer = _compiled(Normal(1.0), (1000, 2048), jax.P("x", None), False, padding)
        memory = drawer.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.output_size_in_bytes == 1024 * 2048 * 4 // 8
    assert memory.temp_size_in_bytes < 5 * memory.output_size_in_bytes
