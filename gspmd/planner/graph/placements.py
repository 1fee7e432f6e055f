"""Every placement of a tensor on a mesh, as rows of numpy arrays: the nodes of the planner's graph.

A placement gives each mesh axis a role. The axis shards a dimension, at some position in the order of that dimension's
axes, or belongs to a partial sum, or does nothing. The axes of one dimension, from major to minor, are a *sequence*.
Sequences are numbered, and a placement is a row of numbers, one sequence for each dimension. Sets of axes are bit
masks. For n axes and d dimensions there are at most (n + d)! / d! placements without a partial sum. For 4 dimensions
these are 210 with 3 axes, and 15,120 with 5 axes.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import permutations
from math import factorial, prod
from typing import Any

import numpy as np

from gspmd.annotate.errors import PlanError

Axes = tuple[int, ...]

MOST_AXES = 8
"""The largest number of mesh axes that are planned; 8 axes have 109,601 sequences, and 10 axes have 9,864,101."""
MOST_PERMUTES = 1 << 26
"""The largest number of permutes that are compared for a tensor; so many permutes take about 1 GB of memory."""


class Sequences:
    """All ordered subsets of `count` axes, numbered from the shortest to the longest; number 0 is empty.

    Attributes:
        axes: the axes of each sequence, from major to minor.
        mask: the set of axes of each sequence, as a bit mask.
        rank: [sequence, axis], the number of axes before this axis; -1 if the sequence lacks the axis.
        append: [sequence, axis], the sequence with this axis added at the end; -1 if the sequence already has the axis.
        prefix: [sequence, j], the sequence without its last j axes.
        suffix: [sequence, j], the sequence of its last j axes.
    """

    def __init__(self, count: int):
        self.axes = [order for size in range(count + 1) for order in permutations(range(count), size)]
        self.number = {axes: number for number, axes in enumerate(self.axes)}
        self.mask = np.array([sum(1 << axis for axis in axes) for axes in self.axes])
        self.rank = np.array([[order.index(a) if a in order else -1 for a in range(count)] for order in self.axes])
        self.append = np.array([[self.number.get((*axes, axis), -1) for axis in range(count)] for axes in self.axes])
        cuts = [[max(len(axes) - j, 0) for j in range(count + 1)] for axes in self.axes]
        self.prefix = np.array([[self.number[axes[:cut]] for cut in row] for axes, row in zip(self.axes, cuts)])
        self.suffix = np.array([[self.number[axes[cut:]] for cut in row] for axes, row in zip(self.axes, cuts)])
        self._padded = np.array([(*axes, *[-1] * (count - len(axes))) for axes in self.axes])

    def joined(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the sequences `left` with the axes of `right` appended; `left` and `right` must share no axis."""
        for axis in self._padded[right].T:
            left = np.where(axis < 0, left, self.append[left, axis])
        return left


sequences = lru_cache(maxsize=16)(Sequences)


def parts_of(sizes: Sequence[int]) -> list[int]:
    """Return the number of parts into which each set of axes cuts a dimension, indexed by the set's bit mask."""
    parts = [1]
    for size in sizes:
        parts += [count * size for count in parts]
    return parts


def fitting(size: int, mesh_sizes: Axes) -> frozenset[int]:
    """Return the sets of mesh axes that divide a dimension of this size, as bit masks.

    Raises:
        PlanError: there are more mesh axes than can be planned.
    """
    if len(mesh_sizes) > MOST_AXES:
        raise too_many(mesh_sizes, f", more than the limit of {MOST_AXES}.")
    return frozenset(mask for mask, count in enumerate(parts_of(mesh_sizes)) if size % count == 0)


def too_many(mesh_sizes: Axes, fact: str) -> PlanError:
    """Return the error for mesh axes with too many placements; `fact` ends the first sentence of the error."""
    axes = f"{len(mesh_sizes)} mesh axes (of sizes {', '.join(map(str, mesh_sizes))})"
    return PlanError(f"cannot plan on {axes}{fact}\n  Merge mesh axes that are always used together.")


def check_permutes(mesh_sizes: Axes, allowed: Sequence[frozenset[int]], partial: int) -> None:
    """Refuse a tensor with too many permutes before its placements are listed, because listing may take minutes.

    Placements are counted by the set of axes that they use. If n placements have s different shapes, there are at least
    n² / s permutes between placements of the same shape.

    Args:
        mesh_sizes, allowed, partial: the same as the arguments `sizes`, `allowed` and `partial` of `Nodes`.

    Raises:
        PlanError: there are too many permutes.
    """
    subsets, parts = np.arange(1 << len(mesh_sizes)), parts_of(mesh_sizes)
    ways = (subsets == 0).astype(float)
    for sets in allowed:
        before, ways = ways, np.zeros(len(subsets))
        for mask in sets:
            free = subsets[subsets & mask == 0]
            ways[free | mask] += before[free] * factorial(mask.bit_count())
    count = sum(each * 2.0 ** (partial & ~used).bit_count() for used, each in enumerate(ways.tolist()))
    shapes = prod((len({parts[mask] for mask in sets}) for sets in allowed), start=2 ** partial.bit_count())
    if (permutes := count**2 / shapes) > MOST_PERMUTES:
        fact = (
            f": for this tensor at least {int(permutes):,} permutes\n  would have to be compared, more than the limit"
        )
        raise too_many(mesh_sizes, f"{fact} of {MOST_PERMUTES:,}.")


