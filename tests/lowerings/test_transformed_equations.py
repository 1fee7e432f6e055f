"""Random equations in every dtype, with a batch in some operands, of empty dimensions, and derived twice."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, event, given, seed, settings
from hypothesis import strategies as st

import gspmd
from gspmd.annotate import Equation, parse_equation
from tests.references.random_equations import Case, cases
from tests.references.volume import scaled

pytestmark = pytest.mark.usefixtures("every_schedule")

BATCH = 2
TOLERANCE = {"bfloat16": 4e-2, "float64": 1e-9}  # of the largest number; 1e-4 for what is not listed
DTYPES = ["float32", "bfloat16", "int32", "float64", "complex64"]


@dataclass(frozen=True)
class Transformed:
    """An equation's case, the dtype of its operands, which of them have a batch in front, and how often it is derived.

    The compiler's own lowering is left out: what it gets wrong is counted elsewhere.
    """

    case: Case
    dtype: str
    batched: tuple[bool, ...]
    times: int


@st.composite
def transformed(draw) -> Transformed:
    """A case without partial sums, which no array outside of a program can have a batch of."""
    case = draw(cases())
    equation = parse_equation(case.equation)
    assume(case.lowering != "xla" and not any(spec.partial for spec in equation.specs))
    dtype = draw(st.sampled_from(DTYPES))
    count = sum(len(operand.specs) for operand in equation.operands)
    batched = draw(st.tuples(*[st.booleans()] * count))
    times = draw(st.sampled_from((1, 1, 2))) if dtype != "int32" else 0
    # XLA:CPU's compiler has been seen to end the process over the gradient of empty complex arrays.
    if case.sizes and dtype != "complex64" and draw(st.integers(0, 7)) == 0:
        dim = draw(st.sampled_from([dim for dim, _ in case.sizes]))
        case = replace(case, sizes=tuple((d, 0 if d == dim else size) for d, size in case.sizes))
    return Transformed(case, dtype, batched, times)


def plain(equation: Equation, arrays) -> tuple[jax.Array, ...]:
    """The results on one device, by jnp.einsum."""
    held = zip([spec for operand in equation.operands for spec in operand.specs], arrays)
    sums = [0] * len(equation.outputs)
    for term in equation.terms:
        operands = [[next(held) for _ in operand.specs] for operand in term.operands]
        for number, (pair, out) in enumerate(zip(product(*operands), equation.outputs)):
            letters = ",".join("".join(spec.dims) for spec, _ in pair) + "->" + "".join(out.dims)
            sums[number] = sums[number] + jnp.einsum(letters, *(x for _, x in pair))
    return tuple(sums)


def planned(case: Case, equation: Equation, arrays) -> tuple[jax.Array, ...]:
    """The results on the mesh in force."""
    held = iter(arrays)
    nested = [tuple(next(held) for _ in o.specs) if o.group else next(held) for o in equation.operands]
    results = gspmd.einsum(equation, *nested, lowering=case.lowering, via=case.via)
    return results if equation.group else (results,)


def check(drawn: Transformed) -> None:
    """Values, and derivatives of a nonlinear function of them, are those of one device."""
    case, equation = drawn.case, parse_equation(drawn.case.equation)
    empty = 0 in dict(case.sizes).values()
    event(f"{drawn.dtype}, derived {drawn.times} times, batch: {any(drawn.batched)}, empty: {empty}")
    specs = [spec for operand in equation.operands for spec in operand.specs]
    names, shape = zip(*case.mesh)
    kinds = (getattr(jax.sharding.AxisType, case.axis_type.capitalize()),) * len(names)
    mesh = jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[: prod(shape)])
    wide = {"bfloat16": "float32"}.get(drawn.dtype, drawn.dtype)
    with jax.enable_x64(True) if drawn.dtype == "float64" else nullcontext():
        whole = _draw(drawn, [tuple(dict(case.sizes)[dim] for dim in spec.dims) for spec in specs])
        with jax.set_mesh(mesh):
            placed = [_place(x, spec, has, drawn.dtype) for x, spec, has in zip(whole, specs, drawn.batched)]
            got = jax.jit(_derived(lambda *xs: planned(case, equation, xs), drawn))(*placed)
        want = jax.jit(_derived(lambda *xs: plain(equation, xs), drawn))(*(x.astype(wide) for x in whole))
        for one, other, x in zip(got[1], want[1], placed):
            assert (one.dtype, one.shape) == (x.dtype, other.shape)
        _compare(jax.tree.leaves(got), jax.tree.leaves(want), TOLERANCE.get(drawn.dtype, 1e-4))


def _draw(drawn: Transformed, shapes) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    whole = [rng.integers(-1, 2, (BATCH,) * has + shape) for shape, has in zip(shapes, drawn.batched)]
    return [x + 1j * rng.integers(-1, 2, x.shape) if drawn.dtype == "complex64" else x for x in whole]


def _place(x: np.ndarray, spec: gspmd.Spec, batched: bool, dtype: str) -> jax.Array:
    where = gspmd.Spec(("N", *spec.dims), ((), *spec.axes)) if batched else spec
    return gspmd.annotate(x.astype(jnp.dtype(dtype)), where)


def _derived(f, drawn: Transformed):
    """Values, and the first or second gradient; of numbers that are whole, values alone."""
    axes = tuple(0 if has else None for has in drawn.batched)
    compute = jax.vmap(f, axes) if any(drawn.batched) else f
    everything = tuple(range(len(drawn.batched)))

    def derive(function):
        squares = lambda x: x.real**2 + 2 * x.imag if jnp.iscomplexobj(x) else x * x  # noqa: E731
        total = lambda *xs: sum((at + 1) * squares(y).sum() for at, y in enumerate(function(*xs)))  # noqa: E731
        return jax.grad(total, everything)

    def both(*xs):
        if not drawn.times:
            return compute(*xs), ()
        return compute(*xs), derive(derive(compute) if drawn.times == 2 else compute)(*xs)

    return both


def _compare(got, want, tolerance: float) -> None:
    for one, other in zip(got, want, strict=True):
        one, other = (np.asarray(x).astype(np.complex128) for x in (one, other))
        largest = np.abs(other).max(initial=0)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest)


_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "phases": [Phase.generate]}


@settings(max_examples=12, derandomize=True, **_COMMON)
@given(transformed())
def test_equations_derive_as_on_one_device(drawn):
    check(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_equations_at_length_derive_as_on_one_device(part):
    @seed(part)
    @settings(max_examples=scaled(15), **_COMMON)
    @given(transformed())
    def draws(drawn):
        check(drawn)

    draws()
