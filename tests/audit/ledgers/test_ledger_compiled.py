"""The ledger of what this jax compiles on 8 host devices."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import gspmd
from gspmd.audit.hlo import HloError

MESH = {"x": 4, "y": 2}


@pytest.fixture
def mesh(make_mesh):
    return make_mesh(MESH, "auto")


def on(mesh, shape, *spec, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec)))


def plain(mesh):
    """A program with a collective that no plan asked for, and its line."""

    def summed(x):
        return lax.psum(x, "y")

    return jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=jax.P("y"), out_specs=jax.P())), summed


def line_of(function, text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(n for n, line in enumerate(lines) if text in line)}"


def test_a_collective_that_no_plan_asked_for_has_its_line(mesh):
    program, summed = plain(mesh)
    found = gspmd.ledger(program.lower(on(mesh, (64,), "y")).compile())
    (entry,) = found.entries
    assert (entry.kind, entry.axes, entry.count, entry.wire_bytes) == ("all-reduce", ("y",), 1, 2 * 128 // 2)
    assert (entry.equation, entry.step) == ("", "")
    assert entry.source == line_of(summed, "lax.psum")


def test_a_planned_one_has_its_equation_its_step_and_its_line(make_mesh):
    mesh = make_mesh({"data": 4, "model": 2})

    def layer(x, w):
        return gspmd.einsum("B_{data}E_{model}, E_{model}F -> B_{data}F", x, w)

    with jax.set_mesh(mesh):
        x, w = on(mesh, (16, 32), "data", "model"), on(mesh, (32, 8), "model")
        compiled = jax.jit(lambda x, w: lax.scan(lambda c, _: (2 * c, layer(c, w)), x, None, length=3)[1]).lower(x, w)
        found = gspmd.ledger(compiled.compile())
    (entry,) = found.entries
    assert (entry.kind, entry.axes, entry.count) == ("all-reduce", ("model",), 3)
    assert entry.wire_bytes == 3 * 2 * (4 * 8 * 4) // 2
    assert entry.equation == "B_{data}E_{model}, E_{model}F -> B_{data}F"
    assert entry.step == "step1.all-reduce.model"
    assert entry.source == line_of(layer, "gspmd.einsum")
    assert found.flops == 3 * 2 * 4 * 16 * 8


def test_it_is_readable(make_mesh):
    mesh = make_mesh({"data": 4, "model": 2})
    with jax.set_mesh(mesh):
        x, w = on(mesh, (16, 32), "data", "model"), on(mesh, (32, 8), "model")
        layer = jax.jit(lambda x, w: gspmd.einsum("B_{data}E_{model}, E_{model}F -> B_{data}F", x, w))
        text = str(gspmd.ledger(layer.lower(x, w).compile()))
    assert max(map(len, text.splitlines())) <= 140
    (row,) = [line for line in text.splitlines() if "all-reduce" in line]
    for part in ("│ model ", "│ f32 ", "128 B", "B_{data}E_{model}, E_{model}F -> B_{data}F step 1", "_compiled.py:"):
        assert part in row


def test_bf16_crosses_the_wire_of_this_machine_as_f32(mesh):
    program, _ = plain(mesh)
    (entry,) = gspmd.ledger(program.lower(on(mesh, (64,), "y", dtype="bfloat16")).compile()).entries
    assert (entry.dtype, entry.wire_bytes) == ("f32", 2 * 128 // 2)


def test_the_mesh_is_that_of_the_inputs_or_given_or_in_force(mesh, make_mesh):
    program, _ = plain(mesh)
    compiled = program.lower(on(mesh, (64,), "y")).compile()
    want = gspmd.ledger(compiled)
    assert dict(want.mesh) == MESH
    assert gspmd.ledger(compiled, MESH) == gspmd.ledger(compiled, mesh) == want
    assert gspmd.ledger(compiled, mesh.abstract_mesh) == want
    with jax.set_mesh(make_mesh({"a": 2, "b": 4})):
        assert gspmd.ledger(compiled) == want  # its own comes first
    with jax.set_mesh(mesh):
        assert gspmd.ledger(compiled.as_text()) == want
    other = gspmd.ledger(compiled, {"a": 2, "b": 2, "c": 2})
    assert [entry.axes for entry in other.entries] == [("c",)]


def test_the_mesh_is_that_of_the_outputs_where_nothing_goes_in(mesh):
    made = jax.jit(lambda: jnp.zeros((8, 4)), out_shardings=jax.NamedSharding(mesh, jax.P("x")))
    assert dict(gspmd.ledger(made.lower().compile()).mesh) == MESH


def test_without_a_mesh(mesh):
    program, _ = plain(mesh)
    text = program.lower(on(mesh, (64,), "y")).compile().as_text()
    alone = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), "float32")).compile()
    for compiled in (text, alone):
        with pytest.raises(gspmd.PlanError) as error:
            gspmd.ledger(compiled)
        assert str(error.value) == (
            "cannot name the mesh axes of this program: none of its inputs and outputs is on a mesh.\n"
            "  Give mesh=, or call inside `with jax.set_mesh(mesh):`."
        )


def test_a_mesh_of_another_number_of_devices(mesh):
    program, _ = plain(mesh)
    compiled = program.lower(on(mesh, (64,), "y")).compile()
    with pytest.raises(gspmd.PlanError) as error:
        gspmd.ledger(compiled, {"x": 4, "y": 4})
    assert str(error.value) == (
        "cannot name the mesh axes of jit_summed: 8 devices run it, and the mesh x=4,y=4 has 16.\n"
        "  Give mesh=, the mesh that it was compiled for."
    )


def test_a_text_that_is_no_program(mesh):
    program, _ = plain(mesh)
    for text in ("", program.lower(on(mesh, (64,), "y")).as_text()):
        with pytest.raises(HloError, match=r"Give compiled\.as_text\(\)"):
            gspmd.ledger(text, MESH)
    with pytest.raises(HloError):
        gspmd.ledger(program.lower(on(mesh, (64,), "y")), MESH)  # lowered, and not compiled
