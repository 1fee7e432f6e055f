import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from tests.models import plain
from tests.models.conftest import put

pytestmark = pytest.mark.usefixtures("every_schedule")

VARIANTS = [
    ({}, "megatron-1d", "blocking", "explicit"),
    ({"block": "parallel", "kv_heads": 1}, "weight-stationary-2d", "blocking", "explicit"),
    ({"block": "parallel", "activation": "gelu"}, "weight-gathered-x", "blocking", "auto"),
    ({"tied": False, "activation": "relu", "remat": False}, "zero-3", "xla", "explicit"),
    ({}, "weight-stationary-2d", "looped", "explicit"),
    ({"block": "parallel", "kv_heads": 1}, "weight-gathered-xyz", "looped:paired", "auto"),
    ({"tied": False}, "zero-3", "looped:halves", "explicit"),
    ({"block": "parallel", "activation": "gelu", "remat": False}, "weight-stationary-1d", "looped:one-way", "explicit"),
]


@pytest.mark.turns(1)
@pytest.mark.parametrize(("changes", "preset", "lowering", "kind"), VARIANTS)
def test_loss_and_gradients_are_those_of_plain_code(
    config, one_device, placed, make_mesh, tokens, changes, preset, lowering, kind
):
    settings, layout = config(**changes), Layout.load(preset)
    mesh = make_mesh(layout.mesh_for(8), kind)
    fresh = one_device(settings)
    model = placed(fresh, layout, mesh)
    host = {path: jnp.asarray(np.asarray(value)) for path, value in models.arrays(fresh).items()}
    by_hand = jax.jit(jax.value_and_grad(lambda values: plain.loss(settings, values, jnp.asarray(tokens))))
    wanted, wanted_gradients = by_hand(host)
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        run = jax.jit(jax.value_and_grad(lambda values, ids: models.loss(models.with_arrays(model, values), ids)[0]))
        arguments = models.arrays(model), put(tokens, layout, mesh)
        program = run.lower(*arguments).compile()
        found, gradients = program(*arguments)
    assert lowering in ("blocking", "xla") or " collective-permute(" in program.as_text(), "nothing is looped"
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(np.asarray(gradient), wanted_gradients[path], rtol=2e-3, atol=2e-5, err_msg=path)
        assert kind == "auto" or gradient.sharding == models.arrays(model)[path].sharding, path


@pytest.mark.slow
def test_bfloat16_computes_near_float32_and_keeps_parameters_wide(config, make_mesh, tokens):
    layout = Layout.load("weight-stationary-2d")
    mesh = make_mesh(layout.mesh_for(8))
    losses = []
    for dtype in ("float32", "bfloat16"):
        model = models.build(config(moe=MoEConfig()), layout, mesh, jax.random.key(0), dtype)
        assert {value.dtype for value in models.arrays(model).values()} == {jnp.dtype("float32")}
        with jax.set_mesh(mesh):
            losses.append(jax.jit(lambda ids, m=model: models.loss(m, ids, train=False)[0])(put(tokens, layout, mesh)))
    assert losses[1].dtype == jnp.float32
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-2)


@pytest.mark.turns(1)
@pytest.mark.parametrize("changes", [{}, {"embed": 128, "vocabulary": 256}, {"block": "parallel"}])
def test_a_tied_model_begins_with_a_uniform_guess(config, one_device, tokens, changes):
    model = one_device(config(**changes))
    with jax.set_mesh(jax.make_mesh((1, 1, 1), ("x", "y", "z"))):
        ids = put(tokens, model.layout, jax.sharding.get_mesh())
        value = jax.jit(lambda ids: models.loss(model, ids, train=False)[0])(ids)
    assert abs(value - np.log(model.config.vocabulary)) < 0.1


