"""A phase of a model as one search problem, whose choices and terms are read from the program of the phase.

The code that finds and explains answers (`gspmd.search.answers`) knows no model. It only uses a `PhaseProblem`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gspmd.hardware.chips import Chip
from gspmd.layouts.rules.keys import ALWAYS, dims_of, is_override
from gspmd.search import Problem, Term
from gspmd.search.finding import MeshProblem
from gspmd.search.lines import Lines
from gspmd.search.peak import PeakSearch, Shares
from gspmd.search.program import Build, TracedProgram, read


@dataclass(frozen=True)
class LayoutLine:
    """A line of a layout.

    Attributes:
        key: the section and the key of the line, such as `ffn.w_in`.
        text: the spec or the via of the line.
        choice: the name of the choice that decides the line; empty if none does. Several lines may share a choice.
        section: the overriding section that contains the line; empty if none does.
    """

    key: str
    text: str
    choice: str
    section: str = ""

    @property
    def name(self) -> str:
        """The full name of the line: its key, after any overriding section, as in `optimizer.ffn.w_in`."""
        return name_of(self.section, self.key)


@dataclass(frozen=True)
class Case:
    """A phase of a model on a mesh: everything that a search problem is built from.

    Attributes:
        config: the settings of the model; None for a custom model.
        sizes: sizes of every dimension, in one microbatch.
        mesh: sizes of the mesh axes; for a pipeline, those within one stage.
        chip: the chip for which seconds are predicted.
        dtype: compute dtype.
        trains: whether there is a backward pass.
        microbatches: the number of microbatches.
        side: for a pipeline, the mesh axes along which pipelines run side by side. These axes shard only the batch, and
            gradients stay partial sums over exactly these axes until the step ends.
        stages: number of stages of a pipeline, which lie along the first mesh axis.
        remat: the choice of remat, which says what the backward pass recomputes. It is empty if there is no backward
            pass, or if the program alone decides this.
    """

    config: Any
    sizes: Mapping[str, int]
    mesh: Mapping[str, int]
    chip: Chip
    dtype: str = "bfloat16"
    trains: bool = True
    microbatches: int = 1
    side: tuple[str, ...] = ()
    stages: int = 1
    remat: str = ""


class PhaseProblem(ABC):
    """The search problem of one program on one mesh: its choices and terms are read from a trace of the program.

    Attributes:
        case: the phase of a model, and the mesh.
        phase: the phase for which a layout is used: "train", "prefill" (also for encoding sources) or "decode".
    """

    phase = ""

    def __init__(self, case: Case):
        self.case = case
        self._averages: dict[frozenset, Problem] = {}

    @property
    @abstractmethod
    def question(self) -> MeshProblem:
        """The problem on this mesh; the program is traced on first use."""

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh axes that shard something."""
        return {axis: size for axis, size in self.case.mesh.items() if size > 1}

    @property
    def settles(self) -> bool:
        """Whether every gradient needs a line.

        With several microbatches, a gradient without a line stays a partial sum.
        """
        return self.case.microbatches > 1

    @cached_property
    def choices(self) -> dict[str, Sequence[Any]]:
        """The options of every choice, by the choice's name."""
        return {choice.name: choice.options for choice in self._problem.choices}

    @cached_property
    def terms(self) -> list[Term]:
        """The terms of the cost, as tables over choices."""
        return [*self._problem.terms]

    @cached_property
    def _problem(self) -> Problem:
        self.question.lines.check_on(self.case.mesh)
        return self.question.problem()

    @property
    def overestimate(self) -> float:
        """Seconds by which a layout may be priced too high, because the global norm is priced over all mesh axes."""
        return self.question.overestimate

    def problem(self, limit: float | None = None) -> Problem:
        """Return the problem with a limit on the bytes that a device may hold at `MeshProblem.moment`."""
        return Problem(self._problem.choices, self._problem.terms, limit)

    def search(
        self,
        limit: float | None = None,
        stop: Callable[[], bool] = lambda: False,
        start: Callable[[], None] = lambda: None,
        tolerance: float = 0.0,
    ) -> PeakSearch:
        """Return a search with a limit that holds at every moment; the arguments are those of `PeakSearch`."""
        return PeakSearch(self._counted, self.question.peak, self.question.moment, limit, stop, start, tolerance)

    def _counted(self, shares: Shares) -> Problem:
        """Return the problem whose bytes are an average over moments; it is kept, since many limits share it."""
        key = frozenset(shares.items())
        if key not in self._averages:
            self._averages[key] = self.question.counted(self._problem, shares)
        return self._averages[key]

    def texts(self, name: str) -> Iterator[dict[tuple[str, str], str]]:
        """Yield, for each option of a choice, its lines as (section, key) -> text."""
        option = next((each for each in self.question.prices.choices if each.name == name), None)
        if option is None:  # The mesh axes of the norm of gradients follow from the optimizer's state.
            yield from ({} for _ in self.choices[name])
            return
        only = {*self.question.lines.lines_of(option.unknowns)}
        write = self.question.lines.writer(settled=self.settles, only=only)
        for row in option.rows.tolist():
            lines = write({name: self.question.prices.named(number) for name, number in zip(option.unknowns, row)})
            # The line that names the choice comes first, because the comment on the choice is written after it.
            yield {_where(key): lines[key] for key in sorted(lines, key=lambda key: key != name)}

    def lines(self, picks: Mapping[str, int]) -> list[LayoutLine]:
        """Return the lines of the layout that results from `picks`, which has the option picked for each choice."""
        prices = self.question.prices
        known = prices.known([picks[option.name] for option in prices.choices])
        found = []
        for key, text in self.question.lines.written(known, settled=self.settles).items():
            section, name = _where(key)
            of = prices.choices_in_names(self.question.lines.unknowns_of(key))
            found.append(LayoutLine(name, text, prices.choices[of[0]].name if of else "", section))
        if not self.question.lines.layout.own:
            # Every layout has these lines, even for a program without such a tensor: encoding has no logits.
            absent = [name for name in ALWAYS if all(line.key != name for line in found)]
            found += [LayoutLine(name, dims_of(name), "") for name in absent]
        return found

    def written(self, picks: Mapping[str, int]) -> dict[str, str]:
        """Return the lines of the layout that results from `picks`, as name -> text."""
        return {line.name: line.text for line in self.lines(picks)}


