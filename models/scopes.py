"""What surrounds each part of the model: its name in profiles, and the lowering that the layout asks of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax

import gspmd


@contextmanager
def part(layout: Any, name: str) -> Iterator[None]:
    """A `with` block in which a part of the model runs.

    Args:
        layout: a `gspmd.Layout`; the lowering it asks of the part, where it does, goes before the caller's default.
        name: the part's section in it, `ffn`.
    """
    lowering = layout.lowering_of(name)
    with jax.named_scope(name), gspmd.lowering(lowering) if lowering else nullcontext():
        yield
