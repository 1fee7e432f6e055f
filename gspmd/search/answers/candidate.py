"""A candidate of a search: one mesh, the problem of the best layout on it, and the answer.

The problem is first solved without a limit on memory, which gives a lower bound. It is solved with the limit only if
this bound does not already rule the mesh out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Literal

import numpy as np

from gspmd.display.units import mesh_text
from gspmd.search import Answer, NothingFits
from gspmd.search.answers.options import Options
from gspmd.search.peak import PeakSearch
from gspmd.search.phase import PhaseProblem

NEAR = 5e-4
"""The fraction of a step's seconds by which an answer may be slower than the cheapest, if it holds fewer bytes."""
TOLERANCE = 1e-4
"""Layouts at the limit on memory count as equal if they differ by less than this fraction of a step's seconds."""
MOST, LESS = 40_000, 2_000
"""The maximum numbers of calls of the stop condition. `MOST` is for the search for an answer, and `LESS` for a search
for the best answer with a different option. Calls are counted instead of seconds, so that the same question always has
the same answer.
"""


class StepBudget:
    """A stop condition that becomes true after some number of calls.

    Attributes:
        most: the number of calls after each `start`.
        left: the number of calls that are left.
    """

    def __init__(self, most: int = MOST):
        self.most = self.left = most

    def start(self) -> None:
        """Begin to count anew."""
        self.left = self.most

    def __call__(self) -> bool:
        """Return whether to stop."""
        self.left -= 1
        return self.left < 0


TIE = 1e-9
"""The relative difference up to which two costs count as equal, because they may be added up in different orders."""
HALVINGS = 6
"""Number of bisections between the fewest possible bytes and the bytes of the cheapest answer."""


GAIN = 0.02
"""The fraction of a step's seconds that several microbatches must gain over one. In compiled steps, several
microbatches spend more time on work besides products and collectives, and only a tenth of this time is priced. Where
the planned gain in products and collectives was below this fraction, this time exceeded the gain.
"""


Outcome = Literal["solved", "not better", "nothing fits", "not solved"]
"""The end of the search on a mesh. Only with `solved` is there an answer. With `not better`, the mesh's lower bound is
no better than the best answer. With `nothing fits`, no layout fits. With `not solved`, the search has not come to its
end, for example because it was interrupted.
"""


def to_beat(seconds: float, microbatches: int) -> float:
    """Return the seconds that a step in several microbatches must stay below to be preferred to a known step.

    The arguments are the seconds and the number of microbatches of the known step.
    """
    return seconds * (1 - GAIN) if microbatches == 1 else seconds


