"""Writes to a key/value cache, in each row at the row's own position, and rounding of keys to int8 with scales."""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from gspmd.annotate.arrays import refuse_elsewhere
from gspmd.annotate.errors import PlanError, SpecError, report
from gspmd.annotate.spec import Spec
from gspmd.lowerings import in_force
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops._attention.placement import by_position
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.options import flag
from gspmd.ops.interface.planned_op import Chains, fault, planned_op, read, shard_index, steps_of
from gspmd.planner.steps import Step
from gspmd.planner.unknown import UnknownMove, UnknownMoves, UnknownStep, is_unknown


def write_cache(
    cache: jax.Array,
    new: jax.Array,
    cache_spec: str | Spec,
    key_spec: str | Spec,
    *,
    lengths: jax.Array,
    counts: jax.Array | None = None,
    ring: bool = False,
) -> jax.Array:
    """Write the keys or values of new tokens into a cache, for all layers at once, each row at its own position.

    Row b gets `new` at positions lengths[b] ... lengths[b] + L - 1. Positions below 0 and from T on are dropped. With
    `ring`, position p is in slot p mod T, so a new key replaces the key T positions before it. If there are more than T
    new keys, only the last T are kept. The new keys are moved to the devices of the cache, and the cache does not move.
    The cache is written in place if its memory is donated.

    Args:
        cache: [N, B, K, T, D], the keys or values of N layers, or [N, B, K, T], their scales. The dimensions after N
            may be in any order.
        new: [N, B, L, K, D], or [N, B, L, K] for scales, in the dtype of the cache.
        cache_spec: the spec of the cache without N, such as `"B_xKT_yD"`, or `"B_xKT_y"` for scales. N is unsharded.
            The letters for batch, heads and head size must be the same as in `key_spec`.
        key_spec: the spec of `new` without N, such as `"BLK_xD"`, in the order batch, length, heads, head size.
        lengths: [B] integers, replicated, the number of tokens of each row that are cached already.
        counts: [B] integers, replicated, the number of new tokens of each row that are real. The padding after these
            tokens is not written. None if all new tokens are real. In a plain cache padding does no harm, since the
            next tokens replace it. In a ring it would replace tokens that queries still see.
        ring: whether the cache is a ring, which `cached_attention` reads with a window or a chunk. The `lengths` of a
            ring may exceed T.

    Returns:
        The cache, sharded as before.

    Raises:
        SpecError: a spec does not fit its array or the mesh, or shapes or dtypes do not agree.
        PlanError: the result is differentiated, which only lowering "xla" can do.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     cache, new = jnp.zeros((1, 2, 1, 4, 1)), jnp.ones((1, 2, 2, 1, 1))
        ...     print(write_cache(cache, new, "BKTD", "BLKD", lengths=jnp.array([1, 3]))[0, :, 0, :, 0])
        [[0. 1. 1. 0.]
         [0. 0. 0. 1.]]
    """
    ctx = context()
    doing = f"cannot write '{key_spec}' to the cache '{cache_spec}'"
    cache, new = array(doing, "cache", cache, "real numbers"), array(doing, "new", new, "real numbers")
    of_rows = [("lengths", lengths)] + ([] if counts is None else [("counts", counts)])
    numbers = [array(doing, name, x, "integers").astype(jnp.int32) for name, x in of_rows]
    ring, specs = flag(doing, "ring", ring), []
    for name, spec, x in (("cache", Spec.parse(cache_spec), cache), ("new", Spec.parse(key_spec), new)):
        if x.ndim < 3 or x.ndim != 1 + len(spec.dims):
            remedy = "Pass all layers, [N, B, K, T, D], or scales [N, B, K, T]; the spec leaves out N."
            raise SpecError(f"{doing}: {name} has shape {x.shape}.\n  {remedy}")
        refuse_elsewhere(x, spec, doing)
        specs.append(read(doing, spec, jax.ShapeDtypeStruct(x.shape[1:], x.dtype), ctx))
    held, key = specs
    order = by_position(doing, held, key)
    rows, _, *heads = (cache.shape[1 + at] for at in order)
    heads = tuple(heads)
    checks = (
        (0, new.shape[:1] != cache.shape[:1], f"new has {len(new)} layers, but the cache has {len(cache)}."),
        (0, new.shape[1] != rows, f"new has {new.shape[1]} rows, but the cache has {rows}."),
        (1, new.shape[3:] != heads, f"new heads have shape {new.shape[3:]}, but cached heads have {heads}."),
        (
            1,
            new.dtype != cache.dtype,
            f"the new keys are {new.dtype}, but the cache is {cache.dtype}: cast the new keys.",
        ),
        *(
            (
                0,
                x.shape != (rows,),
                f"{name} must have shape ({rows},), one number per row, but the shape is {x.shape}.",
            )
            for (name, _), x in zip(of_rows, numbers)
        ),
    )
    faults = [fault(key, key.dims[at], fact) for at, wrong, fact in checks if wrong]
    if faults:
        raise report(SpecError, doing, faults) from None
    layers = next(letter for letter in "NSPQUWZ" if letter not in held.dims + key.dims)
    held, key = (Spec((layers, *spec.dims), ((), *spec.axes)) for spec in (held, key))
    form = _CacheWrite(held, key, (0, *(1 + at for at in order)), ring, len(numbers))
    if ctx.compiler_chooses:
        f = partial(_scattered, form)
        return left_to_compiler(ctx, f, form.inputs, form.cache, cache, new, *numbers, name=form.name)
    return _planned(form, ctx, cache, new, *numbers)


