"""Prompts that several texts begin with: read once, and their part of the cache copied to every text's row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate import Spec
from gspmd.layouts import Layout
from gspmd.lowerings.program import context, run

from .cache import Cache, cache_spec, stacked


@dataclass(frozen=True)
class Shares:
    """The prompt that each row reads, and the one of the rows read that each row of text goes on from.

    Attributes:
        prompts: for each row of the prefill, the number of its prompt; `None` for a row without one.
        sources: [R] int32, for each row of text, the row of the prefill that it copies, counted on its own device;
            None where the rows of the prefill are those of the texts, and nothing is copied.
    """

    prompts: tuple[int | None, ...]
    sources: np.ndarray | None


def most_prompts(owners: Sequence[int | None], shards: int) -> int:
    """The most prompts that the rows of one shard begin with, rows without a text counted as one more.

    >>> most_prompts([0, 0, 0, 1, 1, 1], shards=2), most_prompts([0, 0, 0, 1, 1, 1], shards=3)
    (1, 2)
    """
    return max(len(set(part)) for part in _parts(owners, shards))


def shares(owners: Sequence[int | None], shards: int, each: int) -> Shares:
    """Choose the rows of a prefill so that every text finds its prompt on its own device, and no row has to be sent.

    Args:
        owners: for each row of text, the number of its prompt; None for a row without a text.
        shards: the number of parts that the batch of the cache is divided in, which divides the rows.
        each: rows of the prefill in each of these parts, at least `most_prompts`.

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


def copy_rows(cache: Cache, sources: jax.Array, lengths: jax.Array, layout: Layout) -> Cache:
    """Return a cache whose rows are copies of those of another, each device copying its own: nothing is sent.

    Args:
        cache: of P rows.
        sources: [R] int32, for each new row the row that it copies, counted on its device; placed as B of the cache.
        lengths: [R] int32, of the new rows.
        layout: which says where the cache lies.
    """
    held, rows = cache_spec(layout), Spec(("B",), (cache_spec(layout).axes_of("B"),))

    def copied(array: jax.Array) -> jax.Array:
        spec = stacked(held if array.ndim == 5 else held.without("D"))
        return run(context(), f"copy rows of {spec}", (), _taken, (spec, rows), spec, array, sources)

    keys, values, key_scales, value_scales = (each and tuple(map(copied, each)) for each in cache.layers)
    return Cache(keys, values, key_scales, value_scales, lengths)


def _taken(array: jax.Array, sources: jax.Array) -> jax.Array:
    return jnp.take(array, sources, axis=1)
