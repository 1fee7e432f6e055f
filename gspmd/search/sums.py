"""Costs of summing a tensor over some dimensions, as in a mean over positions, as arrays over its placements.

The tensor is moved to the placement in which summing costs the least, and is summed there. The sum is then moved and
reduced to its target placement. In the gradient nothing is summed; the cotangent is moved and then broadcast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gspmd.annotate.spec import Spec
from gspmd.hardware.chips import Chip
from gspmd.lowerings.call import make_plan
from gspmd.lowerings.unknown import planned_steps
from gspmd.planner.gradients import backward_tensors
from gspmd.planner.graph.contractions import ContractionTable
from gspmd.planner.graph.paths import FAR
from gspmd.planner.steps import Contraction, Environment
from gspmd.planner.unknown import Unknown, UnknownSteps, placed, unknowns_in
from gspmd.search.moves import PICOSECOND


def ends_of(what: Unknown) -> tuple[Spec, Spec] | None:
    """Return the specs of a tensor before and after it is summed, with unknowns, or None if the step is no such sum."""
    if not (isinstance(what, UnknownSteps) and what.plan is planned_steps):
        return None
    equation, _, _, _, via, *_, backward = what.arguments
    (first, *terms), (result, *results) = equation.terms, equation.outputs
    if via is not None or terms or results or len(first.operands) > 1 or len(first.operands[0].specs) > 1:
        return None
    ends = first.operands[0].specs[0], result
    if any(spec.partial or spec.reduced for spec in ends) or not {*result.dims} < {*ends[0].dims}:
        return None
    # The stages of a pipeline lie along a mesh axis that is no unknown.
    if any(spec.used - {*unknowns_in(spec)} for spec in ends):
        return None
    return ends[::-1] if backward else ends


@dataclass(frozen=True)
class SumPrices:
    """A sum over dimensions, or its gradient, with its cost for every pair of placements before and after it.

    Attributes:
        table: the planner's table of the joint placements in which the sum may be computed, for tensors of any spec.
        before, after: the placements of the tensor before the sum or gradient, and those of the result after it.
    """

    table: ContractionTable
    before: Sequence[Spec]
    after: Sequence[Spec]

    @classmethod
    def of(
        cls, arguments: tuple[Any, ...], mesh: tuple[tuple[str, int], ...], chip: Chip, *ends: Sequence[Spec]
    ) -> "SumPrices":
        """Return the prices of steps that `ends_of` accepts.

        Args:
            arguments: the arguments with which `planned_steps` plans these steps.
            mesh, chip: the mesh, and the chip for which seconds are predicted.
            ends: two sequences: the placements before the sum or gradient, and those after it.
        """
        equation, sizes, _, dtypes, _, *numbers, backward = arguments
        # On one device, for the tensors' dtypes and names.
        plan = make_plan(placed(equation, {}), sizes, (), dtypes, chip, "blocking", None, *numbers)
        (left,), (target,) = plan.inputs, plan.outputs
        if backward:
            (left, *_), (target,) = backward_tensors(plan.routine, plan.inputs, plan.outputs, ())
        return cls(ContractionTable(Environment.of(sizes, mesh, chip), left, Contraction(None, target)), *ends)

    @cached_property
    def seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays [before, after]: the seconds of the move before the sum, and of everything from the sum on."""
        left, result, dims = self.table.left, self.table.result, self.table.dims
        # In this order, so that among equals the planner's choice comes first.
        rows = sorted(range(len(left.nodes)), key=lambda row: str(left.spec(row)))
        targets = [Spec(dims, tuple(map(spec.axes_of, dims))) for spec in self.after]
        numbers = [left.paths.number(spec) for spec in self.before]
        ends = [result.paths.number(spec) for spec in targets]
        # A number below 0 is that of a placement whose mesh axes do not divide the sizes: nothing leads there.
        refused = np.full(len(rows), FAR)
        come = [refused if each < 0 else left.paths.costs_from(each)[left.nodes[rows]] for each in numbers]
        onward = [refused if each < 0 else result.paths.costs_to(each)[result.nodes[rows]] for each in ends]
        settled = np.stack(onward) + self.table.costs[rows]
        first, rest = np.empty((len(come), len(settled))), np.empty((len(come), len(settled)))
        for number, costs in enumerate(come):
            total = costs + settled
            best = total.argmin(axis=1)
            apart = np.isinf(total.min(axis=1).real)
            first[number] = np.where(apart, np.inf, costs[best].real)
            rest[number] = np.where(apart, np.inf, settled[np.arange(len(settled)), best].real)
        return first * PICOSECOND, rest * PICOSECOND
