"""The best layout over several meshes, choices of remat and numbers of microbatches.

A mesh with one choice of remat and one number of microbatches is solved only if its lower bound does not already rule
it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from gspmd.annotate import LayoutError, PlanError
from gspmd.display.plain import printable
from gspmd.display.printed import Printed
from gspmd.display.tables import Column, Sheet
from gspmd.display.units import amount_of_bytes, amount_of_seconds, mesh_text
from gspmd.search import Answer, NothingFits
from gspmd.search.answers.candidate import GAIN, NEAR, TIE, Candidate, to_beat
from gspmd.search.answers.microbatches import Range, smallest
from gspmd.search.phase import PhaseProblem

if TYPE_CHECKING:
    from gspmd.figures.figure import Figure

_COLUMNS = (
    Column("mesh"),
    Column("remat", goes=2),
    Column("microbatches", "right", goes=3),
    Column("a step", "right"),
    Column("memory", "right"),
    Column("at least", "right", goes=1),
    Column("", goes=4),
)


@dataclass(frozen=True)
class Space:
    """A part of the search space: one mesh, and in training one choice of remat.

    Attributes:
        phase: a function without arguments that makes the problem of this part.
        several: a function from the bytes that a device may hold to the range of numbers of microbatches above one;
            None if the batch is not divided.
    """

    phase: Callable[[], PhaseProblem]
    several: Callable[[float], Range] | None = None


@dataclass(frozen=True, repr=False)
class SearchResult(Printed):
    """The best answer over several meshes.

    Attributes:
        best: the mesh of the cheapest answer that fits.
        answer: the answer on that mesh.
        candidates: all meshes that were tried, in the order of the lower bounds on their costs.
        bound: a lower bound on the cost of all layouts on the candidates. If the answer has one microbatch, the bound
            holds for layouts with one microbatch only.
        several: if the answer has one microbatch, a lower bound on the cost with several microbatches.
        ranges: the ranges of numbers of microbatches above one that were searched.
        complete: whether the search ran to its end, without an interrupt.
        refused: the meshes that cannot be searched, with the reason.
        interrupt: the exception that interrupted the search; None if it was not interrupted.
    """

    best: Candidate
    answer: Answer
    candidates: tuple[Candidate, ...]
    bound: float
    several: float = inf
    ranges: tuple[Range, ...] = ()
    complete: bool = True
    refused: Mapping[str, LayoutError | PlanError] = field(default_factory=dict)
    interrupt: type[KeyboardInterrupt] | None = None

    def table(self) -> Sheet:
        """Return a table of the meshes that were tried, with the best one first."""
        sheet = Sheet("the cheapest layout on every mesh", _COLUMNS)
        for each in self._rows():
            answer = self.answer if each is self.best else each.answer
            sheet.add(
                each.named,
                each.remat,
                str(each.microbatches),
                amount_of_seconds(answer.seconds) if answer else "",
                amount_of_bytes(answer.bytes) if answer else "",
                "" if each.outcome == "nothing fits" else amount_of_seconds(each.free.seconds),
                "found" if each is self.best else "" if answer else each.outcome,
            )
        return sheet

    def figure(self) -> Figure:
        """Draw a bar for every mesh: the seconds of its cheapest layout or, in a pale color, a lower bound on them."""
        from gspmd.figures.bars import Bar, bars_figure

        bars = []
        for each in self._rows():
            answer = self.answer if each is self.best else each.answer
            name = " ".join(filter(None, (each.named, each.remat and f"remat {each.remat}", each.in_microbatches)))
            if answer:
                told = f"{amount_of_seconds(answer.seconds)}, {amount_of_bytes(answer.bytes)}"
                bars.append(Bar(name, "ink" if each is self.best else "other", (answer.seconds,), told))
            elif each.outcome == "nothing fits":
                bars.append(Bar(name, "other", (), each.outcome))
            else:
                told = f"{each.outcome}, at least {amount_of_seconds(each.free.seconds)}"
                bars.append(Bar(name, "other", (each.free.seconds,), told, pale=True))
        return bars_figure("seconds of a step, by mesh", bars, self.proof, self.__str__)

    def _rows(self) -> list[Candidate]:
        return [self.best, *(each for each in self.candidates if each is not self.best)]

    def __rich__(self) -> Group:
        return Group(self.table(), Text(self.proof))

    def __repr__(self) -> str:
        figures = f"{amount_of_seconds(self.answer.seconds)}, {amount_of_bytes(self.answer.bytes)} on each device"
        return printable(f"<SearchResult {self.best.named}: {figures}; print it for its table>")

    @property
    def microbatches(self) -> tuple[int, ...]:
        """The numbers of microbatches that were searched, ascending."""
        return tuple(sorted({each.microbatches for each in self.candidates}.union(*(r.counts for r in self.ranges))))

    @property
    def proof(self) -> str:
        """The statement, in words, that is proved about the answer."""
        count, remats = len({each.named for each in self.candidates}), len({each.remat for each in self.candidates})
        where = "this mesh" if count == 1 else f"{count} meshes"
        chosen = [f"{remats} choices of remat"] * (remats > 1)
        numbers = self.microbatches
        if len(numbers) > 1 and self.best.microbatches > 1:
            chosen.append(f"{numbers[0]} to {numbers[-1]} microbatches")
        if self.refused:
            mesh, fault = next(iter(self.refused.items()))
            others = f", nor can {len(self.refused) - 1} more" if len(self.refused) > 1 else ""
            where += f" ({mesh} cannot be searched: {str(fault).splitlines()[0].rstrip('.:')}{others})"
        beside = f", with {' and '.join(chosen)}," if chosen else ""
        gap = max(NEAR, 1 - self.bound / self.answer.seconds) if self.answer.seconds else NEAR
        more = ""
        if len(numbers) > 1 and self.best.microbatches == 1:
            least = max(GAIN, 1 - self.several / self.answer.seconds)
            more = f"; in {numbers[1]} to {numbers[-1]} microbatches, none is more than {least:.2%} faster"
        return f"no layout on {where}{beside} is more than {gap:.2%} faster by the plan{more}"

    def taking(self, best: Candidate, answer: Answer) -> SearchResult:
        """Return this result with another of its layouts as the answer, and with the bound proved for that layout."""
        bound = self.bound
        if best.microbatches > 1 and self.best.microbatches == 1:  # `bound` is for one microbatch
            bound = min(bound, self.several, to_beat(self.answer.seconds, 1))
        return replace(self, best=best, answer=answer, bound=bound)

    @property
    def promising(self) -> list[Candidate]:
        """The candidates on which some layout fits."""
        return [each for each in self.candidates if each.fits]


class NoneFits(ValueError):
    """No layout fits on any mesh.

    Attributes:
        candidate: the mesh with the smallest layout of all; None if no layout is possible at all.
        nearest: the picks of that layout, which hold the fewest bytes, as far as they are known.
        over: the bytes by which these picks exceed the limit.
        proved: whether it is proved that no layout fits. Otherwise none was found that does.
    """

    def __init__(self, candidate: Candidate | None, nearest: Answer | None, over: float | None, proved: bool = True):
        self.candidate, self.nearest, self.over, self.proved = candidate, nearest, over, proved
        if candidate is None:
            fact = "no layout is possible on any mesh of the slice: the sizes, or the fixed lines, exclude all."
            super().__init__(f"{fact}\n  Give fewer fixed lines, or use a different slice or batch.")
        else:
            fact = "no layout fits" if proved else "no layout was found that fits"
            super().__init__(f"{fact} on any mesh of the slice.\n  Use a larger slice, or a smaller model or batch.")


Tell = Callable[[str], None]


def find(spaces: Iterable[Space], limit: float, tell: Tell = lambda text: None) -> SearchResult:
    """Find the cheapest layout that fits.

    An interrupt ends the search with the best answer so far, if there is one.

    Args:
        spaces: the parts of the search space.
        limit: bytes that a device may hold.
        tell: a function that is called with texts about the progress.

    Raises:
        NoneFits: no layout fits within the limit.
        KeyboardInterrupt: the search was interrupted before it found a layout that fits.
    """
    search, every = BestFirstSearch(limit, tell), [*spaces]
    try:
        search.gather(every)
        search.solve()
        search.divide(every)
    except KeyboardInterrupt as interrupt:
        finding = search.so_far()
        if finding is None:
            raise
        return replace(finding, interrupt=type(interrupt))
    return search.finding()


class BestFirstSearch:
    """The state of `find`: candidates and ranges so far, and the best answer among them."""

    def __init__(self, limit: float, tell: Tell):
        self.limit, self.tell = limit, tell
        self.candidates: list[Candidate] = []
        self.ranges: list[Range] = []
        self.refused: dict[str, LayoutError | PlanError] = {}
        self._best: Candidate | None = None

    def gather(self, spaces: Iterable[Space]) -> None:
        """Build the candidate of each space and solve it without the limit on memory, which gives a lower bound.

        Raises:
            LayoutError, PlanError: no space can be searched.
        """
        every = [*spaces]
        for number, space in enumerate(every, 1):
            phase = space.phase()
            count = phase.case.microbatches
            where = mesh_text(phase.case.mesh)
            parts = f" in {count} microbatches" * (count > 1)
            self.tell(f"tables of mesh {where}{parts}, {number} of {len(every)}")
            try:
                self.candidates.append(Candidate(phase, self.limit))
            except NothingFits:  # no layout is possible at all: this mesh divides no sizes
                continue
            except (LayoutError, PlanError) as fault:  # For example a line fixed over an axis that this mesh lacks.
                self.refused.setdefault(where, fault)
        if self.refused and not self.candidates:
            raise next(iter(self.refused.values()))

    def solve(self) -> None:
        """Solve the candidates in the order of their bounds, as long as they may win."""
        for each in sorted(self.candidates, key=_rank):
            self._try(each)

    def divide(self, spaces: Iterable[Space]) -> None:
        """Bound ranges of numbers of microbatches, and solve the numbers that may win.

        A range that may win is halved until each part has a single number.
        """
        heap: list[tuple[float, int, int, int, Range]] = []

        def push(each: Range) -> None:
            self.tell(f"bounds of {each}")
            each.tighten(self._to_beat * (1 + 2 * TIE))
            heappush(heap, (each.bound, each.axes, each.counts[0], next(number), each))

        number = count()
        for space in spaces:
            if space.several:
                self.ranges.append(space.several(self.limit))
                push(self.ranges[-1])
        while heap:
            bound, axes, fewest, _, each = heappop(heap)
            if bound == inf or not self._may_win(bound, axes, fewest):
                continue
            for half in each.halves:
                if isinstance(half, Range):
                    push(half)
                else:
                    self.candidates.append(half)
                    self._try(half)

    def _try(self, candidate: Candidate) -> None:
        if not self._may_win(candidate.free.seconds, *_order(candidate)):
            candidate.outcome = "not better"
            return
        where = f"{candidate.named} {candidate.in_microbatches}".strip()
        self.tell(f"mesh {where}: at least {amount_of_seconds(candidate.free.seconds)}")
        try:
            found = candidate.solve()
        except NothingFits:
            return
        if self._may_win(found.seconds, *_order(candidate)):
            self._best = candidate

    def _may_win(self, seconds: float, axes: int, microbatches: int) -> bool:
        """Return whether layouts with this lower bound may replace the best answer.

        The bound must be below the best cost, or equal to it with fewer axes or microbatches. If the best answer has
        one microbatch and the layouts have several, the bound must also not exceed `_to_beat`.
        """
        if self._best is None:
            return True
        if microbatches > self._best.microbatches == 1 and seconds > self._to_beat:
            return False
        known, order = self._best.solve().seconds, _order(self._best)
        return seconds < known * (1 - TIE) or (seconds <= known * (1 + TIE) and (axes, microbatches) < order)

    @property
    def _to_beat(self) -> float:
        """The seconds that several microbatches must stay below to replace the best answer; `inf` without an answer."""
        return to_beat(self._best.solve().seconds, self._best.microbatches) if self._best else inf

    def finding(self) -> SearchResult:
        """Return the result of the search.

        Raises:
            NoneFits: no layout fits on any mesh.
        """
        best = self._best
        if best is None:
            nearest = smallest(self.candidates, self.ranges)
            if nearest is None:
                raise NoneFits(None, None, None)
            proved = all(each.outcome != "not solved" for each in self.candidates)
            raise NoneFits(nearest, nearest.least, nearest.least.bytes - self.limit, proved)
        answer, every = best.solve(), sorted(self.candidates, key=_rank)
        bounds = [(bound, each.microbatches > 1) for each in every if (bound := _proved(each, answer)) < inf]
        several = min((bound for bound, more in bounds if more), default=inf)
        bound = min(bound for bound, more in bounds if not more or best.microbatches > 1)
        return SearchResult(best, answer, tuple(every), bound, several, tuple(self.ranges), refused=self.refused)

    def so_far(self) -> SearchResult | None:
        """Return the best result so far, after an interrupt, or None if no layout that fits is known."""
        every = sorted(self.candidates, key=_rank)
        known = [(each.so_far.seconds, *_order(each), n) for n, each in enumerate(every) if each.so_far]
        one = min((each for each in known if each[2] == 1), default=None)
        several = min((each for each in known if each[2] > 1), default=None)
        first = several if several and (one is None or several[0] <= to_beat(one[0], 1)) else one
        if first is None:
            return None
        best = every[first[-1]]
        best.answer, best.outcome = best.so_far, "solved"
        assert best.answer is not None
        bound = min(max(each.free.seconds, each.answer.bound if each.answer else 0.0) for each in every)
        return SearchResult(best, best.answer, tuple(every), bound, 0.0, tuple(self.ranges), complete=False)


def _proved(candidate: Candidate, answer: Answer) -> float:
    """Return a lower bound on the cost of a candidate's layouts, with any possible overestimate subtracted.

    The bound is infinite if no layout fits. It is also infinite if the candidate was left out because of its lower
    bound, unless costs may be overestimated.
    """
    if candidate.answer:
        return candidate.answer.bound - candidate.phase.overestimate
    if candidate.outcome == "not solved":  # no layout was found that fits
        return candidate.bound - candidate.phase.overestimate
    # The mesh was left out because of its lower bound, or because nothing fits.
    left = candidate.phase.overestimate and candidate.free.seconds >= answer.seconds * (1 - TIE)
    return candidate.free.seconds - candidate.phase.overestimate if left else inf


def _rank(candidate: Candidate) -> tuple[float, int, int]:
    return float(f"{candidate.free.seconds:.9g}"), *_order(candidate)


def _order(candidate: Candidate) -> tuple[int, int]:
    """Return the sort key that decides between candidates of equal cost: fewer axes, then fewer microbatches."""
    return candidate.axes, candidate.microbatches
