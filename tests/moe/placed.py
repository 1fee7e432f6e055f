"""A small layer of experts: its inputs, its results and gradients on one device, and on any mesh in any layout."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

import gspmd
from gspmd.annotate.equation import parse_equation
from gspmd.annotate.spec import Spec
from gspmd.moe import MoEConfig, combine, dispatch, expert_layer, route

G, L, E, F, X = 8, 12, 8, 16, 8
SIZES = {"G": G, "L": L, "E": E, "F": F, "X": X}


@dataclass(frozen=True)
class Placed:
    """A layout of experts on a mesh, and its collectives.

    Attributes:
        mesh: sizes of the mesh axes.
        specs: the moe section, keys to specs.
        forward: kind and mesh axes of the collectives of a forward pass, to their number.
        backward: the same for a backward pass.
    """

    mesh: dict[str, int]
    specs: dict[str, str]
    forward: dict[tuple[str, str], int]
    backward: dict[tuple[str, str], int]

    @property
    def section(self) -> SimpleNamespace:
        """Return the specs as a layout's section."""
        return SimpleNamespace(**self.specs)


def specs(equation: str, hidden: str, w_in: str, w_out: str, *, router: str = "EX", **more: str) -> dict[str, str]:
    """Return a section from the move of slots, "G_xXCE -> GX_xCE", and the operands that they are multiplied by."""
    move = parse_equation(equation)
    dispatched, there = str(move.operands[0].specs[0]), str(move.outputs[0])
    groups = dispatched.replace("XCE", "LE")
    named = {"router": router, "groups": groups, "dispatched": dispatched, "expert_input": there}
    biases = {f"b_{to}": str(Spec.parse(spec).without("G", "C")) for to, spec in (("in", hidden), ("out", there))}
    biases |= {f"{kind}_bias": str(Spec.parse(router).without("E")) for kind in ("router", "choice")}
    return {**named, "w_in": w_in, "w_gate": w_in, "hidden": hidden, "w_out": w_out, **biases, **more}


TWO, THREE = {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}

LAYOUTS = {
    "replicated": Placed(TWO, specs("GXCE -> GXCE", "GXCF", "XEF", "XFE"), {}, {}),
    "data": Placed(
        {"x": 8},
        specs("G_xXCE -> G_xXCE", "G_xXCF", "XEF", "XFE"),
        {("all-reduce", "x"): 1},
        {("all-reduce", "x"): 4},  # the gradients of the router and of three weights
    ),
    "one axis": Placed(
        {"x": 4},
        specs("G_xXCE -> GX_xCE", "GX_xCF", "X_xEF", "X_xFE"),
        {("all-to-all", "x"): 2, ("all-reduce", "x"): 1},
        {("all-to-all", "x"): 2, ("all-reduce", "x"): 1},
    ),
    "two axes": Placed(
        TWO,
        specs("G_xyXCE -> GX_xyCE", "GX_xyCF", "X_xyEF", "X_xyFE"),
        {("all-to-all", "xy"): 2, ("all-reduce", "xy"): 1},
        {("all-to-all", "xy"): 2, ("all-reduce", "xy"): 1},
    ),
    "two axes, the other first": Placed(
        TWO,
        specs("G_yxXCE -> GX_yxCE", "GX_yxCF", "X_yxEF", "X_yxFE"),
        {("all-to-all", "xy"): 2, ("all-reduce", "xy"): 1},
        {("all-to-all", "xy"): 2, ("all-reduce", "xy"): 1},
    ),
    "experts x model": Placed(
        TWO,
        specs("G_xXCE -> GX_xCE", "GX_xCF_y", "X_xEF_y", "X_xF_yE"),
        {("all-to-all", "x"): 2, ("all-reduce", "x"): 1, ("all-reduce", "y"): 1},  # the sum over F
        {("all-to-all", "x"): 2, ("all-reduce", "x"): 1, ("all-reduce", "y"): 1},  # for the slots' gradient
    ),
    "experts x data": Placed(
        TWO,
        specs("G_yxXCE -> G_yX_xCE", "G_yX_xCF", "X_xEF", "X_xFE"),
        {("all-to-all", "x"): 2, ("all-reduce", "xy"): 1},
        {("all-to-all", "x"): 2, ("all-reduce", "xy"): 1, ("all-reduce", "y"): 3},  # the weights' gradients
    ),
    "experts x data x model": Placed(
        THREE,
        specs("G_zxXCE -> G_zX_xCE", "G_zX_xCF_y", "X_xEF_y", "X_xF_yE"),
        {("all-to-all", "x"): 2, ("all-reduce", "xz"): 1, ("all-reduce", "y"): 1},
        {("all-to-all", "x"): 2, ("all-reduce", "xz"): 1, ("all-reduce", "y"): 1, ("all-reduce", "z"): 3},
    ),
    "experts x zero": Placed(
        TWO,
        specs(
            "G_yxXCE -> G_yX_xCE", "G_yX_xCF", "X_xE_yF", "X_xFE_y",
            in_via="G_yX_xCE, X_xEF", out_via="G_yX_xCF, X_xFE", b_in="X_xF_y", b_out="X_xE_y",
        ),
        {("all-to-all", "x"): 2, ("all-reduce", "xy"): 1, ("all-gather", "y"): 3},
        {("all-to-all", "x"): 2, ("all-reduce", "xy"): 1, ("reduce-scatter", "y"): 3},
    ),
}  # fmt: skip
TWO_DIMENSIONAL = Placed(
    TWO, specs("GXCE -> GXCE_xy", "GXCF_yx", "XE_xF_y", "XF_yE_x", router="E_xX"), {}, {}
)  # it has the gathers and scatters of a dense layer


