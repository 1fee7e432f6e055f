"""The search problem of the training step of a model of one's own."""

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
    """The training step of a model of one's own, read once for each number of microbatches.

    Args:
        subject: the model, in its compute dtype.
        update: how parameters are updated; its number of microbatches is not read.
        batch: sequences, over all devices.
        length: tokens of a sequence.
        layout: whose lines are searched; what it writes counts for nothing but dimensions.
        fixed: lines that are not searched, with their specs.

    Raises:
        LayoutError: there are no such lines, or the layout lacks lines of the model.
    """

    def __init__(
        self, subject: Own, update: Update, batch: int, length: int, layout: Layout, fixed: Mapping[str, str] = {}
    ):
        # Before a program is read, which would say the same of one line and late.
        subject.rows(layout)
        subject.batch_spec(layout)
        subject.trained(layout, update.frozen)
        self.subject, self.update, self.batch, self.length = subject, update, batch, length
        self._lines = Lines.of(layout, dict(fixed))
        self._read: dict[int, tuple[Build, Lines, TracedProgram]] = {}

    def read(self, microbatches: int) -> tuple[Build, Lines, TracedProgram]:
        """Return how it is built in so many microbatches, with its lines and its program.

        Raises:
            LayoutError, PlanError, SpecError: it cannot be built or searched.
        """
        if microbatches not in self._read:
            update = replace(self.update, microbatches=microbatches)
            build = abstract_program(self.subject, update, self.batch, self.length)
            lines, program = read_alike(build, self._lines)
            self._read[microbatches] = build, lines, program
        return self._read[microbatches]


class OwnProblem(PhaseProblem):
    """The search problem of a training step of a model of one's own on one mesh.

    Args:
        step: the step.
        mesh: sizes of the mesh axes.
        chip: whose seconds.
        microbatches: parts of the batch, one after the other, which divide it.
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
        # Of several microbatches memory is counted at one moment, so that more of them never hold more.
        like = self._step.read(2)[2] if case.microbatches > 2 and self._step.batch % 2 == 0 else None
        build, lines, program = self._step.read(case.microbatches)
        return MeshProblem(build, program, lines, self.axes, case.chip, case.microbatches, case.sizes, like)
