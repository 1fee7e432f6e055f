"""Which dimension each mesh axis shards while an einsum runs: the exact search behind every plan.

One tensor, the shared one, meets one or several partners. The cheapest ways from where an operand lies to all of its
placements, and from all placements of a result to where it shall be, are shortest paths, found all at once (`routes`).
So each placement in which the operands can meet has its exact cost by three look-ups (`meetings`), and the plan is the
least of a table: nothing is estimated, and nothing is left out, when no step overlaps another.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.planner.contractions import Meetings, lowest
from gspmd.planner.paths import FAR, Routes
from gspmd.planner.steps import Member, Setting, Step, Tensor


@dataclass(frozen=True)
class Choice:
    """How one member runs: where the partner is brought, the local einsum, its result, the way to the target."""

    partner: Spec | None
    partner_steps: tuple[Step, ...]
    einsum: Step
    result: Spec
    settle_steps: tuple[Step, ...]


@dataclass(frozen=True)
class Found:
    """The answer of a search: the shared tensor's spec during the einsums, its move, and one choice per member."""

    shared: Spec
    shared_steps: tuple[Step, ...]
    choices: tuple[Choice, ...]


class NoPlacement(PlanError):
    """No placement of the operands gives the targets."""


@lru_cache(maxsize=1 << 14)
def search(setting: Setting, shared: Tensor, members: tuple[Member, ...], pinned: Spec | None = None) -> Found:
    """Find the cheapest way to bring `shared` and each member's partner together, multiply, and settle.

    Raises:
        NoPlacement: no assignment of mesh axes gives the targets (a target owes a sum that nothing makes).
        PlanError: a tensor is too large to be planned.
    """
    return _Search(setting, shared, members, pinned).found()


@dataclass(frozen=True)
class Reach:
    """What it costs to bring one member's result to every placement, and all the others to their targets."""

    dims: tuple[str, ...]
    ways: Routes
    costs: np.ndarray


def reach(
    setting: Setting, shared: Tensor, members: tuple[Member, ...], pinned: Spec | None, aimed: int = 0
) -> Reach:
    """Find what the cheapest group costs for every placement that member number `aimed` can be aimed at."""
    return _Search(setting, shared, members, pinned, added=members[aimed]).reach(aimed)


class _Search:
    def __init__(self, setting: Setting, shared: Tensor, members: tuple[Member, ...], pinned: Spec | None, added=None):
        self.shared, self.members, self.pinned = shared, members, pinned
        self.meetings = [Meetings(setting, shared, member, member is added) for member in members]
        self.ways = self.meetings[0].shared
        self.own = self.ways.costs_from(self.ways.number(shared.spec))
        if pinned is not None:
            here = self.ways.number(pinned)
            self.own = np.where(np.arange(len(self.own)) == here, self.own, FAR)

    def found(self) -> Found:
        rows = [self._rows(number) for number in range(len(self.members))]
        best = [lowest(costs, each.left, len(self.own)) for each, costs in zip(self.meetings, rows)]
        total = sum(best, self.own)
        least = total.min()
        if not np.isfinite(least.real):
            self._refuse_left_out()
            raise NoPlacement(_impossible(self.shared, self.members, self.pinned))
        dims = self.shared.spec.dims
        left = min(np.flatnonzero(total == least).tolist(), key=lambda n: str(self.ways.spec(dims, n)))
        held = self.ways.spec(dims, left)
        choices = [
            self._choice(number, held, np.flatnonzero((each.left == left) & (rows[number] == best[number][left])))
            for number, each in enumerate(self.meetings)
        ]
        return Found(held, self._steps_to(self.ways, self.own, self.shared, left), tuple(choices))

    def _refuse_left_out(self) -> None:
        self.ways.refuse_left_out(self.shared.name)
        for each, member in zip(self.meetings, self.members):
            each.result.refuse_left_out(member.target.name)
            if member.partner is not None:
                each.partner.refuse_left_out(member.partner.name)

    def _rows(self, number: int) -> np.ndarray:
        """For each meeting of a member, all but the shared tensor's own way."""
        each, target = self.meetings[number], self._target(number)
        return each.costs + (each.result.costs_to(target)[each.made] if target >= 0 else FAR)

    def _target(self, number: int) -> int:
        """The placement that a member's result is brought to; what no operand has is broadcast behind it."""
        each, spec = self.meetings[number], self.members[number].target.spec
        return each.result.number(Spec(each.dims, tuple(spec.axes_of(dim) for dim in each.dims), spec.partial))

    def _choice(self, number: int, held: Spec, rows: np.ndarray) -> Choice:
        """The first in the order of specs of the meetings that cost a member the same."""
        each, partner, name = self.meetings[number], self.members[number].partner, self.members[number].target.name
        spec, steps, row = None, (), int(rows[0])
        if partner is not None:
            spec, row = min(
                ((each.partner.spec(partner.spec.dims, int(each.right[row])), int(row)) for row in rows),
                key=lambda pair: str(pair[0]),
            )
            steps = self._steps_to(each.partner, each.partner_costs, partner, int(each.right[row]))
        made = int(each.made[row])
        result = each.result.spec(each.dims, made)
        rest = each.result.costs_to(self._target(number))
        settle = each.result.steps(each.result.chain(rest, made), each.dims, name)
        return Choice(spec, steps, each.einsum(held, spec, result), result, settle)

    @staticmethod
    def _steps_to(ways: Routes, costs: np.ndarray, tensor: Tensor, number: int) -> tuple[Step, ...]:
        start = ways.number(tensor.spec)
        return ways.steps(ways.chain_to(ways.costs_from(start), start, number), tensor.spec.dims, tensor.name)

    def reach(self, aimed: int) -> Reach:
        each, own = self.meetings[aimed], self.own
        for number, other in enumerate(self.meetings):
            if number != aimed:
                own = own + lowest(self._rows(number), other.left, len(own))
        made = lowest(own[each.left] + each.costs, each.made, len(each.result.nodes))
        return Reach(each.dims, each.result, each.result.onward(made))


def _impossible(shared: Tensor, members: tuple[Member, ...], pinned: Spec | None) -> str:
    targets = ", ".join(f"'{member.target.spec}'" for member in members)
    via = "" if pinned is None else f" via '{pinned}'"
    return (
        f"no plan brings '{shared.spec}'{via} to {targets}.\n"
        "  A partial sum in the result comes from a mesh axis on a summed dimension, or from an operand that owes it;\n"
        "  via specs must agree on every dimension that the operands share."
    )
