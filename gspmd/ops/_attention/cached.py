"""Attention of new tokens to a key/value cache; the queries are moved to the cache, which does not move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from gspmd.annotate.errors import Fault, PlanError, SpecError, report, shown
from gspmd.annotate.spec import Spec
from gspmd.annotate.validation import whole
from gspmd.lowerings import in_force
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops._attention.buckets import Buckets
from gspmd.ops._attention.kernels import splash
from gspmd.ops._attention.local import ALONE, Shards, at_one_width, local_attended
from gspmd.ops._attention.online import LOW, Attended
from gspmd.ops._attention.placement import CachePlacement, by_position, placement
from gspmd.ops._attention.terms import (
    Extras,
    Given,
    Terms,
    by_heads,
    positions,
    read_bias,
    read_limits,
    read_of_heads,
    read_slopes,
)
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.options import number
from gspmd.ops.interface.planned_op import FLOAT32, Chains, fault, planned_op, read, shard_index, steps_of
from gspmd.planner.steps import Step
from gspmd.planner.unknown import UnknownMove, UnknownMoves, UnknownStep, is_unknown


def cached_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cached_k: jax.Array,
    cached_v: jax.Array | None,
    query_spec: str | Spec,
    key_spec: str | Spec,
    cache_spec: str | Spec,
    *,
    lengths: jax.Array,
    scale: float | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    rest_scales: jax.Array | None = None,
    value_width: int | None = None,
    bias: jax.Array | None = None,
    bias_spec: str | Spec | None = None,
    buckets: Buckets | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    sinks_spec: str | Spec | None = None,
    slopes: jax.Array | Sequence[float] | None = None,
    slopes_spec: str | Spec | None = None,
) -> jax.Array:
    """Attend to the cached keys of each row and, causally, to the keys of the new tokens themselves.

    Query i of row b attends to the cached keys t < lengths[b] and to the new keys j ≤ i. If there are no new keys, it
    attends to the cache alone, as the queries of a decoder attend to the keys of the encoder. The cache does not move.
    It may be sharded over batch, heads and length in any combination. The plan moves the queries to the cache, and
    moves the result back. If T is sharded, each device attends to its own part of the keys, and the results are
    combined as parts of one softmax. This takes two all-reduces of [B, L, H] float32, for the maximum and then for the
    denominator, and one sum of the weighted values in q's dtype. The sum is reduce-scattered directly to the placement
    of the result if that is cheaper. A mesh axis that the cache does not use still shards the dimension of `q` that it
    shards in `query_spec`, if the sizes allow it. The queries are gathered over all other mesh axes.

    Args:
        q: [B, L, H, D], the queries of the new tokens.
        k, v: [B, L, K, D], the keys and values of the new tokens. K divides H, and query head h attends to key head
            h // (H/K). `k` and `v` are None for attention to the cache alone. Values may have a smaller D than keys.
        cached_k, cached_v: [B, K, T, D] finite numbers, with dimensions in any order; int8 if scales are given.
        query_spec: the spec of `q` and of the result, such as `"BLH_xyzD"`.
        key_spec: the spec of `k` and `v`, such as `"BLKD"`. If `k` and `v` are None, only the letters of the spec
            count. D must be unsharded in `query_spec`, `key_spec` and `cache_spec`.
        cache_spec: the spec of `cached_k` and `cached_v`, such as `"B_xKT_yzD"`, with their dimensions in order. It has
            the letters of `key_spec` for batch, heads and head size, and a different letter for the cached length. The
            order of the dimensions affects only how memory is read; heads before length is the best order for TPUs.
        lengths: [B] integers, replicated, the number of cached tokens of each row.
        scale: the factor of the logits; 1/sqrt(D) when None.
        key_scales, value_scales: [B, K, T] float32 scales of an int8 cache, ordered and sharded like the cache. The
            logits are multiplied by the scales of the keys, and the probabilities by the scales of the values, so the
            cache is never converted to a wider dtype in memory.
        rest_scales: [B, K, T] float32 scales for the entries of a key after the first `value_width` entries. If
            `rest_scales` are given, `key_scales` are only for the first `value_width` entries. In multi-head latent
            attention, one scale is for the latent, which is both key and value, and the other scale is for the rotated
            key after the latent.
        value_width: the number of leading entries of a key that are also its value, as in multi-head latent attention.
            If `value_width` is given, `v`, `cached_v` and `value_scales` are None. Values are not cut out of the cache,
            because this would copy them.
        bias, bias_spec, buckets: T5's relative position bias, as in `attention`. Query i and new key i of row b are at
            position lengths[b] + i, and cached key t is at position t.
        window: the number of keys that a query sees, including its own key, as in `attention`. With a window the cache
            is a ring, in which the key at position p is in slot p mod T, as `write_cache(..., ring=True)` writes it. T
            must be at least window - 1, and `lengths` may exceed T. If the cache has room for all positions, a ring
            makes no difference.
        chunk: the number of tokens in a chunk, as in `attention`. A query attends to the keys of its own chunk. With
            chunks the cache is a ring, as with a window, and must have at least chunk - 1 slots.
        softcap: a cap on the logits, as in `attention`.
        sinks, sinks_spec: an additional logit for each head, without a value, as in `attention`.
        slopes, slopes_spec: ALiBi's slopes, as in `attention`. The positions are those described for `bias`, also in a
            ring.

    Returns:
        [B, L, H, D] in q's dtype, with the D of the values. Logits and softmax are float32. A query that sees no key
        gets 0.

    Raises:
        SpecError: a spec does not fit its array or the mesh, the shapes do not agree, or values are wider than keys; or
            the cache is too short for the window or chunk; or a window and a chunk are given together, or one of them
            is given without new keys; or values or their scales are given together with `value_width`; or, without
            `value_width`, `cached_v` is missing, or only one of `k` and `v` is given, or only one of `key_scales` and
            `value_scales` is given; or `rest_scales` are given without `key_scales` or without `value_width`.
        PlanError: D is sharded; or the result is differentiated, which only lowering "xla" can do.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     one, cache = jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 4, 2))
        ...     y = cached_attention(
        ...         one, one, 5 * one, cache, 2 * cache, "BLHD", "BLKD", "BKTD", lengths=jnp.array([2]))
        ...     print(y[0, 0, 0])
        [3. 3.]

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.3, for heads and batch; Milakov and Gimelshein 2018
        (arXiv 1805.02867) for combining parts of a softmax.
    """
    ctx = context()
    doing = f"cannot attend from '{query_spec}' to the cache '{cache_spec}'"
    if value_width is None:
        if (k is None) != (v is None):
            raise SpecError(f"{doing}: k or v is missing.\n  Give both, or None for both to attend to the cache alone.")
        if cached_v is None:
            raise SpecError(
                f"{doing}: cached_v is missing.\n  Pass cached_v, or value_width if values are within the keys."
            )
        if (key_scales is None) != (value_scales is None):
            raise SpecError(f"{doing}: an int8 cache has key_scales and value_scales; one is missing.\n  Give both.")
    else:
        values = {"v": v, "cached_v": cached_v, "value_scales": value_scales}
        if given := [name for name, x in values.items() if x is not None]:
            fact = f"values are within the keys (value_width), so {given[0]} has no use."
            raise SpecError(f"{doing}: {fact}\n  Leave it out.")
        value_width = _read_width(doing, value_width)
    if rest_scales is not None and (key_scales is None or value_width is None):
        lacking = "key_scales" if key_scales is None else "value_width"
        raise SpecError(f"{doing}: there are rest_scales, but no {lacking}.\n  Give all, or none.")
    new = [array(doing, name, x, "real numbers") for name, x in (("k", k), ("v", v)) if x is not None]
    q = array(doing, "q", q, "real numbers")
    arrays = {"cached_k": array(doing, "cached_k", cached_k, "real numbers"), "cached_v": cached_v}
    arrays |= {"key_scales": key_scales, "value_scales": value_scales, "rest_scales": rest_scales}
    named = {called: (name, x) for called, (name, x) in zip(_CACHED, arrays.items()) if x is not None}
    cache = {called: array(doing, name, x, "real numbers") for called, (name, x) in named.items()}
    lengths = array(doing, "lengths", lengths, "integers").astype(jnp.int32)
    scale = None if scale is None else number(doing, "scale", scale)
    query = read(doing, query_spec, q, ctx)
    if new:
        key = read(doing, key_spec, new[0], ctx)
    else:
        key = Spec.parse(key_spec)
        key = Spec(key.dims, ((),) * len(key.dims))
    held = read(doing, cache_spec, cache["cached keys"], ctx)
    order = _check(doing, (query, key, held), value_width, q, new, cache, lengths)
    room, key_heads = (cache["cached keys"].shape[at] for at in order[1:3])
    table, of_table, buckets = read_bias(doing, bias, bias_spec, buckets, query, q.shape[2], ctx) or (None, None, None)
    sinks, of_sinks = read_of_heads(doing, "sinks", sinks, sinks_spec, query, q.shape[2], ctx) or (None, None)
    slopes, of_slopes = read_slopes(doing, slopes, slopes_spec, query, q.shape[2], ctx) or (None, None)
    limits = read_limits(doing, bool(new), window, softcap, chunk)
    if limits.reach is not None and room < limits.reach - 1:
        fact = f"the cache has room for {room} keys, but a query sees {limits.reach - 1} keys before its own."
        remedy = f"Give it {limits.reach - 1} slots or more."
        raise report(SpecError, doing, [fault(held, held.dims[order[1]], fact, remedy)]) from None
    scales_order = [held.without(held.dims[order[3]]).dims.index(held.dims[at]) for at in order[:3]]
    # These transposes copy nothing in memory, since products read their operands in any order.
    ordered_cache = [x.transpose(order if x.ndim == 4 else scales_order) for x in cache.values()]
    ordered = Spec(tuple(held.dims[at] for at in order), tuple(held.axes[at] for at in order))
    name = f"cached attention {query}, {held}"
    extras = Extras(bias=of_table, sinks=of_sinks, slopes=of_slopes, buckets=buckets, limits=limits)
    stored = tuple(order.index(at) for at in range(4))
    form = _CachedAttention(query, key, ordered, scale, tuple(cache), value_width, name, bool(new), extras, stored)
    operands = q, *new, *ordered_cache, *Given(bias=table, sinks=sinks, slopes=slopes).operands, lengths
    if ctx.compiler_chooses and not extras.keeps_partial_sums:
        at = placement(form.query, form.key, form.cache, q.shape, key_heads, ctx.mesh)
        f = partial(_whole, form, at, ctx.mesh)
        return left_to_compiler(ctx, f, form.inputs, form.query, *operands, name=form.name)
    return _planned(form, ctx, *operands)


_Shapes = tuple[tuple[tuple[int, ...], int], ...]
"""The shape of every operand, and the number of bytes of one of its elements."""

_CACHED = ("cached keys", "cached values", "key scales", "value scales", "scales of the keys' rest")
_NEW = ("key", "value")
_COMBINED = ("maximum", "total", "result")
_CALLED = {"key": "new keys", "value": "new values", "total": "denominator"}
"""A mapping from the name of a tensor in this file to its name in plans, for tensors whose two names differ."""


@dataclass(frozen=True)
class _CachedAttention:
    query: Spec
    key: Spec
    cache: Spec
    scale: float | None
    cached: tuple[str, ...]
    """The names, from `_CACHED`, of those arrays of the cache that are given."""
    width: int | None
    """Number of leading entries of a key that are also its value; None if values are separate arrays."""
    name: str
    has_new: bool
    """Whether the new tokens have keys of their own."""
    extras: Extras
    stored: tuple[int, ...]
    """The indices of the dimensions of `cache`, in the order in which the caller stores these dimensions."""

    def as_stored(self, x: jax.Array) -> jax.Array:
        """Return keys or values that, on GPUs, keep in memory the order of dimensions in which the caller stores them.

        With one query for each key head, XLA for GPUs adds up the products of keys without cuBLAS, and prefers another
        order of dimensions. Without this constraint, it would transpose the whole cache of several layers in every
        step.
        """
        if x.ndim < 4 or not in_force.is_gpu():
            return x
        return with_layout_constraint(x, Layout(self.stored))

    @property
    def scales(self) -> Spec:
        return self.cache.without(self.cache.dims[3])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operands in the order in which they are passed."""
        new = _NEW[: 2 if self.width is None else 1] if self.has_new else ()
        return ("query", *new, *self.cached, *self.extras.of_heads, "lengths")

    @property
    def inputs(self) -> tuple[Spec, ...]:
        of = {
            "query": self.query,
            "key": self.key,
            "value": self.key,
            "lengths": Spec(("B",), ((),)),
        }
        of |= dict(zip(_CACHED, (self.cache, self.cache, *(self.scales,) * 3)))
        of |= {name: each.spec for name, each in self.extras.of_heads.items()}
        return tuple(of[name] for name in self.names)

    def placement(self, shapes: "_Shapes", ctx: Context) -> CachePlacement:
        """Return the specs of queries, keys and cache while a device attends to its part of the cache."""
        key_heads = shapes[self.names.index("cached keys")][0][2]
        return placement(self.query, self.key, self.cache, shapes[0][0], key_heads, ctx.mesh)

    def attend_cached(
        self, q, cache: Sequence[jax.Array], given: Given, lengths, queries, first, total: int, shards: Shards = ALONE
    ) -> Attended:
        """Attend with queries [B, L, H, D] to cached keys; return the result with statistics [B, L, H].

        Args:
            q: the queries.
            cache: keys [B, T, K, D], values if they are a separate array, and scales if there are any.
            given: the operands with values for each query head.
            lengths: [B], the number of tokens in each row before the first query.
            queries: [B, L], the positions of the queries.
            first: the slot of the first key in `cache`, which may be one device's part of the whole cache.
            total: the number of slots of the whole cache.
            shards: the number of shards of each dimension if the arrays are those of all devices; `ALONE` for one
                device.
        """
        near = None if self.extras.limits.reach is None else max(self.extras.limits.reach - 1, 1)
        if near is not None and near < q.shape[1] and shards[2] == 1:
            # If at least reach - 1 new tokens come before a query, its window or chunk begins at a new token, so the
            # query sees no cached key.
            found = self.attend_cached(q[:, :near], cache, given, lengths, queries[:, :near], first, total, shards)
            rest = ((0, 0), (0, q.shape[1] - near), (0, 0))
            top = jnp.pad(found.top, rest, constant_values=LOW)
            return Attended(top, jnp.pad(found.total, rest), jnp.pad(found.values, (*rest, (0, 0))))
        k, v, *scales = cache if self.width is None else (cache[0], *cache[:2], *cache[1:])
        slots, limits, ended = positions(k.shape[1], first), self.extras.limits, lengths[:, None]
        if limits.reach is None:
            keys, held = slots, slots < ended
        else:  # a slot of a ring holds the token last written to it, in this round or the previous one
            next_slot = ended % max(total, 1)
            keys = ended - next_slot + slots - jnp.where(slots < next_slot, 0, total)
            held = keys >= 0
        extras = self.extras
        if q.shape[1] == 1 and limits.reach is not None:  # for one query, the window is just a mask of keys
            held, extras = held & (keys >= limits.first(queries)), replace(extras, limits=limits.without_reach)
        terms = extras.terms(given._replace(mask=held), queries, keys, None)
        found = local_attended(q, k, v, terms, False, self.scale_of(q), *scales, width=self.width, shards=shards)
        return self.cut(found)

    def cut(self, found: Attended) -> Attended:
        """Return the result with its weighted sum of keys cut to the entries that are values.

        If values are not part of the keys, the result is returned unchanged.
        """
        return found if self.width is None else found._replace(values=found.values[..., : self.width])

    def terms_of_new(self, given: Given, lengths, queries, keys, ahead: jax.Array | None) -> Terms:
        """Return the `Terms` (mask, soft cap and biases) of the logits of the queries and the new tokens' keys.

        Args:
            given: which new keys are real, and the operands with values for each query head.
            lengths: [B], the number of tokens in each row before the new tokens.
            queries, keys: [1, L], the positions of queries and keys among the new tokens.
            ahead: the position of the first query minus the position of the first key; None for 0.
        """
        extras = self.extras
        if extras.limits.chunk is not None:  # where chunks begin depends on the positions in the whole row
            queries, keys = (lengths[:, None] + x for x in (queries, keys))
            extras = replace(extras, limits=replace(extras.limits, displaced=True))
        return extras.terms(given, queries, keys, ahead)

    def attend_new(self, q, new, terms: Terms, shards: Shards | None = None) -> Attended:
        """Attend causally to the keys of the new tokens, or to some of these keys.

        Args:
            q: [B, L, H, D].
            new: keys [B, L, K, D], and values if they are a separate array.
            terms: the terms of the logits, from `terms_of_new`. They have the mask of the new keys that are real, the
                position of the first query minus the position of the first new key, the soft cap, and the biases.
            shards: the number of shards of each dimension if the arrays are those of all devices; None for one device.
        """
        k, v = new[0], new[-1]
        in_place = terms.ahead is None and not terms.limits.displaced
        if shards is None and terms.is_plain and in_place and splash.fits(q, k, v):
            form = splash.Form(self.scale_of(q), self.extras.limits)
            kernel = partial(splash.attended, form, segments=None, sinks=None)
            out, normaliser = at_one_width(kernel, q, k, v)
            found = Attended(normaliser, jnp.ones_like(normaliser), out.astype(jnp.float32))
        else:
            found = local_attended(q, k, v, terms, True, self.scale_of(q), shards=shards or ALONE)
        return self.cut(found)

    def scale_of(self, q: jax.Array) -> float:
        """Return the factor of the logits, by default 1/sqrt(D)."""
        return q.shape[3] ** -0.5 if self.scale is None else self.scale


