"""Dispatch tokens to capacity slots and combine the outputs: by gathers, or by the papers' one-hot einsums."""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate.errors import SpecError
from gspmd.moe import inputs
from gspmd.moe.config import SLOT_FORMS
from gspmd.moe.platform import current_platform
from gspmd.moe.routers.routing import Routing

SPARSE = 4
"""Number of choices per slot above which a sum over choices is computed by one pass over the slots.

With so many choices per slot most choices have no slot, and the pass is faster than gathers.
"""


def dispatch(x: jax.Array, routing: Routing, experts: int, capacity: int, *, form: str = "sort") -> jax.Array:
    """Copy each token's activations to the slots that it was assigned; empty slots are 0.

    Form "sort" scatters the int32 index of each choice to the choice's slot. For each slot, it then gathers the
    activations of the token with number index // k. Its time grows with the number of slots. Form "onehot" is the
    papers' einsum GLXC, GLE -> GXCE; its time grows with tokens times slots. The two forms give the same result, and a
    token with NaN or inf affects only its own slots.

    Args:
        x: [G, L, E].
        routing: the router's result for these groups.
        experts: number of experts X.
        capacity: slots C per expert and group, as in the routing.
        form: "sort" or "onehot".

    Returns:
        [G, X, C, E], of x's dtype.

    Raises:
        SpecError: the number of groups, tokens, experts or slots differs from that of the routing; or a `Routing` made
            by hand has a choice outside the experts or slots. (Under jit, where values are not known, such choices are
            dropped.)
        PlanError: `form` is unknown, or "dropless", which has no slots.

    Example:
        >>> from gspmd.moe import MoEConfig, route
        >>> config = MoEConfig(experts=2, capacity_factor=1.0)
        >>> routing = route(jnp.array([[[1., 0.], [0., 1.], [1., 0.], [1., 0.]]]), config)
        >>> dispatch(jnp.array([[[1.], [2.], [3.], [4.]]]), routing, 2, config.capacity(4))[0, :, :, 0].tolist()
        [[1.0, 3.0], [2.0, 0.0]]

    Source: GShard, arXiv 2006.16668, Algorithm 2 (GSEC,GSM->EGCM); Switch Transformer, arXiv 2101.03961, appendix F.

    Differs: in the einsums the group stays the first dimension, GXCE, so that groups move only in a later reshard. The
    gradient of the gather is a gather of each token's slots, while JAX's own gradient would scatter-add activations.
    """
    doing = "dispatch tokens to their slots"
    _check_form(doing, form)
    x = inputs.array(doing, "x", x, "GLE")
    experts, capacity = inputs.whole(doing, "experts", experts), inputs.whole(doing, "capacity", capacity)
    routing = _routed(doing, routing, "x [G, L, E]", x.shape, experts, capacity)
    return to_slots(x, routing, experts, capacity, form)


@partial(jax.jit, static_argnames=("experts", "capacity", "form", "together"))
def to_slots(
    x: jax.Array, routing: Routing, experts: int, capacity: int, form: str, together: bool = False
) -> jax.Array:
    """Dispatch the tokens of a device's own groups.

    If `together` is True, which requires that each group is whole on the device, there is one gather for all groups.
    The rows are then in memory expert by expert, in the order in which an all-to-all sends them and products read them.
    If `together` is False, there is one gather for each group. The rows are then in memory group by group, and every
    slot is copied twice.
    """
    if form == "onehot":
        by_einsum, by_gather = (partial(f, experts, capacity) for f in (_spread_by_einsum, _spread_by_gather))
        return _if_finite(by_einsum, by_gather, (x,), (routing.expert, routing.slot, routing.kept))
    groups, tokens, size = x.shape
    if not together:
        return _spread_by_gather(experts, capacity, x, routing.expert, routing.slot, routing.kept)
    rows = spread(x.reshape(1, groups * tokens, size), *_rows_together(routing, experts, capacity))
    return rows.reshape(experts, groups, capacity, size).swapaxes(0, 1)


def combine(y: jax.Array, routing: Routing, *, form: str = "sort") -> jax.Array:
    """Sum the experts' outputs for each token, weighted by the gates, in float32.

    Args:
        y: [G, X, C, E], the experts' outputs in the order of `dispatch`.
        routing: the routing given to `dispatch`.
        form: "sort" or "onehot".

    Returns:
        [G, L, E], of y's dtype; 0 for tokens that no expert took.

    Raises:
        SpecError: the number of groups, experts or slots differs from that of the routing; the outputs are not
            floating-point; or a `Routing` made by hand has a choice outside the experts or slots. (Under jit, where
            values are not known, such choices are dropped.)
        PlanError: `form` is unknown, or "dropless", which has no slots.

    Example:
        >>> from gspmd.moe import MoEConfig, route
        >>> config = MoEConfig(experts=2, router="gshard")
        >>> routing = route(jnp.zeros((1, 3, 2)), config)
        >>> combine(jnp.ones((1, 2, config.capacity(3), 1)), routing)[0, :, 0].tolist()
        [1.0, 1.0, 1.0]

    Source: GShard, arXiv 2006.16668, Algorithm 2 (GSEC,GECM->GSM).
    """
    doing = "combine the experts' outputs"
    _check_form(doing, form)
    y = inputs.array(doing, "y", y, "GXCE", real=True)
    _, experts, capacity, _ = y.shape
    routing = _routed(doing, routing, "y [G, X, C, E]", y.shape, experts, capacity)
    return from_slots(y, routing, form)


