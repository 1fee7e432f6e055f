"""The expert layer: one device's values and gradients under every layout, and no more communication than it names."""

import re
from collections import Counter
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.annotate.errors import LayoutError
from gspmd.moe import MoEConfig, combine, dispatch, expert_layer, route

G, L, E, F, X = 8, 12, 8, 16, 8

REPLICATED = SimpleNamespace(
    router="EX", groups="GLE", dispatched="GXCE", expert_input="GXCE",
    w_in="XEF", w_gate="XEF", hidden="GXCF", w_out="XFE",
)  # fmt: skip
GSHARD = SimpleNamespace(
    router="EX", groups="G_xyLE", dispatched="G_xyXCE", expert_input="GX_xyCE",
    w_in="X_xyEF", w_gate="X_xyEF", hidden="GX_xyCF", w_out="X_xyFE",
)  # fmt: skip
EXPERT_MODEL = SimpleNamespace(
    router="EX", groups="G_xLE", dispatched="G_xXCE", expert_input="GX_xCE",
    w_in="X_xEF_y", w_gate="X_xEF_y", hidden="GX_xCF_y", w_out="X_xF_yE",
)  # fmt: skip
TWO_DIMENSIONAL = SimpleNamespace(
    router="E_xX", groups="GLE", dispatched="GXCE", expert_input="GXCE_xy",
    w_in="XE_xF_y", w_gate="XE_xF_y", hidden="GXCF_yx", w_out="XF_yE_x",
)  # fmt: skip
LAYOUTS = {"replicated": REPLICATED, "gshard": GSHARD, "expert x model": EXPERT_MODEL, "2d": TWO_DIMENSIONAL}
MESH = {"x": 4, "y": 2}


def _inputs():
    draw = np.random.default_rng(0)
    shapes = {"router": (E, X), "w_in": (X, E, F), "w_gate": (X, E, F), "w_out": (X, F, E)}
    weights = {name: (draw.standard_normal(shape) / 3).astype(np.float32) for name, shape in shapes.items()}
    return draw.standard_normal((G, L, E)).astype(np.float32), weights, draw.random((G, L)) < 0.8


def _loss_of(y, loss):
    return jnp.sum(jnp.sin(y)) + 10 * loss


@cache
def _on_one_device(router, activation):
    """The layer from its pure parts, as a reader would write it without a mesh."""
    config, (x, weights, mask), key = MoEConfig(experts=X, router=router), _inputs(), jax.random.key(5)

    def objective(x, w):
        jitter_key, route_key = jax.random.split(key)
        width = config.jitter_width
        jittered = x * jax.random.uniform(jitter_key, x.shape, jnp.float32, 1 - width, 1 + width) if width else x
        logits = jnp.einsum("GLE,EX->GLX", jittered, w["router"])
        routing = route(logits, config, key=route_key, mask=mask)
        slots = dispatch(x, routing, X, config.capacity(L))
        up = jnp.einsum("GXCE,XEF->GXCF", slots, w["w_in"])
        gate = jnp.einsum("GXCE,XEF->GXCF", slots, w["w_gate"])
        h = jax.nn.silu(gate) * up if activation == "swiglu" else jax.nn.gelu(up)
        y = combine(jnp.einsum("GXCF,XFE->GXCE", h, w["w_out"]), routing)
        loss = jnp.mean(routing.losses["aux"])
        sent = jnp.stack([jnp.sum((routing.expert == e) & mask[..., None]) for e in range(X)])
        dropped = jnp.sum(routing.slot >= config.capacity(L)) / jnp.sum(sent)
        p = jax.nn.softmax(logits)
        entropy = jnp.mean(-jnp.sum(p * jnp.log(p), axis=-1), where=mask)
        sure = jnp.mean(jnp.max(p, axis=-1), where=mask)
        stats = {"load": sent / jnp.sum(sent), "dropped": dropped, "entropy": entropy, "confidence": sure}
        return _loss_of(y, loss), (y, loss, stats)

    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(x, weights))


def _program(layout, config, activation="swiglu"):
    """Value, gradient, and what `expert_layer` returns, on the current mesh; and its inputs placed there."""
    x, weights, mask = _inputs()
    placed = {name: gspmd.annotate(w, getattr(layout, name)) for name, w in weights.items()}
    spec = gspmd.Spec.parse(layout.groups)
    arrays = gspmd.annotate(x, spec), placed, gspmd.annotate(mask, spec.without("E"))

    @jax.jit
    def program(x, weights, mask):
        def objective(x, weights):
            y, loss, stats = expert_layer(
                x, weights, layout, config, key=jax.random.key(5), train=True, mask=mask, activation=activation
            )
            return _loss_of(y, loss), (y, loss, stats)

        return jax.value_and_grad(objective, (0, 1), has_aux=True)(x, weights)

    return program, arrays