def placements(
    count: int, allowed: Sequence[frozenset[int]], partial: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List every placement that uses no mesh axis twice.

    Args:
        count: the number of mesh axes.
        allowed: for each dimension, the bit masks of the sets of axes that may shard it.
        partial: for each partial sum, the bit mask of the axes over which it may extend.

    Returns:
        Three arrays. The first, [placement, dimension], has the sequence of each dimension. The second, [placement],
        has the axes that shard any dimension. The third, [placement, sum], has the axes of each partial sum.
    """
    subsets, masks = np.arange(1 << count), sequences(count).mask
    table, taken = np.zeros((1, 0), int), np.zeros(1, int)
    for sets in allowed:
        table, taken = _extended(table, taken, masks, np.isin(subsets, list(sets))[masks], subsets)
    table = np.hstack([table, taken[:, None]])
    for axes in partial:
        table, taken = _extended(table, taken, subsets, subsets & ~axes == 0, subsets)
    dims = len(allowed)
    return table[:, :dims], table[:, dims], table[:, dims + 1 :]


def _extended(table: np.ndarray, taken: np.ndarray, masks: np.ndarray, fits: np.ndarray, subsets: np.ndarray):
    """Extend every row by one more column, in every way that uses no axis again.

    Returns:
        The extended rows, and the axes that each row uses.
    """
    free = (subsets[:, None] & masks == 0) & fits  # for each set of taken axes and each choice
    choices, counts = np.nonzero(free)[1], free.sum(axis=1)
    starts, some = np.cumsum(counts) - counts, counts[taken]
    row = np.repeat(np.arange(len(table)), some)
    within = np.arange(len(row)) - np.repeat(np.cumsum(some) - some, some)
    choice = choices[starts[taken[row]] + within]
    return np.hstack([table[row], choice[:, None]]), taken[row] | masks[choice]


def numbered(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return a number for each row of a table of small numbers; only equal rows have equal numbers.

    Columns are combined one after another, so that 64 bits are enough.
    """
    numbers, *rest = columns
    for column in rest:
        numbers = np.unique(numbers * (column.max() + 1) + column, return_inverse=True)[1]
    return numbers


class Nodes:
    """The placements of one tensor, numbered in the order of their keys.

    A key is a number with a digit for each mesh axis. The digit is 0 if the axis is unused, 1 if the axis is in the
    partial sum, and 2 + n · d + r if the axis shards dimension d after r other axes, where n is the number of mesh
    axes. So a step changes the key by differences of entries of `on` and `partial_keys`.

    Args:
        sizes: the sizes of the mesh axes, all above 1.
        allowed: for each dimension, the bit masks of the sets of axes that may shard it.
        partial: the bit mask of the axes over which the tensor may be a partial sum.

    Attributes:
        rows, used, partial: the three results of `placements`, in the order of the nodes.
        keys: the key of each node.
        on: [dimension, sequence], the number that the sequence adds to the key.
        partial_keys: [bit mask], the number that the axes of the partial sum add to the key.
        parts: [bit mask], the number of parts into which a set of axes cuts a dimension.
    """

    def __init__(self, sizes: Axes, allowed: Sequence[frozenset[int]], partial: int):
        self.sizes, self.count, self.sequences = sizes, len(sizes), sequences(len(sizes))
        self.parts = np.array(parts_of(sizes))
        rows, used, partials = placements(self.count, allowed, [partial])
        first, rank = 2 + self.count * np.arange(len(allowed))[:, None, None], self.sequences.rank
        digits = (2 + self.count * len(allowed)) ** np.arange(self.count)
        self.on = np.where(rank < 0, 0, first + rank) @ digits
        self.partial_keys = (np.arange(1 << self.count)[:, None] >> np.arange(self.count) & 1) @ digits
        keys = self.key(rows.T, partials[:, 0])
        order = np.argsort(keys)
        self.keys, self.rows, self.used, self.partial = keys[order], rows[order], used[order], partials[order, 0]

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, rows: Iterable[Any], partial: Any) -> np.ndarray:
        """Return the keys of placements, given the sequences of each dimension and the axes of the partial sum."""
        return sum((self.on[d][row] for d, row in enumerate(rows)), self.partial_keys[partial])

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the index of the placement with each of these keys, or -1 if no placement has the key."""
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, at, -1)

    def number(self, axes: Sequence[Axes], partial: Iterable[int]) -> int:
        """Return the index of a placement, or -1 if there is no such placement.

        There is none if the axes do not divide the sizes, or if the partial sum is not allowed.
        """
        rows = [self.sequences.number[order] for order in axes]
        return int(self.find(self.key(rows, sum(1 << axis for axis in partial))))

    def placement(self, number: int) -> tuple[tuple[Axes, ...], Axes]:
        """Return the axes of every dimension of a placement, and the axes of its partial sum."""
        axes = tuple(self.sequences.axes[row] for row in self.rows[number])
        return axes, tuple(axis for axis in range(self.count) if self.partial[number] >> axis & 1)
