"""The feed-forward layer: dense, with or without a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation, Via
from gspmd.layouts.section import SectionSpecs
from gspmd.moe.experts.activation import PLAIN

from .config import ModelConfig
from .finetuning.adapters import adapted, hold_adapters
from .vectors import biased, masked, matrix, norm, optional, padded_dimensions, scaled


class FeedForward(nnx.Module):
    """W_out · φ(W_in x), or W_out · (φ(W_gate x) ⊙ W_in x), each product plus its bias where there are biases.

    Source: Shazeer 2020, GLU Variants Improve Transformer (arXiv 2002.05202), equation 6, for the gate.
    """

    def __init__(
        self, config: ModelConfig, layout: Any, weights: Mapping[str, jax.Array], dtype: Any, specs: Any = None
    ):
        self.config, self.specs, self.dtype = config, SectionSpecs(specs or layout.section("ffn")), dtype
        self.norm, self.norm_bias = optional(weights, "norm"), optional(weights, "norm_bias")
        self.w_in, self.w_gate = nnx.Param(weights["w_in"]), optional(weights, "w_gate")
        self.s_in, self.s_gate, self.s_out = (optional(weights, name) for name in ("s_in", "s_gate", "s_out"))
        self.b_in, self.b_gate = optional(weights, "b_in"), optional(weights, "b_gate")
        self.w_out, self.b_out = nnx.Param(weights["w_out"]), optional(weights, "b_out")
        self.padded = padded_dimensions(config, layout, shared=specs is not None).get("F")
        self.keys = "ffn.w_" if specs is None else "moe.shared_"
        hold_adapters(self, weights)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output [B, L, E] that is added to the residual stream, placed as `ffn.residual`."""
        ffn = self.specs
        y = norm(self.config, x, self.norm, self.norm_bias, ffn.residual, ffn.norm, ffn.norm_bias)
        return self.answer(y)

    def answer(self, y: jax.Array) -> jax.Array:
        """The output for a normed input, both placed as `ffn.residual`."""
        ffn = self.specs
        into = Equation.product(ffn.residual, self.specs_in(), self.specs_hidden())
        products = gspmd.einsum(into, y, self.weights_in(), via=self.in_via())
        active = self.activate(*self.adapted_in(products, y))
        out = Equation.product(ffn.hidden, ffn.w_out, ffn.residual)
        added = self.adapted_out(gspmd.einsum(out, active, self.weight_out(), via=ffn.out_via), active)
        return biased(scaled(added, self.s_out, ffn.residual, ffn.b_out), self.b_out, ffn.residual, ffn.b_out)

    def adapted_in(self, products: Sequence[jax.Array], y: jax.Array) -> list[jax.Array]:
        """Products of a normed input with the input weights, with those of their adapters."""
        return [
            adapted(self, f"w_{name}", self.keys + name, x, y, self.specs.residual, weight, self.specs.hidden)
            for x, name, weight in zip(products, ("in", "gate"), self.specs_in())
        ]

    def adapted_out(self, added: jax.Array, active: jax.Array) -> jax.Array:
        """The product of the hidden layer and the output weight, with that of its adapter."""
        ffn = self.specs
        return adapted(self, "w_out", self.keys + "out", added, active, ffn.hidden, ffn.w_out, ffn.residual)

    def activate(self, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """The activation function of the hidden layer, scaled and biased, elementwise; 0 where F is padding."""
        ffn = self.specs
        value, gate = checkpoint_name((value, gate), "ffn.hidden")
        value = biased(scaled(value, self.s_in, ffn.hidden, ffn.b_in), self.b_in, ffn.hidden, ffn.b_in)
        hidden = [value]
        if gate is not None:
            gate = scaled(gate, self.s_gate, ffn.hidden, ffn.b_gate)
            hidden.insert(0, biased(gate, self.b_gate, ffn.hidden, ffn.b_gate))
        active = masked(PLAIN[self.config.activation](*hidden), self.padded, "F", ffn.hidden)
        return checkpoint_name(active, "ffn.active")

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
        """The input weights in the compute dtype, or int8."""
        return tuple(matrix(w, self.dtype) for w in (self.w_in, self.w_gate) if w is not None)

    def weight_out(self) -> jax.Array:
        """The output weight in the compute dtype, or int8."""
        return matrix(self.w_out, self.dtype)
