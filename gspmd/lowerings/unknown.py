"""The lowering of a program with unknown placements: the program of one device, with a mark for each step."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from gspmd.annotate.equation import Via
from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.lowerings.blocking.collectives import After
from gspmd.lowerings.blocking.executor import Executor, Pieces
from gspmd.lowerings.call import Call, Passes, make_plan, precision_name
from gspmd.lowerings.marks import marked
from gspmd.lowerings.program import run
from gspmd.planner.plan import Plan, spread_over_groups
from gspmd.planner.steps import Step, Tensor
from gspmd.planner.unknown import RequiredMove, UnknownMove, UnknownProduct, UnknownSteps


def lower(call: Call) -> Passes:
    """Return the passes that run an equation on one device, with a mark for each step.

    Every operand is kept for the backward pass as if it had been moved. So the mark of its move runs again if the
    forward pass is recomputed.
    """
    alone = any(len(term.operands) == 1 for term in call.equation.terms)
    return _planned(call) if call.via is None or alone else _product(call, call.via)


# -- an equation with a via --------------------------------------------------------------------------------------------


def _product(call: Call, via: Via) -> Passes:
    """Lower an equation with a via.

    Marks stand for the moves of the operands to the via's specs, for the products, and for the moves of the results.

    Products of a sum may have different placements, and are then added in the cheapest placement. In the gradient, all
    these products use the same cotangent, so their placements must be equal, except for partial sums. If the placements
    are not equal, the planner searches the gradient.
    """
    plan, specs, outputs = call.plan, call.operands, call.equation.outputs
    inputs, results = plan.inputs, plan.outputs
    met = _ordered(via, call)
    sizes = dict(call.sizes)
    moves, products, added = plan.routine.moves, plan.routine.products, plan.routine.outputs
    joint = [joint_of(*(met[moves[n].source] for n in p.operands)) for p in products]

    def moved(before: Sequence[Spec], after: Spec, tensor: Tensor) -> UnknownMove:
        shape = tuple(sizes[dim] for dim in before[0].dims)
        return UnknownMove(tuple(before), after, shape, tensor.itemsize)

    def product(first: Tensor, second: Tensor, made: Tensor, at: Spec, dims: Sequence[Spec]) -> UnknownProduct:
        specs = tuple(lying(at, each.dims) for each in dims)
        left, right, result = specs
        summed = tuple(axis for dim in at.dims if dim not in result.dims for axis in at.axes_of(dim))
        kinds = first.dtype, second.dtype, made.dtype
        results = left, right, result.with_partial(summed)
        return UnknownProduct(results, kinds, tuple(call.sizes), precision_name(call.precision))

    class Forward(Executor):
        def move(self, number: int, pieces: Pieces, stop: int | None = None, after: After = ()) -> jax.Array:
            source = moves[number].source
            return marked(pieces[source], moved([specs[source]], met[source], inputs[source]))

        def multiply(self, number: int, *operands: jax.Array) -> jax.Array:
            each = self.routine.products[number]
            left, right = (moves[n].source for n in each.operands)
            of = self.output_of(number)
            what = product(inputs[left], inputs[right], results[of], joint[number],
                           (specs[left], specs[right], outputs[of]))  # fmt: skip
            return marked(super().multiply(number, *operands), what)

        def output(self, number: int, values: Pieces) -> jax.Array:
            made = [made_of(joint[part], outputs[number].dims) for part in self.routine.outputs[number].products]
            return marked(super().output(number, values), moved(made, outputs[number], results[number]))

    cotangents = len(outputs)

    class Backward(Executor):
        def move(self, number: int, pieces: Pieces, stop: int | None = None, after: After = ()) -> jax.Array:
            source = self.routine.moves[number].source
            x = super().move(number, pieces, stop, after)
            if source >= cotangents:  # kept operands have the placement in which they were multiplied
                return x
            mirrored, *others = (lying(joint[part], outputs[source].dims) for part in added[source].products)
            x = marked(x, moved([outputs[source].cotangent], mirrored, results[source]))
            for other in dict.fromkeys(others):
                x = marked(x, UnknownSteps(made_alike, (str(call.equation), mirrored, other), "alike"))
            for number in range(len(specs)):
                if specs[number].reduced:  # the move to a partial sum may be impossible, even if its result is unused
                    x = marked(x, RequiredMove(self._gradient(number)))
            return x

        def multiply(self, number: int, *operands: jax.Array) -> jax.Array:
            of, forward, own, other = self._sides(number)
            what = product(results[of], inputs[other], inputs[own], joint[forward],
                           (outputs[of], specs[other], specs[own]))  # fmt: skip
            return marked(super().multiply(number, *operands), what)

        def output(self, number: int, values: Pieces) -> jax.Array:
            return marked(super().output(number, values), self._gradient(number))

        def _gradient(self, number: int) -> UnknownMove:
            """Return the move that adds up the products of an operand's gradient, and brings the sum to its spec."""
            parts = self.routine.outputs[number].products
            made = [made_of(joint[self._sides(part)[1]], specs[number].dims) for part in parts]
            return moved(made, specs[number].cotangent, inputs[number])

        def _sides(self, number: int) -> tuple[int, int, int, int]:
            """Return the four indices that belong to a product of a gradient.

            The first two are the indices of an output of the forward pass, and of a product of this output. The other
            two are the indices of the product's operands: first the operand whose gradient is computed, then the
            operand by which the cotangent is multiplied.
            """
            each = self.routine.products[number]
            of, residual = (self.routine.moves[side].source for side in each.operands)
            held = residual - cotangents
            forward = next(p for p in added[of].products if held in products[p].operands)
            own = next(n for n in products[forward].operands if n != held)
            return of, forward, moves[own].source, moves[held].source

    return _passes(call, Forward, Backward, [met[move.source] for move in moves])


