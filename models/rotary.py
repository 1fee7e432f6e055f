"""Rotary position embedding, which rotates queries and keys, and factors by which queries grow with the position."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import ModelConfig
from .rope_scaling import RopeScaling

Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines of the angles by which pairs of a head's elements are rotated, each [B, L, 1, R/2] float32. They
are already multiplied by the factor of the scaling."""

LONGEST = 2**20
"""The number of positions, 0 to `LONGEST` - 1, at which `angles_at` is exact."""


def rotate(
    x: jax.Array, config: ModelConfig, angles: Angles | tuple[np.ndarray, np.ndarray] | None = None
) -> jax.Array:
    """Apply rotary position embedding: rotate pair i of R/2 by position · base^(-2i/R).

    The first R = `config.rotary` elements of a head are rotated. Depending on `config.rotary_pairs`, the pairs are
    (x[i], x[i + R/2]) or (x[2i], x[2i + 1]). The rotation is elementwise over batch, length and heads, which may be
    sharded; the head size must not be sharded. If the config has `rope_scaling`, the function `turns` gives the angles
    and the factor of cosines and sines.

    Args:
        x: [B, L, H, D].
        config: a configuration. Only `rotary`, `rotary_pairs`, `rope_base` and `rope_scaling` are used.
        angles: the result of `angles_at` for positions [B, L], sharded like B and L of x. None stands for the positions
            0 to L - 1 of a text of L tokens.

    Returns:
        [B, L, H, D] in x's dtype. The rotation is computed in float32.

    Example:
        >>> turned = rotate(jnp.ones((1, 2, 1, 2)), ModelConfig(head_size=2))
        >>> [f"{value:.3f}" for value in turned[0, 1, 0]]
        ['-0.301', '1.382']

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), section 3.2.2.
    Differs: by default a pair has one element from each half of the head. This is the paper's rotation with the
        elements of the head permuted.
    """
    size = config.rotary
    cos, sin = cos_sin(np.arange(x.shape[1]), turns(config, x.shape[1])) if angles is None else angles
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


class Turns(NamedTuple):
    """The speed at which every pair of a head's elements is rotated.

    Attributes:
        per_position: [R/2] float64, the angle by which each pair is rotated per position, in turns.
        factor: the factor by which cosines and sines are multiplied.
    """

    per_position: np.ndarray
    factor: float = 1.0


def turns(config: ModelConfig, length: int | None = None) -> Turns:
    """Return the angle by which every pair of elements is rotated per position, in turns.

    Args:
        config: a configuration. Only `rotary`, `rope_base` and `rope_scaling` are used.
        length: number of tokens of the text. It is needed if the scaling depends on this number
            (`RopeScaling.by_length`).
    """
    scaling = config.rope_scaling
    plain = config.rope_base ** (-np.arange(0, config.rotary, 2) / config.rotary) / (2 * np.pi)
    if scaling is None:
        return Turns(plain)
    assert length is not None or not scaling.by_length, f"{scaling.kind} scaling needs the length of the text"
    if scaling.kind == "linear":
        found = plain / scaling.factor
    elif scaling.kind == "dynamic":
        assert length is not None
        grown = scaling.factor * (max(length, scaling.original_length) / scaling.original_length - 1) + 1
        found = plain * grown ** _exponents(config)
    elif scaling.kind == "longrope":
        assert length is not None
        found = plain / (scaling.long_factors if length > scaling.original_length else scaling.short_factors)
    else:
        unscaled = (_unscaled_llama3 if scaling.kind == "llama3" else _unscaled_yarn)(config, scaling, plain)
        found = plain * (unscaled + (1 - unscaled) / scaling.factor)
    return Turns(found, scaling.cosine_factor)


def _exponents(config: ModelConfig) -> np.ndarray:
    """Return the exponents [R/2] of dynamic scaling: the turns of pair i are multiplied by growth^exponent[i].

    The base is multiplied by growth^(R / (R - 2)). The first pair then keeps its turns, and the turns of the last pair
    are divided by the growth. In the formula of `RopeScaling`, the growth is factor · L / original_length - factor + 1.
    """
    return -np.arange(0, config.rotary, 2) / (config.rotary - 2)


def _unscaled_llama3(config: ModelConfig, scaling: RopeScaling, plain: np.ndarray) -> np.ndarray:
    """Return the unscaled share [R/2] of each pair's frequency, for `llama3`.

    It is 0 for pairs that make fewer than low_frequency turns within the original length, and 1 for pairs that make
    more than high_frequency turns.
    """
    low, high = scaling.low_frequency, scaling.high_frequency
    assert high is not None
    if low == high:
        return (plain * scaling.original_length >= low).astype(float)
    return np.clip((plain * scaling.original_length - low) / (high - low), 0.0, 1.0)


