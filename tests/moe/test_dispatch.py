"""Both forms of dispatch give the same values and gradients, and the layer of the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.moe import MoEConfig, combine, dispatch, route
from tests.moe import papers
from tests.moe.cases import CASES

FORMS = ("sort", "onehot")


def _layer(x, logits, weight, config, mask, form):
    routing = route(logits, config, mask=mask)
    slots = dispatch(x, routing, config.experts, config.capacity(x.shape[1]), form=form)
    return combine(jnp.tanh(jnp.einsum("GXCE,XEF->GXCF", slots, weight)), routing, form=form)


def _inputs(case, size=5):
    draw = np.random.default_rng(11)
    x = draw.standard_normal((*case.logits.shape[:2], size)).astype(np.float32)
    return x, draw.standard_normal((case.logits.shape[-1], size, size)).astype(np.float32)


@pytest.mark.parametrize("router", ["switch", "gshard"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_forms_agree_with_each_other_and_the_papers(case, router):
    config = MoEConfig(experts=case.logits.shape[-1], router=router, capacity_factor=case.factor)
    x, weight = _inputs(case)

    def objective(x, logits, weight, form):
        y = _layer(x, logits, weight, config, case.mask, form)
        return jnp.sum(jnp.sin(y)), y

    results = [jax.jit(jax.value_and_grad(objective, (0, 1, 2), has_aux=True), static_argnums=3)(x, case.logits, weight, f) for f in FORMS]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *results)

    capacity, real = config.capacity(x.shape[1]), np.ones(x.shape[:2], bool) if case.mask is None else case.mask
    for group, y in enumerate(results[0][0][1]):
        if router == "switch":
            answer = papers.switch(case.logits[group], capacity, 0.0, real[group])
        else:
            answer = papers.gshard(case.logits[group], capacity, real[group])
        wanted = papers.layer(x[group], answer, lambda e, row: np.tanh(row.astype(np.float64) @ weight[e]))
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("router", ["switch", "gshard"])
def test_slots_hold_the_tokens_that_the_router_put_there(router):
    config = MoEConfig(experts=4, router=router, capacity_factor=0.75)
    logits = jax.random.normal(jax.random.key(0), (2, 20, 4))
    routing, capacity = route(logits, config, key=jax.random.key(1)), config.capacity(20)
    x = jnp.arange(1.0, 41.0).reshape(2, 20, 1)
    wanted = np.zeros((2, 4, capacity, 1))
    for g, l, k in np.argwhere(np.asarray(routing.kept)):
        wanted[g, routing.expert[g, l, k], routing.slot[g, l, k]] = x[g, l]
    for form in FORMS:
        np.testing.assert_array_equal(dispatch(x, routing, 4, capacity, form=form), wanted)


@pytest.mark.parametrize("router", ["switch", "gshard"])
def test_gradient_scatters_no_activations(router):
    config, x = MoEConfig(experts=4, router=router), jnp.ones((2, 16, 8))
    logits, weight = jax.random.normal(jax.random.key(0), (2, 16, 4)), jnp.ones((4, 8, 8))
    objective = jax.grad(lambda *a: jnp.sum(_layer(*a, config, None, "sort")), (0, 1, 2))
    text = jax.jit(objective).lower(x, logits, weight).as_text()
    scatters = [line for line in text.splitlines() if "stablehlo.scatter" in line]
    assert scatters and not any("f32" in line for line in scatters)
    assert "stablehlo.dot_general" in text


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_activations_are_combined_in_float32(form):
    config = MoEConfig(experts=4, router="gshard", capacity_factor=4.0)
    routing = route(jax.random.normal(jax.random.key(0), (1, 16, 4)), config)
    x = jax.random.normal(jax.random.key(1), (1, 16, 8), jnp.bfloat16)
    slots = dispatch(x, routing, 4, config.capacity(16), form=form)
    y = combine(slots, routing, form=form)
    assert slots.dtype == y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, x)  # gates sum to 1


def test_what_overflows_is_never_read():
    config = MoEConfig(experts=2, capacity_factor=0.5)
    routing = route(jnp.tile(jnp.array([5.0, 0.0]), (1, 8, 1)), config)
    slots = dispatch(jnp.ones((1, 8, 3)), routing, 2, config.capacity(8))
    y = combine(slots.at[:, 1].set(jnp.nan), routing)  # nobody went to the second expert
    assert np.isfinite(y).all() and not np.asarray(y[:, 2:]).any()
