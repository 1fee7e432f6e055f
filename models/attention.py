"""Multi-head, grouped-query and multiquery attention with rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.layouts.section import SectionSpecs
from gspmd.layouts.vias import heads_in
from gspmd.ops._attention import attention
from gspmd.ops._norm import rms_norm

from .config import ModelConfig


class Attention(nnx.Module):
    """Causal self-attention on the residual stream.

    The parallel block calls `weights_in`, `core` and `weight_out` itself, to share collectives with its feed-forward.
    """

    def __init__(self, config: ModelConfig, layout: Any, weights: Mapping[str, jax.Array], dtype: Any):
        self.config, self.specs, self.dtype = config, SectionSpecs(layout.section("attention")), dtype
        self.norm = nnx.Param(weights["norm"]) if "norm" in weights else None
        self.w_q, self.w_k, self.w_v = (nnx.Param(weights[name]) for name in ("w_q", "w_k", "w_v"))
        self.w_o = nnx.Param(weights["w_o"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output [B, L, E] that is added to the residual stream, placed as `attention.residual`."""
        at = self.specs
        return self.attend(
            rms_norm(x, self.norm[...], at.residual, at.norm, epsilon=self.config.norm_epsilon), at.residual
        )

    def attend(self, y: jax.Array, residual: Spec) -> jax.Array:
        """Attention of a normed input [B, L, E]; input and output are placed as `residual`."""
        at = self.specs
        into = Equation.product(residual, (at.w_q, at.w_k, at.w_v), (at.query, at.key, at.key))
        q, k, v = gspmd.einsum(into, y, self.weights_in(), via=heads_in(at))
        out = Equation.product(at.query, at.w_o, residual)
        return gspmd.einsum(out, self.core(q, k, v), self.weight_out(), via=at.out_via)

    def core(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Softmax attention of rotated queries [B, L, H, D] and keys [B, L, K, D], placed as the queries."""
        q, k = rotate(q, self.config.rope_base), rotate(k, self.config.rope_base)
        return attention(q, k, v, self.specs.query, self.specs.key, causal=True)

    def weights_in(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The query, key and value projections in the compute dtype."""
        return tuple(w[...].astype(self.dtype) for w in (self.w_q, self.w_k, self.w_v))

    def weight_out(self) -> jax.Array:
        """The output projection in the compute dtype."""
        return self.w_o[...].astype(self.dtype)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Apply rotary position embedding: rotate each pair (x[i], x[i + D/2]) by position · base^(-2i/D).

    Elementwise over batch and heads, which may be sharded; length and head size must not be.

    Args:
        x: [B, L, H, D], D even.
        base: base of the geometric sequence of wavelengths.

    Returns:
        [B, L, H, D] in x's dtype; computed in float32.

    Example:
        >>> [f"{value:.3f}" for value in rotate(jnp.ones((1, 2, 1, 2)), base=10000.0)[0, 1, 0]]
        ['-0.301', '1.382']

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), section 3.2.2.
    Differs: pairs take one element from each half of the head, not neighbours: a permutation of the head's elements.
    """
    cos, sin = _cos_sin(x.shape[1], x.shape[3], base)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _cos_sin(length: int, size: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(length)[:, None] * base ** (-np.arange(0, size, 2) / size)
    angles = angles[None, :, None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
