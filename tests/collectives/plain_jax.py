"""The same equation in plain JAX, annotated by hand: whose fault a wrong result under lowering `xla` is."""

from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate import parse_equation
from tests.collectives.random_equations import Case, gradients_of, place, values


def compiler_errs(case: Case) -> bool:
    """Whether jnp.einsum between sharding constraints, with nothing of ours, gives a wrong value or gradient as well.

    A partial sum cannot be written that way, so with one the fault is never the compiler's alone.
    """
    equation, sizes = parse_equation(case.equation), dict(case.sizes)
    specs = [spec for operand in equation.operands for spec in operand.specs]
    if any(spec.partial for spec in (*specs, *equation.outputs)):
        return False
    rng = np.random.default_rng(0)
    draw = lambda spec: rng.integers(-3, 4, size=[sizes[d] for d in spec.dims]).astype(np.float32)  # noqa: E731
    wholes, cotangents = [draw(spec) for spec in specs], [draw(spec) for spec in equation.outputs]
    names, shape = zip(*case.mesh)
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    mesh = jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[: prod(shape)])
    with jax.set_mesh(mesh):
        placed = [place(x, spec, mesh) for x, spec in zip(wholes, specs)]
        results, gradients = jax.jit(_value_and_gradients, static_argnums=0)(equation, placed, cotangents)
    wanted = [*values(equation, wholes), *gradients_of(equation, wholes, cotangents)]
    return any(not np.array_equal(got, want) for got, want in zip([*results, *gradients], wanted, strict=True))


def _value_and_gradients(equation, operands, cotangents):
    constrain = lambda x, spec: jax.lax.with_sharding_constraint(x, spec.partition_spec())  # noqa: E731

    def compute(*flat):
        held, sums = iter(flat), [0] * len(equation.outputs)
        for term in equation.terms:
            groups = [[(s, constrain(next(held), s)) for s in operand.specs] for operand in term.operands]
            for number, (pair, out) in enumerate(zip(product(*groups), equation.outputs)):
                letters = ",".join("".join(spec.dims) for spec, _ in pair) + "->" + "".join(out.dims)
                sums[number] = sums[number] + jnp.einsum(letters, *(x for _, x in pair))
        return tuple(constrain(x, spec) for x, spec in zip(sums, equation.outputs))

    results, transpose = jax.vjp(compute, *operands)
    return results, transpose(tuple(cotangents))
