"""Search for pipelines on a slice, over the numbers of stages and microbatches, and the mesh within a stage.

The number of stages must divide both the layers and an axis of the torus (on GPUs, the number of GPUs). For every such
number, every mesh of the devices of a stage, and every choice of mesh axes along which pipelines run side by side, the
best specs of a stage are found exactly (`StageProblem`). The answer gives a price for each layer, and separate prices
for embedding and output. These prices give the seconds of equal stages, each with embedding and output, as
`gspmd.pipeline` runs them. With the same prices, `gspmd.search.stages` also splits the layers freely, as Alpa may, over
submeshes of every size, with the embedding on the first stage and the output on the last stage.

Not covered: rounds, and stages over more than one torus axis. If stages use only a part of a torus axis, the rest of
the axis is priced as a ring, although it is a line (`PipelineRow.along`).

Source: Zheng et al. 2022, Alpa (arXiv 2201.12023), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, prod

import numpy as np

from gspmd.display.tables import Column, Sheet
from gspmd.display.units import amount_of_bytes, amount_of_seconds, mesh_text
from gspmd.hardware.chips import Chip
from gspmd.search import Answer, NothingFits
from gspmd.search.answers.candidate import TOLERANCE, StepBudget
from gspmd.search.answers.meshes import factorings, meshes
from gspmd.search.phase import LayoutLine
from gspmd.search.stages import LayerRange, NoSplit, StageSplit, split

from .pipeline import STAGES, Slots, StageProblem
from .workload import Workload

MOST = 2
"""The largest number of mesh axes within a stage: a torus has three axes, one of which is for the stages."""


@dataclass(frozen=True)
class PipelineRow:
    """The best pipeline with a given number of stages and microbatches.

    Attributes:
        stages, microbatches: S and M, the numbers of stages and of microbatches.
        along: number of devices along the torus axis that is divided into stages. If this number is above S, a stage
            has several of these devices. If dividing any of several torus axes leaves a stage the same mesh, the
            shortest of these axes counts. For GPUs, which have no torus, the number is S.
        problem: the search problem on the best mesh, which is `problem.case.mesh` with `problem.case.side`.
        answer: the answer of the problem, with the seconds of a step and the bytes of a device; None if no layout fits.
        prices: the prices of the parts of a step, or None if no layout fits.
        least: bytes of the smallest layout if no layout fits.
    """

    stages: int
    microbatches: int
    along: int
    problem: StageProblem
    answer: Answer | None
    prices: Slots | None
    least: float = 0.0

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of all mesh axes, with that of the stages first."""
        return {STAGES: self.stages, **self.problem.case.mesh}

    @property
    def bubble(self) -> float:
        """The fraction of slots in which a stage waits, (S - 1) / (M + S - 1)."""
        return (self.stages - 1) / (self.microbatches + self.stages - 1)

    @property
    def slotted(self) -> float:
        """Seconds of the M + S - 1 slots, without the work that runs once in a step; infinite if no layout fits."""
        return self.problem.slots * self.prices.seconds if self.prices else inf

    @property
    def lines(self) -> list[LayoutLine]:
        """The lines of the layout; an empty list if no layout fits."""
        return self.problem.lines(self.answer.picks) if self.answer else []


@dataclass(frozen=True)
class Table:
    """The best pipelines by their numbers of stages and microbatches.

    Attributes:
        rows: the best pipeline for each pair of numbers.
        free: for each number of microbatches, the unrestricted split that Alpa's dynamic program finds with the same
            prices. The submeshes of a split are, in order, the rows with this number of microbatches for which a layout
            fits.
    """

    rows: tuple[PipelineRow, ...]
    free: Mapping[int, StageSplit]

    @property
    def best(self) -> PipelineRow | None:
        """The fastest row, or None if no layout fits. Of equally fast rows, it is the one with the fewest stages."""
        found = [(float(f"{row.answer.seconds:.9g}"), row.stages, row) for row in self.rows if row.answer]
        return min(found, key=lambda each: each[:2])[-1] if found else None


