"""RMS norm against plain code, its collectives counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops import layer_norm, rms_norm, softmax

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6, 24)).astype(np.float32)
SCALE = RNG.normal(size=24).astype(np.float32)

CASES = {
    "sharded rows": (
        {"x": 2, "y": 2, "z": 2}, "B_xLE_yz", "E_yz",
        {("all-reduce", ("y", "z")): 2, ("all-reduce", ("x",)): 1},
    ),
    "scale replicated": (
        {"x": 4, "y": 2}, "B_yLE_x", "E",
        # the scale's gradient: scattered and gathered over both rings sooner than summed over one and gathered over one
        {("all-reduce", ("x",)): 2, ("reduce-scatter", ("y",)): 1, ("all-gather", ("x", "y")): 1},
    ),
    "scale sharded finer": (
        {"x": 4, "y": 2}, "B_xLE_y", "E_yx",
        {("all-reduce", ("y",)): 2, ("all-gather", ("x",)): 1, ("reduce-scatter", ("x",)): 1},
    ),
    "an axis of one": (
        {"x": 3, "y": 2, "z": 1}, "BL_yE_xz", "E_x",
        {("all-reduce", ("x",)): 2, ("all-reduce", ("y",)): 1},
    ),
    "whole rows": ({"x": 4}, "B_xLE", "E", {("all-reduce", ("x",)): 1}),
}  # fmt: skip


def plain(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale[None, None]


@pytest.mark.parametrize("case", CASES)
def test_value_gradients_and_collectives(case, axis_type, check_form):
    mesh, spec, scale_spec, expected = CASES[case]
    planned = check_form(
        lambda x, scale: rms_norm(x, scale, spec, scale_spec), plain, (X, SCALE), (spec, scale_spec), spec,
        mesh=mesh, axis_type=axis_type, wrt=(0, 1),
    )  # fmt: skip
    assert planned == expected


def test_compiler_chooses(axis_type, check_form):
    check_form(
        lambda x, scale: rms_norm(x, scale, "B_xLE_yz", "E_y"), plain, (X, SCALE), ("B_xLE_yz", "E_y"), "B_xLE_yz",
        mesh={"x": 2, "y": 2, "z": 2}, axis_type=axis_type, lowering="xla", wrt=(0, 1),
    )  # fmt: skip


def test_bfloat16_rows_have_a_float32_mean(make_mesh):
    x = (300.0 * X).astype(jnp.bfloat16)
    with jax.set_mesh(make_mesh({"x": 8}, "auto")):
        y = jax.jit(lambda x, scale: rms_norm(x, scale, "BLE_x", "E"))(x, SCALE.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    exact = plain(jnp.asarray(x, jnp.float32), jnp.asarray(SCALE.astype(jnp.bfloat16), jnp.float32))
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-8)


def test_epsilon(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})):
        y = rms_norm(jnp.ones((2, 1, 4)), jnp.ones(4), "BLE", "E", epsilon=3.0)
    np.testing.assert_allclose(y, 0.5)


def test_refuses_a_scale_of_another_dimension(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError) as error:
        rms_norm(jnp.ones((2, 1, 4)), jnp.ones(4), "BLE", "F")
    assert str(error.value).splitlines() == [
        "cannot normalize 'BLE' with a scale 'F'",
        "    F",
        "    ^",
        "  the scale must have the one dimension E, of size 4, but its shape is (4,).",
        "  Write it 'E'.",
    ]


def test_refuses_a_scale_without_dimensions(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError, match="must have the one dimension E"):
        rms_norm(jnp.ones((2, 4)), jnp.float32(1), "LE", "")


def test_refuses_a_partial_sum(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.PlanError) as error:
        rms_norm(jnp.ones((2, 1, 4)), jnp.ones(4), "BLE partialsum-x", "E")
    assert str(error.value).splitlines() == [
        "cannot normalize 'BLE partialsum-x' with a scale 'E'",
        "    BLE partialsum-x",
        "        ^^^^^^^^^^^^",
        "  this operation is not linear in its operand, so a partial sum cannot pass through it.",
        "  Sum it first: gspmd.reshard(x, 'BLE partialsum-x -> BLE').",
    ]


@pytest.mark.parametrize(
    "form",
    [
        lambda x: rms_norm(x, jnp.ones(4), "BE", "E"),
        lambda x: layer_norm(x, jnp.ones(4), None, "BE", "E"),
        lambda x: softmax(x, "BE", "E"),
    ],
)
def test_whole_numbers_are_refused_as_they_hold_no_such_result(form, make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError) as error:
        form(jnp.ones((2, 4), jnp.int8))
    assert str(error.value).endswith(": x is int8.\n  Cast x to a floating dtype: the result has the dtype of x.")
