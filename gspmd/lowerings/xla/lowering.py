"""Lowering `xla`: an equation becomes plain einsums between annotations, and the compiler inserts the collectives."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from gspmd.annotate.equation import Equation
from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.lowerings.call import Call, Passes
from gspmd.lowerings.local_einsum import local_einsum
from gspmd.lowerings.partitioner import may_abort, open_where_it_may_abort
from gspmd.lowerings.program import PlannedProgram, named
from gspmd.lowerings.scopes import program_scope
from gspmd.lowerings.transformations.partial_sums import storable
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.lowerings.xla.places import Lift, ProductPlaces, pairs, pinned_places, planned_places
from gspmd.lowerings.xla.summands import (
    gradients,
    lifted,
    summand_letters,
    to_dimensions,
    to_partial,
    with_summands,
)
from gspmd.planner.plan import pinned_specs
from gspmd.planner.steps import Step


def lower(call: Call) -> Passes:
    """Return passes of plain einsums with annotations, which JAX differentiates in forward and reverse mode."""
    if call.wire_dtype is not None:
        raise PlanError(
            f"cannot send '{call.equation}' as {call.wire_dtype} under lowering 'xla': the compiler chooses what is "
            "sent.\n  Use lowering='blocking', or cast the operands."
        )
    equation, ctx, specs = call.equation, call.context, call.operands
    letters = summand_letters([*specs, *equation.outputs])
    ins, outs = ([lifted(spec, letters) for spec in some] for some in (specs, equation.outputs))
    lift, steps, backward = Lift(letters, ctx.mesh), (), ()
    unknown = next((spec for spec in (*specs, *equation.outputs) if spec.is_open), None)
    if unknown is not None and may_abort(ctx.mesh):
        raise PlanError(open_where_it_may_abort(unknown, ctx.mesh))
    if unknown is not None:  # with an open dimension there is no plan of what will be sent
        pinned = [] if call.via is None else pinned_specs(equation, call.via, dict(call.sizes), ctx.mesh)
        places = pinned_places(equation, pinned)
    else:
        plan = call.plan
        places, steps, backward = planned_places(plan), plan.steps, plan.backward.steps
    compute = partial(_plain, equation, ins, outs, places, lift, call.precision, call.result_dtype)
    compute.__name__ = str(equation)  # type: ignore[attr-defined]

    def program(*arrays):
        with jax.named_scope(program_scope(str(equation))):
            arrays = [to_dimensions(spec, new, x) for spec, new, x in zip(specs, ins, arrays)]
            results = left_to_compiler(ctx, compute, ins, tuple(outs), *arrays)
            return tuple(to_partial(new, spec, x) for spec, new, x in zip(equation.outputs, outs, results))

    program = named(program, PlannedProgram(str(equation), steps, backward))
    if letters:
        program = _differentiated(call, ins, places, lift, program, backward)
    return Passes(program, None)


def _differentiated(
    call: Call, ins, places: Sequence[ProductPlaces], lift: Lift, program: Callable, steps: tuple[Step, ...]
) -> Callable:
    """Return a program whose gradient consists of einsums without partial sums.

    `program` computes an equation with partial sums as operands or result. Without this gradient, JAX would
    differentiate the step that turns a partial sum into an array with one more dimension, which has an entry for each
    summand. The partitioner sometimes sums the cotangent of that step over too few devices.
    """
    equation, ctx, specs = call.equation, call.context, call.operands
    # The gradient of a partial sum is replicated, and the gradient of a `reduced` array is a partial sum; both are
    # lifted like the operands.
    outs, given = ([lifted(spec.cotangent, lift.letters) for spec in each] for each in (specs, equation.outputs))

    def compute(*arrays):
        cotangents = list(zip(given, arrays[len(ins) :]))
        return gradients(equation, ins, places, lift, outs, arrays[: len(ins)], cotangents)

    def transposed(arrays, cotangents):
        arrays = [to_dimensions(spec, new, x) for spec, new, x in zip(specs, ins, arrays)]
        cotangents = [
            to_dimensions(spec.cotangent, new, x) for spec, new, x in zip(equation.outputs, given, cotangents)
        ]
        results = left_to_compiler(ctx, compute, (*ins, *given), tuple(outs), *arrays, *cotangents)
        return tuple(to_partial(new, spec.cotangent, x) for spec, new, x in zip(specs, outs, results))

    backward = named(transposed, PlannedProgram(f"gradient of {equation}", steps, steps))
    differentiated = jax.custom_vjp(program)
    differentiated.defvjp(*storable(lambda *arrays: (program(*arrays), arrays), backward))
    return differentiated


def _plain(
    equation: Equation, ins, outs, places: Sequence[ProductPlaces], lift: Lift, precision, preferred, *arrays
) -> tuple[jax.Array, ...]:
    dtype = jnp.dtype(preferred) if preferred else jnp.result_type(*arrays)
    sums, known = [], iter(places)
    for members in pairs(equation):
        parts = []
        for pair, output in zip(members, outs):
            place = next(known)
            multiply = partial(_product, [ins[n] for n in pair], output, pair, place, lift, precision, dtype)
            # Checkpointed, so that operands are kept for the gradient as they were given, and not gathered. Without the
            # barrier of prevent_cse the compiler may use a gathered operand again if it is still in memory.
            parts.append((jax.checkpoint(multiply, prevent_cse=False)(*(arrays[n] for n in pair)), place))
        sums.append(parts)
    results = []
    for output, parts in zip(outs, zip(*sums)):
        (first, place), *rest = parts
        total = sum((y for y, _ in rest), first)
        results.append(lift.along(output.dims, total, place.output).astype(dtype))
    return tuple(results)


def _product(specs, output: Spec, numbers, place: ProductPlaces, lift: Lift, precision, dtype, *arrays) -> jax.Array:
    """Multiply operands in float32, after bringing them to their placement in the product.

    If the result has dimensions of summands that no operand has, the operands are first cut into these summands.
    """
    pair = [lift.bring(spec, x, place.operands.get(n, ())) for spec, x, n in zip(specs, arrays, numbers)]
    pair = with_summands(pair, output, lift)
    y = _multiplied(pair, output, precision, dtype)
    # This constrains the cotangent too, so that its placement agrees with those of the operands.
    return lift.along(output.dims, y, place.result)


def _multiplied(pair, output: Spec, precision, dtype) -> jax.Array:
    letters = ",".join("".join(spec.dims) for spec, _ in pair) + "->" + "".join(output.dims)
    arrays = [x for _, x in pair]
    if len(arrays) == 1 and set(pair[0][0].dims) == set(output.dims):
        return jnp.einsum(letters, *arrays)
    narrow = dtype if jnp.issubdtype(dtype, jnp.floating) else None
    return local_einsum(letters, *arrays, precision=precision, into=narrow)
