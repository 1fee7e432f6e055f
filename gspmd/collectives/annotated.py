"""Lowering `xla`: the equation as plain einsums between annotations; the compiler inserts the collectives.

A partial sum is no placement the compiler can be asked for by annotation. Here it becomes a dimension of its own, one
summand per device: a relabelling without communication on either side of ordinary einsums.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice, product
from string import ascii_uppercase

import jax
import jax.numpy as jnp

from gspmd.annotate.equation import Equation
from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.collectives import planned
from gspmd.collectives.lower import local_einsum
from gspmd.collectives.plan import Step
from gspmd.collectives.planning import make_plan, pins


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
    summands = _summand_letters([*specs, *equation.outputs])
    ins, outs = ([_lifted(spec, summands) for spec in some] for some in (specs, equation.outputs))
    plan = None
    if not any(spec.is_open for spec in (*specs, *equation.outputs)):  # an open dimension has no forecast
        plan = make_plan(equation, sizes, context.axes, dtypes, context.chip, "xla", via, None, preferred)
    placed = _pinned(equation, via, ins, sizes, context)
    owed = frozenset(summands.values())
    compute = partial(_plain, equation, ins, outs, placed, owed, context.mesh, plan, precision, preferred)
    compute.__name__ = str(equation)

    def program(*arrays):
        with jax.named_scope(f"gspmd[{equation}]"):
            arrays = [_to_dimensions(spec, new, x) for spec, new, x in zip(specs, ins, arrays)]
            results = planned.compiler_chooses(compute, ins, tuple(outs), *arrays)
            return tuple(_to_partial(new, spec, x) for spec, new, x in zip(equation.outputs, outs, results))

    steps, backward = ((), ()) if plan is None else (plan.steps, plan.backward.steps)
    registered = planned.Registered(str(equation), steps, backward)
    program.__name__ = program.__qualname__ = planned.register(registered)
    return jax.jit(program)


def _pinned(equation: Equation, via: str | None, ins: Sequence[Spec], sizes: tuple, context: planned.Context) -> list:
    """Where `via` has the operands constrained before they meet, their summands staying put; None: nowhere."""
    placed = []
    for pinned, lifted in zip(pins(equation, via, dict(sizes), context.mesh), ins):
        axes = {} if pinned is None else dict(zip(pinned.dims, pinned.axes))
        held = [axes.get(dim, here) for dim, here in zip(lifted.dims, lifted.axes)]
        if pinned is not None and len(used := [axis for names in held for axis in names]) > len(set(used)):
            raise PlanError(
                f"cannot run '{equation}' via '{via}' under lowering 'xla': a partial sum is owed over a mesh\n"
                "  axis that the pin needs. Use lowering='blocking', or settle the sum before."
            )
        placed.append(None if pinned is None else Spec(lifted.dims, tuple(held)))
    return placed


# -- a partial sum as a dimension -------------------------------------------------------------------------------------


def _summand_letters(specs: Sequence[Spec]) -> dict[str, str]:
    """A letter that the equation does not use for every mesh axis over which a sum is owed."""
    free = iter(sorted(set(ascii_uppercase) - {dim for spec in specs for dim in spec.dims}))
    return {axis: next(free) for axis in sorted({axis for spec in specs for axis in spec.partial})}


def _lifted(spec: Spec, letters: Mapping[str, str]) -> Spec:
    """`BF_y partialsum-x` as `A_xBF_y`."""
    return Spec(
        tuple(letters[axis] for axis in spec.partial) + spec.dims, tuple((axis,) for axis in spec.partial) + spec.axes
    )


def _to_dimensions(spec: Spec, lifted: Spec, x: jax.Array) -> jax.Array:
    count = len(spec.partial)
    return _relabel(spec.partition_spec(), lifted.partition_spec(), count)(x) if count else x


def _to_partial(lifted: Spec, spec: Spec, x: jax.Array) -> jax.Array:
    count = len(spec.partial)
    return _relabel(lifted.partition_spec(), spec.partition_spec(), -count)(x) if count else x


@lru_cache(maxsize=1024)
def _relabel(here: jax.P, there: jax.P, added: int) -> Callable:
    """Every device keeps its piece, which gains or loses leading dimensions of size 1; no communication either way."""

    def reshaped(x, ins, outs, added):
        body = lambda piece: piece.reshape((1,) * added + piece.shape[max(0, -added) :])  # noqa: E731
        return planned.mapped(body, ins, outs)(x)

    relabel = jax.custom_vjp(lambda x: reshaped(x, here, there, added))
    relabel.defvjp(
        lambda x: (relabel(x), None),
        lambda _, cotangent: (reshaped(cotangent, _dual(there), _dual(here), -added),),
    )
    return relabel


def _dual(spec: jax.P) -> jax.P:
    return jax.P(*spec.partitions, reduced=spec.unreduced) if spec.unreduced else spec


def _plain(
    equation: Equation, ins, outs, placed, owed, mesh, plan, precision, preferred, *arrays
) -> tuple[jax.Array, ...]:
    dtype = jnp.dtype(preferred) if preferred else jnp.result_type(*arrays)
    arrays = [x if pin is None else _constrained(x, pin) for x, pin in zip(arrays, placed)]
    held, sums, number = iter(zip(ins, arrays)), [], 0
    for term in equation.terms:
        operands = [list(islice(held, len(operand.specs))) for operand in term.operands]
        pairs = [_linear(pair, owed) for pair in product(*operands)]
        steps = [None if plan is None else each.einsum for each in plan.routine.products[number : number + len(pairs)]]
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