def made_alike(equation: str, one: Spec, other: Spec) -> dict[str, tuple[Step, ...]]:
    """Check that two products of a sum have the same placement, so that one cotangent is enough for the two.

    Returns:
        A mapping with no steps.

    Raises:
        PlanError: the placements of the products differ.
    """
    if one != other:
        raise PlanError(f"the products of '{equation}' are '{one}' and '{other}', so its gradient must be searched.")
    return {"alike": ()}


def _passes(call: Call, forward: type[Executor], backward: type[Executor], kept: Sequence[Spec]) -> Passes:
    plan, specs = call.plan, call.operands
    equation, ctx, title = plan.equation, call.context, str(plan.equation)
    run_forward = forward(plan.routine, plan.inputs, plan.outputs, plan.sizes, plan.mesh, precision=call.precision)
    residuals = [plan.inputs[move.source] for move in plan.routine.moves]
    held = [*plan.outputs, *residuals]

    def forward_body(*pieces):
        results, moved = run_forward(*pieces)
        return tuple(results), tuple(moved)

    def backward_body(*pieces):
        executor = backward(plan.backward, held, plan.inputs, plan.sizes, plan.mesh, precision=call.precision)
        return tuple(executor(*pieces)[0])

    def forward_pass(*arrays):
        return run(ctx, title, (), forward_body, specs, (equation.outputs, tuple(kept)), *arrays)

    def backward_pass(moved, cotangents):
        ins = [*(spec.cotangent for spec in equation.outputs), *kept]
        outs = tuple(spec.cotangent for spec in specs)
        return run(ctx, f"gradient of {title}", (), backward_body, ins, outs, *cotangents, *moved)

    if not any(spec.partial for spec in (*specs, *kept)):
        return Passes(forward_pass, backward_pass)
    from gspmd.lowerings.transformations.partial_sums import storable

    return Passes(*storable(forward_pass, backward_pass))


def _ordered(via: Via, call: Call) -> list[Spec]:
    """Return the spec in which each operand is multiplied, with the dimensions in the order of the operand.

    Every member of a group is an operand.
    """
    met = spread_over_groups(call.equation, via.specs, call.operands)
    return [Spec(own.dims, tuple(spec.axes_of(dim) for dim in own.dims)) for spec, own in zip(met, call.operands)]


def joint_of(left: Spec, right: Spec) -> Spec:
    """Return one spec that has the dimensions of both operands of a product, with their mesh axes."""
    rest = [dim for dim in right.dims if dim not in left.dims]
    return Spec((*left.dims, *rest), (*left.axes, *(right.axes_of(dim) for dim in rest)))


