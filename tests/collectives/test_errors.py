"""Bad calls of einsum and reshard: one error each, whose wording is pinned."""

import jax
import jax.numpy as jnp
import pytest

import gspmd
from gspmd import PlanError, SpecError

MESH = {"x": 4, "y": 2}


@pytest.fixture
def arrays():
    return jnp.ones((8, 16)), jnp.ones((16, 32))


def _raised(kind, call) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def test_no_mesh(arrays):
    message = "there is no mesh.\n  Call inside `with jax.set_mesh(mesh):`, with a mesh from jax.make_mesh."
    assert _raised(PlanError, lambda: gspmd.einsum("BE, EF -> BF", *arrays)) == message
    assert _raised(PlanError, lambda: gspmd.reshard(arrays[0], "BE -> B_xE")) == message


def test_inside_another_shard_map(make_mesh, axis_type, arrays):
    with jax.set_mesh(make_mesh(MESH, axis_type)):
        inside = jax.shard_map(
            lambda x: gspmd.einsum("BE, BE -> BE", x, x), in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False
        )
        x = gspmd.annotate(arrays[0], "B_xE")
        assert _raised(PlanError, lambda: inside(x)) == (
            "cannot plan inside another shard_map: its mesh axes are already manual, so arrays there are pieces.\n"
            "  Call gspmd outside of the shard_map, or use jax.lax collectives inside it."
        )


def test_axes_of_both_types(arrays):
    types = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"), axis_types=types)):
        message = _raised(PlanError, lambda: gspmd.einsum("BE, EF -> BF", *arrays))
    assert message == "the mesh mixes Explicit and Auto axes.\n  Make it with axes of one type."


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_wrong_type_names_both_specs(make_mesh, arrays, lowering, jit):
    with jax.set_mesh(make_mesh(MESH)):
        x, w = gspmd.annotate(arrays[0], "B_xE"), gspmd.annotate(arrays[1], "EF_y")
        call = lambda x, w: gspmd.einsum("BE_x, EF_y -> BF_y", x, w, lowering=lowering)  # noqa: E731
        message = _raised(SpecError, lambda: (jax.jit(call) if jit else call)(x, w))
    assert message == (
        "cannot use operand 1 of 'BE_x, EF_y -> BF_y' as 'BE_x'\n    BE_x\n    ^^^^\n"
        "  the spec says 'BE_x', and the array is 'B_xE' by its type.\n"
        "  Bring it there by gspmd.reshard(x, 'B_xE -> BE_x')."
    )


def test_a_sum_that_is_not_owed(make_mesh, arrays):
    with jax.set_mesh(make_mesh(MESH)):
        message = _raised(SpecError, lambda: gspmd.reshard(arrays[0], "BE partialsum-x -> BE"))
    assert "the spec says 'BE partialsum-x', and the array is 'BE' by its type." in message


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("equation", ["BE_x, E_xF -> BF partialsum-x", "BE partialsum-x, E_xF -> BF"])
def test_partial_sums_under_auto_axes(make_mesh, arrays, lowering, equation):
    owed = next(spec for spec in equation.replace(" ->", ",").split(", ") if "partial" in spec)
    with jax.set_mesh(make_mesh(MESH, "auto")):
        message = _raised(PlanError, lambda: gspmd.einsum(equation, *arrays, lowering=lowering))
    assert message == (
        f"a partial sum, '{owed}', cannot enter or leave an equation under Auto mesh axes.\n"
        "  Use Explicit axes (the default of jax.make_mesh), or settle it inside the equation."
    )


def test_open_dimensions_exist_under_auto_axes_and_xla_only(make_mesh, arrays):
    equation = "BE_x, E_xF -> BF_?"
    with jax.set_mesh(make_mesh(MESH, "auto")):
        result = jax.jit(lambda x, w: gspmd.einsum(equation, x, w, lowering="xla"))(*arrays)
        planned = _raised(PlanError, lambda: gspmd.einsum(equation, *arrays))
    assert result.shape == (8, 32)
    assert float(result[0, 0]) == 16
    assert planned == (
        f"cannot plan '{equation}': 'BF_?' leaves a dimension open; what it sends is the compiler's choice.\n"
        "  Name its mesh axes, or run it with lowering='xla' under Auto axes."
    )


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("equation", ["BE, EF -> BF_?", "B_?E, EF -> BF"])
def test_open_dimensions_under_explicit_axes(make_mesh, arrays, lowering, equation):
    with jax.set_mesh(make_mesh(MESH)):
        message = _raised(PlanError, lambda: gspmd.einsum(equation, *arrays, lowering=lowering))
    assert message.endswith(
        "leaves a dimension to the compiler; under Explicit mesh axes every placement is a type.\n"
        "  Name its mesh axes, or make the mesh with Auto axes and run it with lowering='xla'."
    )


CALLS = [
    (
        lambda x, w: gspmd.reshard(x, "BE, EF -> BF"),
        "cannot reshard by 'BE, EF -> BF', which has several operands.\n"
        "  Use gspmd.einsum, or a move such as 'BE_x -> B_xE'.",
    ),
    (lambda x, w: gspmd.einsum("BE, EF -> BF", x), "cannot apply 'BE, EF -> BF' to 1 operand\n  It takes an array and"),
    (
        lambda x, w: gspmd.einsum("BE, (EF, EF) -> (BF, BF)", x, w, w),
        "cannot apply 'BE, (EF, EF) -> (BF, BF)' to 3 operands\n  It takes an array and a tuple of 2 arrays.",
    ),
    (
        lambda x, w: gspmd.einsum("BE, EF -> BF", x, x),
        "cannot apply 'BE, EF -> BF' to arrays of shapes (8, 16), (8, 16)\n    BE, EF -> BF\n        ^^\n"
        "  dimension E has size 8 here, and size 16 before.\n  Arrays that share a dimension agree on its size.",
    ),
    (
        lambda x, w: gspmd.reshard(x[:6], "BE -> B_xE"),
        "cannot shard 'BE -> B_xE' for the sizes B=6, E=16\n    BE -> B_xE\n          ^^^\n"
        "  dimension B has size 6, which mesh axis x (size 4) does not divide.",
    ),
    (lambda x, w: gspmd.reshard(x, "BE -> B_zE"), "  the mesh has no axis z.\n  The mesh has x and y."),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_arrays_that_do_not_fit(make_mesh, arrays, call, message):
    with jax.set_mesh(make_mesh(MESH)):
        assert message in _raised(SpecError, lambda: call(*arrays))


def test_an_unknown_lowering(make_mesh, arrays):
    with jax.set_mesh(make_mesh(MESH)):
        message = _raised(PlanError, lambda: gspmd.einsum("BE, EF -> BF", *arrays, lowering="block"))
    assert message.startswith("no lowering is called 'block'.\n")
    assert _raised(PlanError, lambda: gspmd.lowering("loop")).startswith("no lowering is called 'loop'.\n")
