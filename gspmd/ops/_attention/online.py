"""Softmax over keys that come in parts, with a running maximum, denominator and weighted sum of values per query."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspmd.ops._attention.terms import UNLIMITED, Limits

LOW = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The logit of a key that a query does not see; it is finite, so that the difference of two such logits is not NaN."""


class Attended(NamedTuple):
    """The result of attention to some of the keys, in float32. The output is values / total."""

    top: jax.Array
    """[B, K, Q, L], the largest logit, or -inf if there is no key yet."""
    total: jax.Array
    """[B, K, Q, L] Σ exp(logit - top)."""
    values: jax.Array
    """[B, K, Q, L, D] Σ exp(logit - top) · v, the weighted sum of the values."""

    def relative_to(self, top: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the denominator and the weighted values relative to a maximum `top` of at least `self.top`."""
        factor = jnp.exp(self.top - top)
        return self.total * factor, self.values * factor[..., None]

    def merge(self, other: "Attended") -> "Attended":
        """Return the result of attention to the keys of this result and of `other` together."""
        top = jnp.maximum(self.top, other.top)
        mine, theirs = self.relative_to(top), other.relative_to(top)
        return Attended(top, mine[0] + theirs[0], mine[1] + theirs[1])

    def with_sinks(self, sinks: jax.Array | None, counted: jax.Array | bool = True) -> "Attended":
        """Return the result with the sinks added to its statistics.

        Args:
            sinks: [H], an additional logit for each head, without a value; None if there are no sinks.
            counted: whether the sinks count here. If keys come in parts, the sinks count in one part only.
        """
        if sinks is None:
            return self
        shape = self.top.shape
        return self.merge(Attended(*sink_statistics(sinks, shape, counted), jnp.zeros((*shape, 1))))

    def by_query(self) -> "Attended":
        """Return the result with dimensions ordered as in queries: statistics [B, L, H] and values [B, L, H, D]."""
        return Attended(*(ungroup(x) for x in self))

    def output(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the weighted mean of the values as `dtype`; it is 0 for a query that has seen no key."""
        mean = self.values / self.total[..., None]
        return jnp.where(self.top[..., None] == LOW, 0.0, mean).astype(dtype)


def sink_statistics(
    sinks: jax.Array, shape: tuple[int, ...], counted: jax.Array | bool = True
) -> tuple[jax.Array, jax.Array]:
    """Return the largest logit and the denominator of the sinks [..., H] alone, broadcast to `shape`.

    The denominator is 0 where `counted` is False.
    """
    sinks = jnp.broadcast_to(sinks.astype(jnp.float32), shape)
    top = jax.lax.stop_gradient(jnp.maximum(sinks, LOW))  # finite, whatever a sink is
    return top, jnp.exp(sinks - top) * counted


def sink_gradient(sinks: jax.Array, normaliser: jax.Array, out: jax.Array, g: jax.Array) -> jax.Array:
    """Return the gradient [H] of the sinks, which is -Σ (probability of the sink) · (g · out) over all queries.

    Args:
        sinks: [H].
        normaliser: [B, L, H], log Σ exp over all logits of a query and the sink.
        out: [B, L, H, D], the output.
        g: [B, L, H, D], the cotangent of the output.
    """
    mean = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.exp(sinks.astype(jnp.float32)[None, None] - normaliser) * mean, axis=(0, 1))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array | None,
    scale: float,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    rest_scales: jax.Array | None = None,
    *,
    width: int | None = None,
    again: jax.Array | None = None,
    bias: jax.Array | None = None,
    limits: Limits = UNLIMITED,
) -> Attended:
    """Attend to some of the keys; the results for different keys can be merged.

    Args:
        q: [B, K, Q, L, D], query heads in groups that share a key head.
        k, v: [B, T, K, D] of any dtype. They are cast to the dtype of `q` inside the products. Values may have a
            different D than keys.
        seen: booleans that broadcast to [B, K, Q, L, T], which are True for the keys to which a query attends; None if
            every query attends to all keys.
        scale: the factor of the logits.
        key_scales, value_scales: [B, T, K] float32 scales of quantized keys and values. The logits are multiplied
            by `key_scales`, and the probabilities by `value_scales`, because logits and probabilities have fewer
            elements than the keys.
        rest_scales: [B, T, K] float32 scales for the entries of a key after the first `width`. If they are given,
            `key_scales` are for the first `width` entries only.
        width: the number of leading entries of a key that `key_scales` are for. It must be given with `rest_scales`,
            and has no effect without them.
        again: booleans that broadcast to [B, K, Q, L, T], which are True for keys that have already been counted in an
            earlier part of the keys. At least one key has not been counted.
        bias: float32 that broadcasts to [B, K, Q, L, T] and is added to the scaled and capped logits.
        limits: limits of which only the soft cap of the scaled logits is used; `seen` takes windows into account.
    """
    scales = (None if x is None else _along_keys(x) for x in (key_scales, rest_scales))
    logits = scaled_logits("bkqld,btkd->bkqlt", q, k.astype(q.dtype), *scales, width=width, rows=2) * scale
    logits = limits.capped(logits)
    if bias is not None:
        logits += bias
    if seen is not None:
        logits = jnp.where(seen, logits, LOW)
    if again is not None:
        logits = jnp.where(again, -jnp.inf, logits)
    top = jnp.max(logits, axis=-1, initial=LOW)
    weights = jnp.exp(logits - top[..., None])
    total = jnp.sum(weights, axis=-1)
    if value_scales is not None:
        weights *= _along_keys(value_scales)
    weights, v = weights.astype(q.dtype), v.astype(q.dtype)
    return Attended(top, total, jnp.einsum("bkqlt,btkd->bkqld", weights, v, preferred_element_type=jnp.float32))


