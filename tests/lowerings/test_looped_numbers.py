"""The looped collective einsum beside blocking: dtypes, vmap, sixteen devices, and what a program sends in all."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st

import gspmd
from gspmd.annotate import parse_equation
from gspmd.planner.overlap import SCHEDULES
from tests.references.random_equations import Case, cases

pytestmark = pytest.mark.usefixtures("every_schedule")

LOOPED = [f"looped:{schedule}" for schedule in SCHEDULES]
GATHER, SCATTER = ("BE_x, EF_x -> BF_x", "BE, EF_x"), ("BF_x, F_xE -> B_xE", None)
SIZES = {"B": 8, "E": 8, "F": 8}


def operands(equation: str, sizes, dtype, *, spread: int = 3) -> list[jax.Array]:
    """Small whole numbers, placed on the mesh; products and sums of them are exact in every dtype."""
    draw = np.random.default_rng(0)
    specs = [spec for operand in parse_equation(equation).operands for spec in operand.specs]
    arrays = [draw.integers(-spread, spread + 1, [sizes[dim] for dim in spec.dims]) for spec in specs]
    return [gspmd.annotate(jnp.asarray(array, dtype), spec) for array, spec in zip(arrays, specs)]


@pytest.mark.turns(9)
@pytest.mark.parametrize("lowering", LOOPED)
@pytest.mark.parametrize(("equation", "via"), [GATHER, SCATTER], ids=["gather", "scatter"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_whole_numbers_are_exact_in_every_dtype(make_mesh, dtype, equation, via, lowering):
    with jax.set_mesh(make_mesh({"x": 4})):
        arrays = operands(equation, SIZES, dtype)
        found = jax.jit(lambda *xs: gspmd.einsum(equation, *xs, lowering=lowering, via=via))(*arrays)
        wanted = jax.jit(lambda *xs: gspmd.einsum(equation, *xs, lowering="blocking", via=via))(*arrays)
    assert found.dtype == wanted.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(found.astype(jnp.float32), wanted.astype(jnp.float32))


@pytest.mark.parametrize("lowering", LOOPED)
def test_a_travelling_sum_crosses_in_the_dtype_that_was_asked_for(make_mesh, lowering):
    """Products in float32, the wire in bfloat16: whole numbers cross unharmed, thirds are rounded."""
    equation, via = SCATTER
    with jax.set_mesh(make_mesh({"x": 4})):
        arrays = operands(equation, SIZES, "float32")
        program = jax.jit(lambda *xs: gspmd.einsum(equation, *xs, lowering=lowering, via=via, wire_dtype="bfloat16"))
        exact = jax.jit(lambda *xs: gspmd.einsum(equation, *xs, lowering="blocking", via=via))
        np.testing.assert_array_equal(program(*arrays), exact(*arrays))
        thirds = [array / 3 for array in arrays]
        np.testing.assert_allclose(program(*thirds), exact(*thirds), rtol=0.02, atol=0.02)
        assert np.any(np.asarray(program(*thirds)) != np.asarray(exact(*thirds)))


@pytest.mark.parametrize("lowering", LOOPED)
def test_under_vmap(make_mesh, lowering):
    equation, via = GATHER
    with jax.set_mesh(make_mesh({"x": 3})):
        sizes = {"B": 2, "E": 6, "F": 6}
        x, w = operands(equation, sizes, "float32")
        several = jnp.stack([x, 2 * x, x + 1])

        def objective(w, lowering):
            layer = lambda x: gspmd.einsum(equation, x, w, lowering=lowering, via=via)  # noqa: E731
            return jnp.sum(jax.vmap(layer)(several) ** 2)

        both = [jax.jit(jax.value_and_grad(lambda w, n=name: objective(w, n)))(w) for name in (lowering, "blocking")]
    jax.tree.map(np.testing.assert_array_equal, *both)


_DRAWN = {"deadline": None, "derandomize": True, "database": None, "phases": [Phase.generate]}
_SENT = given(case=cases(), lowering=st.sampled_from(LOOPED))


@settings(max_examples=15, suppress_health_check=list(HealthCheck), **_DRAWN)
@_SENT
def test_what_is_planned_is_what_is_sent(case, lowering):
    check_sent(case, lowering)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=list(HealthCheck), **_DRAWN)
@_SENT
def test_what_is_planned_is_always_what_is_sent(case, lowering):
    check_sent(case, lowering)


def check_sent(case: Case, lowering: str) -> None:
    """The compiled program of a random equation has the plan's bytes by kind and axes, forward."""
    sizes, shape = dict(case.sizes), dict(case.mesh)
    kind = getattr(jax.sharding.AxisType, case.axis_type.capitalize())
    count = int(np.prod(list(shape.values())))
    mesh = jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=(kind,) * len(shape), devices=jax.devices()[:count]
    )
    equation = parse_equation(case.equation)
    specs = [spec for operand in equation.operands for spec in operand.specs]
    assume(not any(spec.partial for spec in (*specs, *equation.outputs)))  # they are made inside a program
    with jax.set_mesh(mesh):
        arrays = operands(case.equation, sizes, "float32")

        def program(*arrays):
            some = iter(arrays)
            given = [
                next(some) if len(operand.specs) == 1 else tuple(next(some) for _ in operand.specs)
                for operand in equation.operands
            ]
            return gspmd.einsum(case.equation, *given, lowering=lowering, via=case.via)

        planned = gspmd.trace(program, *arrays)
        event(
            "sends by permutes" if any(kind == "collective-permute" for kind, _ in planned.by_kind_and_axes()) else ""
        )
        ledger = gspmd.ledger(jax.jit(program).lower(*arrays).compile(), mesh)
    comparison = ledger.compare(planned)
    assert comparison.agrees, str(comparison)


SIXTEEN = """
    from gspmd import host
    host.use_host_devices(16)
    import jax
    jax.config.update("jax_platforms", "cpu")
    from tests.references.random_equations import Case, check
    from tests.references.schedules import every_schedule
    mesh = (("x", 4), ("y", 2), ("z", 2))
    for equation, via in [
        ("BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)", None),
        ("BLF_yzx, F_yzE_x -> BLE_xyz", None),
        ("B_xyzE, E_xF_yz -> B_xyzF", "B_xyzE, EF"),
        ("BE_xyz, EF_xyz -> BF_xyz", "BE, EF_xyz"),
    ]:
        sizes = tuple((dim, 16) for dim in dict.fromkeys(c for c in equation if c.isupper()))
        for lowering in ("looped:one-way", "looped:halves", "looped:paired"):
            with every_schedule():
                check(Case(equation, sizes, mesh, "explicit", lowering, via))
    print("as blocking")
"""


@pytest.mark.slow
def test_on_sixteen_devices_of_an_uneven_mesh():
    """A walk that is right on 2x2x2 alone is a published mistake; 4x2x2 needs more devices than this process has."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SIXTEEN)], capture_output=True, text=True)
    assert done.stdout.strip().endswith("as blocking"), done.stderr[-2000:]
