"""One search among given options for the cheapest picks within a limit of bytes, by a Lagrange multiplier.

The multiplier, called the rate, is the price of a byte in seconds. For every rate ≥ 0

    min (seconds + rate · (bytes - limit))  ≤  min {seconds : bytes ≤ limit}.

Picks are one option for each choice. The rate for which the left side is greatest is found by cutting planes. As a
function of the rate, the cost of any picks is a line. Of the known picks, some hold more than the limit and some hold
less. The next rate to try is the one where the line of picks that hold more crosses the line of picks that hold less.
By the same bound, an option is dropped if all picks with this option cost more than the best known picks. The gap that
remains between the bound and the best picks is closed by `gspmd.search.branching`.

Source: M. L. Fisher, The Lagrangian relaxation method for solving integer programming problems, Management Science 27
(1981).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from gspmd.search.answer import Answer, NothingFits
from gspmd.search.branching import Branching
from gspmd.search.buckets import Bucket, Messages
from gspmd.search.tables import Tables

ROUNDING = 1e-12
"""The relative difference up to which costs count as equal, because they may be added up in different orders."""
RATES = 60
"""The maximum number of rates that are tried. Five to ten are usual. A lower maximum would leave more to branching."""
FEW = 50
"""Number of options per choice among which good picks are looked for first."""
NEAR = 1e-4
"""A rate is good enough if its bound is within this fraction of the greatest possible bound. A further rate would take
longer than branching.
"""


class _Stopped(Exception):
    """Raised to end a search that was asked to stop."""


class BoundedSearch:
    """One search, with the best picks and the best lower bound so far.

    Args:
        tables: The tables of the allowed options.
        buckets: The buckets of the problem, from `eliminate`.
        stop: A function that is called often, and returns whether to end the search with the best picks so far.
        keep: A function that is called with every answer whose picks or bound are better than those of all answers
            before.
        rate: The first rate to try, in seconds per byte, such as the rate that a similar search found.
        outside: A lower bound on the seconds of those allowed picks that contain an option which the tables lack;
            infinite if there are no such picks.
        tolerance: The fraction of the seconds by which picks may be slower than the cheapest.

    Attributes:
        rate: The rate that gives the greatest lower bound so far; the argument `rate` until one is found.
        enough: A value above which the lower bound need not be raised.
    """

    def __init__(
        self,
        tables: Tables,
        buckets: Sequence[Bucket],
        stop: Callable[[], bool],
        keep: Callable[[Answer], None],
        rate: float = 0.0,
        outside: float = math.inf,
        tolerance: float = 0.0,
    ):
        self.tolerance = tolerance
        self.tables = tables
        self.buckets = buckets
        self.stop = stop
        self.keep = keep
        self.rate = rate
        self.outside = outside
        self.problem = tables.problem
        self.limit = math.inf if self.problem.limit is None else self.problem.limit
        self.best: Answer | None = None
        self.bound = -math.inf
        self.enough = math.inf
        self._gap = math.inf

    def answer(self) -> Answer:
        """Return the cheapest picks that fit, or the best picks so far if `stop` ended the search.

        Raises:
            NothingFits: No picks fit.
        """
        try:
            self._search()
        except _Stopped:
            self.keep(known := self._known())
            return known
        self.bound = max(self.bound, self.seconds - self.tolerance * abs(self.seconds))
        return replace(self._known(), complete=True)

    def at_least(self, enough: float) -> float:
        """Return a lower bound on the seconds of picks that fit: the greatest bound that any rate gives.

        No further rates are tried once the bound is above `enough`. The bound is infinite if nothing fits.
        """
        self.enough = enough
        if all(map(len, self.tables.kept)) and self.tables.least_bytes() > self._ceiling():
            return math.inf
        try:
            self._relax()
        except NothingFits:
            return math.inf
        return self.bound

    def _search(self) -> None:
        if not all(len(kept) for kept in self.tables.kept):
            raise NothingFits(None, self.problem.limit)
        self._narrow()
        if self.best is not None and self.rate:
            # This leaves few options. A narrow search that was stopped has proved nothing about the other options.
            self._try(self.rate)
        held = self._relax()
        # A limit within the rounding of sums is decided leaf by leaf.
        if held is not None and not self._proved():
            self._branch()
        if self.best is None:
            assert held is not None
            raise NothingFits(self._answer(held.trace()), self.limit)

    def _relax(self) -> Messages | None:
        """Raise the lower bound to the greatest that any rate gives.

        Returns:
            The messages for which only bytes count, if a gap may remain between the bound and the best picks; otherwise
            None.

        Raises:
            NothingFits: No picks are allowed, or all of them hold more than the limit.
        """
        if not all(len(kept) for kept in self.tables.kept):
            raise NothingFits(None, self.problem.limit)
        free = Messages(self.tables, self.buckets, 0.0)
        if math.isinf(free.total()):
            raise NothingFits(None, self.problem.limit)
        self.bound = max(self.bound, free.total())
        large = free.trace()
        if self._offer(large) or self._proved():
            return None
        held = Messages(self.tables, self.buckets, None)
        small = held.trace()
        if self._offer(small):
            self._cut(self._line(large), self._line(small))
        elif self.best is None and held.total() > self._ceiling():
            raise NothingFits(self._answer(small), self.limit)
        return held

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Seconds of the best picks so far; infinite if there are none."""
        return math.inf if self.best is None else self.best.seconds

    def _line(self, picks: list[int]) -> tuple[float, float]:
        """Return the seconds and the bytes of picks.

        The cost of the picks, as a function of the rate, is a line with these coefficients.
        """
        return self.tables.seconds_of(picks), self.tables.bytes_of(picks)

    def _answer(self, picks: list[int]) -> Answer:
        return Answer(self.tables.named(picks), *self._line(picks), -math.inf, False)

    def _known(self) -> Answer:
        """Return the best picks with the bound proved so far."""
        assert self.best is not None
        return replace(self.best, bound=min(self.bound, self.outside, self.seconds), complete=False)

    def _offer(self, picks: list[int]) -> bool:
        """Keep picks if they fit and are the best so far; return whether they fit."""
        seconds, held = self._line(picks)
        if held <= self.limit and seconds < self.seconds:
            self.best = self._answer(picks)
            self.keep(self._known())
        return held <= self.limit

    def _ceiling(self) -> float:
        """Return the limit plus the rounding error that a sum of bytes may have, whatever the order of its terms."""
        return self.limit + ROUNDING * abs(self.limit)

    def _slack(self) -> float:
        """Return the seconds by which picks must beat the best known picks to be searched for.

        This margin is the rounding error plus the tolerance.
        """
        rounding = ROUNDING * (abs(self.seconds) + (self.rate * abs(self.limit) if self.rate else 0.0))
        return rounding + (self.tolerance * abs(self.seconds) if self.best else 0.0)

    def _proved(self) -> bool:
        known = self.best is not None and self.bound >= self.seconds - self._slack()
        return known or self.bound >= self.enough

    # -- the limit -----------------------------------------------------------------------------------------------------

    def _narrow(self) -> None:
        """Find initial picks and their rate among few options.

        Only choices on which no bytes depend are reduced to a few options.
        """
        holding = {choice for of, held in zip(self.tables.of, self.tables.bytes) if held is not None for choice in of}
        many = [choice not in holding and len(kept) > 2 * FEW for choice, kept in enumerate(self.tables.kept)]
        if math.isinf(self.limit) or not any(many):
            return
        masks = [
            np.argsort(np.argsort(costs, kind="stable")) < (FEW if few else len(costs))
            for costs, few in zip(self.tables.apart(), many)
        ]
        first = BoundedSearch(
            self.tables.keep(masks), self.buckets, self.stop, self.keep, self.rate, -math.inf, self.tolerance
        )
        with suppress(NothingFits):
            self.best = first.answer()
            self.rate = first.rate

    def _cut(self, large: tuple[float, float], small: tuple[float, float]) -> None:
        """Approximate the rate with the greatest bound.

        The search starts from two lines, as `_line` returns them: `large` of picks that hold more than the limit, and
        `small` of picks that fit.
        """
        if self.rate:
            line = self._try(self.rate)
            large, small = (large, line) if line[1] <= self.limit else (line, small)
        for _ in range(RATES):
            if self._proved():
                return
            self._poll()
            rate = max(0.0, (small[0] - large[0]) / (large[1] - small[1]))
            crossing = large[0] + rate * (large[1] - self.limit)
            line = self._try(rate)
            # No rate has a bound above the crossing of the lines.
            if self.bound >= crossing - NEAR * abs(crossing) or line in (large, small):
                return
            large, small = (large, line) if line[1] <= self.limit else (line, small)

    def _try(self, rate: float) -> tuple[float, float]:
        """Compute the bound at a rate, and return the seconds and bytes of the picks that are cheapest at this rate.

        These picks are kept if they fit and are the best so far.
        """
        messages = Messages(self.tables, self.buckets, rate)
        picks = messages.trace()
        line = self._line(picks)
        self._offer(picks)
        bound = messages.total() - rate * self.limit
        if bound > self.bound:
            self.bound, self.rate = bound, rate
            self.keep(self._known())
        # Not after every rate, since it takes longer than the messages.
        if not self._proved() and self.seconds - bound < self._gap / 2:
            self._gap = self.seconds - bound
            self._drop(messages, rate)
        return line

    def _drop(self, messages: Messages, rate: float) -> None:
        """Drop each option with which all picks cost more than the best known picks."""
        most = self.seconds + rate * self.limit
        most += 10 * ROUNDING * (abs(most) + abs(self.seconds))
        self.tables = self.tables.keep([costs <= most for costs in messages.by_option()])

    def _branch(self) -> None:
        """Search depth first through the picks that may fit and beat the best ones; bounds rule out all other picks."""

        def ceilings() -> tuple[float, float, float]:
            seconds = self.seconds - self._slack() if self.best else math.inf
            return seconds + self.rate * self.limit, seconds, self._ceiling()

        if self.best is not None:
            self._drop(Messages(self.tables, self.buckets, self.rate), self.rate)
        measures = [Messages(self.tables, self.buckets, rate) for rate in (self.rate, 0.0, None)]
        for picks in Branching(measures, ceilings, self._poll).leaves():
            self._offer(picks)

    def _poll(self) -> None:
        if self.best is not None and self.stop():
            raise _Stopped
