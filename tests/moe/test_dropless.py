"""Dropless on one device: where nothing overflows it is the other forms, and where they overflow it is not."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.layouts import Layout
from gspmd.moe import MoEConfig, expert_layer
from gspmd.moe.config import ROUTERS
from tests.moe.cases import HARD

E, F, X = 4, 6, 8
QUEUEING = [name for name, kind in ROUTERS.items() if not kind.by_experts]
CASE = HARD[2]  # with room for everybody: ties, crowds, padding, logits of -inf
GROUPS = np.r_[0:4, 24:28, 40:50, 50:54, 74:78, 90:100]  # of each kind, without padding and with it


def _close(found, wanted):
    """To float32 rounding of sums whose terms may be as large as the largest sum."""
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6 * max(1, np.max(np.abs(wanted))))


def _weights(router):
    draw = np.random.default_rng(3)
    shapes = {"router": (X, X), "w_in": (X, E, F), "w_gate": (X, E, F), "w_out": (X, F, E)}
    weights = {name: (draw.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()}
    return weights | ({"router_noise": np.zeros((X, X), np.float32)} if router == "noisy-top-k" else {})


@cache
def _program(config, activation):
    layout = Layout.load("replicated").section("moe")

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def objective(x, weights, mask):
        # The router sees the logits themselves: tokens are as wide as there are experts, and it is the identity.
        y, loss, stats = expert_layer(x, weights, layout, config, train=True, mask=mask, activation=activation)
        return jnp.sum(jnp.sin(y)) + loss, (y, stats)

    return objective


def _run(make_mesh, config, x, mask, activation="swiglu"):
    weights = _widened(_weights(config.router))
    with jax.set_mesh(make_mesh({"x": 1})):
        return _program(config, activation)(x, weights, mask)


def _widened(weights):
    """Experts that read and write the first E of the X numbers of a token."""
    wide = {name: np.pad(w, ((0, 0), (0, X - E), (0, 0))) for name, w in weights.items() if name in ("w_in", "w_gate")}
    return (
        weights
        | wide
        | {"router": np.eye(X, dtype=np.float32), "w_out": np.pad(weights["w_out"], ((0, 0), (0, 0), (0, X - E)))}
    )


@pytest.mark.turns(2)
@pytest.mark.parametrize("router", QUEUEING)
def test_dropless_is_sort_where_nothing_overflows(router, make_mesh):
    config = MoEConfig(experts=X, router=router, capacity_factor=8.0)
    x, mask = np.clip(CASE.logits[GROUPS], -4, 4), CASE.mask[GROUPS]
    found = _run(make_mesh, MoEConfig(experts=X, router=router, dispatch="dropless"), x, mask)
    jax.tree.map(_close, found, _run(make_mesh, config, x, mask))


@pytest.mark.turns(1)
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations(activation, make_mesh):
    x, mask = CASE.logits[:8].clip(-4, 4), CASE.mask[:8]
    both = [
        _run(make_mesh, MoEConfig(experts=X, router="gshard", capacity_factor=8.0, dispatch=form), x, mask, activation)
        for form in ("dropless", "onehot")
    ]
    jax.tree.map(_close, *both)


def test_all_tokens_may_go_to_one_expert(make_mesh):
    x = np.tile(9 * np.eye(X, dtype=np.float32)[2], (3, 7, 1))
    ((_, (y, stats)), _) = _run(make_mesh, MoEConfig(experts=X, dispatch="dropless"), x, np.ones((3, 7), bool))
    assert float(stats["dropped"]) == 0
    assert (np.abs(y).sum(-1) > 0).all()
    ((_, (y, stats)), _) = _run(make_mesh, MoEConfig(experts=X, dispatch="sort"), x, np.ones((3, 7), bool))
    assert float(stats["dropped"]) > 0
    assert (np.abs(y).sum(-1) == 0).any()
