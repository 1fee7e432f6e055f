"""The feed-forward layer: dense, with or without a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from gspmd.layouts import Layout
from gspmd.layouts.section import Section
from gspmd.moe.experts.activation import PLAIN

from .config import ModelConfig
from .layer import Layer
from .vectors import masked, padded_dimensions


class FeedForward(Layer):
    """W_out · φ(W_in x), or W_out · (φ(W_gate x) ⊙ W_in x), with a bias after each product if the model has biases.

    Source: Shazeer 2020, GLU Variants Improve Transformer (arXiv 2002.05202), equation 6 for the form with a gate.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        weights: Mapping[str, jax.Array],
        dtype: Any,
        shared: Section | None = None,
    ):
        super().__init__(config, layout.section("ffn") if shared is None else shared, weights, dtype)
        self.padded = padded_dimensions(config, layout, self.at.key_of("w_in")).get("F")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the output [B, L, E], to be added to the residual stream, sharded as the line `ffn.residual`."""
        return self.normed_after("residual", self.answer(self.normed_before("residual", x)))

    def answer(self, y: jax.Array) -> jax.Array:
        """Return the output for a normed input [B, L, E]; input and output are sharded as the line `ffn.residual`."""
        if self.config.gated:  # [B, L, E] -> [B, L, F], and the same for the gate
            into, names = "residual, (w_in, w_gate) -> (hidden, hidden)", ("w_in", "w_gate")
        else:
            into, names = "residual, (w_in) -> (hidden)", ("w_in",)
        products = self.at.einsum(into, y, self.matrices(*names))
        active = self.activate(products, y)
        out = "hidden, w_out -> residual"  # [B, L, F] -> [B, L, E]
        added = self.adapted(out, self.at.einsum(out, active, self.matrix("w_out")), active)
        return self.affine("residual", added, "out")

    def activate(self, products: Sequence[jax.Array], y: jax.Array) -> jax.Array:
        """Return the hidden layer [B, L, F], from y's products with `w_in` and `w_gate`. Padding of F is 0."""
        names = ("in", "gate")[: len(products)]
        hidden = [self.adapted(f"residual, w_{name} -> hidden", x, y) for name, x in zip(names, products)]
        hidden = checkpoint_name(hidden, "ffn.hidden")
        hidden = [self.affine("hidden", x, name) for name, x in zip(names, hidden)]
        active = PLAIN[self.config.activation](*reversed(hidden))  # φ(gate) ⊙ in, or φ(in) without a gate
        return checkpoint_name(masked(active, self.padded, "F", self.at.spec("hidden")), "ffn.active")
