"""Packing: several documents, or pairs, share a row; first-fit chooses them from a limited number of items."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

#: Number of items packed together: so many that the last rows, which are less full, hardly matter.
WINDOW = 4096

Row = dict[str, np.ndarray]


@runtime_checkable
class Items(Protocol):
    """Items to be packed into rows: documents, or pairs of a source and a target."""

    @property
    def rooms(self) -> Sequence[int]:
        """The number of tokens that fit into a row: one number, or two for rows of pairs (source and target)."""

    def __len__(self) -> int: ...

    def sizes(self, items: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each item, [items, sides]; the two sides of a pair are source and target."""

    def row(self, items: np.ndarray) -> Row:
        """Return a row that consists of the given items, in the given order."""


def first_fit(sizes: Any, rooms: Sequence[int]) -> list[list[int]]:
    """Put each item into the first row that has room for it, and return the items of each row.

    A pair has two sides, its source and its target, and a row must have room for both.

    Args:
        sizes: the number of tokens of each item on each side, [items, sides].
        rooms: the number of tokens that a row holds on each side, [sides].

    Raises:
        ValueError: an item is larger than a row.

    Example:
        >>> first_fit([[5], [4], [3], [2]], [8])
        [[0, 2], [1, 3]]
        >>> first_fit([[1, 5], [1, 4], [2, 3]], [4, 8])
        [[0, 2], [1]]
    """
    sizes = np.asarray(sizes)
    if (sizes > np.asarray(rooms)).any():
        at = int((sizes > np.asarray(rooms)).any(axis=1).argmax())
        raise ValueError(f"item {at} has {sizes[at].tolist()} tokens, but a row has room for {list(rooms)}.")
    left = np.tile(np.asarray(rooms), (len(sizes), 1))  # a row that is not begun has room for any item
    rows: list[list[int]] = []
    for item, size in enumerate(sizes):
        row = int((left[: len(rows) + 1] >= size).all(axis=1).argmax())
        if row == len(rows):
            rows.append([])
        left[row] -= size
        rows[row].append(item)
    return rows


def count_rows(items: Items, most: int) -> int:
    """Return the number of rows that the items fill if they are packed in order, but at most `most`."""
    count = 0
    for rows in _in_order(items):
        count += len(rows)
        if count >= most:
            return most
    return count


class PackedRows:
    """Rows of items that are packed in the given order."""

    def __init__(self, items: Items):
        self._items = items
        self._rows = [row for rows in _in_order(items) for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int, random: np.random.Generator) -> Row:
        """Return a row; packing makes no random choices."""
        return self._items.row(self._rows[index])


class PackedBatches(Iterator[Row]):
    """Iterate endlessly over batches of packed rows, shuffled anew in every epoch.

    The items of an epoch are shuffled and packed `WINDOW` at a time, and the rows of each such window are shuffled once
    more, because its last rows are less full. The seed gives every process the same rows, but each process reads only
    the tokens of its own rows.

    Args:
        items: the documents or pairs.
        batch: number of rows in a batch, over all processes.
        mine: the indices of the rows of a batch that this process reads.
        seed: seed of the order of items and rows.
    """

    def __init__(self, items: Items, batch: int, mine: range, seed: int):
        self._items, self._batch, self._mine, self._seed = items, batch, mine, seed
        # Drawn by grain, which keeps no list of all items.
        self._order = grain.MapDataset.range(len(items)).shuffle(seed=seed % 2**32).repeat()
        self._windows = -(-len(items) // WINDOW)  # Windows of an epoch.
        self.set_state({"window": 0, "row": 0})

    def __next__(self) -> Row:
        rows = [self._items.row(items) for at, items in enumerate(self._next_rows()) if at in self._mine]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def get_state(self) -> dict[str, int]:
        """Return the position: the number of windows used up, and the number of rows used up in the current window."""
        return {"window": self._window, "row": self._row}

    def set_state(self, state: dict[str, int]) -> None:
        """Set the position."""
        self._window, self._row = state["window"], state["row"]
        self._rows: list[np.ndarray] | None = None

    def _next_rows(self) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        while len(found) < self._batch:
            if self._rows is None:
                self._rows = self._pack(self._window)
            new = self._rows[self._row : self._row + self._batch - len(found)]
            found, self._row = found + new, self._row + len(new)
            if self._row == len(self._rows):
                self.set_state({"window": self._window + 1, "row": 0})
        return found

    def _pack(self, window: int) -> list[np.ndarray]:
        """Shuffle and pack the items of a window; return the items of each row."""
        epoch, at = divmod(window, self._windows)
        begin, end = at * WINDOW, min((at + 1) * WINDOW, len(self._items))
        chosen = np.array([self._order[epoch * len(self._items) + index] for index in range(begin, end)])
        rows = first_fit(self._items.sizes(chosen), self._items.rooms)
        order = np.random.default_rng([self._seed, window]).permutation(len(rows))
        return [chosen[rows[row]] for row in order]


def _in_order(items: Items) -> Iterator[list[np.ndarray]]:
    """Yield a list of rows for each window of items, in order; each row is an array of item indices."""
    for begin in range(0, len(items), WINDOW):
        window = np.arange(begin, min(begin + WINDOW, len(items)))
        yield [window[row] for row in first_fit(items.sizes(window), items.rooms)]