def table(
    workload: Workload,
    torus: Sequence[int],
    limit: float,
    microbatches: Sequence[int] = (8, 16, 32),
    tell: Callable[[str], None] = lambda text: None,
) -> Table:
    """Find the best pipeline for every number of stages and of microbatches.

    Args:
        workload: the training step, whose number of microbatches is ignored.
        torus: number of devices along each torus axis; for GPUs, the numbers of nodes and of GPUs per node.
        limit: the largest number of bytes that a device may hold.
        microbatches: the numbers of microbatches to try; those that do not divide the batch are skipped.
        tell: a function that is called with lines about the progress.

    Raises:
        PlanError: the model has a part that cannot be searched.

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
    rows, periods = [], workload.config.repeats
    whole = [prod(torus)] if workload.chip.is_switch else torus  # the sizes that stages may divide
    for stages in range(2, max(whole) + 1):
        if periods % stages or not any(size % stages == 0 for size in whole):
            continue
        for count in microbatches:
            if workload.batch % count == 0:
                tell(f"{stages} stages, {count} microbatches")
                made = _problems(replace(workload, microbatches=count), stages, torus)
                solved = (row for each in made if (row := _solved(*each, limit)))
                best = min(solved, key=lambda row: (row.answer.seconds if row.answer else inf, row.least), default=None)
                rows += [best] if best else []
    free = {count: _free(rows, count, periods, prod(torus), limit) for count in dict.fromkeys(microbatches)}
    return Table(tuple(rows), {count: found for count, found in free.items() if found})


def _problems(workload: Workload, stages: int, torus: Sequence[int]) -> Iterator[tuple[int, StageProblem]]:
    """Yield, for every mesh of a stage and choice of `side`, the size of the split torus axis and the problem."""
    nodes = workload.chip.nodes({"x": prod(torus) // stages})
    for size, mesh in _meshes_of_stages(workload.chip, stages, torus):
        axes = [axis for axis, devices in mesh.items() if devices > 1]
        for number in range(len(axes) + 1 if not workload.config.moe else 1):
            for side in combinations(axes, number):
                # One pipeline's mesh is priced as if its devices were next to each other, which matters between nodes.
                if nodes > 1 and side != tuple(axes[:number]):
                    continue
                if workload.batch // workload.microbatches % prod(mesh[axis] for axis in side) == 0:
                    yield size, StageProblem(workload, stages, mesh, side)


def _meshes_of_stages(chip: Chip, stages: int, torus: Sequence[int]) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield, for every mesh of a stage's devices, the size of the torus axis that the stages split, and the mesh."""
    if chip.is_switch:  # Behind switches, a stage consists of devices next to each other.
        yield from ((stages, mesh) for mesh in factorings(prod(torus) // stages, chip) if len(mesh) <= MOST)
        return
    seen = set()
    for size in sorted({size for size in torus if size % stages == 0}):
        rest = list(torus)
        rest[rest.index(size)] = size // stages
        for mesh in meshes(rest, most=MOST):
            if (shape := tuple(sorted(mesh.values()))) not in seen:
                seen.add(shape)
                yield size, mesh


def _solved(along: int, problem: StageProblem, limit: float) -> PipelineRow | None:
    stages, count = problem.stages, problem.case.microbatches
    budget = StepBudget()
    try:
        answer = problem.search(limit, budget, budget.start, TOLERANCE).best()
    except NothingFits as fault:
        if fault.nearest is None:
            return None
        return PipelineRow(stages, count, along, problem, None, None, fault.nearest.bytes)
    return PipelineRow(stages, count, along, problem, answer, problem.apart(answer.picks))


def _free(rows: Sequence[PipelineRow], count: int, periods: int, devices: int, limit: float) -> StageSplit | None:
    """Return the cheapest unrestricted split over all submeshes that have prices, or None if there is no split."""
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
    """Return a table of the pipelines for the terminal."""
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
            f"{row.slotted / free.seconds:.3f}" if row.answer and free else "",
            amount_of_bytes(row.answer.bytes if row.answer else row.least), "yes" if row.answer else "no",
        )  # fmt: skip
        style = "[bold]{}[/]" if row is found.best else "{}" if row.answer else "[dim]{}[/]"
        shown.add(*(style.format(cell) for cell in cells))
    return shown
