"""Routers and the layer where there is nothing, too much, or something else than they need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.moe import MoEConfig, expert_layer, route
from gspmd.moe.config import ROUTERS
from gspmd.moe.experts.stages import grouped_product
from gspmd.moe.routers.routing import log_odds_against
from tests.moe import placed
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
    assert str(error.value) == "cannot route: logits for 4 experts must have shape [G, L, 4], but they have (1, 3, 8)."
    assert route(jnp.zeros((1, 3, 8)), MoEConfig(experts=4, router="noisy-top-k")).gate.shape == (1, 3, 2)


@by_router
def test_no_tokens_are_no_choices(router):
    routing = route(jnp.zeros((2, 0, 4)), MoEConfig(experts=4, router=router))
    assert routing.gate.size == 0
    assert all(np.all(np.isfinite(loss)) for loss in routing.losses.values())


def _value_and_slopes(config, logits, mask=None, key=None):
    """Gates and losses, and the gradient of their sum."""

    def total(logits):
        routing = route(logits, config, mask=mask, key=key)
        return jnp.sum(routing.gate) + sum(jnp.sum(loss) for loss in routing.losses.values()), routing

    (value, routing), slopes = jax.value_and_grad(total, has_aux=True)(logits)
    return value, routing, slopes


@pytest.mark.turns(3)
@by_router
def test_infinite_logits_have_finite_gates_losses_and_gradients(router):
    logits = jnp.array([[[jnp.inf, 0, 0, 0], [-jnp.inf, jnp.inf, 0, jnp.inf], [-jnp.inf] * 4]])
    value, routing, slopes = _value_and_slopes(MoEConfig(experts=4, router=router, z_weight=1e-3), logits)
    assert np.all(np.isfinite(routing.gate))
    assert np.isfinite(value)
    assert np.all(np.isfinite(slopes))


def test_noise_without_bound_has_finite_gates_and_gradients():
    most = np.finfo(np.float32).max
    logits = jnp.array([[[1.0, 2.0, jnp.inf, 0.0], [1.0, 2.0, 100.0, most], [jnp.inf, -jnp.inf, jnp.inf, 0.0]]])
    config = MoEConfig(experts=2, router="noisy-top-k", k=1)
    value, _, slopes = _value_and_slopes(config, logits, key=jax.random.key(0))
    assert np.isfinite(value)
    assert np.all(np.isfinite(slopes))


@pytest.mark.turns(3)
@by_router
def test_whatever_padding_holds_changes_nothing(router):
    config, mask = MoEConfig(experts=4, router=router, z_weight=1e-3), jnp.array([[True, True, False]])
    logits = jax.random.normal(jax.random.key(0), (1, 3, 4))
    wanted, found = (_value_and_slopes(config, jnp.where(mask[..., None], logits, held), mask) for held in (0, jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.turns(1)
@pytest.mark.parametrize("form", ["sort", "onehot", "dropless"])
def test_padding_of_a_layer_may_hold_nothing_that_is_a_number(form):
    x, weights, mask = placed.inputs()
    config = MoEConfig(experts=placed.X, dispatch=form)

    def loss(weights, x):
        y, loss, _ = expert_layer(x, weights, LAYOUTS["replicated"].section, config, mask=mask)
        return jnp.sum(y**2) + loss

    with jax.set_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])):
        run = jax.jit(jax.value_and_grad(loss))
        wanted, found = (run(weights, np.where(mask[..., None], x, np.float32(held))) for held in (0, np.nan))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_logits_and_masks_may_be_lists():
    routing = route([[[0.0, 1.0], [2.0, 0.0]]], MoEConfig(experts=2), mask=[[1, 0]])
    assert routing.kept[0, :, 0].tolist() == [True, False]


@pytest.mark.parametrize("experts", [4096, 4097, 20000])
def test_odds_against_any_number_of_experts(experts):
    np.testing.assert_allclose(log_odds_against(jnp.zeros(experts)), np.log(experts - 1), rtol=1e-6)


def test_odds_of_logits_that_a_compiler_scales_on_the_way():
    """A product that is fused into a difference is not rounded, so the best logit is not equal to its own maximum."""
    logits = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    scaled = np.float64(logits / np.float32(0.07))
    others = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    total = others.sum(axis=-1, keepdims=True)
    best = others == 1
    against = np.where(best, np.sum(np.where(best, 0, others), axis=-1, keepdims=True), (total - others) / others)
    got = jax.jit(lambda x: log_odds_against(x / 0.07))(logits)
    np.testing.assert_allclose(got, np.log(against), rtol=1e-5, atol=1e-5)


def test_weights_that_are_missing_are_named():
    weights = {"router": jnp.zeros((4, 2)), "w_in": jnp.zeros((2, 4, 8)), "w_out": jnp.zeros((2, 8, 4))}
    config = MoEConfig(experts=2, router="noisy-top-k", k=1)
    section = LAYOUTS["replicated"].section
    layer = lambda **more: expert_layer(jnp.zeros((1, 3, 4)), weights, section, config, **more)  # noqa: E731
    with pytest.raises(ValueError) as error:
        layer()
    assert str(error.value) == (
        "cannot run experts: router noisy-top-k and activation swiglu need router, router_noise, w_in, w_gate, w_out; "
        "weights lack router_noise, w_gate."
    )
    with pytest.raises(ValueError) as error:
        layer(activation="tanh")
    assert (
        str(error.value) == "cannot run experts: activation is 'tanh'.\n  Choose from swiglu, swiglu_clamped, geglu, "
        "gelu, gelu_exact, relu, silu."
    )


def test_weights_of_other_experts_are_named():
    x, weights, _ = placed.inputs()
    weights |= {"w_in": weights["w_in"][:4], "router_noise": weights["router"]}  # which switch has no use for
    with pytest.raises(ValueError) as error:
        expert_layer(x, weights, LAYOUTS["replicated"].section, MoEConfig(experts=8))
    assert str(error.value) == (
        "cannot run 8 experts on x (8, 12, 8):\n  w_in must have shape [X, E, F] = (8, 8, 16), but has (4, 8, 16)."
    )
    with pytest.raises(ValueError, match=r"x must have dimensions \[G, L, E\], but it has shape \(12, 8\)"):
        expert_layer(x[0], weights, LAYOUTS["replicated"].section, MoEConfig(experts=8))


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


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"capacity_factor": None}, "capacity_factor is None; it must be a number"),
        ({"capacity_factor": "1.25"}, "capacity_factor is '1.25'; it must be a number"),
        ({"dropout": None}, "dropout is None; it must be in [0, 1)."),
        ({"experts": "8"}, "experts is '8'; it must be a whole number"),
        ({"experts": True}, "experts is True; it must be a whole number"),
        ({"jitter": "a"}, "jitter is 'a'; it must be in [0, 1)."),
        ({"router": ["switch"]}, "router is ['switch']. Choose from"),
    ],
    ids=str,
)
def test_settings_of_another_type_are_named(settings, fault):
    with pytest.raises(ValueError) as error:
        MoEConfig(**settings)
    assert fault in str(error.value)


def test_a_factor_in_numpy_is_the_decimal_that_was_written():
    assert MoEConfig(experts=10, capacity_factor=np.float32(1.1)).capacity(100) == 11
