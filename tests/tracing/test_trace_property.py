"""Trace counts what is compiled: random equations, alone, shared, jitted, recomputed and in loops."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import gspmd
from gspmd.annotate import Equation, parse_equation
from tests.references import random_equations
from tests.references.random_equations import Case, cases
from tests.references.volume import scaled

pytestmark = pytest.mark.usefixtures("every_schedule")

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


def sines(f):
    """A function whose results are not linear, so that its gradient needs what it has computed."""
    return lambda *arrays: tuple(map(jnp.sin, f(*arrays)))


def jitted(f):
    """A function twice, as one that is jitted."""
    program = jax.jit(sines(f))
    return lambda *arrays: (*program(*arrays), *program(*arrays))


def scanned(f, wrapped=lambda body: body):
    """Three trips, in which the first operand changes and the others do not."""
    body = wrapped(lambda c, first, *others: (c * 2, f(first * c, *others)))
    return lambda *arrays: jax.lax.scan(lambda c, _: body(c, *arrays), jnp.float32(1), None, length=3)[1]


def scanned_once(f):
    """A single trip, as of a model with one period of layers: a loop to JAX, and straight code to a compiler."""

    def layer(carried, operands):
        return carried, f(*operands)

    return lambda *arrays: jax.lax.scan(layer, None, [x[None] for x in arrays])[1]


PROGRAMS = {
    "alone": lambda f: f,
    "and again": lambda f: lambda *arrays: (*f(*arrays), *sines(f)(*arrays)),
    "jitted": jitted,
    "recomputed": lambda f: jax.checkpoint(sines(f)),
    "scanned": scanned,
    "scanned once": lambda f: scanned_once(sines(f)),
    "scanned once and recomputed": lambda f: scanned_once(jax.checkpoint(sines(f))),
    "scanned and recomputed": lambda f: scanned(sines(f), jax.checkpoint),
    "scanned twice over": lambda f: scanned(lambda *arrays: scanned(f)(*arrays)),
}


def computes(equation: Equation, case: Case):
    """The equation as a function of a flat list of operands, to a tuple."""

    def compute(*flat):
        held = iter(flat)
        nested = [tuple(next(held) for _ in o.specs) if o.group else next(held) for o in equation.operands]
        results = gspmd.einsum(equation, *nested, lowering=case.lowering, via=case.via)
        return results if equation.group else (results,)

    return compute


def with_gradients(f):
    """A function and the cotangents of its arguments."""

    def both(*arrays):
        results, transpose = jax.vjp(f, *arrays)
        return results, transpose(jax.tree.map(jnp.cos, results))

    return both


def check(case: Case, program: str, gradients: bool) -> None:
    """The bytes that are planned are those that are compiled."""
    equation, sizes = parse_equation(case.equation), dict(case.sizes)
    specs = [spec for operand in equation.operands for spec in operand.specs]
    if any(spec.partial for spec in (*specs, *equation.outputs)):  # are linear: no sine of one, and none in a loop
        program, gradients = "alone", False
    if case.lowering in ("xla", "auto"):  # a forecast; blocking on host devices
        case = replace(case, lowering="blocking" if case.lowering == "auto" else "looped", via=None)
    mesh = random_equations._mesh(case)
    placed = [jax.NamedSharding(mesh, spec.partition_spec()) for spec in specs]
    shapes = [[sizes[dim] for dim in spec.dims] for spec in specs]
    abstract = [jax.ShapeDtypeStruct(shape, "float32", sharding=at) for shape, at in zip(shapes, placed)]
    function = PROGRAMS[program](computes(equation, case))
    function = with_gradients(function) if gradients else function
    with jax.set_mesh(mesh):
        plan = gspmd.trace(function, *abstract)
        ledger = gspmd.ledger(jax.jit(function).lower(*abstract).compile(), dict(case.mesh))
    compiled = sum(entry.wire_bytes for entry in ledger.entries if entry.equation)
    planned, doubtful = plan.wire_bytes, may_be_sent(plan)
    assert planned <= compiled <= planned + doubtful, f"{compiled} compiled, {planned} planned, {doubtful} more noted"


def may_be_sent(plan) -> int:
    """Bytes that a note says the compiler may send besides what is planned: none but where something is recomputed."""
    found = (re.match(r"up to (\d+) bytes more may be sent", note) for note in plan.notes)
    return sum(int(each[1]) for each in found if each)


@settings(max_examples=16, derandomize=True, **_COMMON)
@given(case=cases(), program=st.sampled_from(list(PROGRAMS)), gradients=st.booleans())
def test_planned_is_compiled(case, program, gradients):
    check(case, program, gradients)


@pytest.mark.slow
@seed(2)
@settings(max_examples=scaled(150), phases=[Phase.generate], **_COMMON)
@given(case=cases(), program=st.sampled_from(list(PROGRAMS)), gradients=st.booleans())
def test_planned_is_compiled_for_many(case, program, gradients):
    check(case, program, gradients)


@pytest.mark.parametrize("lowering", ["looped", "looped:one-way", "looped:halves", "looped:paired"])
@pytest.mark.parametrize(
    ("equation", "mesh"),
    [
        ("BL_xE, (EHD, EKD_xy, E_yKD) -> (BLHD, BLKD, BLKD)", {"x": 2, "y": 2}),
        ("G_yLE, E_xyX -> G_yLX", {"x": 4, "y": 2}),
    ],
)
def test_a_gradient_shares_the_permutes_of_nested_rings(equation, mesh, lowering):
    """Forward and backward of one layer send the same chunks round, which are placed by the same indices.

    JAX computes indices once for both, in a half of the shard_map of its own that hands them on as vectors.
    """
    sizes = {"B": 4, "L": 4, "E": 16, "H": 4, "D": 4, "K": 4, "G": 4, "X": 8}
    case = Case(equation, tuple(sizes.items()), tuple(mesh.items()), "explicit", lowering)
    check(case, "scanned once", gradients=True)
