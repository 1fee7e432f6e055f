"""A layer of nothing: no slots, no tokens, one expert, all experts, more experts than tokens; value and gradient."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.moe import MoEConfig, expert_layer
from gspmd.moe.config import ROUTERS
from tests.moe.placed import LAYOUTS, TWO_DIMENSIONAL

E, F = 8, 4
FORMS = ("sort", "onehot", "dropless")
LOWERINGS = ("blocking", "looped", "xla")


def _run(layout, config, make_mesh, *, groups=8, tokens=4, lowering="blocking"):
    """The layer's results, and the gradients of x and all weights; every number is finite, every shape its input's."""
    draw, experts = np.random.default_rng(0), config.experts
    shapes = {"router": (E, experts), "w_in": (experts, E, F), "w_gate": (experts, E, F), "w_out": (experts, F, E)}
    shapes |= {"router_noise": (E, experts)} if config.noisy else {}
    specs = layout.specs | {"router_noise": layout.specs["router"]}
    with jax.set_mesh(make_mesh(layout.mesh)), gspmd.lowering(lowering):
        place = lambda name, shape: gspmd.annotate(draw.standard_normal(shape).astype(np.float32), specs[name])  # noqa: E731
        x, weights = place("groups", (groups, tokens, E)), {name: place(name, shape) for name, shape in shapes.items()}

        @jax.jit
        def both(x, weights):
            def objective(x, weights):
                y, loss, stats = expert_layer(x, weights, layout.section, config, key=jax.random.key(0), train=True)
                return jnp.sum(jnp.sin(y)) + loss, (y, loss, stats)

            return jax.grad(objective, (0, 1), has_aux=True)(x, weights)

        gradients, results = both(x, weights)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, (x, weights))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradients, results)))
    return results, gradients


def _passed_by(results, gradients):
    (y, _, _), (_, weights) = results, gradients
    return not any(np.any(array) for array in (y, *(weights[name] for name in ("w_in", "w_gate", "w_out"))))


@pytest.mark.parametrize(("form", "lowering"), [("sort", "blocking"), ("sort", "looped"), ("onehot", "blocking")])
def test_without_slots_every_token_passes_by(form, lowering, make_mesh):
    config = MoEConfig(experts=8, capacity_factor=0.0, dispatch=form)
    results, gradients = _run(LAYOUTS["experts x model"], config, make_mesh, lowering=lowering)
    assert _passed_by(results, gradients)
    assert results[2]["dropped"] == 1
    assert np.any(gradients[1]["router"])  # of the loss that balances the experts


@pytest.mark.parametrize(("form", "router"), [("sort", "switch"), ("dropless", "switch"), ("sort", "noisy-top-k")])
def test_without_tokens_nothing_runs(form, router, make_mesh):
    config = MoEConfig(experts=8, router=router, dispatch=form)
    results, gradients = _run(LAYOUTS["one axis"], config, make_mesh, tokens=0)
    assert _passed_by(results, gradients)
    assert results[1] == 0
    assert not any(np.any(figure) for figure in results[2].values())
    assert results[2]["load"].shape == (8,)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_without_groups_is_refused(form, make_mesh):
    with pytest.raises(gspmd.SpecError, match=r"x \(0, 4, 8\) has no groups.\n  Pass at least one group G of tokens."):
        _run(LAYOUTS["one axis"], MoEConfig(experts=8, dispatch=form), make_mesh, groups=0)


EDGES = {
    "one expert": MoEConfig(experts=1),
    "one expert, noisy": MoEConfig(experts=1, router="noisy-top-k", k=1),
    "all experts": MoEConfig(experts=4, router="top-k", k=4),
    "more experts than tokens": MoEConfig(experts=16, router="gshard"),
    "experts that choose, without slots": MoEConfig(experts=8, router="expert-choice", capacity_factor=0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", EDGES.values(), ids=EDGES)
def test_few_experts_and_many(config, form, lowering, make_mesh):
    if ROUTERS[config.router].by_experts and form == "dropless":
        pytest.skip("experts that choose have slots")
    layout = LAYOUTS["one axis" if config.experts > 1 else "replicated"]
    (y, _, _), _ = _run(layout, replace(config, dispatch=form), make_mesh, tokens=3, lowering=lowering)
    assert np.any(y) == (config.capacity_factor > 0 or form == "dropless")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "two-dimensional"])
def test_without_slots_or_tokens_on_every_mesh(layout, form, make_mesh):
    """Lowerings take turns."""
    lowering = LOWERINGS[([*LAYOUTS, "two-dimensional"].index(layout) + FORMS.index(form)) % len(LOWERINGS)]
    layout = (LAYOUTS | {"two-dimensional": TWO_DIMENSIONAL})[layout]
    config = MoEConfig(experts=8, dispatch=form, capacity_factor=0.0)
    if form != "dropless":  # whose capacity is all tokens
        assert _passed_by(*_run(layout, config, make_mesh, lowering=lowering))
    assert _passed_by(*_run(layout, config, make_mesh, tokens=0, lowering=lowering))