@partial(jax.jit, static_argnames=("form", "together"))
def from_slots(y: jax.Array, routing: Routing, form: str, together: bool = False) -> jax.Array:
    """Combine the experts' outputs for a device's own groups; `to_slots` explains `together`."""
    groups, experts, capacity, size = y.shape
    if form == "onehot":
        indices = routing.expert, routing.slot, routing.kept
        return _if_finite(_collect_by_einsum, _collect_by_gather, (y, routing.gate), indices)
    if not together:
        return _collect_by_gather(y, routing.gate, routing.expert, routing.slot, routing.kept)
    _, tokens, choices = routing.gate.shape
    rows = _apart(y.swapaxes(0, 1).reshape(1, experts * groups * capacity, size))
    gate = routing.gate.reshape(1, groups * tokens, choices)
    return collect(rows, gate, *_rows_together(routing, experts, capacity)).reshape(groups, tokens, size)


def _check_form(doing: str, form: str) -> None:
    more = "; dropless has no slots, and is a setting of gspmd.moe.expert_layer"
    inputs.choice(doing, "form", form, SLOT_FORMS, more)


def _routed(doing: str, routing: Routing, name: str, shape: tuple, experts: int, capacity: int) -> Routing:
    """Return the routing after checking that it fits the array `name` in groups, tokens, experts and slots.

    The capacity is checked because a slot beyond the last slot of an expert would be a slot of the next expert.
    """
    if not isinstance(routing, Routing):
        raise SpecError(f"cannot {doing}: routing is not a Routing.\n  Pass the result of gspmd.moe.route.")
    facts = _differing(routing, shape, experts, capacity)
    if facts:
        raise SpecError(
            f"cannot {doing}: {name} = {tuple(shape)} does not fit the routing.\n  {' '.join(facts)}\n"
            "  Use one config for both: capacity = config.capacity(tokens), as gspmd.moe.route did."
        )
    return routing if routing.capacity is not None else _in_range(doing, routing, experts, capacity)


def _differing(routing: Routing, shape: tuple, experts: int, capacity: int) -> list[str]:
    groups, tokens = routing.expert.shape[:2]
    pairs = [("groups G", shape[0], groups), ("experts X", experts, routing.experts),
             ("slots C per expert", capacity, routing.capacity)]  # fmt: skip
    pairs += [("tokens L of a group", shape[1], tokens)] if len(shape) == 3 else []
    return [f"It has {given} {what}, but the routing has {known}."
            for what, given, known in pairs if known is not None and given != known]  # fmt: skip


def _in_range(doing: str, routing: Routing, experts: int, capacity: int) -> Routing:
    """Check a routing that was made by hand, and return it: the expert and the slot of each kept choice must exist.

    If the values of the routing are traced, choices outside the experts and slots are dropped instead.
    """
    arrays = routing.expert, routing.slot, routing.kept
    known = all(map(inputs.is_known, arrays))
    expert, slot, kept = map(np.asarray, arrays) if known else arrays
    beyond = kept & ((slot >= capacity) | (slot < 0) | (expert >= experts) | (expert < 0))
    if not known:
        return replace(routing, kept=routing.kept & ~beyond)
    if np.any(beyond):
        g, l, k = np.argwhere(beyond)[0].tolist()
        raise SpecError(
            f"cannot {doing}: choice {k} of token {l} of group {g} is kept, with expert {expert[g, l, k]} and slot "
            f"{slot[g, l, k]}.\n  There are {experts} experts of {capacity} slots."
        )
    return routing


# -- by one-hot einsums ------------------------------------------------------------------------------------------------


