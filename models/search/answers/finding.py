"""The best layout over several meshes, choices of remat and numbers of microbatches, each solved while it may win."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from gspmd.display.units import mesh_text
from gspmd.search import Answer, NothingFits

from ..problem import PhaseProblem
from .candidate import GAIN, NEAR, TIE, Candidate, to_beat
from .microbatches import Range, smallest


@dataclass(frozen=True)
class Space:
    """Where layouts are looked for: on one mesh, in training with one choice of remat.

    Attributes:
        phase: makes the problem there.
        several: makes the numbers of microbatches that are searched besides, of the bytes that a device may hold; None
            for none.
    """

    phase: Callable[[], PhaseProblem]
    several: Callable[[float], Range] | None = None


@dataclass(frozen=True)
class Finding:
    """The best of several meshes.

    Attributes:
        best: the mesh of the cheapest answer that fits.
        answer: that answer.
        candidates: all meshes that were looked at, by what they cost or may cost at least.
        bound: no layout of the candidates costs less; of an answer in one microbatch, none in one.
        several: of an answer in one microbatch, what no layout in several costs less than.
        ranges: the numbers of microbatches that were searched besides.
        complete: whether it was not interrupted.
    """

    best: Candidate
    answer: Answer
    candidates: tuple[Candidate, ...]
    bound: float
    several: float = inf
    ranges: tuple[Range, ...] = ()
    complete: bool = True

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Their numbers that were searched, ascending."""
        return tuple(sorted({each.microbatches for each in self.candidates}.union(*(r.counts for r in self.ranges))))

    @property
    def proof(self) -> str:
        """What is proved of the answer."""
        count, remats = len({each.named for each in self.candidates}), len({each.remat for each in self.candidates})
        where = "this mesh" if count == 1 else f"{count} meshes"
        chosen = [f"{remats} choices of remat"] * (remats > 1)
        numbers = self.microbatches
        if len(numbers) > 1 and self.best.microbatches > 1:
            chosen.append(f"{numbers[0]} to {numbers[-1]} microbatches")
        beside = f", with {' and '.join(chosen)}" if chosen else ""
        gap = max(NEAR, 1 - self.bound / self.answer.seconds) if self.answer.seconds else NEAR
        more = ""
        if len(numbers) > 1 and self.best.microbatches == 1:
            least = max(GAIN, 1 - self.several / self.answer.seconds)
            more = f"; in {numbers[1]} to {numbers[-1]} microbatches none by {least:.2%}"
        return f"of all layouts on {where}{beside}, none is faster by {gap:.2%}{more}"

    def taking(self, best: Candidate, answer: Answer) -> Finding:
        """The same search with another of its layouts for an answer, and what was proved of that."""
        bound = self.bound
        if best.microbatches > 1 and self.best.microbatches == 1:  # several were searched as far as they could be taken
            bound = min(bound, self.several, to_beat(self.answer.seconds, 1))
        return replace(self, best=best, answer=answer, bound=bound)

    @property
    def promising(self) -> list[Candidate]:
        """The candidates on which anything fits."""
        return [each for each in self.candidates if each.least.bytes <= each.limit]


class NoneFits(ValueError):
    """On no mesh does anything fit.

    Attributes:
        candidate: the mesh on which the least is missing; None if no layout is possible at all.
        nearest: the picks that hold the fewest bytes there.
        over: by how many bytes they exceed the limit.
    """

    def __init__(self, candidate: Candidate | None, nearest: Answer | None, over: float | None):
        self.candidate, self.nearest, self.over = candidate, nearest, over
        super().__init__("nothing fits on any mesh of the slice.\n  Take a larger slice, or a smaller batch.")


Tell = Callable[[str], None]


def find(spaces: Iterable[Space], limit: float, tell: Tell = lambda text: None) -> Finding:
    """Find the cheapest layout that fits.

    An interrupt ends the search with the best so far, if there is one.

    Args:
        spaces: where it may be.
        limit: bytes that a device may hold.
        tell: told what is being done.

    Raises:
        NoneFits: there is no layout within the limit.
        KeyboardInterrupt: before anything was found that fits.
    """
    hunt, every = _Hunt(limit, tell), [*spaces]
    try:
        hunt.gather(every)
        hunt.solve()
        hunt.divide(every)
    except KeyboardInterrupt:
        finding = hunt.so_far()
        if finding is None:
            raise
        return finding
    return hunt.finding()


