"""How a number of devices, or a mesh that is given, becomes the mesh of a layout."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from gspmd.annotate import LayoutError, mesh_sizes


def factorise(devices: int, axes: Sequence[str], order: Sequence[str]) -> dict[str, int]:
    """Deals the prime factors of `devices`, largest first, out to the axes of `order` in turn; the others have size 1.

    >>> factorise(12, ("x", "y", "z"), ("x", "y", "z"))
    {'x': 3, 'y': 2, 'z': 2}
    >>> factorise(8, ("x", "y", "z"), ("y", "x"))
    {'x': 2, 'y': 4, 'z': 1}
    """
    if devices < 1:
        raise LayoutError(f"no mesh has {devices} devices.\n  Give a number of devices of 1 or more.")
    mesh = dict.fromkeys(axes, 1)
    for prime, axis in zip(sorted(_primes(devices), reverse=True), cycle(order)):
        mesh[axis] *= prime
    return mesh


def complete(mesh: Any, axes: Sequence[str]) -> dict[str, int]:
    """The sizes of a mesh, with size 1 for every axis of `axes` that it lacks."""
    given = mesh_sizes(mesh)
    return {**given, **{axis: 1 for axis in axes if axis not in given}}


def _primes(number: int) -> Iterator[int]:
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1
    if number > 1:
        yield number
