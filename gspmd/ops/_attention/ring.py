"""Attention of sequences that are sharded over devices: queries stay, and keys and values arrive chunk by chunk.

A device attends to its own keys first, and then to the keys of every other device. In a ring, one permute for each
device brings the next keys while the device attends to the previous keys. Without a ring, all keys are gathered first.
Results for different keys are merged (`online.Attended`). In a ring, the gradients of keys go round the same way, and
every device adds its part. Without a ring, they are reduce-scattered.

Under causal attention, the sequence is cut into 2n chunks for n devices, and device i has chunk i (early) and chunk
2n - 1 - i (late), see `zigzag`. When the two chunks of device j arrive, the late queries attend to the early chunk of
j. In addition, the early queries attend to the same chunk if j < i, and the late queries attend to the late chunk of j
if j > i. So for every j a device has two products of half of its queries with half of the keys of j, without a mask.
"""

from collections.abc import Callable, Mapping, Sequence
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
from gspmd.ops._attention.local import MIXED, local_attended, local_attention, local_gradients
from gspmd.ops._attention.online import Attended, sink_gradient
from gspmd.ops._attention.terms import Extras, Terms, positions
from gspmd.ops._attention.zigzag import ZigzagPairs, in_order, zigzag
from gspmd.ops._shared_heads import Share
from gspmd.ops.interface.planned_op import Chains, fault, planned_op
from gspmd.planner.graph.resharding import move


@dataclass(frozen=True)
class _Cut:
    query: Spec
    key: Spec
    causal: bool
    scale: float
    share: Share
    extras: Extras

    @property
    def name(self) -> str:
        return f"attention {self.query}, {self.key}"

    @property
    def inputs(self) -> tuple[Spec, ...]:
        return (self.query, self.key, self.key, *self.extras.specs(self.query, self.key))

    @property
    def statistic(self) -> Spec:
        return self.query.without(self.query.dims[3])

    @property
    def used(self) -> Spec:
        """The spec of the keys to which `Share.pick` is applied; K is also sharded over mesh axes `Share.sliced`."""
        head = self.key.dims[2]
        return self.key.with_axes(head, (*self.key.axes_of(head), *self.share.sliced))

    def without_trivial(self, mesh: Mapping[str, int]) -> "_Cut":
        """Return a copy without mesh axes of size 1, which JAX's types contain but planned steps do not."""
        return replace(self, query=self.query.without_trivial(mesh), key=self.key.without_trivial(mesh))


def check(doing: str, key: Spec, mesh: Mapping[str, int], causal: bool, shifted: bool, queries: int, keys: int) -> None:
    """Check that causal queries and keys are the same tokens, and that zigzag order can cut their sequence.

    Raises:
        SpecError: attention is causal, and there are not as many queries as keys.
        PlanError: attention is causal, and the length is not a multiple of the number of zigzag chunks; or `shifted`
            is true, which means that the first query has an offset.
    """
    devices, dim = prod(mesh[axis] for axis in key.axes[1]), key.dims[1]
    if causal and queries != keys:
        fact = f"queries have length {queries} and keys have length {keys}, but both are cut over the same devices."
        raise report(
            SpecError,
            doing,
            [fault(key, dim, fact, "Leave the keys unsharded along the sequence, or pass as many keys as queries.")],
        ) from None
    faults = []
    if shifted:
        fact = f"dimension {dim} is cut, so queries and keys are the same tokens, but offset is not 0."
        faults.append(fault(key, dim, fact, f"Leave out offset, or leave {dim} unsharded: '{key.with_axes(dim, ())}'."))
    if causal and keys % (2 * devices):
        fact = f"dimension {dim} has size {keys}, and zigzag order cuts it into {2 * devices} chunks, two for a device."
        faults.append(fault(key, dim, fact, f"Use a multiple of {2 * devices}, or fewer devices."))
    if faults:
        raise report(PlanError, doing, faults) from None


