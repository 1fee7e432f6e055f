"""Costs of summing dimensions of one tensor away (a mean over positions), as arrays over its placements.

A tensor is moved to the placement in which it costs least to sum, is summed there, and its sum is moved and reduced to
its target. In the gradient nothing is summed: the cotangent is moved, and then broadcast.
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
    """Return the specs of a tensor before it is summed and after, with unknowns, or None for other steps."""
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
    """A sum over dimensions, or its gradient, with its cost for every placement of its tensor before and after.

    Attributes:
        table: the joint placements, for tensors of any spec.
        before, after: the placements before and after.
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
            arguments: those of the steps, for `planned_steps`.
            mesh, chip: the mesh, and the chip whose seconds are assumed.
            ends: the placements before, and after.
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
        """The seconds [before, after] of the move before the sum, and of everything from the sum on."""
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
