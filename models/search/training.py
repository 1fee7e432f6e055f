"""The search problem of a training step, and a relaxed problem that bounds it for any number of microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import jax.numpy as jnp

from gspmd.annotate.errors import PlanError
from gspmd.layouts import Layout
from gspmd.planner.unknown import UnknownReduction, dims_in
from gspmd.search import Problem
from gspmd.search.finding import MeshProblem
from gspmd.search.held import HeldArray
from gspmd.search.lines import Lines
from gspmd.search.phase import Case, PhaseProblem, ReadProgram, RelaxedProblem, read_alike
from gspmd.search.pricing import Prices, Table
from gspmd.search.program import Use
from gspmd.training.model import Trainable
from gspmd.training.step import Update, abstract_program

from ..config import ModelConfig
from ..step import Language
from .workload import BASE, Unsearched, Workload

MOST_WITH_ADAPTERS = 2
"""The largest number of mesh axes for a model with adapters. No line gives the specs in which an adapter is multiplied
with its operand, so the products are planned for every placement of all their tensors. This takes a minute on two axes,
and hours on three."""


_TOKENS = ("B", "G", "C")
"""Dimensions whose size depends on the number of microbatches."""


class TrainingStep:
    """A training step, traced once for each number of microbatches and independently of the mesh.

    Args:
        subject: the model with its compute dtype.
        update: the settings of the update, whose number of microbatches is ignored.
        batch: number of sequences per step, over all devices.
        length: number of tokens per sequence.
        lines: the lines of the model's layout, to which the ties that its programs need are added.
    """

    def __init__(self, subject: Trainable, update: Update, batch: int, length: int, lines: Lines):
        self.subject, self.update, self.batch, self.length, self.lines = subject, update, batch, length, lines
        self._read: dict[int, ReadProgram] = {}

    def read(self, microbatches: int) -> ReadProgram:
        """Trace the step with a number of microbatches.

        Raises:
            LayoutError, PlanError, SpecError: the step cannot be built or searched.
        """
        if microbatches not in self._read:
            update = replace(self.update, microbatches=microbatches)
            build = abstract_program(self.subject, update, self.batch, self.length)
            self._read[microbatches] = read_alike(build, self.lines)
        return self._read[microbatches]


class StepProblem(PhaseProblem):
    """The search problem of a training step on one mesh, with terms read from a trace of the program."""

    phase = "train"

    def __init__(self, step: TrainingStep, case: Case):
        super().__init__(case)
        self._step = step

    @cached_property
    def question(self) -> MeshProblem:
        """The problem on this mesh."""
        case, step = self.case, self._step
        # Memory is counted at the point where the program with two microbatches holds the most. So the count does not
        # grow with the number of microbatches, if the batch is even.
        _, like, _ = step.read(2) if case.microbatches > 2 and step.batch % 2 == 0 else (None, None, None)
        read = step.read(case.microbatches)
        return MeshProblem(*read, self.axes, case.chip, case.microbatches, case.sizes, like)


class TrainingProblem(StepProblem):
    """The search problem of a training step of a model that comes with gspmd.

    Args:
        workload: the training step.
        mesh: sizes of the mesh axes.

    Raises:
        PlanError: the microbatches do not divide the batch, or the program has a part that cannot be searched.
        LayoutError: a line that is fixed does not exist in the model's layout.
        Unsearched: the model's activations are kept in host memory.
    """

    def __init__(self, workload: Workload, mesh: Mapping[str, int]):
        config, batch, count = workload.config, workload.batch, workload.microbatches
        if batch % count:
            raise PlanError(f"cannot cut a batch of {batch} into {count} microbatches.\n  Choose a divisor.")
        if config.offload:
            raise Unsearched("training steps of this model", ["copies of its activations to host memory have no price"])
        if config.lora and sum(size > 1 for size in mesh.values()) > MOST_WITH_ADAPTERS:
            raise PlanError(
                f"cannot search layouts of adapters on the {len(mesh)} mesh axes {', '.join(mesh)}: their products are "
                f"planned one by one, which takes hours.\n  Search a mesh of {MOST_WITH_ADAPTERS} axes."
            )
        source = config.tokens_of_source(workload.source_length, workload.length)
        super().__init__(
            _step(config, workload.dtype, batch, workload.length, source, workload.update, workload.fixed),
            Case(
                config, config.common_sizes(batch // count, workload.length, source), dict(mesh), workload.chip,
                workload.dtype, microbatches=count, remat=config.remat_name,
            ),
        )  # fmt: skip


class RelaxedTraining(TrainingProblem, RelaxedProblem):
    """The relaxed problem that bounds a training step with two or more microbatches on one mesh.

    With M microbatches, weights move M times instead of twice. Activations take at least as long as with two
    microbatches if every collective of the two is sent in its cheapest number of parts, and hold at least 2/M of the
    bytes. Gathered weights and gradients hold as many bytes as with two microbatches. This gives two lower bounds:

        seconds ≥ once + M/2 · weights + activations in two,    bytes ≥ arguments + weights + 2/M · activations in two

    Here `once` is the time of work that is not repeated in every microbatch, and `in two` means with two microbatches.
    Two bounds hold for every number of microbatches in a range: the bound on seconds for the smallest number, and the
    bound on bytes for the largest number. The choices are those for two microbatches, which include the choices for any
    larger number. The global norm of the gradients is left out, which only lowers the bound.

    Args:
        workload: the training step, whose number of microbatches is ignored.
        mesh: sizes of the mesh axes.
    """

    def __init__(self, workload: Workload, mesh: Mapping[str, int]):
        super().__init__(replace(workload, microbatches=2), mesh)

    def between(self, fewest: int, most: int, limit: float | None = None) -> Problem:
        """Return a relaxed problem whose cost is a lower bound for all numbers of microbatches in this range."""
        once, each = self._tables
        question, weights = self.question, self._weights
        others = {array: count if array in weights else 2 / most * count for array, count in question.others.items()}
        moe = self.case.config.moe
        if moe and moe.groups:
            # Groups that span sequences shrink with the microbatch, and so do their masks of tokens times slots.
            once, others = [(of, 2 / most * table) for of, table in once], {}
        seconds = [*once, *((of, fewest / 2 * table) for of, table in each)]
        held = [*question.spread(question.stored), *question.spread(others)]
        return self.question.stated(seconds, held, limit)

    @cached_property
    def _weights(self) -> set[HeldArray]:
        """The sharded arrays without a token dimension: their sizes do not depend on the number of microbatches."""
        lines = self.question.lines
        pairs = [pair for each in lines.tensors().values() for pair in each]
        tokens = {unknown for dim, unknown in pairs if dim in _TOKENS}
        return {each for each in self.question.others if each.unknowns and not tokens.intersection(each.unknowns)}

    @cached_property
    def _tables(self) -> tuple[list[Table], list[Table]]:
        """Two lists of tables: the seconds that do not depend on the number of microbatches, and the seconds that do.

        The seconds that depend on this number are those of steps on weights, which run again in every microbatch.
        """
        question, tables = self.question, self.question.prices.tables
        _, in_one, _ = self._step.read(1)
        before = in_one.times

        def repeats(use: Use) -> bool:
            # With one microbatch there is no loop over microbatches, after which a reduction could be moved.
            none = 0 if isinstance(use.what, UnknownReduction) else use.times
            return use.times > before.get(use.what, none)

        # A step that repeats with the microbatches and has no dimension of tokens moves or computes on a weight.
        uses = question.uses
        weights = [use for use in uses if repeats(use) and not _has_tokens(use)]
        rest = [use for use in uses if use not in weights]
        # If a tensor does not change in the loop over microbatches, the first steps of its move leave the loop.
        staying = [replace(use, once=0 if use.once < use.times else use.times) for use in weights]
        leaving = [replace(use, times=use.once) for use in weights if use.once < use.times]
        first = [*tables(leaving), *((of, -table) for of, table in tables(replace(use, once=0) for use in leaving))]
        # In M microbatches a repeated move runs M/2 times as often as in two, beside products of 2/M of the tokens, so
        # at most M/2 times as many seconds of it are hidden. Of the steps that leave the loop, as much is taken as
        # hidden as in any case.
        first = [(of, (1 - question.most_hidden) * table) for of, table in first]
        once = [*self._tables_of_tokens(rest), *question.beside, *first, *question.hidden_of(rest)]
        return once, [*tables(staying), *question.hidden_of(staying)]

    def _tables_of_tokens(self, uses: Sequence[Use]) -> list[Table]:
        """Return tables of the seconds of steps, as if tensors of tokens were sent in the cheapest number of parts.

        A collective of a part of the tokens may take less than its share of the seconds, because TPUs send large and
        small tensors in different ways (`stays_whole`, `gathers_round_each_axis`). All other prices are concave
        functions of the size. One thing is not proved, only tested: that moves of one tensor do not share more first
        steps in M microbatches than in two, because the cheapest paths may differ.
        """
        question, chip = self.question, self.question.chip
        if not (chip.gathers_on_one_ring or chip.keeps_whole_slices):
            return question.prices.tables(uses)
        of_tokens = [use for use in uses if _has_tokens(use)]
        others = [use for use in uses if not _has_tokens(use)]
        prices = Prices(question.prices.choices, question.mesh, replace(chip, prices_in_parts=True))
        return [*prices.tables(of_tokens), *question.prices.tables(others)]


def _has_tokens(use: Use) -> bool:
    return not dims_in(use.what).isdisjoint(_TOKENS)


@lru_cache(maxsize=64)
def _step(
    config: ModelConfig,
    dtype: str,
    batch: int,
    length: int,
    source_length: int,
    update: Update,
    fixed: tuple[tuple[str, str], ...],
) -> TrainingStep:
    """Return a training step, which is the same for every mesh."""
    # Pairs of sources and targets are packed into rows, or have padding.
    subject = Language(config, jnp.dtype(dtype), packed=source_length > 0, source_length=source_length)
    return TrainingStep(subject, update, batch, length, _lines(replace(config, remat="none", offload=False), fixed))


@lru_cache(maxsize=64)
def _lines(config: ModelConfig, fixed: tuple[tuple[str, str], ...]) -> Lines:
    """Return the lines of a model in training, with the ties that the programs traced so far need."""
    lines = Lines.of(Layout.load(BASE), dict(fixed))
    if config.lora:
        # [gradients] then applies to the adapters, while the rules of a layout apply to the frozen weights.
        for name in lines.trained:
            lines.hold(lines.owed(name))
    return lines
