"""Lowering `xla`: the equation as plain einsums between annotations; the compiler inserts the collectives."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice, product

import jax
import jax.numpy as jnp

from gspmd.annotate.equation import Equation
from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.collectives import planned
from gspmd.collectives.lower import local_einsum
from gspmd.collectives.plan import Step
from gspmd.collectives.planning import make_plan, pins
from gspmd.collectives.summands import gradients, lifted, summand_letters, to_dimensions, to_partial


def annotated_program(
    equation: Equation,
    sizes: tuple,
    context: planned.Context,
    dtypes: tuple[str, ...],
    via: str | None,
    precision,
    preferred: str | None,
) -> Callable:
    """From a flat list of arrays to a tuple of results; JAX differentiates it, forward and reverse."""
    specs = [spec for operand in equation.operands for spec in operand.specs]
    summands = summand_letters([*specs, *equation.outputs])
    ins, outs = ([lifted(spec, summands) for spec in some] for some in (specs, equation.outputs))
    plan = None
    if not any(spec.is_open for spec in (*specs, *equation.outputs)):  # an open dimension has no forecast
        plan = make_plan(equation, sizes, context.axes, dtypes, context.chip, "xla", via, None, preferred)
    placed = _pinned(equation, via, ins, sizes, context)
    owed = frozenset(summands.values())
    compute = partial(_plain, equation, ins, outs, placed, owed, context.mesh, plan, precision, preferred)
    compute.__name__ = str(equation)

    def program(*arrays):
        with jax.named_scope(f"gspmd[{equation}]"):
            arrays = [to_dimensions(spec, new, x) for spec, new, x in zip(specs, ins, arrays)]
            results = planned.compiler_chooses(compute, ins, tuple(outs), *arrays)
            return tuple(to_partial(new, spec, x) for spec, new, x in zip(equation.outputs, outs, results))

    steps, backward = ((), ()) if plan is None else (plan.steps, plan.backward.steps)
    program = _named(program, planned.Registered(str(equation), steps, backward))
    return _with_gradient(equation, specs, ins, program, backward) if summands else program


def _named(program: Callable, registered: planned.Registered) -> Callable:
    program.__name__ = program.__qualname__ = planned.register(registered)
    return jax.jit(program)


def _with_gradient(equation: Equation, specs, ins, program: Callable, steps: tuple[Step, ...]) -> Callable:
    """An equation that takes or leaves partial sums, with its gradient as einsums in which there are none.

    JAX would transpose the relabelling; the partitioner has been seen to sum such a cotangent over too few devices.
    """
    settled = [spec.without_partial() for spec in specs]
    cotangent_specs = [spec.without_partial() for spec in equation.outputs]

    def compute(*arrays):
        return gradients(equation, ins, arrays[: len(ins)], arrays[len(ins) :])

    def transposed(arrays, cotangents):
        arrays = [to_dimensions(spec, new, x) for spec, new, x in zip(specs, ins, arrays)]
        cotangents = [planned.as_settled(spec, x) for spec, x in zip(equation.outputs, cotangents)]
        results = planned.compiler_chooses(compute, (*ins, *cotangent_specs), tuple(settled), *arrays, *cotangents)
        return tuple(planned.as_cotangent(spec, x) for spec, x in zip(specs, results))

    backward = _named(transposed, planned.Registered(f"gradient of {equation}", steps, steps))
    with_gradient = jax.custom_vjp(program)
    with_gradient.defvjp(lambda *arrays: (program(*arrays), arrays), backward)
    return with_gradient


def _pinned(equation: Equation, via: str | None, ins: Sequence[Spec], sizes: tuple, context: planned.Context) -> list:
    """Where `via` has the operands constrained before they meet, their summands staying put; None: nowhere."""
    placed = []
    for pinned, new in zip(pins(equation, via, dict(sizes), context.mesh), ins):
        axes = {} if pinned is None else dict(zip(pinned.dims, pinned.axes))
        held = [axes.get(dim, here) for dim, here in zip(new.dims, new.axes)]
        if pinned is not None and len(used := [axis for names in held for axis in names]) > len(set(used)):
            raise PlanError(
                f"cannot run '{equation}' via '{via}' under lowering 'xla': a partial sum is owed over a mesh\n"
                "  axis that the pin needs. Use lowering='blocking', or settle the sum before."
            )
        placed.append(None if pinned is None else Spec(new.dims, tuple(held)))
    return placed


def _plain(
    equation: Equation, ins, outs, placed, owed, mesh, plan, precision, preferred, *arrays
) -> tuple[jax.Array, ...]:
    dtype = jnp.dtype(preferred) if preferred else jnp.result_type(*arrays)
    arrays = [x if pin is None else _constrained(x, pin) for x, pin in zip(arrays, placed)]
    held, sums, number = iter(zip(ins, arrays)), [], 0
    for term in equation.terms:
        operands = [list(islice(held, len(operand.specs))) for operand in term.operands]
        pairs = [_linear(pair, owed) for pair in product(*operands)]
        known = [None] * len(pairs) if plan is None else plan.routine.products[number : number + len(pairs)]
        steps = [each and each.einsum for each in known]
        sums.append([_product(*each, mesh, precision, dtype) for each in zip(pairs, outs, steps)])
        number += len(pairs)
    return tuple(sum(parts[1:], parts[0]).astype(dtype) for parts in zip(*sums))


def _constrained(x: jax.Array, spec: Spec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, spec.partition_spec())


def _linear(pair: tuple, owed: frozenset[str]) -> tuple:
    """A product is linear in one owed sum: of two over the same mesh axis, the smaller operand's is summed first."""
    twice = owed.intersection(*(spec.dims for spec, _ in pair)) if len(pair) == 2 else ()
    if not twice:
        return pair
    number = min((0, 1), key=lambda n: pair[n][1].size)
    spec, x = pair[number]
    settled = spec.without(*twice), x.sum(tuple(spec.dims.index(dim) for dim in twice))
    return (settled, pair[1]) if number == 0 else (pair[0], settled)


