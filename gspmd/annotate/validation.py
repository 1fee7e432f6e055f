"""Read sizes of dimensions and of mesh axes, as callers give them."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, overload

from gspmd.annotate.errors import SpecError, shown

LARGEST = 2**40
"""The limit of dimension sizes: every size must be smaller, so that bytes and FLOPs fit into 64 bits."""


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Return the size of every mesh axis by name, from a mapping or a `jax.sharding.Mesh`, as Python integers.

    Raises:
      SpecError: `mesh` is not a mesh, a name is not a string, or a size is not a whole number of at least 1.

    >>> mesh_sizes({"x": 4, "y": 2})
    {'x': 4, 'y': 2}
    """
    sizes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if not isinstance(sizes, Mapping) or not all(isinstance(axis, str) for axis in sizes):
        raise SpecError(
            f"cannot read a mesh from {shown(mesh)}.\n  Write {{'x': 4, 'y': 2}}, or pass a jax.sharding.Mesh."
        )
    for axis, size in sizes.items():
        if whole(size) is None or size < 1:
            raise SpecError(
                f"mesh axis {axis} has size {shown(size)}.\n  The size of a mesh axis is a whole number, 1 or more."
            )
    if math.prod(sizes.values()) >= LARGEST:
        shape = ", ".join(f"{axis}={shown(size)}" for axis, size in sizes.items())
        raise SpecError(f"the mesh {shape} is too large.\n  A mesh has fewer than 2^40 devices.")
    return {axis: int(size) for axis, size in sizes.items()}


@overload
def whole_sizes(sizes: Mapping[str, int]) -> dict[str, int]: ...
@overload
def whole_sizes(sizes: Sequence[int]) -> tuple[int, ...]: ...
def whole_sizes(sizes: Mapping[str, int] | Sequence[int]) -> dict[str, int] | tuple[int, ...]:
    """Return sizes by dimension, or a shape, as Python integers.

    Integers of numpy would overflow when bytes are counted.

    A value that is not a whole number is returned unchanged, and no spec fits it.

    Raises:
      SpecError: `sizes` is neither a mapping nor a sequence.
    """
    if isinstance(sizes, Mapping):
        return {dim: size if (known := whole(size)) is None else known for dim, size in sizes.items()}
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise SpecError(
            f"cannot read sizes from {shown(sizes)}.\n"
            "  Write the size of every dimension of the whole tensors, {'B': 8, 'E': 16}, or a shape."
        )
    return tuple(size if (known := whole(size)) is None else known for size in sizes)


def whole(size: Any) -> int | None:
    """Return a whole number of any library as a Python integer, or None for anything else, including True and False."""
    if type(size).__name__ in ("bool", "bool_"):  # numpy's too, without importing it
        return None
    try:
        return operator.index(size)
    except TypeError:
        return None