CASES = [
    ("gshard", "explicit", "blocking", "gshard", "sort", "swiglu"),
    ("gshard", "auto", "xla", "gshard", "sort", "swiglu"),
    ("expert x model", "auto", "blocking", "switch", "onehot", "gelu"),
    ("expert x model", "explicit", "xla", "switch", "sort", "swiglu"),
    ("2d", "explicit", "blocking", "switch", "sort", "swiglu"),
]
PRODUCT = [
    (layout, axes, lowering, router, form, "swiglu")
    for layout in LAYOUTS for axes in ("explicit", "auto") for lowering in ("blocking", "xla")
    for router, form in (("switch", "onehot"), ("gshard", "sort"))
]  # fmt: skip


def _check(make_mesh, layout, axes, lowering, router, form, activation):
    with jax.set_mesh(make_mesh(MESH, axes)), gspmd.lowering(lowering):
        program, arrays = _program(LAYOUTS[layout], MoEConfig(experts=X, router=router, dispatch=form), activation)
        found = program(*arrays)
    wanted = _on_one_device(router, activation)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_layout_never_changes_a_result(case, make_mesh):
    _check(make_mesh, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=" ".join)
def test_no_layout_ever_changes_a_result(case, make_mesh):
    _check(make_mesh, *case)


SENT = {
    "replicated": ({}, {}),
    "gshard": (
        {("all-to-all", "xy"): 2, ("all-reduce", "xy"): 1},
        {("all-to-all", "xy"): 4, ("all-reduce", "xy"): 2},  # and the router's gradient
    ),
    "expert x model": (  # an all-reduce over y settles w_out, and the gradient of w_in's input
        {("all-to-all", "x"): 2, ("all-reduce", "x"): 1, ("all-reduce", "y"): 1},
        {("all-to-all", "x"): 4, ("all-reduce", "x"): 2, ("all-reduce", "y"): 2},
    ),
}


def _planned(function, arrays):
    return {
        (kind, "".join(axes)): count
        for (kind, axes), (count, _) in gspmd.trace(function, *arrays).by_kind_and_axes().items()
    }


def _compiled(function, arrays):
    text = jax.jit(function).lower(*arrays).compile().as_text()
    kinds = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
    return Counter(re.findall(rf" ({kinds})(?:-start)?\(", text))


@pytest.mark.parametrize("layout", SENT)
def test_two_all_to_alls_each_way_and_small_sums(layout, make_mesh):
    specs, config = LAYOUTS[layout], MoEConfig(experts=X, router="gshard")
    forward, both = SENT[layout]
    with jax.set_mesh(make_mesh(MESH)), gspmd.lowering("blocking"):
        program, arrays = _program(specs, config)
        assert _planned(program, arrays) == both
        layer = lambda x, w, mask: expert_layer(x, w, specs, config, train=True, mask=mask)  # noqa: E731
        assert _planned(layer, arrays) == forward
        kinds = Counter()
        for (kind, _), count in forward.items():
            kinds[kind] += count
        assert _compiled(layer, arrays) == kinds


def test_evaluation_draws_nothing_and_has_its_own_capacity(make_mesh):
    config = MoEConfig(experts=X, router="gshard", capacity_factor=0.1, evaluation_capacity_factor=8.0)
    x, weights, _ = _inputs()
    with jax.set_mesh(make_mesh({"x": 2})):
        layer = jax.jit(lambda key: expert_layer(x, weights, REPLICATED, config, key=key))
        first, second = layer(jax.random.key(0)), layer(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert float(first[2]["dropped"]) == 0
    np.testing.assert_allclose(np.sum(first[2]["load"]), 1, rtol=1e-6)


def test_groups_that_are_not_whole_are_refused(make_mesh):
    layout = SimpleNamespace(**{**vars(GSHARD), "groups": "G_xL_yE", "dispatched": "G_xXCE_y"})
    x, weights, _ = _inputs()
    with jax.set_mesh(make_mesh(MESH)), pytest.raises(LayoutError) as error:
        expert_layer(x, weights, layout, MoEConfig(experts=X))
    assert str(error.value) == (
        "cannot route tokens by this layout: 2 faults\n"
        "    G_xL_yE\n"
        "    ^^^^^^^\n"
        "  the tokens of a group have to lie whole on the device that routes it.\n"
        "  Write it 'GLE', with mesh axes on G alone, the same ones for tokens and slots.\n"
        "    G_xXCE_y\n"
        "    ^^^^^^^^\n"
        "  the slots of a group have to lie whole on the device that routes it.\n"
        "  Write it 'G_xXCE', with mesh axes on G alone, the same ones for tokens and slots."
    )
