"""The search problem of a training step: choices of a model's specs, and what each costs in seconds and bytes.

Layers of one kind share their specs, so there is one choice for each kind of tensor, and what a layer costs counts once
for each layer. Every table but a few is the planner's: the products' (`gspmd.search.products`), and the steps of norms,
attention, embedding, experts and loss. What no plan counts is added as its FLOPs or its passes over memory, since it is
what sets layouts apart that send the same: attention's own products, what is elementwise, the optimizer's update, what
blocks keep for the backward pass, and gradients that are added up in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from gspmd.annotate.errors import PlanError
from gspmd.search import Term

from ..config import ModelConfig
from .costs import Costs
from .parts.attention import Attention
from .parts.dropless import Dropless
from .parts.ends import Ends, Stream
from .parts.experts import Experts
from .parts.feed_forward import FeedForward
from .parts.global_norm import NORM, SCALAR, axes_to_sum, terms_of
from .parts.parallel import TrainedBlock
from .parts.part import Part
from .parts.shared_experts import SharedExperts
from .problem import PhaseProblem
from .unsearched import Unsearched
from .workload import Workload


class TrainingProblem(PhaseProblem):
    """The search problem of a model's training step on one mesh.

    Args:
        workload: the step.
        mesh: sizes of the mesh axes.

    Raises:
        PlanError: the model has what is not searched: parallel blocks with experts, noisy routers, adapters; or the
            microbatches do not divide the batch.
    """

    phase = "train"

    def __init__(self, workload: Workload, mesh: Mapping[str, int]):
        config, batch, count = workload.config, workload.batch, workload.microbatches
        _check(config)
        if batch % count:
            raise PlanError(f"cannot cut a batch of {batch} into {count} microbatches.\n  Choose a divisor.")
        sizes = config.sizes(batch // count, workload.length)
        if config.moe:
            sizes |= {"C": config.moe.capacity(batch // count * workload.length // sizes["G"])}
        super().__init__(Costs(config, sizes, dict(mesh), workload.chip, workload.dtype, microbatches=count))

    @cached_property
    def choices(self) -> dict[str, Sequence[Any]]:
        """Those of the parts, and the mesh axes over which the global norm of the gradients is summed."""
        return self.choices_of_parts | ({NORM: self._summed_over} if self._summed_over else {})

    @cached_property
    def terms(self) -> list[Term]:
        """Every table."""
        return [*self.tables, *terms_of(self.costs, self.parts, self._summed_over)]

    @property
    def too_dear(self) -> float:
        """Seconds of the global norm where it is priced over all mesh axes, of which some may shard no weight."""
        over = self._summed_over
        return self.costs.summed(SCALAR, over[0]) if len(over) == 1 else 0.0

    @cached_property
    def _summed_over(self) -> tuple[tuple[str, ...], ...]:
        """Sets of mesh axes over which the global norm may be summed; none, where it is left out."""
        return axes_to_sum(self.costs, self.choices_of_parts, self.tables)

    def _parts(self) -> list[Part]:
        costs, config = self.costs, self.costs.config
        residual = costs.place("BLE")
        parts, attention = [Stream(costs, residual)], Attention(costs, residual)
        if config.block == "parallel":
            return [*parts, TrainedBlock(costs, residual, attention), Ends(costs, residual)]
        parts.append(attention)
        routed = config.layers // config.moe.every if config.moe else 0
        if routed < config.layers:
            parts.append(FeedForward(costs, residual, config.layers - routed))
        if routed:
            kind = Dropless if config.moe.dispatch == "dropless" else Experts
            parts.append(experts := kind(costs, residual, routed))
            if config.moe.shared:
                parts.append(SharedExperts(costs, residual, experts))
        return [*parts, Ends(costs, residual)]


def _check(config: ModelConfig) -> None:
    faults = [
        (bool(config.block == "parallel" and config.moe), "its blocks are parallel, and have experts"),
        (bool(config.moe and config.moe.noisy), "its router adds noise by a second matrix"),
        (bool(config.lora), "it has adapters, beside weights that are not trained"),
    ]
    found = [what for wrong, what in faults if wrong]
    if found:
        raise Unsearched("layouts to train this model", found)
