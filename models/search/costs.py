"""What a step of a model costs besides its products: moves of a tensor, statistics, passes over memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from gspmd.annotate import Spec
from gspmd.hardware.chips import Chip
from gspmd.hardware.dtypes import itemsize
from gspmd.planner.graph.resharding import move
from gspmd.planner.steps import Environment
from gspmd.search.moves import Moves, environment_of, placements

from ..config import ModelConfig

STAGES = "p"
"""The mesh axis of a pipeline's stages."""
FLOAT32 = 4
"""Bytes of a statistic."""
KEPT_PRODUCTS = ("dots", "dots-except-hidden", "selective")
"""Choices of remat that keep the products of a block."""


@dataclass(frozen=True)
class Line:
    """A line of a layout.

    Attributes:
        key: section and key, `ffn.w_in`.
        text: its spec, or via.
        choice: the choice that it comes from; several lines may come from one.
        section: the overriding section that it stands in; empty for none.
    """

    key: str
    text: str
    choice: str
    section: str = ""


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes on one device of one mesh.

    Attributes:
        config: the model.
        sizes: of every dimension, in one microbatch.
        mesh: sizes of the mesh axes.
        chip: whose seconds.
        dtype: compute dtype.
        trains: whether there is a backward pass.
        microbatches: how many there are.
        side: in the stages of a pipeline, the mesh axes along which pipelines run side by side: they split the batch
            and nothing else, and gradients stay partial sums over them, and over no others, until the step ends.
            None where there are no stages.
        stages: of a pipeline, whose mesh axis `STAGES` is not one of `mesh`.
    """

    config: ModelConfig
    sizes: Mapping[str, int]
    mesh: Mapping[str, int]
    chip: Chip
    dtype: str = "bfloat16"
    trains: bool = True
    microbatches: int = 1
    side: tuple[str, ...] | None = None
    stages: int = 1

    @cached_property
    def environment(self) -> Environment:
        """What the planner's costs depend on."""
        return environment_of(self.sizes, self.mesh, self.chip)

    @property
    def width(self) -> int:
        """Bytes of an element in the compute dtype."""
        return itemsize(self.dtype)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that have more than one device."""
        return tuple(axis for axis, size in self.mesh.items() if size > 1)

    @property
    def remat(self) -> str:
        """What a block computes again; nothing where there is one repeat of blocks, or no backward pass."""
        return self.config.remat if self.trains and self.config.layers > self.config.period else "none"

    @property
    def holds_all(self) -> bool:
        """Whether a block's gathered weights are kept for its backward pass."""
        return self.trains and self.remat == "none"

    @property
    def times(self) -> int:
        """How often what is computed again with its block runs forward."""
        return 1 if self.remat == "none" else 2

    def invariant(self, stacked: int) -> bool:
        """Whether a weight of so many stacked layers is the same wherever the loop over microbatches takes it.

        One of several layers is another in each trip of the loop over them.
        """
        return self.trains and self.microbatches > 1 and self.side is None and stacked <= 1

    def place(self, dims: str, whole: Iterable[str] = ()) -> tuple[Spec, ...]:
        """Every placement of a tensor; in stages, with what lies side by side first in the batch and nowhere else."""
        every, side = placements(dims, self.sizes, self.mesh, whole), self.side or ()
        return tuple(spec for spec in every if lies_beside(spec, side))

    def shards(self, spec: Spec) -> int:
        """Into how many parts a placement cuts a tensor."""
        return prod(self.mesh.get(axis, 1) for axis in spec.used)

    def local(self, spec: Spec) -> int:
        """Elements on one device."""
        return prod(self.sizes[dim] for dim in spec.dims) // self.shards(spec)

    def moved(
        self, before: Spec, after: Spec, width: int, reduce: str = "sum", sizes: Mapping[str, int] | None = None
    ) -> float:
        """Seconds of the cheapest chain of steps."""
        if before == after:
            return 0.0
        steps = move(before, after, sizes or self.sizes, self.mesh, width, self.chip, reduce=reduce)
        return sum(step.seconds for step in steps)

    def settled(self, spec: Spec, axes: Sequence[str], reduce: str = "sum") -> float:
        """Seconds to add up a float32 statistic that is split over mesh axes."""
        return self.moved(spec.with_partial(tuple(axes)), spec, FLOAT32, reduce) if axes else 0.0

    def summed(self, spec: Spec, axes: Sequence[str] = ()) -> float:
        """Seconds to add a float32 tensor up over mesh axes and over all stages."""
        if self.stages == 1:
            return self.settled(spec, axes)
        mesh = {STAGES: self.stages, **self.mesh}
        steps = move(spec.with_partial((STAGES, *axes)), spec, self.sizes, mesh, FLOAT32, self.chip)
        return sum(step.seconds for step in steps)

    def in_memory(self, passes: float, elements: int, width: int) -> float:
        """Seconds of so many passes over an array in memory."""
        return passes * elements * width / self.chip.hbm_bandwidth

    def stacked(self, elements: int) -> float:
        """Seconds to write what all blocks keep into stacks, and to read it from there in the backward pass.

        Of a single repeat of blocks there are no stacks: what its products make stays where it is.
        """
        looped = self.trains and self.config.layers > self.config.period
        return self.in_memory(2, elements, self.width) if looped else 0.0

    @property
    def accumulates(self) -> bool:
        """Whether gradients are added up in memory: of microbatches, or of the slots of a pipeline."""
        return self.trains and (self.microbatches > 1 or self.side is not None)

    def between(self, dims: str, dtype: str, sources: Sequence[Spec], targets: Sequence[Spec]) -> np.ndarray:
        """[sources, targets] seconds to move a tensor."""
        tensor = Moves(self.environment, tuple(dims), dtype)
        return tensor.between(tensor.numbers(sources), tensor.numbers(targets), by="sources")


def lies_beside(spec: Spec, side: tuple[str, ...]) -> bool:
    """Whether a spec has these mesh axes first in the batch, if it has one, and nowhere else.

    >>> [lies_beside(Spec.parse(text), ("x",)) for text in ("B_xyL", "B_yxL", "BL_x", "EF_y", "EF_x")]
    [True, False, False, True, False]
    """
    first = spec.axes_of("B")[: len(side)] if "B" in spec.dims else ()
    return first == side if "B" in spec.dims else not {*side} & {*spec.used}
