"""The best layout over several meshes: each is bounded without its limit of memory, and solved while it may win."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from gspmd.search import Answer, NothingFits, Problem, Search

from ..problem import PhaseProblem
from .options import Options

NEAR = 5e-4
"""The fraction of a step's seconds by which an answer may be dearer than the cheapest, if it holds less."""
TOLERANCE = 1e-4
"""The fraction below which layouts at the limit of memory are not told apart."""
MOST, LESS = 40_000, 2_000
"""How often the search for an answer, and for each of the others beside it, may ask whether to stop: counted, so that
the same question always has the same answer."""


class Patience:
    """Ends a search that asks too often."""

    def __init__(self) -> None:
        self.left = MOST

    def __call__(self) -> bool:
        """Whether to stop."""
        self.left -= 1
        return self.left < 0


HALVINGS = 6
"""How often the bytes between the least and those of the cheapest are halved to find it."""
TIE = 1e-9
"""The fraction of a step's seconds by which two meshes cost the same: sums are taken in other orders."""


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
        self.patience = Patience()
        self.search = Search(self.problem, self.patience, TOLERANCE)
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
            self.patience.left = MOST
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
                self.patience.left = LESS
                other = Search(self.within(middle), self.patience, TOLERANCE).best()
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
        """What is known to fit, also after an interrupt."""
        return self.answer or (self.free if self.free.bytes <= self.limit else self.search.so_far)

    @cached_property
    def options(self) -> Options:
        """The options of its choices, as text."""
        return Options(self.phase, self.problem)

    def best(self, without: Mapping[str, Collection[int]]) -> Answer:
        """The cheapest that fits without some options; the best that was found soon is not `complete`.

        Raises:
            NothingFits: there is none.
        """
        self.patience.left = MOST
        return self.search.best(without=without)

    def next_best(self, answer: Answer, name: str) -> Answer | None:
        """The cheapest that fits in which one choice is another than an answer's, by more than names of axes.

        Where it takes long to find, the best that was found soon, which is not `complete`.
        """
        self.patience.left = LESS
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
        return ",".join(f"{axis}={size}" for axis, size in self.phase.costs.mesh.items())

    @property
    def remat(self) -> str:
        """What the backward pass computes again; empty where there is none."""
        costs = self.phase.costs
        return costs.config.remat if costs.trains else ""

    @property
    def devices(self) -> int:
        """How many the mesh has."""
        return prod(self.phase.costs.mesh.values())

    @property
    def axes(self) -> int:
        """How many mesh axes there are."""
        return len(self.phase.costs.mesh)


@dataclass(frozen=True)
class Finding:
    """The best of several meshes.

    Attributes:
        best: the mesh of the cheapest answer that fits.
        answer: that answer.
        candidates: all meshes that were looked at, by what they cost or may cost at least.
        bound: no layout of the space costs less on any of these meshes.
        complete: whether it was not interrupted.
    """

    best: Candidate
    answer: Answer
    candidates: tuple[Candidate, ...]
    bound: float
    complete: bool = True

    @property
    def proof(self) -> str:
        """What is proved of the answer."""
        count, remats = len({each.named for each in self.candidates}), len({each.remat for each in self.candidates})
        where = "this mesh" if count == 1 else f"{count} meshes"
        chosen = f", with {remats} choices of remat" if remats > 1 else ""
        gap = max(NEAR, 1 - self.bound / self.answer.seconds) if self.answer.seconds else NEAR
        return f"of all layouts on {where}{chosen}, none is faster by {gap:.2%}"

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


def find(phases: Iterable[Callable[[], PhaseProblem]], limit: float, tell: Tell = lambda text: None) -> Finding:
    """Find the cheapest layout that fits.

    An interrupt ends the search with the best so far, if there is one.

    Args:
        phases: makes the problem of each mesh.
        limit: bytes that a device may hold.
        tell: told what is being done.

    Raises:
        NoneFits: there is no layout within the limit.
        KeyboardInterrupt: before anything was found that fits.
    """
    candidates: list[Candidate] = []
    try:
        for make in phases:
            phase = make()
            tell(f"tables of mesh {_mesh(phase)}")
            try:
                candidates.append(Candidate(phase, limit))
            except NothingFits:  # no picks are allowed at all: the sizes have no such mesh
                continue
        return _solved(sorted(candidates, key=_rank), limit, tell)
    except KeyboardInterrupt:
        finding = _so_far(sorted(candidates, key=_rank))
        if finding is None:
            raise
        return finding


def _solved(candidates: list[Candidate], limit: float, tell: Tell) -> Finding:
    best: Candidate | None = None
    nearest: list[tuple[float, Candidate, Answer]] = []
    for candidate in candidates:
        if best is not None and not _may_win(candidate, best):
            continue
        tell(f"mesh {candidate.named}: at least {candidate.free.seconds:.4g} s")
        try:
            candidate.solve()
        except NothingFits as fault:
            if fault.nearest is not None:
                nearest.append((fault.nearest.bytes - limit, candidate, fault.nearest))
            continue
        if best is None or _wins(candidate, best):
            best = candidate
    if best is None:
        over, candidate, answer = min(nearest, key=lambda each: each[0], default=(None, None, None))
        raise NoneFits(candidate, answer, over)
    assert best.answer is not None
    bound = min(each.answer.bound for each in candidates if each.answer)
    return Finding(best, best.answer, tuple(candidates), bound)


def _so_far(candidates: list[Candidate]) -> Finding | None:
    known = [(each.so_far.seconds, each.axes, n) for n, each in enumerate(candidates) if each.so_far]
    if not known:
        return None
    best = candidates[min(known)[2]]
    best.answer = best.so_far
    assert best.answer is not None
    bound = min(each.answer.bound if each.answer else each.free.seconds for each in candidates)
    return Finding(best, best.answer, tuple(candidates), bound, complete=False)


def _rank(candidate: Candidate) -> tuple[float, int]:
    return float(f"{candidate.free.seconds:.9g}"), candidate.axes


def _may_win(candidate: Candidate, best: Candidate) -> bool:
    return _better(candidate.free.seconds, candidate.axes, best)


def _wins(candidate: Candidate, best: Candidate) -> bool:
    return _better(candidate.solve().seconds, candidate.axes, best)


def _better(seconds: float, axes: int, best: Candidate) -> bool:
    """Whether this is cheaper than the best, or as cheap on fewer axes."""
    known = best.solve().seconds
    return seconds < known * (1 - TIE) or (seconds <= known * (1 + TIE) and axes < best.axes)


def _mesh(phase: PhaseProblem) -> str:
    return ",".join(f"{axis}={size}" for axis, size in phase.costs.mesh.items())
