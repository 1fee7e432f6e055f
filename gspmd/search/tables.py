"""The tables of a problem as float64 arrays, for all options or for a subset of each choice's options."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gspmd.search.problem import Problem

SMALL = 2**16
"""The largest number of entries of a table whose aligned form is kept for further questions."""


@dataclass(frozen=True)
class Tables:
    """The tables that a search adds up.

    Choices and terms are numbered. Picks are indices among the options that are kept, not among all options.

    Attributes:
        problem: The problem to which the choices and terms belong.
        kept: For each choice, the allowed options, as ascending indices in the problem.
        of: For each term, the indices of the choices along the axes of its table.
        seconds, bytes: For each term, the table of its seconds, and the table of its bytes or None if it holds no
            bytes.
    """

    problem: Problem
    kept: list[np.ndarray]
    of: list[tuple[int, ...]]
    seconds: list[np.ndarray]
    bytes: list[np.ndarray | None]
    _aligned: dict[tuple[int, tuple[int, ...]], tuple[np.ndarray, np.ndarray | None, bool]] = field(
        default_factory=dict, repr=False
    )

    @classmethod
    def whole(cls, problem: Problem) -> "Tables":
        """Return the tables of all options of a problem."""
        numbers = {choice.name: number for number, choice in enumerate(problem.choices)}
        # Sorted by name, so that sums, and with them the answers, do not depend on the order in which terms were given.
        terms = sorted(problem.terms, key=lambda term: term.name)
        return cls(
            problem,
            [np.arange(len(choice.options)) for choice in problem.choices],
            [tuple(numbers[name] for name in term.of) for term in terms],
            [np.asarray(t.seconds, np.float64) for t in terms],
            [
                None if t.bytes is None else np.broadcast_to(np.asarray(t.bytes, np.float64), np.shape(t.seconds))
                for t in terms
            ],
        )

    def keep(self, masks: Sequence[np.ndarray]) -> "Tables":
        """Return the tables restricted to fewer options, given by a mask for each choice."""
        if all(mask.all() for mask in masks):
            return self
        places = [np.flatnonzero(mask) for mask in masks]
        indices = [_grid([places[choice] for choice in of]) for of in self.of]
        return Tables(
            self.problem,
            [kept[place] for kept, place in zip(self.kept, places)],
            self.of,
            [table[index] for table, index in zip(self.seconds, indices)],
            [None if table is None else table[index] for table, index in zip(self.bytes, indices)],
        )

    def aligned(self, number: int, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray | None, bool]:
        """Return a term's tables of seconds and of bytes with the given axes, and whether all its seconds are finite.

        The table of bytes is None if the term holds no bytes. Each table has the form that the function `aligned`
        returns.
        """
        if (number, axes) in self._aligned:
            return self._aligned[number, axes]
        of, seconds, held = self.of[number], self.seconds[number], self.bytes[number]
        sizes = None if held is None else aligned(held, of, axes)
        found = aligned(seconds, of, axes), sizes, bool(np.isfinite(seconds).all())
        if seconds.size <= SMALL:  # Large tables would take twice the memory, and their sums take longer than this.
            self._aligned[number, axes] = found
        return found

    def possible(self) -> list[np.ndarray]:
        """Return, for each choice, which options have finite seconds in all terms that depend on this choice alone."""
        result = [np.ones(len(kept), bool) for kept in self.kept]
        for of, table in zip(self.of, self.seconds):
            if len(of) == 1:
                result[of[0]] &= np.isfinite(table)
        return result

    def apart(self) -> list[np.ndarray]:
        """Return an estimate of the cost of each option of each choice.

        The estimate adds up, for all terms that depend on the choice, the least seconds that the term has with this
        option.
        """
        result = [np.zeros(len(kept)) for kept in self.kept]
        for of, table in zip(self.of, self.seconds):
            for axis, choice in enumerate(of):
                result[choice] += table.min(axis=tuple(other for other in range(len(of)) if other != axis))
        return result

    def least_bytes(self) -> float:
        """Return a lower bound on the bytes of any picks: the sum of each term's fewest bytes."""
        return math.fsum(float(table.min()) for table in self.bytes if table is not None)

    def seconds_of(self, picks: Sequence[int]) -> float:
        """Return the total seconds of picks."""
        return math.fsum(float(t[tuple([picks[c] for c in of])]) for t, of in zip(self.seconds, self.of))

    def bytes_of(self, picks: Sequence[int]) -> float:
        """Return the bytes that picks hold."""
        held = zip(self.bytes, self.of)
        return math.fsum(float(t[tuple([picks[c] for c in of])]) for t, of in held if t is not None)

    def named(self, picks: Sequence[int]) -> dict[str, int]:
        """Return picks as a mapping from the name of each choice to the index of its option in the problem."""
        return {c.name: int(kept[pick]) for c, kept, pick in zip(self.problem.choices, self.kept, picks)}


def aligned(table: np.ndarray, of: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """Return a table with one axis for each choice in `axes`; an axis has length 1 if its choice is not in `of`.

    The result is stored contiguously in this order of axes, for speed.
    """
    table = np.ascontiguousarray(table.transpose([of.index(choice) for choice in axes if choice in of]))
    sizes = iter(table.shape)
    return table.reshape([next(sizes) if choice in of else 1 for choice in axes])


def _grid(places: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return the index that selects all combinations of places, as `np.ix_` does, which is too slow here."""
    return tuple(place.reshape(-1, *[1] * after) for after, place in zip(reversed(range(len(places))), places))
