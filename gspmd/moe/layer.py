"""The expert layer: route, dispatch, all-to-all to the experts, compute, all-to-all back, combine."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gspmd.annotate.equation import Equation
from gspmd.annotate.errors import PlanError, SpecError
from gspmd.annotate.spec import Spec
from gspmd.layouts import Section
from gspmd.layouts.rules.keys import dims_of
from gspmd.layouts.section import SectionSpecs
from gspmd.moe import inputs
from gspmd.moe.config import MoEConfig
from gspmd.moe.experts.activation import ACTIVATIONS, GATED
from gspmd.moe.figures import figures, no_figures, summarize
from gspmd.moe.local import run_local
from gspmd.moe.paths import LayerExperts, by_rows, by_slots
from gspmd.moe.places import GroupedSpecs, places_of
from gspmd.moe.routers.routing import Routing
from gspmd.moe.routers.switch import jittered
from gspmd.moe.routers.table import named
from gspmd.ops._bias import add_bias
from gspmd.ops._einsum import einsum, reshard


def expert_layer(
    x: jax.Array,
    weights: Mapping[str, jax.Array],
    layout: Section,
    config: MoEConfig,
    *,
    key: jax.Array | None = None,
    train: bool = False,
    mask: jax.Array | None = None,
    activation: str = "swiglu",
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Run a feed-forward layer of X experts, in which a router chooses a few experts for each token.

        logits = einsum("GLE, EX -> GLX")                      float32
        slots  = dispatch(x, route(logits))                    [G, X, C, E], on the device of each group
        slots  = reshard(slots, "G_xXCE -> GX_xCE")            the all-to-all to the experts
        y      = activation(slots · w_in) · w_out              per expert
        y      = combine(reshard(y, "GX_xCE -> G_xXCE"))       the all-to-all back

    If groups and experts are sharded over the same mesh axes, a forward pass has two all-to-alls and one small
    all-reduce of losses and loads. If the layout also shards the experts' weights, there are collectives within experts
    too. Under lowering `looped`, slots are sent in chunks, and one chunk is multiplied while others are sent
    (`experts.chunks.chunks_of`). With dispatch `dropless`, the layer sends no slots. It sends rows sorted by expert,
    together with the number of rows of each expert (`paths.by_rows`). Shared experts (`config.shared`), which every
    token uses, are a separate dense layer that this function does not compute.

    Args:
        x: [G, L, E], G groups of L tokens, sharded as `layout.groups`, so that each group is on one device. Tokens and
            the experts' weights are cast to the dtype to which JAX promotes them together. Slots are sent in this
            dtype.
        weights: a mapping with "router" [E, X], float32, "w_in" [X, E, F] and "w_out" [X, F, E]. A gated activation
            needs "w_gate" [X, E, F], and router noisy-top-k needs "router_noise" [E, X], float32. If the config has a
            `router_bias` or a `choice_bias`, the mapping also has an array of this name, [X], float32. If the experts'
            products have biases, these are "b_in" [X, F], "b_out" [X, E] and, for a gated activation, "b_gate" [X, F].
            A token's gate multiplies an expert's output including the bias. The experts' weights may be int8. Their
            products are then multiplied by float32 scales, which are "s_in" [X, F], "s_out" [X, E] and, for a gated
            activation, "s_gate" [X, F]. Int8 weights are moved as int8, cast to the tokens' dtype for the products, and
            have no gradient.
        layout: the moe section of a layout. It needs the lines router, groups, dispatched, expert_input, w_in, hidden
            and w_out, and for a gated activation w_gate. Biases or int8 weights need b_in and b_out. A config with
            `router_bias` or `choice_bias` needs a line of the same name. The lines router_noise, in_via and out_via are
            optional.
        config: the settings of the block, such as router, capacity and form of dispatch.
        key: the random key for the random numbers of training: the jitter of the router's input, the draws of the
            router (such as GShard's second choices), and expert dropout. None for training without random numbers.
        train: whether to use the capacity and the random numbers of training, instead of those of evaluation.
        mask: [G, L] bool, False for padding, sharded like the tokens; None if every token is real.
        activation: a name of `ACTIVATIONS` in `gspmd.moe.experts.activation`, such as "swiglu" or "gelu".

    Returns:
        The outputs [G, L, E], sharded like x; 0 for a token that no expert took.
        The weighted auxiliary loss, a float32 scalar. It is the mean over the groups that have a real token.
        Statistics of the real tokens. "load" [X] is the fraction of choices sent to each expert. "dropped" is the
        fraction of choices without a slot or, in expert choice, the fraction of tokens that no expert took. "entropy"
        is the entropy of the router's probabilities in nats, and "confidence" is the largest probability, both averaged
        over tokens. If `config.bias_rate` is not 0, "sent" [X] is the number of choices sent to each expert.

    Raises:
        LayoutError: the layout shards a group or its slots over several devices; or, with dispatch `dropless`, it moves
            rows again after they have arrived at their experts.
        SpecError: the mesh does not divide a size; x has no groups; or x, mask or weights have a wrong shape or dtype.
        PlanError: the activation is unknown, weights are missing, or the key is not a random key.

    Source: GShard, arXiv 2006.16668, §2.2 and Algorithm 2; Switch Transformer, arXiv 2101.03961, §2.

    Differs: groups, capacity and random numbers belong to the model, so a layout never changes a result.
    """
    x, weights, mask = _checked(x, weights, layout, config, key, mask, activation)
    specs = SectionSpecs(layout)
    places = places_of(specs.groups, specs.dispatched)
    config = config if train else config.evaluation()
    jitter_key, route_key = jax.random.split(key) if train and key is not None else (None, None)
    if mask is not None:
        mask = mask.astype(bool)
        x = jnp.where(mask[..., None], x, 0)  # padding may be NaN, and must not enter a product
    if not x.size:
        return jnp.zeros_like(x), jnp.float32(0), no_figures(config)
    logits = checkpoint_name(_logits(x, weights, places, specs, config, jitter_key), "moe.logits")
    bias = _choice_bias(weights, specs) if config.choice_bias else None
    routing, summary = _route(logits, config, places, route_key, mask, bias)
    dropped = train and config.dropout > 0
    dropout_key = jax.random.fold_in(key, 2) if dropped and key is not None else None
    experts = LayerExperts(weights, specs, config, activation, dropout_key)
    if config.gate_inputs:  # the gate of the only choice multiplies the input instead of the output
        x = (x.astype(jnp.float32) * routing.gate).astype(x.dtype)
        routing = replace(routing, gate=routing.kept.astype(jnp.float32))
    if config.capacity(x.shape[1]):
        y = (by_rows if config.dispatch == "dropless" else by_slots)(x, routing, experts, places)
    else:
        y = jnp.zeros_like(x)  # with a capacity factor of 0 no token has an expert, and nothing is sent
    return y, *figures(summary, places, config, padded=mask is not None)


