"""Shared prompts: each prompt is read only once, and its part of the cache is copied to the rows of all its texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate import Spec
from gspmd.layouts import Layout
from gspmd.lowerings.program import context, run

from .cache import CROSS, SELF, Cache, cache_spec, stacked


@dataclass(frozen=True)
class Shares:
    """The prompt that each row of the prefill reads, and the prefill row that each row of the decode loop continues.

    Attributes:
        prompts: for each row of the prefill, the index of its prompt, or None if it has no prompt.
        sources: [R] int32, for each row of the decode loop, the index of the prefill row that it copies. The index is
            counted among the prefill rows of the same device. None if every row has a row of the prefill to itself, so
            that nothing is copied.
    """

    prompts: tuple[int | None, ...]
    sources: np.ndarray | None


def most_prompts(owners: Sequence[int | None], shards: int) -> int:
    """Return the largest number of prompts in the rows of one shard; rows without a text count as one prompt.

    >>> most_prompts([0, 0, 0, 1, 1, 1], shards=2), most_prompts([0, 0, 0, 1, 1, 1], shards=3)
    (1, 2)
    """
    return max(len(set(part)) for part in _parts(owners, shards))


def shares(owners: Sequence[int | None], shards: int, each: int) -> Shares:
    """Choose the rows of a prefill so that every text's prompt is on the text's device, and no row is sent.

    Args:
        owners: for each row of the decode loop, the index of the prompt of its text, or None if it has no text.
        shards: number of shards of the cache's batch, which divides the rows.
        each: number of rows of the prefill in each shard, at least `most_prompts`.

    Example:
        >>> shares([0, 0, 0, 1, 1, 1], shards=2, each=1)
        Shares(prompts=(0, 1), sources=array([0, 0, 0, 0, 0, 0], dtype=int32))
    """
    rows: list[int | None] = []
    sources: list[int] = []
    for part in _parts(owners, shards):
        prompts = list(dict.fromkeys(part))
        rows += [*prompts, *[None] * (each - len(prompts))]
        sources += map(prompts.index, part)
    return Shares(tuple(rows), np.array(sources, np.int32))


def _parts(owners: Sequence[int | None], shards: int) -> list[Sequence[int | None]]:
    size = len(owners) // shards
    return [owners[start : start + size] for start in range(0, len(owners), size)]


def copy_rows(
    cache: Cache,
    sources: jax.Array,
    lengths: jax.Array,
    source_lengths: jax.Array | None = None,
    totals: jax.Array | None = None,
    *,
    layout: Layout,
) -> Cache:
    """Return a cache with copies of rows of `cache`; each device copies only rows of its own, so nothing is sent.

    Args:
        cache: a cache with P rows.
        sources: [R] int32, for each new row the index of the row to copy, counted among the rows of the same device;
            sharded like B of the cache.
        lengths: [R] int32, the lengths of the new rows.
        source_lengths: [R] int32, the lengths of the new rows' sources, if the model has an encoder.
        totals: [R] int32, the `Cache.totals` of the new rows, if the cache has totals.
        layout: the layout that has the spec of the cache.
    """
    source = None
    if cache.source is not None:
        assert source_lengths is not None, "a cache with sources needs source_lengths"
        source = Cache(*on_rows(cache.source, sources, layout, "copy", _taken, CROSS), source_lengths)
    return Cache(*on_rows(cache, sources, layout, "copy", _taken), lengths, source, totals)


def on_rows(
    cache: Cache, sources: jax.Array, layout: Layout, name: str, body: Callable[..., jax.Array], line: str = SELF
) -> tuple[Any, Any, Any, Any]:
    """Return `Cache.layers` with new rows, which each device computes from its own rows.

    Args:
        cache: the cache whose rows are read.
        sources: [R] int32, as in `copy_rows`.
        layout: the layout that has the spec of the cache.
        name: a verb that says what `body` does. The plan shows this verb.
        body: a function from the local piece of an array [N, B, ...] and the local piece of the sources to a new piece.
            It must be the same object in every call, so that programs are reused.
        line: the layout's line of the cache.
    """
    held = cache_spec(layout, line, latent=cache.values is None)
    rows = Spec(("B",), (held.axes_of("B"),))

    def made(array: jax.Array) -> jax.Array:
        spec = stacked(held if array.ndim == 5 else held.without("D"))
        return run(context(), f"{name} rows of {spec}", (), body, (spec, rows), spec, array, sources)

    keys, values, key_scales, value_scales = (each and tuple(map(made, each)) for each in cache.layers)
    return keys, values, key_scales, value_scales


def _taken(array: jax.Array, sources: jax.Array) -> jax.Array:
    return jnp.take(array, sources, axis=1)
