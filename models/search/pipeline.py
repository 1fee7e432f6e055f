"""The search problem of a pipeline's training step, read from a trace of the program of all stages.

The traced program fixes the mesh axis of the stages and the axes along which pipelines run side by side; sharding over
the other axes is unknown. A step of M microbatches in S stages has M + S - 1 slots. In each slot every stage computes,
even while it waits for input (`gspmd.pipeline`). Some work runs once, outside the slots: gradients are reduced over the
axes along which pipelines run side by side, gradients of replicated parameters are summed over the stages, and the
optimizer updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from gspmd.annotate.errors import PlanError
from gspmd.hardware.dtypes import itemsize
from gspmd.layouts import Layout
from gspmd.lowerings.program import program_of
from gspmd.pipeline.stage import sent
from gspmd.planner.unknown import UnknownSteps, unknowns_in
from gspmd.search.finding import MeshProblem
from gspmd.search.held import work
from gspmd.search.lines import Lines
from gspmd.search.phase import Case, LayoutLine, PhaseProblem, ReadProgram, read_alike
from gspmd.search.pricing import Table
from gspmd.search.stages import LayerRange
from gspmd.tracing.jaxprs import inner_jaxprs
from gspmd.training.step import Update, abstract_program

from ..config import ModelConfig
from ..step import Language
from .workload import BASE, Unsearched, Workload

STAGES = "p"
"""The mesh axis of a pipeline's stages."""