def inputs(
    biased: bool = False, config: MoEConfig | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """Return tokens [G, L, E], all weights, with or without biases, and the mask of real tokens [G, L].

    The biases of a router are there if the config has them.
    """
    draw = np.random.default_rng(0)
    shapes = {"router": (E, X), "w_in": (X, E, F), "w_gate": (X, E, F), "w_out": (X, F, E)}
    weights = {name: (draw.standard_normal(shape) / 3).astype(np.float32) for name, shape in shapes.items()}
    x, mask = draw.standard_normal((G, L, E)).astype(np.float32), draw.random((G, L)) < 0.8
    shapes = {"b_in": (X, F), "b_gate": (X, F), "b_out": (X, E)} if biased else {}
    shapes |= {name: (X,) for name in ("router_bias", "choice_bias") if config and getattr(config, name)}
    return x, weights | {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}, mask


def loss_of(y: jax.Array, loss: jax.Array) -> jax.Array:
    """Return the function whose gradients are taken."""
    return jnp.sum(jnp.sin(y)) + 10 * loss


@cache
def on_one_device(config: MoEConfig, activation: str = "swiglu", biased: bool = False):
    """Run the layer from its pure parts, as one would write it without a mesh; dropless has slots for every token."""
    if config.dispatch == "dropless":
        config = replace(config, dispatch="sort", capacity_factor=float(X))
    (x, weights, mask), key = inputs(biased, config), jax.random.key(5)

    def objective(x, w):
        jitter_key, route_key = jax.random.split(key)
        width = config.jitter_width
        jittered = x * jax.random.uniform(jitter_key, x.shape, jnp.float32, 1 - width, 1 + width) if width else x
        logits = jnp.einsum("GLE,EX->GLX", jittered, w["router"])
        logits = logits + w["router_bias"][None, None] if config.router_bias else logits
        routing = route(logits, config, key=route_key, mask=mask, bias=w.get("choice_bias"))
        if config.gate_inputs:
            x, routing = x * routing.gate, replace(routing, gate=routing.kept.astype(jnp.float32))
        slots = dispatch(x, routing, X, config.capacity(L))
        bias = {name: w[f"b_{name}"][None, :, None] if biased else 0 for name in ("in", "gate", "out")}
        up = jnp.einsum("GXCE,XEF->GXCF", slots, w["w_in"]) + bias["in"]
        gate = jnp.einsum("GXCE,XEF->GXCF", slots, w["w_gate"]) + bias["gate"]
        if activation == "swiglu_clamped":
            bounded = jnp.clip(gate, max=7)
            h = bounded * jax.nn.sigmoid(1.702 * bounded) * (1 + jnp.clip(up, -7, 7))
        else:
            h = jax.nn.silu(gate) * up if activation == "swiglu" else getattr(jax.nn, activation)(up)
        y = combine(jnp.einsum("GXCF,XFE->GXCE", h, w["w_out"]) + bias["out"], routing)
        loss = jnp.mean(sum(routing.losses.values()))
        sent = jnp.stack([jnp.sum((routing.expert == e) & mask[..., None]) for e in range(X)])
        dropped = jnp.sum(routing.slot >= config.capacity(L)) / jnp.sum(sent)
        p = jax.nn.softmax(logits)
        if config.scores == "sigmoid":
            p = jax.nn.sigmoid(logits) / jnp.sum(jax.nn.sigmoid(logits), axis=-1, keepdims=True)
        entropy = jnp.mean(-jnp.sum(p * jnp.log(p), axis=-1), where=mask)
        sure = jnp.mean(jnp.max(p, axis=-1), where=mask)
        stats = {"load": sent / jnp.sum(sent), "dropped": dropped, "entropy": entropy, "confidence": sure}
        return loss_of(y, loss), (y, loss, stats)

    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(x, weights))


def arrays(
    layout: Placed, biased: bool = False, config: MoEConfig | None = None
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """Return the inputs, placed on the current mesh."""
    x, weights, mask = inputs(biased, config)
    lines = {name: name for name in weights} | {"b_gate": "b_in"}
    placed = {name: gspmd.annotate(w, layout.specs[lines[name]]) for name, w in weights.items()}
    spec = gspmd.Spec.parse(layout.specs["groups"])
    return gspmd.annotate(x, spec), placed, gspmd.annotate(mask, spec.without("E"))


def layer(layout: Placed, config: MoEConfig, activation: str = "swiglu", key: jax.Array | None = None) -> Callable:
    """Return a function of `arrays` that runs the layer in training."""
    more = {"train": True, "activation": activation}
    return lambda x, w, mask: expert_layer(x, w, layout.section, config, key=key, mask=mask, **more)


def program(layout: Placed, config: MoEConfig, activation: str = "swiglu") -> Callable:
    """Return a function of `arrays` that returns the value, the gradients, and the layer's result."""
    run = layer(layout, config, activation, jax.random.key(5))

    @jax.jit
    def both(x, weights, mask):
        def objective(x, weights):
            y, loss, stats = run(x, weights, mask)
            return loss_of(y, loss), (y, loss, stats)

        return jax.value_and_grad(objective, (0, 1), has_aux=True)(x, weights)

    return both


def pullback(layout: Placed, config: MoEConfig) -> Callable:
    """Return a function for the value and gradients of the layer, which adds no further sum."""
    run = layer(layout, config)

    def both(x, weights, mask):
        results, transpose = jax.vjp(lambda x, w: run(x, w, mask), x, weights)
        return results, transpose(jax.tree.map(jnp.ones_like, results))

    return both
