"""The cheapest picks within a limit on bytes that holds at every moment of a program.

A `Problem` adds up bytes over its choices, and so it counts the bytes of one moment. But different layouts hold the
most bytes at different moments. Each moment gives a relaxation: a problem that rules out only layouts which exceed the
limit at this moment. If the answer of one relaxation stays within the limit at every moment, it is the cheapest layout
of all. If it does not, its bound still holds, and the next relaxation counts the moment at which it holds the most.

Bytes of several moments are counted as a weighted average. No average is above the largest of its terms, so this is a
relaxation, too. If no average leads to an answer that fits, the limit of the averages is lowered; then the answer fits,
but is not proved to be the cheapest.

Source: F. Glover, Surrogate constraint duality in mathematical programming, Operations Research 23 (1975), for the
averages of constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import inf

import numpy as np

from gspmd.search.answer import Answer, NothingFits
from gspmd.search.held import Moment
from gspmd.search.problem import Problem
from gspmd.search.solver import Search

AVERAGES = 5
"""The maximum number of relaxations that are solved for one question. In training steps of public models one or two are
usual, and more near the limit, where the peaks of two neighboring operations compete.
"""
LOWERED = 8
"""The maximum number of lower limits that are then tried. Each lowers the limit twice as much as the one before."""

Shares = Mapping[Moment, float]
"""The weight of each moment in an average of bytes. The weights add up to one."""


class PeakSearch:
    """A search for the cheapest picks that hold at most `limit` bytes at every moment.

    The bytes of all answers are those at the moment at which their picks hold the most.

    Args:
        counted: a function that returns the problem, without a limit, whose bytes are an average over moments.
        peak: a function from picks to the moment at which they hold the most bytes, and these bytes.
        first: the moment that is counted first.
        limit: the bytes that picks may hold; None for no limit.
        stop: a function that is called often, as in `Search`. It ends the search for one relaxation.
        start: a function that is called before each relaxation is solved.
        tolerance: as in `Search`.

    Example:
        >>> from gspmd.search import Choice, Term
        >>> choice = Choice("weights", ("whole", "sharded over x", "sharded over x and y"))
        >>> held = {(0,): [[4.0, 4.0, 4.0]], (1,): [[9.0, 6.0, 3.0]]}
        >>> def counted(shares):
        ...     size = sum(share * np.array(held[moment][0]) for moment, share in shares.items())
        ...     return Problem([choice], [Term("time", ("weights",), np.array([1.0, 2.0, 3.0]), size)])
        >>> def peak(picks):
        ...     return max(((at, size[0][picks["weights"]]) for at, size in held.items()), key=lambda each: each[1])
        >>> PeakSearch(counted, peak, (0,), limit=6.0).best()
        Answer(picks={'weights': 1}, seconds=2.0, bytes=6.0, bound=2.0, complete=True)
    """

    def __init__(
        self,
        counted: Callable[[Shares], Problem],
        peak: Callable[[Mapping[str, int]], tuple[Moment, float]],
        first: Moment,
        limit: float | None = None,
        stop: Callable[[], bool] = lambda: False,
        start: Callable[[], None] = lambda: None,
        tolerance: float = 0.0,
    ):
        self._counted, self._peak, self._stop, self._start = counted, peak, stop, start
        self.limit, self._most, self._tolerance = limit, inf if limit is None else limit, tolerance
        self._first = {first: 1.0}
        # The average that led to the cheapest picks of all: questions with fewer options begin with it.
        self._shares: Shares = self._first
        self._searches: dict[tuple, Search] = {}

    def best(
        self, fixed: Mapping[str, int] | None = None, without: Mapping[str, Collection[int]] | None = None
    ) -> Answer:
        """Find the cheapest picks that fit; the arguments are those of `Search.best`.

        Raises:
            NothingFits: no such picks are known to fit. If its `nearest` is None, no such picks are allowed.
        """
        if not (fixed or without):
            self._shares = self._first
        answer, bound, shares = self._ask(lambda search: search.best(fixed, without))
        if not (fixed or without):
            self._shares = shares
        if answer is None:
            answer = replace(self.least(fixed, without), bound=bound)
            if answer.bytes > self._most:
                raise NothingFits(answer, self.limit)
        return answer

    def next_best(
        self, answer: Answer, name: str, without: Mapping[str, Collection[int]] | None = None
    ) -> Answer | None:
        """Find the cheapest picks in which one choice has a different option, as `Search.next_best` does.

        The result is None if no such picks that fit are found.
        """
        other, *_ = self._ask(lambda search: search.next_best(answer, name, without=without))
        return other

    def least(
        self, fixed: Mapping[str, int] | None = None, without: Mapping[str, Collection[int]] | None = None
    ) -> Answer:
        """Find picks whose peak is as small as the averages of a few rounds show; `bound` is not proved.

        Raises:
            NothingFits: no such picks are allowed.
        """
        shares, found = self._first, None
        for number in range(AVERAGES):
            try:  # No picks hold less than nothing, and the error has those that hold the fewest bytes.
                near = self._search(shares, -1.0).best(fixed, without)
            except NothingFits as fault:
                if fault.nearest is None:
                    raise
                near = fault.nearest
            moment, peak = self._peak(near.picks)
            if found is None or peak < found.bytes:
                found = replace(near, bytes=peak, bound=-inf, complete=False)
            if peak <= near.bytes * (1 + 1e-12):  # Then no picks have a smaller peak.
                break
            shares = _toward(shares, moment, number)
        assert found is not None
        return found

    def bounds(self) -> dict[str, np.ndarray]:
        """Return lower bounds on seconds for every option, as `Search.bounds` does."""
        return self._search(self._shares, self.limit).bounds()

    @property
    def is_asked(self) -> bool:
        """Whether a question was asked, even if it was interrupted."""
        return bool(self._searches)

    @property
    def so_far(self) -> Answer | None:
        """The best picks that fit among those that the searches found for their last questions."""
        known = [search.so_far for search in self._searches.values() if search.so_far]
        fitting = [replace(each, bytes=held) for each in known if (held := self._peak(each.picks)[1]) <= self._most]
        return min(fitting, key=lambda each: each.seconds, default=None)

    def _ask(self, ask: Callable[[Search], Answer | None]) -> tuple[Answer | None, float, Shares]:
        """Ask a question of one relaxation after the other until an answer fits, and then with lower limits.

        Returns:
            The answer, which is None if no answer that fits was found; the bound that the relaxations prove; and the
            average of the last relaxation.
        """
        shares, bound, limit, over = self._shares, -inf, self.limit, 0.0
        for number in range(AVERAGES + LOWERED):
            lowered = number - AVERAGES
            if lowered >= 0 and limit is not None:
                limit -= 2**lowered * over
            self._start()
            try:
                answer = ask(self._search(shares, limit))
            except NothingFits as fault:
                if fault.nearest is None:
                    raise
                answer = None
            if answer is None:
                break
            if lowered < 0:
                bound = max(bound, answer.bound)
            moment, peak = self._peak(answer.picks)
            if peak <= self._most:
                bound, whole = min(bound, answer.seconds), answer.complete and lowered < 0
                return replace(answer, bytes=peak, bound=bound, complete=whole), bound, shares
            if lowered < 0:
                shares = _toward(shares, moment, number)
            over = peak - self._most
        return None, bound, shares

    def _search(self, shares: Shares, limit: float | None) -> Search:
        key = frozenset(shares.items()), limit
        if key not in self._searches:
            counted = self._counted(shares)
            limited = Problem(counted.choices, counted.terms, limit)
            self._searches[key] = Search(limited, self._stop, self._tolerance)
        return self._searches[key]


def _toward(shares: Shares, moment: Moment, number: int) -> Shares:
    """Return an average with more weight on one moment: all of it in round 0, and in each round half as much more."""
    step = 0.5**number
    moved = {each: (1 - step) * share for each, share in shares.items() if step < 1}
    return moved | {moment: moved.get(moment, 0.0) + step}
