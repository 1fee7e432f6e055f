"""The training objective: mean cross-entropy of the next token plus the routers' auxiliary losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.ops._attention.zigzag import ring_size, zigzag
from gspmd.ops._cross_entropy import cross_entropy

from .blocks import part
from .transformer import Transformer

SCALAR = Spec((), ())
"""The spec of a scalar."""


def loss(
    model: Transformer, tokens: jax.Array, *, key: jax.Array | None = None, train: bool = True
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the mean next-token cross-entropy in nats, plus the expert layers' auxiliary losses in training.

    Args:
        model: a placed model.
        tokens: [B, L+1] integers, placed as `batch_spec`; every token but the first is predicted.
        key: random key of the routers.
        train: whether to add auxiliary losses and use the routers' random draws.

    Returns:
        A float32 scalar, and its parts: `cross_entropy`; with experts also `aux_loss`, the sum over their layers, and
        of each layer `load` [expert layers, X], `dropped`, `entropy` and `confidence`, see `gspmd.moe.expert_layer`.
    """
    inputs, labels = split_tokens(tokens, model.layout)
    x, figures = model.hidden(inputs, key=key, train=train)
    logits = model.logits(x)
    with part(model.layout, "output"):
        each = cross_entropy(logits, labels, model.layout["output.logits"])
        entropy = gspmd.reshard(each, Equation.move(label_spec(model.layout), SCALAR)) / each.size
    aux = {"cross_entropy": entropy, **_summary(figures)}
    return (entropy + aux["aux_loss"] if train and figures else entropy), aux


def batch_spec(layout: Any) -> Spec:
    """The spec of a batch of tokens [B, L+1]: `embedding.tokens` with L unsharded, since few meshes divide L+1."""
    return layout.spec("embedding.tokens").with_axes("L", ())


def label_spec(layout: Any) -> Spec:
    """The spec of labels [B, L]: that of the logits without V."""
    return layout.spec("output.logits").without("V")


def split_tokens(tokens: jax.Array, layout: Any) -> tuple[jax.Array, jax.Array]:
    """Split [B, L+1] into inputs and labels, each [B, L], placed and ordered as `Transformer.hidden` takes them."""
    whole = batch_spec(layout)
    devices = ring_size(layout.spec("attention.key"))
    inputs, labels = zigzag(tokens[:, :-1], devices), zigzag(tokens[:, 1:], devices)
    inputs = gspmd.reshard(inputs, Equation.move(whole, layout.spec("embedding.tokens")))
    return inputs, gspmd.reshard(labels, Equation.move(whole, label_spec(layout)))


def _summary(figures: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return figures | {"aux_loss": jnp.sum(figures["aux_loss"])} if figures else {}
