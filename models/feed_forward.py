"""The feed-forward layer: dense, with or without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation, Via
from gspmd.layouts.section import SectionSpecs
from gspmd.moe.experts.activation import PLAIN
from gspmd.ops._norm import rms_norm

from .config import ModelConfig


class FeedForward(nnx.Module):
    """W_out · φ(W_in x), or W_out · (silu(W_gate x) ⊙ W_in x).

    Source: Shazeer 2020, GLU Variants Improve Transformer (arXiv 2002.05202), equation 6, for the gate.
    """

    def __init__(
        self, config: ModelConfig, layout: Any, weights: Mapping[str, jax.Array], dtype: Any, specs: Any = None
    ):
        self.config, self.specs, self.dtype = config, SectionSpecs(specs or layout.section("ffn")), dtype
        self.norm = nnx.Param(weights["norm"]) if "norm" in weights else None
        self.w_in = nnx.Param(weights["w_in"])
        self.w_gate = nnx.Param(weights["w_gate"]) if config.gated else None
        self.w_out = nnx.Param(weights["w_out"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output [B, L, E] that is added to the residual stream, placed as `ffn.residual`."""
        ffn = self.specs
        return self.answer(rms_norm(x, self.norm[...], ffn.residual, ffn.norm, epsilon=self.config.norm_epsilon))

    def answer(self, y: jax.Array) -> jax.Array:
        """The output for a normed input, both placed as `ffn.residual`."""
        ffn = self.specs
        into = Equation.product(ffn.residual, self.specs_in(), self.specs_hidden())
        hidden = gspmd.einsum(into, y, self.weights_in(), via=self.in_via())
        out = Equation.product(ffn.hidden, ffn.w_out, ffn.residual)
        return gspmd.einsum(out, self.activate(*hidden), self.weight_out(), via=ffn.out_via)

    def activate(self, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """The activation function of the hidden layer, elementwise."""
        return PLAIN[self.config.activation](*(h for h in (gate, value) if h is not None))

    def specs_in(self) -> tuple[Spec, ...]:
        """Specs of the input weights, the gate's last."""
        return (self.specs.w_in, self.specs.w_gate)[: 1 + self.config.gated]

    def specs_hidden(self) -> tuple[Spec, ...]:
        """Specs of the products with the input weights."""
        return (self.specs.hidden,) * (1 + self.config.gated)

    def in_via(self) -> Via | None:
        """The via of the residual and the group of input weights; None leaves it to the planner."""
        if self.specs.in_via is None:
            return None
        residual, weight = self.specs.in_via.specs
        return Via.of(residual, (weight,) * (1 + self.config.gated))

    def weights_in(self) -> tuple[jax.Array, ...]:
        """The input weights in the compute dtype."""
        return tuple(w[...].astype(self.dtype) for w in (self.w_in, self.w_gate) if w is not None)

    def weight_out(self) -> jax.Array:
        """The output weight in the compute dtype."""
        return self.w_out[...].astype(self.dtype)
