"""The search problem of a custom model's training step."""

from __future__ import annotations

from collections.abc import Mapping

from gspmd.hardware.chips import Chip
from gspmd.layouts import Layout
from gspmd.search.lines import Lines
from gspmd.search.phase import Case
from gspmd.training.model import Own
from gspmd.training.step import Update

from .training import StepProblem, TrainingStep


class OwnStep(TrainingStep):
    """The training step of a custom model.

    Args:
        subject, update, batch, length: as for `TrainingStep`.
        layout: a layout of the model, whose lines are searched; only the dimensions of its specs are used.
        fixed: lines that are not searched, with their specs.

    Raises:
        LayoutError: the layout is wrong in itself, it lacks lines of the model, or a fixed line does not exist.
    """

    def __init__(
        self, subject: Own, update: Update, batch: int, length: int, layout: Layout, fixed: Mapping[str, str] = {}
    ):
        layout.check()
        # Reading the program would report only the first missing line, and only after tracing.
        subject.rows(layout)
        subject.batch_spec(layout)
        subject.trained(layout, update.frozen)
        super().__init__(subject, update, batch, length, Lines.of(layout, dict(fixed)))
        self.dtype = str(subject.dtype)


class OwnProblem(StepProblem):
    """The search problem of a custom model's training step on one mesh.

    Args:
        step: the training step.
        mesh: sizes of the mesh axes.
        chip: the chip for which seconds are predicted.
        microbatches: the number of parts of the batch that run one after another. It divides the batch.
    """

    def __init__(self, step: OwnStep, mesh: Mapping[str, int], chip: Chip, microbatches: int = 1):
        sizes = step.subject.sizes(step.batch // microbatches, step.length)
        super().__init__(step, Case(None, sizes, dict(mesh), chip, step.dtype, microbatches=microbatches))
