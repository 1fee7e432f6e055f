"""Softmax over keys that come in parts: running maximum, denominator and weighted values of every query."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Attended(NamedTuple):
    """What queries have attended to so far, in float32: their output is values / total."""

    top: jax.Array
    """[B, K, Q, L] largest logit; -inf where there was no key."""
    total: jax.Array
    """[B, K, Q, L] Σ exp(logit - top)."""
    values: jax.Array
    """[B, K, Q, L, D] Σ exp(logit - top) · v."""

    def relative_to(self, top: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Denominator and weighted values as they are for a larger maximum."""
        factor = jnp.exp(self.top - finite(top))
        return self.total * factor, self.values * factor[..., None]

    def merge(self, other: "Attended") -> "Attended":
        """What queries have attended to after two parts of their keys."""
        top = jnp.maximum(self.top, other.top)
        mine, theirs = self.relative_to(top), other.relative_to(top)
        return Attended(top, mine[0] + theirs[0], mine[1] + theirs[1])

    def by_query(self) -> "Attended":
        """The same as [B, L, H] and [B, L, H, D]."""
        top, total, values = (jnp.moveaxis(x, 3, 1) for x in self)
        return Attended(*(x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in (top, total, values)))

    def output(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The weighted mean of the values."""
        return (self.values / self.total[..., None]).astype(dtype)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array | None,
    scale: float,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
) -> Attended:
    """Attend to one part of the keys.

    Args:
        q: [B, L, K, Q, D], query heads in groups that share a key head.
        k, v: [B, T, K, D] of any dtype, which is cast to that of `q` inside the products.
        seen: booleans that broadcast to [B, K, Q, L, T]: which key a query attends to; None for all.
        scale: of the logits.
        key_scales, value_scales: [B, T, K] float32 of quantized keys and values: they scale logits and probabilities,
            which are fewer than the keys.
    """
    logits = jnp.einsum("blkqd,btkd->bkqlt", q, k.astype(q.dtype), preferred_element_type=jnp.float32) * scale
    if key_scales is not None:
        logits *= _along_keys(key_scales)
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, initial=-jnp.inf)
    weights = jnp.exp(logits - finite(top)[..., None])
    total = jnp.sum(weights, axis=-1)
    if value_scales is not None:
        weights *= _along_keys(value_scales)
    weights, v = weights.astype(q.dtype), v.astype(q.dtype)
    return Attended(top, total, jnp.einsum("bkqlt,btkd->bkqld", weights, v, preferred_element_type=jnp.float32))


def finite(top: jax.Array) -> jax.Array:
    """A maximum to subtract; 0 where there was no key, so that exp(-inf - 0) is 0 and not NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def _along_keys(scales: jax.Array) -> jax.Array:
    """[B, T, K] as it multiplies [B, K, Q, L, T]."""
    return scales.transpose(0, 2, 1)[:, :, None, None, :]