class Candidate:
    """A mesh, the problem of the best layout on it, and the answer of that problem.

    Args:
        phase: the problem, which has the layouts of one phase of a model on this mesh, with their costs.
        limit: bytes that a device may hold.

    Attributes:
        free: the answer without a limit on memory.
        bound: a lower bound on the seconds of layouts within the limit, if there is no answer.
        unlimited, unlimited_search: the problem and the search without a limit.
        search: the search with the limit.
        answer: the answer found; None if there is none, for the reason in `outcome`.
        outcome: how the search on this mesh ended.
    """

    def __init__(self, phase: PhaseProblem, limit: float):
        self.phase, self.limit = phase, limit
        self.unlimited = phase.problem(None)
        self.budget = StepBudget()
        self.search = phase.search(limit, self.budget, self.budget.start, TOLERANCE)
        self.unlimited_search = phase.search()
        self.free = self.unlimited_search.best()
        self.bound = self.free.seconds
        self.answer: Answer | None = None
        self.outcome: Outcome = "not solved"

    def within(self, limit: float, most: int = MOST) -> PeakSearch:
        """Return a search with this limit on the bytes of a device at any moment, and with a budget of its own."""
        budget = StepBudget(most)
        return self.phase.search(limit, budget, budget.start, TOLERANCE)

    def solve(self) -> Answer:
        """Find a layout within the limit that is at most `NEAR` slower than the cheapest, and that holds few bytes.

        Raises:
            NothingFits: no layout fits within the limit, or none was found.
        """
        if self.answer is None:
            self.budget.most = MOST
            try:
                # Not `best`, which finds the smallest picks for its error, and that takes long.
                known = self.free if self.free.bytes <= self.limit else self.search.find()
                cheapest = known or self.search.small()
            except NothingFits as fault:
                if fault.proved:
                    self.outcome = "nothing fits"
                elif fault.nearest:
                    self.bound = max(self.bound, fault.nearest.bound)
                raise
            self.answer = self._holding_less(cheapest)
            self.outcome = "solved"
        return self.answer

    def _holding_less(self, cheapest: Answer) -> Answer:
        """Find by bisection the lowest memory limit at which some layout is almost as cheap; return this layout."""
        found, least = cheapest, self.search.floor()
        most, dear = cheapest.seconds * (1 + NEAR), dict[str, list[int]]()
        for _ in range(HALVINGS if cheapest.complete else 0):
            if found.bytes <= least * (1 + NEAR):
                break
            middle = (found.bytes + least) / 2
            dear = dear or self._above(most)
            try:
                other = self.within(middle, LESS).find(without=dear)
            except NothingFits:
                other = None
            if other and other.seconds <= most:
                found = replace(other, bound=cheapest.bound)
            else:
                least = middle
        return found

    def _above(self, seconds: float) -> dict[str, list[int]]:
        """Return, for each choice, the options with which all layouts cost more than `seconds`, whatever the limit."""
        bounds = self.unlimited_search.bounds()
        return {name: np.flatnonzero(costs > seconds * (1 + TIE)).tolist() for name, costs in bounds.items()}

    @property
    def so_far(self) -> Answer | None:
        """The best answer that is known to fit, also after an interrupt."""
        if self.answer or self.free.bytes <= self.limit:
            return self.answer or self.free
        if self.search.so_far or not self.search.is_asked:
            return self.search.so_far
        # What the interrupted search has found exceeds the limit at some moment that it had not yet counted.
        return self.least if self.least.bytes <= self.limit else None

    @property
    def fits(self) -> bool:
        """Whether some layout fits."""
        if self.outcome == "nothing fits":
            return False
        return self.so_far is not None or self.least.bytes <= self.limit

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of every dimension, in one microbatch."""
        return self.phase.case.sizes

    @cached_property
    def options(self) -> Options:
        """The lines of a layout that each option of each choice stands for."""
        return Options(self.phase)

    def best(self, without: Mapping[str, Collection[int]]) -> Answer:
        """Find the cheapest layout that fits and avoids some options; `complete` is false if the search was cut short.

        Raises:
            NothingFits: no layout that avoids these options fits.
        """
        self.budget.most = MOST
        return self.search.best(without=without)

    def soon(
        self, without: Mapping[str, Collection[int]] | None = None, fixed: Mapping[str, int] | None = None
    ) -> Answer:
        """Find the cheapest layout that avoids some options or has some fixed, in fewer steps than `best` may take.

        Raises:
            NothingFits: nothing was found.
        """
        self.budget.most = LESS
        return self.search.best(fixed, without)

    def next_best(self, answer: Answer, name: str) -> Answer | None:
        """Find the cheapest fitting layout in which the lines of one choice differ by more than the names of mesh axes.

        If that takes long, the result is the best layout found so far, and is not `complete`.
        """
        self.budget.most = LESS
        return self.search.next_best(answer, name, without={name: self.options.alike(name, answer.picks[name])})

    @cached_property
    def least(self) -> Answer:
        """The layout that holds the fewest bytes, as far as `PeakSearch.least` finds it."""
        return self.unlimited_search.least()

    @property
    def named(self) -> str:
        """The mesh as text, such as `x=4,y=8`."""
        return mesh_text(self.phase.case.mesh)

    @property
    def remat(self) -> str:
        """The activations that the backward pass recomputes: the field `remat` of `Case`."""
        return self.phase.case.remat

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.phase.case.trains

    @property
    def microbatches(self) -> int:
        """Number of parts of the batch that are computed one after the other; 1 if nothing is trained."""
        return self.phase.case.microbatches

    @property
    def in_microbatches(self) -> str:
        """The number of microbatches as text, such as `in 4 microbatches`, or "" if the batch is not cut."""
        return f"in {self.microbatches} microbatches" if self.microbatches > 1 else ""

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return prod(self.phase.case.mesh.values())

    @property
    def axes(self) -> int:
        """Number of mesh axes."""
        return len(self.phase.case.mesh)
