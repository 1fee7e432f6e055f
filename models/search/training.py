"""The search problem of a training step, and one that bounds it in any number of microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache

import jax.numpy as jnp

from gspmd.annotate.errors import PlanError
from gspmd.layouts import Layout
from gspmd.planner.unknown import dims_in
from gspmd.search import Problem
from gspmd.search.finding import MeshProblem
from gspmd.search.held import HeldArray
from gspmd.search.lines import Lines
from gspmd.search.phase import Case, PhaseProblem, RelaxedProblem, read_alike
from gspmd.search.pricing import Table
from gspmd.search.program import Build, TracedProgram
from gspmd.training.step import Update, abstract_program

from ..config import ModelConfig
from ..step import Language
from .workload import Workload, absent_of, base_of

MOST_WITH_ADAPTERS = 2
"""Mesh axes of a model with adapters. No line says where an adapter meets its operand, so that its products are planned
for every place of all their tensors: a minute on two axes, and hours on three."""


_TOKENS = ("B", "G", "C")
"""Dimensions whose size is another in another number of microbatches."""


class TrainingProblem(PhaseProblem):
    """The search problem of a training step on one mesh, whose terms are read from the program.

    Args:
        workload: the step.
        mesh: sizes of the mesh axes.

    Raises:
        PlanError: the microbatches do not divide the batch, or the program has what cannot be searched.
    """

    phase = "train"

    def __init__(self, workload: Workload, mesh: Mapping[str, int]):
        config, batch, count = workload.config, workload.batch, workload.microbatches
        if batch % count:
            raise PlanError(f"cannot cut a batch of {batch} into {count} microbatches.\n  Choose a divisor.")
        sizes = config.sizes(batch // count, workload.length)
        if config.moe and not config.is_dropless:
            sizes |= {"C": config.moe.capacity(batch // count * workload.length // sizes["G"])}
        if config.lora and sum(size > 1 for size in mesh.values()) > MOST_WITH_ADAPTERS:
            raise PlanError(
                f"cannot search layouts of adapters on the {len(mesh)} mesh axes {', '.join(mesh)}: their products are "
                f"planned one by one, which takes hours.\n  Search a mesh of {MOST_WITH_ADAPTERS} axes."
            )
        super().__init__(
            Case(
                config, sizes, dict(mesh), workload.chip, workload.dtype, microbatches=count,
                remat=config.remat_name, absent=absent_of(config),
            )
        )  # fmt: skip
        self._step = config, workload.dtype, batch, workload.length, workload.update, workload.fixed

    @cached_property
    def question(self) -> MeshProblem:
        """The search on this mesh."""
        case = self.case
        # Of several microbatches memory is counted at one moment, so that more of them never hold more.
        like = self._read(2)[2] if case.microbatches > 2 else None
        built, lines, program = self._read(case.microbatches)
        return MeshProblem(built, program, lines, self.axes, case.chip, case.microbatches, case.sizes, like)

    def _read(self, microbatches: int) -> tuple[Build, Lines, TracedProgram]:
        *asked, update, fixed = self._step
        return read_step(*asked, replace(update, microbatches=microbatches), fixed)


class RelaxedTraining(TrainingProblem, RelaxedProblem):
    """The search problem that bounds a training step in 2 microbatches or more on one mesh.

    In M microbatches, weights move M times in place of 2. Activations, one part of the batch after the other, take no
    less time than in two parts, and hold no less than 2/M of what these hold; gathered weights and gradients, as much:

        seconds ≥ once + M/2 · weights + activations in two,    bytes ≥ arguments + weights + 2/M · activations in two

    So the seconds of the fewest with the bytes of the most bound all numbers between them. The options are those of two
    microbatches, which all others are among. The global norm of the gradients, which costs no less than nothing, is
    left out.

    Args:
        workload: the step, in whichever number of microbatches.
        mesh: sizes of the mesh axes.
    """

    def __init__(self, workload: Workload, mesh: Mapping[str, int]):
        super().__init__(replace(workload, microbatches=2), mesh)

    def between(self, fewest: int, most: int, limit: float | None = None) -> Problem:
        """Return the problem whose answer is no worse than that of any number of microbatches between these two."""
        once, each = self._tables
        question, weights = self.question, self._weights
        others = {array: count if array in weights else 2 / most * count for array, count in question.others.items()}
        moe = self._step[0].moe
        if moe and moe.groups:
            # Groups that span sequences are smaller in a smaller part, and so is what is masked: tokens by their slots.
            once, others = [(of, 2 / most * table) for of, table in once], {}
        seconds = [*once, *((of, fewest / 2 * table) for of, table in each)]
        held = [*question.arguments, *question.spread(others)]
        return self.question.stated(seconds, held, limit)

    @cached_property
    def _weights(self) -> set[HeldArray]:
        """Arrays that are as large in any number of microbatches: sharded, and over no tokens."""
        lines = self.question.lines
        pairs = [pair for each in lines.tensors().values() for pair in each]
        tokens = {unknown for dim, unknown in pairs if dim in _TOKENS}
        return {each for each in self.question.others if each.unknowns and not tokens.intersection(each.unknowns)}

    @cached_property
    def _tables(self) -> tuple[list[Table], list[Table]]:
        """Seconds of what does not run more often, and of weights."""
        question, tables = self.question, self.question.prices.tables
        _, _, in_one = self._read(1)
        before = in_one.times
        # What runs more often than in one microbatch, and is no part of the batch, is of a weight.
        weights = [
            use for use in question.uses if "B" not in dims_in(use.what) and use.times > before.get(use.what, use.times)
        ]
        rest = [use for use in question.uses if use not in weights]
        # Of a tensor that stays the same in the loop the first steps of its move leave it.
        staying = [replace(use, once=0 if use.once < use.times else use.times) for use in weights]
        leaving = [replace(use, times=use.once) for use in weights if use.once < use.times]
        first = [*tables(leaving), *((of, -table) for of, table in tables(replace(use, once=0) for use in leaving))]
        return [*tables(rest), *question.beside, *first], tables(staying)


@lru_cache(maxsize=64)
def read_step(
    config: ModelConfig, dtype: str, batch: int, length: int, update: Update, fixed: tuple[tuple[str, str], ...] = ()
) -> tuple[Build, Lines, TracedProgram]:
    """Return how a training step is built, with its lines and its program, which are the same on every mesh."""
    build = abstract_program(Language(config, jnp.dtype(dtype)), update, batch, length)
    return build, *read_alike(build, _lines(replace(config, remat="none"), fixed))


@lru_cache(maxsize=64)
def _lines(config: ModelConfig, fixed: tuple[tuple[str, str], ...]) -> Lines:
    """The lines of a model that is trained, tied as any of its programs so far has wanted them."""
    lines = Lines.of(Layout.load(base_of(config)), dict(fixed))
    if config.lora:
        # [gradients] is of the adapters then, and the rules of a layout are those of the weights beside them.
        for name in lines.trained:
            lines.hold(lines.owed(name))
    return lines