_OF_ROUTER = ("router", "router_noise", "router_bias", "choice_bias")
_DIMS = {name: dims_of(f"moe.{name}") for name in (*_OF_ROUTER, "w_in", "w_gate", "w_out")}
_DIMS |= {f"{kind}_{name}": dims_of("moe.b_in") for kind in "bs" for name in ("in", "gate")}
_DIMS |= {f"{kind}_out": dims_of("moe.b_out") for kind in "bs"}
_KEYS = ("router", "groups", "dispatched", "expert_input", "w_in", "hidden", "w_out")
_DOING = "run experts"
_WHOLE = Spec(("X",), ((),))


def _checked(x, weights, layout, config, key, mask, activation):
    """Check all arguments, and return the tokens, the weights and the mask as arrays."""
    inputs.settings(_DOING, config)
    inputs.choice(_DOING, "activation", activation, ACTIVATIONS)
    inputs.prng_key(_DOING, key)
    beside = isinstance(weights, Mapping) and any(name.startswith(("b_", "s_")) for name in weights)
    of_router = [name for name in ("router_bias", "choice_bias") if getattr(config, name)]
    inputs.attributes(
        _DOING, layout, (*_KEYS, *of_router, *["w_gate"] * (activation in GATED), *["b_in", "b_out"] * beside)
    )
    x = inputs.array(_DOING, "x", x, "GLE", real=True)
    if not x.shape[0]:
        raise SpecError(f"cannot run experts: x {x.shape} has no groups.\n  Pass at least one group G of tokens.")
    if mask is not None:
        mask = inputs.array(_DOING, "mask", mask, "GL")
        if mask.shape != x.shape[:2]:
            raise SpecError(
                f"cannot run experts: for x of shape {x.shape} the mask must have shape {x.shape[:2]}, but it has "
                f"{mask.shape}."
            )
    return *_of_one_dtype(x, _weights(x, weights, config, activation)), mask