class _Hunt:
    """What is known at each moment of `find`."""

    def __init__(self, limit: float, tell: Tell):
        self.limit, self.tell = limit, tell
        self.candidates: list[Candidate] = []
        self.ranges: list[Range] = []
        self._best: Candidate | None = None

    def gather(self, spaces: Iterable[Space]) -> None:
        """Bound the problem of each space without its limit."""
        for space in spaces:
            phase = space.phase()
            self.tell(f"tables of mesh {mesh_text(phase.costs.mesh)}")
            try:
                self.candidates.append(Candidate(phase, self.limit))
            except NothingFits:  # no picks are allowed at all: the sizes have no such mesh
                continue

    def solve(self) -> None:
        """Solve them in the order of their bounds, while they may win."""
        for each in sorted(self.candidates, key=_rank):
            self._try(each)

    def divide(self, spaces: Iterable[Space]) -> None:
        """Bound numbers of microbatches, many at a time; halve what may win until there is one, and solve that."""
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
            return
        where = f"{candidate.named} {candidate.in_microbatches}".strip()
        self.tell(f"mesh {where}: at least {candidate.free.seconds:.4g} s")
        try:
            found = candidate.solve()
        except NothingFits:
            return
        if self._may_win(found.seconds, *_order(candidate)):
            self._best = candidate

    def _may_win(self, seconds: float, axes: int, microbatches: int) -> bool:
        """Whether this is cheaper than the best, or as cheap on fewer axes or in fewer microbatches."""
        if self._best is None:
            return True
        if microbatches > self._best.microbatches == 1 and seconds > self._to_beat:
            return False
        known, order = self._best.solve().seconds, _order(self._best)
        return seconds < known * (1 - TIE) or (seconds <= known * (1 + TIE) and (axes, microbatches) < order)

    @property
    def _to_beat(self) -> float:
        """The seconds below which several microbatches are better than what is known."""
        return to_beat(self._best.solve().seconds, self._best.microbatches) if self._best else inf

    def finding(self) -> Finding:
        """What was found.

        Raises:
            NoneFits: nothing fits.
        """
        best = self._best
        if best is None:
            nearest = smallest(self.candidates, self.ranges)
            least = nearest and nearest.least
            raise NoneFits(nearest, least, least and least.bytes - self.limit)
        answer, every = best.solve(), sorted(self.candidates, key=_rank)
        bounds = [(bound, each.microbatches > 1) for each in every if (bound := _proved(each, answer)) < inf]
        several = min((bound for bound, more in bounds if more), default=inf)
        bound = min(bound for bound, more in bounds if not more or best.microbatches > 1)
        return Finding(best, answer, tuple(every), bound, several, tuple(self.ranges))

    def so_far(self) -> Finding | None:
        """What is known of it at an interrupt; None where nothing is that fits."""
        every = sorted(self.candidates, key=_rank)
        known = [(each.so_far.seconds, *_order(each), n) for n, each in enumerate(every) if each.so_far]
        one = min((each for each in known if each[2] == 1), default=None)
        several = min((each for each in known if each[2] > 1), default=None)
        first = several if several and (one is None or several[0] <= to_beat(one[0], 1)) else one
        if first is None:
            return None
        best = every[first[-1]]
        best.answer = best.so_far
        assert best.answer is not None
        bound = min(max(each.free.seconds, each.answer.bound if each.answer else 0.0) for each in every)
        return Finding(best, best.answer, tuple(every), bound, 0.0, tuple(self.ranges), complete=False)


def _proved(candidate: Candidate, answer: Answer) -> float:
    """What a layout on a mesh costs at least, where prices there may be above that; infinite where it is not known."""
    if candidate.answer:
        return candidate.answer.bound - candidate.phase.too_dear
    # It was left out because of what it is priced at least, or nothing fits.
    left = candidate.phase.too_dear and candidate.free.seconds >= answer.seconds * (1 - TIE)
    return candidate.free.seconds - candidate.phase.too_dear if left else inf


def _rank(candidate: Candidate) -> tuple[float, int, int]:
    return float(f"{candidate.free.seconds:.9g}"), *_order(candidate)


def _order(candidate: Candidate) -> tuple[int, int]:
    """Of candidates that cost the same the first is taken."""
    return candidate.axes, candidate.microbatches
