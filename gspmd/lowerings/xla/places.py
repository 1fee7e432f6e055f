"""Where a plan's products meet: what lowering `xla` holds the compiler to.

XLA's partitioner multiplies operands of one mind, in which a dimension lies alike wherever it stands. Of operands that
disagree it has been seen to forget one of two sums (docs/compiler.md), so nothing is multiplied before it lies where
the plan has it. How it gets there, and which collectives settle the result, is the compiler's choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

import jax

from gspmd.annotate.equation import Equation
from gspmd.annotate.spec import Spec
from gspmd.planner.plan import Plan


@dataclass(frozen=True)
class Places:
    """Where the operands of one product lie, by their numbers in the equation, and what the local einsum leaves there.

    Empty, with no result, for a product that no plan is known of.
    """

    operands: Mapping[int, Spec]
    result: Spec | None = None


@dataclass(frozen=True)
class Lift:
    """The mesh axes of all partial sums in an equation, each with the letter of its summands."""

    letters: Mapping[str, str]
    mesh: Mapping[str, int]

    def bring(self, spec: Spec, x: jax.Array, place: Spec | None) -> tuple[Spec, jax.Array]:
        """An operand, its sums lifted, where a product wants it: what the plan settles on the way is summed."""
        if place is None:
            return spec, x
        settled = [
            letter
            for axis, letter in self.letters.items()
            if letter in spec.dims and axis not in place.partial and self.mesh[axis] > 1
        ]
        if settled:
            x, spec = x.sum(tuple(spec.dims.index(letter) for letter in settled)), spec.without(*settled)
        return self.constrain(spec.dims, x, place)

    def constrain(self, dims: Sequence[str], x: jax.Array, place: Spec) -> tuple[Spec, jax.Array]:
        """An array of these dimensions as `place` has those it knows; summands stay on their own devices."""
        axes = dict(zip(place.dims, place.axes)) | {letter: (axis,) for axis, letter in self.letters.items()}
        here = Spec(tuple(dims), tuple(axes[dim] for dim in dims))
        return here, jax.lax.with_sharding_constraint(x, here.partition_spec())


def pairs(equation: Equation) -> list[list[tuple[int, ...]]]:
    """For each term, the operands of each of its products, by their numbers in the equation.

    >>> from gspmd.annotate import parse_equation
    >>> pairs(parse_equation("BE, (EF, EF) -> (BF, BF)"))
    [[(0, 1), (0, 2)]]
    """
    numbers = iter(range(len(equation.specs)))
    members = [[list(islice(numbers, len(o.specs))) for o in term.operands] for term in equation.terms]
    return [list(product(*each)) for each in members]


def planned_places(plan: Plan) -> list[Places]:
    """The places of every product of a plan, in the plan's order."""
    routine = plan.routine
    moves = [[routine.moves[n] for n in (p.left, p.right) if n is not None] for p in routine.products]
    return [
        Places({move.source: move.spec for move in brought}, product.einsum.after)
        for brought, product in zip(moves, routine.products)
    ]


def pinned_places(equation: Equation, pinned: Sequence[Spec | None]) -> list[Places]:
    """The places that `via` pins in an equation without a plan, since it leaves a dimension open; empty without one."""
    known = {number: pin for number, pin in enumerate(pinned) if pin is not None}
    return [Places({n: known[n] for n in pair if n in known}) for term in pairs(equation) for pair in term]