class RelaxedProblem(PhaseProblem):
    """A phase whose problem can also be bounded for a whole range of numbers of microbatches."""

    @cached_property
    def choices(self) -> dict[str, Sequence[Any]]:
        """The options of every choice, by the choice's name.

        The mesh axes of the norm of gradients are no choice here, because bounds do not price the norm.
        """
        self.question.lines.check_on(self.case.mesh)
        return {choice.name: choice.options for choice in self.question.choices}

    @abstractmethod
    def between(self, fewest: int, most: int, limit: float | None = None) -> Problem:
        """Return a problem whose answer costs no more than the answer for any number of microbatches in this range."""


ReadProgram = tuple[Build, TracedProgram, Lines]
"""The builder of a program, its trace and its lines, which are the same on every mesh."""


def read_alike(build: Build, alike: Lines, **around: Any) -> ReadProgram:
    """Trace one of several programs that share ties between lines, and add the ties that this program needs.

    Args:
        build: the builder of the program.
        alike: the lines of all these programs, which are tied in place.
        around: the fields `around` and `beside` of `Lines`, if this program has such axes.
    """
    lines = replace(alike.copy(), **around)
    program = read(build, lines)
    alike.tie_as(lines)
    return build, program, lines


def name_of(section: str, key: str) -> str:
    """Return the name of a line: its key, after the overriding section if the line is in one."""
    return f"{section}.{key}" if section else key


def _where(name: str) -> tuple[str, str]:
    section, _, key = name.partition(".")
    return (section, key) if is_override(name) else ("", name)
