"""Pipelines on a slice: how many stages and microbatches, on which mesh in a stage, by the search's own costs.

For every number of stages that divides the layers and an axis of the torus, each mesh of what is left of the torus, and
each choice of its axes along which pipelines run side by side, the stage's specs are searched exactly
(`StageProblem`). The layers of its answer have a price each, embedding and output one apart, and `gspmd.search.stages`
splits them: alike, as a pipeline here runs them, each stage with embedding and output; and in any way, as Alpa may, on
submeshes of every size, where these two are on the first and the last stage only.

Left out: rounds, and stages over more than one torus axis. Where stages take a part of a torus axis, what is left of it
counts as a ring, which it is not (`PipelineRow.along`).

Source: Zheng et al. 2022, Alpa (arXiv 2201.12023), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

import numpy as np

from gspmd.display.tables import Column, Sheet
from gspmd.display.units import amount_of_bytes, amount_of_seconds, mesh_text
from gspmd.search import Answer, NothingFits, Search
from gspmd.search.answers.candidate import TOLERANCE, StepBudget
from gspmd.search.answers.meshes import meshes
from gspmd.search.phase import LayoutLine
from gspmd.search.stages import LayerRange, NoSplit, StageSplit, split

from .pipeline import STAGES, StageProblem
from .workload import Workload

MOST = 2
"""Mesh axes of a stage at most: with that of the stages they are the three of a torus."""


@dataclass(frozen=True)
class StagePrices:
    """Seconds of a microbatch and bytes, taken apart: of a layer, of embedding and output, of what is sent.

    Attributes:
        layer: seconds of one stacked layer, forward and backward.
        first, last: of the embedding, and of output and loss.
        sent: of the permutes behind both.
        layer_bytes, ends_bytes: what a layer holds, and embedding and output together.
        input_bytes: the input of a stage, of one microbatch.
    """

    layer: float
    first: float
    last: float
    sent: float
    layer_bytes: float
    ends_bytes: float
    input_bytes: float

    @classmethod
    def of(cls, problem: StageProblem, picks: Mapping[str, int], layers: int) -> StagePrices:
        """Return the seconds and bytes of an answer, in a stage of so many stacked layers."""
        slots = problem.apart(picks)
        return cls(
            slots.layers / layers, slots.first, slots.last, slots.sent,
            slots.layers_bytes / layers, slots.ends_bytes, slots.input_bytes,
        )  # fmt: skip

    def alike(self, layers: int) -> np.ndarray:
        """[layers, layers, 1] seconds of stages that all have embedding and output."""
        return self._table(layers, lambda first, last: self.first + self.last)

    def apart(self, layers: int) -> np.ndarray:
        """[layers, layers, 1] seconds of stages of which only the first and the last have them."""
        return self._table(layers, lambda first, last: (first == 0) * self.first + (last == layers - 1) * self.last)

    def _table(self, layers: int, ends: Callable[[int, int], float]) -> np.ndarray:
        table = np.full((layers, layers, 1), np.inf)
        for first in range(layers):
            for last in range(first, layers):
                table[first, last] = (last - first + 1) * self.layer + self.sent + ends(first, last)
        return table

    def held(self, stage: LayerRange, layers: int, waiting: int) -> float:
        """Bytes of a stage that keeps so many inputs, with embedding and output if it is the first or the last."""
        ends = self.ends_bytes * (stage.first == 0 or stage.last == layers - 1)
        return (stage.last - stage.first + 1) * self.layer_bytes + ends + waiting * self.input_bytes


@dataclass(frozen=True)
class PipelineRow:
    """The best pipeline of so many stages and microbatches.

    Attributes:
        stages, microbatches: S and M.
        along: devices along the torus axis that the stages lie on; all of them are stages only if they are S.
        problem: of the best mesh in a stage, with `problem.case.mesh` and `problem.case.side`.
        answer: to it: the seconds of a step, and bytes of a device; None where nothing fits.
        prices: of its layers.
        split: the layers in stages that are alike, whose seconds are a step's but for what comes once.
        least: bytes that the smallest holds, where nothing fits.
    """

    stages: int
    microbatches: int
    along: int
    problem: StageProblem
    answer: Answer | None
    prices: StagePrices | None
    split: StageSplit | None
    least: float = 0.0

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of all mesh axes, that of the stages first."""
        return {STAGES: self.stages, **self.problem.case.mesh}

    @property
    def bubble(self) -> float:
        """The share of slots in which a stage waits, (S - 1) / (M + S - 1)."""
        return (self.stages - 1) / (self.microbatches + self.stages - 1)

    @property
    def lines(self) -> list[LayoutLine]:
        """The lines of the layout; none where nothing fits."""
        return self.problem.lines(self.answer.picks) if self.answer else []


@dataclass(frozen=True)
class Table:
    """Pipelines by their numbers of stages and microbatches.

    Attributes:
        rows: the best of each.
        free: by microbatches, the split of any kind that Alpa's program finds over the same prices; its submeshes are
            the rows with so many microbatches that fit, in order.
    """

    rows: tuple[PipelineRow, ...]
    free: Mapping[int, StageSplit]

    @property
    def best(self) -> PipelineRow | None:
        """The row with the fewest seconds, with the fewest stages of those that are the same; None if nothing fits."""
        found = [row for row in self.rows if row.answer]
        return min(found, key=lambda row: (float(f"{_seconds(row):.9g}"), row.stages), default=None)


