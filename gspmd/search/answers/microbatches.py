"""Ranges of numbers of microbatches: one lower bound may rule out many numbers, without a cost table for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import inf

from gspmd.display.units import mesh_text
from gspmd.search import NothingFits, Search
from gspmd.search.answers.candidate import TOLERANCE, Candidate
from gspmd.search.answers.options import Options
from gspmd.search.phase import PhaseProblem, RelaxedProblem


def several(batch: int) -> tuple[int, ...]:
    """Return the numbers of microbatches above one that are searched: powers of two that divide the batch.

    >>> several(24), several(7)
    ((2, 4, 8), ())
    """
    return tuple(2**power for power in range(1, batch.bit_length()) if batch % 2**power == 0)


class Range:
    """A range of numbers of microbatches on one mesh, with one choice of remat.

    Args:
        phase: the problem from which a bound for all these numbers is computed.
        options: the layout lines that each option of each choice stands for.
        counts: the numbers of microbatches, ascending.
        make: a function from a number of microbatches to the problem with this number.
        limit: bytes that a device may hold.

    Attributes:
        bound: a lower bound on the cost of layouts that fit, for all these numbers; 0 before `tighten`.
    """

    def __init__(
        self,
        phase: RelaxedProblem,
        options: Options,
        counts: Sequence[int],
        make: Callable[[int], PhaseProblem],
        limit: float,
    ):
        self.phase, self.options = phase, options
        self.counts, self.make, self.limit = tuple(counts), make, limit
        self.bound = 0.0

    def tighten(self, enough: float) -> None:
        """Raise the lower bound until it is above `enough`, or cannot be raised further."""
        self.bound = max(self.bound, self.search.at_least(enough))

    @cached_property
    def search(self) -> Search:
        """The search of a relaxed problem, whose seconds and bytes are lower bounds for every number in the range."""
        return Search(self.phase.between(self.counts[0], self.counts[-1], self.limit), tolerance=TOLERANCE)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size of every dimension: in one microbatch if the range is a single number, otherwise in the whole batch."""
        return (self.make(*self.counts) if len(self.counts) == 1 else self.phase).case.sizes

    @cached_property
    def least(self) -> float:
        """A lower bound on the bytes of every layout with any of these numbers; infinite if no layout is possible."""
        try:
            return Search(self.phase.between(self.counts[0], self.counts[-1], -1.0)).best().bytes
        except NothingFits as fault:
            return fault.nearest.bytes if fault.nearest else inf

    @cached_property
    def halves(self) -> list[Range | Candidate]:
        """The lower and the upper half of the range.

        If the range is a single number, the list has only the candidate for that number. It is empty if no layout is
        possible.
        """
        if len(self.counts) == 1:
            try:
                return [Candidate(self.make(*self.counts), self.limit)]
            except NothingFits:
                return []
        middle, own = len(self.counts) // 2, (self.phase, self.options)
        return [Range(*own, counts, self.make, self.limit) for counts in (self.counts[:middle], self.counts[middle:])]

    @property
    def axes(self) -> int:
        """Number of mesh axes."""
        return len(self.phase.case.mesh)

    def __str__(self) -> str:
        case = self.phase.case
        numbers = " to ".join(map(str, dict.fromkeys((self.counts[0], self.counts[-1]))))
        return f"mesh {mesh_text(case.mesh)}, remat {case.remat}, in {numbers} microbatches"


def smallest(candidates: Iterable[Candidate], ranges: Iterable[Range]) -> Candidate | None:
    """Return the candidate whose layouts need the least memory, or None if no layout is possible.

    The candidates for all numbers in the ranges are considered too.
    """
    heap: list[tuple[float, int, Candidate | Range]] = []

    def push(each: Candidate | Range) -> None:
        least = each.least.bytes if isinstance(each, Candidate) else each.least
        heappush(heap, (least, next(number), each))

    number = count()
    for candidate in candidates:
        push(candidate)
    for each in ranges:
        push(each)
    while heap:
        least, _, each = heappop(heap)
        if isinstance(each, Candidate):
            return each
        if least == inf:
            return None
        for half in each.halves:
            push(half)
    return None
