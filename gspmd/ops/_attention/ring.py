"""Attention of sequences that are sharded over devices: queries stay, keys and values arrive chunk by chunk.

A device attends to its own chunk first, and then to one of each other device. Chunks either come round a ring, one
permute each, while the device attends to the one before, or all are gathered first. Results for different keys are
merged (`online.Attended`). The gradients of a chunk go round the same ring, and every device adds its part, or they are
reduce-scattered.

Under causal attention a device has chunks i and 2n - 1 - i of 2n (see `zigzag`). Two chunks arrive from device j. The
late queries attend to the early one. In addition, either the early queries attend to it too (j < i), or the late
queries attend to the late chunk (j > i). So every device has two products of half by half, without a mask, for every j.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from gspmd.annotate.errors import PlanError, SpecError, report
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops._attention.circulation import Gathered, RingOfChunks, is_looped
from gspmd.ops._attention.heads import Share
from gspmd.ops._attention.local import MIXED, local_attended, local_attention, local_gradients
from gspmd.ops._attention.online import Attended
from gspmd.ops._attention.zigzag import Pairs, in_order, zigzag
from gspmd.ops.interface.planned_op import Chains, fault, planned_op
from gspmd.planner.graph.resharding import move


@dataclass(frozen=True)
class _Cut:
    query: Spec
    key: Spec
    causal: bool
    scale: float
    share: Share
    masked: bool

    @property
    def name(self) -> str:
        return f"attention {self.query}, {self.key}"

    @property
    def inputs(self) -> tuple[Spec, ...]:
        return (self.query, self.key, self.key) + (Spec(self.key.dims[:2], self.key.axes[:2]),) * self.masked

    @property
    def statistic(self) -> Spec:
        return self.query.without(self.query.dims[3])

    @property
    def used(self) -> Spec:
        """A device's chunk of the keys, with the heads that it sends of those that several devices hold."""
        head = self.key.dims[2]
        return self.key.with_axes(head, (*self.key.axes_of(head), *self.share.sliced))

    def without_trivial(self, mesh: Mapping[str, int]) -> "_Cut":
        """Return the same with only the axes of size above 1: types have the others too, but steps do not."""
        return replace(self, query=self.query.without_trivial(mesh), key=self.key.without_trivial(mesh))


def check(doing: str, key: Spec, mesh: Mapping[str, int], causal: bool, shifted: bool, queries: int, keys: int) -> None:
    """Check that queries and keys are the same tokens, and that zigzag order can cut them.

    Raises:
        SpecError: the numbers of queries and keys differ.
        PlanError: zigzag order does not divide the length, or the first query has an offset.
    """
    devices, dim = prod(mesh[axis] for axis in key.axes[1]), key.dims[1]
    if queries != keys:
        fact = f"there are {queries} queries in a sequence and {keys} keys, and both are cut over the same devices."
        raise report(SpecError, doing, [fault(key, dim, fact, "Leave the keys whole, or give as many.")]) from None
    faults = []
    if shifted:
        fact = f"dimension {dim} is cut, so queries and keys are the same tokens, and there is an offset between them."
        faults.append(fault(key, dim, fact, f"Leave out offset, or leave {dim} whole: '{key.with_axes(dim, ())}'."))
    if causal and keys % (2 * devices):
        fact = f"dimension {dim} has size {keys}, and zigzag order cuts it into {2 * devices} chunks, two for a device."
        faults.append(fault(key, dim, fact, f"Use a multiple of {2 * devices}, or fewer devices."))
    if faults:
        raise report(PlanError, doing, faults) from None


def attend(
    query: Spec, key: Spec, causal: bool, scale: float, share: Share, ctx: Context, q, k, v, *mask: jax.Array
) -> jax.Array:
    """Attend with arrays that are placed as the specs say; see `whole.attention`."""
    cut = _Cut(query, key, causal, scale, share, bool(mask))
    if ctx.compiler_chooses:
        f = partial(_whole, cut, tuple(prod(ctx.mesh[axis] for axis in axes) for axes in query.axes))
        return checkpoint_name(left_to_compiler(ctx, f, cut.inputs, query, q, k, v, *mask, name=cut.name), MIXED)
    return _attend(cut, ctx, q, k, v, *mask)


def _whole(cut: _Cut, parts: tuple[int, ...], q, k, v, *mask) -> jax.Array:
    """Plain code on arrays of all devices, for the compiler to partition; in zigzag order if attention is causal."""
    rows, length, heads, _ = parts
    if cut.causal:
        q, k, v, *mask = (in_order(x, length) for x in (q, k, v, *mask))
    seen = mask[0].astype(bool) if mask else None
    y = local_attention(q, k, v, seen, None, cut.causal, cut.scale, (rows, heads, length, 1))
    return zigzag(y, length) if cut.causal else y


def _forward(cut: _Cut, ctx: Context, q, k, v, *mask):
    steps, body = _value(cut.without_trivial(ctx.mesh), q.shape, k.shape, k.dtype.name, ctx)
    found = run(ctx, cut.name, steps, body, cut.inputs, (cut.query, cut.statistic), q, k, v, *mask)
    y, normaliser = checkpoint_name(found, MIXED)  # computed here, or the gradient would send keys round again for them
    return y, (q, k, v, mask, y, normaliser)


def _backward(cut: _Cut, ctx: Context, kept, g):
    q, k, v, mask, y, normaliser = kept
    steps, body = _gradient(cut.without_trivial(ctx.mesh), q.shape, k.shape, k.dtype.name, ctx)
    ins = (cut.query, cut.query, cut.statistic, *cut.inputs)
    outs = (cut.query, cut.key, cut.key)
    grads = run(ctx, f"gradient of {cut.name}", steps, body, ins, outs, g, y, normaliser, q, k, v, *mask)
    return (*grads, *(None for _ in mask))


