"""Attention of one query of each row on a TPU, with all query heads as the rows of one product with the keys."""

import jax
import jax.numpy as jnp

from gspmd.ops._attention.online import LOW, Attended, scaled_logits
from gspmd.ops._attention.terms import UNLIMITED, Limits

TILE = 8
"""The number of rows that the matrix unit returns at a time."""


def suits(heads: int, key_heads: int, scaled: bool) -> bool:
    """Return whether all query heads should be multiplied in one product.

    They should if there are several query heads, and fewer of them share a key head than a tile has rows. With int8
    keys, for which `scaled` is true, there must also be as many key heads as query heads, or only one key head.
    Otherwise it takes more time to repeat the scales for each query head than is saved.
    """
    group = heads // max(key_heads, 1)
    return heads > 1 and 0 < group < TILE and (group == 1 or key_heads == 1 or not scaled)


def attend_together(
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
    limits: Limits = UNLIMITED,
) -> Attended:
    """Attend with one query in each row, with all heads in one product; the statistics have shape [B, 1, H].

        logits[b, h, t] = Σ_k Σ_d (q[b, h, d] if head h uses key head k else 0) · k[b, t, k, d]

    The matrix unit reads each key head once, as it would for separate products, and the additional terms of the sums
    are zeros. But a tile of the logits has rows of several heads. With separate products it would have one row of a
    head and seven rows of padding, and all later operations would process the padding too.

    The compiler's estimates for one layer are given here in µs, each followed in parentheses by the estimate for
    separate products of two rows each. In bfloat16 they are v4 496 (577), v5e 740 (875) and v5p 286 (352). In int8 they
    are v4 302 (406), v5e 490 (647) and v5p 212 (277). The layer has 96 rows, 2048 keys, and 4 heads of size 128, and
    the compiler is libtpu 0.0.42.

    Args:
        q: [B, 1, H, D].
        k, v, scale, key_scales, value_scales, rest_scales, width: the arguments of `online.attend`.
        seen: [B, T] booleans, which are True for the keys to which the query attends; None if it attends to all keys.
        limits: limits of which only the soft cap of the scaled logits is used.
    """
    rows, _, heads, _ = q.shape
    key_heads = k.shape[2]
    q = jnp.pad(q[:, 0], ((0, 0), (0, -heads % TILE if key_heads == 1 else 0), (0, 0)))
    used, own = (jax.lax.broadcasted_iota(jnp.int32, (1, q.shape[1], key_heads, 1), at) for at in (1, 2))
    apart = jnp.where(used * key_heads // heads == own, q[:, :, None], 0)
    scales = (None if x is None else x.transpose(0, 2, 1) for x in (key_scales, rest_scales))
    logits = scaled_logits("bhkd,btkd->bht", apart, k.astype(q.dtype), *scales, width=width, rows=1) * scale
    logits = limits.capped(logits)
    if seen is not None:
        logits = jnp.where(seen[:, None], logits, LOW)
    top = jnp.max(logits, axis=-1, initial=LOW)
    weights = jnp.exp(logits - top[..., None])
    total = jnp.sum(weights, axis=-1)
    if value_scales is not None:
        weights *= value_scales.transpose(0, 2, 1)
    grouped = weights[:, :heads].astype(q.dtype).reshape(rows, key_heads, heads // key_heads, -1)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, int(heads == key_heads)), (0, 0)))  # products with one row are slow
    values = jnp.einsum("bkqt,btkd->bkqd", grouped, v.astype(q.dtype), preferred_element_type=jnp.float32)
    values = values[:, :, : heads // key_heads].reshape(rows, 1, heads, v.shape[3])
    return Attended(top[:, None, :heads], total[:, None, :heads], values)
