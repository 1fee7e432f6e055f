"""Attention written out in one piece: every term of the logits, with a row for each query and a column for each key."""

import jax
import jax.numpy as jnp
import numpy as np


def written_out(
    q, k, v, *, at=None, scale=None, causal=True, window=None, chunk=None, softcap=None, sinks=None, slopes=None,
    mask=None, segments=None,
):  # fmt: skip
    """Return [B, L, H, D]; `at` has the positions of queries and keys, by default their indices."""
    of_queries, of_keys = (np.arange(q.shape[1]), np.arange(k.shape[1])) if at is None else at
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("blhd,bthd->bhlt", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    relative = np.asarray(of_keys)[None] - np.asarray(of_queries)[:, None]
    if slopes is not None:
        logits = logits + jnp.asarray(slopes)[None, :, None, None] * relative[None, None]
    seen = np.ones((1, 1, *relative.shape), bool)
    if causal:
        seen = seen & (relative <= 0)
    if window is not None:
        seen = seen & (relative > -window)
    if chunk is not None:
        seen = seen & (np.asarray(of_keys)[None] // chunk == np.asarray(of_queries)[:, None] // chunk)
    if mask is not None:
        seen = seen & mask[:, None, None, :]
    if segments is not None:
        first, second = segments
        seen = seen & (first[:, None, :, None] == second[:, None, None, :]) & (second != 0)[:, None, None, :]
    sink = jnp.full((1, q.shape[2], 1, 1), -jnp.inf) if sinks is None else jnp.reshape(sinks, (1, -1, 1, 1))
    logits = jnp.where(seen, logits, -1e30)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sink))
    weights = jnp.where(seen, jnp.exp(logits - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top)
    return jnp.einsum("bhlt,bthd->blhd", weights / jnp.where(total > 0, total, 1), v)
