"""Multi-head, grouped-query and multiquery attention with rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.layouts.section import SectionSpecs
from gspmd.layouts.vias import heads_in
from gspmd.ops._attention import attention
from gspmd.ops._attention.zigzag import ring_size, zigzag_positions
from gspmd.ops._norm import rms_norm

from .config import ModelConfig
from .finetuning.adapters import adapted, hold_adapters
from .vectors import biased, masked, matrix, norm, optional, padded_dimensions, scaled

LONGEST = 2**20
"""Positions from which on `rotate` is not exact."""


class Past(Protocol):
    """The cached keys and values of one layer, for an attention that reads on where they end."""

    def angles(self, spec: Spec) -> tuple[jax.Array, jax.Array]:
        """`angles_at` the positions of the tokens that are read, placed as B and L of `spec`."""

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, query_spec: Spec, key_spec: Spec) -> jax.Array:
        """Attention of rotated queries to the cache and to the keys and values given, which it keeps."""


class Attention(nnx.Module):
    """Causal self-attention on the residual stream.

    The parallel block calls `weights_in`, `core` and `weight_out` itself, to share collectives with its feed-forward.
    """

    def __init__(self, config: ModelConfig, layout: Any, weights: Mapping[str, jax.Array], dtype: Any):
        self.config, self.specs, self.dtype = config, SectionSpecs(layout.section("attention")), dtype
        self.norm, self.norm_bias = optional(weights, "norm"), optional(weights, "norm_bias")
        self.w_q, self.w_k, self.w_v = (nnx.Param(weights[name]) for name in ("w_q", "w_k", "w_v"))
        self.s_q, self.s_k, self.s_v = (optional(weights, name) for name in ("s_q", "s_k", "s_v"))
        self.b_q, self.b_k, self.b_v = (optional(weights, name) for name in ("b_q", "b_k", "b_v"))
        self.q_norm, self.k_norm = optional(weights, "q_norm"), optional(weights, "k_norm")
        self.w_o, self.s_o, self.b_o = nnx.Param(weights["w_o"]), optional(weights, "s_o"), optional(weights, "b_o")
        self.padded = padded_dimensions(config, layout).get("H")
        hold_adapters(self, weights)

    def __call__(self, x: jax.Array, past: Past | None = None) -> jax.Array:
        """The output [B, L, E] that is added to the residual stream, placed as `attention.residual`."""
        at = self.specs
        y = norm(self.config, x, self.norm, self.norm_bias, at.residual, at.norm, at.norm_bias)
        return self.attend(y, at.residual, past)

    def attend(self, y: jax.Array, residual: Spec, past: Past | None = None) -> jax.Array:
        """Attention of a normed input [B, L, E]; input and output are placed as `residual`."""
        at = self.specs
        into = Equation.product(residual, (at.w_q, at.w_k, at.w_v), (at.query, at.key, at.key))
        products = gspmd.einsum(into, y, self.weights_in(), via=heads_in(at))
        mixed = self.core(*self.adapted_in(products, y, residual), past)
        out = Equation.product(at.query, at.w_o, residual)
        added = self.adapted_out(gspmd.einsum(out, mixed, self.weight_out(), via=at.out_via), mixed, residual)
        added = checkpoint_name(added, "attention.added")
        return biased(scaled(added, self.s_o, residual, at.b_o), self.b_o, residual, at.b_o)

    def core(self, q: jax.Array, k: jax.Array, v: jax.Array, past: Past | None = None) -> jax.Array:
        """Softmax attention of projected queries [B, L, H, D] and keys [B, L, K, D], placed as the queries.

        The sequences begin here, in zigzag order if keys are cut over them, or go on after their `past`.
        """
        q, k, v = (checkpoint_name(x, f"attention.{name}") for x, name in ((q, "query"), (k, "key"), (v, "value")))
        (q, k, v), query, key = self.heads(q, k, v), self.specs.query, self.specs.key
        if past is None:
            angles = _cos_sin(zigzag_positions(q.shape[1], ring_size(key)), _turns(self.config))
            q, k = checkpoint_name(tuple(rotate(x, self.config, angles) for x in (q, k)), "attention.rotated")
            out = attention(q, k, v, query, key, causal=True)
        else:
            q, k = (rotate(x, self.config, past.angles(spec)) for x, spec in ((q, query), (k, key)))
            out = past.attend(q, k, v, query, key)
        return masked(out, self.padded, "H", query)

    def heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Projected queries, keys and values with the scales, biases and norms of heads that the model has."""
        at, epsilon = self.specs, self.config.norm_epsilon
        q = scaled(q, self.s_q, at.query, at.b_q)
        k, v = scaled(k, self.s_k, at.key, at.b_k), scaled(v, self.s_v, at.key, at.b_v)
        q = biased(q, self.b_q, at.query, at.b_q)
        k, v = biased(k, self.b_k, at.key, at.b_k), biased(v, self.b_v, at.key, at.b_v)
        if self.config.qk_norm:
            q = rms_norm(q, self.q_norm[...], at.query, at.q_norm, epsilon=epsilon)
            k = rms_norm(k, self.k_norm[...], at.key, at.k_norm, epsilon=epsilon)
        return q, k, v

    def adapted_in(self, products: Sequence[jax.Array], y: jax.Array, residual: Spec) -> list[jax.Array]:
        """Projected queries, keys and values of y, which lies at `residual`, with those of their adapters."""
        at = self.specs
        of = (("w_q", at.w_q, at.query), ("w_k", at.w_k, at.key), ("w_v", at.w_v, at.key))
        return [
            adapted(self, name, f"attention.{name}", x, y, residual, weight, result)
            for x, (name, weight, result) in zip(products, of)
        ]

    def adapted_out(self, added: jax.Array, mixed: jax.Array, residual: Spec) -> jax.Array:
        """The output projection of what attention found, at `residual`, with that of its adapter."""
        return adapted(self, "w_o", "attention.w_o", added, mixed, self.specs.query, self.specs.w_o, residual)

    def weights_in(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The query, key and value projections in the compute dtype, or int8."""
        return tuple(matrix(w, self.dtype) for w in (self.w_q, self.w_k, self.w_v))

    def weight_out(self) -> jax.Array:
        """The output projection in the compute dtype, or int8."""
        return matrix(self.w_o, self.dtype)


def rotate(x: jax.Array, config: ModelConfig, angles: tuple[jax.Array, jax.Array] | None = None) -> jax.Array:
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
    """Turns per position of every pair, [R/2] float64."""
    size, scaling = config.rotary, config.rope_scaling
    turns = config.rope_base ** (-np.arange(0, size, 2) / size) / (2 * np.pi)
    if scaling is None:
        return turns
    # the share of a frequency that stays: none below low_frequency turns of the original length, all above high
    low, high = scaling.low_frequency, scaling.high_frequency
    kept = np.clip((turns * scaling.original_length - low) / (high - low), 0.0, 1.0)
    return turns * (kept + (1.0 - kept) / scaling.factor)


def _cos_sin(positions: np.ndarray, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of the angles of positions [L] that are known, [1, L, 1, R/2]."""
    angles = (2 * np.pi * positions[:, None] * turns)[None, :, None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def angles_at(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angles by which `rotate` turns positions [B, L], each below `LONGEST`: [B, L, 1, R/2].

    They are the same in every layer. A float32 angle of a hundred thousand radians has lost two digits after the point.
    Here turns are integers, of 2^-44, whose products with a position wrap around at whole turns by themselves: the
    angle is exact to 2^-24 turns.
    """
    fixed = np.round(_turns(config) * 2**44).astype(np.int64)
    high, low = (fixed >> 12).astype(np.uint32), (fixed & 0xFFF).astype(np.uint32)
    at = positions.astype(jnp.uint32)[..., None, None]
    part = at * high[None, None, None] + ((at * low[None, None, None]) >> 12)
    angles = jax.lax.bitcast_convert_type(part, jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
    return jnp.cos(angles), jnp.sin(angles)
