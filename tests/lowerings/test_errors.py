"""Bad calls of einsum and reshard: one error each, whose wording is pinned."""

import jax
import jax.numpy as jnp
import numpy as np
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
    message = (
        "cannot plan this call: there is no mesh.\n"
        "  Call inside `with jax.set_mesh(mesh):`, with a mesh from jax.make_mesh."
    )
    assert _raised(PlanError, lambda: gspmd.einsum("BE, EF -> BF", *arrays)) == message
    assert _raised(PlanError, lambda: gspmd.reshard(arrays[0], "BE -> B_xE")) == message


def test_inside_another_shard_map(make_mesh, axis_type, arrays):
    with jax.set_mesh(make_mesh(MESH, axis_type)):
        inside = jax.shard_map(
            lambda x: gspmd.einsum("BE, BE -> BE", x, x), in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False
        )
        x = gspmd.annotate(arrays[0], "B_xE")
        assert _raised(PlanError, lambda: inside(x)) == (
            "cannot plan inside another shard_map: its mesh axes are already manual, so arrays there are shards.\n"
            "  Call gspmd outside of the shard_map, or use jax.lax collectives inside it."
        )


def test_axes_of_both_types(arrays):
    types = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"), axis_types=types)):
        message = _raised(PlanError, lambda: gspmd.einsum("BE, EF -> BF", *arrays))
    assert message == (
        "cannot plan this call: the mesh mixes Explicit and Auto axes.\n"
        "  Make the mesh with axes of one type: axis_types=(jax.sharding.AxisType.Explicit,) * number of axes."
    )


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_wrong_type_names_both_specs(make_mesh, arrays, lowering, jit):
    with jax.set_mesh(make_mesh(MESH)):
        x, w = gspmd.annotate(arrays[0], "B_xE"), gspmd.annotate(arrays[1], "EF_y")
        call = lambda x, w: gspmd.einsum("BE_x, EF_y -> BF_y", x, w, lowering=lowering)  # noqa: E731
        message = _raised(SpecError, lambda: (jax.jit(call) if jit else call)(x, w))
    assert message == (
        "cannot use operand 1 of 'BE_x, EF_y -> BF_y' as 'BE_x'\n    BE_x\n    ^^^^\n"
        "  the spec says 'BE_x', but the type of the array says 'B_xE'.\n"
        "  Move it with gspmd.reshard(operand_1, 'B_xE -> BE_x')."
    )


def test_a_sum_that_is_not_owed(make_mesh, arrays):
    with jax.set_mesh(make_mesh(MESH)):
        message = _raised(SpecError, lambda: gspmd.reshard(arrays[0], "BE partialsum-x -> BE"))
    assert "the spec says 'BE partialsum-x', but the type of the array says 'BE'." in message


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("equation", ["BE_x, E_xF -> BF partialsum-x", "BE partialsum-x, E_xF -> BF"])
def test_partial_sums_under_auto_axes(make_mesh, arrays, lowering, equation):
    owed = next(spec for spec in equation.replace(" ->", ",").split(", ") if "partial" in spec)
    with jax.set_mesh(make_mesh(MESH, "auto")):
        message = _raised(PlanError, lambda: gspmd.einsum(equation, *arrays, lowering=lowering))
    assert message == (
        f"a partial sum, '{owed}', cannot enter or leave an equation under Auto mesh axes.\n"
        "  Use Explicit axes (the default of jax.make_mesh), or reduce it inside the equation."
    )


def test_open_dimensions_exist_under_auto_axes_and_xla_only(make_mesh, arrays):
    equation = "BE_x, E_xF -> BF_?"
    with jax.set_mesh(make_mesh(MESH, "auto")):
        result = jax.jit(lambda x, w: gspmd.einsum(equation, x, w, lowering="xla"))(*arrays)
        planned = _raised(PlanError, lambda: gspmd.einsum(equation, *arrays))
    assert result.shape == (8, 32)
    assert float(result[0, 0]) == 16
    assert planned == (
        f"cannot plan '{equation}': 'BF_?' leaves a dimension open, so the compiler chooses what is sent.\n"
        "  Name the mesh axes of that dimension, or run the equation with lowering='xla' under Auto axes."
    )


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("equation", ["BE, EF -> BF_?", "B_?E, EF -> BF"])
def test_open_dimensions_under_explicit_axes(make_mesh, arrays, lowering, equation):
    with jax.set_mesh(make_mesh(MESH)):
        message = _raised(PlanError, lambda: gspmd.einsum(equation, *arrays, lowering=lowering))
    assert message.endswith(
        "leaves a dimension to the compiler, but under Explicit mesh axes an array's type has its sharding.\n"
        "  Name its mesh axes, or make the mesh with Auto axes and run it with lowering='xla'."
    )


