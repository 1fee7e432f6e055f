"""The mixture-of-experts feed-forward layer, between the residual stream and groups of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.layouts.section import SectionSpecs
from gspmd.moe import expert_layer
from gspmd.ops._attention.zigzag import in_order, ring_size, zigzag

from .config import ModelConfig
from .feed_forward import FeedForward
from .vectors import masked, matrix, norm, optional, padded_dimensions


class Experts(nnx.Module):
    """A feed-forward layer of X experts, of which every token uses a few; see `gspmd.moe`."""

    def __init__(self, config: ModelConfig, layout: Any, weights: Mapping[str, jax.Array], dtype: Any):
        self.config, self.dtype, self.key = config, dtype, layout.spec("attention.key")
        self.specs, self.moe = SectionSpecs(layout.section("ffn")), SectionSpecs(layout.section("moe"))
        self.norm, self.norm_bias = optional(weights, "norm"), optional(weights, "norm_bias")
        self.router = nnx.Param(weights["router"])
        self.router_noise = nnx.Param(weights["router_noise"]) if config.moe.noisy else None
        self.w_in = nnx.Param(weights["w_in"])
        self.w_gate = nnx.Param(weights["w_gate"]) if config.gated else None
        self.w_out, self.padded = nnx.Param(weights["w_out"]), padded_dimensions(config, layout).get("F")
        self.s_in, self.s_gate, self.s_out = (optional(weights, name) for name in ("s_in", "s_gate", "s_out"))
        shared = weights.get("shared")
        self.shared = None if shared is None else FeedForward(config, layout, shared, dtype, shared_specs(layout))

    def __call__(
        self, x: jax.Array, *, key: jax.Array | None, train: bool, mask: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The output [B, L, E] that is added to the residual stream, and the figures of the experts' load."""
        ffn = self.specs
        y = norm(self.config, x, self.norm, self.norm_bias, ffn.residual, ffn.norm, ffn.norm_bias)
        return self.mix(y, key=key, train=train, mask=mask)

    def mix(
        self, y: jax.Array, *, key: jax.Array | None, train: bool, mask: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The experts' output for a normed input [B, L, E], both placed as `ffn.residual`.

        Args:
            y: the input.
            key: random key of the router, in training.
            train: whether to use the router's random draws and capacity of training.
            mask: [B, L] bool, False for padding, placed as `tokens_spec`; None when every token is real.

        Returns:
            The output, and the figures of `expert_layer`, with its loss as `aux_loss`.
        """
        residual, groups = self.specs.residual, self.moe.groups
        sequences = groups.rename({"G": "B"})
        count, shape = self.config.moe.groups or y.shape[0], y.shape
        into = (count, y.shape[0] * y.shape[1] // count)
        tokens = in_order(moved(y, residual, sequences), ring_size(self.key))  # by which places in experts are given
        answers, loss, stats = expert_layer(
            regroup(tokens, (*into, y.shape[2]), groups),
            self.weights(),
            self.moe,
            self.config.moe,
            key=key,
            train=train,
            mask=None if mask is None else regroup(mask, into, groups.without("E")),
            activation=self.config.activation,
        )
        answers = moved(zigzag(regroup(answers, shape, sequences), ring_size(self.key)), sequences, residual)
        return answers if self.shared is None else answers + self.shared.answer(y), {"aux_loss": loss, **stats}

    def weights(self) -> dict[str, jax.Array]:
        """The experts' weights in the compute dtype, or int8 and their scales; and the router's in float32."""
        vectors = {"router": self.router, "router_noise": self.router_noise}
        vectors |= {"s_in": self.s_in, "s_gate": self.s_gate, "s_out": self.s_out}
        named = {"w_in": self.w_in, "w_gate": self.w_gate, "w_out": self.w_out}
        cast = {name: matrix(w, self.dtype) for name, w in named.items() if w is not None}
        # rows of 0 take no part of the hidden layer, and send no gradient into it
        cast["w_out"] = masked(cast["w_out"], self.padded, "F", self.moe.w_out)
        return {name: w[...] for name, w in vectors.items() if w is not None} | cast


@dataclass(frozen=True)
class SharedSpecs:
    """The specs of the shared experts, as those of a feed-forward layer."""

    residual: str
    w_in: str
    w_gate: str
    hidden: str
    w_out: str
    in_via: str | None
    out_via: str | None
    b_in: str
    b_gate: str
    b_out: str


def shared_specs(layout: Any) -> SharedSpecs:
    """Return the specs of the shared experts in a layout.

    Source: Dai et al. 2024, DeepSeekMoE (arXiv 2401.06066), §3.2.
    Differs: the shared experts are one layer of their total width, which equals the sum of their outputs.
    """
    moe = layout.section("moe")
    named = {name: getattr(moe, f"shared_{name.removeprefix('w_')}") for name in ("w_in", "w_gate", "w_out", "hidden")}
    return SharedSpecs(
        residual=layout["ffn.residual"],
        in_via=moe.shared_in_via,
        out_via=moe.shared_out_via,
        b_in=moe.shared_scale,
        b_gate=moe.shared_scale,
        b_out=layout["ffn.b_out"],
        **named,
    )


def tokens_spec(layout: Any) -> Spec:
    """The spec of per-token arrays [B, L] of the experts: that of their groups, with B for G."""
    return layout.spec("moe.groups").rename({"G": "B"}).without("E")


def regroup(x: jax.Array, shape: tuple[int, ...], spec: Spec) -> jax.Array:
    """Reshape [B, L, ...] into groups [G, tokens, ...], or back; tokens stay on their device.

    The leading dimension has the same mesh axes before and after, so each device reshapes its own shard.

    Raises:
        ValueError: if the tokens do not make that many groups.
    """
    if math.prod(shape) != x.size:
        raise ValueError(f"{x.shape[0]} sequences of {x.shape[1]} tokens do not make {shape[0]} groups of one size")
    if x.shape == shape:
        return x
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.lax.reshape(x, shape, out_sharding=spec.partition_spec() if explicit else None)


def moved(x: jax.Array, before: Spec, after: Spec) -> jax.Array:
    """Reshard an array from one spec to another, if they differ."""
    return x if before == after else gspmd.reshard(x, Equation.move(before, after))