def attend(
    query: Spec, key: Spec, causal: bool, scale: float, share: Share, extras: Extras, compiler_chooses: bool,
    ctx: Context, q, k, v, *more: jax.Array,
) -> jax.Array:  # fmt: skip
    """Compute `whole.attention` for sequences that are sharded over devices, as the specs say."""
    cut = _Cut(query, key, causal, scale, share, extras)
    if compiler_chooses:
        f = partial(_whole, cut, tuple(prod(ctx.mesh[axis] for axis in axes) for axes in query.axes))
        return checkpoint_name(left_to_compiler(ctx, f, cut.inputs, query, q, k, v, *more, name=cut.name), MIXED)
    limits = replace(extras.limits, displaced=causal)  # causal sequences are in zigzag order
    return _attend(replace(cut, extras=replace(extras, limits=limits)), ctx, q, k, v, *more)


def _whole(cut: _Cut, parts: tuple[int, ...], q, k, v, *more) -> jax.Array:
    """Attend in plain code, which the compiler partitions; the arrays are in zigzag order if attention is causal."""
    rows, length, heads, _ = parts
    order = (lambda x: in_order(x, length)) if cut.causal else (lambda x: x)
    given = cut.extras.named(more)
    terms = cut.extras.terms(given, positions(q.shape[1]), positions(k.shape[1]), None)
    # The arrays are brought into the order of the text; the positions of the terms are in this order already.
    terms = terms._replace(positions=None).on(order, order)._replace(positions=terms.positions)
    q, k, v = terms.cleared(*map(order, (q, k, v)))
    y = terms.real(local_attention(q, k, v, terms, cut.causal, cut.scale, (rows, heads, length, 1), given.sinks))
    return zigzag(y, length) if cut.causal else y


def _forward(cut: _Cut, ctx: Context, q, k, v, *more):
    steps, body = _value(cut.without_trivial(ctx.mesh), q.shape, k.shape, k.dtype.name, ctx)
    found = run(ctx, cut.name, steps, body, cut.inputs, (cut.query, cut.statistic), q, k, v, *more)
    y, normaliser = checkpoint_name(found, MIXED)  # if these are saved, recomputation need not send the keys again
    return y, (q, k, v, more, y, normaliser)


def _backward(cut: _Cut, ctx: Context, kept, g):
    q, k, v, more, y, normaliser = kept
    steps, body = _gradient(cut.without_trivial(ctx.mesh), q.shape, k.shape, k.dtype.name, ctx)
    ins = (cut.query, cut.query, cut.statistic, *cut.inputs)
    outs = (cut.query, cut.key, cut.key, *cut.extras.gradients)
    name = f"gradient of {cut.name}"
    d_q, d_k, d_v, *learned = run(ctx, name, steps, body, ins, outs, g, y, normaliser, q, k, v, *more)
    return d_q, d_k, d_v, *cut.extras.cotangents(more, *learned)


_attend = planned_op(_forward, _backward, lambda cut: cut.name)