def quantize_heads(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round keys or values to int8, with one scale for each position and head: x ≈ int8 · scale.

    Args:
        x: [..., D]; D must be unsharded.

    Returns:
        int8 numbers [..., D] between -127 and 127, and float32 scales [...]. A scale is the largest magnitude of the
        numbers along D, divided by 127.

    Raises:
        SpecError: `x` is a scalar, or is not an array.

    Example:
        >>> whole, scale = quantize_heads(jnp.array([[2.54, -1.27], [0.0, 0.0]]))
        >>> print(whole, scale)
        [[127 -64]
         [  0   0]] [0.02 0.  ]
    """
    x = array("cannot quantize heads", "x", x, "real numbers").astype(jnp.float32)
    if not x.ndim:
        raise SpecError("cannot quantize heads: x is a scalar.\n  Pass an array whose last dimension is the head size.")
    scales = jnp.max(jnp.abs(x), axis=-1, initial=0.0) / 127
    steps = x / jnp.where(scales > 0, scales, 1)[..., None]
    return jnp.round(steps).astype(jnp.int8), scales


@dataclass(frozen=True)
class _CacheWrite:
    cache: Spec
    new: Spec
    order: tuple[int, ...]
    """The indices of layers, batch, length, heads and head size among the dimensions of the cache."""
    ring: bool
    numbers: int
    """Number of integers given for each row.

    It is 1 if only the length is given, or 2 if the number of real new tokens is given too.
    """

    @property
    def inputs(self) -> tuple[Spec, ...]:
        return (self.cache, self.new, *(Spec(("B",), ((),)),) * self.numbers)

    @property
    def name(self) -> str:
        return f"cache {self.cache}, {self.new}"


def _forward(form: _CacheWrite, ctx: Context, cache: jax.Array, new: jax.Array, *numbers: jax.Array):
    steps, body = _value(form, cache.shape, new.shape, new.dtype.itemsize, ctx)
    return run(ctx, form.name, steps, body, form.inputs, form.cache, cache, new, *numbers), None


def _refuse(form: _CacheWrite, ctx: Context, residuals, g):
    raise PlanError(
        f"cannot differentiate '{form.name}': it writes a cache, for decoding, and has no planned gradients."
        "\n  Train without a cache, or use lowering='xla'."
    )


_CALLED = {"new": "new keys", "lengths": "lengths", "counts": "counts"}
"""A mapping from the name of a moved tensor in this file to the name of the tensor in plans."""

_planned = planned_op(_forward, _refuse, lambda form: form.name)


@lru_cache(maxsize=1024)
def _value(form: _CacheWrite, cached: tuple[int, ...], shape: tuple[int, ...], width: int, ctx: Context):
    held, order = form.cache.without_trivial(ctx.mesh), form.order
    parts, slots, length = held.axes[order[2]], cached[order[2]], shape[2]
    chains = Chains(ctx.mesh, **_chains_of(form, shape, width, ctx))

    def body(cache, new, *numbers):
        new = chains.send("new", new).transpose(np.argsort(order))
        numbers = [chains.send(name, x) for name, x in zip(_NUMBERS, numbers)]
        first, real = _first_slots(form, slots, length, *numbers)
        here = first - shard_index(parts) * cache.shape[order[2]]
        cache = _written(cache, new, here, real, *order[1:3])
        if form.ring and length > 1:  # the new keys may continue at the first slot
            cache = _written(cache, new, here - slots, real, *order[1:3])
        return cache

    return chains.steps, body


def _chains_of(form: _CacheWrite, shape: tuple[int, ...], width: int, ctx: Context) -> dict[str, tuple[Step, ...]]:
    """Return the steps that move the new keys, the lengths and, if given, the counts to the devices of the cache."""
    if not is_unknown(ctx.mesh):
        return {name: steps_of(each, ctx, _CALLED[name]) for name, each in _moves(form, shape, width, ctx).items()}
    asked = replace(form, new=Spec(form.new.dims, ((),) * len(form.new.dims))), shape, width, ctx
    marks = {"new": UnknownMoves(_moves, asked, "new", before=form.new)}
    marks |= {name: UnknownMoves(_moves, asked, name) for name in _NUMBERS[: form.numbers]}
    return {name: (UnknownStep.of(mark, form.new, form.new),) for name, mark in marks.items()}


def _moves(form: _CacheWrite, shape: tuple[int, ...], width: int, ctx: Context) -> dict[str, UnknownMove]:
    held, rows = form.cache.without_trivial(ctx.mesh), Spec(("B",), ((),))
    layers, batch, _, *rest = (held.axes[at] for at in form.order)
    there = Spec(form.new.dims, (layers, batch, (), *rest))
    of_rows = UnknownMove((rows,), Spec(("B",), (batch,)), shape[1:2], 4)
    return {"new": UnknownMove((form.new,), there, shape, width)} | dict.fromkeys(_NUMBERS[: form.numbers], of_rows)


_NUMBERS = "lengths", "counts"


def _first_slots(
    form: _CacheWrite, slots: int, length: int, lengths: jax.Array, counts: jax.Array | None = None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the slot of each row's first new token, and the start and end of the range of new tokens to write.

    In a ring at most `slots` tokens are written. The first token that is written has a slot in [0, slots), and the next
    tokens have the slots after this slot, possibly beyond the last slot. If earlier new tokens are not written, the
    returned slot is counted back from the first written token, and may be negative.
    """
    end = jnp.full_like(lengths, length) if counts is None else jnp.clip(counts, 0, length)
    if not form.ring:
        return lengths, (jnp.zeros_like(end), end)
    begin = jnp.maximum(end - slots, 0)
    return (lengths + begin) % max(slots, 1) - begin, (begin, end)


def _written(
    cache: jax.Array, new: jax.Array, first: jax.Array, real: tuple[jax.Array, jax.Array], batch: int, along: int
) -> jax.Array:
    """Write the new keys that belong to this device's part of the cache, in place.

    Args:
        cache, new: arrays with the same dimensions in the same order.
        first: [B], the slot of each row's first new key. It is counted from the start of this device's part of the
            cache, and may be outside this part.
        real: two arrays [B], the start and the end of the range of new keys that are written in each row.
        batch, along: the indices of the batch dimension and of the length dimension in `cache`.
    """
    begins, ends = real
    room, length = cache.shape[along], new.shape[along]
    if not new.size or not room:
        return cache
    if in_force.is_gpu():
        return _written_at_once(cache, new, first, real, batch, along)

    def begin(row, position):
        return tuple({batch: row, along: position}.get(at, 0) for at in range(cache.ndim))

    if length == 1 and cache.dtype.itemsize == 1:
        # libtpu 0.0.42 copies an int8 cache if it is read at the place where it is written. So rows of other parts are
        # skipped here, while other caches write their old values back.
        inside = (first >= 0) & (first < room) & (begins < ends)
        rows = jnp.argsort(~inside).astype(jnp.int32)

        def put(n, cache):
            mine = jax.lax.dynamic_slice_in_dim(new, rows[n], 1, axis=batch)
            return jax.lax.dynamic_update_slice(cache, mine, begin(rows[n], first[rows[n]]))

        return jax.lax.fori_loop(0, jnp.sum(inside, dtype=jnp.int32), put, cache)
    window = min(length, room)
    size = tuple({batch: 1, along: window}.get(at, n) for at, n in enumerate(cache.shape))

    def write(row, cache):
        start = jnp.clip(first[row], 0, room - window)
        # The window that is written must be inside the part, so it may begin before or after the new keys; positions
        # in it that get no new key keep their values.
        at = start - first[row] + jnp.arange(window)
        old = jax.lax.dynamic_slice(cache, begin(row, start), size)
        mine = jax.lax.dynamic_slice_in_dim(new, row, 1, axis=batch)
        mine = jnp.take(mine, jnp.clip(at, 0, length - 1), axis=along)
        inside = ((at >= begins[row]) & (at < ends[row])).reshape(-1, *(1,) * (cache.ndim - 1 - along))
        return jax.lax.dynamic_update_slice(cache, jnp.where(inside, mine, old), begin(row, start))

    return jax.lax.fori_loop(0, cache.shape[batch], write, cache)


def _written_at_once(
    cache: jax.Array, new: jax.Array, first: jax.Array, real: tuple[jax.Array, jax.Array], batch: int, along: int
) -> jax.Array:
    """Write as `_written` does, by one scatter, which is one kernel on a GPU.

    A loop over the rows would launch three small kernels for each row.
    """
    begins, ends = (each[:, None] for each in real)
    room = cache.shape[along]
    rows, token = (jax.lax.broadcasted_iota(jnp.int32, (cache.shape[batch], new.shape[along]), at) for at in (0, 1))
    at = first[:, None] + token
    inside = (at >= 0) & (at < room) & (token >= begins) & (token < ends)
    # A key that is not written is dropped, since its place is beyond the end. The places differ, as `unique_indices`
    # promises.
    at = jnp.where(inside, at, room + token)
    where = tuple({batch: rows, along: at}.get(dim, slice(None)) for dim in range(cache.ndim))
    # `.at[...]` leaves two indexed dimensions where they are if they are adjacent, and puts them first otherwise.
    begin = min(batch, along) if abs(batch - along) == 1 else 0
    new = jnp.moveaxis(new, (batch, along), (begin, begin + 1))
    cache = cache.at[where].set(new, mode="drop", unique_indices=True)
    # Without the constraint XLA may choose another order of dimensions in memory for a cache that a loop carries, and
    # transposes the whole cache before and after the loop.
    return with_layout_constraint(cache, Layout(tuple(range(cache.ndim))))


def _scattered(form: _CacheWrite, cache: jax.Array, new: jax.Array, *numbers: jax.Array) -> jax.Array:
    """Write the new keys into the cache by one scatter, which the compiler can partition.

    If the rows were written one by one, the compiler would gather the cache.
    """
    order, slots = form.order, cache.shape[form.order[2]]
    layers, rows, token = (jax.lax.broadcasted_iota(jnp.int32, new.shape[:3], at) for at in range(3))
    first, (begin, end) = jax.tree.map(lambda x: x[None, :, None], _first_slots(form, slots, new.shape[2], *numbers))
    at = first + token
    if form.ring:
        at = at % max(slots, 1)
    # JAX would count negative positions from the end.
    at = jnp.where((at < 0) | (token < begin) | (token >= end), slots, at)
    indices = dict(zip(order, (layers, rows, at)))
    where = tuple(indices.get(dim, slice(None)) for dim in range(cache.ndim))
    # `.at[...]` has the indexed dimensions first, then the others in the order of the cache.
    new = new.transpose(0, 1, 2, *(3 + at for at in np.argsort(order[3:])))
    return cache.at[where].set(new, mode="drop")
