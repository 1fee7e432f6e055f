"""The terms of attention besides its products: padding, segments, causality, and a bias by distance."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspmd.annotate.errors import SpecError, report
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context
from gspmd.ops._attention.buckets import Buckets
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.planned_op import FLOAT32, Chains, fault, float32, read, sizes_of
from gspmd.planner.graph.resharding import move
from gspmd.planner.steps import Step

# -- on one device ----------------------------------------------------------------------------------------------------


class Bias(NamedTuple):
    """A bias of every query head for each bucket of relative positions."""

    table: jax.Array
    """[R, H] float32, for the query heads of the logits."""
    queries: jax.Array
    """[B, L] int32 positions in the text; [1, L] if all rows have the same."""
    keys: jax.Array
    """[B, T] or [1, T] int32 positions in the text."""
    buckets: Buckets

    def chosen(self) -> jax.Array:
        """Return float32 [B, L, T, R], or with one row for all: 1 at the bucket of each query and key, else 0.

        Products with it replace a lookup and, in the gradient, a scatter, which matrix units do much faster.
        """
        relative = self.keys[:, None, :] - self.queries[:, :, None]
        return jax.nn.one_hot(self.buckets.of(relative), self.buckets.count, dtype=jnp.float32)

    def logits(self, key_heads: int) -> jax.Array:
        """Return what is added to the logits [B, K, Q, L, T], or with one row for all."""
        return biases(self.chosen(), self.table, key_heads)


def biases(chosen: jax.Array, table: jax.Array, key_heads: int) -> jax.Array:
    """Return the bias [B, K, Q, L, T] of the `chosen` buckets [B, L, T, R] from the table [R, H]."""
    table = table.reshape(table.shape[0], key_heads, table.shape[1] // max(key_heads, 1))
    return jnp.einsum("bltr,rkq->bkqlt", chosen, table, precision=jax.lax.Precision.HIGHEST)  # a lookup, not rounded


def table_gradient(chosen: jax.Array, slope: jax.Array) -> jax.Array:
    """Return the gradient [R, H] of the table from that of the logits [B, K, Q, L, T]."""
    if chosen.shape[0] == 1:
        slope = jnp.sum(slope, axis=0, keepdims=True)
    found = jnp.einsum("bltr,bkqlt->rkq", chosen, slope, precision=jax.lax.Precision.HIGHEST)
    return found.reshape(found.shape[0], found.shape[1] * found.shape[2])


class Terms(NamedTuple):
    """The mask and the bias of the logits of some queries and keys."""

    seen: jax.Array | None = None
    """[B, T] booleans: the keys that are not padding."""
    ahead: jax.Array | None = None
    """int32 scalar, for causal attention: the position of the first query minus that of the first key; None for 0."""
    segments: tuple[jax.Array, jax.Array] | None = None
    """[B, L] and [B, T] int32: a query attends to the keys of its own segment, and to none of segment 0."""
    bias: Bias | None = None

    def on(self, queries: Callable[[jax.Array], jax.Array], keys: Callable[[jax.Array], jax.Array]) -> "Terms":
        """Return the terms of other queries and keys, by a function of [B, L] and one of [B, T]."""
        segments, bias = self.segments, self.bias
        return self._replace(
            seen=None if self.seen is None else keys(self.seen),
            segments=None if segments is None else (queries(segments[0]), keys(segments[1])),
            bias=None if bias is None else bias._replace(queries=queries(bias.queries), keys=keys(bias.keys)),
        )

    def with_more_queries(self, count: int) -> "Terms":
        """Return the terms with some queries at the end whose results are dropped."""
        return self.on(lambda x: jnp.pad(x, ((0, 0), (0, count))), lambda x: x) if count else self

    def visible(self) -> jax.Array | None:
        """Return which keys have the segment of a query and are no padding; broadcasts to [B, L, T], None for all."""
        seen = None if self.seen is None else self.seen[:, None, :]
        if self.segments is None:
            return seen
        of_query, of_key = self.segments[0][:, :, None], self.segments[1][:, None, :]
        alike = (of_query == of_key) & (of_key != 0)
        return alike if seen is None else alike & seen

    @property
    def is_plain(self) -> bool:
        """Whether only causality decides which keys are seen, and the logits are products alone."""
        return self.seen is None and self.segments is None and self.bias is None

    def cleared(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [B, L, H, D], keys and values [B, T, K, D] with 0 for padding, whatever stands there.

        A probability of 0 hides only finite numbers. Gradients of padding are 0, too.
        """
        if self.segments is not None:
            q = self.real(q)
        for real in (self.seen, None if self.segments is None else self.segments[1] != 0):
            if real is not None:
                k, v = (jnp.where(real[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (k, v))
        return q, k, v

    def real(self, x: jax.Array) -> jax.Array:
        """Return results or cotangents [B, L, H, D] of the queries with 0 for padding."""
        if self.segments is None:
            return x
        return jnp.where(self.segments[0][:, :, None, None] != 0, x, jnp.zeros((), x.dtype))


# -- as arguments of an operation --------------------------------------------------------------------------------------


class Given(NamedTuple):
    """The optional operands of a call, or one device's pieces of them."""

    mask: jax.Array | None = None
    of_queries: jax.Array | None = None
    of_keys: jax.Array | None = None
    bias: jax.Array | None = None
    offset: jax.Array | None = None

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        """The optional operands that are given, in order."""
        return tuple(x for x in self if x is not None)

    @property
    def table(self) -> tuple[jax.Array, ...]:
        """The bias; empty without one."""
        return () if self.bias is None else (self.bias,)

    def with_table(self, table: Sequence[jax.Array]) -> "Given":
        """Return the same with another `table`."""
        return self._replace(bias=table[0]) if table else self

    def terms(self, queries: jax.Array, keys: jax.Array, ahead: jax.Array | None, buckets: Buckets | None) -> Terms:
        """Return the terms of queries and keys at the positions [1, L] and [1, T]."""
        segments = None if self.of_queries is None or self.of_keys is None else (self.of_queries, self.of_keys)
        bias = None if self.bias is None or buckets is None else Bias(float32(self.bias), queries, keys, buckets)
        return Terms(None if self.mask is None else self.mask.astype(bool), ahead, segments, bias)


@dataclass(frozen=True)
class Extras:
    """The optional operands that are given, and the bias's spec and buckets."""

    masked: bool = False
    segmented: bool = False
    shifted: bool = False
    bias: Spec | None = None
    buckets: Buckets | None = None
    bias_bytes: int = FLOAT32
    """The bytes of an element of the bias."""
    alike: bool = False
    """Whether queries and keys have the same segments, so that each query attends at least to its own key."""

    @property
    def _given(self) -> tuple[bool, ...]:
        return self.masked, self.segmented, self.segmented, self.bias is not None, self.shifted

    def named(self, operands: Sequence[jax.Array]) -> Given:
        """Return `Given.operands` by name; what is not given is None."""
        rest = iter(operands)
        return Given(*(next(rest) if each else None for each in self._given))

    def specs(self, query: Spec, key: Spec) -> tuple[Spec, ...]:
        """Return the spec of each operand, in order."""
        queries, keys = (Spec(spec.dims[:2], spec.axes[:2]) for spec in (query, key))
        of_each = (keys, queries, keys, self.bias, Spec((), ()))
        return tuple(spec for spec, given in zip(of_each, self._given) if given and spec is not None)

    @property
    def gradients(self) -> tuple[Spec, ...]:
        """The spec of the bias's gradient; empty without a bias."""
        return () if self.bias is None else (self.bias.cotangent,)

    def bring(self, query: Spec, heads: int, ctx: Context) -> dict[str, tuple[Step, ...]]:
        """Return the chain that brings the bias to the query heads; empty without a bias."""
        if self.bias is None:
            return {}
        used, sizes = by_heads(self.bias, query), sizes_of(self.bias, (self.count, heads))
        return {"bias": move(self.bias, used, sizes, ctx.mesh, self.bias_bytes, ctx.chip, "bias")}

    def back(self, query: Spec, heads: int, ctx: Context) -> dict[str, tuple[Step, ...]]:
        """Return the chain of the bias's gradient, of which each device has the sum over its own rows and queries."""
        if self.bias is None:
            return {}
        made = by_heads(self.bias, query).with_partial((*query.axes[0], *query.axes[1]))
        sizes, name = sizes_of(self.bias, (self.count, heads)), "gradient of bias"
        return {"d_bias": move(made, self.bias.cotangent, sizes, ctx.mesh, FLOAT32, ctx.chip, name)}

    def sent(self, chains: Chains, operands: Sequence[jax.Array]) -> Given:
        """Return the operands by name after the chain of `bring`, inside a shard_map."""
        given = self.named(operands)
        return given.with_table([chains.send("bias", x) for x in given.table])

    def cotangents(self, operands: Sequence[jax.Array], *d_bias: jax.Array) -> tuple[jax.Array | None, ...]:
        """Return the cotangent of each operand, None for all but the bias."""
        given = self.named(operands)
        found = {"bias": d_bias[0].astype(given.table[0].dtype)} if d_bias else {}
        return tuple(found.get(name) for name, x in given._asdict().items() if x is not None)

    @property
    def count(self) -> int:
        """The number of buckets."""
        return 0 if self.buckets is None else self.buckets.count


def by_heads(bias: Spec, query: Spec) -> Spec:
    """Return the spec of a bias with the mesh axes of the query heads."""
    return Spec(bias.dims, ((), query.axes[2]))


def read_segments(doing: str, segments: Any, query: Spec, key: Spec, q: jax.Array, k: jax.Array) -> Sequence[jax.Array]:
    """Return the segments of queries and of keys as int32.

    Raises:
        SpecError: they are no pair, have no integers, or another shape than queries and keys.
    """
    if not isinstance(segments, (tuple, list)) or len(segments) != 2 or any(each is None for each in segments):
        raise SpecError(
            f"{doing}: segments are not a pair.\n"
            f"  Give those of the queries and those of the keys, (int32 {q.shape[:2]}, int32 {k.shape[:2]})."
        )
    names = "segments of the queries", "segments of the keys"
    found = [array(doing, name, x, "integers") for name, x in zip(names, segments)]
    faults = [
        fault(spec, spec.dims[1], f"the {name} have shape {x.shape}, not {like.shape[:2]}.", "Give each token one.")
        for spec, name, x, like in zip((query, key), names, found, (q, k))
        if x.shape != like.shape[:2]
    ]
    if faults:
        raise report(SpecError, doing, faults) from None
    return [x.astype(jnp.int32) for x in found]


def read_bias(
    doing: str, bias: Any, bias_spec: str | Spec | None, buckets: Buckets | None, query: Spec, heads: int, ctx: Context
) -> tuple[jax.Array, Spec, Buckets] | None:
    """Return the table of a bias, its spec and its buckets; None if none of them is given.

    Raises:
        SpecError: some but not all are given, the spec does not fit the table, or the table does not have a row for
            each bucket and a column for each query head.
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
            f"{doing}: '{spec}' is not the spec of a bias, which has a letter of its own for its buckets, and {head}, "
            f"the query heads.\n  {remedy}"
        )
    faults = [
        fault(spec, spec.dims[at], f"the bias has size {table.shape[at]} in {spec.dims[at]}, not {size}, {why}.")
        for at, size, why in ((0, buckets.count, "the number of buckets"), (1, heads, "the number of query heads"))
        if table.shape[at] != size
    ]
    if faults:
        raise report(SpecError, doing, faults) from None
    return table, spec, buckets


def positions(length: int, first: jax.Array | int = 0) -> jax.Array:
    """Return int32 positions [1, L] in the order of the text."""
    return jax.lax.broadcasted_iota(jnp.int32, (1, length), 1) + first
