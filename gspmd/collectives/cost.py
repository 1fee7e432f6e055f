"""What a step costs: bytes one device sends, and seconds on a chip's links.

The byte counts are those of ring algorithms; the times follow the roofline of the public *scaling book* (jax-ml,
chapters 1 to 3): bandwidth over the rings that the step can use at once, plus one hop of latency per neighbour passed.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from gspmd.annotate.errors import PlanError
from gspmd.collectives.chips import Chip


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, however it is written; the names that numpy lacks come from ml_dtypes, which JAX installs.

    Raises:
        PlanError: there is no such dtype.

    Example:
        >>> dtype_name("bfloat16"), dtype_name(np.float32)
        ('bfloat16', 'float32')
    """
    try:
        return np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype).name
    except TypeError:
        raise PlanError(f"no dtype is called {dtype!r}.\n  Write 'bfloat16', 'float32', 'int8', ...") from None


def itemsize(dtype: str) -> int:
    """Bytes per element.

    >>> itemsize("bfloat16"), itemsize("float32")
    (2, 4)
    """
    return np.dtype(getattr(ml_dtypes, dtype_name(dtype), dtype)).itemsize


def wire_bytes(kind: str, group: int, buffer: float) -> int:
    """Bytes that one device sends in a collective.

    Args:
        kind: one of all-gather, reduce-scatter, all-reduce, all-to-all, collective-permute, slice, einsum.
        group: number of devices that take part together.
        buffer: bytes per device of the larger of the step's input and output.

    Example:
        >>> wire_bytes("all-gather", 4, 1024), wire_bytes("all-reduce", 4, 1024)
        (768, 1536)

    Source: Chan et al. 2007, *Collective communication: theory, practice, and experience*, §3-4.
    """
    if kind in ("slice", "einsum") or group == 1:
        return 0
    if kind == "collective-permute":
        return int(buffer)
    passes = 2 if kind == "all-reduce" else 1
    return int(passes * buffer * (group - 1) // group)


def collective_seconds(kind: str, axes: Sequence[str], mesh: Mapping[str, int], buffer: float, chip: Chip) -> float:
    """Seconds of one collective over `axes`, each mesh axis being one torus axis of the chip (or all of a switch)."""
    sizes = [mesh[axis] for axis in axes if mesh[axis] > 1]
    if kind in ("slice", "einsum") or not sizes:
        return 0.0
    group = prod(sizes)
    if chip.is_switch:
        return wire_bytes(kind, group, buffer) / chip.egress_bandwidth + chip.hop_seconds
    wrapped = all(chip.wraps(size) for size in sizes)
    if kind == "collective-permute":  # one path per piece; a long ring is shared like in an all-to-all
        ring = buffer * max(1, max(sizes) / 8) / chip.link_bandwidth
    elif kind == "all-to-all":
        ring = buffer * max(sizes) / (8 * chip.link_bandwidth)
    else:
        ring = wire_bytes(kind, group, buffer) / (2 * chip.link_bandwidth * min(len(sizes), chip.torus))
    passes = 2 if kind == "all-reduce" else 1
    return ring * (1 if wrapped else 2) + passes * chip.hop_seconds * sum(hops(size, chip) for size in sizes)


def hops(size: int, chip: Chip) -> int:
    """Hops to the farthest neighbour on a mesh axis: half the ring where it closes, its length where it does not."""
    return size // 2 if chip.wraps(size) else size - 1


def einsum_seconds(flops: float, memory_bytes: float, dtype: str, chip: Chip) -> float:
    """Seconds of a local einsum: the slower of the matrix unit and the memory (roofline)."""
    return max(flops / chip.flops(dtype), memory_bytes / chip.hbm_bandwidth)