class _Chains:
    """The planned steps that bring keys, values and optional operands to a device, and bring their gradients back."""

    def __init__(self, cut: _Cut, q_shape: tuple[int, ...], shape: tuple[int, ...], dtype: str, ctx: Context):
        sizes, used, parts = dict(zip(cut.key.dims, shape)), cut.used, cut.key.axes[1]
        dim, head = cut.key.dims[1:3]
        # If several devices hold the same heads, each sends only the head that it uses.
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
        tokens = Spec(cut.key.dims[:2], cut.key.axes[:2])
        for name, bytes_each, is_given in (("mask", 1, cut.extras.masked), ("segments", 4, cut.extras.segmented)):
            if is_given:
                to_all = tokens.with_axes(dim, ())
                self.bring[name] = move(tokens, to_all, sizes, ctx.mesh, bytes_each, ctx.chip, name)
        self.bring |= cut.extras.bring(cut.query, q_shape[2], ctx)
        self.back = scatters | chains(used.with_partial(cut.share.common), cut.key, "d_{}", "gradient of {}")
        self.back |= cut.extras.back(cut.query, q_shape[2], ctx)
        queries = tuple(size // prod(ctx.mesh[axis] for axis in axes) for size, axes in zip(q_shape, cut.query.axes))
        steps = [step for each in (gathers, gathers, scatters) for chain in each.values() for step in chain]
        keys = sizes[dim] // prod(ctx.mesh[axis] for axis in parts)
        chunk = keys // 2 if cut.causal else keys
        self.carrier = RingOfChunks if is_looped(ctx, parts, queries, chunk, dtype, steps) else Gathered


@lru_cache(maxsize=1024)
def _value(cut: _Cut, q_shape: tuple[int, ...], shape: tuple[int, ...], dtype: str, ctx: Context):
    planned = _Chains(cut, q_shape, shape, dtype, ctx)
    chains = Chains(ctx.mesh, **planned.bring)

    def body(q, k, v, *more):
        k, v = chains.send("key", k), chains.send("value", v)
        circulation = planned.carrier(chains, cut.key.axes[1], ("keys", "values"))
        here = circulation.device(0)
        sinks, terms_of = _terms(cut, chains, circulation, q.shape[1], k.shape[1], more)
        terms = terms_of(here)
        q, k, v = terms.cleared(q, *cut.share.pick(k, v))

        def visit(found: Attended, there: jax.Array, k: jax.Array, v: jax.Array) -> Attended:
            near = _is_near(cut, here, there, k.shape[1], circulation.devices)
            return merged(found, there, k, v) if near is None else lax.cond(near, merged, _unmerged, found, there, k, v)

        def merged(found: Attended, there: jax.Array, k: jax.Array, v: jax.Array) -> Attended:
            terms = terms_of(there)
            if not cut.causal:
                return found.merge(local_attended(q, k, v, terms, False, cut.scale))
            half = ZigzagPairs(there < here)
            halves = half.queries(q), half.keys(k), half.keys(v), _in_halves(half, terms, q.shape[0])
            return found.merge(half.found(local_attended(*halves, False, cut.scale)))

        # Even in zigzag order, a device stores its own tokens in the order of the text, so `causal` holds for their
        # indices.
        own = local_attended(q, k, v, terms, cut.causal, cut.scale)
        found = circulation.visit(visit, own, (k, v)).with_sinks(sinks)
        return found.output(q.dtype), found.top + jnp.log(found.total)

    return chains.steps, body


@lru_cache(maxsize=1024)
def _gradient(cut: _Cut, q_shape: tuple[int, ...], shape: tuple[int, ...], dtype: str, ctx: Context):
    planned = _Chains(cut, q_shape, shape, dtype, ctx)
    chains = Chains(ctx.mesh, **planned.bring, **planned.back)

    def body(g, y, normaliser, q, k, v, *more):
        k, v = chains.send("key", k), chains.send("value", v)
        circulation = planned.carrier(chains, cut.key.axes[1], ("keys", "values"))
        here = circulation.device(0)
        sinks, terms_of = _terms(cut, chains, circulation, q.shape[1], k.shape[1], more)
        terms = terms_of(here)
        (q, k, v), clear = jax.vjp(lambda q, k, v: terms.cleared(q, *cut.share.pick(k, v)), q, k, v)
        kept = y, normaliser, terms.real(g)
        of_sinks = () if sinks is None else (sink_gradient(sinks, normaliser, y, kept[2]),)

        def visit(state: tuple[jax.Array, ...], there: jax.Array, k: jax.Array, v: jax.Array):
            near = _is_near(cut, here, there, k.shape[1], circulation.devices)
            return added(state, there, k, v) if near is None else lax.cond(near, added, _not_added, state, there, k, v)

        def added(state: tuple[jax.Array, ...], there: jax.Array, k: jax.Array, v: jax.Array):
            terms = terms_of(there)
            if not cut.causal:
                d_q, d_k, d_v, *d_table = local_gradients(q, k, v, terms, False, cut.scale, *kept)
                return _sum(state, (d_q, *d_table)), [d_k, d_v]
            half = ZigzagPairs(there < here)
            halves = half.queries(q), half.keys(k), half.keys(v), _in_halves(half, terms, q.shape[0])
            d_q, d_k, d_v, *d_table = local_gradients(*halves, False, cut.scale, *map(half.queries, kept))
            parts = [half.key_gradient(d_k), half.key_gradient(d_v)]
            return _sum(state, (half.query_gradient(d_q), *d_table)), parts

        d_q, d_k, d_v, *d_table = local_gradients(q, k, v, terms, cut.causal, cut.scale, *kept)
        gradients = "d_keys", "d_values"
        state, d_k, d_v = circulation.visit_and_return(visit, (d_q, *d_table), (k, v), (d_k, d_v), gradients)
        d_q, d_k, d_v = clear((state[0].astype(q.dtype), d_k, d_v))
        d_k, d_v = chains.send("d_key", d_k), chains.send("d_value", d_v)
        return d_q, d_k, d_v, *cut.extras.send_back(chains, (*state[1:], *of_sinks))

    return chains.steps, body


def _is_near(cut: _Cut, here: jax.Array | int, there: jax.Array | int, keys: int, devices: int) -> jax.Array | None:
    """Return whether some query of device `here` may see a key of device `there`.

    The result is None if there is no window and no chunk, so that no keys can be left out. Otherwise only the nearest
    pairs of a query and a key are compared: the first query and the last key of the early halves of the devices'
    tokens, and the first query and the last key of the late halves. If any query sees any key, then the query of one of
    these pairs sees the key of the pair.
    """
    limits = cut.extras.limits
    if limits.reach is None:
        return None
    part = keys // 2
    first, second = jnp.minimum(here, there), jnp.maximum(here, there)
    pairs = (first, second), (2 * devices - 1 - second, 2 * devices - 1 - first)
    early, late = ((before + 1) * part > limits.first(after * part) for before, after in pairs)
    return early | late


def _unmerged(found: Attended, there: jax.Array, k: jax.Array, v: jax.Array) -> Attended:
    return found


def _not_added(state: tuple[jax.Array, ...], there: jax.Array, *chunks: jax.Array):
    return state, [jnp.zeros(x.shape, jnp.float32) for x in chunks]


def _sum(state: tuple[jax.Array, ...], more: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x + part for x, part in zip(state, more, strict=True))


def _terms(
    cut: _Cut, chains: Chains, circulation: Gathered, queries: int, keys: int, more: Sequence[jax.Array]
) -> tuple[jax.Array | None, Callable[[jax.Array | int], Terms]]:
    """Return the sinks, and a function that returns the terms of this device's queries with the keys of any device.

    The argument of this function is the index of the other device. Mask and segments of all keys are gathered in the
    beginning, since they are small. `queries` and `keys` are the numbers of queries and of keys on one device.
    """
    given = cut.extras.sent(chains, more)
    if given.mask is not None:
        given = given._replace(mask=chains.send("mask", given.mask.astype(bool)))
    if given.of_keys is not None:
        given = given._replace(of_keys=chains.send("segments", given.of_keys))

    def place(device: jax.Array | int, length: int) -> jax.Array:
        if not cut.causal:
            return positions(length, device * length)
        chunks = device, 2 * circulation.devices - 1 - device
        return jnp.concatenate([positions(length // 2, chunk * (length // 2)) for chunk in chunks], axis=1)

    def terms_of(device: jax.Array | int) -> Terms:
        mask, of_keys = (
            None if x is None else lax.dynamic_slice_in_dim(x, device * keys, keys, axis=1)
            for x in (given.mask, given.of_keys)
        )
        here = given._replace(mask=mask, of_keys=of_keys)
        return cut.extras.terms(here, place(circulation.device(0), queries), place(device, keys), None)

    return given.sinks, terms_of


def _in_halves(half: ZigzagPairs, terms: Terms, rows: int) -> Terms:
    """Return the terms for the two products of `ZigzagPairs`, which have different positions and `rows` rows each."""

    def every_row(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (rows, x.shape[1]))

    return terms.on(lambda x: half.queries(every_row(x)), lambda x: half.keys(every_row(x)))
