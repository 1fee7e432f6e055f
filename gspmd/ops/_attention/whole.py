"""The attention operation, in which a device attends with its own heads and sequences to all keys of each sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspmd.annotate.errors import Fault, SpecError, report
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops._attention.buckets import Buckets
from gspmd.ops._attention.heads import check_searchable, placed
from gspmd.ops._attention.kernels import splash
from gspmd.ops._attention.local import ALONE, MIXED, Shards, at_one_width, local_attention
from gspmd.ops._attention.online import sink_gradient
from gspmd.ops._attention.terms import (
    UNLIMITED,
    Extras,
    Given,
    Terms,
    positions,
    read_bias,
    read_limits,
    read_of_heads,
    read_segments,
    read_slopes,
)
from gspmd.ops._shared_heads import Share
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.options import flag, number
from gspmd.ops.interface.planned_op import Chains, fault, float32, planned_op, read, shard_index, sizes_of
from gspmd.planner.graph.resharding import move
from gspmd.planner.steps import Step
from gspmd.planner.unknown import UnknownStep, UnknownSteps, is_unknown


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_spec: str | Spec,
    key_spec: str | Spec,
    *,
    causal: bool = True,
    mask: jax.Array | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    scale: float | None = None,
    offset: jax.Array | int = 0,
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
    """Compute scaled dot-product attention: softmax(scale · q·kᵀ + bias + mask) · v; groups of heads share a key head.

    Batch and heads stay where they are, so the forward pass sends nothing. If mesh axes shard H but not K, each device
    slices out the key heads that its query heads use. The gradients of `k` and `v` are summed over the mesh axes that
    shard only the queries.

    If mesh axes shard the queries' L, the keys' T must be unsharded, or sharded over the same axes, as in `"BL_xHD",
    "BT_xKD"`. If T is sharded, keys and values go round a ring of devices under lowering `looped`, while the queries
    attend to the keys that have arrived. Under `blocking`, keys and values are gathered first. Under `auto`, the
    cheaper of these two ways is chosen. If T is sharded and `causal` is True, the sequence must be in zigzag order, in
    which every device has the same work. Tokens, positions, labels, `mask` and `segments` must all be in this order;
    see `gspmd.ops.zigzag_positions`.

    Padding may hold any numbers, including NaN. These numbers change neither the result nor the gradients of other
    tokens, and the gradients of padding are 0.

    Args:
        q: [B, L, H, D].
        k: [B, T, K, D]. K divides H, and query head h attends to key head h // (H/K).
        v: an array with the shape of `k`, except that D may differ. A ring and the TPU's kernel need the same D for all
            arrays, so there the narrower arrays are padded.
        query_spec: the spec of `q` and of the result, such as `"B_xLH_yzD"`. D must be unsharded.
        key_spec: the spec of `k` and `v`, such as `"B_xTK_yD"`, which may also have the letter L instead of T, as in
            `"BLKD"`. B must be sharded as in `query_spec`. K must be sharded over the leading mesh axes of H, or over
            none. T must be sharded over the mesh axes of L, or over none. D must be unsharded.
        causal: whether query i attends only to keys j ≤ i + offset.
        mask: [B, T] booleans, sharded like B and T of `k`, which are True for the keys that are not padding.
        segments: a pair of int32 arrays [B, L] and [B, T], for rows into which several documents are packed. They have
            the number of the document of each query and of each key. The first array is sharded like B and L of `q`,
            and the second like B and T of `k`. A query attends only to keys of its own segment. Segment 0 is padding,
            for keys and for queries. For self-attention pass the same array object twice, which tells the TPU's kernel
            that every query sees some key.
        scale: the factor of the logits; 1/sqrt(D) when None.
        offset: the position of the first query among the keys, as an int or an int32 scalar.
        bias: [R, H], the table of T5's relative position bias. In head h, `bias[buckets.of(j - i), h]` is added to the
            scaled logit of query i and key j, where i and j are positions in the row, even if the row has several
            documents. Each device computes the biases of its own logits, so only the table is sent.
        bias_spec: the spec of `bias`, such as `"RH_yz"`. The bias is moved to the mesh axes of the query heads if its
            own axes differ. The gradient of the bias is summed over the mesh axes of B and L, but it stays a partial
            sum over axes that are `reduced`, as in `"RH_yz reduced-x"`.
        buckets: the division of relative positions into R buckets.
        window: the number of keys that a query sees, including its own. A query at position p of a row attends only to
            keys at positions j > p - window. None for no window. A window needs `causal`.
        chunk: the number of tokens in a chunk. Rows are cut into chunks from their start, and a query attends only to
            keys of its own chunk. None for one chunk. Chunks need `causal`, and cannot be combined with `window` or
            `segments`. For packed documents, give every chunk of a document its own segment instead, and pass the size
            of a chunk as `window`.
        softcap: a cap on the logits, as in Gemma 2. Before bias and mask, the logits become
            softcap · tanh(scale · q·k / softcap).
        sinks: [H], a learned logit for each query head, as in gpt-oss. It adds to the denominator of the softmax and
            has no value: p_j = exp(l_j) / (Σ exp(l_j) + exp(sink)).
        sinks_spec: the spec of `sinks`, such as `"H_yz"`. Sinks are moved, and their gradient is summed or stays a
            partial sum, as described for `bias_spec`.
        slopes: [H], a constant of each query head for ALiBi. In head h, `slopes[h] · (j - i)` is added to the logit of
            query i and key j, where i and j are positions in the text. The slopes have no gradient.
        slopes_spec: the spec of `slopes`; None if they are unsharded.

    Returns:
        [B, L, H, D] in q's dtype, with the D of the values. Logits, biases and softmax are float32. A query that sees
        no key, such as padding on the left or padding of segment 0, gets 0.

    Raises:
        SpecError: a spec does not fit its array or the mesh; or the shapes do not agree; or a window or a chunk is
            given without `causal`; or a chunk is given together with a window or segments.
        PlanError: the specs of batch or heads leave a device without keys that it needs; or keys are sharded along the
            sequence, and `offset` is given; or keys are sharded along the sequence with `causal`, and the length is not
            a multiple of the number of zigzag chunks.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     q, k = gspmd.annotate(jnp.ones((1, 3, 4, 2)), "BLH_xD"), jnp.ones((1, 3, 1, 2))
        ...     v = jnp.arange(3.0).reshape(1, 3, 1, 1) * k
        ...     print(attention(q, k, v, "BLH_xD", "BTKD")[0, :, 0, 0])
        [0.  0.5 1. ]

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1; Shazeer 2019 (arXiv 1911.02150) and Ainslie et al.
        2023 (arXiv 2305.13245) for shared key heads; Pope et al. 2022 (arXiv 2211.05102), section 3.3, for the layouts;
        Liu et al. 2023 (arXiv 2310.01889) for the ring; Raffel et al. 2020 (arXiv 1910.10683), section 2.1, for the
        bias; Beltagy et al. 2020 (arXiv 2004.05150), section 3.1, for the window; Meta 2025, *The Llama 4 herd*,
        for chunks; Gemma Team 2024 (arXiv 2408.00118), section 2, for the soft cap; OpenAI 2025 (arXiv 2508.10925),
        section 2.2, for the sinks; Press et al. 2022 (arXiv 2108.12409), section 3, for the slopes.
    Differs: forward-mode differentiation works under lowering "xla" only.
    """
    ctx = context()
    doing = f"cannot attend from '{query_spec}' to '{key_spec}'"
    q, k, v = (array(doing, name, x, "real numbers") for name, x in (("q", q), ("k", k), ("v", v)))
    mask = None if mask is None else array(doing, "mask", mask, "real numbers")
    causal, scale = flag(doing, "causal", causal), None if scale is None else number(doing, "scale", scale)
    query, key = read(doing, query_spec, q, ctx), read(doing, key_spec, k, ctx)
    _check_shapes(doing, query, key, q, k, v, mask)
    of_queries, of_keys = (None, None) if segments is None else read_segments(doing, segments, query, key, q, k)
    table, of_table, buckets = read_bias(doing, bias, bias_spec, buckets, query, q.shape[2], ctx) or (None, None, None)
    sinks, of_sinks = read_of_heads(doing, "sinks", sinks, sinks_spec, query, q.shape[2], ctx) or (None, None)
    slopes, of_slopes = read_slopes(doing, slopes, slopes_spec, query, q.shape[2], ctx) or (None, None)
    shifted = not (isinstance(offset, int) and offset == 0)
    limits = read_limits(doing, causal, window, softcap, chunk)
    if limits.chunk is not None and segments is not None:
        raise SpecError(
            f"{doing}: chunk and segments cannot be combined, because chunks are counted from the start of a row, and a"
            " segment may begin anywhere in it.\n"
            f"  Give every chunk of a document its own segment, and pass window={limits.chunk} instead of chunk."
        )
    if limits.chunk is not None and not shifted and k.shape[1] <= limits.chunk:  # a single chunk hides no key
        limits = limits.without_reach
    extras = Extras(
        masked=mask is not None,
        segmented=segments is not None,
        shifted=shifted,
        bias=of_table,
        sinks=of_sinks,
        slopes=of_slopes,
        buckets=buckets,
        limits=limits,
        alike=segments is not None and segments[0] is segments[1],
    )
    more = Given(
        mask, of_queries, of_keys, table, sinks, slopes, _position(doing, offset) if shifted else None
    ).operands
    compiler_chooses = ctx.compiler_chooses and not extras.keeps_partial_sums
    if key.without_trivial(ctx.mesh).axes[1]:
        from gspmd.ops._attention import ring  # imported here, since most attention does not need it

        found, _ = placed(doing, query, key, q.shape[2], k.shape[2], ctx.mesh)
        ring.check(doing, key, ctx.mesh, causal, extras.shifted, q.shape[1], k.shape[1])
        scale = q.shape[3] ** -0.5 if scale is None else scale
        attend = partial(ring.attend, query, key, causal, scale, found, extras, compiler_chooses, ctx)
        return at_one_width(lambda *arrays: (attend(*arrays, *more),), q, k, v)[0]
    if compiler_chooses:
        rows, length, heads, _ = (prod(ctx.mesh.get(axis, 1) for axis in axes) for axes in query.axes)
        f = partial(_attend, extras, causal, scale, (rows, heads, length, 1))
        ins, name = (query, key, key, *extras.specs(query, key)), f"attention {query}, {key}"
        return checkpoint_name(left_to_compiler(ctx, f, ins, query, q, k, v, *more, name=name), MIXED)
    found, spread = placed(doing, query, key, q.shape[2], k.shape[2], ctx.mesh)
    core = _Core(query, key, causal, scale, extras, found, spread)
    if not _fits_kernel(core, ctx.mesh, q, k, v):
        return _core(core, ctx, q, k, v, *more)
    core = replace(core, kernel=True, scale=q.shape[3] ** -0.5 if scale is None else scale)
    return at_one_width(lambda *arrays: (_core(core, ctx, *arrays, *more),), q, k, v)[0]


def _position(doing: str, offset: jax.Array | int) -> jax.Array:
    position = array(doing, "offset", offset, "integers")
    if position.shape:
        raise SpecError(
            f"{doing}: offset must be a scalar, but its shape is {position.shape}.\n  Use jax.vmap for several offsets."
        )
    return position.astype(jnp.int32)


@dataclass(frozen=True)
class _Core:
    query: Spec
    key: Spec
    causal: bool
    scale: float | None
    extras: Extras
    share: Share
    spread: tuple[str, ...]
    """The mesh axes that shard the queries of a sequence, although each device needs all keys of the sequence."""
    kernel: bool = False
    """Whether attention runs in the TPU's kernel, whose normalizers are kept for the gradient."""

    @property
    def used(self) -> Spec:
        """The spec of the keys to which `Share.pick` is applied; K is also sharded over mesh axes `Share.sliced`."""
        head = self.key.dims[2]
        return self.key.with_axes(head, (*self.key.axes_of(head), *self.share.sliced))

    @property
    def inputs(self) -> tuple[Spec, ...]:
        return (self.query, self.key, self.key, *self.extras.specs(self.query, self.key))

    @property
    def partial_key(self) -> Spec:
        """The spec that the keys' gradient has before this gradient is summed over devices."""
        return self.used.with_partial((*self.share.common, *self.spread))

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, *more: jax.Array) -> jax.Array:
        """Attend with the heads of one device, without a collective; the call must be inside a shard_map."""
        k, v = self.share.pick(k, v)
        first = shard_index(self.spread) * q.shape[1] if self.spread else None
        return _attend(self.extras, self.causal, self.scale, ALONE, q, k, v, *more, first=first)

    def kernel_form(self, q: jax.Array) -> splash.Form:
        """Return the options of the TPU's kernel for the queries `q`."""
        return splash.Form(q.shape[3] ** -0.5 if self.scale is None else self.scale, self.extras.limits)