_attend = planned_op(_forward, _backward, lambda cut: cut.name)


class _Chains:
    """The chains of steps that bring keys, values and the mask to a device, and gradients back."""

    def __init__(self, cut: _Cut, q_shape: tuple[int, ...], shape: tuple[int, ...], dtype: str, ctx: Context):
        sizes, used, parts = dict(zip(cut.key.dims, shape)), cut.used, cut.key.axes[1]
        dim, head = cut.key.dims[1:3]
        # where several devices hold the same heads, each sends the one that it uses
        sent = sizes | {head: prod(ctx.mesh[axis] for axis in used.axes_of(head))} if cut.share.heads > 1 else sizes
        whole, width = used.with_axes(dim, ()), jnp.dtype(dtype).itemsize

        def chains(src: Spec, dst: Spec, name: str, of: str, sizes=sizes):
            return {
                name.format(each): move(src, dst, sizes, ctx.mesh, width, ctx.chip, of.format(each))
                for each in ("key", "value")
            }

        gathers = chains(used, whole, "{}s", "{}s", sent)
        scatters = chains(whole.with_partial(parts), used, "d_{}s", "gradient of {}s", sent)
        self.bring = chains(cut.key, used, "{}", "{}") | gathers
        if cut.masked:
            mask = Spec(cut.key.dims[:2], cut.key.axes[:2])
            self.bring["mask"] = move(mask, mask.with_axes(dim, ()), sizes, ctx.mesh, 1, ctx.chip, "mask")
        self.back = scatters | chains(used.with_partial(cut.share.common), cut.key, "d_{}", "gradient of {}")
        queries = tuple(size // prod(ctx.mesh[axis] for axis in axes) for size, axes in zip(q_shape, cut.query.axes))
        steps = [step for each in (gathers, gathers, scatters) for chain in each.values() for step in chain]
        chunk = queries[1] // 2 if cut.causal else queries[1]
        self.carrier = RingOfChunks if is_looped(ctx, parts, queries, chunk, dtype, steps) else Gathered


@lru_cache(maxsize=1024)
def _value(cut: _Cut, q_shape: tuple[int, ...], shape: tuple[int, ...], dtype: str, ctx: Context):
    planned = _Chains(cut, q_shape, shape, dtype, ctx)
    chains = Chains(ctx.mesh, **planned.bring)

    def body(q, k, v, *mask):
        k, v = cut.share.pick(chains.send("key", k), chains.send("value", v))
        circulation = planned.carrier(chains, cut.key.axes[1], ("keys", "values"))
        here, seen_of = circulation.device(0), _seen(chains, k.shape[1], *mask)

        def visit(found: Attended, there: jax.Array, k: jax.Array, v: jax.Array) -> Attended:
            seen = seen_of(there)
            if not cut.causal:
                return found.merge(local_attended(q, k, v, seen, None, False, cut.scale))
            half = Pairs(there < here)
            seen = None if seen is None else half.keys(seen)
            more = local_attended(half.queries(q), half.keys(k), half.keys(v), seen, None, False, cut.scale)
            return found.merge(half.found(more))

        # in zigzag order too, a device's own chunk is causal in its stored order
        own = local_attended(q, k, v, seen_of(here), None, cut.causal, cut.scale)
        found = circulation.visit(visit, own, (k, v))
        return found.output(q.dtype), found.top + jnp.log(found.total)

    return chains.steps, body


@lru_cache(maxsize=1024)
def _gradient(cut: _Cut, q_shape: tuple[int, ...], shape: tuple[int, ...], dtype: str, ctx: Context):
    planned = _Chains(cut, q_shape, shape, dtype, ctx)
    chains = Chains(ctx.mesh, **planned.bring, **planned.back)

    def body(g, y, normaliser, q, k, v, *mask):
        (k, v), unpick = jax.vjp(cut.share.pick, chains.send("key", k), chains.send("value", v))
        circulation = planned.carrier(chains, cut.key.axes[1], ("keys", "values"))
        here, seen_of = circulation.device(0), _seen(chains, k.shape[1], *mask)
        kept = y, normaliser, g

        def visit(d_q: jax.Array, there: jax.Array, k: jax.Array, v: jax.Array):
            seen = seen_of(there)
            if not cut.causal:
                more, *parts = local_gradients(q, k, v, seen, False, cut.scale, *kept)
                return d_q + more, parts
            half = Pairs(there < here)
            seen = None if seen is None else half.keys(seen)
            halves, of_queries = (half.queries(q), half.keys(k), half.keys(v)), map(half.queries, kept)
            more, *parts = local_gradients(*halves, seen, False, cut.scale, *of_queries)
            return d_q + half.query_gradient(more), [*map(half.key_gradient, parts)]

        d_q, *own = local_gradients(q, k, v, seen_of(here), cut.causal, cut.scale, *kept)
        d_q, *d_keys = circulation.visit_and_return(visit, d_q, (k, v), own, ("d_keys", "d_values"))
        d_k, d_v = unpick(tuple(d_keys))
        return d_q.astype(q.dtype), chains.send("d_key", d_k), chains.send("d_value", d_v)

    return chains.steps, body


def _seen(chains: Chains, length: int, *mask: jax.Array) -> Callable[[jax.Array], jax.Array | None]:
    """Return which keys of a device's chunk are not padding; None for all."""
    if not mask:
        return lambda device: None
    whole = chains.send("mask", mask[0].astype(bool))
    return lambda device: lax.dynamic_slice_in_dim(whole, device * length, length, axis=1)
