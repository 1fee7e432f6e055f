"""Prompts that several texts begin with: read once, and their part of the cache copied to every text's row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate import Spec
from gspmd.lowerings.program import context, run

from .cache import Cache, cache_spec, stacked

NO_PROMPT = -1


@dataclass(frozen=True)
class Shares:
    """Which prompt each row reads, and which of the rows read each row of text goes on from.

    Attributes:
        prompts: for each row of the prefill, the number of its prompt; `None` for a row without one.
        sources: [R] int32, for each row of text, the row of the prefill that it copies, counted on its own device;
            None where the rows of the prefill are those of the texts, and nothing is copied.
    """

    prompts: tuple[int | None, ...]
    sources: np.ndarray | None


def shares(owners: Sequence[int | None], shards: int, multiple: int) -> Shares:
    """Choose the rows of a prefill so that every text finds its prompt on its own device, and no row has to be sent.

    Args:
        owners: for each row of text, the number of its prompt; None for a row without a text.
        shards: the number of parts that the batch of the cache is divided in, which divides the rows.
        multiple: the rows of the prefill have to be a multiple of it.

    Example:
        >>> shares([0] * 8, shards=4, multiple=4)
        Shares(prompts=(0, 0, 0, 0), sources=array([0, 0, 0, 0, 0, 0, 0, 0], dtype=int32))
        >>> shares([0, 0, 1, 1], shards=2, multiple=2).prompts
        (0, 1)
    """
    here = np.split(np.array([NO_PROMPT if owner is None else owner for owner in owners]), shards)
    distinct = [list(dict.fromkeys(part.tolist())) for part in here]
    step = multiple // math.gcd(multiple, shards)
    each = -(-max(map(len, distinct)) // step) * step
    if each * shards >= len(owners):
        return Shares(tuple(owners), None)
    rows = [number for part in distinct for number in part + [NO_PROMPT] * (each - len(part))]
    sources = [part.index(number) for part, numbers in zip(distinct, here) for number in numbers.tolist()]
    return Shares(tuple(None if row == NO_PROMPT else row for row in rows), np.array(sources, np.int32))


def copy_rows(cache: Cache, sources: jax.Array, lengths: jax.Array, layout: Any) -> Cache:
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

    return Cache(*(each and tuple(map(copied, each)) for each in cache.layers), lengths=lengths)


def _taken(array: jax.Array, sources: jax.Array) -> jax.Array:
    return jnp.take(array, sources, axis=1)