def _unscaled_yarn(config: ModelConfig, scaling: RopeScaling, plain: np.ndarray) -> np.ndarray:
    """Return the unscaled share [R/2] of each pair's frequency, for `yarn`.

    It is 1 up to the pair that makes high_frequency turns within the original length, and 0 from the pair that makes
    low_frequency turns onwards.
    """
    assert scaling.high_frequency is not None
    first, last = (
        # the unrounded number of the pair that makes this many turns within the original length
        config.rotary * math.log(scaling.original_length / (2 * math.pi * frequency)) / (2 * math.log(config.rope_base))
        for frequency in (scaling.high_frequency, scaling.low_frequency)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary - 1)
    if first == last:
        last += 0.001
    return 1 - np.clip((np.arange(config.rotary // 2) - first) / (last - first), 0.0, 1.0)


def query_growth(positions: np.ndarray | jax.Array, config: ModelConfig) -> Any:
    """Return the factors [B, L, 1, 1] by which queries grow with the position, in layers without rotation.

        1 + a · ln(1 + ⌊(p + 1) / n⌋),  a = `config.query_growth`,  n = `config.growth_interval`

    A softmax over more keys is flatter, and queries that grow with their position keep it sharp.

    Args:
        positions: the positions p, integers [B, L]. If they are constants, the result is constant too.
        config: the model configuration.

    Example:
        >>> config = ModelConfig(layer_kinds=("unrotated",), query_growth=0.5, growth_interval=4)
        >>> [f"{factor:.4f}" for factor in query_growth(np.array([[0, 2, 3]]), config).ravel()]
        ['1.0000', '1.0000', '1.3466']

    Source: Nakanishi 2025, *Scalable-Softmax Is Superior for Attention* (arXiv 2501.19399), for factors that grow with
        the logarithm of the length.
    """
    of = np if isinstance(positions, np.ndarray) else jnp
    steps = ((positions + 1) // config.growth_interval).astype(np.float32)
    return (1 + config.query_growth * of.log1p(steps)).astype(np.float32)[:, :, None, None]


def cos_sin(positions: np.ndarray, turns: Turns) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines [1, L, 1, R/2] of the angles at constant positions [L], multiplied by `turns.factor`."""
    angles = (2 * np.pi * positions[:, None] * turns.per_position)[None, :, None, :]
    return (turns.factor * np.cos(angles)).astype(np.float32), (turns.factor * np.sin(angles)).astype(np.float32)


def angles_at(positions: jax.Array, config: ModelConfig, lengths: jax.Array | None = None) -> Angles:
    """Return the cosines and sines [B, L, 1, R/2] of the angles of `rotate` at positions [B, L] below `LONGEST`.

    The angles are the same in every layer. In float32, an angle of a hundred thousand radians has few digits after the
    point. So turns are integers in units of 2^-44. Their products with a position wrap around at complete turns, and an
    angle is exact to 2^-24 turns. With dynamic scaling, the turns depend on the text and are first computed in float32.

    Args:
        positions: [B, L], integers.
        config: a configuration, as for `turns`.
        lengths: [B, L], for each token the number of tokens in its text, sharded like the positions. It is needed if
            the scaling depends on this number (`RopeScaling.by_length`).
    """
    scaling = config.rope_scaling
    at = positions.astype(jnp.uint32)[..., None, None]
    if scaling is None or not scaling.by_length:
        high, low = (part[None, None, None] for part in _fixed(turns(config).per_position))
    else:
        assert lengths is not None, f"{scaling.kind} scaling needs the lengths of texts"
        high, low = _fixed_by_length(config, scaling, lengths[..., None, None])
    part = at * high + ((at * low) >> 12)
    angles = jax.lax.bitcast_convert_type(part, jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
    if scaling is None or scaling.cosine_factor == 1:
        return jnp.cos(angles), jnp.sin(angles)
    factor = np.float32(scaling.cosine_factor)
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def _fixed(turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return turns in units of 2^-44, as two integer arrays: the upper 32 bits and the lower 12 bits."""
    fixed = np.round(turns * 2**44).astype(np.int64)
    return (fixed >> 12).astype(np.uint32), (fixed & 0xFFF).astype(np.uint32)


def _fixed_by_length(config: ModelConfig, scaling: RopeScaling, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the turns [B, L, 1, R/2] in texts of lengths [B, L, 1, 1], as two integer arrays like `_fixed`."""
    original = scaling.original_length
    if scaling.kind == "longrope":
        short, long = (_fixed(turns(config, length).per_position) for length in (original, original + 1))
        # A sum that wraps around in place of jnp.where, which refuses operands of different shardings.
        is_long = (lengths > original).astype(jnp.uint32)
        both = [a[None, None, None] + is_long * (b - a)[None, None, None] for a, b in zip(short, long)]
        return both[0], both[1]
    grown = scaling.factor * (jnp.maximum(lengths, original).astype(jnp.float32) / original - 1) + 1
    exponents = _exponents(config).astype(np.float32)[None, None, None]
    plain = jnp.asarray(turns(config, original).per_position, jnp.float32)[None, None, None]
    scaled: jax.Array = plain * jnp.exp(exponents * jnp.log(grown)) * 2.0**32
    high = scaled.astype(jnp.uint32)
    return high, ((scaled - high.astype(jnp.float32)) * 2.0**12).astype(jnp.uint32)
