"""Numbers of microbatches, bounded many at a time: one bound may exclude many numbers, without their tables."""

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
        phase: the problem that bounds all these numbers.
        options: the options of its choices, as text.
        counts: the numbers, ascending.
        make: makes the problem of one number.
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
        """The search of a relaxed problem: with any of these numbers, a layout costs and holds at least as much."""
        return Search(self.phase.between(self.counts[0], self.counts[-1], self.limit), tolerance=TOLERANCE)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size of every dimension in one microbatch; in the whole batch while the number of microbatches is open."""
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
        """Return the lower and the upper half; for one number its candidate, or nothing if no picks are allowed."""
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
    """Return the candidate, from ranges too, with the layout that holds the fewest bytes; None if there is none."""
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