def scaled_logits(
    product: str,
    q: jax.Array,
    k: jax.Array,
    key_scales: jax.Array | None,
    rest_scales: jax.Array | None,
    *,
    width: int | None,
    rows: int,
) -> jax.Array:
    """Return the products of queries and keys along D, the last dimension of both, times the scales of int8 keys.

    Args:
        product: an equation, as in `jax.numpy.einsum`.
        q, k: the queries and the keys.
        key_scales, rest_scales, width: the arguments of `attend`, but with scales in a shape that broadcasts to the
            products.
        rows: the index of the dimension along which two copies of the queries are concatenated if `rest_scales` are
            given. The index is the same in the queries and in the products.
    """
    if rest_scales is not None:
        assert width is not None, "the rest's scales come with the width before it"
        # The queries come twice: once with zeros for the second part of a key, once with zeros for the first. Products
        # with parts of keys would make the TPU compiler copy these parts.
        before = jax.lax.broadcasted_iota(jnp.int32, (1,) * (q.ndim - 1) + q.shape[-1:], q.ndim - 1) < width
        q = jnp.concatenate([jnp.where(before, q, 0), jnp.where(before, 0, q)], axis=rows)
    logits = jnp.einsum(product, q, k, preferred_element_type=jnp.float32)
    if key_scales is None:
        return logits
    if rest_scales is None:
        return logits * key_scales
    of_first, of_rest = jnp.split(logits, 2, axis=rows)
    return of_first * key_scales + of_rest * rest_scales


def group(q: jax.Array, key_heads: int) -> jax.Array:
    """Return an array [B, L, H, ...] as [B, K, Q, L, ...], with query heads in groups that share a key head."""
    return jnp.moveaxis(q.reshape(*q.shape[:2], key_heads, q.shape[2] // max(key_heads, 1), *q.shape[3:]), 1, 3)


def ungroup(x: jax.Array) -> jax.Array:
    """Return an array [B, K, Q, L, ...] as [B, L, H, ...]; this function is the inverse of `group`."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def _along_keys(scales: jax.Array) -> jax.Array:
    """Return scales [B, T, K] in a shape that broadcasts to logits [B, K, Q, L, T]."""
    return scales.transpose(0, 2, 1)[:, :, None, None, :]
