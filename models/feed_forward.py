"""The feed-forward layer: dense, with or without a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

import gspmd
from gspmd.layouts.vias import via_specs
from gspmd.ops._norm import rms_norm
from models.config import ModelConfig


class FeedForward(nnx.Module):
    """W_out · φ(W_in x), or W_out · (silu(W_gate x) ⊙ W_in x).

    Source: Shazeer 2020, GLU Variants Improve Transformer (arXiv 2002.05202), equation 6, for the gate.
    """

    def __init__(
        self, config: ModelConfig, layout: Any, weights: Mapping[str, jax.Array], dtype: Any, specs: Any = None
    ):
        self.config, self.specs, self.dtype = config, specs or layout.section("ffn"), dtype
        self.norm = nnx.Param(weights["norm"]) if "norm" in weights else None
        self.w_in = nnx.Param(weights["w_in"])
        self.w_gate = nnx.Param(weights["w_gate"]) if config.gated else None
        self.w_out = nnx.Param(weights["w_out"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """What the layer adds to the residual stream, [B, L, E], placed as `ffn.residual`."""
        ffn = self.specs
        return self.answer(rms_norm(x, self.norm[...], ffn.residual, ffn.norm, epsilon=self.config.norm_epsilon))

    def answer(self, y: jax.Array) -> jax.Array:
        """The layer of a normed input, both placed as `ffn.residual`."""
        ffn = self.specs
        hidden = gspmd.einsum(
            f"{ffn.residual}, ({', '.join(self.specs_in())}) -> ({', '.join(self.specs_hidden())})",
            y,
            self.weights_in(),
            via=self.in_via(),
        )
        return gspmd.einsum(
            f"{ffn.hidden}, {ffn.w_out} -> {ffn.residual}", self.activate(*hidden), self.weight_out(), via=ffn.out_via
        )

    def activate(self, value: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """The nonlinearity, on tensors placed alike."""
        return ACTIVATION[self.config.activation](*(h for h in (value, gate) if h is not None))

    def specs_in(self) -> tuple[str, ...]:
        """Specs of the weights in, the gate's last."""
        return (str(self.specs.w_in), str(self.specs.w_gate))[: 1 + self.config.gated]

    def specs_hidden(self) -> tuple[str, ...]:
        """Specs of the products with them."""
        return (str(self.specs.hidden),) * (1 + self.config.gated)

    def in_via(self) -> str | None:
        """Where the residual and every weight in meet, if the layout says so."""
        if self.specs.in_via is None:
            return None
        left, right = via_specs(self.specs.in_via)
        return f"{left}, ({', '.join([str(right)] * (1 + self.config.gated))})"

    def weights_in(self) -> tuple[jax.Array, ...]:
        """The weights in, in the compute type."""
        return tuple(w[...].astype(self.dtype) for w in (self.w_in, self.w_gate) if w is not None)

    def weight_out(self) -> jax.Array:
        """The weight out, in the compute type."""
        return self.w_out[...].astype(self.dtype)


def swiglu(value: jax.Array, gate: jax.Array) -> jax.Array:
    """silu(gate) ⊙ value."""
    return jax.nn.silu(gate) * value


ACTIVATION: dict[str, Callable[..., jax.Array]] = {"swiglu": swiglu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}
