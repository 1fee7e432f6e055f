"""From an equation to its routine, forward and backward.

A product is one search. A group is one search with several members: the shared operand travels once. A sum plans every
term towards one common placement before settling, so that its partial sums settle once. The gradient of a product is a
group (the cotangent is shared), that of a sum a larger group, that of a group a sum: the same two tools.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gspmd.annotate.equation import Equation, Term
from gspmd.annotate.spec import Spec
from gspmd.planner.resharding import move
from gspmd.planner.search import NoPlacement, ResultCosts, SearchResult, result_costs, search
from gspmd.planner.steps import Contraction, Environment, Move, Output, Product, Routine, Step, Tensor


def plan_routine(
    equation: Equation,
    environment: Environment,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    via: Sequence[Spec | None],
) -> Routine:
    """Plan an equation.

    Args:
        equation: what to compute.
        environment: sizes, mesh, chip.
        inputs: the operands, group members one by one, in reading order; their specs name no mesh axis of size 1.
        outputs: what they become.
        via: the spec each operand is brought to before the local einsum, or None where the search is free.

    Raises:
        PlanError: no assignment of mesh axes gives the outputs.
    """
    if equation.is_move and set(inputs[0].spec.dims) == set(outputs[0].spec.dims):
        return _plain_move(environment, inputs[0], outputs[0], via[0])
    jobs = _jobs(equation, inputs, outputs, via)
    builder = Builder(inputs)
    if len(jobs) == 1:
        products = [product for job, found in _group(environment, jobs[0]) for product in builder.run(job, found)]
        builder.outputs = [Output((product,), target.spec, ()) for product, target in zip(products, outputs)]
        return builder.routine()
    jobs, found, settle = _common_sum(environment, jobs, outputs[0])
    products = [product for job, each in zip(jobs, found) for product in builder.run(job, each)]
    builder.outputs.append(Output(tuple(products), outputs[0].spec, settle))
    return builder.routine()


@dataclass(frozen=True)
class Job:
    """One search: the shared tensor's input number, its partners', what they become, and the pins."""

    left: int
    tensor: Tensor
    rights: tuple[int | None, ...]
    contractions: tuple[Contraction, ...]
    pinned: Spec | None = None


def _jobs(equation: Equation, inputs, outputs, via) -> list[Job]:
    jobs, start = [], 0
    for term in equation.terms:
        count = sum(len(operand.specs) for operand in term.operands)
        jobs.append(_job(term, range(start, start + count), inputs, outputs, via))
        start += count
    return jobs


def _job(term: Term, numbers: range, inputs, outputs, via) -> Job:
    """The ungrouped operand is the shared one; without a group, the first."""
    first = len(term.operands[0].specs)
    left, right = tuple(numbers[:first]), tuple(numbers[first:])
    if term.operands[0].group:
        left, right = right, left
    contractions = tuple(
        Contraction(None if p is None else inputs[p], target, None if p is None else via[p])
        for p, target in zip(right or (None,), outputs)
    )
    return Job(left[0], inputs[left[0]], right or (None,), contractions, via[left[0]])


def find(environment: Environment, job: Job) -> SearchResult:
    return search(environment, job.tensor, job.contractions, job.pinned)


def term_costs(environment: Environment, job: Job, aimed: int = 0) -> ResultCosts:
    return result_costs(environment, job.tensor, job.contractions, job.pinned, aimed)


def _group(environment: Environment, job: Job) -> list[tuple[Job, SearchResult]]:
    """A group travels once; where its results owe sums that no one placement makes, each member by itself."""
    try:
        return [(job, find(environment, job))]
    except NoPlacement:
        if len(job.contractions) == 1:
            raise
    alone = [
        replace(job, rights=(p,), contractions=(contraction,)) for p, contraction in zip(job.rights, job.contractions)
    ]
    return [(each, find(environment, each)) for each in alone]


def _plain_move(environment: Environment, source: Tensor, output: Tensor, pinned: Spec | None) -> Routine:
    """One chain of steps, or two where a pin stands between them."""
    arrived = Spec(source.spec.dims, tuple(output.spec.axes_of(dim) for dim in source.spec.dims), output.spec.partial)
    stop = arrived if pinned is None else pinned
    sizes, mesh = dict(environment.sizes), dict(environment.mesh)
    there = move(source.spec, stop, sizes, mesh, source.itemsize, environment.chip, source.name)
    on = move(stop, arrived, sizes, mesh, source.itemsize, environment.chip, source.name)
    product = Product(0, None, Step("einsum", (), 0, 0.0, stop, stop), on, arrived)
    return Routine((source.spec,), (Move(0, stop, there),), (product,), (Output((0,), output.spec, ()),))


def _common_sum(
    environment: Environment, jobs: list[Job], output: Tensor
) -> tuple[list[Job], list[SearchResult], tuple[Step, ...]]:
    """Plan every term towards the placement in which it is cheapest to add them, and settle the sum from there."""
    terms = [term_costs(environment, job) for job in jobs]
    common = common_placement(terms, output) or output.spec
    aimed = [_towards(job, common) for job in jobs]
    return aimed, [find(environment, job) for job in aimed], settle(environment, common, output)


def common_placement(terms: Sequence[ResultCosts], target: Tensor) -> Spec | None:
    """The placement in which terms are added at the least cost, their sum's way to its target included.

    None where there is no such placement, or where a term lacks a dimension that others have: then each is settled, and
    broadcast, by itself.
    """
    dims, paths = terms[0].dims, terms[0].paths
    if any(term.dims != dims for term in terms):
        return None
    there = paths.number(Spec(dims, tuple(target.spec.axes_of(dim) for dim in dims), target.spec.partial))
    if there < 0:
        return None
    total = sum((term.costs for term in terms), paths.costs_to(there))
    least = total.min()
    if not np.isfinite(least):
        return None
    return min((paths.spec(dims, number) for number in np.flatnonzero(total == least).tolist()), key=str)


def _towards(job: Job, common: Spec) -> Job:
    contraction = job.contractions[0]
    return replace(job, contractions=(replace(contraction, target=replace(contraction.target, spec=common)),))


def settle(environment: Environment, common: Spec, target: Tensor) -> tuple[Step, ...]:
    """From the placement that all terms of a sum share to the sum's own, its broadcast dimensions left out."""
    wanted = Spec(common.dims, tuple(target.spec.axes_of(dim) for dim in common.dims), target.spec.partial)
    return move(
        common, wanted, dict(environment.sizes), dict(environment.mesh), target.itemsize, environment.chip, target.name
    )


class Builder:
    """Collects moves, each made once, and the products that use them."""

    def __init__(self, inputs: Sequence[Tensor]):
        self.inputs = tuple(inputs)
        self.moves: list[Move] = []
        self.products: list[Product] = []
        self.outputs: list[Output] = []

    def run(self, job: Job, found: SearchResult) -> list[int]:
        """Add the moves and products of one search; the products' numbers."""
        left = self._move(job.left, found.left, found.left_steps)
        numbers = []
        for source, choice in zip(job.rights, found.choices):
            right = None if source is None else self._move(source, choice.right, choice.right_steps)
            arrived = choice.settle_steps[-1].after if choice.settle_steps else choice.result
            self.products.append(Product(left, right, choice.einsum, choice.settle_steps, arrived))
            numbers.append(len(self.products) - 1)
        return numbers

    def _move(self, source: int, spec: Spec, steps: tuple[Step, ...]) -> int:
        made = Move(source, spec, steps)
        if made not in self.moves:
            self.moves.append(made)
        return self.moves.index(made)

    def routine(self) -> Routine:
        return Routine(tuple(t.spec for t in self.inputs), tuple(self.moves), tuple(self.products), tuple(self.outputs))
