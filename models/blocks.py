"""Transformer blocks: serial (attention, cross-attention, then feed-forward) and parallel (all on one input)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import gspmd
from gspmd.layouts import Layout

from .attention import Attention, CrossAttention, Past
from .config import ModelConfig
from .context import Context
from .experts import Experts
from .feed_forward import FeedForward
from .latent import LatentAttention
from .layer import Layer
from .placement import moved


class Block(nnx.Module):
    """x + Attention(norm x), then x + CrossAttention(norm x) if there is an encoder, then x + FeedForward(norm x).

    This is the block if `ModelConfig.norms` is "before". If it is "after", each part reads the residual stream without
    a norm, and the part's output is normalized before it is added. If it is "both", each part has a norm before it and
    one after it.
    """

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, Any], dtype: Any, kind: str):
        self.residuals = (layout.spec("attention.residual"), layout.spec("ffn.residual"))
        attention = Attention if config.latent is None else LatentAttention
        self.attention = attention(config, layout, weights["attention"], dtype, kind)
        self.cross = CrossAttention(config, layout, weights["cross"], dtype) if "cross" in weights else None
        self.layout, (self.ffn, self.moe) = layout, _feed_forward(config, layout, weights, dtype)

    def __call__(
        self,
        x: jax.Array,
        context: Context,
        *,
        key: jax.Array | None,
        train: bool,
        past: Past | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the residual stream after the block, and the metrics of its experts, if it has any."""
        attention, ffn = self.residuals
        with part(self.layout, "attention"):
            x = x + self.attention(x, context, past)
        if self.cross is not None:
            with part(self.layout, "cross"):
                x = x + self.cross(checkpoint_name(x, "cross.residual"), context, past)
        x = checkpoint_name(moved(x, attention, ffn), "ffn.residual")
        if self.moe is not None:
            with part(self.layout, "moe"):
                y, figures = self.moe(x, context, key=key, train=train)
        else:
            assert self.ffn is not None
            with part(self.layout, "ffn"):
                y, figures = self.ffn(x), {}
        return moved(x + y, ffn, attention), figures


class ParallelBlock(Layer):
    """x + Attention(norm x) + FeedForward(norm x): one norm, one gather of the input, one reduction of the output.

    A block with two norms computes x + Attention(norm x) + FeedForward(norm' x). It gathers the input once for each
    norm, and still reduces the output only once.

    Source: Chowdhery et al. 2022, PaLM (arXiv 2204.02311), section 2; Pope et al. 2022 (arXiv 2211.05102), section 3.4.
        For two norms: Black et al. 2022, GPT-NeoX-20B (arXiv 2204.06745), section 2.1.2.
    Differs: with experts, attention and experts reduce their outputs separately.
    """

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, Any], dtype: Any, kind: str):
        super().__init__(config, layout.section("ffn"), weights, dtype)
        self.attention = Attention(config, layout, weights["attention"], dtype, kind)
        self.layout, (self.ffn, self.moe) = layout, _feed_forward(config, layout, weights, dtype)

    def __call__(
        self,
        x: jax.Array,
        context: Context,
        *,
        key: jax.Array | None,
        train: bool,
        past: Past | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the residual stream after the block, and the metrics of its experts, if it has any."""
        with part(self.layout, "ffn" if self.moe is None else "moe"):
            y = self.normed("residual", x)
            if self.moe is None:
                assert self.ffn is not None
                z = y if self.config.parallel_norms == 1 else self.ffn.normed("residual", x)
                return x + self.both(y, z, self.ffn, context, past), {}
            z = y if self.config.parallel_norms == 1 else self.moe.normed("residual", x)
            added, figures = self.moe.mix(z, context, key=key, train=train)
        with part(self.layout, "attention"):
            return x + self.attention.attend("ffn.residual", y, context, past) + added, figures

    def both(
        self, y: jax.Array, z: jax.Array, ffn: FeedForward, context: Context, past: Past | None = None
    ) -> jax.Array:
        """Return attention of y plus feed-forward of z, both normed inputs [B, L, E]; the sum is reduced once.

        If y and z are the same array, it is multiplied by all weights in one product.
        """
        attention = self.attention
        # [B, L, E] -> [B, L, H, D], twice [B, L, K, D], and [B, L, F], twice with a gate
        names = ("w_in", "w_gate")[: 1 + self.config.gated]
        of_attention = "attention.w_q, attention.w_k, attention.w_v", "attention.query, attention.key, attention.key"
        of_ffn = ", ".join(names), ", ".join("hidden" for _ in names)
        weights = attention.matrices("w_q", "w_k", "w_v"), ffn.matrices(*names)
        if y is z:
            into = f"residual, ({of_attention[0]}, {of_ffn[0]}) -> ({of_attention[1]}, {of_ffn[1]})"
            q, k, v, *products = self.at.einsum(into, y, weights[0] + weights[1])
        else:
            q, k, v = self.at.einsum(f"residual, ({of_attention[0]}) -> ({of_attention[1]})", y, weights[0])
            products = self.at.einsum(f"residual, ({of_ffn[0]}) -> ({of_ffn[1]})", z, weights[1])
        with jax.named_scope("attention"):
            mixed = attention.core(*attention.heads("ffn.residual", (q, k, v), y), context, past)
        active = ffn.activate(products, z)
        # [B, L, F] and [B, L, H, D] -> [B, L, E]
        added = self.at.einsum(
            "hidden, w_out + attention.query, attention.w_o -> residual",
            active,
            ffn.matrix("w_out"),
            mixed,
            attention.matrix("w_o"),
        )
        added = attention.adapted("query, w_o -> ffn.residual", added, mixed)
        added = ffn.adapted("hidden, w_out -> residual", added, active)
        added = ffn.scaled("residual", added, "out")  # w_out and w_o share these scales
        return ffn.biased("residual", attention.biased("ffn.residual", added, "o"), "out")


def _feed_forward(
    config: ModelConfig, layout: Layout, weights: Mapping[str, Any], dtype: Any
) -> tuple[FeedForward | None, Experts | None]:
    """Return the dense layer and the experts of a block; each is None if the block has no weights for it."""
    ffn = FeedForward(config, layout, weights["ffn"], dtype) if "ffn" in weights else None
    return ffn, Experts(config, layout, weights["moe"], dtype) if "moe" in weights else None


@contextmanager
def part(layout: Layout, name: str) -> Iterator[None]:
    """Run a part of the model in its named scope, and under the lowering that the layout sets for the part.

    Args:
        layout: a `gspmd.Layout`. If it sets a lowering for the part, this lowering takes precedence over the caller's.
        name: the part's section in the layout, such as `ffn`.
    """
    lowering = layout.lowering_of(name)
    with jax.named_scope(name), gspmd.lowering(lowering) if lowering else nullcontext():
        yield
