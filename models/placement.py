"""Specs of arrays of tokens, and moves between them."""

from __future__ import annotations

import jax

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.layouts import Layout


def moved(x: jax.Array, before: Spec, after: Spec) -> jax.Array:
    """Reshard an array from the spec `before` to the spec `after`, if the two differ."""
    return x if before == after else gspmd.reshard(x, Equation.move(before, after))


def batch_spec(layout: Layout) -> Spec:
    """Return the spec of a batch of tokens [B, L+1]: the spec of the line `embedding.tokens`, with L unsharded.

    L is unsharded because L+1 is divisible by the sizes of few mesh axes.
    """
    return layout.spec("embedding.tokens").with_axes("L", ())


def label_spec(layout: Layout) -> Spec:
    """Return the spec of labels [B, L]: the spec of the logits without V."""
    return layout.spec("output.logits").without("V")


def tokens_spec(layout: Layout) -> Spec:
    """Return the spec of the experts' per-token arrays [B, L]: the spec of groups of tokens, with G renamed to B."""
    return layout.spec("moe.groups").rename({"G": "B"}).without("E")
