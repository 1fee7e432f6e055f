"""The search problem of a custom model's training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from gspmd.hardware.chips import Chip
from gspmd.layouts import Layout
from gspmd.search.finding import MeshProblem
from gspmd.search.lines import Lines
from gspmd.search.phase import Case, PhaseProblem, read_alike
from gspmd.search.program import Build, TracedProgram
from gspmd.training.model import Own
from gspmd.training.step import Update, abstract_program


class OwnStep:
    """The training step of a custom model, traced once for each number of microbatches.

    Args:
        subject: the model, in its compute dtype.
        update: how parameters are updated; its number of microbatches is ignored.
        batch: sequences per step, over all devices.
        length: tokens per sequence.
        layout: a layout of the model, whose lines are searched; only the dimensions of its specs are used.
        fixed: lines that are not searched, with their specs.

    Raises:
        LayoutError: a fixed line does not exist, or the layout lacks lines of the model.
    """

    def __init__(
        self, subject: Own, update: Update, batch: int, length: int, layout: Layout, fixed: Mapping[str, str] = {}
    ):
        # Reading the program would report only the first missing line, and only after tracing.
        subject.rows(layout)
        subject.batch_spec(layout)
        subject.trained(layout, update.frozen)
        self.subject, self.update, self.batch, self.length = subject, update, batch, length
        self._lines = Lines.of(layout, dict(fixed))
        self._read: dict[int, tuple[Build, Lines, TracedProgram]] = {}

    def read(self, microbatches: int) -> tuple[Build, Lines, TracedProgram]:
        """Return the step's builder, its lines and its traced program for a number of microbatches.

        Raises:
            LayoutError, PlanError, SpecError: the step cannot be built or searched.
        """
        if microbatches not in self._read:
            update = replace(self.update, microbatches=microbatches)
            build = abstract_program(self.subject, update, self.batch, self.length)
            lines, program = read_alike(build, self._lines)
            self._read[microbatches] = build, lines, program
        return self._read[microbatches]


class OwnProblem(PhaseProblem):
    """The search problem of a custom model's training step on one mesh.

    Args:
        step: the step.
        mesh: sizes of the mesh axes.
        chip: the chip whose seconds are assumed.
        microbatches: the number of parts of the batch that run one after the other; it divides the batch.
    """

    phase = "train"

    def __init__(self, step: OwnStep, mesh: Mapping[str, int], chip: Chip, microbatches: int = 1):
        sizes = step.subject.sizes(step.batch // microbatches, step.length)
        super().__init__(Case(None, sizes, dict(mesh), chip, str(step.subject.dtype), microbatches=microbatches))
        self._step = step

    @cached_property
    def question(self) -> MeshProblem:
        """The search on this mesh."""
        case = self.case
        # Memory is counted at the point where the program with two microbatches holds the most, so that with more
        # microbatches the count never grows.
        like = self._step.read(2)[2] if case.microbatches > 2 and self._step.batch % 2 == 0 else None
        build, lines, program = self._step.read(case.microbatches)
        return MeshProblem(build, program, lines, self.axes, case.chip, case.microbatches, case.sizes, like)