def _read_width(doing: str, width: Any) -> int:
    size = whole(width)
    if size is None or size < 1:
        raise SpecError(
            f"{doing}: value_width is {shown(width)}.\n"
            "  It is the number of entries at the beginning of each key that are used as its value. Pass a whole "
            "number, 1 or more."
        )
    return size


_SCALED = "the cache is {}, and only an int8 cache has scales: give none."
_UNSCALED = "the cache is {}, and has no scales: give key_scales and value_scales, or floating numbers."


def _is_int(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


def _check(
    doing: str,
    specs: tuple[Spec, ...],
    width: int | None,
    q: jax.Array,
    new: Sequence[jax.Array],
    cache: Mapping[str, jax.Array],
    lengths: jax.Array,
) -> tuple[int, ...]:
    """Check that specs and shapes agree, and return the indices of the cache's dimensions.

    The indices are those of batch, length, heads and head size, in this order.

    Raises:
        SpecError: the specs and the shapes do not agree.
        PlanError: the head size is sharded.
    """
    faults = [
        Fault(str(spec), 0, len(str(spec)), f"the {name} must have four dimensions: batch, length, heads, head size.")
        for name, spec in zip(("queries", "keys", "cached keys"), specs)
        if len(spec.dims) != 4
    ]
    if faults:
        raise report(SpecError, doing, faults) from None
    query, key, held = specs
    numbers, scales = ([cache[name] for name in names if name in cache] for names in (_CACHED[:2], _CACHED[2:]))
    cached_k, cached_v, quantized = numbers[0], numbers[-1], bool(scales)
    fact = _SCALED if quantized else _UNSCALED
    batch, along, heads, size = order = by_position(doing, held, key)
    as_cached = jax.ShapeDtypeStruct((*q.shape[:2], cached_k.shape[heads], cached_k.shape[size]), q.dtype)
    k, v = (new[0], new[-1]) if new else (as_cached, as_cached)
    # Arrays without four dimensions are faults below.
    values = (v.shape[3] if len(v.shape) == 4 else 0) if new else cached_v.shape[size] if cached_v.ndim == 4 else 0
    as_values = (*cached_k.shape[:size], values, *cached_k.shape[size + 1 :])
    values = values if width is None else width
    cached_heads = cached_k.shape[heads], cached_k.shape[size]
    rest = _CACHED[4] in cache
    there = (*cached_k.shape[:size], *cached_k.shape[size + 1 :])
    checks = (
        *((key, at, not k.shape[at], f"{key.dims[at]} has size 0: there is nothing to attend to.") for at in (2, 3)),
        (
            key,
            0,
            k.shape[0] != q.shape[0],
            f"the batch of the queries has size {q.shape[0]}, but that of the keys has size {k.shape[0]}.",
        ),
        (key, 1, k.shape[1] != q.shape[1], f"queries have length {q.shape[1]}, but keys have length {k.shape[1]}."),
        (
            key,
            3,
            k.shape[3] != q.shape[3],
            f"the head size of the queries is {q.shape[3]}, but that of the keys is {k.shape[3]}.",
        ),
        (query, 2, q.shape[2] % max(k.shape[2], 1), f"{k.shape[2]} key heads do not divide {q.shape[2]} heads."),
        (key, 1, v.shape[:3] != k.shape[:3], f"values have shape {v.shape}, but keys have {k.shape}."),
        (
            key,
            3,
            not values or values > k.shape[3],
            f"the head size of the values is {values}, but that of the keys is {k.shape[3]}.",
        ),
        (key, 3, rest and values == k.shape[3], "values are as wide as keys, so rest_scales have nothing to scale."),
        (
            held,
            batch,
            (rows := cached_k.shape[batch]) != q.shape[0],
            f"the batch has size {q.shape[0]}, but the cache has {rows} rows.",
        ),
        (
            held,
            heads,
            cached_heads != k.shape[2:],
            f"cached heads have shape {cached_heads}, but new heads have {k.shape[2:]}.",
        ),
        (
            held,
            along,
            cached_v.shape != as_values,
            f"values have shape {cached_v.shape}, but keys have {cached_k.shape}.",
        ),
        *(
            (held, along, x.shape != there, f"scales must have shape {there}, but the shape is {x.shape}.")
            for x in scales
        ),
        *((held, size, _is_int(x) != quantized, fact.format(x.dtype)) for x in numbers),
        (
            held,
            batch,
            lengths.shape != q.shape[:1],
            f"lengths must have shape {q.shape[:1]}, one number per row, but the shape is {lengths.shape}.",
        ),
    )
    if faults := [fault(spec, spec.dims[at], fact) for spec, at, wrong, fact in checks if wrong]:
        raise report(SpecError, doing, faults) from None
    faults = [
        fault(
            spec,
            spec.dims[at],
            f"the head size is sharded over {', '.join(spec.axes[at])}, and every device needs whole heads.",
            f"Use '{spec.with_axes(spec.dims[at], ())}', or shard another dimension.",
        )
        for spec, at in ((query, 3), (key, 3), (held, size))
        if spec.axes[at]
    ]
    if faults:
        raise report(PlanError, doing, faults) from None
    return order


def _forward(form: _CachedAttention, ctx: Context, *operands: jax.Array):
    shapes = tuple((x.shape, x.dtype.itemsize) for x in operands)
    steps, body = _value(form, shapes, ctx)
    return run(ctx, form.name, steps, body, form.inputs, form.query, *operands), None


def _refuse(form: _CachedAttention, ctx: Context, residuals, g):
    raise PlanError(
        f"cannot differentiate '{form.name}': it reads a cache, for decoding, and has no planned gradients.\n"
        "  Train with gspmd.ops.attention, or use lowering='xla'."
    )


_planned = planned_op(_forward, _refuse, lambda form: form.name)


@lru_cache(maxsize=1024)
def _value(form: _CachedAttention, shapes: _Shapes, ctx: Context):
    at = form.placement(shapes, ctx)
    parts = at.cache.axes[1]
    chains = Chains(ctx.mesh, **_chains_of(form, shapes, ctx))
    in_parts = bool(parts) or is_unknown(ctx.mesh)

    def body(*operands):
        given = {name: chains.send(name, x) for name, x in zip(form.names, operands)}
        q, lengths = given["query"], given["lengths"]
        of_heads = Given(**{name: given[name] for name in form.extras.of_heads})
        given |= {name: form.as_stored(given[name]) for name in form.cached}
        new, cache = ([given[name] for name in names if name in given] for names in (_NEW, form.cached))
        new, cache = at.share.pick(*new), at.share.pick(*cache)
        part = shard_index(parts)
        first, first_cached = shard_index(at.query.axes[1]) * q.shape[1], part * cache[0].shape[1]
        queries = positions(q.shape[1], first)
        total = shapes[form.names.index("cached keys")][0][1]
        found = form.attend_cached(q, cache, of_heads, lengths, lengths[:, None] + queries, first_cached, total)
        if new:
            first_new = shard_index(at.key.axes[1]) * new[0].shape[1]
            # Without `ahead`, blocks of later keys can be skipped; this is possible if neither queries nor new keys are
            # sharded along the sequence.
            ahead = first - first_new if at.query.axes[1] or at.key.axes[1] else None
            # If every part of the cache attends to the same new keys, they may be counted in one part only.
            counted = jnp.broadcast_to(part == 0, new[0].shape[:2]) if parts and not at.key.axes[1] else None
            keys, counting = positions(new[0].shape[1], first_new), of_heads._replace(mask=counted)
            terms = form.terms_of_new(counting, lengths, queries, keys, ahead)
            found = found.merge(form.attend_new(q, new, terms))
        found = found.with_sinks(of_heads.sinks, part == 0)
        if in_parts:
            total, values = found.relative_to(chains.send("maximum", found.top, reduce="max"))
            found = found._replace(total=chains.send("total", total), values=values)
        return chains.send("result", found.output(q.dtype))

    return chains.steps, body


def _chains_of(form: _CachedAttention, shapes: _Shapes, ctx: Context) -> dict[str, tuple[Step, ...]]:
    """Return the steps that move each tensor, keyed by the tensor's name."""
    if not is_unknown(ctx.mesh):
        return {name: steps_of(each, ctx, _CALLED.get(name, name)) for name, each in _moves(form, shapes, ctx).items()}
    # While the search traces, the moves to the cache are unknown too. They do not depend on the placements of new keys
    # and of operands with numbers for each head.
    of_heads = form.extras.of_heads
    bare: dict[str, Any] = {
        name: replace(each, spec=Spec(each.spec.dims, ((),) * len(each.spec.dims))) for name, each in of_heads.items()
    }
    asked = replace(form, key=Spec(form.key.dims, ((),) * 4), extras=replace(form.extras, **bare)), shapes, ctx
    names = (*form.names, *_COMBINED)
    comes = {"key": form.key, "value": form.key} | {name: each.spec for name, each in of_heads.items()}
    marks = {name: UnknownMoves(_moves, asked, name, before=comes.get(name)) for name in names}
    return {name: (UnknownStep.of(mark, form.query, form.query),) for name, mark in marks.items()}


def _moves(form: _CachedAttention, shapes: _Shapes, ctx: Context) -> dict[str, UnknownMove]:
    """Return every move between specs that the operation needs, keyed by the name of the tensor."""
    at = form.placement(shapes, ctx)
    parts = at.cache.axes[1]
    per_query = at.query.without(at.query.dims[3])
    scales = at.cache.without(at.cache.dims[3])
    there = {"query": at.query, "key": at.key, "value": at.key, "lengths": Spec(("B",), (at.query.axes[0],))}
    there |= dict(zip(_CACHED, (at.cache, at.cache, *(scales,) * 3)))
    there |= {name: by_heads(each.spec, at.query) for name, each in form.extras.of_heads.items()}
    queries, width = shapes[0]
    values = *queries[:3], form.width or shapes[form.names.index("cached values")][0][3]
    rows, split = queries[:3], per_query.with_partial(parts)
    return {
        **{name: UnknownMove((src,), there[name], *of) for name, src, of in zip(form.names, form.inputs, shapes)},
        "maximum": UnknownMove((split,), per_query, rows, FLOAT32, "max"),
        "total": UnknownMove((split,), per_query, rows, FLOAT32),
        "result": UnknownMove((at.query.with_partial(parts),), form.query, values, width),
    }


def _whole(form: _CachedAttention, at: CachePlacement, mesh: Mapping[str, int], *operands: jax.Array) -> jax.Array:
    """Attend in plain code, which the compiler partitions, with constraints that bring the queries to the cache."""

    def shards(key: Spec) -> Shards:
        rows, length, heads, _ = (prod(mesh.get(axis, 1) for axis in axes) for axes in at.query.axes)
        return rows, heads, length, prod(mesh[axis] for axis in key.axes[1])

    def placed(x: jax.Array, spec: Spec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, spec.partition_spec())

    given = dict(zip(form.names, operands))
    q, lengths = placed(given["query"], at.query), given["lengths"]
    of_heads = Given(**{name: given[name] for name in form.extras.of_heads})
    cache = [given[name] for name in form.cached]
    queries = positions(q.shape[1])
    total = cache[0].shape[1]
    found = form.attend_cached(q, cache, of_heads, lengths, lengths[:, None] + queries, 0, total, shards(at.cache))
    if form.has_new:
        new = [placed(given[name], at.key) for name in _NEW if name in given]
        terms = form.terms_of_new(of_heads, lengths, queries, positions(new[0].shape[1]), None)
        found = found.merge(form.attend_new(q, new, terms, shards(at.key)))
    found = found.with_sinks(of_heads.sinks)
    # The result is constrained too: jax 0.10.2 miscompiles a program that moves it right after the product.
    return placed(found.output(q.dtype), at.query)