def lying(joint: Spec, dims: Sequence[str]) -> Spec:
    """Return a spec with these dimensions, each sharded as in `joint`."""
    return Spec(tuple(dims), tuple(joint.axes_of(dim) for dim in dims))


def made_of(joint: Spec, dims: Sequence[str]) -> Spec:
    """Return the spec of a product's result, which is a partial sum over the mesh axes of the summed dimensions."""
    summed = tuple(axis for dim in joint.dims if dim not in dims for axis in joint.axes_of(dim))
    return lying(joint, dims).with_partial(summed)


# -- a move, or an equation without a via ------------------------------------------------------------------------------


def _planned(call: Call) -> Passes:
    """Lower an equation without a via, with marks that stand for the steps of the plan that the equation will have."""
    if _is_move(call):
        return _moved(call)
    precision = precision_name(call.precision)
    asked = call.equation, call.sizes, call.context, call.dtypes, call.via, call.wire_dtype, call.result_dtype
    arguments = *asked, precision

    class Forward(Executor):
        backward = False

        def move(self, number: int, pieces: Pieces, stop: int | None = None, after: After = ()) -> jax.Array:
            name = _moved_tensor(call.plan, self.backward, self.routine.moves[number].source)
            return self._mark(super().move(number, pieces, stop, after), name)

        def output(self, number: int, values: Pieces) -> jax.Array:
            return self._mark(super().output(number, values), _output(self.backward, number))

        def _mark(self, x: jax.Array, name: str) -> jax.Array:
            return marked(x, UnknownSteps(planned_steps, (*arguments, self.backward), name))

    class Backward(Forward):
        backward = True

    return _passes(call, Forward, Backward, [call.operands[move.source] for move in call.plan.routine.moves])


def planned_steps(
    equation, sizes, ctx, dtypes, via, wire_dtype, result_dtype, precision, backward: bool
) -> dict[str, tuple[Step, ...]]:
    """Return the steps of an equation's plan, or of its gradient's plan if `backward` is set.

    The result is a mapping with an entry for each moved tensor and for each output. If a tensor moves to several
    placements, all its moves are in one entry. Products are in the entry of their output.
    """
    via = None if via is None else Via(via)  # `placed` has made a plain tuple of it
    plan = make_plan(equation, sizes, ctx.axes, dtypes, ctx.chip, "blocking", via, wire_dtype, result_dtype, precision)
    found: dict[str, tuple[Step, ...]] = {}
    routine = plan.backward if backward else plan.routine
    for move in routine.moves:
        name = _moved_tensor(plan, backward, move.source)
        found[name] = (*found.get(name, ()), *move.steps)
    for number, output in enumerate(routine.outputs):
        made = [step for each in output.products for step in routine.products[each].all_steps]
        found[_output(backward, number)] = (*made, *output.steps)
    return found


def _moved_tensor(plan: Plan, backward: bool, source: int) -> str:
    """Return a name for a moved tensor that does not depend on how many moves the tensor has."""
    if not backward:
        return f"operand {source}"
    kept = source - len(plan.outputs)
    return f"cotangent {source}" if kept < 0 else f"operand {plan.routine.moves[kept].source}, backward"


def _output(backward: bool, number: int) -> str:
    return f"{'gradient' if backward else 'result'} {number}"


def _is_move(call: Call) -> bool:
    equation = call.equation
    return equation.is_move and {*equation.outputs[0].dims} == {*call.operands[0].dims}


def _moved(call: Call) -> Passes:
    (before,), (after,) = call.operands, call.equation.outputs
    shape = tuple(dict(call.sizes)[dim] for dim in before.dims)
    wire = call.plan.inputs[0].itemsize, call.plan.outputs[0].itemsize
    there = UnknownMove((before,), after, shape, wire[0])
    mirrored = tuple(dict(call.sizes)[dim] for dim in after.dims)
    back = UnknownMove((after.cotangent,), before.cotangent, mirrored, wire[1], searched=True)

    class Forward(Executor):
        def output(self, number: int, values: Pieces) -> jax.Array:
            return marked(super().output(number, values), there)

    class Backward(Executor):
        def output(self, number: int, values: Pieces) -> jax.Array:
            return marked(super().output(number, values), back)

    return _passes(call, Forward, Backward, [before])