def _product(pair, output: Spec, step: Step | None, mesh: Mapping[str, int], precision, dtype) -> jax.Array:
    """One product, accumulated in float32; a sum that only the result owes is cut out of a summed dimension."""
    for dim, axes in zip(output.dims, output.axes):
        if not any(dim in spec.dims for spec, _ in pair):
            summed, size = _summed_over(axes[0], pair, output, step), mesh[axes[0]]
            pair = [_cut(spec, x, summed, dim, axes, size) if summed in spec.dims else (spec, x) for spec, x in pair]
    letters = ",".join("".join(spec.dims) for spec, _ in pair) + "->" + "".join(output.dims)
    arrays = [x for _, x in pair]
    if len(arrays) == 1 and set(pair[0][0].dims) == set(output.dims):
        return jnp.einsum(letters, *arrays)
    narrow = dtype if jnp.issubdtype(dtype, jnp.floating) else None
    return local_einsum(letters, *arrays, precision=precision, into=narrow)


def _summed_over(axis: str, pair, output: Spec, step: Step | None) -> str:
    """The summed dimension that the plan has a mesh axis on; any, for an axis of size 1, which no plan has."""
    for spec in () if step is None else (step.before, step.other):
        for dim, axes in () if spec is None else zip(spec.dims, spec.axes):
            if axis in axes and dim not in output.dims:
                return dim
    return next(dim for spec, _ in pair for dim in spec.dims if dim not in output.dims)


def _cut(spec: Spec, x: jax.Array, dim: str, new: str, axes: tuple, size: int) -> tuple[Spec, jax.Array]:
    at = spec.dims.index(dim)
    x = x.reshape((*x.shape[:at], size, x.shape[at] // size, *x.shape[at + 1 :]))
    # This is where the gradient's partitioning starts from, too; left to itself, XLA has been seen to forget one of a
    # cotangent's two sums.
    places = [axes if d == at else jax.P.UNCONSTRAINED for d in range(x.ndim)]
    x = jax.lax.with_sharding_constraint(x, jax.P(*places))
    return Spec((*spec.dims[:at], new, *spec.dims[at:]), ((),) * (len(spec.dims) + 1)), x
