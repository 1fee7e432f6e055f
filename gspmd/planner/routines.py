"""The routine of an equation, that is, all its steps, and the one or several searches that find these steps.

    product   one search
    group     one search for several products of one operand, which is moved once
    sum       one search per product; all products end in the placement in which they are cheapest to add, so that
              partial sums are reduced once

The gradient of a product is a group. The gradient of a sum is a larger group, and the gradient of a group is a sum
(`gradients`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from gspmd.annotate.equation import Equation
from gspmd.annotate.spec import Spec
from gspmd.planner.graph.paths import shortest_paths
from gspmd.planner.graph.resharding import move
from gspmd.planner.graph.search import NoPlacement, PlacedGroup, ResultCosts, ranked, result_costs, search
from gspmd.planner.steps import Contraction, Environment, Move, Product, Routine, RoutineOutput, Step, Tensor


def plan_routine(
    equation: Equation,
    environment: Environment,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    via: Sequence[Spec | None],
) -> Routine:
    """Plan the routine of an equation.

    Args:
        equation: the equation to plan.
        environment: the sizes, the mesh, the chip and the precision.
        inputs: the operands in reading order, including every member of a group. No spec has a mesh axis of size 1.
        outputs: the results, with their target specs.
        via: the spec to which each operand is brought before the local einsum, or None to search for this spec.

    Raises:
        PlanError: no assignment of mesh axes gives the outputs.
    """
    if equation.is_move and set(inputs[0].spec.dims) == set(outputs[0].spec.dims):
        return _move_routine(environment, inputs[0], outputs[0], via[0])
    groups, builder = _product_groups(equation, inputs, outputs, via), RoutineBuilder(inputs)
    if len(groups) == 1:
        searched = _search_group(groups[0], environment)
        products = [number for group, result in searched for number in builder.add(group, result)]
        builder.outputs = [RoutineOutput((number,), target.spec, ()) for number, target in zip(products, outputs)]
        return builder.routine()
    common = common_placement([group.result_costs(environment) for group in groups], outputs[0]) or outputs[0].spec
    return _sum_routine(groups, environment, inputs, outputs[0], common)


def _sum_routine(
    groups: Sequence["ProductGroup"], environment: Environment, inputs: Sequence[Tensor], output: Tensor, common: Spec
) -> Routine:
    """Plan a sum whose terms are added in the placement `common`."""
    builder = RoutineBuilder(inputs)
    groups = [group.towards(common) for group in groups]
    products = [number for group in groups for number in builder.add(group, group.search(environment))]
    builder.outputs.append(RoutineOutput(tuple(products), output.spec, settling(environment, common, output)))
    return builder.routine()


def ranked_routines(
    equation: Equation, environment: Environment, inputs: Sequence[Tensor], outputs: Sequence[Tensor], count: int
) -> list[Routine]:
    """List the cheapest routine for each choice that the search compares, in order of cost.

    `Plan.alternatives` says what a choice is.
    """
    free = [None] * len(inputs)
    if equation.is_move and set(inputs[0].spec.dims) == set(outputs[0].spec.dims):
        return list(islice(_ranked_moves(environment, inputs[0], outputs[0]), count))
    groups = _product_groups(equation, inputs, outputs, free)
    if len(groups) > 1:
        return _ranked_sums(groups, environment, inputs, outputs[0], count)
    routines = []
    for placed in ranked(environment, groups[0].tensor, groups[0].contractions, count):
        builder = RoutineBuilder(inputs)
        products = builder.add(groups[0], placed)
        builder.outputs = [RoutineOutput((number,), target.spec, ()) for number, target in zip(products, outputs)]
        routines.append(builder.routine())
    return routines or [plan_routine(equation, environment, inputs, outputs, free)]


@dataclass(frozen=True)
class ProductGroup:
    """The products of one operand, which is moved once for all of them.

    Attributes:
        left: the index of the common operand among the inputs.
        tensor: the common operand.
        rights: the index of the other operand of each product, or None if the common operand is only summed.
        contractions: the other operand of each product, with the product's result and pinned spec.
        pinned: the spec to which the common operand is brought, or None to search for this spec.
    """

    left: int
    tensor: Tensor
    rights: tuple[int | None, ...]
    contractions: tuple[Contraction, ...]
    pinned: Spec | None = None

    def search(self, environment: Environment) -> PlacedGroup:
        """Find the cheapest placements of the operands, and the steps before and after their products."""
        return search(environment, self.tensor, self.contractions, self.pinned)

    def result_costs(self, environment: Environment, aimed: int = 0) -> ResultCosts:
        """Return the costs of the group for every placement that the result of contraction number `aimed` may have."""
        return result_costs(environment, self.tensor, self.contractions, self.pinned, aimed)

    def towards(self, placement: Spec) -> "ProductGroup":
        """Return this group, which must have a single product, with `placement` as the target of the product."""
        only = self.contractions[0]
        return replace(self, contractions=(replace(only, target=replace(only.target, spec=placement)),))


def _product_groups(equation: Equation, inputs, outputs, via) -> list[ProductGroup]:
    """Return a `ProductGroup` for each term of the equation.

    If the term has a group, the common operand is the one by which the group is multiplied. Otherwise it is the first
    operand.
    """
    groups, start = [], 0
    for term in equation.terms:
        first = len(term.operands[0].specs)
        numbers = tuple(range(start, start + sum(len(operand.specs) for operand in term.operands)))
        start += len(numbers)
        left, rights = numbers[:first], numbers[first:]
        if term.operands[0].group:
            left, rights = rights, left
        contractions = tuple(
            Contraction(None if n is None else inputs[n], target, None if n is None else via[n])
            for n, target in zip(rights or (None,), outputs)
        )
        groups.append(ProductGroup(left[0], inputs[left[0]], rights or (None,), contractions, via[left[0]]))
    return groups


def _search_group(group: ProductGroup, environment: Environment) -> list[tuple[ProductGroup, PlacedGroup]]:
    """Find one placement of the common operand for all products.

    If there is no such placement, find one placement for each product. This happens if the results of the products are
    partial sums over different mesh axes.
    """
    try:
        return [(group, group.search(environment))]
    except NoPlacement:
        if len(group.contractions) == 1:
            raise
    apart = [replace(group, rights=(n,), contractions=(c,)) for n, c in zip(group.rights, group.contractions)]
    return [(each, each.search(environment)) for each in apart]


def _move_routine(environment: Environment, source: Tensor, output: Tensor, pinned: Spec | None) -> Routine:
    """Plan a move as one chain of steps, or as two chains if there is a pinned spec between the chains."""
    arrived = _arrived(source, output)
    stop = arrived if pinned is None else pinned
    first, second = (_chain(environment, *ends, source) for ends in ((source.spec, stop), (stop, arrived)))
    product = Product(0, None, Step("einsum", (), 0, 0.0, stop, stop), second, arrived)
    return Routine((source.spec,), (Move(0, stop, first),), (product,), (RoutineOutput((0,), output.spec, ()),))


def _arrived(source: Tensor, output: Tensor) -> Spec:
    """Return the target spec of a move, with the dimensions in the order of the source spec."""
    return Spec(source.spec.dims, tuple(output.spec.axes_of(dim) for dim in source.spec.dims), output.spec.partial)


def _ranked_moves(environment: Environment, source: Tensor, output: Tensor) -> Iterator[Routine]:
    """Yield the cheapest move for each list of collectives, in order of cost.

    A move goes through at most one intermediate placement.
    """
    dims, shape = source.spec.dims, tuple(dict(environment.sizes)[dim] for dim in source.spec.dims)
    paths = shortest_paths(shape, environment.mesh, source.itemsize, environment.chip, frozenset(source.spec.partial))
    ends = paths.number(source.spec), paths.number(_arrived(source, output))
    yield (best := _move_routine(environment, source, output, None))
    seen = {_collectives(best)}
    if min(ends) < 0:
        return
    total = paths.costs_from(ends[0]) + paths.costs_to(ends[1])
    order = np.argsort(total, kind="stable")
    for number in order[np.isfinite(total[order].real)].tolist():
        routine = _move_routine(environment, source, output, paths.spec(dims, number))
        if _collectives(routine) not in seen:
            seen.add(_collectives(routine))
            yield routine


def _collectives(routine: Routine) -> tuple[tuple[str, frozenset[str]], ...]:
    return tuple((step.kind, frozenset(step.axes)) for step in routine.steps)


def common_placement(terms: Sequence[ResultCosts], target: Tensor) -> Spec | None:
    """Find the placement in which it costs least to add the terms and to move the sum to its target.

    The result is None if there is no such placement, or if a term lacks a dimension that other terms have. In these
    cases, each term is reduced and broadcast separately.
    """
    costs = _costs_of_adding(terms, target)
    if costs is None or not np.isfinite(least := costs.min()):
        return None
    dims, paths = terms[0].dims, terms[0].paths
    return min((paths.spec(dims, number) for number in np.flatnonzero(costs == least).tolist()), key=str)


def _costs_of_adding(terms: Sequence[ResultCosts], target: Tensor) -> np.ndarray | None:
    """Return the cost of adding the terms in each placement, or None if terms must be reduced before they are added."""
    dims, paths = terms[0].dims, terms[0].paths
    if any(term.dims != dims for term in terms):
        return None
    there = paths.number(Spec(dims, tuple(target.spec.axes_of(dim) for dim in dims), target.spec.partial))
    return None if there < 0 else sum((term.costs for term in terms), paths.costs_to(there))


def _ranked_sums(
    groups: Sequence["ProductGroup"],
    environment: Environment,
    inputs: Sequence[Tensor],
    output: Tensor,
    count: int,
) -> list[Routine]:
    """List the cheapest routine for each placement in which the terms can be added.

    If the terms cannot be added before they are reduced, there is only one routine.
    """
    terms = [group.result_costs(environment) for group in groups]
    costs, dims, paths = _costs_of_adding(terms, output), terms[0].dims, terms[0].paths
    if costs is None or not np.isfinite(costs.min()):
        return [_sum_routine(groups, environment, inputs, output, output.spec)]
    finite = np.flatnonzero(np.isfinite(costs)).tolist()
    ranked = sorted(finite, key=lambda number: (costs[number].real, costs[number].imag, str(paths.spec(dims, number))))
    kinds = paths.kinds
    # The cheapest placement of each kind; placements of one kind differ only in the order of axes.
    first = {int(kinds[number]): number for number in reversed(ranked)}
    chosen = sorted(first.values(), key=ranked.index)[:count]
    return [_sum_routine(groups, environment, inputs, output, paths.spec(dims, number)) for number in chosen]


def settling(environment: Environment, common: Spec, target: Tensor) -> tuple[Step, ...]:
    """Return the steps from the placement `common`, in which terms are added, to the target.

    Dimensions that the terms lack are left out of the target; the sum is broadcast along these dimensions later.
    """
    wanted = Spec(common.dims, tuple(target.spec.axes_of(dim) for dim in common.dims), target.spec.partial)
    return _chain(environment, common, wanted, target)


def _chain(environment: Environment, src: Spec, dst: Spec, tensor: Tensor) -> tuple[Step, ...]:
    sizes, mesh = dict(environment.sizes), dict(environment.mesh)
    return move(src, dst, sizes, mesh, tensor.itemsize, environment.chip, tensor.name)


class RoutineBuilder:
    """The moves, products and outputs of a routine under construction; equal moves are stored only once."""

    def __init__(self, inputs: Sequence[Tensor]):
        self.inputs = tuple(inputs)
        self.moves: list[Move] = []
        self.products: list[Product] = []
        self.outputs: list[RoutineOutput] = []

    def add(self, group: ProductGroup, result: PlacedGroup) -> list[int]:
        """Add the moves and products that the search found for a group, and return the indices of the products."""
        left, first = self._move(group.left, result.left, result.left_steps), len(self.products)
        for source, choice in zip(group.rights, result.choices):
            right = None
            if source is not None and choice.right is not None:  # both or neither, but type checkers do not know it
                right = self._move(source, choice.right, choice.right_steps)
            arrived = choice.settle_steps[-1].after if choice.settle_steps else choice.result
            self.products.append(Product(left, right, choice.einsum, choice.settle_steps, arrived))
        return list(range(first, len(self.products)))

    def _move(self, source: int, spec: Spec, steps: tuple[Step, ...]) -> int:
        move = Move(source, spec, steps)
        if move not in self.moves:
            self.moves.append(move)
        return self.moves.index(move)

    def routine(self) -> Routine:
        """Return the routine that was built."""
        return Routine(tuple(t.spec for t in self.inputs), tuple(self.moves), tuple(self.products), tuple(self.outputs))
