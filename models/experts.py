"""The mixture-of-experts feed-forward layer, which regroups the residual stream into groups of tokens, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.layouts import Layout
from gspmd.layouts.section import Section
from gspmd.moe import expert_layer
from gspmd.ops._attention.zigzag import in_order, ring_size, zigzag

from .config import ModelConfig
from .context import Context
from .feed_forward import FeedForward
from .layer import Layer
from .placement import moved
from .vectors import masked, padded_dimensions

MATRICES = ("w_in", "w_gate", "w_out")
VECTORS = (
    "router", "router_noise", "router_bias", "choice_bias", "b_in", "b_gate", "b_out", "s_in", "s_gate", "s_out",
)  # fmt: skip


class Experts(Layer):
    """A feed-forward layer of X experts, of which every token uses a few; see `gspmd.moe`."""

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, Any], dtype: Any):
        assert config.moe is not None
        super().__init__(config, layout.section("ffn"), weights, dtype)
        self.moe, self.settings, self.key = layout.section("moe"), config.moe, layout.spec("attention.key")
        self.padded = padded_dimensions(config, layout, "moe.w_in").get("F")
        shared = weights.get("shared")
        self.shared = None if shared is None else FeedForward(config, layout, shared, dtype, shared_section(layout))

    def __call__(
        self, x: jax.Array, context: Context, *, key: jax.Array | None, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the output [B, L, E], to be added to the residual stream, and metrics of the experts' load."""
        added, figures = self.mix(self.normed_before("residual", x), context, key=key, train=train)
        return self.normed_after("residual", added), figures

    def mix(
        self, y: jax.Array, context: Context, *, key: jax.Array | None, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the experts' output for a normed input [B, L, E]; both arrays are sharded as the line `ffn.residual`.

        Args:
            y: the normed input.
            context: tells whether the stack is causal, and which tokens are padding. Padding gets no slot of an expert.
            key: the random key of the router, for training.
            train: whether to use the router's random draws, and its capacity for training.

        Returns:
            The output, and the metrics of `expert_layer`, including its loss as `aux_loss`.
        """
        residual, groups = self.at.spec("residual"), self.moe.spec("groups")
        sequences = groups.rename({"G": "B"})
        count, shape = self.settings.groups or y.shape[0], y.shape
        into = (count, y.shape[0] * y.shape[1] // count)
        # Experts' slots are assigned in text order. In an encoder, whose attention is not causal, tokens are in this
        # order already.
        ring = ring_size(self.key) if context.causal else 1
        tokens, mask = in_order(moved(y, residual, sequences), ring), context.real
        answers, loss, stats = expert_layer(
            regroup(tokens, (*into, y.shape[2]), groups),
            self.weights(),
            self.moe,
            self.settings,
            key=key,
            train=train,
            mask=None if mask is None else regroup(mask, into, groups.without("E")),
            activation=self.config.activation,
        )
        answers = moved(zigzag(regroup(answers, shape, sequences), ring), sequences, residual)
        return answers if self.shared is None else answers + self.of_shared(y), {"aux_loss": loss, **stats}

    def of_shared(self, y: jax.Array) -> jax.Array:
        """Return the output of the shared experts, multiplied by sigmoid(y · shared_mix) if `shared_mix` exists."""
        assert self.shared is not None
        answers = self.shared.answer(y)
        if (mix := self.parameter("shared_mix")) is None:
            return answers
        residual = self.at.spec("residual")
        rows, specs = residual.without("E"), (residual, self.moe.spec("shared_mix"))
        weights = mix[...].astype(y.dtype)
        into = Equation.product(*specs, rows)
        scores = gspmd.einsum(into, y, weights, preferred_element_type=jnp.float32)  # [B, L, E], [E] -> [B, L]
        # An equation, because the gradient of a broadcast product would have a sum over E that no plan counts.
        by = jax.nn.sigmoid(scores).astype(answers.dtype)
        return gspmd.einsum(Equation.product(residual, rows, residual), answers, by)

    def weights(self) -> dict[str, jax.Array]:
        """Return the experts' matrices in the compute dtype, or as int8 with scales, and vectors in float32."""
        held = [name for name in MATRICES + VECTORS if self.parameter(name) is not None]
        found = {name: self.matrix(name) if name in MATRICES else self.vector(name) for name in held}
        # Rows of 0, where F is padding, add nothing to the output or to the hidden layer's gradient.
        found["w_out"] = masked(found["w_out"], self.padded, "F", self.moe.spec("w_out"))
        return found


def shared_section(layout: Layout) -> Section:
    """Return the section of the shared experts, with its lines under the names that a feed-forward layer uses.

    Source: Dai et al. 2024, DeepSeekMoE (arXiv 2401.06066), §3.2.
    Differs: the shared experts are one layer of their total width. Its output equals the sum of the outputs of separate
        experts.
    """
    names = {"w_in": "in", "w_gate": "gate", "w_out": "out", "hidden": "hidden", "b_in": "bias", "b_gate": "bias"}
    return layout.section("ffn").renamed({name: f"moe.shared_{key}" for name, key in names.items()})


def regroup(x: jax.Array, shape: tuple[int, ...], spec: Spec) -> jax.Array:
    """Reshape [B, L, ...] into groups [G, tokens, ...] or back, while tokens stay on their devices.

    The leading dimension has the same mesh axes before and after, so that each device reshapes its own shard.

    Raises:
        ValueError: the tokens cannot be divided into the groups of `shape`.
    """
    if math.prod(shape) != x.size:
        fact = f"{x.shape[0]} sequences of {x.shape[1]} tokens do not make {shape[0]} groups of equal size"
        raise ValueError(f"{fact}; moe.groups must divide the number of tokens")
    if x.shape == shape:
        return x
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.lax.reshape(x, shape, out_sharding=spec.partition_spec() if explicit else None)
