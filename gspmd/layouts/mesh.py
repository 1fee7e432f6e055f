"""Mesh axis sizes for a layout, from a mesh or from a number of devices, and a check of the dimensions' sizes."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, product
from math import isqrt, log2, prod
from typing import Any

from gspmd.annotate import LayoutError, mesh_sizes
from gspmd.annotate.errors import shown
from gspmd.annotate.validation import whole

_MOST = 2**31


def factorise(devices: int, axes: Sequence[str], order: Sequence[str]) -> dict[str, int]:
    """Factor a number of devices over the mesh axes in `order`.

    These axes get the prime factors of `devices` in turn, from the largest factor to the smallest. All other axes in
    `axes` have size 1.

    >>> factorise(12, ("x", "y", "z"), ("x", "y", "z"))
    {'x': 3, 'y': 2, 'z': 2}
    >>> factorise(8, ("x", "y", "z"), ("y", "x"))
    {'x': 2, 'y': 4, 'z': 1}
    """
    count = whole(devices)
    if count is None or not 1 <= count < _MOST:
        remedy = f"Give a whole number of devices, from 1 to {_MOST - 1:,}."
        raise LayoutError(f"no mesh has {shown(devices)} devices.\n  {remedy}")
    if unknown := [axis for axis in order if axis not in axes]:
        has = f"it has {', '.join(axes)}" if axes else "it has none"
        raise LayoutError(
            f"no mesh is factored over axis {shown(unknown[0])}: {has}.\n  Name it in axes of [mesh] too."
        )
    if count > 1 and not order:
        names = ", ".join(f'"{axis}"' for axis in axes or ("x",))
        raise LayoutError(
            f"no mesh is made for {count} devices: the layout does not say over which mesh axes they are factored.\n"
            f"  Write factor = [{names}] in [mesh], or give the mesh."
        )
    mesh = dict.fromkeys(axes, 1)
    # Dealt out in turn, so that axes have similar sizes, and no axis has all devices.
    for prime, axis in zip(sorted(_primes(count), reverse=True), cycle(order)):
        mesh[axis] *= prime
    return mesh


def nearest(mesh: Mapping[str, int], order: Sequence[str]) -> list[dict[str, int]]:
    """List all meshes with as many devices as `mesh`, factored over the axes in `order`, the most similar mesh first.

    >>> nearest({"x": 2, "y": 2}, ("x", "y"))
    [{'x': 2, 'y': 2}, {'x': 1, 'y': 4}, {'x': 4, 'y': 1}]
    """
    devices = prod(mesh.values())
    small = [n for n in range(1, isqrt(devices) + 1) if devices % n == 0]
    divisors = sorted({*small, *(devices // n for n in small)})
    meshes = [dict(zip(order, sizes)) for sizes in product(divisors, repeat=len(order)) if prod(sizes) == devices]
    return sorted(({**mesh, **sizes} for sizes in meshes), key=lambda other: _distance(mesh, other))


def _distance(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    return round(sum(abs(log2(one[axis] / other[axis])) for axis in one), 9)


def complete(mesh: Any, axes: Sequence[str]) -> dict[str, int]:
    """Return the axis sizes of a mesh, with size 1 for every axis in `axes` that the mesh lacks."""
    given = mesh_sizes(mesh)
    return {**given, **{axis: 1 for axis in axes if axis not in given}}


def read_sizes(sizes: Any) -> Mapping[str, int]:
    """Check the sizes of dimensions and return them; return {} for None.

    Raises:
      LayoutError: `sizes` is not a mapping from dimensions to whole numbers of at least 0.
    """
    if sizes is None:
        return {}
    if not isinstance(sizes, Mapping) or not all(isinstance(dim, str) for dim in sizes):
        remedy = 'Pass a mapping from dimensions to sizes, such as {"B": 8, "E": 64}.'
        raise LayoutError(f"cannot read sizes from {shown(sizes)}.\n  {remedy}")
    for dim, size in sizes.items():
        if not hasattr(size, "__index__") or isinstance(size, bool) or size < 0:
            raise LayoutError(f"dimension {dim} has size {shown(size)}.\n  A size is a whole number of at least 0.")
    return sizes


def _primes(number: int) -> Iterator[int]:
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1
    if number > 1:
        yield number
