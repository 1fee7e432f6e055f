"""The exact search behind every plan, which chooses the dimension that each mesh axis shards during an einsum.

One left operand is contracted with one or several right operands. If d is the cost of a shortest path (`paths`), the
plan minimizes, over all placements p of the left operand, the cost

    d(left → p) + Σ over contractions  min over q  d(right → q) + einsum(p, q) + d(result of (p, q) → target)

where q runs over the placements of the right operand that shard the common dimensions as p does. All values d of a
tensor come from one shortest-path computation. So the cost of a joint placement (p, q) is the sum of three looked-up
numbers, and the search is linear in the number of joint placements (`contractions`). If no steps overlap, the search is
exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import numpy as np

from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.planner.graph.contractions import ContractionChoice, ContractionTable
from gspmd.planner.graph.paths import FAR, ShortestPaths
from gspmd.planner.steps import Contraction, Environment, Step, Tensor


@dataclass(frozen=True)
class PlacedGroup:
    """The result of the search.

    Attributes:
        left: the spec in which the left operand is multiplied.
        left_steps: the steps that bring the left operand to this spec.
        choices: the choice for each contraction.
    """

    left: Spec
    left_steps: tuple[Step, ...]
    choices: tuple[ContractionChoice, ...]


@dataclass(frozen=True)
class ResultCosts:
    """The costs of a group of contractions for every placement of one of the results.

    All other results are moved to their targets.

    Attributes:
        dims: the dimensions of this result.
        paths: the shortest paths between the placements of this result.
        costs: the cost for each placement.
    """

    dims: tuple[str, ...]
    paths: ShortestPaths
    costs: np.ndarray


class NoPlacement(PlanError):
    """The error if the operands have no joint placement from which the targets can be reached."""


@lru_cache(maxsize=1 << 14)
def search(
    environment: Environment, left: Tensor, contractions: tuple[Contraction, ...], pinned: Spec | None = None
) -> PlacedGroup:
    """Find the cheapest way to bring the operands together, contract them, and bring the results to their targets.

    Args:
        environment: everything on which costs depend.
        left: the left operand, which all contractions share.
        contractions: the right operand and the result of each contraction.
        pinned: the spec to which the left operand is brought, or None to search for this spec.

    Raises:
        NoPlacement: no placement of the operands leads to the targets, for example if a target is a partial sum that no
            operand makes.
        PlanError: a tensor is too large to be planned.
    """
    tables = [ContractionTable(environment, left, contraction) for contraction in contractions]
    paths, own = tables[0].left.paths, _left_costs(tables[0], pinned)
    best = [_lowest(table.totals, table.left.nodes, len(own)) for table in tables]
    total = sum(best, own)
    least = total.min()
    if not np.isfinite(least.real):
        _refuse(left, contractions, pinned, tables)
    # Ties go to the first spec as text, so that a plan does not depend on how placements are numbered.
    number = min(np.flatnonzero(total == least).tolist(), key=lambda n: str(paths.spec(left.spec.dims, n)))
    return _placed(tables, number, _cheapest_rows(tables, best, number))


def ranked(
    environment: Environment, left: Tensor, contractions: tuple[Contraction, ...], count: int
) -> tuple[PlacedGroup, ...]:
    """Return the cheapest plan for each choice that `search` compares, at most `count` plans, the cheapest first.

    A choice says which dimension each mesh axis shards during the einsums, regardless of the order of axes in a
    dimension. With several contractions, a choice concerns only the left operand, which they share.
    """
    tables = [ContractionTable(environment, left, contraction) for contraction in contractions]
    first, own = tables[0], _left_costs(tables[0], None)
    best = [_lowest(table.totals, table.left.nodes, len(own)) for table in tables]
    if len(tables) == 1:
        at, kinds, total = first.left.nodes, first.kinds, own[first.left.nodes] + first.totals
        sides = [side for side in (first.left, first.right) if side is not None]
        name: Callable[[int], tuple[str, ...]] = lambda row: tuple(str(side.spec(row)) for side in sides)  # noqa: E731
    else:
        at, kinds, total = np.arange(len(own)), first.left.paths.kinds, sum(best, own)
        name = lambda number: (str(first.left.paths.spec(left.spec.dims, number)),)  # noqa: E731
    order = np.argsort(total, kind="stable")
    lowest = order[np.sort(np.unique(kinds[order], return_index=True)[1])]  # the cheapest of each choice, in order
    lowest = lowest[np.isfinite(total[lowest].real)]
    last = total[lowest[:count][-1]] if len(lowest) else FAR
    found = []
    for row in lowest[total[lowest] <= last].tolist():
        tied = np.flatnonzero((kinds == kinds[row]) & (total == total[row])).tolist()
        found.append(min(tied, key=name))
    found.sort(key=lambda row: (total[row].real, total[row].imag, name(row)))
    return tuple(
        _placed(tables, int(at[row]), [[row]] if len(tables) == 1 else _cheapest_rows(tables, best, row))
        for row in found[:count]
    )


def _cheapest_rows(tables: Sequence[ContractionTable], best: Sequence[np.ndarray], number: int) -> list[list[int]]:
    """Return, for each table, the cheapest of the rows in which the left operand is at placement `number`."""
    rows = [(table.left.nodes == number) & (table.totals == each[number]) for table, each in zip(tables, best)]
    return [np.flatnonzero(each).tolist() for each in rows]


def _placed(tables: Sequence[ContractionTable], number: int, rows: Sequence[Sequence[int]]) -> PlacedGroup:
    """Return the group in which the left operand is at placement `number`, with one row chosen from each table.

    `rows` has the equally cheap rows of each table.
    """
    left = tables[0].left
    dims, paths = left.tensor.spec.dims, left.paths
    held, path = paths.spec(dims, number), paths.path_between(paths.number(left.tensor.spec), number)
    choices = tuple(table.choice(held, each) for table, each in zip(tables, rows))
    return PlacedGroup(held, paths.steps(path, dims, left.tensor.name), choices)


def result_costs(
    environment: Environment, left: Tensor, contractions: Sequence[Contraction], pinned: Spec | None, aimed: int = 0
) -> ResultCosts:
    """Return the lowest cost of the group for every placement that the result of contraction `aimed` may have."""
    tables = [ContractionTable(environment, left, each, n == aimed) for n, each in enumerate(contractions)]
    own = _left_costs(tables[0], pinned)
    for number, table in enumerate(tables):
        if number != aimed:
            own = own + _lowest(table.totals, table.left.nodes, len(own))
    table, result = tables[aimed], tables[aimed].result
    made = _lowest(own[table.left.nodes] + table.costs, result.nodes, len(result.paths.nodes))
    return ResultCosts(table.dims, result.paths, result.paths.onward(made))


def _left_costs(table: ContractionTable, pinned: Spec | None) -> np.ndarray:
    paths = table.left.paths
    costs = paths.costs_from(paths.number(table.left.tensor.spec))
    return costs if pinned is None else np.where(np.arange(len(costs)) == paths.number(pinned), costs, FAR)


def _lowest(costs: np.ndarray, at: np.ndarray, count: int) -> np.ndarray:
    """Return the lowest cost for each index from 0 to `count` - 1; `at` has the index to which each cost belongs."""
    order = np.argsort(at.astype(np.uint16) if count <= 1 << 16 else at, kind="stable")
    at, lowest = at[order], np.full(count, FAR)
    starts = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]]))
    lowest[at[starts]] = np.minimum.reduceat(costs[order], starts)
    return lowest


def _refuse(
    left: Tensor, contractions: Sequence[Contraction], pinned: Spec | None, tables: Sequence[ContractionTable]
) -> NoReturn:
    """Raise an error that says why no joint placement of the operands leads to the targets."""
    tables[0].left.paths.refuse_left_out(left.name)
    for table in tables:
        for placed in (table.result, table.right):
            if placed is not None:
                placed.paths.refuse_left_out(placed.tensor.name)
    targets = ", ".join(f"'{contraction.target.spec}'" for contraction in contractions)
    via = "" if pinned is None else f" via '{pinned}'"
    partial = any(contraction.target.spec.partial for contraction in contractions)
    remedies = [
        "  A partial sum in the result needs a mesh axis on a summed dimension, or an operand with that partial sum."
    ] * (partial or not via) + [
        "  The specs of via must shard every dimension that the operands share over the same mesh axes."
    ] * bool(via)
    raise NoPlacement("\n".join([f"cannot plan: no steps bring '{left.spec}'{via} to {targets}.", *remedies]))
