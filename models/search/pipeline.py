"""The search problem of a pipeline's training step: one stage, which all stages are, on the mesh that each of them has.

A step is M + S - 1 slots, in which every stage computes, also where it waits (`gspmd.pipeline`), and what comes once:
gradients are reduced over the mesh axes along which pipelines run side by side, what every stage has a copy of is
summed over the stages, and the optimizer updates. In a slot a stage runs its layers forward, and in its backward pass
forward again, from their input, then backward; embedding and output are on every stage, and computed in every slot.

Left out: what rounds send, where there is more than one; routers' figures and the loss, a few bytes at the end of the
step. Where attention brings keys to queries, the forward pass counts what its gradient sends too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from gspmd.annotate import Spec
from gspmd.annotate.errors import PlanError
from gspmd.hardware.links import collective_seconds
from gspmd.search import Term

from .costs import STAGES, Line, lies_beside
from .parts.ends import Ends, Tables
from .parts.part import Part, product_terms
from .training import TrainingProblem
from .unsearched import Unsearched
from .weights import Placed
from .workload import Workload

FORWARD = ", forward"
"""Behind the name of a term that has a part's seconds of the forward slots."""


class StageProblem(TrainingProblem):
    """The search problem of a training step in S stages of as many layers each, under 1F1B or GPipe.

    Args:
        workload: the step, of all layers and in M microbatches.
        stages: S.
        mesh: sizes of the mesh axes of one stage, all but that of the stages.
        side: mesh axes along which pipelines run side by side. Layouts in which more axes split nothing but the batch
            are in the space too, and cost less than is said here: what they cost is said where `side` has them all.

    Attributes:
        slots: in which each stage runs its layers backward: M + S - 1. As many run forward; of one microbatch nobody
            takes what the last stage makes there, so it is not made.

    Raises:
        PlanError: as of `TrainingProblem`; or the stages do not divide the stacked layers; or experts' groups are not
            those of single sequences, or pipelines of experts run side by side; or blocks are parallel.
    """

    def __init__(self, workload: Workload, stages: int, mesh: Mapping[str, int], side: tuple[str, ...] = ()):
        config = workload.config
        periods = config.layers // config.period
        if periods % stages:
            raise PlanError(f"cannot split {periods} stacked layers into {stages} stages.\n  Choose a divisor.")
        if config.block == "parallel":
            raise Unsearched("stages of this model", ["its blocks are parallel"])
        if config.moe and (side or config.moe.groups):
            what = "pipelines side by side" if side else f"{config.moe.groups} groups of tokens"
            raise Unsearched("stages of this model", [f"it has experts and {what}"])
        of_stage = replace(config, layers=config.layers // stages)
        super().__init__(replace(workload, config=of_stage), mesh)
        self.costs = replace(self.costs, side=side, stages=stages)
        self.slots = workload.microbatches + stages - 1
        self._known: dict[Spec, float] = {}

    @cached_property
    def tables(self) -> list[Term]:
        """Those of what happens once, and as often as there are slots the rest."""
        found = [term for part in self.parts for term in part.once()]
        for count, terms in ((self.forward_slots, self._forward()), (self.slots, self._backward())):
            found += [replace(term, seconds=count * term.seconds) for term in terms]
        return [*found, self._stream(), *self._copies(), *self._beside()]

    @property
    def stages(self) -> int:
        """S."""
        return self.costs.stages

    @property
    def forward_slots(self) -> int:
        """In which each stage runs forward."""
        return self.slots - (self.costs.microbatches == 1)

    def _backward(self) -> Iterator[Term]:
        """What a stage runs in its backward slot: everything forward, from its input, and backward."""
        for part in self.parts:
            yield from part.terms()
            yield from part.accumulated()
            yield from part.of_products()

    def _forward(self) -> Iterator[Term]:
        """What a stage runs in its forward slot: embedding and layers, without the output."""
        alone = TrainingProblem._parts(_Forward(self))
        for part in self.parts:
            for name, (product, tensors, times) in part.products.items() if not isinstance(part, Ends) else ():
                yield from _forward_only(product_terms(name, product.forward(), tensors, times))
        for part in alone:
            # of the two ends the lookup alone
            for term in _forward_only(Tables.terms(part) if isinstance(part, Ends) else part.terms()):
                at = [self._same(name, part) for name in term.of]
                yield replace(term, seconds=term.seconds[np.ix_(*at)])

    def _same(self, name: str, part: Part) -> np.ndarray:
        """For each option of a choice, the number of the one in which the forward pass finds the tensor there."""
        if name in part.vias:  # which are the same in both passes
            return np.arange(len(part.vias[name].vias))
        numbers = {_held(option): number for number, option in enumerate(part.choices[name])}
        return np.array([numbers[_held(option)] for option in self.choices_of_parts[name]])

    def _stream(self) -> Term:
        """A permute to the next stage, one back to the previous; and the inputs that wait for their backward pass."""
        costs, residuals = self.costs, self.choices_of_parts["residual"]
        local = np.array([costs.local(spec) * costs.width for spec in residuals])
        mesh = {STAGES: self.stages, **costs.mesh}
        sent = [collective_seconds("collective-permute", (STAGES,), mesh, each, costs.chip) for each in local]
        # A single last tick, as two stages have, sends nothing.
        count = self.forward_slots + self.slots - (self.stages == 2) if self.stages > 1 else 0
        # All stages run one program, so each has the room that the first one needs.
        waiting = min(costs.microbatches, 2 * self.stages - 1)
        return Term("stream: residual", ("residual",), count * np.array(sent), bytes=waiting * local.astype(float))

    def _copies(self) -> Iterator[Term]:
        """The gradients of tables, last norm and bias, of which each stage has a copy, are summed over the stages."""
        for weight in next(part for part in self.parts if isinstance(part, Ends)).weights:
            seconds = [self._summed(placed.spec) for placed in self.choices_of_parts[weight.key]]
            yield Term(f"summed over stages: {weight.key}", (weight.key,), np.array(seconds))
        for part in self.parts:
            for vector in (each for each in part.vectors if not each.stacked):
                seconds = [
                    vector.copies * self._summed(vector.spec(each)) for each in self.choices_of_parts[vector.choice]
                ]
                name = f"summed over stages: {part.name}.vectors {vector.choice}"
                yield Term(name, (vector.choice,), np.array(seconds))

    def _summed(self, spec: Spec) -> float:
        """Seconds to add up a gradient over the stages."""
        if spec not in self._known:
            self._known[spec] = self.costs.summed(spec)
        return self._known[spec]

    def _beside(self) -> Iterator[Term]:
        """Vias in which an axis of pipelines side by side lies elsewhere are not allowed."""
        side = self.costs.side
        for name, product in self.vias.items() if side else ():
            lies = [
                all(lies_beside(spec, side) for via in product.via(number) for spec in via.specs)
                for number in range(len(product.vias))
            ]
            yield Term(f"side by side: {name}", (name,), np.where(lies, 0.0, np.inf))

    def lines(self, picks: Mapping[str, int]) -> list[Line]:
        """The lines of the layout that these picks stand for, that of the pipeline behind them."""
        return [*super().lines(picks), Line("pipeline.layers", f"N_{STAGES}", "pipeline")]


class _Forward:
    """Stands for the problem where only its costs are asked for: those of a forward pass."""

    def __init__(self, of: StageProblem):
        self.costs = replace(of.costs, trains=False)


def _forward_only(terms: Any) -> Iterator[Term]:
    """The same seconds under a name of their own; what is held is counted with the backward pass."""
    for term in terms:
        yield replace(term, name=f"{term.name}{FORWARD}", bytes=None)


def _held(option: Any) -> Any:
    return option.spec if isinstance(option, Placed) else option
