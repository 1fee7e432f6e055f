"""Attention of new tokens to a key/value cache: queries are moved to the cache, and the cache stays."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod

import jax
import jax.numpy as jnp

from gspmd.annotate.errors import Fault, PlanError, SpecError, report
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops._attention.kernels import splash
from gspmd.ops._attention.local import ALONE, Shards, local_attended
from gspmd.ops._attention.online import Attended
from gspmd.ops._attention.placement import CachePlacement, by_position, placement
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.options import number
from gspmd.ops.interface.planned_op import FLOAT32, Chains, fault, planned_op, read, shard_index, steps_of
from gspmd.planner.steps import Step
from gspmd.planner.unknown import UnknownMove, UnknownMoves, UnknownStep, is_unknown


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cached_k: jax.Array,
    cached_v: jax.Array,
    query_spec: str | Spec,
    key_spec: str | Spec,
    cache_spec: str | Spec,
    *,
    lengths: jax.Array,
    scale: float | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
) -> jax.Array:
    """Attend to the cached keys of each row and, causally, to the keys of the new tokens themselves.

    Query i of row b attends to cached t < lengths[b] and to new j ≤ i. The cache stays where it is, over any mix of
    batch, heads and length; the plan moves queries there, and the result back. Where T is sharded, each device
    attends to its own part, and the results are combined by the logarithm of the sum of exponentials: two
    all-reduces of [B, L, H] float32 (the maximum, then the denominator), and one sum of the weighted values in q's
    dtype, scattered straight to the placement of the result if that is cheaper. Mesh axes that the cache does not use
    keep sharding their dimension of `q`, if sizes allow it; over other axes the queries are gathered.

    Args:
        q: [B, L, H, D] the new tokens' queries.
        k, v: [B, L, K, D] the new tokens' own keys and values; K divides H, and query head h attends to key head
            h // (H/K).
        cached_k, cached_v: [B, K, T, D] finite numbers, in any order of dimensions; int8 if scales are given.
        query_spec: the spec of `q` and of the result, `"BLH_xyzD"`.
        key_spec: the spec of `k` and `v`, `"BLKD"`, in the order of `k`. D is unsharded in all three specs.
        cache_spec: order and placement of the cache, `"B_xKT_yzD"`, with the letters of batch, heads and head size of
            `key_spec`, and one for the cached length. The order affects only how memory is read: TPUs read best with
            heads before length.
        lengths: [B] integers, the number of cached tokens of each row, replicated.
        scale: the factor of the logits; 1/sqrt(D) when None.
        key_scales, value_scales: [B, K, T] float32 scales of an int8 cache, ordered and placed like the cache; they
            scale logits and probabilities, and the cache is never widened in memory.

    Returns:
        [B, L, H, D] in q's dtype; logits and softmax are float32.

    Raises:
        SpecError: a spec does not fit its array or the mesh, or the shapes do not agree.
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
        (arXiv 1805.02867) for the statistics of a softmax in parts.
    """
    ctx = context()
    doing = f"cannot attend from '{query_spec}' to the cache '{cache_spec}'"
    names = "q", "k", "v", "cached_k", "cached_v"
    q, k, v, *cache = (array(doing, name, x, "real numbers") for name, x in zip(names, (q, k, v, cached_k, cached_v)))
    lengths = array(doing, "lengths", lengths, "integers").astype(jnp.int32)
    scale = None if scale is None else number(doing, "scale", scale)
    if (key_scales is None) != (value_scales is None):
        raise SpecError(f"{doing}: an int8 cache has key_scales and value_scales; one is missing.\n  Give both.")
    if key_scales is not None:
        scales = (("key_scales", key_scales), ("value_scales", value_scales))
        cache += [array(doing, name, x, "real numbers") for name, x in scales]
    query, key = read(doing, query_spec, q, ctx), read(doing, key_spec, k, ctx)
    held, quantized = read(doing, cache_spec, cache[0], ctx), key_scales is not None
    order = _check(doing, (query, key, held), quantized, q, k, v, *cache, lengths=lengths)
    scales_order = [held.without(held.dims[order[3]]).dims.index(held.dims[at]) for at in order[:3]]
    # Nothing is copied in memory: products read their operands in any order.
    cache = [x.transpose(order if x.ndim == 4 else scales_order) for x in cache]
    ordered = Spec(tuple(held.dims[at] for at in order), tuple(held.axes[at] for at in order))
    form = _CachedAttention(query, key, ordered, scale, quantized, f"cached attention {query}, {held}")
    operands = q, k, v, *cache, lengths
    if ctx.compiler_chooses:
        at = placement(form.query, form.key, form.cache, q.shape, k.shape[2], ctx.mesh)
        f = partial(_whole, form.scale, at, ctx.mesh)
        return left_to_compiler(ctx, f, form.inputs, form.query, *operands, name=form.name)
    return _planned(form, ctx, *operands)


_Shapes = tuple[tuple[tuple[int, ...], int], ...]
"""The shape of every operand, and the bytes of an element."""

_CACHED = ("cached keys", "cached values", "key scales", "value scales")
_COMBINED = ("lengths", "maximum", "total", "result")
_CALLED = {"key": "new keys", "value": "new values", "total": "denominator"}
"""The names that plans use for tensors with other names here."""


@dataclass(frozen=True)
class _CachedAttention:
    query: Spec
    key: Spec
    cache: Spec
    scale: float | None
    quantized: bool
    name: str

    @property
    def scales(self) -> Spec:
        return self.cache.without(self.cache.dims[3])

    @property
    def inputs(self) -> tuple[Spec, ...]:
        cache = (self.cache, self.cache, *(self.scales, self.scales) * self.quantized)
        return (self.query, self.key, self.key, *cache, Spec(("B",), ((),)))


_SCALED = "the cache is {}, and scales are those of int8: give none."
_UNSCALED = "the cache is {}, and has no scales: give key_scales and value_scales, or floating numbers."


def _is_int(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


def _check(doing: str, specs: tuple[Spec, ...], quantized: bool, q, k, v, *cache, lengths) -> tuple[int, ...]:
    """Check that specs and shapes agree; return the dimensions of the cache with batch, length, heads and head size."""
    faults = [
        Fault(str(spec), 0, len(str(spec)), f"the {name} have four dimensions: batch, length, heads, head size.")
        for name, spec in zip(("queries", "keys", "cached keys"), specs)
        if len(spec.dims) != 4
    ]
    if faults:
        raise report(SpecError, doing, faults) from None
    (query, key, held), (cached_k, cached_v, *scales), fact = specs, cache, _SCALED if quantized else _UNSCALED
    batch, along, heads, size = order = by_position(doing, held, key)
    cached_heads = cached_k.shape[heads], cached_k.shape[size]
    there = (*cached_k.shape[:size], *cached_k.shape[size + 1 :])
    checks = (
        *((key, at, not k.shape[at], f"{key.dims[at]} has size 0: there is nothing to attend to.") for at in (2, 3)),
        (key, 0, k.shape[0] != q.shape[0], f"the queries' batch has size {q.shape[0]}, the keys' {k.shape[0]}."),
        (key, 1, k.shape[1] != q.shape[1], f"there are {q.shape[1]} queries in a row, and {k.shape[1]} keys."),
        (key, 3, k.shape[3] != q.shape[3], f"the queries' head size is {q.shape[3]}, the keys' {k.shape[3]}."),
        (query, 2, q.shape[2] % max(k.shape[2], 1), f"{k.shape[2]} key heads do not divide {q.shape[2]} heads."),
        (key, 1, v.shape != k.shape, f"values have shape {v.shape}, keys {k.shape}."),
        (held, batch, (rows := cached_k.shape[batch]) != q.shape[0], f"batch {q.shape[0]} has a cache of {rows} rows."),
        (held, heads, cached_heads != k.shape[2:], f"cached heads are {cached_heads}, new {k.shape[2:]}."),
        (held, along, cached_v.shape != cached_k.shape, f"values have shape {cached_v.shape}, keys {cached_k.shape}."),
        *((held, along, x.shape != there, f"scales have shape {x.shape}, not {there}.") for x in scales),
        *((held, size, _is_int(x) != quantized, fact.format(x.dtype)) for x in (cached_k, cached_v)),
        (held, batch, lengths.shape != q.shape[:1], f"lengths have shape {lengths.shape}, not one number per row."),
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
        f"cannot differentiate '{form.name}': a cache is read while decoding, and gradients are not planned for it.\n"
        "  Train with gspmd.ops.attention, or use lowering='xla'."
    )


_planned = planned_op(_forward, _refuse, lambda form: form.name)


@lru_cache(maxsize=1024)
def _value(form: _CachedAttention, shapes: _Shapes, ctx: Context):
    at = placement(form.query, form.key, form.cache, shapes[0][0], shapes[1][0][2], ctx.mesh)
    parts = at.cache.axes[1]
    chains = Chains(ctx.mesh, **_chains_of(form, shapes, ctx))
    names = (*_CACHED[: 4 if form.quantized else 2], "lengths")
    in_parts = bool(parts) or is_unknown(ctx.mesh)

    def body(q, k, v, *rest):
        q, k, v = chains.send("query", q), chains.send("key", k), chains.send("value", v)
        *cache, lengths = (chains.send(name, x) for name, x in zip(names, rest))
        k, v, *cache = at.share.pick(k, v, *cache)
        part = shard_index(parts)
        ahead, counted = None, None  # if neither queries nor new keys are sharded, later keys can be left out
        if at.query.axes[1] or at.key.axes[1]:
            ahead = shard_index(at.query.axes[1]) * q.shape[1] - shard_index(at.key.axes[1]) * k.shape[1]
        if parts and not at.key.axes[1]:
            counted = jnp.broadcast_to(part == 0, k.shape[:2])  # replicated on every part, each new key counts once
        found = _attended(form.scale, q, k, v, cache, lengths - part * cache[0].shape[1], ahead, counted)
        if in_parts:
            total, values = found.relative_to(chains.send("maximum", found.top, reduce="max"))
            found = found._replace(total=chains.send("total", total), values=values)
        return chains.send("result", found.output(q.dtype))

    return chains.steps, body


def _chains_of(form: _CachedAttention, shapes: _Shapes, ctx: Context) -> dict[str, tuple[Step, ...]]:
    """Return the steps of everything that moves, by name."""
    if not is_unknown(ctx.mesh):
        return {name: steps_of(each, ctx, _CALLED.get(name, name)) for name, each in _moves(form, shapes, ctx).items()}
    # The moves to the cache are not known either. They do not depend on the source of the new keys.
    asked = replace(form, key=Spec(form.key.dims, ((),) * 4)), shapes, ctx
    names = ("query", "key", "value", *_CACHED[: 4 if form.quantized else 2], *_COMBINED)
    comes = {"key": form.key, "value": form.key}
    marks = {name: UnknownMoves(_moves, asked, name, before=comes.get(name)) for name in names}
    return {name: (UnknownStep.of(mark, form.query, form.query),) for name, mark in marks.items()}


def _moves(form: _CachedAttention, shapes: _Shapes, ctx: Context) -> dict[str, UnknownMove]:
    """Return every move, by the name of its tensor."""
    at = placement(form.query, form.key, form.cache, shapes[0][0], shapes[1][0][2], ctx.mesh)
    parts = at.cache.axes[1]
    per_row, per_query = Spec(("B",), ((),)), at.query.without(at.query.dims[3])
    scales = at.cache.without(at.cache.dims[3])
    there = (at.cache, at.cache, scales, scales)
    cached = zip(_CACHED, form.inputs[3:-1], there, shapes[3:-1])
    (queries, width), (keys, key_width), (values, value_width) = shapes[:3]
    rows, split = queries[:3], per_query.with_partial(parts)
    return {
        "query": UnknownMove((form.query,), at.query, queries, width),
        "key": UnknownMove((form.key,), at.key, keys, key_width),
        "value": UnknownMove((form.key,), at.key, values, value_width),
        **{name: UnknownMove((src,), dst, *shape) for name, src, dst, shape in cached},
        "lengths": UnknownMove((per_row,), Spec(("B",), (at.query.axes[0],)), queries[:1], 4),
        "maximum": UnknownMove((split,), per_query, rows, FLOAT32, "max"),
        "total": UnknownMove((split,), per_query, rows, FLOAT32),
        "result": UnknownMove((at.query.with_partial(parts),), form.query, queries, width),
    }


def _attended(scale: float | None, q, k, v, cache, lengths, ahead=None, counted=None, shards=None) -> Attended:
    """Return the result of queries [B, L, H, D]: [B, L, H] and [B, L, H, D].

    Args:
        scale, q, k, v: the arguments of `cached_attention`; the keys may be a part of the new tokens'.
        cache: keys and values [B, T, K, D], and their scales if there are any.
        lengths: [B], the number of these cached keys to attend to; of any sign and size.
        ahead: the position of the first query minus that of the first new key; None for 0.
        counted: [B, L] whether a new key counts; None if all do.
        shards: for arrays of all devices, the shards of the cached and of the new keys; None for the pieces of one
            device.
    """
    cached_k, cached_v, *scales = cache
    scale = q.shape[3] ** -0.5 if scale is None else scale
    held = jax.lax.broadcasted_iota(jnp.int32, cached_k.shape[:2], 1) < lengths[:, None]
    of_cached, of_new = shards or (ALONE, ALONE)
    found = local_attended(q, cached_k, cached_v, held, None, False, scale, *scales, shards=of_cached)
    if counted is None and ahead is None and shards is None and splash.fits(q, k, v):
        out, normaliser = splash.attended(scale, q, k, v)
        return found.merge(Attended(normaliser, jnp.ones_like(normaliser), out.astype(jnp.float32)))
    return found.merge(local_attended(q, k, v, counted, ahead, True, scale, shards=of_new))


def _whole(scale: float | None, at: CachePlacement, mesh: Mapping[str, int], q, k, v, *rest) -> jax.Array:
    """Plain code on arrays of all devices for the compiler to partition; constraints bring queries to the cache."""

    def shards(key: Spec) -> Shards:
        rows, length, heads, _ = (prod(mesh.get(axis, 1) for axis in axes) for axes in at.query.axes)
        return rows, heads, length, prod(mesh[axis] for axis in key.axes[1])

    def placed(x: jax.Array, spec: Spec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, spec.partition_spec())

    q, k, v = placed(q, at.query), placed(k, at.key), placed(v, at.key)
    # the result is constrained too: jax 0.10.2 miscompiles it if it is moved right after the product
    found = _attended(scale, q, k, v, rest[:-1], rest[-1], shards=(shards(at.cache), shards(at.key)))
    return placed(found.output(q.dtype), at.query)