def _weights(
    x: jax.Array, weights: Mapping[str, Any], config: MoEConfig, activation: str
) -> dict[str, jax.Array | np.ndarray]:
    """Return the weights that the router and the activation need, after checking their shapes."""
    matrices = ["w_in", *["w_gate"] * (activation in GATED), "w_out"]
    quantized = isinstance(weights, Mapping) and getattr(weights.get("w_in"), "dtype", None) == jnp.int8
    ends = [name.removeprefix("w_") for name in matrices]
    scales = [f"s_{end}" for end in ends] if quantized else []
    biased = isinstance(weights, Mapping) and any(f"b_{end}" in weights for end in ends)
    biases = [f"b_{end}" for end in ends] if biased else []
    of_router = ["router", *["router_noise"] * config.noisy, *["router_bias"] * config.router_bias]
    needed = [*of_router, *["choice_bias"] * config.choice_bias, *matrices, *scales, *biases]
    missing = [name for name in needed if not isinstance(weights, Mapping) or name not in weights]
    if missing:
        more = " in int8" * quantized + " with biases" * biased
        why = f"router {config.router} and activation {activation}{more} need {', '.join(needed)}"
        raise PlanError(f"cannot run experts: {why}; weights lack {', '.join(missing)}.")
    held = {name: name in matrices and quantized for name in needed}
    arrays = {name: inputs.array(_DOING, name, weights[name], _DIMS[name], real=not held[name]) for name in needed}
    other = [name for name in matrices if arrays[name].dtype != jnp.int8]
    if quantized and other:
        raise SpecError(
            f"cannot run experts: w_in is int8, but {', '.join(other)} {'is' if len(other) == 1 else 'are'} not.\n"
            "  Quantize all of them, or none."
        )
    sizes = {"E": x.shape[-1], "X": config.experts, "F": arrays["w_in"].shape[-1]}
    wanted = {name: tuple(sizes[dim] for dim in _DIMS[name]) for name in needed}
    faults = [
        f"\n  {name} must have shape [{', '.join(_DIMS[name])}] = {shape}, but has {arrays[name].shape}."
        for name, shape in wanted.items()
        if arrays[name].shape != shape
    ]
    if faults:
        raise SpecError(f"cannot run {config.experts} experts on x {x.shape}:{''.join(faults)}")
    return arrays


def _of_one_dtype(
    x: jax.Array, weights: Mapping[str, jax.Array | np.ndarray]
) -> tuple[jax.Array, dict[str, jax.Array | np.ndarray]]:
    """Cast tokens and the experts' matrices to their joint dtype, in which every lowering sends and multiplies them.

    Int8 matrices and their scales are returned unchanged. Biases become float32, the dtype in which their gradients are
    summed.
    """
    weights = {name: w.astype(jnp.float32) if name.startswith("b_") else w for name, w in weights.items()}
    if weights["w_in"].dtype == jnp.int8:
        return x, weights
    matrices = [name for name in weights if name.startswith("w_")]
    joint = jnp.result_type(x, *(weights[name] for name in matrices))
    return x.astype(joint), weights | {name: weights[name].astype(joint) for name in matrices}