CALLS = [
    (
        lambda x, w: gspmd.reshard(x, "BE, EF -> BF"),
        "cannot reshard by 'BE, EF -> BF', which has several operands.\n"
        "  Use gspmd.einsum, or a move such as 'BE_x -> B_xE'.",
    ),
    (lambda x, w: gspmd.einsum("BE, EF -> BF", x), "cannot apply 'BE, EF -> BF' to 1 operand\n  Pass an array and"),
    (
        lambda x, w: gspmd.einsum("BE, (EF, EF) -> (BF, BF)", x, w, w),
        "cannot apply 'BE, (EF, EF) -> (BF, BF)' to 3 operands\n  Pass an array and a tuple of 2 arrays.",
    ),
    (
        lambda x, w: gspmd.einsum("BE, EF -> BF", x, x),
        "cannot apply 'BE, EF -> BF' to arrays of shapes (8, 16), (8, 16)\n    BE, EF -> BF\n        ^^\n"
        "  dimension E has size 8 here, and size 16 before.\n  Arrays that share a dimension must agree on its size.",
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


NO_NUMBERS = "  It has no values: pass it through jax.eval_shape, jax.jit(...).lower or gspmd.trace."
NO_ARRAY = "  Pass a jax.Array, a numpy array of numbers, or a number."
TYPES = [
    (jax.ShapeDtypeStruct((8, 16), "float32"), "a ShapeDtypeStruct of float32.\n" + NO_NUMBERS),
    (None, "a NoneType.\n" + NO_ARRAY),
    ("x", "a str.\n" + NO_ARRAY),
    ([[1.0, 2.0]], "a list.\n" + NO_ARRAY),
    ((1.0,), "a tuple.\n" + NO_ARRAY),
    (np.array([[None]]), "an array of object.\n" + NO_ARRAY),
    (np.array([["a"]]), "an array of <U1.\n" + NO_ARRAY),
    (2**70, "an int.\n  No dtype of JAX's holds 1180591620717411303424: pass a floating number."),
]


@pytest.mark.parametrize(("given", "fact"), TYPES, ids=lambda value: type(value).__name__)
def test_what_is_no_array(make_mesh, arrays, given, fact):
    with jax.set_mesh(make_mesh(MESH)):
        message = _raised(SpecError, lambda: gspmd.einsum("BE, EF -> BF", given, arrays[1]))
        member = _raised(SpecError, lambda: gspmd.einsum("EF, (BE, BE) -> (BF, BF)", arrays[1], (arrays[0], given)))
        moved = _raised(SpecError, lambda: gspmd.reshard(given, "BE -> B_xE"))
    assert message == f"cannot apply 'BE, EF -> BF': operand 1 is {fact}"
    assert member == f"cannot apply 'EF, (BE, BE) -> (BF, BF)': operand 3 is {fact}"
    assert moved == f"cannot apply 'BE -> B_xE': operand 1 is {fact}"


def test_random_keys_are_no_numbers(make_mesh):
    with jax.set_mesh(make_mesh(MESH)):
        keys = jax.random.split(jax.random.key(0), 8)
        message = _raised(SpecError, lambda: gspmd.einsum("B, B -> B", keys, jnp.ones(8)))
    assert message == f"cannot apply 'B, B -> B': operand 1 is an array of key<fry>.\n{NO_ARRAY}"


GROUPS = [
    (lambda w: jnp.stack([w, w]), "an array of float32", 2),
    (lambda w: (w,), "a tuple of 1", 2),
    (lambda w: [w, w, w], "a list of 3", 2),
]


@pytest.mark.parametrize(("given", "held", "count"), GROUPS)
def test_what_is_no_group(make_mesh, arrays, given, held, count):
    x, w = arrays
    group = "BE, (EF, EF) -> (BF, BF)"
    with jax.set_mesh(make_mesh(MESH)):
        message = _raised(SpecError, lambda: gspmd.einsum(group, x, given(w)))
        listed = gspmd.einsum(group, x, [w, w])
    assert message == (
        f"cannot apply '{group}': '(EF, EF)' is a group, but the operand is {held}.\n  Pass a tuple of {count} arrays."
    )
    assert [y.shape for y in listed] == [(8, 32), (8, 32)]


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("jit", [False, True])
def test_an_array_on_another_mesh(make_mesh, arrays, lowering, jit):
    with jax.set_mesh(make_mesh({"a": 2, "b": 4})):
        x = gspmd.annotate(arrays[0], "BE_ab")
    with jax.set_mesh(make_mesh(MESH)):
        move = lambda x: gspmd.reshard(x, "BE_xy -> BE", lowering=lowering)  # noqa: E731
        message = _raised(SpecError, lambda: (jax.jit(move) if jit else move)(x))
        moved = move(gspmd.annotate(x, "BE_xy"))  # as the remedy says
    assert message == (
        "cannot use operand 1 of 'BE_xy -> BE' as 'BE_xy'\n    BE_xy\n    ^^^^^\n"
        "  the array is on a different mesh, of a (2) and b (4), and the mesh in force has x (4) and y (2).\n"
        "  Move it outside of jit first: gspmd.annotate(x, 'BE_xy'), or jax.device_put."
    )
    assert moved.shape == (8, 16)


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("named", ["8 devices (7, 6, 5, 4, 3, 2, 1, 0)", "device 3"])
def test_an_array_on_other_devices(make_mesh, arrays, axis_type, lowering, named):
    if named == "device 3":
        x = jax.device_put(arrays[0], jax.devices()[3])
    else:
        types = (getattr(jax.sharding.AxisType, axis_type.capitalize()),) * 2
        with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"), axis_types=types, devices=jax.devices()[::-1])):
            x = gspmd.annotate(arrays[0], "BE_xy")
    with jax.set_mesh(make_mesh(MESH, axis_type)):
        message = _raised(SpecError, lambda: gspmd.reshard(x, "BE_xy -> BE", lowering=lowering))
    assert f"the array is on {named}, and the mesh in force has 8 devices (0, 1, 2, 3, 4, 5, 6, 7).\n" in message
    assert message.endswith("outside of jit first: gspmd.annotate(x, 'BE_xy'), or jax.device_put.")


def test_an_unknown_lowering(make_mesh, arrays):
    with jax.set_mesh(make_mesh(MESH)):
        message = _raised(PlanError, lambda: gspmd.einsum("BE, EF -> BF", *arrays, lowering="block"))
    assert message.startswith("no lowering is called 'block'.\n")
    assert _raised(PlanError, lambda: gspmd.lowering("loop")).startswith("no lowering is called 'loop'.\n")