Form = Callable[..., jax.Array]
"""A function (*floating-point arrays, *indices) -> array. It closes over no arrays, so that it is static under jit."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _if_finite(by_einsum: Form, by_gather: Form, values: tuple[jax.Array, ...], indices: tuple) -> jax.Array:
    """Compute by an einsum if every value is finite, and otherwise by gathers, with the same result.

    A one-hot einsum multiplies every value by zeros, and 0 · NaN and 0 · inf are NaN. So a single expert or token with
    a value that is not finite would turn its whole group into NaN, in the forward and in the backward pass. A gather
    reads only the rows that it needs.
    """
    return _by_either(by_einsum, by_gather, values, *values, *indices)


def _by_either(by_einsum: Form, by_gather: Form, read: Any, *operands: Any) -> Any:
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(read)]
    return jax.lax.cond(jnp.stack(finite).all(), by_einsum, by_gather, *operands)


def _if_finite_forward(by_einsum, by_gather, values, indices):
    return _if_finite(by_einsum, by_gather, values, indices), (values, indices)


def _if_finite_backward(by_einsum, by_gather, saved, cotangent):
    values, indices = saved
    einsum_back, gather_back = partial(_transposed, by_einsum), partial(_transposed, by_gather)
    return _by_either(einsum_back, gather_back, (values, cotangent), values, indices, cotangent), None


def _transposed(form: Form, values: tuple[jax.Array, ...], indices: tuple, cotangent: jax.Array) -> tuple:
    return jax.vjp(lambda *values: form(*values, *indices), *values)[1](cotangent)


_if_finite.defvjp(_if_finite_forward, _if_finite_backward)


def _spread_by_einsum(experts: int, capacity: int, x: jax.Array, expert, slot, kept) -> jax.Array:
    taken = _one_hot(kept, expert, slot, kept, experts, capacity).astype(x.dtype)
    return jnp.einsum("GLXC,GLE->GXCE", taken, x, precision="highest")


def _collect_by_einsum(y: jax.Array, gate: jax.Array, expert, slot, kept) -> jax.Array:
    weights = _one_hot(gate, expert, slot, kept, *y.shape[1:3])
    return jnp.einsum("GLXC,GXCE->GLE", weights, y.astype(jnp.float32), precision="highest").astype(y.dtype)


def _one_hot(values: jax.Array, expert, slot, kept, experts: int, capacity: int) -> jax.Array:
    """Put the value of each kept choice at its expert and slot, and 0 elsewhere: [G, L, k] to [G, L, X, C]."""
    weights = jnp.where(kept, values.astype(jnp.float32), 0)
    at_expert = jax.nn.one_hot(expert, experts, dtype=jnp.float32) * weights[..., None]
    at_slot = jax.nn.one_hot(slot, capacity, dtype=jnp.float32)
    return jnp.einsum("GLKX,GLKC->GLXC", at_expert, at_slot, precision="highest")


# -- by gathers --------------------------------------------------------------------------------------------------------


def _spread_by_gather(experts: int, capacity: int, x: jax.Array, expert, slot, kept) -> jax.Array:
    groups, _, size = x.shape
    rows = spread(x, *_rows(expert, slot, kept, experts, capacity))
    return rows.reshape(groups, experts, capacity, size)


def _collect_by_gather(y: jax.Array, gate: jax.Array, expert, slot, kept) -> jax.Array:
    groups, experts, capacity, size = y.shape
    rows = y.reshape(groups, experts * capacity, size)
    return collect(rows, gate, *_rows(expert, slot, kept, experts, capacity))


def _rows(expert: jax.Array, slot: jax.Array, kept: jax.Array, experts: int, capacity: int) -> tuple:
    """Return two index maps, from slots to choices and from choices to slots.

    An index one past the last slot or choice says that there is none.

    Returns:
        holder: [G, X·C] int32, the choice that each slot holds, as the number token · k + choice; L·k for an empty
            slot.
        place: [G, L, k] int32, the slot of each choice, as the number expert · C + slot; X·C for a choice without a
            slot.
    """
    groups, tokens, choices = expert.shape
    place = jnp.where(kept, expert * capacity + slot, experts * capacity)
    empty = jnp.full((experts * capacity,), tokens * choices, jnp.int32)
    number = jnp.arange(tokens * choices, dtype=jnp.int32)
    holder = jax.vmap(lambda at: empty.at[at].set(number, mode="drop"))(place.reshape(groups, -1))
    return holder, place


def _rows_together(routing: Routing, experts: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Return the index maps of `_rows` for all groups together.

    Returns:
        holder: [1, X·G·C] int32, the choice that each slot holds; the number of a slot is (expert · G + group) · C +
            slot.
        place: [1, G·L, k] int32, the slot of each choice.
    """
    groups, tokens, choices = routing.expert.shape
    group = jnp.arange(groups, dtype=jnp.int32)[:, None, None]
    size, number = experts * groups * capacity, jnp.arange(groups * tokens * choices, dtype=jnp.int32)
    place = jnp.where(routing.kept, (routing.expert * groups + group) * capacity + routing.slot, size)
    holder = jnp.full((size,), number.size, jnp.int32).at[place.reshape(-1)].set(number, mode="drop")
    return holder[None], place.reshape(1, groups * tokens, choices)