def _logits(
    x, weights, places: GroupedSpecs, specs: SectionSpecs, config: MoEConfig, key: jax.Array | None
) -> jax.Array:
    """Compute the router's logits [G, L, X] in float32.

    If there is a key, the router's inputs are multiplied by random jitter. A router with a second matrix, for noise,
    has logits [G, L, 2X]. The products with the two matrices are one equation, so that x is moved only once.
    """
    factor, width = None, config.jitter_width
    if key is not None and width:
        factor = jax.random.uniform(key, x.shape, jnp.float32, 1 - width, 1 + width, out_sharding=places.random())
    x, highest, logits = jittered(x, factor), jax.lax.Precision.HIGHEST, places.per_group("LX")
    weight = weights["router"].astype(jnp.float32)
    if not config.noisy:
        plain = einsum(Equation.product(places.groups, specs.router, logits), x, weight, precision=highest)
        return _with_bias(plain, weights, logits, specs)
    noise = getattr(specs, "router_noise", specs.router)
    equation = Equation.product(places.groups, (specs.router, noise), (logits, logits))
    both = einsum(equation, x, (weight, weights["router_noise"].astype(jnp.float32)), precision=highest)
    return jnp.concatenate([_with_bias(both[0], weights, logits, specs), both[1]], axis=-1)


def _with_bias(logits: jax.Array, weights, placed: Spec, specs: SectionSpecs) -> jax.Array:
    """Add the router's bias to the logits, if the router has a bias."""
    if "router_bias" not in weights:
        return logits
    return add_bias(logits, weights["router_bias"].astype(jnp.float32), placed, specs.router_bias)


def _choice_bias(weights, specs: SectionSpecs) -> jax.Array:
    """Return the bias for choosing experts, gathered on every device and without a gradient."""
    bias = jax.lax.stop_gradient(weights["choice_bias"].astype(jnp.float32))
    return reshard(bias, Equation.move(specs.choice_bias, _WHOLE))


def _route(logits: jax.Array, config: MoEConfig, places: GroupedSpecs, key, mask, bias) -> tuple[Routing, jax.Array]:
    """Return the routing, and the summary of each group that `figures.summarize` computes."""
    draws = named(config).draw(key, (*logits.shape[:2], config.experts), out_sharding=places.random())
    extra = [x for x in (draws, mask) if x is not None]
    ins = [places.per_group("LX"[: x.ndim - 1]) for x in extra]
    if bias is not None:  # passed as integers, so that there is no gradient to sum over devices
        extra.append(jax.lax.bitcast_convert_type(bias, jnp.int32))
        ins.append(_WHOLE)
    choices = places.per_group("LK")
    body = _router_body(config, draws is not None, mask is not None, bias is not None)
    # R has size X, or 2X with the logits of noise; draws are [G, L] or [G, L, X].
    ins = (places.per_group("LR"), *ins)
    outs = (choices, choices, choices, choices, places.per_group("S"))
    name = f"{config.router} router {places.per_group('LX')}"
    expert, slot, gate, kept, summary = run_local(name, body, ins, outs, logits, *extra)
    return Routing(expert, slot, gate, kept, {}, config.experts, config.capacity(logits.shape[1])), summary


@lru_cache
def _router_body(config: MoEConfig, drawn: bool, masked: bool, biased: bool):
    def body(logits, *extra):
        extra = iter(extra)
        draws, mask = (next(extra) if drawn else None), (next(extra) if masked else None)
        bias = jax.lax.bitcast_convert_type(next(extra), jnp.float32) if biased else None
        routing = named(config).assign(logits, config, draws, mask, bias)
        return routing.expert, routing.slot, routing.gate, routing.kept, summarize(routing, logits, config, mask)

    return body
