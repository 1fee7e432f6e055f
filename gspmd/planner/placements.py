"""Every placement of a tensor on a mesh, as numpy arrays: what the planner searches.

A placement says of every mesh axis where it stands: on a dimension (and behind which others), nowhere, or owing a
partial sum. The ordered axes of one dimension are a *sequence*, and sequences are numbered; a placement is a row of
such numbers, one for each dimension, with the set of owed axes. A set of axes is a bit mask.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import permutations

import numpy as np

Axes = tuple[int, ...]


class Sequences:
    """The ordered subsets of a number of axes, shortest first: number 0 is empty.

    Attributes:
        axes: the axes of each, major first.
        mask: the axes of each as a set.
        length: how many.
        append: the sequence with one more axis behind, by sequence and axis; -1 where it has that axis.
        prefix, suffix: what stands before its last j axes, and these, by sequence and j.
    """

    def __init__(self, count: int):
        self.axes = [order for size in range(count + 1) for order in permutations(range(count), size)]
        self.number = {axes: number for number, axes in enumerate(self.axes)}
        self.mask = np.array([sum(1 << axis for axis in axes) for axes in self.axes])
        self.length = np.array([len(axes) for axes in self.axes])
        self.append = np.array([[self.number.get((*axes, axis), -1) for axis in range(count)] for axes in self.axes])
        cuts = [[max(len(axes) - j, 0) for j in range(count + 1)] for axes in self.axes]
        self.prefix = np.array([[self.number[axes[:cut]] for cut in row] for axes, row in zip(self.axes, cuts)])
        self.suffix = np.array([[self.number[axes[cut:]] for cut in row] for axes, row in zip(self.axes, cuts)])
        self._count = count

    def joined(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """The sequences `left` with the axes of `right` behind, which none of them has."""
        padded = np.array([(*axes, *[-1] * (self._count - len(axes))) for axes in self.axes])[right]
        for axis in padded.T:
            left = np.where(axis < 0, left, self.append[left, axis])
        return left


@lru_cache(maxsize=16)
def sequences(count: int) -> Sequences:
    """The sequences of a number of axes."""
    return Sequences(count)


def parts_of(sizes: Axes) -> list[int]:
    """Into how many parts each set of axes, by its mask, cuts a dimension."""
    parts = [1]
    for size in sizes:
        parts += [count * size for count in parts]
    return parts


@lru_cache(maxsize=1024)
def _choices(count: int, fitting: frozenset[int], ordered: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By the axes that are taken: the sequences (or the sets) of others that fit, and where those of each begin.

    The last is the set of each.
    """
    masks = sequences(count).mask if ordered else np.arange(1 << count)
    free = (np.arange(1 << count)[:, None] & masks == 0) & np.array([mask in fitting for mask in masks.tolist()])
    return np.nonzero(free)[1], np.concatenate([[0], np.cumsum(free.sum(axis=1))]), masks


def _extended(rows: np.ndarray, taken: np.ndarray, chosen: np.ndarray, starts: np.ndarray, masks: np.ndarray):
    """Every row with every choice that takes no axis twice: one more column, and the axes taken then."""
    counts = starts[taken + 1] - starts[taken]
    parent = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)
    choice = chosen[starts[taken[parent]] + within]
    return np.hstack([rows[parent], choice[:, None]]), taken[parent] | masks[choice]


class Placements:
    """Every placement of a number of dimensions that divides.

    Args:
        sizes: of the mesh axes, all above 1.
        allowed: for each dimension, the sets of axes (as masks) into whose number of parts it divides.
        owed: for each partial sum, the set of axes (as a mask) over which it may be owed; no axis is owed twice.

    Attributes:
        rows: the sequence on each dimension, by placement and dimension.
        used: the axes that shard a dimension, by placement.
        partial: the axes over which each sum is owed, by placement and sum.
        parts: into how many parts each set of axes cuts.
    """

    def __init__(self, sizes: Axes, allowed: Sequence[frozenset[int]], partial: Sequence[int]):
        self.sizes, self.count = sizes, len(sizes)
        self.sequences = sequences(self.count)
        self.parts = np.array(parts_of(sizes))
        rows, taken = np.zeros((1, 0), int), np.zeros(1, int)
        for fitting in allowed:
            rows, taken = _extended(rows, taken, *_choices(self.count, fitting))
        rows = np.hstack([rows, taken[:, None]])
        for mask in partial:
            subsets = frozenset(sub for sub in range(1 << self.count) if sub & ~mask == 0)
            rows, taken = _extended(rows, taken, *_choices(self.count, subsets, ordered=False))
        dims = len(allowed)
        self.rows, self.used, self.partials = rows[:, :dims], rows[:, dims], rows[:, dims + 1 :]
        self._base = dims * self.count + 2

    def key(self, rows: Sequence[np.ndarray], partial: np.ndarray) -> np.ndarray:
        """One number for each placement: a digit for each axis says where it stands."""
        return sum((self.on[d][row] for d, row in enumerate(rows)), self.partial_keys[partial])

    @cached_property
    def on(self) -> np.ndarray:
        """What a sequence adds to the key, by dimension and sequence."""
        digits = [self._base**axis for axis in range(self.count)]
        orders = self.sequences.axes
        plain = np.array([sum(digits[axis] for axis in axes) for axes in orders])
        rank = np.array([sum(r * digits[axis] for r, axis in enumerate(axes)) for axes in orders])
        return (2 + self.count * np.arange(self.rows.shape[1])[:, None]) * plain + rank

    @cached_property
    def partial_keys(self) -> np.ndarray:
        """What owed axes add to the key, by mask."""
        adds = [0]
        for axis in range(self.count):
            adds += [value + self._base**axis for value in adds]
        return np.array(adds)


class Nodes(Placements):
    """The placements of one tensor, each with a number."""

    def __init__(self, sizes: Axes, allowed: Sequence[frozenset[int]], partial: int):
        super().__init__(sizes, allowed, [partial])
        self.partial = self.partials[:, 0]
        keys = self.key(self.rows.T, self.partial)
        order = np.argsort(keys)
        self.keys, self.rows, self.partial, self.used = (
            keys[order],
            self.rows[order],
            self.partial[order],
            self.used[order],
        )

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The numbers of placements by their keys; -1 where there is none."""
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, at, -1)

    def number(self, axes: Sequence[Axes], partial: Sequence[int]) -> int:
        """The number of one placement; -1 where it does not divide, or owes what none of these does."""
        rows = [self.sequences.number[order] for order in axes]
        return int(self.find(self.key(rows, sum(1 << axis for axis in partial))))

    def placement(self, number: int) -> tuple[tuple[Axes, ...], Axes]:
        """The axes on every dimension, and those that are owed."""
        partial = int(self.partial[number])
        axes = tuple(self.sequences.axes[row] for row in self.rows[number])
        return axes, tuple(axis for axis in range(self.count) if partial >> axis & 1)