@dataclass(frozen=True)
class Slots:
    """The seconds and bytes of a pipeline's step, divided into parts.

    Attributes:
        depth: number of stacked layers in a stage.
        first, last: seconds per slot of the embedding (`first`), and of output and loss (`last`).
        sent: seconds per slot of the permutes to neighboring stages.
        layers: seconds per slot of all other work, which is the work of a stage's layers.
        once: seconds of work outside the slots.
        ends_bytes: bytes of embedding and output.
        input_bytes: bytes of a stage's input for one microbatch, which is kept for the backward pass.
        layers_bytes: bytes of everything else.
    """

    depth: int
    first: float
    last: float
    sent: float
    layers: float
    once: float
    ends_bytes: float
    input_bytes: float
    layers_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds of one slot: forward and backward pass of one microbatch, including embedding and output."""
        return self.layers + self.sent + self.first + self.last

    def apart(self, layers: int) -> np.ndarray:
        """Return the seconds of a slot of a stage, for every first and last layer that the stage may have.

        The result is an array [layers, layers, 1], indexed by the first and the last layer of the stage. It is infinite
        where the last layer comes before the first. Only the first stage has the embedding, and only the last stage has
        the output.
        """
        table = np.full((layers, layers, 1), np.inf)
        for first in range(layers):
            for last in range(first, layers):
                ends = (first == 0) * self.first + (last == layers - 1) * self.last
                table[first, last] = (last - first + 1) * self.layers / self.depth + self.sent + ends
        return table

    def held(self, stage: LayerRange, layers: int, waiting: int) -> float:
        """Return the bytes of a stage that keeps `waiting` inputs.

        The bytes of embedding and output together are counted on the first stage, and again on the last stage.
        """
        ends = self.ends_bytes * (stage.first == 0 or stage.last == layers - 1)
        return (stage.last - stage.first + 1) * self.layers_bytes / self.depth + ends + waiting * self.input_bytes


class StageProblem(PhaseProblem):
    """The search problem of a training step in S stages with equal numbers of layers, under schedule 1F1B.

    Args:
        workload: the training step, with all layers and M microbatches.
        stages: S, the number of stages.
        mesh: sizes of the mesh axes within a stage, without the axis of the stages.
        side: the mesh axes along which pipelines run side by side. Layouts in which further axes shard only the batch
            are searched too, but priced too high. The problem with these axes in `side` prices such layouts exactly.

    Attributes:
        slots: the number of slots in which each stage runs its layers backward, M + S - 1. There are as many forward
            slots; with one microbatch, the last stage's forward result is not used, so it is not computed.

    Raises:
        PlanError: the stages do not divide the stacked layers; the microbatches do not divide the batch; pipelines of a
            model with experts run side by side; groups of tokens span microbatches; some first layers are not among
            those that repeat; the model has an encoder; or parameters are frozen.
    """

    phase = "train"

    def __init__(self, workload: Workload, stages: int, mesh: Mapping[str, int], side: tuple[str, ...] = ()):
        config, batch, count = workload.config, workload.batch, workload.microbatches
        periods = config.repeats
        if periods % stages:
            raise PlanError(f"cannot split {periods} stacked layers into {stages} stages.\n  Choose a divisor.")
        if batch % count:
            raise PlanError(f"cannot cut a batch of {batch} into {count} microbatches.\n  Choose a divisor.")
        if config.moe and (side or config.moe.groups):
            what = "pipelines side by side" if side else f"{config.moe.groups} groups of tokens"
            raise Unsearched("stages of this model", [f"it has experts and {what}"])
        if config.lead:
            raise Unsearched("stages of this model", ["its first layers are not among those that repeat"])
        if config.encoder_layers:
            raise Unsearched("stages of this model", ["it has an encoder"])
        if config.offload:
            raise Unsearched("stages of this model", ["copies of its activations to host memory have no price"])
        if config.lora or workload.update.frozen:
            raise Unsearched("stages of this model", ["some of its parameters are frozen"])
        sizes = config.sizes(batch // count, workload.length)
        if config.moe and not config.is_dropless:
            sizes |= {"C": config.moe.capacity(batch // count * workload.length // sizes["G"])}
        super().__init__(
            Case(
                config, sizes, dict(mesh), workload.chip, workload.dtype, microbatches=count, side=tuple(side),
                stages=stages, remat=config.remat_name,
            )
        )  # fmt: skip
        self._step = config, workload.dtype, batch, workload.length, replace(workload.update, microbatches=count)
        self.slots = count + stages - 1

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return self.case.stages

    @property
    def settles(self) -> bool:
        """Whether every gradient needs a line, which is false for stages.

        A stage sums gradients in every slot, except over the axes along which pipelines run side by side.
        """
        return False

    @cached_property
    def question(self) -> MeshProblem:
        """The problem of the layout of all stages."""
        case = self.case
        beside = {axis: self.axes[axis] for axis in case.side if axis in self.axes}
        read = read_stages(*self._step, case.stages, tuple(beside.items()))
        whole = {STAGES: case.stages, **self.axes}
        return MeshProblem(*read, self.axes, case.chip, case.microbatches, case.sizes, whole=whole)

    def lines(self, picks: Mapping[str, int]) -> list[LayoutLine]:
        """Return the lines of the layout that results from `picks`, followed by the line of the pipeline."""
        return [*super().lines(picks), LayoutLine("pipeline.layers", f"N_{STAGES}", "pipeline")]

    # -- the parts of a slot -------------------------------------------------------------------------------------------

    def apart(self, picks: Mapping[str, int]) -> Slots:
        """Divide the seconds and bytes of a layout into parts, by the layout lines on which they depend."""
        question, case = self.question, self.case
        at = [picks[option.name] for option in question.prices.choices]

        def total(tables: Iterable[Table]) -> float:
            return sum(float(table[tuple(at[number] for number in of)]) for of, table in tables)

        seconds = {"first": 0.0, "last": 0.0, "sent": 0.0, "layers": 0.0}
        for use in question.program.uses:
            if use.inside:
                is_sent = isinstance(use.what, UnknownSteps) and use.what.plan is sent
                place = "sent" if is_sent else self._place(unknowns_in(use.what))
                seconds[place] += total([*question.tables([use]), *question.hidden_of([use])])
        done = work(_inside(question.program.jaxpr))
        for array, table in question.of_work(done):
            seconds[self._place(array.unknowns)] += total([table])
        held = {"ends": 0.0, "layers": 0.0}
        moment, _ = question.peak(picks)
        peak = question.program.moments.at(moment)
        for arrays in (peak.arguments, peak.others):
            for array, count in arrays.items():
                place = "layers" if self._place(array.unknowns) == "layers" else "ends"
                held[place] += total(question.spread({array: count}))
        stream = prod(case.sizes[dim] for dim in "BLE") * itemsize(case.dtype)
        stream //= prod(size for axis, size in case.mesh.items() if axis in case.side)
        waits = total([question.prices.shared(unknowns_in(question.lines.spec("ffn.residual", "BLE")), float(stream))])
        waiting = min(case.microbatches, 2 * self.stages - 1)
        return Slots(
            depth=case.config.repeats // self.stages,
            **{place: value / self.slots for place, value in seconds.items()},
            once=self.problem().cost(picks) - sum(seconds.values()),
            ends_bytes=held["ends"],
            input_bytes=waits,
            layers_bytes=held["layers"] - waiting * waits,
        )

    def _place(self, unknowns: Iterable[str]) -> str:
        """Return the part of a stage to which unknowns belong: "first" (embedding), "last" (output) or "layers"."""
        lines = {line.removeprefix("optimizer.").removeprefix("gradients.") for line in self._lines_of({*unknowns})}
        if any(line.startswith("output.") and line not in _AS_STREAM for line in lines):
            return "last"
        return "first" if "embedding.table" in lines else "layers"

    def _lines_of(self, unknowns: set[str]) -> list[str]:
        return self.question.lines.lines_of(unknowns) if unknowns else []


_AS_STREAM = ("output.norm",)
"""Lines of the output that are sharded as the residual stream is."""


def _inside(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program that each stage runs: the body of the shard_map over the stages' mesh axis."""
    for equation in jaxpr.eqns:
        if program_of(equation) is None:
            inner = [*inner_jaxprs(equation)]
            if equation.primitive.name == "shard_map":
                return inner[0]
            found = [each for each in map(_inside, inner) if each is not jaxpr and each.eqns]
            if found:
                return found[0]
    return jaxpr.replace(eqns=[])


@lru_cache(maxsize=128)
def read_stages(
    config: ModelConfig,
    dtype: str,
    batch: int,
    length: int,
    update: Update,
    stages: int,
    beside: tuple[tuple[str, int], ...],
) -> ReadProgram:
    """Trace a training step in stages.

    Args:
        config, dtype, batch, length, update: the description of the step.
        stages: number of stages.
        beside: the mesh axes, with sizes, along which pipelines run side by side.
    """
    build = abstract_program(Language(config, jnp.dtype(dtype)), update, batch, length)
    around, side = {STAGES: stages, **dict(beside)}, tuple(axis for axis, _ in beside)
    return read_alike(build, _lines(replace(config, remat="none")), around=around, beside=side)


@lru_cache(maxsize=64)
def _lines(config: ModelConfig) -> Lines:
    """Return the lines of a model in stages, with the ties that the programs traced so far need."""
    layout = Layout.load(BASE).override({"pipeline.layers": f"N_{STAGES}"})
    lines = Lines.of(layout, {})
    for name in lines.trained:
        lines.hold(lines.owed(name))
    return lines
