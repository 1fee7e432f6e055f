"""Routers and the layer where there is nothing, too much, or something else than they need."""

import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.moe import MoEConfig, expert_layer, route
from gspmd.moe.config import ROUTERS
from gspmd.moe.routing import log_odds_against
from gspmd.moe.stages import grouped_product
from tests.moe.placed import LAYOUTS

by_router = pytest.mark.parametrize("router", ROUTERS)


@by_router
def test_logits_and_masks_have_to_fit(router):
    config = MoEConfig(experts=4, router=router)
    for shape, mask in (((1, 3, 5), None), ((3, 4), None), ((1, 3, 4), (3,))):
        with pytest.raises(ValueError, match="cannot route: ") as error:
            route(jnp.zeros(shape), config, mask=None if mask is None else jnp.ones(mask, bool))
        assert str(shape if mask is None else mask) in str(error.value)


def test_only_a_noisy_router_takes_a_second_half():
    with pytest.raises(ValueError) as error:
        route(jnp.zeros((1, 3, 8)), MoEConfig(experts=4))
    assert str(error.value) == "cannot route: logits are [G, L, 4] for 4 experts; found (1, 3, 8)."
    assert route(jnp.zeros((1, 3, 8)), MoEConfig(experts=4, router="noisy-top-k")).gate.shape == (1, 3, 2)


@by_router
def test_no_tokens_are_no_choices(router):
    routing = route(jnp.zeros((2, 0, 4)), MoEConfig(experts=4, router=router))
    assert routing.gate.size == 0
    assert all(np.all(np.isfinite(loss)) for loss in routing.losses.values())


@by_router
def test_infinite_logits_have_finite_gates(router):
    logits = jnp.array([[[jnp.inf, 0, 0, 0], [-jnp.inf, jnp.inf, 0, jnp.inf], [-jnp.inf] * 4]])
    routing = route(logits, MoEConfig(experts=4, router=router))
    assert np.all(np.isfinite(routing.gate))


@pytest.mark.parametrize("experts", [4096, 4097, 20000])
def test_odds_against_any_number_of_experts(experts):
    np.testing.assert_allclose(log_odds_against(jnp.zeros(experts)), np.log(experts - 1), rtol=1e-6)


def test_weights_that_are_missing_are_named():
    weights = {"router": jnp.zeros((4, 2)), "w_in": jnp.zeros((2, 4, 8)), "w_out": jnp.zeros((2, 8, 4))}
    config = MoEConfig(experts=2, router="noisy-top-k", k=1)
    layer = lambda **more: expert_layer(jnp.zeros((1, 3, 4)), weights, LAYOUTS["replicated"], config, **more)  # noqa: E731
    with pytest.raises(ValueError) as error:
        layer()
    assert str(error.value) == (
        "cannot run experts: router noisy-top-k and activation swiglu need router, router_noise, w_in, w_gate, w_out; "
        "weights lack router_noise, w_gate."
    )
    with pytest.raises(ValueError) as error:
        layer(activation="silu")
    assert str(error.value) == "cannot run experts: activation is 'silu'; choose from swiglu, gelu, relu."


def test_gradients_of_weights_are_not_rounded_before_they_are_summed():
    rows, sizes = jnp.ones((1, 2, 3, 4), jnp.bfloat16), jnp.array([3, 3], jnp.int32)
    found = grouped_product(rows, rows, "GXCE", "GXCF", "XEF", sizes=sizes)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, 3)


def test_settings_that_count_are_whole():
    with pytest.raises(ValueError) as error:
        MoEConfig(experts=4.5, shared=1.5, capacity_factor=float("nan"))
    assert str(error.value) == (
        "a mixture of experts cannot be built from these settings\n"
        "  experts is 4.5; it must be a whole number, at least 1.\n"
        "  shared is 1.5; it must be a whole number, at least 0.\n"
        "  capacity_factor is nan; it must be a number that is not negative."
    )
