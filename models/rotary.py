"""Rotary position embedding: queries and keys turned by the angles of their positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .config import ModelConfig

Angles = tuple[jax.Array, jax.Array]
"""Cosine and sine of the angles by which pairs of a head's elements are rotated, [B, L, 1, R/2] float32."""

LONGEST = 2**20
"""The number of positions, 0 to `LONGEST` - 1, at which `angles_at` is exact."""


def rotate(
    x: jax.Array, config: ModelConfig, angles: Angles | tuple[np.ndarray, np.ndarray] | None = None
) -> jax.Array:
    """Apply rotary position embedding: rotate pair i of R/2 by position · base^(-2i/R).

    The first R = `config.rotary` elements of a head are rotated, in pairs (x[i], x[i + R/2]) or (x[2i], x[2i + 1]) as
    `config.rotary_pairs` says. Elementwise over batch, length and heads, which may be sharded; head size must not be.

    Args:
        x: [B, L, H, D].
        config: `rotary`, `rotary_pairs`, `rope_base` and `rope_scaling`.
        angles: `angles_at` positions [B, L] that are placed as B and L of x; None for positions 0 to L - 1.

    Returns:
        [B, L, H, D] in x's dtype; computed in float32.

    Example:
        >>> turned = rotate(jnp.ones((1, 2, 1, 2)), ModelConfig(head_size=2))
        >>> [f"{value:.3f}" for value in turned[0, 1, 0]]
        ['-0.301', '1.382']

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), section 3.2.2.
    Differs: pairs take one element from each half of the head by default, a permutation of the head's elements.
    """
    size = config.rotary
    cos, sin = cos_sin(np.arange(x.shape[1]), turns(config)) if angles is None else angles
    wide = x[..., :size].astype(jnp.float32)
    if config.rotary_pairs == "neighbours":
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    if config.rotary_pairs == "neighbours":
        rotated = jnp.stack(turned, axis=-1).reshape(wide.shape).astype(x.dtype)
    else:
        rotated = jnp.concatenate(turned, axis=-1).astype(x.dtype)
    return rotated if size == x.shape[-1] else jnp.concatenate([rotated, x[..., size:]], axis=-1)


def turns(config: ModelConfig) -> np.ndarray:
    """Return the turns per position of every pair, [R/2] float64."""
    size, scaling = config.rotary, config.rope_scaling
    turns = config.rope_base ** (-np.arange(0, size, 2) / size) / (2 * np.pi)
    if scaling is None:
        return turns
    # the unscaled share of a frequency: 0 below low_frequency turns of the original length, 1 above high_frequency
    low, high = scaling.low_frequency, scaling.high_frequency
    kept = np.clip((turns * scaling.original_length - low) / (high - low), 0.0, 1.0)
    return turns * (kept + (1.0 - kept) / scaling.factor)


def cos_sin(positions: np.ndarray, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine [1, L, 1, R/2] of the angles of constant positions [L]."""
    angles = (2 * np.pi * positions[:, None] * turns)[None, :, None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def angles_at(positions: jax.Array, config: ModelConfig) -> Angles:
    """Return cosine and sine [B, L, 1, R/2] of `rotate`'s angles at positions [B, L], each below `LONGEST`.

    They are the same in every layer. Float32 has few digits after the point for an angle of a hundred thousand radians.
    So turns are integers in units of 2^-44, whose products with a position wrap around at complete turns: the angle is
    exact to 2^-24 turns.
    """
    fixed = np.round(turns(config) * 2**44).astype(np.int64)
    high, low = (fixed >> 12).astype(np.uint32), (fixed & 0xFFF).astype(np.uint32)
    at = positions.astype(jnp.uint32)[..., None, None]
    part = at * high[None, None, None] + ((at * low[None, None, None]) >> 12)
    angles = jax.lax.bitcast_convert_type(part, jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
    return jnp.cos(angles), jnp.sin(angles)
