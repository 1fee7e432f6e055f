"""Tokens into the experts' slots and back: as the papers' one-hot einsums, and as gathers that move each row once."""

from functools import partial

import jax
import jax.numpy as jnp

from gspmd.moe.routing import Routing


@partial(jax.jit, static_argnames=("experts", "capacity", "form"))
def dispatch(x: jax.Array, routing: Routing, experts: int, capacity: int, *, form: str = "sort") -> jax.Array:
    """Bring each token's activations to the slots it was given; slots that nobody took are 0.

    "onehot" is the papers' einsum, GLXC, GLE -> GXCE, whose time grows with tokens · slots. "sort" writes the number of
    the choice that holds each slot (an int32 scatter; its token is number // k) and gathers activations by it: its time
    grows with the slots alone.

    Args:
        x: [G, L, E].
        routing: a router's answer for these groups.
        experts: number of experts X.
        capacity: slots per expert and group C, as the router was given.
        form: "sort" or "onehot".

    Returns:
        [G, X, C, E], of x's dtype.

    Example:
        >>> from gspmd.moe import MoEConfig, route
        >>> config = MoEConfig(experts=2, capacity_factor=1.0)
        >>> routing = route(jnp.array([[[1., 0.], [0., 1.], [1., 0.], [1., 0.]]]), config)
        >>> dispatch(jnp.array([[[1.], [2.], [3.], [4.]]]), routing, 2, config.capacity(4))[0, :, :, 0].tolist()
        [[1.0, 3.0], [2.0, 0.0]]

    Source: GShard, arXiv 2006.16668, Algorithm 2 (GSEC,GSM->EGCM); Switch Transformer, arXiv 2101.03961, appendix F.

    Differs: the einsums keep the group in front, G X C E, so that groups stay put until a reshard moves them.
    The gradient of the gather is a gather of each token's slots, where transposition would scatter-add activations.
    """
    if form == "onehot":
        taken = _one_hot(routing, routing.kept, experts, capacity).astype(x.dtype)
        return jnp.einsum("GLXC,GLE->GXCE", taken, x, precision="highest")
    rows = _spread(x, *_rows(routing, experts, capacity))
    return rows.reshape(x.shape[0], experts, capacity, x.shape[-1])


@partial(jax.jit, static_argnames="form")
def combine(y: jax.Array, routing: Routing, *, form: str = "sort") -> jax.Array:
    """Bring the experts' answers back to their tokens, weighted by the gates and summed in float32.

    Args:
        y: [G, X, C, E], the experts' answers in the order of `dispatch`.
        routing: the router's answer that `dispatch` was given.
        form: "sort" or "onehot".

    Returns:
        [G, L, E], of y's dtype; 0 for tokens that no expert took.

    Example:
        >>> from gspmd.moe import MoEConfig, route
        >>> config = MoEConfig(experts=2, router="gshard")
        >>> routing = route(jnp.zeros((1, 3, 2)), config)
        >>> combine(jnp.ones((1, 2, config.capacity(3), 1)), routing)[0, :, 0].tolist()
        [1.0, 1.0, 1.0]

    Source: GShard, arXiv 2006.16668, Algorithm 2 (GSEC,GECM->GSM).
    """
    groups, experts, capacity, size = y.shape
    if form == "onehot":
        weights = _one_hot(routing, routing.gate, experts, capacity)
        return jnp.einsum("GLXC,GXCE->GLE", weights, y.astype(jnp.float32), precision="highest").astype(y.dtype)
    rows = y.reshape(groups, experts * capacity, size)
    return _collect(rows, routing.gate, *_rows(routing, experts, capacity))


def _one_hot(routing: Routing, values: jax.Array, experts: int, capacity: int) -> jax.Array:
    """[G, L, k] values, each at its expert and slot: [G, L, X, C]."""
    at_expert = jax.nn.one_hot(routing.expert, experts) * jnp.where(routing.kept, values, 0)[..., None]
    return jnp.einsum("GLKX,GLKC->GLXC", at_expert, jax.nn.one_hot(routing.slot, capacity), precision="highest")


def _rows(routing: Routing, experts: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Both ways between choices and slots, one past the end where there is none.

    Returns:
        holder: [G, X·C] int32, the number token · k + choice of the choice in each slot, L·k where empty.
        place: [G, L, k] int32, the row expert · C + slot of each choice, X·C where it has none.
    """
    groups, tokens, choices = routing.expert.shape
    place = jnp.where(routing.kept, routing.expert * capacity + routing.slot, experts * capacity)
    empty = jnp.full((experts * capacity,), tokens * choices, jnp.int32)
    number = jnp.arange(tokens * choices, dtype=jnp.int32)
    holder = jax.vmap(lambda at: empty.at[at].set(number, mode="drop"))(place.reshape(groups, -1))
    return holder, place


@partial(jax.vmap, in_axes=(0, 0))
def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Rows by index, 0 for an index past the end."""
    return rows.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _spread(x: jax.Array, holder: jax.Array, place: jax.Array) -> jax.Array:
    return _take(x, holder // place.shape[-1])


def _spread_forward(x, holder, place):
    return _spread(x, holder, place), place


def _spread_backward(place, cotangent):
    parts = [_take(cotangent, place[..., j]).astype(jnp.float32) for j in range(place.shape[-1])]
    return sum(parts).astype(cotangent.dtype), None, None


_spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def _collect(rows: jax.Array, gate: jax.Array, holder: jax.Array, place: jax.Array) -> jax.Array:
    parts = [gate[..., j, None] * _take(rows, place[..., j]).astype(gate.dtype) for j in range(gate.shape[-1])]
    return sum(parts).astype(rows.dtype)


def _collect_forward(rows, gate, holder, place):
    return _collect(rows, gate, holder, place), (rows, gate, holder, place)


def _collect_backward(saved, cotangent):
    rows, gate, holder, place = saved
    weight = _take(gate.reshape(gate.shape[0], -1), holder)
    answer = weight[..., None] * _take(cotangent, holder // gate.shape[-1]).astype(gate.dtype)
    wide = cotangent.astype(gate.dtype)
    gates = [jnp.sum(wide * _take(rows, place[..., j]).astype(gate.dtype), axis=-1) for j in range(gate.shape[-1])]
    return answer.astype(rows.dtype), jnp.stack(gates, axis=-1), None, None


_collect.defvjp(_collect_forward, _collect_backward)
