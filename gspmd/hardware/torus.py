"""The mapping of mesh axes to torus axes, computed from sizes alone."""

from collections.abc import Iterator, Sequence
from functools import cache
from math import gcd, log


def lay(torus: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return a row for each torus axis, which shows how the mesh axes divide this torus axis among themselves.

    A row has an element for each mesh axis: the size of the part of the torus axis that the mesh axis covers. Of the
    mesh axes that share a torus axis, earlier ones are major. The result minimizes first the number of mesh axes that
    cover only a part of a torus axis, and then the number of parts.

    Args:
        torus: sizes of the torus axes.
        sizes: sizes of the mesh axes, with the same product as the sizes in `torus`.

    Differs: `jax.experimental.mesh_utils.create_device_mesh` is greedy, from the last mesh axis to the first.

    Example:
        >>> lay((4, 4, 8), (8, 16))
        ((1, 4), (1, 4), (8, 1))
        >>> lay((4, 4), (2, 8))
        ((2, 2), (1, 4))
    """

    def cost(rows: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
        in_parts = {axis for size, row in zip(torus, rows) for axis, part in enumerate(row) if part not in (1, size)}
        return len(in_parts), sum(part > 1 for row in rows for part in row)

    return min(_layings(torus, sizes), key=cost)


def nearest(count: int, sizes: Sequence[int], most: int = 3) -> list[tuple[int, ...]]:
    """Return at most `most` factorizations of `count` into a factor for each size, those most similar to `sizes` first.

    Example:
        >>> nearest(64, (4, 8))
        [(4, 16), (8, 8), (2, 32)]
    """

    def distance(factors: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return round(sum(abs(log(ours / asked)) for ours, asked in zip(factors, sizes)), 6), factors

    return sorted(_factorings(count, (count,) * len(sizes)), key=distance)[:most]


def _layings(torus: tuple[int, ...], room: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not torus:
        yield ()
        return
    for row in _factorings(torus[0], room):
        for rest in _layings(torus[1:], tuple(free // part for free, part in zip(room, row))):
            yield (row, *rest)


def _factorings(number: int, room: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield factorizations of a number into as many factors as `room` has elements, by descending first factor.

    Each factor divides the corresponding element of `room`.
    """
    if not room:
        yield from [()] if number == 1 else []
        return
    for part in _divisors(gcd(number, room[0])):
        for rest in _factorings(number // part, room[1:]):
            yield (part, *rest)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(part for part in range(number, 0, -1) if number % part == 0)
