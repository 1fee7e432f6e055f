"""Multi-head, grouped-query and multiquery attention with rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.layouts import Layout
from gspmd.ops._attention import attention
from gspmd.ops._attention.zigzag import ring_size, zigzag_positions

from .config import ModelConfig
from .layer import Layer
from .vectors import masked, padded_dimensions

LONGEST = 2**20
"""The number of positions, 0 to `LONGEST` - 1, at which `angles_at` is exact."""


class Past(Protocol):
    """The cached keys and values of one layer, for attention of the tokens that follow them."""

    def angles(self, spec: Spec) -> tuple[jax.Array, jax.Array]:
        """Return `angles_at` the positions of the new tokens, placed as B and L of `spec`."""

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, query_spec: Spec, key_spec: Spec) -> jax.Array:
        """Attend with rotated queries to the cache and to the given keys and values, and store these."""


class Attention(Layer):
    """Causal self-attention on the residual stream.

    The parallel block calls `core` and computes the products around it itself, to share collectives with feed-forward.
    """

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, jax.Array], dtype: Any):
        super().__init__(config, layout.section("attention"), weights, dtype)
        self.padded = padded_dimensions(config, layout).get("H")

    def __call__(self, x: jax.Array, past: Past | None = None) -> jax.Array:
        """Return the output [B, L, E] to add to the residual stream, placed as `attention.residual`."""
        return self.attend("residual", self.normed("residual", x), past)

    def attend(self, where: str, y: jax.Array, past: Past | None = None) -> jax.Array:
        """Attend with a normed input [B, L, E]; input and output are placed as the line `where`."""
        weights = self.matrices("w_q", "w_k", "w_v")
        # [B, L, E] -> [B, L, H, D], and [B, L, K, D] twice
        products = self.at.einsum(f"{where}, (w_q, w_k, w_v) -> (query, key, key)", y, weights)
        mixed = self.core(*self.heads(where, products, y), past)
        out = f"query, w_o -> {where}"  # [B, L, H, D] -> [B, L, E]
        added = self.adapted(out, self.at.einsum(out, mixed, self.matrix("w_o")), mixed)
        return self.affine(where, checkpoint_name(added, "attention.added"), "o")

    def heads(self, where: str, products: Sequence[jax.Array], y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [B, L, H, D], keys and values [B, L, K, D] of y, from its products with the three weights.

        Adapters, scales, biases and norms of heads are applied to the products, as far as the model has them.
        """
        found = []
        for x, line, weight, kept in zip(products, ("query", "key", "key"), "qkv", ("query", "key", "value")):
            x = checkpoint_name(self.adapted(f"{where}, w_{weight} -> {line}", x, y), f"attention.{kept}")
            found.append(self.affine(line, x, weight))
        q, k, v = found
        if self.config.qk_norm:
            epsilon = self.config.norm_epsilon
            q = self.at.rms_norm("query, q_norm", q, self.vector("q_norm"), epsilon=epsilon)
            k = self.at.rms_norm("key, k_norm", k, self.vector("k_norm"), epsilon=epsilon)
        return q, k, v

    def core(self, q: jax.Array, k: jax.Array, v: jax.Array, past: Past | None = None) -> jax.Array:
        """Compute softmax attention of queries [B, L, H, D] and keys [B, L, K, D], placed as the queries.

        Without a `past`, sequences begin here, in zigzag order if L of the keys is sharded; with it, they follow it.
        """
        query, key = self.at.spec("query"), self.at.spec("key")
        if past is None:
            if fault := self.config.length_fault(q.shape[1]):
                raise ValueError(f"cannot run this model: {fault}.")
            angles = _cos_sin(zigzag_positions(q.shape[1], ring_size(key)), _turns(self.config))
            # Without `_along`, compilers make one constant of both tables, sharded over L as queries, and gather it.
            cut = _along(query, angles) if query.axes_of("L") != key.axes_of("L") else angles
            turned = rotate(q, self.config, cut), rotate(k, self.config, angles)
            q, k = checkpoint_name(turned, "attention.rotated")
            out = attention(q, k, v, query, key, causal=True)
        else:
            q, k = (rotate(x, self.config, past.angles(spec)) for x, spec in ((q, query), (k, key)))
            out = past.attend(q, k, v, query, key)
        return masked(out, self.padded, "H", query)


def rotate(
    x: jax.Array, config: ModelConfig, angles: tuple[jax.Array | np.ndarray, jax.Array | np.ndarray] | None = None
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
    cos, sin = _cos_sin(np.arange(x.shape[1]), _turns(config)) if angles is None else angles
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


def _turns(config: ModelConfig) -> np.ndarray:
    """Return the turns per position of every pair, [R/2] float64."""
    size, scaling = config.rotary, config.rope_scaling
    turns = config.rope_base ** (-np.arange(0, size, 2) / size) / (2 * np.pi)
    if scaling is None:
        return turns
    # the unscaled share of a frequency: 0 below low_frequency turns of the original length, 1 above high_frequency
    low, high = scaling.low_frequency, scaling.high_frequency
    kept = np.clip((turns * scaling.original_length - low) / (high - low), 0.0, 1.0)
    return turns * (kept + (1.0 - kept) / scaling.factor)


def _cos_sin(positions: np.ndarray, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine [1, L, 1, R/2] of the angles of constant positions [L]."""
    angles = (2 * np.pi * positions[:, None] * turns)[None, :, None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _along(spec: Spec, angles: tuple[np.ndarray, np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Shard cosines and sines [1, L, 1, R/2] of constant positions over the mesh axes of a spec's L."""
    whole = Spec(("B", "L", "H", "D"), ((), (), (), ()))
    move = Equation.move(whole, whole.with_axes("L", spec.axes_of("L")))
    cos, sin = (gspmd.reshard(jnp.asarray(table), move) for table in angles)
    return cos, sin


def angles_at(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine [B, L, 1, R/2] of `rotate`'s angles at positions [B, L], each below `LONGEST`.

    They are the same in every layer. Float32 has few digits after the point for an angle of a hundred thousand radians.
    So turns are integers in units of 2^-44, whose products with a position wrap around at complete turns: the angle is
    exact to 2^-24 turns.
    """
    fixed = np.round(_turns(config) * 2**44).astype(np.int64)
    high, low = (fixed >> 12).astype(np.uint32), (fixed & 0xFFF).astype(np.uint32)
    at = positions.astype(jnp.uint32)[..., None, None]
    part = at * high[None, None, None] + ((at * low[None, None, None]) >> 12)
    angles = jax.lax.bitcast_convert_type(part, jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
    return jnp.cos(angles), jnp.sin(angles)
