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
from gspmd.planner.contractions import ContractionTable, lowest
from gspmd.planner.paths import FAR, ShortestPaths
from gspmd.planner.steps import Contraction, Environment, Step, Tensor


@dataclass(frozen=True)
class Choice:
    """How one member runs: where the partner is brought, the local einsum, its result, the way to the target."""

    right: Spec | None
    right_steps: tuple[Step, ...]
    einsum: Step
    result: Spec
    settle_steps: tuple[Step, ...]


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search: the shared tensor's spec during the einsums, its move, and one choice per member."""

    left: Spec
    left_steps: tuple[Step, ...]
    choices: tuple[Choice, ...]


class NoPlacement(PlanError):
    """No placement of the operands gives the targets."""


@lru_cache(maxsize=1 << 14)
def search(
    environment: Environment, left: Tensor, contractions: tuple[Contraction, ...], pinned: Spec | None = None
) -> SearchResult:
    """Find the cheapest way to bring `shared` and each member's partner together, multiply, and settle.

    Raises:
        NoPlacement: no assignment of mesh axes gives the targets (a target owes a sum that nothing makes).
        PlanError: a tensor is too large to be planned.
    """
    return _Search(environment, left, contractions, pinned).found()


@dataclass(frozen=True)
class ResultCosts:
    """What it costs to bring one member's result to every placement, and all the others to their targets."""

    dims: tuple[str, ...]
    paths: ShortestPaths
    costs: np.ndarray


def result_costs(
    environment: Environment, left: Tensor, contractions: tuple[Contraction, ...], pinned: Spec | None, aimed: int = 0
) -> ResultCosts:
    """Find what the cheapest group costs for every placement that member number `aimed` can be aimed at."""
    return _Search(environment, left, contractions, pinned, added=contractions[aimed]).result_costs(aimed)


class _Search:
    def __init__(
        self,
        environment: Environment,
        left: Tensor,
        contractions: tuple[Contraction, ...],
        pinned: Spec | None,
        added=None,
    ):
        self.left, self.contractions, self.pinned = left, contractions, pinned
        self.tables = [
            ContractionTable(environment, left, contraction, contraction is added) for contraction in contractions
        ]
        self.paths = self.tables[0].left_paths
        self.own = self.paths.costs_from(self.paths.number(left.spec))
        if pinned is not None:
            here = self.paths.number(pinned)
            self.own = np.where(np.arange(len(self.own)) == here, self.own, FAR)

    def found(self) -> SearchResult:
        rows = [self._rows(number) for number in range(len(self.contractions))]
        best = [lowest(costs, each.left_nodes, len(self.own)) for each, costs in zip(self.tables, rows)]
        total = sum(best, self.own)
        least = total.min()
        if not np.isfinite(least.real):
            self._refuse_left_out()
            raise NoPlacement(_impossible(self.left, self.contractions, self.pinned))
        dims = self.left.spec.dims
        left = min(np.flatnonzero(total == least).tolist(), key=lambda n: str(self.paths.spec(dims, n)))
        held = self.paths.spec(dims, left)
        choices = [
            self._choice(number, held, np.flatnonzero((each.left_nodes == left) & (rows[number] == best[number][left])))
            for number, each in enumerate(self.tables)
        ]
        return SearchResult(held, self._steps_to(self.paths, self.own, self.left, left), tuple(choices))

    def _refuse_left_out(self) -> None:
        self.paths.refuse_left_out(self.left.name)
        for each, contraction in zip(self.tables, self.contractions):
            each.result_paths.refuse_left_out(contraction.target.name)
            if contraction.right is not None:
                each.right_paths.refuse_left_out(contraction.right.name)

    def _rows(self, number: int) -> np.ndarray:
        """For each meeting of a member, all but the shared tensor's own way."""
        each, target = self.tables[number], self._target(number)
        return each.costs + (each.result_paths.costs_to(target)[each.result_nodes] if target >= 0 else FAR)

    def _target(self, number: int) -> int:
        """The placement that a member's result is brought to; what no operand has is broadcast behind it."""
        each, spec = self.tables[number], self.contractions[number].target.spec
        return each.result_paths.number(Spec(each.dims, tuple(spec.axes_of(dim) for dim in each.dims), spec.partial))

    def _choice(self, number: int, held: Spec, rows: np.ndarray) -> Choice:
        """The first in the order of specs of the meetings that cost a member the same."""
        each, right, name = self.tables[number], self.contractions[number].right, self.contractions[number].target.name
        spec, steps, row = None, (), int(rows[0])
        if right is not None:
            spec, row = min(
                ((each.right_paths.spec(right.spec.dims, int(each.right_nodes[row])), int(row)) for row in rows),
                key=lambda pair: str(pair[0]),
            )
            steps = self._steps_to(each.right_paths, each.right_costs, right, int(each.right_nodes[row]))
        made = int(each.result_nodes[row])
        result = each.result_paths.spec(each.dims, made)
        rest = each.result_paths.costs_to(self._target(number))
        settle = each.result_paths.steps(each.result_paths.chain(rest, made), each.dims, name)
        return Choice(spec, steps, each.einsum(held, spec, result), result, settle)

    @staticmethod
    def _steps_to(paths: ShortestPaths, costs: np.ndarray, tensor: Tensor, number: int) -> tuple[Step, ...]:
        start = paths.number(tensor.spec)
        return paths.steps(paths.chain_to(paths.costs_from(start), start, number), tensor.spec.dims, tensor.name)

    def result_costs(self, aimed: int) -> ResultCosts:
        each, own = self.tables[aimed], self.own
        for number, other in enumerate(self.tables):
            if number != aimed:
                own = own + lowest(self._rows(number), other.left_nodes, len(own))
        made = lowest(own[each.left_nodes] + each.costs, each.result_nodes, len(each.result_paths.nodes))
        return ResultCosts(each.dims, each.result_paths, each.result_paths.onward(made))


def _impossible(left: Tensor, contractions: tuple[Contraction, ...], pinned: Spec | None) -> str:
    targets = ", ".join(f"'{contraction.target.spec}'" for contraction in contractions)
    via = "" if pinned is None else f" via '{pinned}'"
    return (
        f"no plan brings '{left.spec}'{via} to {targets}.\n"
        "  A partial sum in the result comes from a mesh axis on a summed dimension, or from an operand that owes it;\n"
        "  via specs must agree on every dimension that the operands share."
    )
