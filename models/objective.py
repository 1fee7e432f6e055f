"""What training minimises: the mean cross-entropy of the next token, and what the routers add."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.ops._cross_entropy import cross_entropy
from models.blocks import part
from models.transformer import Transformer

SCALAR = Spec((), ())


def loss(
    model: Transformer, tokens: jax.Array, *, key: jax.Array | None = None, train: bool = True
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean next-token cross-entropy in nats, plus the expert layers' auxiliary losses in training.

    Args:
        model: a placed model.
        tokens: [B, L+1] integers, placed as `batch_spec`; every token but the first is predicted.
        key: randomness of the routers.
        train: whether the auxiliary losses count and the routers draw.

    Returns:
        A float32 scalar, and its parts: `cross_entropy`; with experts also `aux_loss`, the sum over their layers, and
        of each layer `load` [expert layers, X], `dropped`, `entropy` and `confidence`, see `gspmd.moe.expert_layer`.
    """
    inputs, labels = split_tokens(tokens, model.layout)
    logits, figures = model(inputs, key=key, train=train)
    with part(model.layout, "output"):
        each = cross_entropy(logits, labels, model.layout["output.logits"])
        entropy = gspmd.reshard(each, Equation.move(label_spec(model.layout), SCALAR)) / each.size
    aux = {"cross_entropy": entropy, **_summary(figures)}
    return (entropy + aux["aux_loss"] if train and figures else entropy), aux


def batch_spec(layout: Any) -> Spec:
    """Where a batch of tokens [B, L+1] lies: as `embedding.tokens`, its length whole, since L+1 divides badly."""
    return Spec.parse(layout["embedding.tokens"]).with_axes("L", ())


def label_spec(layout: Any) -> Spec:
    """Where labels [B, L] lie: as the logits, without the vocabulary."""
    return Spec.parse(layout["output.logits"]).without("V")


def split_tokens(tokens: jax.Array, layout: Any) -> tuple[jax.Array, jax.Array]:
    """Inputs and labels, each [B, L] and where the model wants it, from [B, L+1]."""
    whole = batch_spec(layout)
    inputs = gspmd.reshard(tokens[:, :-1], Equation.move(whole, Spec.parse(layout["embedding.tokens"])))
    return inputs, gspmd.reshard(tokens[:, 1:], Equation.move(whole, label_spec(layout)))


def _summary(figures: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return figures | {"aux_loss": jnp.sum(figures["aux_loss"])} if figures else {}