def _kernel_terms(given: Given) -> Terms:
    """Return terms with only the segments, which are used to set padding in the kernel's arrays to zero."""
    return Terms(segments=None if given.of_queries is None else (given.of_queries, given.of_queries))


def _fits_kernel(core: _Core, mesh: Mapping[str, int], q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Return whether the TPU's kernel can run.

    It can if attention is causal from the first token, has no options that the kernel lacks, and has shapes that fit.
    """
    taken = replace(core.extras, sinks=None, limits=UNLIMITED)
    if not core.causal or core.spread or taken not in (Extras(), Extras(segmented=True, alike=True)):
        return False
    queries, keys, values = (
        jax.ShapeDtypeStruct(spec.local_shape(sizes_of(spec, x.shape), mesh), x.dtype)
        for spec, x in ((core.query, q), (core.key, k), (core.key, v))
    )
    return splash.fits(queries, keys, values)


def _attend(extras: Extras, causal: bool, scale: float | None, shards: Shards, q, k, v, *more, first=None) -> jax.Array:
    """Attend with the arrays of all devices, or with those of one device.

    `first` is the position of the first query in these arrays, without the caller's offset. None stands for 0.
    """
    given = extras.named(more)
    starts = [start for start in (first, given.offset) if start is not None]
    ahead = jnp.asarray(sum(starts), jnp.int32) if starts else None
    queries = positions(q.shape[1], 0 if ahead is None else ahead)
    terms = extras.terms(given, queries, positions(k.shape[1]), ahead)
    return terms.real(local_attention(*terms.cleared(q, k, v), terms, causal, scale, shards, given.sinks))


def _check_shapes(doing: str, query: Spec, key: Spec, q, k, v, mask) -> None:
    faults = [
        Fault(str(spec), 0, len(str(spec)), f"the {name} must have four dimensions: batch, length, heads, head size.")
        for name, spec in (("queries", query), ("keys", key))
        if len(spec.dims) != 4
    ]
    if not faults:
        checks = (
            (
                0,
                q.shape[0] != k.shape[0],
                f"the batch of the queries has size {q.shape[0]}, but that of the keys has size {k.shape[0]}.",
            ),
            (
                3,
                q.shape[3] != k.shape[3],
                f"the head size of the queries is {q.shape[3]}, but that of the keys is {k.shape[3]}.",
            ),
            *((at, not k.shape[at], f"{key.dims[at]} has size 0: there is nothing to attend to.") for at in (2, 3)),
            (
                2,
                q.shape[2] % max(k.shape[2], 1) != 0,
                f"{k.shape[2]} key heads do not divide {q.shape[2]} query heads.",
            ),
            (1, v.ndim != 4 or v.shape[:3] != k.shape[:3], f"values have shape {v.shape}, but keys have {k.shape}."),
            (3, v.ndim == 4 and not v.shape[3], "the values' head size is 0."),
            (
                1,
                mask is not None and mask.shape != k.shape[:2],
                f"the mask must have shape {k.shape[:2]}, but the shape is {getattr(mask, 'shape', None)}.",
            ),
        )
        faults = [fault(key, key.dims[at], fact) for at, wrong, fact in checks if wrong]
    if faults:
        raise report(SpecError, doing, faults) from None


def _forward(core: _Core, ctx: Context, q: jax.Array, k: jax.Array, v: jax.Array, *more: jax.Array):
    steps, body = _value(core, q.shape[2], (k.shape, v.shape), k.dtype.itemsize, ctx)
    outs = (core.query, core.query.without(core.query.dims[3])) if core.kernel else core.query
    found = run(ctx, f"attention {core.query}, {core.key}", steps, body, core.inputs, outs, q, k, v, *more)
    found = checkpoint_name(found, MIXED)  # everything that the gradient reads has this name
    y, kept = (found[0], found) if core.kernel else (found, ())
    return y, (q, k, v, kept, more)


def _backward(core: _Core, ctx: Context, residuals, g: jax.Array):
    q, k, v, kept, more = residuals
    steps, body = _gradient(core, q.shape[2], (k.shape, v.shape), k.dtype.itemsize, ctx)
    of_kept = (core.query, core.query.without(core.query.dims[3]))[: len(kept)]
    ins = (core.query, core.query, core.key, core.key, *of_kept, *core.extras.specs(core.query, core.key))
    outs = (core.query, core.key, core.key, *core.extras.gradients)
    name = f"gradient of attention {core.query}, {core.key}"
    d_q, d_k, d_v, *learned = run(ctx, name, steps, body, ins, outs, g, q, k, v, *kept, *more)
    return d_q, d_k, d_v, *core.extras.cotangents(more, *learned)


_Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shapes of the unsharded keys and of the unsharded values."""

_core = planned_op(_forward, _backward, lambda core: f"attention {core.query}, {core.key}")


@lru_cache(maxsize=1024)
def _value(core: _Core, heads: int, shapes: _Shapes, width: int, ctx: Context):
    # These chains are slices, which send nothing: they pick a device's key heads.
    planned = _planned(core, heads, shapes, width, ctx)
    bring = {name: planned[name] for name in ("key", "value")} | core.extras.bring(core.query, heads, ctx)
    chains = Chains(ctx.mesh, **bring)

    def body(q, k, v, *more):
        k, v = chains.send("key", k), chains.send("value", v)
        given = core.extras.sent(chains, more)
        if core.kernel:
            terms = _kernel_terms(given)
            picked = terms.cleared(q, *core.share.pick(k, v))
            out, normaliser = splash.attended(core.kernel_form(q), *picked, given.of_queries, given.sinks)
            return terms.real(out), normaliser
        return core.attend(q, k, v, *given.operands)

    return chains.steps, body


@lru_cache(maxsize=1024)
def _gradient(core: _Core, heads: int, shapes: _Shapes, width: int, ctx: Context):
    planned = _planned(core, heads, shapes, width, ctx)
    bring = {name: planned[name] for name in ("key", "value")} | core.extras.bring(core.query, heads, ctx)
    back = {name: planned[name] for name in ("d_key", "d_value")} | core.extras.back(core.query, heads, ctx)
    chains = Chains(ctx.mesh, **bring, **back)

    def body(g, q, k, v, *more):
        # The logits are computed again, since they are larger than everything that is kept. If those of the forward
        # pass are still in memory, the compiler reuses them.
        k, v = chains.send("key", k), chains.send("value", v)
        kept, more = more[: 2 * core.kernel], more[2 * core.kernel :]
        given = core.extras.sent(chains, more)
        if core.kernel:
            (out, normaliser), terms = kept, _kernel_terms(given)
            picked, unpick = jax.vjp(lambda q, k, v: terms.cleared(q, *core.share.pick(k, v)), q, k, v)
            g = terms.real(g)
            found = splash.gradients(core.kernel_form(q), *picked, given.of_queries, out, normaliser, g)
            d_q, d_k, d_v = unpick(found)
            learned = () if given.sinks is None else (sink_gradient(given.sinks, normaliser, out, g),)
        else:
            attend = lambda q, k, v, *learned: core.attend(q, k, v, *given.with_learned(learned).operands)  # noqa: E731
            _, transpose = jax.vjp(attend, q, k, v, *map(float32, given.learned))
            d_q, d_k, d_v, *learned = transpose(g)
        d_k, d_v = chains.send("d_key", d_k), chains.send("d_value", d_v)
        return d_q, d_k, d_v, *core.extras.send_back(chains, learned)

    return chains.steps, body


def _planned(core: _Core, heads: int, shapes: _Shapes, width: int, ctx: Context) -> dict[str, tuple[Step, ...]]:
    """Return the steps of the forward pass and of the backward pass.

    The forward pass moves keys and values to the queries, and the backward pass moves the gradients of keys and values
    back.
    """
    if is_unknown(ctx.mesh):  # in a trace for the search the heads that a device needs are unknown too
        check_searchable(f"cannot attend from '{core.query}' to '{core.key}'", core.query, core.key)
        asked = core.query, core.key, heads, shapes, width, ctx
        return {name: (UnknownStep.of(UnknownSteps(_chains, asked, name), core.key, core.key),) for name in _CHAINS}
    found = {}
    for name, shape in zip(("key", "value"), shapes):
        sizes = sizes_of(core.key, shape)
        found[name] = move(core.key, core.used, sizes, ctx.mesh, width, ctx.chip, name)
        back = f"gradient of {name}"
        found[f"d_{name}"] = move(core.partial_key, core.key, sizes, ctx.mesh, width, ctx.chip, back)
    return found


_CHAINS = ("key", "value", "d_key", "d_value")


def _chains(query: Spec, key: Spec, heads: int, shapes: _Shapes, width: int, ctx: Context):
    """Return the steps of `_planned` for specs of queries and keys that have no unknowns."""
    share, spread = placed(f"cannot attend from '{query}' to '{key}'", query, key, heads, shapes[0][2], ctx.mesh)
    return _planned(_Core(query, key, True, None, Extras(), share, spread), heads, shapes, width, ctx)
