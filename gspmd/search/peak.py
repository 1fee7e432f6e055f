"""The cheapest picks within a limit on bytes that holds at every moment of a program.

A `Problem` adds up bytes over its choices, and so it counts the bytes of one moment. But different layouts hold the
most bytes at different moments. Each moment gives a relaxation: a problem that rules out only layouts which exceed the
limit at this moment. If the answer of one relaxation stays within the limit at every moment, it is the cheapest layout
of all. If it does not, its bound still holds, and the next relaxation counts the moment at which it holds the most.

Bytes of several moments are counted as a weighted average. No average is above the largest of its terms, so this is a
relaxation, too. If no average leads to an answer that fits, the limit of the last average is lowered. An answer that
fits is then not proved to be the cheapest.

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
LOWERED = 9
"""The maximum number of lower limits that are then tried."""
HALVINGS = 6
"""The maximum number of limits that are tried to find picks with a small peak."""
NEAR = 1e-3
"""A peak that is above its lower bound by less than this fraction is small enough."""

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
        stop: a function that is called often, as in `Search`. If it returns true, the relaxation that is being solved
            ends with the best picks so far. If it still does after `start`, the whole search ends.
        start: a function that is called before each relaxation is solved. It may reset `stop`.
        tolerance: as in `Search`.

    Example:
        >>> from gspmd.search import Choice, Term
        >>> choice = Choice("weights", ("whole", "sharded over x", "sharded over x and y"))
        >>> held = {(0,): [4.0, 4.0, 4.0], (1,): [9.0, 6.0, 3.0]}
        >>> def counted(shares):
        ...     size = sum(share * np.array(held[moment]) for moment, share in shares.items())
        ...     return Problem([choice], [Term("time", ("weights",), np.array([1.0, 2.0, 3.0]), size)])
        >>> def peak(picks):
        ...     return max(((at, sizes[picks["weights"]]) for at, sizes in held.items()), key=lambda each: each[1])
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
        self.limit = limit
        self._counted, self._peak, self._stop, self._start, self._tolerance = counted, peak, stop, start, tolerance
        self._first = {first: 1.0}
        # The average that led to the cheapest picks of all.
        self._led: Shares = self._first
        self._searches: dict[tuple, Search] = {}
        # Of the last question: the search that is under way, whether its limit is lowered, the best picks that fit, and
        # the bound proved so far.
        self._current: Search | None = None
        self._is_lowered = False
        self._fitting: Answer | None = None
        self._bound = -inf

    def best(
        self, fixed: Mapping[str, int] | None = None, without: Mapping[str, Collection[int]] | None = None
    ) -> Answer:
        """Find the cheapest picks that fit; the arguments are those of `Search.best`.

        Raises:
            NothingFits: no such picks fit or, if its `proved` is false, none were found. Without any allowed picks its
                `nearest` is None.
        """
        try:
            return self.find(fixed, without) or self.small(fixed, without)
        except NothingFits as fault:
            if fault.nearest is None or not fault.proved:
                raise
            raise NothingFits(self.least(fixed, without), self.limit) from None

    def find(
        self, fixed: Mapping[str, int] | None = None, without: Mapping[str, Collection[int]] | None = None
    ) -> Answer | None:
        """Find picks as `best` does, or return None if neither relaxations nor lower limits led to picks that fit.

        Raises:
            NothingFits: no such picks fit.
        """
        answer, shares = self._ask(lambda search: search.best(fixed, without), self._first)
        if answer and not (fixed or without):
            self._led = shares
        return answer

    def small(
        self, fixed: Mapping[str, int] | None = None, without: Mapping[str, Collection[int]] | None = None
    ) -> Answer:
        """Return picks with a small peak as the answer of the last question, for which `find` found no picks.

        Raises:
            NothingFits: they do not fit either; `proved` is false, and `nearest.bound` is a lower bound on the seconds
                of picks that fit.
        """
        bound = self._bound
        smallest = self.least(fixed, without)
        smallest = replace(smallest, bound=min(bound, smallest.seconds))
        if not self._fits(smallest.bytes):
            # The picks do not fit and may be faster than any that do, so the bound is not cut to their seconds.
            raise NothingFits(replace(smallest, bound=bound), self.limit, proved=False)
        self._fitting = replace(smallest, complete=False)
        return self._fitting

    def next_best(
        self, answer: Answer, name: str, without: Mapping[str, Collection[int]] | None = None
    ) -> Answer | None:
        """Find the cheapest picks in which one choice has a different option, as `Search.next_best` does.

        The result is None if no such picks that fit are found. The search begins with the average that led to the last
        answer of `best` without restrictions.
        """

        def ask(search: Search) -> Answer:
            other = search.next_best(answer, name, without=without)
            if other is None:
                raise NothingFits(answer, self.limit)
            return other

        excluded = dict(without or {})
        excluded[name] = {*excluded.get(name, ()), answer.picks[name]}
        try:
            other, _ = self._ask(ask, self._led)
            return other or self.small(None, excluded)
        except NothingFits:
            return None

    def least(
        self, fixed: Mapping[str, int] | None = None, without: Mapping[str, Collection[int]] | None = None
    ) -> Answer:
        """Find picks with a small peak; the arguments are those of `Search.best`.

        The answer is `complete` if it is proved that no picks have a smaller peak. Its `bound` is not proved.

        Averages over moments are minimized first. Then picks are searched within lower and lower limits, which are
        bisected between the greatest minimum of an average, which no peak is below, and the smallest peak so far.

        Raises:
            NothingFits: no such picks are allowed.
        """
        shares, found, floor = self._first, None, -inf
        for number in range(AVERAGES):
            near = self._fewest(shares, fixed, without)
            floor = max(floor, near.bytes)
            moment, peak = self._peak(near.picks)
            if found is None or peak < found.bytes:
                found = replace(near, bytes=peak, bound=-inf, complete=False)
            if found.bytes <= floor * (1 + NEAR):
                break
            shares = _toward(shares, moment, number)
        assert found is not None
        proved = floor
        (first,) = self._first
        for _ in range(HALVINGS):
            self._start()
            if found.bytes <= floor * (1 + NEAR) or self._stop():
                break
            middle = (found.bytes + floor) / 2
            # Any picks within the limit will do, however slow.
            within = PeakSearch(self._counted, self._peak, first, middle, self._stop, self._start, tolerance=inf)
            try:
                other = within.find(fixed, without)
            except NothingFits:
                other = None
            if other is None:
                floor = middle
            else:
                found = replace(other, bound=-inf, complete=False)
        return replace(found, complete=found.bytes <= proved)

    def floor(self) -> float:
        """Return a lower bound on the bytes of all allowed picks: the fewest that any hold at the first moment.

        Raises:
            NothingFits: no picks are allowed.
        """
        return self._fewest(self._first, None, None).bytes

    def bounds(self) -> dict[str, np.ndarray]:
        """Return lower bounds on seconds for every option, as `Search.bounds` does."""
        return self._search(self._led, self.limit).bounds()

    @property
    def is_asked(self) -> bool:
        """Whether a question was asked, even if it was interrupted."""
        return self._current is not None

    @property
    def so_far(self) -> Answer | None:
        """The best picks that fit and are known for the last question, also after an interrupt."""
        found, under_way, bound = self._fitting, self._current and self._current.so_far, self._bound
        if under_way and not self._is_lowered:
            bound = max(bound, under_way.bound)
        if under_way and (found is None or under_way.seconds < found.seconds):
            _, peak = self._peak(under_way.picks)
            found = replace(under_way, bytes=peak) if self._fits(peak) else found
        return found and replace(found, bound=min(bound, found.seconds), complete=False)

    # -- one question --------------------------------------------------------------------------------------------------

    def _ask(self, ask: Callable[[Search], Answer], shares: Shares) -> tuple[Answer | None, Shares]:
        """Ask one relaxation after the other until an answer fits, and then with lower limits.

        Args:
            ask: a function that asks a search the question.
            shares: the average of the first relaxation.

        Returns:
            The answer, which is None if no answer that fits was found, and the average of the last relaxation.

        Raises:
            NothingFits: no such picks fit, which a relaxation has proved.
        """
        self._current, self._is_lowered, self._fitting, self._bound = None, False, None, -inf
        step, over = int(shares is not self._first), 0.0
        for number in range(AVERAGES):
            self._start()
            if number and self._stop():
                return None, shares
            self._current = self._search(shares, self.limit)
            answer = ask(self._current)
            self._bound = max(self._bound, answer.bound)
            moment, peak = self._peak(answer.picks)
            if self._fits(peak):
                self._fitting = replace(answer, bytes=peak, bound=min(self._bound, answer.seconds))
                return self._fitting, shares
            over = peak - self._most
            if number < AVERAGES - 1:
                shares = _toward(shares, moment, step + number)
        self._lower(ask, shares, over)
        return self._fitting, shares

    def _lower(self, ask: Callable[[Search], Answer], shares: Shares, over: float) -> None:
        """Search with lower limits, and keep the cheapest answer that fits in `_fitting`.

        Limits are lowered by twice as much each time, beginning with 1/256, until an answer fits or the limit is too
        low for any. Then they are bisected, since a higher limit allows cheaper answers.

        Args:
            ask, shares: as in `_ask`; the average is that of the last relaxation.
            over: the bytes by which its answer exceeds the limit.
        """
        self._is_lowered, high, low = True, self._most, -inf
        over = max(over, self._most / 256)
        for _ in range(LOWERED):
            self._start()
            if self._stop():
                break
            limit = (low + high) / 2 if low > -inf else high - over
            over *= 2
            self._current = self._search(shares, limit)
            try:
                answer = ask(self._current)
            except NothingFits:
                low = limit
                continue
            _, peak = self._peak(answer.picks)
            if not self._fits(peak):
                high = limit
                continue
            low = limit
            if self._fitting is None or answer.seconds < self._fitting.seconds:
                bound = min(self._bound, answer.seconds)
                self._fitting = replace(answer, bytes=peak, bound=bound, complete=False)

    def _fewest(
        self, shares: Shares, fixed: Mapping[str, int] | None, without: Mapping[str, Collection[int]] | None
    ) -> Answer:
        """Return the picks with the smallest average over moments."""
        try:  # No picks hold less than nothing, and the error has those that hold the fewest bytes.
            return self._search(shares, -1.0).best(fixed, without)
        except NothingFits as fault:
            if fault.nearest is None:
                raise
            return fault.nearest

    @property
    def _most(self) -> float:
        return inf if self.limit is None else self.limit

    def _fits(self, held: float) -> bool:
        return held <= self._most

    def _search(self, shares: Shares, limit: float | None) -> Search:
        key = frozenset(shares.items()), limit
        if key in self._searches:
            return self._searches[key]
        counted = self._counted(shares)
        search = Search(Problem(counted.choices, counted.terms, limit), self._stop, self._tolerance)
        if limit in (self.limit, -1.0):  # A lower limit depends on the question, and hardly occurs again.
            self._searches[key] = search
        return search


def _toward(shares: Shares, moment: Moment, number: int) -> Shares:
    """Return an average with more weight on one moment: all of it in step 0, then half of it, a quarter and so on."""
    step = 0.5**number
    moved = {each: (1 - step) * share for each, share in shares.items() if step < 1}
    return moved | {moment: moved.get(moment, 0.0) + step}
