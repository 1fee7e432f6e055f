"""The terms that attention's logits have besides the products: a mask of the keys, a soft cap, and biases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate.errors import SpecError, report, shown
from gspmd.annotate.spec import Spec
from gspmd.annotate.validation import whole
from gspmd.lowerings.program import Context
from gspmd.ops._attention.buckets import Buckets
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.options import number
from gspmd.ops.interface.planned_op import FLOAT32, Chains, fault, float32, read, sizes_of
from gspmd.planner.graph.resharding import move
from gspmd.planner.steps import Step

# -- on one device ----------------------------------------------------------------------------------------------------


class Bias(NamedTuple):
    """The relative position bias, which has one number for each query head and each bucket of relative positions."""

    table: jax.Array
    """[R, H] float32, with a row for each bucket and a column for each query head of the logits."""
    buckets: Buckets

    def chosen(self, relative: jax.Array) -> jax.Array:
        """Return the buckets as one-hot float32 [B, L, T, R], or [1, L, T, R] if all rows have the same positions.

        Products with this array replace a lookup and, in the gradient, a scatter, because matrix units are much faster.
        """
        return jax.nn.one_hot(self.buckets.of(relative), self.buckets.count, dtype=jnp.float32)


def biases(chosen: jax.Array, table: jax.Array, key_heads: int) -> jax.Array:
    """Return the biases [B, K, Q, L, T] that the table [R, H] has for the one-hot buckets `chosen` [B, L, T, R]."""
    table = table.reshape(table.shape[0], key_heads, table.shape[1] // max(key_heads, 1))
    return jnp.einsum("bltr,rkq->bkqlt", chosen, table, precision=jax.lax.Precision.HIGHEST)  # exact, like a lookup


def table_gradient(chosen: jax.Array, slope: jax.Array) -> jax.Array:
    """Return the gradient [R, H] of the table from `slope` [B, K, Q, L, T], the gradient of the logits.

    `chosen` has the one-hot buckets [B, L, T, R] of the logits.
    """
    if chosen.shape[0] == 1:
        slope = jnp.sum(slope, axis=0, keepdims=True)
    found = jnp.einsum("bltr,bkqlt->rkq", chosen, slope, precision=jax.lax.Precision.HIGHEST)
    return found.reshape(found.shape[0], found.shape[1] * found.shape[2])


@jax.tree_util.register_static
@dataclass(frozen=True)
class Limits:
    """The optional limits of attention: the window or chunk of keys that a query sees, and the soft cap of the logits.

    A limit is None if it is not set.
    """

    window: int | None = None
    """A query at position p attends only to keys at positions above p - window."""
    softcap: float | None = None
    """Each scaled product s is replaced by softcap · tanh(s / softcap)."""
    chunk: int | None = None
    """A query at position p attends only to keys at position p - p mod chunk or later."""
    displaced: bool = False
    """Whether the position of a token in the text may differ from its index in the array.

    It may differ in zigzag order, and for new tokens after a cache. But tokens that are later in the array are also
    later in the text. If positions may differ, a chunk may begin anywhere in the array, so blocks of keys are left out
    as for a window of the chunk's length.
    """

    @property
    def reach(self) -> int | None:
        """The largest number of keys that a query sees, including its own; None without a window or a chunk."""
        return self.window if self.chunk is None else self.chunk

    def first(self, position: Any) -> Any:
        """Return the position of the first key that a query at `position` sees; there must be a window or a chunk."""
        if self.chunk is not None:
            return position - position % self.chunk
        assert self.window is not None, "the first key is asked for where keys are limited"
        return position - self.window + 1

    def first_place(self, place: Any) -> Any:
        """Return an index such that the query at index `place` and all later queries see no key before this index.

        Both indices are indices in the arrays of keys and queries, not positions in the text.
        """
        return place - self.reach + 1 if self.displaced and self.reach is not None else self.first(place)

    @property
    def without_reach(self) -> "Limits":
        """A copy that has only the soft cap, without a window or a chunk."""
        return Limits(softcap=self.softcap)

    def capped(self, logits: jax.Array) -> jax.Array:
        """Return the logits after the soft cap, from the scaled products `logits`."""
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def uncapped_gradient(self, slope: jax.Array, capped: jax.Array) -> jax.Array:
        """Return the gradient of the logits before the soft cap, from `slope`, the gradient of the capped logits.

        If `slope` is the tangent of the logits before the soft cap, the result is the tangent of the capped logits.
        """
        return slope if self.softcap is None else slope * (1 - jnp.square(capped / self.softcap))


UNLIMITED = Limits()


class Terms(NamedTuple):
    """The terms that the logits of some queries and keys have besides the products: mask, soft cap and biases."""

    seen: jax.Array | None = None
    """[B, T] booleans, which are True for the keys that are not padding."""
    ahead: jax.Array | None = None
    """int32 scalar for causal attention, the position of the first query minus the position of the first key.

    None stands for 0.
    """
    segments: tuple[jax.Array, jax.Array] | None = None
    """[B, L] and [B, T] int32, the segments of queries and of keys.

    A query attends to the keys of its own segment. A query of segment 0 attends to no key.
    """
    positions: tuple[jax.Array, jax.Array] | None = None
    """[B, L] and [B, T] int32, or [1, L] and [1, T], the positions of queries and of keys in the text.

    They must be given if there is a bias, a window or a chunk, or if there are slopes: all depend on the positions.
    """
    bias: Bias | None = None
    slopes: jax.Array | None = None
    """[H] float32, the slope of each head in ALiBi.

    The slope times (position of the key minus position of the query) is added to a logit.
    """
    limits: Limits = UNLIMITED

    def on(self, queries: Callable[[jax.Array], jax.Array], keys: Callable[[jax.Array], jax.Array]) -> "Terms":
        """Return a copy in which a function is applied to each array with values for queries or keys.

        The function `queries` is applied to the arrays [B, L] of queries, and `keys` to the arrays [B, T] of keys.
        """
        segments, places = self.segments, self.positions
        return self._replace(
            seen=None if self.seen is None else keys(self.seen),
            segments=None if segments is None else (queries(segments[0]), keys(segments[1])),
            positions=None if places is None else (queries(places[0]), keys(places[1])),
        )

    def with_more_queries(self, count: int) -> "Terms":
        """Return the terms with `count` queries of padding added at the end; the caller drops their results."""
        return self.on(lambda x: jnp.pad(x, ((0, 0), (0, count))), lambda x: x) if count else self

    @property
    def relative(self) -> jax.Array:
        """The position of each key minus the position of each query, [B, L, T].

        The shape is [1, L, T] if the positions are the same in all rows.
        """
        assert self.positions is not None, "positions are given with everything that depends on them"
        queries, keys = self.positions
        return keys[:, None, :] - queries[:, :, None]

    def visible(self) -> jax.Array | None:
        """Return which keys a query may see, considering padding, segments, window and chunk, but not causality.

        Returns:
            Booleans that broadcast to [B, L, T], or None if a query may see all keys.
        """
        seen = None if self.seen is None else self.seen[:, None, :]
        if self.limits.reach is not None:
            assert self.positions is not None, "positions are given with everything that depends on them"
            queries, keys = self.positions
            near = keys[:, None, :] >= self.limits.first(queries)[:, :, None]
            seen = near if seen is None else near & seen
        if self.segments is None:
            return seen
        of_query, of_key = self.segments[0][:, :, None], self.segments[1][:, None, :]
        alike = (of_query == of_key) & (of_key != 0)
        return alike if seen is None else alike & seen

    def chosen(self) -> jax.Array | None:
        """Return the buckets of the bias as a one-hot array (see `Bias.chosen`), or None if there is no bias."""
        return None if self.bias is None else self.bias.chosen(self.relative)

    def added(self, chosen: jax.Array | None, key_heads: int) -> jax.Array | None:
        """Return the sum of all biases, which are added to the capped logits, or None if there are no biases.

        The shape is [B, K, Q, L, T], or [1, K, Q, L, T] if the biases are the same in all rows. `chosen` has the
        buckets of the bias as a one-hot array, and `key_heads` is K.
        """
        found = None
        if chosen is not None and self.bias is not None:
            found = biases(chosen, self.bias.table, key_heads)
        if self.slopes is not None:
            sloped = self.slopes.reshape(1, key_heads, -1, 1, 1) * self.relative[:, None, None].astype(jnp.float32)
            found = sloped if found is None else found + sloped
        return found

    @property
    def adds(self) -> bool:
        """Whether a bias is added to the logits."""
        return self.bias is not None or self.slopes is not None

    @property
    def is_plain(self) -> bool:
        """Whether only causality, a window or chunks restrict the keys, and no bias is added to the logits."""
        return self.seen is None and self.segments is None and not self.adds

    @property
    def table(self) -> tuple[jax.Array, ...]:
        """A tuple with the table of the bias, or an empty tuple if there is no bias."""
        return () if self.bias is None else (self.bias.table,)

    def cleared(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [B, L, H, D], keys and values [B, T, K, D] with 0 in place of padding.

        Padding may be NaN, and a probability of 0 times NaN is NaN. With zeros, the gradients of padding are 0, too.
        """
        if self.segments is not None:
            q = self.real(q)
        for real in (self.seen, None if self.segments is None else self.segments[1] != 0):
            if real is not None:
                k, v = (jnp.where(real[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (k, v))
        return q, k, v

    def real(self, x: jax.Array) -> jax.Array:
        """Return `x`, the results or the cotangents [B, L, H, D] of the queries, with 0 in place of padding."""
        if self.segments is None:
            return x
        return jnp.where(self.segments[0][:, :, None, None] != 0, x, jnp.zeros((), x.dtype))


# -- as arguments of an operation --------------------------------------------------------------------------------------


class Given(NamedTuple):
    """The optional operands of a call of attention, or one device's parts of these operands.

    An operand that is not given is None.
    """

    mask: jax.Array | None = None
    of_queries: jax.Array | None = None
    of_keys: jax.Array | None = None
    bias: jax.Array | None = None
    sinks: jax.Array | None = None
    slopes: jax.Array | None = None
    offset: jax.Array | None = None

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        """The optional operands that are given, in the order of the fields."""
        return tuple(x for x in self if x is not None)

    @property
    def learned(self) -> tuple[jax.Array, ...]:
        """The given operands that have gradients, in the order bias, sinks."""
        return tuple(x for x in (self.bias, self.sinks) if x is not None)

    def with_learned(self, arrays: Sequence[jax.Array]) -> "Given":
        """Return a copy in which `arrays` replace the operands of `learned`, in the same order."""
        rest = iter(arrays)
        return self._replace(**{name: next(rest) for name in _LEARNED if getattr(self, name) is not None})


_LEARNED = "bias", "sinks"
OF_HEADS = "bias", "sinks", "slopes"
"""The names of the optional operands that have values for each query head."""


@dataclass(frozen=True)
class OfHeads:
    """The spec of an operand that has values for each query head, and the number of bytes of one element."""

    spec: Spec
    bytes: int = FLOAT32


@dataclass(frozen=True)
class Extras:
    """The options of a call of attention: which optional operands are given, their specs, and the limits."""

    masked: bool = False
    segmented: bool = False
    shifted: bool = False
    bias: OfHeads | None = None
    sinks: OfHeads | None = None
    slopes: OfHeads | None = None
    buckets: Buckets | None = None
    limits: Limits = UNLIMITED
    alike: bool = False
    """Whether queries and keys have the same array of segments, so that each query attends at least to its own key."""

    @property
    def _given(self) -> tuple[bool, ...]:
        of_heads = (each is not None for each in (self.bias, self.sinks, self.slopes))
        return self.masked, self.segmented, self.segmented, *of_heads, self.shifted

    @property
    def of_heads(self) -> dict[str, OfHeads]:
        """The specs of the given operands that have values for each query head, by name."""
        found = {"bias": self.bias, "sinks": self.sinks, "slopes": self.slopes}
        return {name: each for name, each in found.items() if each is not None}

    @property
    def learned(self) -> dict[str, OfHeads]:
        """The specs of the given operands that have gradients, which can be the bias and the sinks, by name."""
        return {name: each for name, each in self.of_heads.items() if name in _LEARNED}

    @property
    def keeps_partial_sums(self) -> bool:
        """Whether some gradient stays a partial sum, which sharding annotations cannot express."""
        return any(each.spec.reduced for each in self.learned.values())

    def named(self, operands: Sequence[jax.Array]) -> Given:
        """Return the given operands, in order, as a `Given`; operands that are not given are None."""
        rest = iter(operands)
        return Given(*(next(rest) if each else None for each in self._given))

    def specs(self, query: Spec, key: Spec) -> tuple[Spec, ...]:
        """Return the spec of each given operand, in the order of the fields of `Given`."""
        queries, keys = (Spec(spec.dims[:2], spec.axes[:2]) for spec in (query, key))
        of_heads = (None if each is None else each.spec for each in (self.bias, self.sinks, self.slopes))
        of_each = (keys, queries, keys, *of_heads, Spec((), ()))
        return tuple(spec for spec, given in zip(of_each, self._given) if given and spec is not None)

    @property
    def gradients(self) -> tuple[Spec, ...]:
        """The specs of the gradients of bias and sinks, in this order, without those of operands that are not given."""
        return tuple(each.spec.cotangent for each in self.learned.values())

    def bring(self, query: Spec, heads: int, ctx: Context) -> dict[str, tuple[Step, ...]]:
        """Return the steps that move each operand with values for every query head to the devices of these heads.

        The mapping has the name of each operand as a key. `query` is the spec of the queries, and `heads` is the number
        of query heads.
        """
        return {
            name: move(
                each.spec, by_heads(each.spec, query), self._sizes(each, heads), ctx.mesh, each.bytes, ctx.chip, name
            )
            for name, each in self.of_heads.items()
        }

    def back(self, query: Spec, heads: int, ctx: Context) -> dict[str, tuple[Step, ...]]:
        """Return the steps that sum the gradients of bias and sinks over the devices of all queries.

        The mapping has the keys `d_bias` and `d_sinks`. `query` is the spec of the queries, and `heads` is the number
        of query heads.
        """
        found = {}
        for name, each in self.learned.items():
            made = by_heads(each.spec, query).with_partial((*query.axes[0], *query.axes[1]))
            sizes, of = self._sizes(each, heads), f"gradient of {name}"
            found[f"d_{name}"] = move(made, each.spec.cotangent, sizes, ctx.mesh, FLOAT32, ctx.chip, of)
        return found

    def sent(self, chains: Chains, operands: Sequence[jax.Array]) -> Given:
        """Run the steps of `bring` inside a shard_map, and return the operands by name."""
        given = self.named(operands)
        return given._replace(**{name: chains.send(name, getattr(given, name)) for name in self.of_heads})

    def send_back(self, chains: Chains, gradients: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Run the steps of `back` inside a shard_map, and return the gradients of bias and sinks."""
        return tuple(chains.send(f"d_{name}", x) for name, x in zip(self.learned, gradients, strict=True))

    def cotangents(self, operands: Sequence[jax.Array], *gradients: jax.Array) -> tuple[jax.Array | None, ...]:
        """Return the cotangent of each given operand, which is None for all operands except bias and sinks.

        `gradients` has the gradients of bias and sinks in this order, without those of operands that are not given.
        """
        given = self.named(operands)
        found = dict(zip(self.learned, (d.astype(x.dtype) for d, x in zip(gradients, given.learned, strict=True))))
        return tuple(found.get(name) for name, x in given._asdict().items() if x is not None)

    def terms(self, given: Given, queries: jax.Array, keys: jax.Array, ahead: jax.Array | None) -> Terms:
        """Return the terms of the logits of queries at positions `queries` and keys at positions `keys`.

        The positions are [1, L] and [1, T], or [B, L] and [B, T]. For `ahead` see `Terms.ahead`.
        """
        segments = None if given.of_queries is None or given.of_keys is None else (given.of_queries, given.of_keys)
        bias = None if given.bias is None or self.buckets is None else Bias(float32(given.bias), self.buckets)
        slopes, limits = None if given.slopes is None else float32(given.slopes), self.limits
        placed = bias is not None or slopes is not None or limits.reach is not None
        seen = None if given.mask is None else given.mask.astype(bool)
        return Terms(seen, ahead, segments, (queries, keys) if placed else None, bias, slopes, limits)

    def _sizes(self, each: OfHeads, heads: int) -> dict[str, int]:
        count = 0 if self.buckets is None else self.buckets.count
        return sizes_of(each.spec, (count, heads)[-len(each.spec.dims) :])


def by_heads(spec: Spec, query: Spec) -> Spec:
    """Return `spec` with its last dimension, H, sharded like the query heads and its other dimensions unsharded."""
    return Spec(spec.dims, (*((),) * (len(spec.dims) - 1), query.axes[2]))


def read_limits(doing: str, causal: bool, window: Any, softcap: Any, chunk: Any) -> Limits:
    """Check the options `window`, `chunk` and `softcap`, and return them as `Limits`.

    Raises:
        SpecError: `window` or `chunk` is not a whole number above 0, or is given although attention is not causal; or
            `window` and `chunk` are both given; or `softcap` is not above 0.
        PlanError: `softcap` is not a finite Python number.
    """
    window = _read_reach(doing, causal, "window", window, "the number of keys that a query sees, itself included")
    chunk = _read_reach(doing, causal, "chunk", chunk, "the number of tokens of a chunk, in which queries see keys")
    if window is not None and chunk is not None:
        raise SpecError(
            f"{doing}: window is {window}, and chunk {chunk}, but a query sees either the last keys or those of its "
            "chunk.\n  Leave one out."
        )
    if softcap is not None:
        softcap = number(doing, "softcap", softcap)
        if softcap <= 0:
            raise SpecError(f"{doing}: softcap is {softcap}.\n  Pass a number above 0, or None for no cap.")
    return Limits(window, softcap, chunk)


def _read_reach(doing: str, causal: bool, name: str, value: Any, meaning: str) -> int | None:
    if value is None:
        return None
    size = whole(value)
    if size is None or not 1 <= size < 2**31:
        raise SpecError(f"{doing}: {name} is {shown(value)}.\n  It is {meaning}: pass a whole number, 1 or more.")
    if not causal:
        raise SpecError(
            f"{doing}: a {name} limits the keys before a query, but attention is not causal.\n"
            f"  Leave {name} out, or attend causally."
        )
    return size


def read_of_heads(
    doing: str, name: str, x: Any, spec: str | Spec | None, query: Spec, heads: int, ctx: Context
) -> tuple[jax.Array, OfHeads] | None:
    """Return an array with a value for each query head (`sinks` or `slopes`) and its spec.

    The result is None if neither the array nor its spec is given.

    Raises:
        SpecError: the array is given without its spec, or the spec without the array; or the spec does not fit the
            array; or there is not one number for each query head.
    """
    if x is None and spec is None:
        return None
    if x is None or spec is None:
        missing = name if x is None else f"{name}_spec"
        raise SpecError(f"{doing}: {missing} is missing.\n  Pass {name} and {name}_spec together.")
    head = query.dims[2]
    x = array(doing, name, x, "real numbers")
    found = read(doing, spec, x, ctx, weight=name in _LEARNED)
    if found.dims != (head,):
        raise SpecError(
            f"{doing}: '{found}' is not the spec of {name}, one number for each query head.\n"
            f"  Write it '{head}', with the mesh axes that hold it."
        )
    if x.shape != (heads,):
        fact = f"{name} must have size {heads}, the number of query heads, but the size is {x.shape[0]}."
        raise report(SpecError, doing, [fault(found, head, fact)]) from None
    return x, OfHeads(found, x.dtype.itemsize)


def read_segments(doing: str, segments: Any, query: Spec, key: Spec, q: jax.Array, k: jax.Array) -> Sequence[jax.Array]:
    """Return the segments of queries and of keys as int32.

    Raises:
        SpecError: `segments` is not a pair of arrays of integers, or the shapes of the two arrays do not fit queries
            and keys.
    """
    if not isinstance(segments, (tuple, list)) or len(segments) != 2 or any(each is None for each in segments):
        raise SpecError(
            f"{doing}: segments are not a pair.\n"
            f"  Give one array for the queries and one for the keys, (int32 {q.shape[:2]}, int32 {k.shape[:2]})."
        )
    names = "segments of the queries", "segments of the keys"
    found = [array(doing, name, x, "integers") for name, x in zip(names, segments)]
    faults = [
        fault(
            spec,
            spec.dims[1],
            f"the {name} must have shape {like.shape[:2]}, but the shape is {x.shape}.",
            "Give each token one segment.",
        )
        for spec, name, x, like in zip((query, key), names, found, (q, k))
        if x.shape != like.shape[:2]
    ]
    if faults:
        raise report(SpecError, doing, faults) from None
    return [x.astype(jnp.int32) for x in found]


def read_bias(
    doing: str, bias: Any, bias_spec: str | Spec | None, buckets: Buckets | None, query: Spec, heads: int, ctx: Context
) -> tuple[jax.Array, OfHeads, Buckets] | None:
    """Return the table of a bias, its spec and its buckets, or None if all three are missing.

    Raises:
        SpecError: one or two of the three are missing; or the spec does not fit the table; or the table does not have a
            row for each bucket and a column for each query head.
    """
    if bias is None and bias_spec is None and buckets is None:
        return None
    missing = [n for n, x in (("bias", bias), ("bias_spec", bias_spec), ("buckets", buckets)) if x is None]
    if missing or bias_spec is None:
        raise SpecError(
            f"{doing}: a relative position bias has bias, bias_spec and buckets; {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} missing.\n  Give all three."
        )
    if not isinstance(buckets, Buckets):
        raise SpecError(
            f"{doing}: buckets are {type(buckets).__name__}.\n  Pass gspmd.ops.Buckets(count, distance, bidirectional)."
        )
    table = array(doing, "bias", bias, "real numbers")
    spec = read(doing, bias_spec, table, ctx, weight=True)
    head, remedy = query.dims[2], f"Write it 'R{query.dims[2]}', with the mesh axes that hold it."
    if len(spec.dims) != 2 or spec.dims[1] != head or spec.dims[0] in query.dims:
        raise SpecError(
            f"{doing}: '{spec}' is not the spec of a bias, which has a letter of its own for its buckets, and "
            f"{head} for the query heads.\n  {remedy}"
        )
    faults = [
        fault(
            spec,
            spec.dims[at],
            f"{spec.dims[at]} of the bias must have size {size}, {why}, but the size is {table.shape[at]}.",
        )
        for at, size, why in ((0, buckets.count, "the number of buckets"), (1, heads, "the number of query heads"))
        if table.shape[at] != size
    ]
    if faults:
        raise report(SpecError, doing, faults) from None
    return table, OfHeads(spec, table.dtype.itemsize), buckets


def read_slopes(
    doing: str, slopes: Any, spec: str | Spec | None, query: Spec, heads: int, ctx: Context
) -> tuple[jax.Array, OfHeads] | None:
    """Return ALiBi's slopes in float32 and their spec, or None if there are no slopes.

    The slopes have no gradient. Without a spec they are unsharded.

    Raises:
        SpecError: the slopes or their spec are wrong in one of the ways that `read_of_heads` lists.
        PlanError: a slope in a tuple or list is not a finite Python number.
    """
    if isinstance(slopes, (tuple, list)):
        slopes = np.array([number(doing, "a slope", each) for each in slopes], np.float32)
    if slopes is not None:
        slopes = jax.lax.stop_gradient(float32(array(doing, "slopes", slopes, "real numbers")))
        spec = query.dims[2] if spec is None else spec
    return read_of_heads(doing, "slopes", slopes, spec, query, heads, ctx)


def positions(length: int, first: jax.Array | int = 0) -> jax.Array:
    """Return the int32 positions [1, L] of tokens in the order of the text, the first of which is at `first`."""
    return jax.lax.broadcasted_iota(jnp.int32, (1, length), 1) + first
