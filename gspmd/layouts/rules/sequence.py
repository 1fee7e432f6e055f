"""Rules for keys that are cut along the sequence, so that they go round a ring of devices."""

from collections.abc import Iterator
from math import prod
from typing import Any

from gspmd.annotate import Fault, Spec
from gspmd.layouts.rules.given import GivenSizes
from gspmd.layouts.rules.line import Line, over


def keys_apart(line: Line, query: Spec | None, key: Spec, serves: str) -> Iterator[Fault]:
    """Keys that are cut along the sequence go round to queries that are cut alike; in serving they are whole.

    Args:
      line: that of attention.key.
      query, key: the specs, None if there is none.
      serves: the phase that the layout is of; empty for training.
    """
    axes, whole = key.axes_of("L"), str(key.with_axes("L", ()))
    if axes and serves:
        fact = f"dimension L of {line.name} is {over(axes)}, and stays whole in serving: one position cannot be cut."
        yield line.at_dim(key, "L", fact, f"Write '{whole}' in [serving]; [cache] may shard the cached length T.")
    elif axes and query and query.axes_of("L") != axes:
        fact = f"dimension L of {line.name} is {over(axes)}, and of queries ('{query}') {over(query.axes_of('L'))}."
        yield line.at_dim(key, "L", fact, f"Cut both alike, or leave the keys whole: '{whole}'.")


def uneven_chunks(text: Any, key: Spec | None, given: GivenSizes) -> Iterator[Fault]:
    """Zigzag order cuts a sequence into two chunks for a device."""
    devices = prod(given.mesh.get(axis, 1) for axis in key.axes_of("L")) if key else 1
    length = given.sizes.get("L", 0)
    if devices > 1 and length % devices == 0 and length % (2 * devices):
        line = Line("attention.key", text)
        fact = f"dimension L has size {length}, and zigzag order cuts it into {2 * devices} chunks, two for a device."
        yield line.at_dim(key, "L", fact, f"Use a multiple of {2 * devices}.")