@pytest.mark.turns(1)
@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_pad_the_tables_change_nothing(config, make_mesh, tokens, tied):
    """Neither the loss nor the gradients, and the padding's own gradient is zero."""
    layout, mesh = Layout.load("weight-stationary-2d"), make_mesh({"x": 2, "y": 2, "z": 2})
    padded = models.build(config(vocabulary=60, vocabulary_multiple=16, tied=tied), layout, mesh, jax.random.key(0))
    whole, alone = Layout.load("replicated"), make_mesh({"x": 1, "y": 1, "z": 1})
    cut = {path: np.asarray(value) for path, value in models.arrays(padded).items()}
    cut |= {path: value[:60] for path, value in cut.items() if path.endswith("table")}
    exact = models.build(config(vocabulary=60, tied=tied), whole, alone, jax.random.key(0))
    found = []
    for model, values, on in ((padded, models.arrays(padded), mesh), (exact, cut, alone)):
        with jax.set_mesh(on):
            run = jax.value_and_grad(lambda values, ids, m=model: models.loss(models.with_arrays(m, values), ids)[0])
            ids = put(tokens % 60, model.layout, on)
            places = {path: value.sharding for path, value in models.arrays(model).items()}
            found.append(jax.jit(run)(jax.device_put(values, places), ids))
    (loss, gradients), (wanted, wanted_gradients) = found
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for path, gradient in wanted_gradients.items():
        rows = slice(60 if path.endswith("table") else None)
        np.testing.assert_allclose(np.asarray(gradients[path])[rows], gradient, rtol=2e-3, atol=2e-5, err_msg=path)
        assert not np.any(np.asarray(gradients[path])[60:]) or not path.endswith("table")


def test_a_token_sees_only_what_stands_before_it(config, one_device, tokens):
    model = one_device(config())
    later = tokens[:, :-1].copy()
    later[:, 9:] = (later[:, 9:] + 3) % 64
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda ids: model(ids)[0])
        first, second = (run(put(ids, model.layout, mesh)) for ids in (tokens[:, :-1], later))
    np.testing.assert_array_equal(first[:, :9], second[:, :9])
    assert np.abs(np.asarray(first[:, 9:] - second[:, 9:])).min(axis=(0, 2)).max() > 0


def test_experts_report_their_load(config, one_device, tokens):
    model = one_device(config(layers=4, moe=MoEConfig(experts=8, router="gshard")))
    with jax.set_mesh(jax.make_mesh((1, 1, 1), ("x", "y", "z"))):
        ids = put(tokens, model.layout, jax.sharding.get_mesh())
        value, aux = jax.jit(lambda ids: models.loss(model, ids, key=jax.random.key(1)))(ids)
    assert aux["load"].shape == (2, 8)
    np.testing.assert_allclose(aux["load"].sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(value, aux["cross_entropy"] + aux["aux_loss"], rtol=1e-6)
    assert aux["dropped"].shape == aux["entropy"].shape == aux["confidence"].shape == (2,)
    assert ((aux["dropped"] >= 0) & (aux["dropped"] < 1)).all()


def test_groups_of_another_size_than_sequences(config, one_device, tokens):
    """With room for every token, how they are grouped changes nothing but the balance loss."""
    found = []
    for groups in (None, 2, 16):
        model = one_device(config(moe=MoEConfig(experts=8, groups=groups, evaluation_capacity_factor=8.0)))
        with jax.set_mesh(jax.make_mesh((1, 1, 1), ("x", "y", "z"))):
            ids = put(tokens, model.layout, jax.sharding.get_mesh())
            found.append(float(jax.jit(lambda ids, m=model: models.loss(m, ids, train=False)[1]["cross_entropy"])(ids)))
    np.testing.assert_allclose(found, found[0], rtol=1e-5)


def test_activations_of_a_step_and_their_sizes(config):
    table = models.activation_specs(config(moe=MoEConfig(experts=8)), Layout.load("gshard"), batch=8, length=16)
    assert table["attention.query"][1] == (8, 16, 8, 8)
    assert table["moe.groups"][1] == (8, 16, 32)
    assert table["moe.expert_input"][1] == (8, 8, MoEConfig(experts=8).capacity(16), 32)
    assert table["output.logits"][1] == (8, 16, 64)