def _apart(rows: jax.Array) -> jax.Array:
    """On TPUs, put an optimization barrier between rows and their reshaping to slots, to keep rows in tiles of 8.

    Without the barrier, the rows would get the tiles of `[X, G, C, E]`, in which all rows of a tile lie along the same
    dimension. With 4 groups of one slot, half of each tile would be empty.
    """
    return jax.lax.optimization_barrier(rows) if current_platform() == "tpu" else rows


@partial(jax.vmap, in_axes=(0, 0))
def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Gather rows by index; an index past the end gives zeros."""
    if not len(rows):  # with capacity 0: XLA cannot gather from an empty array
        return jnp.zeros((*index.shape, *rows.shape[1:]), rows.dtype)
    return rows.at[index].get(mode="fill", fill_value=0)


def _token(holder: jax.Array, place: jax.Array) -> jax.Array:
    """Return, for each row, the index of the token whose choice the row holds, [G, R]; L for an empty row."""
    _, tokens, choices = place.shape
    return holder // choices if choices else jnp.full_like(holder, tokens)


@jax.custom_vjp
def spread(x: jax.Array, holder: jax.Array, place: jax.Array) -> jax.Array:
    """Copy each token to the rows of its choices; the gradient sums a token's rows in float32.

    Args:
        x: [G, L, E].
        holder: [G, R] int32, the choice that each row holds, as the number token · k + choice; L · k for an empty row.
        place: [G, L, k] int32, the inverse of `holder`: the row of each choice, or R for a choice without a row.

    Returns:
        [G, R, E], of x's dtype.

    Example:
        >>> spread(jnp.array([[[1.0], [2.0]]]), jnp.array([[1, 2, 0]]), jnp.array([[[2], [0]]]))[0, :, 0].tolist()
        [2.0, 0.0, 1.0]
    """
    return _apart(_take(x, _token(holder, place)))


def _spread_forward(x, holder, place):
    return spread(x, holder, place), (holder, place)


def _spread_backward(saved, cotangent):
    return _sum_by_token(cotangent, None, *saved).astype(cotangent.dtype), None, None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def collect(rows: jax.Array, gate: jax.Array, holder: jax.Array, place: jax.Array) -> jax.Array:
    """Sum the rows of each token's choices in float32, weighted by their gates.

    Args:
        rows: [G, R, E].
        gate: [G, L, k] float32.
        holder, place: the index maps that `spread` explains.

    Returns:
        [G, L, E], of the rows' dtype.

    Example:
        >>> rows, gate = jnp.array([[[2.0], [9.0], [1.0]]]), jnp.full((1, 2, 1), 0.5)
        >>> collect(rows, gate, jnp.array([[1, 2, 0]]), jnp.array([[[2], [0]]]))[0, :, 0].tolist()
        [0.5, 1.0]
    """
    return _sum_by_token(rows, gate, holder, place).astype(rows.dtype)


def _collect_forward(rows, gate, holder, place):
    return collect(rows, gate, holder, place), (rows, gate, holder, place)


def _collect_backward(saved, cotangent):
    rows, gate, holder, place = saved
    answer = _take(cotangent, _token(holder, place)).astype(gate.dtype)
    weight = _take(gate.reshape(gate.shape[0], -1), holder)
    # Each row is summed before scalars are gathered, so that whole rows are not gathered again for each choice.
    gates = _take(jnp.sum(answer * rows.astype(gate.dtype), axis=-1), place)
    return _apart((weight[..., None] * answer).astype(rows.dtype)), gates, None, None


collect.defvjp(_collect_forward, _collect_backward)


def _sum_by_token(rows: jax.Array, gate: jax.Array | None, holder: jax.Array, place: jax.Array) -> jax.Array:
    """Sum gate · row over each token's choices, [G, R, E] to [G, L, E] float32; if gate is None, sum the rows."""
    groups, tokens, choices = place.shape
    if tokens * choices > SPARSE * holder.shape[1]:
        weight = 1 if gate is None else _take(gate.reshape(groups, -1), holder)[..., None]
        blank = jnp.zeros((groups, tokens, rows.shape[-1]), jnp.float32)
        add = jax.vmap(lambda blank, at, row: blank.at[at].add(row, mode="drop"))
        return add(blank, _token(holder, place), weight * rows.astype(jnp.float32))
    if not choices:  # a routing made by hand may have no choices
        return jnp.zeros((groups, tokens, rows.shape[-1]), jnp.float32)
    parts = [_take(rows, place[..., j]).astype(jnp.float32) for j in range(choices)]
    return reduce(operator.add, parts if gate is None else [gate[..., j, None] * part for j, part in enumerate(parts)])