def table(
    workload: Workload,
    torus: Sequence[int],
    limit: float,
    microbatches: Sequence[int] = (8, 16, 32),
    tell: Callable[[str], None] = lambda text: None,
) -> Table:
    """Find the best pipeline for every number of stages and of microbatches.

    Args:
        workload: the training step, in whichever number of microbatches.
        torus: devices along each torus axis.
        limit: bytes that a device may hold.
        microbatches: which numbers of them are tried; those that do not divide the batch are not.
        tell: told what is being done.

    Raises:
        PlanError: the model has what is not searched.

    Example:
        >>> from gspmd.hardware.chips import CHIPS
        >>> from gspmd_models import ModelConfig
        >>> small = Workload(ModelConfig(layers=4), CHIPS["tpu-v5p"], batch=32, length=64)
        >>> found = table(small, (2, 2), limit=1e9, microbatches=(4, 8))
        >>> [(row.stages, row.microbatches, f"{row.bubble:.0%}") for row in found.rows]
        [(2, 4, '20%'), (2, 8, '11%')]
        >>> str(found.best.lines[-1].text)
        'N_p'
    """
    rows, periods = [], workload.config.layers // workload.config.period
    for stages in range(2, max(torus) + 1):
        if periods % stages or not any(size % stages == 0 for size in torus):
            continue
        for count in microbatches:
            if workload.batch % count == 0:
                tell(f"{stages} stages, {count} microbatches")
                made = _problems(replace(workload, microbatches=count), stages, torus)
                rows += [row for row in [_best(made, periods, limit)] if row]
    free = {count: _free(rows, count, periods, prod(torus), limit) for count in dict.fromkeys(microbatches)}
    return Table(tuple(rows), {count: found for count, found in free.items() if found})


def _problems(workload: Workload, stages: int, torus: Sequence[int]) -> Iterator[tuple[int, StageProblem]]:
    """The problem of every mesh in a stage and every choice of pipelines side by side; whole torus axes first."""
    seen = set()
    for size in sorted({size for size in torus if size % stages == 0}):
        rest = list(torus)
        rest[rest.index(size)] = size // stages
        for mesh in meshes(rest, MOST):
            if (shape := tuple(sorted(mesh.values()))) in seen:
                continue
            seen.add(shape)
            axes = [axis for axis, devices in mesh.items() if devices > 1]
            for number in range(len(axes) + 1 if not workload.config.moe else 1):
                for side in combinations(axes, number):
                    if workload.batch // workload.microbatches % prod(mesh[axis] for axis in side) == 0:
                        yield size, StageProblem(workload, stages, mesh, side)


def _best(made: Iterator[tuple[int, StageProblem]], periods: int, limit: float) -> PipelineRow | None:
    best: PipelineRow | None = None
    for along, problem in made:
        row = _solved(along, problem, periods, limit)
        if row is not None and (best is None or _rank(row) < _rank(best)):
            best = row
    return best


def _solved(along: int, problem: StageProblem, periods: int, limit: float) -> PipelineRow | None:
    stages, count = problem.stages, problem.case.microbatches
    try:
        answer = Search(problem.problem(limit), StepBudget(), TOLERANCE).best()
    except NothingFits as fault:
        if fault.nearest is None:
            return None
        return PipelineRow(stages, count, along, problem, None, None, None, fault.nearest.bytes)
    prices = StagePrices.of(problem, answer.picks, periods // stages)
    alike = split(prices.alike(periods), (1,), stages, count, alike=True)
    return PipelineRow(stages, count, along, problem, answer, prices, alike)


def _seconds(row: PipelineRow) -> float:
    return row.answer.seconds if row.answer else float("inf")


def _rank(row: PipelineRow) -> tuple[float, float]:
    return _seconds(row), row.least


def _free(rows: Sequence[PipelineRow], count: int, periods: int, devices: int, limit: float) -> StageSplit | None:
    """The cheapest split of any kind over the prices of all submeshes."""
    prices = [(row.stages, row.prices) for row in rows if row.prices and row.microbatches == count]
    if not prices:
        return None

    def fits(stage: LayerRange, behind: int) -> bool:
        return prices[stage.submesh][1].held(stage, periods, min(count, behind + 1)) <= limit

    seconds = np.concatenate([each.apart(periods) for _, each in prices], axis=2)
    try:
        return split(seconds, [devices // stages for stages, _ in prices], devices, count, fits)
    except NoSplit:
        return None


def sheet(found: Table) -> Sheet:
    """The pipelines as a table."""
    names = ("stages", "microbatches", "mesh", "side by side", "a step", "bubble", "of any split", "memory", "fits")
    left = ("mesh", "side by side", "fits")
    shown = Sheet(
        "pipelines: the best of each number of stages and microbatches",
        [Column(name, "left" if name in left else "right", goes=name == "of any split") for name in names],
    )
    for row in found.rows:
        case, free = row.problem.case, found.free.get(row.microbatches)
        cells = (
            str(row.stages), str(row.microbatches), mesh_text(row.mesh), "".join(case.side),
            amount_of_seconds(row.answer.seconds) if row.answer else "", f"{row.bubble:.0%}",
            f"{row.split.seconds / free.seconds:.3f}" if row.split and free else "",
            amount_of_bytes(row.answer.bytes if row.answer else row.least), "yes" if row.answer else "no",
        )  # fmt: skip
        style = "[bold]{}[/]" if row is found.best else "{}" if row.answer else "[dim]{}[/]"
        shown.add(*(style.format(cell) for cell in cells))
    return shown
