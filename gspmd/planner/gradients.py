"""The gradient of a routine, which is one more routine that computes the cotangents of the operands.

The same search plans this routine. The gradient of a product is a group of products, all of which have the cotangent as
an operand. The gradient of a sum is a larger group, and the gradient of a group is a sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gspmd.annotate.equation import Equation, Operand, Term
from gspmd.annotate.spec import Spec
from gspmd.planner.overlap import Overlap
from gspmd.planner.routines import ProductGroup, RoutineBuilder, common_placement, settling
from gspmd.planner.steps import Contraction, Environment, Routine, RoutineOutput, Tensor


def backward(
    environment: Environment,
    routine: Routine,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    kept: Sequence[Spec],
    mirrored: bool,
) -> Routine:
    """Plan the routine that computes the cotangents of a routine's inputs from the cotangents of its outputs.

    The planned routine takes the cotangents of `outputs` and then the residuals. It returns the cotangents of `inputs`,
    in their order.

    Args:
        environment: everything on which costs depend.
        routine: the routine of the forward pass.
        inputs, outputs: the tensors of `routine`.
        kept: the spec of each residual; there is one residual for each move of `routine`.
        mirrored: whether local einsums use the placements of the forward einsums. If so, the cotangent is brought to
            the placement of the forward result, and the residuals are not moved. In this way gradients follow a layout
            that fixes the placements of the forward pass.
    """
    held, targets = backward_tensors(routine, inputs, outputs, kept)
    cotangents, residuals = held[: len(outputs)], held[len(outputs) :]

    def groups(aims):
        return [_gradient_group(routine, n, cotangents, residuals, aims, mirrored) for n in range(len(outputs))]

    searches, common, aims = groups(targets), _common_operand(routine), list(targets)
    # If an operand has several products, its cotangent is a sum with one part per product. The parts are brought to one
    # placement, added there, and reduced once; reducing each part separately would send all of them.
    if common is not None:
        sources = [[routine.moves[own].source for own, _ in _sides(routine, n)] for n in range(len(outputs))]
        terms = [g.result_costs(environment, part.index(common)) for g, part in zip(searches, sources)]
        placement = common_placement(terms, targets[common]) or targets[common].spec
        aims[common] = replace(targets[common], spec=placement)
        searches = groups(aims)
    builder = RoutineBuilder(held)
    products: dict[int, list[int]] = {n: [] for n in range(len(targets))}
    for n, group in enumerate(searches):
        for (own, _), product in zip(_sides(routine, n), builder.add(group, group.search(environment))):
            products[routine.moves[own].source].append(product)
    for n, target in enumerate(targets):
        settled = settling(environment, aims[n].spec, target) if n == common else ()
        builder.outputs.append(RoutineOutput(tuple(products[n]), target.spec, settled))
    return builder.routine()


def backward_tensors(
    routine: Routine, inputs: Sequence[Tensor], outputs: Sequence[Tensor], kept: Sequence[Spec]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs of the backward routine (first the cotangents, then the residuals), and its outputs."""
    cotangents = [
        replace(t, spec=t.spec.with_partial(t.reduced), name=_numbered("cotangent", i, outputs))
        for i, t in enumerate(outputs)
    ]
    residuals = [replace(inputs[m.source], spec=spec) for m, spec in zip(routine.moves, kept)]
    targets = [replace(t, spec=t.spec.with_partial(t.reduced), name=f"gradient of {t.name}") for t in inputs]
    return [*cotangents, *residuals], targets


def _numbered(name: str, i: int, many: Sequence) -> str:
    return name if len(many) == 1 else f"{name} {i + 1}"


def _common_operand(routine: Routine) -> int | None:
    """Return the index of the operand that several products share, or None if no operand is shared."""
    sources = [routine.moves[m].source for p in routine.products for m in p.operands]
    return next((source for source in sources if sources.count(source) > 1), None)


def _sides(routine: Routine, output: int) -> list[tuple[int, int | None]]:
    """Return a pair of moves for each operand of each product in an output.

    The first is the move of the operand, and the second is the move of the product's other operand, or None.
    """
    sides = []
    for p in routine.outputs[output].products:
        product = routine.products[p]
        sides.append((product.left, product.right))
        if product.right is not None:
            sides.append((product.right, product.left))
    return sides


def _gradient_group(routine: Routine, output: int, cotangents, residuals, aims, mirrored: bool) -> ProductGroup:
    sides = _sides(routine, output)
    rights = tuple(None if other is None else len(cotangents) + other for _, other in sides)
    pinned = _mirror(routine, output, cotangents[output].spec) if mirrored else None
    contractions = tuple(
        Contraction(
            None if other is None else residuals[other],
            aims[routine.moves[own].source],
            None if other is None or pinned is None else routine.moves[other].spec,
        )
        for own, other in sides
    )
    return ProductGroup(output, cotangents[output], rights, contractions, pinned)


def _mirror(routine: Routine, output: int, cotangent: Spec) -> Spec | None:
    """Return the placement in which local einsums leave an output, with the dimensions ordered as in the cotangent.

    The result is None if the terms of the output have different placements.
    """
    left = {routine.products[p].einsum.after.without_partial() for p in routine.outputs[output].products}
    if len(left) != 1:
        return None
    result = left.pop()
    return Spec(cotangent.dims, tuple(result.axes_of(dim) if dim in result.dims else () for dim in cotangent.dims))


@dataclass(frozen=True)
class GradientPart:
    """The part of a backward routine that computes one operand's cotangent.

    Attributes:
        equation: the equation that the part computes.
        routine: the moves, products and output of the part.
        dtypes: the dtypes of the part's operands.
        inputs: the inputs of the whole backward routine.
        outputs: the cotangent that the part computes.
        overlap: the rings and stripes of the part.
        share: the fraction of the whole routine's communication time that the part takes.
    """

    equation: Equation
    routine: Routine
    dtypes: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    overlap: Overlap
    share: float


def parts(
    backward: Routine, held: Sequence[Tensor], targets: Sequence[Tensor], overlap: Overlap
) -> Iterator[GradientPart]:
    """Divide a backward routine into a part for each operand; a step that several parts need is in the first of these.

    Args:
        backward: the routine of all cotangents.
        held, targets: the tensors of the routine, as `backward_tensors` returns them.
        overlap: the overlap of the whole routine.
    """
    claimed: set[int] = set()
    for number, target in enumerate(targets):
        output = backward.outputs[number]
        products = [backward.products[p] for p in output.products]
        needed = list(dict.fromkeys(m for p in products for m in p.operands))
        moves = tuple(replace(backward.moves[m], steps=()) if m in claimed else backward.moves[m] for m in needed)
        own = overlap.part([m if m not in claimed else -1 for m in needed], number)
        claimed.update(needed)
        local = tuple(
            replace(p, left=needed.index(p.left), right=None if p.right is None else needed.index(p.right))
            for p in products
        )
        sources = [[backward.moves[m].source for m in p.operands] for p in products]
        terms = tuple(Term(tuple(Operand((held[source].spec,)) for source in pair)) for pair in sources)
        output = replace(output, products=tuple(range(len(local))))
        routine = Routine(backward.inputs, moves, local, (output,))
        dtypes = tuple(held[source].dtype for pair in sources for source in pair)
        equation, share = Equation(terms, (output.spec,)), _sent(routine) / (_sent(backward) or 1.0)
        yield GradientPart(equation, routine, dtypes, tuple(held), (target,), own, share)


def _sent(routine: Routine) -> float:
    """Return the seconds of a routine's collectives."""
    return sum(step.seconds for step in routine.steps if step.is_collective)
