"""The placements of a plan's products, to which lowering `xla` constrains its arrays.

XLA's partitioner multiplies operands correctly if each dimension has the same placement in all operands. If placements
differ, it sometimes forgets one of two sums (docs/compiler.md). So operands are constrained to the placements of the
plan before they are multiplied. The compiler chooses the collectives that bring the operands to these placements and
that reduce the result. On a mesh where such a choice may end the process (`splits_badly`), an array is constrained
after each step of the plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

import jax

from gspmd.annotate.equation import Equation
from gspmd.annotate.spec import Spec
from gspmd.lowerings.partitioner import splits_badly
from gspmd.planner.plan import Plan
from gspmd.planner.steps import Step

Route = tuple[Spec, ...]
"""The specs to which an array is constrained, in this order."""


@dataclass(frozen=True)
class ProductPlaces:
    """The placements of one product.

    Attributes:
        operands: a mapping from an operand's number in the equation to the specs through which the operand reaches its
            placement in the product. If the equation has no plan, some operands may be missing.
        result: the specs of the result, from the placement in which the local einsum leaves the result to the placement
            in which products are added. Empty if the equation has no plan.
        output: the specs through which the sum of the products reaches the placement of the output.
    """

    operands: Mapping[int, Route]
    result: Route = ()
    output: Route = ()


@dataclass(frozen=True)
class Lift:
    """The dimensions of summands that stand for the partial sums of an equation.

    An array is *lifted* if its partial sums have been turned into dimensions of summands (see `summands`).

    Attributes:
        letters: a mapping from mesh axis to the letter of its dimension of summands.
        mesh: mesh axis sizes.
    """

    letters: Mapping[str, str]
    mesh: Mapping[str, int]

    def bring(self, spec: Spec, x: jax.Array, route: Route) -> tuple[Spec, jax.Array]:
        """Bring a lifted operand to its placement in a product, and return its spec and the operand.

        Partial sums that the plan reduces on the route to the product are added up first.
        """
        if not route:
            return spec, x
        settled = [
            letter
            for axis, letter in self.letters.items()
            if letter in spec.dims and axis not in route[-1].partial and self.mesh[axis] > 1
        ]
        if settled:
            x, spec = x.sum(tuple(spec.dims.index(letter) for letter in settled)), spec.without(*settled)
        return self.placed(spec.dims, route[-1]), self.along(spec.dims, x, route)

    def along(self, dims: Sequence[str], x: jax.Array, route: Iterable[Spec]) -> jax.Array:
        """Constrain an array with the dimensions `dims` to each spec of a route, in the order of the route."""
        for place in route:
            x = jax.lax.with_sharding_constraint(x, self.placed(dims, place).partition_spec())
        return x

    def placed(self, dims: Sequence[str], place: Spec) -> Spec:
        """Return the spec of a lifted array with the dimensions `dims` in placement `place`.

        Each summand is on its own devices.
        """
        axes = dict(zip(place.dims, place.axes)) | {letter: (axis,) for axis, letter in self.letters.items()}
        return Spec(tuple(dims), tuple(axes[dim] for dim in dims))


def pairs(equation: Equation) -> list[list[tuple[int, ...]]]:
    """Return the numbers of the operands of each product, as a list of products for each term of the equation.

    >>> from gspmd.annotate import parse_equation
    >>> pairs(parse_equation("BE, (EF, EF) -> (BF, BF)"))
    [[(0, 1), (0, 2)]]
    """
    numbers = iter(range(len(equation.specs)))
    members = [[list(islice(numbers, len(o.specs))) for o in term.operands] for term in equation.terms]
    return [list(product(*each)) for each in members]


def planned_places(plan: Plan) -> list[ProductPlaces]:
    """Return the placements of each product of a plan, in the plan's order."""
    routine, every = plan.routine, splits_badly(plan.mesh)
    outputs = {number: output for output in routine.outputs for number in output.products}
    places = []
    for number, product_ in enumerate(routine.products):
        moves = [routine.moves[n] for n in product_.operands]
        left, output = product_.einsum.after, outputs[number]
        if every:
            brought = {move.source: (routine.inputs[move.source], *_after(move.steps)) for move in moves}
            places.append(ProductPlaces(brought, (left, *_after(product_.steps)), _after(output.steps)))
        else:
            places.append(ProductPlaces({move.source: (move.spec,) for move in moves}, (left,)))
    return places


def _after(steps: Iterable[Step]) -> Route:
    return tuple(step.after for step in steps)


def pinned_places(equation: Equation, pinned: Sequence[Spec | None]) -> list[ProductPlaces]:
    """Return the placements of an equation without a plan, as far as `via` fixes them.

    An equation has no plan if one of its dimensions is left to the compiler.

    Args:
        equation: the equation.
        pinned: for each operand, the spec that `via` fixes, or None.
    """
    known = {number: (pin,) for number, pin in enumerate(pinned) if pin is not None}
    return [ProductPlaces({n: known[n] for n in pair if n in known}) for term in pairs(equation) for pair in term]
