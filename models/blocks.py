"""Transformer blocks: serial (attention, then feed-forward) and parallel (both on one input)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import gspmd
from gspmd.annotate.equation import Equation, Via
from gspmd.layouts.section import SectionSpecs
from gspmd.layouts.vias import heads_in

from .attention import Attention, Past
from .config import ModelConfig
from .experts import Experts, moved
from .feed_forward import FeedForward
from .vectors import biased, norm, optional, scaled


class Block(nnx.Module):
    """x + Attention(norm x), then x + FeedForward(norm x)."""

    def __init__(self, config: ModelConfig, layout: Any, weights: Mapping[str, Any], dtype: Any):
        self.residuals = (layout.spec("attention.residual"), layout.spec("ffn.residual"))
        self.attention = Attention(config, layout, weights["attention"], dtype)
        _feed_forward(self, config, layout, weights, dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        key: jax.Array | None,
        train: bool,
        mask: jax.Array | None = None,
        past: Past | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The residual stream after the block, and the figures of its experts, if it has any."""
        attention, ffn = self.residuals
        with part(self.layout, "attention"):
            x = x + self.attention(x, past)
        x = checkpoint_name(moved(x, attention, ffn), "ffn.residual")
        with part(self.layout, "ffn" if self.moe is None else "moe"):
            y, figures = (self.ffn(x), {}) if self.moe is None else self.moe(x, key=key, train=train, mask=mask)
        return moved(x + y, ffn, attention), figures


class ParallelBlock(nnx.Module):
    """x + Attention(norm x) + FeedForward(norm x): one norm, one gather of the input, one reduction of the output.

    Source: Chowdhery et al. 2022, PaLM (arXiv 2204.02311), section 2; Pope et al. 2022 (arXiv 2211.05102), section 3.4.
    Differs: with experts, attention and experts reduce their outputs separately.
    """

    def __init__(self, config: ModelConfig, layout: Any, weights: Mapping[str, Any], dtype: Any):
        self.config = config
        self.norm, self.norm_bias = nnx.Param(weights["norm"]), optional(weights, "norm_bias")
        self.attention = Attention(config, layout, weights["attention"], dtype)
        _feed_forward(self, config, layout, weights, dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        key: jax.Array | None,
        train: bool,
        mask: jax.Array | None = None,
        past: Past | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The residual stream after the block, and the figures of its experts, if it has any."""
        with part(self.layout, "ffn" if self.moe is None else "moe"):
            ffn = self.specs
            y = norm(self.config, x, self.norm, self.norm_bias, ffn.residual, ffn.norm, ffn.norm_bias)
            if self.moe is None:
                return x + self.both(y, past), {}
            added, figures = self.moe.mix(y, key=key, train=train, mask=mask)
        with part(self.layout, "attention"):
            return x + self.attention.attend(y, self.specs.residual, past) + added, figures

    def both(self, y: jax.Array, past: Past | None = None) -> jax.Array:
        """Attention and feed-forward of one normed input [B, L, E], added before their partial sums are reduced."""
        at, ffn = self.attention.specs, self.specs
        weights, results = (at.w_q, at.w_k, at.w_v), (at.query, at.key, at.key)
        products = gspmd.einsum(
            Equation.product(ffn.residual, weights + self.ffn.specs_in(), results + self.ffn.specs_hidden()),
            y,
            (*self.attention.weights_in(), *self.ffn.weights_in()),
            via=_together(heads_in(at), self.ffn.in_via()),
        )
        with jax.named_scope("attention"):
            mixed = self.attention.core(*self.attention.adapted_in(products[:3], y, ffn.residual), past)
        active = self.ffn.activate(*self.ffn.adapted_in(products[3:], y))
        added = gspmd.einsum(
            Equation.sum_of([(ffn.hidden, ffn.w_out), (at.query, at.w_o)], ffn.residual),
            active,
            self.ffn.weight_out(),
            mixed,
            self.attention.weight_out(),
            via=_sum(ffn.out_via, at.out_via),
        )
        added = self.ffn.adapted_out(self.attention.adapted_out(added, mixed, ffn.residual), active)
        added = scaled(added, self.ffn.s_out, ffn.residual, self.ffn.specs.b_out)  # that of both weights
        added = biased(added, self.attention.b_o, ffn.residual, at.b_o)
        return biased(added, self.ffn.b_out, ffn.residual, self.ffn.specs.b_out)


def _feed_forward(block: Any, config: ModelConfig, layout: Any, weights: Mapping[str, Any], dtype: Any) -> None:
    block.layout, block.specs = layout, SectionSpecs(layout.section("ffn"))
    block.ffn = FeedForward(config, layout, weights["ffn"], dtype) if "ffn" in weights else None
    block.moe = Experts(config, layout, weights["moe"], dtype) if "moe" in weights else None


def _together(attention: Via | None, ffn: Via | None) -> Via | None:
    """The via of one input and the weights of both branches; None unless both pin the input to the same spec."""
    if attention is None or ffn is None:
        return None
    (left, *heads), (other, *hidden) = attention.specs, ffn.specs
    return Via.of(left, (*heads, *hidden)) if left == other else None


def _sum(ffn: Via | None, attention: Via | None) -> Via | None:
    """The via of the sum of two products; None unless the layout pins both."""
    return None if ffn is None or attention is None else Via.sum_of([ffn.specs, attention.specs])


@contextmanager
def part(layout: Any, name: str) -> Iterator[None]:
    """Run a part of the model under its named scope, and under the lowering that the layout has for it.

    Args:
        layout: a `gspmd.Layout`; its lowering for the part, if any, takes precedence over the caller's.
        name: the section of the part, `ffn`.
    """
    lowering = layout.lowering_of(name)
    with jax.named_scope(name), gspmd.lowering(lowering) if lowering else nullcontext():
        yield
