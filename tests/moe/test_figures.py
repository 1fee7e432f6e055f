"""Figures of a layer: losses, loads and the router's certainty, of real tokens alone, the same on every mesh."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.annotate import Spec
from gspmd.moe import MoEConfig, expert_layer, route
from gspmd.moe.config import ROUTERS
from gspmd.moe.figures import figures, summarize
from gspmd.moe.places import places_of
from tests.moe import papers

WHOLE = places_of(Spec.parse("GLE"), Spec.parse("GXCE"))
by_router = pytest.mark.parametrize("router", ROUTERS)


@partial(jax.jit, static_argnames="config")
def _figures(logits, config, mask=None):
    routing = route(logits, config, mask=mask)
    summary = summarize(routing, logits, config, mask)
    return figures(summary, WHOLE, config, padded=mask is not None)


@by_router
def test_figures_are_those_of_the_papers(router, make_mesh):
    config = MoEConfig(experts=4, router=router, capacity_factor=0.5)
    draw = np.random.default_rng(0)
    logits, mask = draw.standard_normal((3, 10, 4)).astype(np.float32), draw.random((3, 10)) < 0.7
    mask[2] = False
    with jax.set_mesh(make_mesh({"x": 1})):
        loss, found = _figures(logits, config, mask)
    answers = [papers.routed(config, *group) for group in zip(logits, mask)][:2]  # the third holds padding alone
    np.testing.assert_allclose(loss, np.mean([sum(a.losses.values()) for a in answers]), rtol=1e-6, atol=1e-9)
    rows = [papers.softmax(row) for row in logits[mask]]
    np.testing.assert_allclose(found["entropy"], np.mean([-np.sum(p * np.log(p)) for p in rows]), rtol=1e-6)
    np.testing.assert_allclose(found["confidence"], np.mean([max(p) for p in rows]), rtol=1e-6)
    np.testing.assert_allclose(found["load"], _load(router, answers, mask), rtol=1e-6)
    np.testing.assert_allclose(found["dropped"], _dropped(router, answers, mask), rtol=1e-6)


def _load(router, answers, mask):
    sent = np.zeros(4)
    for answer, real in zip(answers, mask):
        for placed, choices, is_real in zip(answer.placed, answer.choices, real):
            for expert in placed if ROUTERS[router].by_experts else choices:
                sent[expert] += is_real
    return sent / sent.sum()


def _dropped(router, answers, mask):
    """Choices without a slot; of experts that choose, tokens without an expert."""
    shares = []
    for answer, real in zip(answers, mask):
        for placed, choices, is_real in zip(answer.placed, answer.choices, real):
            without = float(not placed) if ROUTERS[router].by_experts else 1 - len(placed) / len(choices)
            shares += [without] if is_real else []
    return np.mean(shares)


def test_a_batch_of_padding_alone_has_figures(make_mesh):
    with jax.set_mesh(make_mesh({"x": 1})):
        loss, found = _figures(jnp.ones((2, 5, 4)), MoEConfig(experts=4), jnp.zeros((2, 5), bool))
    assert float(loss) == 0
    assert all(not np.any(value) for value in found.values())


def test_an_impossible_expert_has_no_entropy(make_mesh):
    logits = jnp.array([[[0.0, 0.0, -jnp.inf, -jnp.inf]]])
    with jax.set_mesh(make_mesh({"x": 1})):
        _, found = _figures(logits, MoEConfig(experts=4))
    assert float(found["entropy"]) == pytest.approx(np.log(2))
    assert float(found["confidence"]) == 0.5


# -- in the layer: the noisy router's second matrix, and the experts that choose ---------------------------------------

G, L, E, F, X = 4, 8, 8, 8, 4
REPLICATED = SimpleNamespace(
    router="EX", groups="GLE", dispatched="GXCE", expert_input="GXCE",
    w_in="XEF", w_gate="XEF", hidden="GXCF", w_out="XFE",
)  # fmt: skip
EXPERTS = SimpleNamespace(
    router="EX", router_noise="E_xX", groups="G_xLE", dispatched="G_xXCE", expert_input="GX_xCE",
    w_in="X_xEF", w_gate="X_xEF", hidden="GX_xCF", w_out="X_xFE",
)  # fmt: skip


def _layer(layout, config, mesh, lowering):
    """The layer's sum of sines, figures and gradients, in training."""
    draw = np.random.default_rng(0)
    shapes = {"router": (E, X), "router_noise": (E, X), "w_in": (X, E, F), "w_gate": (X, E, F), "w_out": (X, F, E)}
    weights = {name: (draw.standard_normal(shape) / 3).astype(np.float32) for name, shape in shapes.items()}
    if not config.noisy:
        del weights["router_noise"]
    x = draw.standard_normal((G, L, E)).astype(np.float32)

    def objective(x, weights):
        y, loss, stats = expert_layer(x, weights, layout, config, key=jax.random.key(1), train=True)
        return jnp.sum(jnp.sin(y)) + loss, (loss, stats)

    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        specs = {name: getattr(layout, name, layout.router) for name in weights}
        placed = {name: gspmd.annotate(w, specs[name]) for name, w in weights.items()}
        run = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))
        return jax.tree.map(np.asarray, run(gspmd.annotate(x, layout.groups), placed))


@pytest.mark.turns(1)
@pytest.mark.parametrize(("router", "lowering"), [("noisy-top-k", "blocking"), ("expert-choice", "xla")])
def test_a_layout_never_changes_what_is_routed(router, lowering, make_mesh):
    config = MoEConfig(experts=X, router=router)
    one = _layer(REPLICATED, config, make_mesh({"x": 1}), lowering)
    many = _layer(EXPERTS, config, make_mesh({"x": 4}), lowering)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), many, one)
    assert np.abs(one[1][1]["router"]).max() > 0
    if config.noisy:
        assert np.abs(one[1][1]["router_noise"]).max() > 0
