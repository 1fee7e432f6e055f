"""The meshes of a slice whose axes are whole torus axes."""

from collections.abc import Iterator, Sequence
from math import prod

AXES = "xyz"


def meshes(torus: Sequence[int], most: int = len(AXES)) -> list[dict[str, int]]:
    """List the meshes whose axes are one or several whole torus axes each; one for all orders of the axes.

    A part of a torus axis is no mesh axis here: it has no ring of links, which the cost of a mesh axis assumes.

    Args:
        torus: devices along each torus axis; the devices of one chip count as an axis.
        most: the largest number of mesh axes.

    Returns:
        Sizes of x, y and z, meshes of fewer axes first.

    Example:
        >>> for mesh in meshes((4, 8, 8)):
        ...     print(mesh)
        {'x': 256}
        {'x': 4, 'y': 64}
        {'x': 32, 'y': 8}
        {'x': 4, 'y': 8, 'z': 8}
    """
    sizes = [size for size in torus if size > 1] or [1]
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for groups in _groups(sizes):
        shape = tuple(prod(group) for group in groups)
        if len(shape) <= most:
            found.setdefault(tuple(sorted(shape)), shape)
    ordered = sorted(found.values(), key=lambda shape: (len(shape), shape))
    return [dict(zip(AXES, shape)) for shape in ordered]


def _groups(sizes: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield the partitions of the torus axes into groups, each in order, sorted by their first axes."""
    if not sizes:
        yield []
        return
    *before, last = sizes
    for groups in _groups(before):
        yield [*groups, [last]]
        for number, group in enumerate(groups):
            yield [*groups[:number], [*group, last], *groups[number + 1 :]]
