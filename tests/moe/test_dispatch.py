"""Both forms of dispatch give the same values and gradients, and the layer of the papers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.moe import MoEConfig, combine, dispatch, route
from tests.moe import papers
from tests.moe.cases import HARD, SCARCE

FORMS = ("sort", "onehot")
by_router = pytest.mark.parametrize("router", ["switch", "gshard"])
by_form = pytest.mark.parametrize("form", FORMS)


def _layer(x, logits, weight, config, mask, form):
    routing = route(logits, config, mask=mask)
    slots = dispatch(x, routing, config.experts, config.capacity(x.shape[1]), form=form)
    return combine(jnp.tanh(jnp.einsum("GXCE,XEF->GXCF", slots, weight)), routing, form=form)


@partial(jax.jit, static_argnums=(3, 5))
@partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
def _objective(x, logits, weight, config, mask, form):
    y = _layer(x, logits, weight, config, mask, form)
    return jnp.sum(jnp.sin(y)), y


@by_router
@pytest.mark.parametrize("case", [HARD[1], SCARCE[0]], ids=lambda case: case.name)
def test_forms_agree_with_each_other_and_the_papers(case, router):
    config = MoEConfig(experts=case.logits.shape[-1], router=router, capacity_factor=case.factor)
    draw, logits = np.random.default_rng(11), np.maximum(case.logits, -99)
    x = draw.standard_normal((*logits.shape[:2], 5)).astype(np.float32)
    weight = draw.standard_normal((config.experts, 5, 5)).astype(np.float32)
    (_, y), gradients = _objective(x, logits, weight, config, case.mask, "sort")
    (_, other_y), other_gradients = _objective(x, logits, weight, config, case.mask, "onehot")
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, (y, gradients), (other_y, other_gradients))
    for group, wanted in enumerate(_of_the_papers(router, x, logits, weight, config, case.mask)):
        np.testing.assert_allclose(y[group], wanted, rtol=1e-4, atol=1e-5)


def _of_the_papers(router, x, logits, weight, config, mask):
    transcription = papers.gshard if router == "gshard" else partial(papers.switch, alpha=0.0)
    real = np.ones(x.shape[:2], bool) if mask is None else mask
    for rows, row_logits, row_real in zip(x.astype(np.float64), logits, real):
        answer = transcription(row_logits, row_real, capacity=config.capacity(x.shape[1]))
        yield papers.layer(rows, answer, lambda expert, row: np.tanh(row @ weight[expert]))


@by_router
def test_slots_hold_the_tokens_that_the_router_put_there(router):
    config = MoEConfig(experts=4, router=router, capacity_factor=0.75)
    logits = jax.random.normal(jax.random.key(0), (2, 20, 4))
    routing, capacity = route(logits, config, key=jax.random.key(1)), config.capacity(20)
    expert, slot, kept = (np.asarray(a) for a in (routing.expert, routing.slot, routing.kept))
    x = np.arange(1.0, 41.0, dtype=np.float32).reshape(2, 20, 1)
    wanted = np.zeros((2, 4, capacity, 1))
    for g, l, k in np.argwhere(kept):
        wanted[g, expert[g, l, k], slot[g, l, k]] = x[g, l]
    for form in FORMS:
        np.testing.assert_array_equal(dispatch(x, routing, 4, capacity, form=form), wanted)


@by_router
def test_gradient_scatters_no_activations(router):
    config, x = MoEConfig(experts=4, router=router), jnp.ones((2, 16, 8))
    logits, weight = jnp.ones((2, 16, 4)), jnp.ones((4, 8, 8))
    text = _objective.lower(x, logits, weight, config, None, "sort").as_text()
    scatters = text.split('"stablehlo.scatter"')[1:]
    assert scatters
    assert not any("f32" in part.split("stablehlo.return")[0] for part in scatters)


@by_form
def test_bfloat16_activations_are_combined_in_float32(form):
    config = MoEConfig(experts=4, router="gshard", capacity_factor=4.0)
    routing = route(jax.random.normal(jax.random.key(0), (1, 16, 4)), config)
    x = jax.random.normal(jax.random.key(1), (1, 16, 8), jnp.bfloat16)
    slots = dispatch(x, routing, 4, config.capacity(16), form=form)
    y = combine(slots, routing, form=form)
    assert slots.dtype == y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y.astype(jnp.float32), x.astype(jnp.float32))  # the gates sum to 1


def test_slots_that_nobody_took_are_never_read():
    config = MoEConfig(experts=2, capacity_factor=0.5)
    routing = route(np.tile(np.float32([5.0, 0.0]), (1, 8, 1)), config)
    slots = dispatch(jnp.ones((1, 8, 3)), routing, 2, config.capacity(8))
    y = np.asarray(combine(slots.at[:, 1].set(jnp.nan), routing))  # all went to the first expert
    assert np.isfinite(y).all()
    assert not y[:, 2:].any()
