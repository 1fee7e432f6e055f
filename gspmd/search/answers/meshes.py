"""The meshes of a TPU slice in which every axis consists of whole torus axes, and all meshes of a number of devices."""

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import prod

from gspmd.hardware.chips import Chip

AXES = "xyz"


def meshes(torus: Sequence[int], slices: int = 1, most: int = len(AXES)) -> list[dict[str, int]]:
    """List the meshes whose axes each consist of one or several whole torus axes; the order of axes does not matter.

    A part of a torus axis is not used as a mesh axis, because the cost of a mesh axis assumes a ring of links.

    Args:
        torus: devices along each torus axis; the devices of one chip count as an axis.
        slices: number of slices. The first mesh axis extends over all slices, alone or together with torus axes.
        most: the largest allowed number of mesh axes.

    Returns:
        Meshes, as sizes of x, y and z; those with fewer axes first.

    Example:
        >>> for mesh in meshes((4, 8, 8)):
        ...     print(mesh)
        {'x': 256}
        {'x': 4, 'y': 64}
        {'x': 32, 'y': 8}
        {'x': 4, 'y': 8, 'z': 8}
        >>> meshes((4, 8), slices=2)
        [{'x': 64}, {'x': 2, 'y': 32}, {'x': 8, 'y': 8}, {'x': 16, 'y': 4}, {'x': 2, 'y': 4, 'z': 8}]
    """
    across = [slices] if slices > 1 else []
    sizes = [*across, *(size for size in torus if size > 1)] or [1]
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for groups in _groups(sizes):
        shape = tuple(prod(group) for group in groups)
        if len(shape) <= most:
            found.setdefault((*shape[: len(across)], *sorted(shape[len(across) :])), shape)
    ordered = sorted(found.values(), key=lambda shape: (len(shape), shape))
    return [dict(zip(AXES, shape)) for shape in ordered]


def _groups(sizes: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield the partitions of the torus axes into groups; the groups, and the axes in each group, are in order."""
    if not sizes:
        yield []
        return
    *before, last = sizes
    for groups in _groups(before):
        yield [*groups, [last]]
        for number, group in enumerate(groups):
            yield [*groups[:number], [*group, last], *groups[number + 1 :]]


def factorings(devices: int, of: Chip) -> list[dict[str, int]]:
    """List every factorization of a number of devices into at most three mesh axes.

    The order of axes matters only if the last axes are within a node and the first ones between nodes.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> factorings(8, chip("tpu-v4"))
        [{'x': 8}, {'x': 2, 'y': 4}, {'x': 2, 'y': 2, 'z': 2}]
        >>> factorings(16, chip("h100"))[1:4]
        [{'x': 2, 'y': 8}, {'x': 4, 'y': 4}, {'x': 8, 'y': 2}]
    """
    shapes = {*_factors(devices, 2, len(AXES))} or {(1,)}
    if of.nodes({"x": devices}) > 1:
        shapes = {order for shape in shapes for order in permutations(shape)}
    return [dict(zip(AXES, shape)) for shape in sorted(shapes, key=lambda shape: (len(shape), shape))]


def _factors(number: int, least: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a product of at most `most` ascending factors, each at least `least`."""
    if number >= least:
        yield (number,)
    for first in range(least, number if most > 1 else least):
        if first * first > number:
            return
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, first, most - 1))
