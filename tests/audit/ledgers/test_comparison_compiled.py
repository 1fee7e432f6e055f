"""Plans beside compiled programs, on 8 host devices."""

import inspect
from importlib import util

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import gspmd
from gspmd.audit import Comparison, topology

MESH = {"x": 4, "y": 2}


def on(mesh, spec, shape, dtype="float32"):
    place = jax.NamedSharding(mesh, gspmd.Spec.parse(spec).partition_spec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def of_program(function, *abstract) -> Comparison:
    return gspmd.ledger(jax.jit(function).lower(*abstract).compile()).compare(gspmd.trace(function, *abstract))


def _layer(x, w, v):
    h = gspmd.einsum("BE_x, EF_x -> BF_x", x, w, via="BE, EF_x")
    return gspmd.einsum("BF_x, F_xE -> BE_x", jnp.tanh(h), v, via="BF_x, F_xE")


def _gradient(x, w, v):
    return jax.grad(lambda *a: lax.scan(lambda c, _: (_layer(c, *a[1:]), None), a[0], None, length=3)[0].sum(), (0, 1))(
        x, w, v
    )


def test_a_training_step_is_compiled_as_planned(make_mesh):
    mesh = make_mesh(MESH)
    with jax.set_mesh(mesh):
        arrays = on(mesh, "BE_x", (8, 16)), on(mesh, "EF_x", (16, 32)), on(mesh, "F_xE", (32, 16))
        found = of_program(_gradient, *arrays)
    assert found.agrees
    assert {row.verdict for row in found.rows} == {"as planned"}
    assert {row.compiled[0] for row in found.rows} == {3}


def test_bf16_is_widened_on_this_machine(make_mesh):
    mesh = make_mesh(MESH)
    with jax.set_mesh(mesh):
        found = of_program(lambda x: gspmd.reshard(x, "BE_xy -> BE"), on(mesh, "BE_xy", (8, 16), "bfloat16"))
    (row,) = found.rows
    assert (row.verdict, row.how) == ("rewritten", "f32 on the wire")
    assert (row.planned, row.compiled) == ((1, 8 * 16 * 2 * 7 // 8), (1, 8 * 16 * 4 * 7 // 8))
    assert not found.agrees


@pytest.mark.parametrize("move", ["BE_xyz -> BE_zyx", "BE_xyz -> B_xyzE", "BE_xy -> BE_yx", "BE_xyz -> BE_y"])
def test_moves_are_compiled_as_planned(make_mesh, move):
    mesh = make_mesh({"x": 2, "y": 2, "z": 2})
    with jax.set_mesh(mesh):
        found = of_program(lambda x: gspmd.reshard(x, move), on(mesh, move.partition(" ")[0], (8, 16)))
    assert found.agrees
    assert found.rows
    assert {row.verdict for row in found.rows} == {"as planned"}


def test_a_collective_of_ones_own_is_not_planned(make_mesh):
    mesh = make_mesh(MESH)

    def own(x):
        x = gspmd.reshard(x, "B_yE_x -> B_yE")
        return jax.shard_map(lambda x: lax.psum(x, "y"), out_specs=jax.P())(x)

    with jax.set_mesh(mesh):
        found = of_program(own, on(mesh, "B_yE_x", (8, 16)))
    _, first = inspect.getsourcelines(own)
    (row,) = found["not planned"]
    assert row.source == f"{__file__}:{first + 2}"
    assert len(found["as planned"]) == 1
    assert not found.agrees


def test_under_xla_the_rest_is_the_compilers_choice(make_mesh):
    mesh = make_mesh(MESH)
    with jax.set_mesh(mesh), gspmd.lowering("xla"):
        arrays = on(mesh, "BE_x", (8, 16)), on(mesh, "EF_x", (16, 32)), on(mesh, "F_xE", (32, 16))
        found = of_program(_gradient, *arrays)
    assert found["the compiler's choice"]
    assert all(row.equation for row in found["the compiler's choice"])
    assert found["not planned"] == ()


def test_a_scope_of_ones_own_is_no_step(make_mesh):
    mesh = make_mesh(MESH)

    @jax.named_scope("step1.attn")
    def own(x):
        return lax.psum(x, "y")

    with jax.set_mesh(mesh):
        found = of_program(lambda x: jax.shard_map(own, out_specs=jax.P(None, "x"))(x), on(mesh, "B_yE_x", (8, 16)))
    (row,) = found.rows
    assert (row.verdict, row.equation, row.step) == ("not planned", "", "")


def test_one_gather_for_two_equations(make_mesh):
    mesh = make_mesh(MESH)
    whole = lambda x, w: gspmd.einsum("BE_x, EF_y -> BF_y", x, w, via="BE, EF_y")  # noqa: E731
    with jax.set_mesh(mesh):
        arrays = on(mesh, "BE_x", (8, 16)), on(mesh, "EF_y", (16, 32))
        found = of_program(lambda x, w: (gspmd.reshard(x, "BE_x -> BE"), whole(x, w)), *arrays)
        other = of_program(lambda x, w: (gspmd.reshard(x, "BE_x -> BE"), whole(x + 1, w)), *arrays)
    assert found.agrees
    assert [(row.verdict, row.how) for row in found.rows] == [
        ("as planned", ""),
        ("shared", "with step 0 of BE_x -> BE"),
    ]
    assert [row.verdict for row in other.rows] == ["as planned", "as planned"]


def test_a_while_loop_is_told_of(make_mesh):
    mesh = make_mesh(MESH)

    def ten_times(x):
        around = lambda x: gspmd.reshard(gspmd.reshard(x, "BE_x -> BE") * 2, "BE -> BE_x")  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 1, around(c[1])), (0, x))[1]

    with jax.set_mesh(mesh):
        found = of_program(ten_times, on(mesh, "BE_x", (8, 16)))
    (row,) = found.rows
    assert (row.verdict, row.how, row.planned[0], row.compiled[0]) == ("rewritten", "sent more often", 1, 10)
    assert found.notes[0].startswith("a while loop counts as one trip")


def _with_mean(x, w, v):
    h = gspmd.einsum("BE_x, EF_y -> BF_y", x, w, via="BE_x, E_xF_y")
    return jnp.mean(gspmd.einsum("BF_y, F_yE_x -> BE_x", jnp.sin(h), v))


@pytest.mark.parametrize(
    "platform",
    [
        "cpu",
        pytest.param(
            "tpu", marks=pytest.mark.skipif(util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
        ),
    ],
)
def test_collectives_that_a_compiler_merges_are_divided_among_who_asked(make_mesh, platform):
    """A mean's 4 bytes travel in the all-reduce of planned steps: those are as planned, and the mean has its line."""
    mesh = topology("tpu-v4:2x2x2").mesh(MESH) if platform == "tpu" else make_mesh(MESH)
    arrays = on(mesh, "BE_x", (8, 128)), on(mesh, "EF_y", (128, 128)), on(mesh, "F_yE_x", (128, 128))
    program = jax.value_and_grad(_with_mean, (0, 1, 2))
    with jax.set_mesh(mesh):
        plan, ledger = gspmd.trace(program, *arrays), gspmd.ledger(jax.jit(program).lower(*arrays).compile())
    found = ledger.compare(plan)
    merged = [entry for entry in ledger.entries if entry.together > 1]
    assert merged
    assert all(entry.arrays < entry.together for entry in merged)
    assert {row.verdict for row in found.rows} <= {"as planned", "shared", "not planned"}
    assert [row.compiled[1] for row in found["not planned"]] == [6]  # 3/4 of 4 bytes, twice
    line = inspect.getsourcelines(_with_mean)[1] + 2
    assert {row.source for row in found["not planned"]} == {f"{__file__}:{line}"}
    planned = [row for row in found["as planned"] if row.planned[1]]
    assert [row.planned[1] for row in planned] == [row.compiled[1] for row in planned]
    assert any(row.how == "in one collective with others" for row in planned)


def test_a_result_that_its_user_slices_is_one_step(make_mesh):
    mesh = make_mesh(MESH)

    def halves(x, w):
        y = gspmd.einsum("E_x, E_xF -> F", x, w, lowering="blocking")
        first = y[:4] * 2
        return first, y[4:] + 1

    with jax.set_mesh(mesh):
        found = of_program(halves, on(mesh, "E_x", (16,)), on(mesh, "E_xF", (16, 8)))
    assert [(row.verdict, row.how) for row in found.rows] == [("as planned", "")]


@pytest.mark.parametrize("lowering", ["blocking", "looped"])
def test_the_plan_of_one_equation_will_do(make_mesh, lowering):
    mesh, equation = make_mesh(MESH), "BE_x, EF_y -> BF_y"
    program = lambda x, w: gspmd.einsum(equation, x, w, lowering=lowering)  # noqa: E731
    plan = gspmd.plan(equation, {"B": 8, "E": 16, "F": 32}, MESH, dtype="float32", lowering=lowering)
    with jax.set_mesh(mesh):
        arrays = on(mesh, "BE_x", (8, 16)), on(mesh, "EF_y", (16, 32))
        ledger = gspmd.ledger(jax.jit(program).lower(*arrays).compile())
    found = ledger.compare(plan)
    assert found.agrees
    assert found.rows
    assert {row.verdict for row in found.rows} == {"as planned"}
