"""A mesh, the problem on it, and its answer: bounded without its limit of memory, and solved when it may win."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod

from gspmd.display.units import mesh_text
from gspmd.search import Answer, NothingFits, Problem, Search
from gspmd.search.answers.options import Options
from gspmd.search.phase import PhaseProblem

NEAR = 5e-4
"""The fraction of a step's seconds by which an answer may be dearer than the cheapest, if it holds less."""
TOLERANCE = 1e-4
"""The fraction below which layouts at the limit of memory are not told apart."""
MOST, LESS = 40_000, 2_000
"""Times that the search for an answer, and for each of the others beside it, may ask whether to stop: counted, so
that the same question always has the same answer."""


class StepBudget:
    """Ends a search that asks too often."""

    def __init__(self) -> None:
        self.left = MOST

    def __call__(self) -> bool:
        """Return whether to stop."""
        self.left -= 1
        return self.left < 0


TIE = 1e-9
"""The fraction of a step's seconds by which two of them cost the same: sums are taken in other orders."""
HALVINGS = 6
"""Times that the bytes between the least and those of the cheapest are halved to find it."""


GAIN = 0.02
"""The fraction of a step's seconds that several microbatches have to gain over one: compiled steps lost more than the
plan had them gain, to what is neither product nor collective, of which a tenth is priced."""


def to_beat(seconds: float, microbatches: int) -> float:
    """Seconds below which a step in several microbatches is better than one that is known."""
    return seconds * (1 - GAIN) if microbatches == 1 else seconds


class Candidate:
    """A mesh, the problem on it, and its answer.

    Args:
        phase: the problem.
        limit: bytes that a device may hold.

    Attributes:
        free: the answer if memory had no end, whose seconds are a bound of those with a limit.
        problem, search: those with the limit.
        answer: what the search found; None before, or where nothing fits.
    """

    def __init__(self, phase: PhaseProblem, limit: float):
        self.phase, self.limit = phase, limit
        self.unlimited = phase.problem(None)
        self.problem = self.within(limit)
        self.budget = StepBudget()
        self.search = Search(self.problem, self.budget, TOLERANCE)
        self.free = Search(self.unlimited).best()
        self.answer: Answer | None = None

    def within(self, limit: float) -> Problem:
        """The problem with another limit."""
        return Problem(self.unlimited.choices, self.unlimited.terms, limit)

    def solve(self) -> Answer:
        """The answer within the limit: of those as cheap as the cheapest, to within `NEAR`, one that holds little.

        Raises:
            NothingFits: there is none.
        """
        if self.answer is None:
            self.budget.left = MOST
            cheapest = self.free if self.free.bytes <= self.limit else self.search.best()
            self.answer = self._holding_less(cheapest)
        return self.answer

    def _holding_less(self, cheapest: Answer) -> Answer:
        """Bisect the limit of memory for the least under which an answer is as cheap."""
        found, least = cheapest, self.least.bytes
        for _ in range(HALVINGS if cheapest.complete else 0):
            if found.bytes <= least * (1 + NEAR):
                break
            middle = (found.bytes + least) / 2
            try:
                self.budget.left = LESS
                other = Search(self.within(middle), self.budget, TOLERANCE).best()
            except NothingFits:
                least = middle
                continue
            if other.seconds <= cheapest.seconds * (1 + NEAR):
                found = replace(other, bound=cheapest.bound)
            else:
                least = middle
        return found

    @property
    def so_far(self) -> Answer | None:
        """The best answer that is known to fit, also after an interrupt."""
        return self.answer or (self.free if self.free.bytes <= self.limit else self.search.so_far)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of every dimension, in one microbatch."""
        return self.phase.case.sizes

    @cached_property
    def options(self) -> Options:
        """The options of its choices, as text."""
        return Options(self.phase)

    def best(self, without: Mapping[str, Collection[int]]) -> Answer:
        """The cheapest that fits without some options; the best that was found soon is not `complete`.

        Raises:
            NothingFits: there is none.
        """
        self.budget.left = MOST
        return self.search.best(without=without)

    def soon(
        self, without: Mapping[str, Collection[int]] | None = None, fixed: Mapping[str, int] | None = None
    ) -> Answer:
        """The same, and with some options, of a search that is given up sooner.

        Raises:
            NothingFits: nothing was found.
        """
        self.budget.left = LESS
        return self.search.best(fixed, without)

    def next_best(self, answer: Answer, name: str) -> Answer | None:
        """The cheapest that fits in which one choice is another than an answer's, by more than names of axes.

        Where it takes long to find, the best that was found soon, which is not `complete`.
        """
        self.budget.left = LESS
        return self.search.next_best(answer, name, without={name: self.options.alike(name, answer.picks[name])})

    @cached_property
    def least(self) -> Answer:
        """The layout that holds the fewest bytes."""
        try:
            return Search(self.within(-1.0)).best()
        except NothingFits as fault:
            return fault.nearest or self.free

    @property
    def named(self) -> str:
        """The mesh, `x=4,y=8`."""
        return mesh_text(self.phase.case.mesh)

    @property
    def remat(self) -> str:
        """The choice of remat, as of `Case`."""
        return self.phase.case.remat

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.phase.case.trains

    @property
    def microbatches(self) -> int:
        """Parts of the batch, one after the other; 1 where nothing is trained."""
        return self.phase.case.microbatches

    @property
    def in_microbatches(self) -> str:
        """`in 4 microbatches`; empty where the batch is not cut."""
        return f"in {self.microbatches} microbatches" if self.microbatches > 1 else ""

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return prod(self.phase.case.mesh.values())

    @property
    def axes(self) -> int:
        """Number of mesh axes."""
        return len(self.phase.case.mesh)
