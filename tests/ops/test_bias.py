"""Biases against plain code, their collectives counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops import add_bias

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 2, 8, 6)).astype(np.float32)
HEADS, ROW = RNG.normal(size=(8, 6)).astype(np.float32), RNG.normal(size=6).astype(np.float32)
SLOTS = RNG.normal(size=(2, 6)).astype(np.float32)  # experts X, features F, of X as [G, X, C, F]

CASES = {
    "of heads": ({"x": 2, "y": 4}, "B_xLH_yD", "H_yD", HEADS, {("all-reduce", ("x",)): 1}),
    "brought to a sharded tensor": (
        {"x": 2, "y": 4}, "B_xLH_yD", "HD", HEADS, {("reduce-scatter", ("x",)): 1, ("all-gather", ("x", "y")): 1}
    ),
    "gathered": ({"x": 4, "y": 2}, "BLH_xD", "D_y", ROW, {("all-gather", ("y",)): 1, ("all-reduce", ("x",)): 1}),
    "nothing sent": ({"x": 4}, "BLHD", "D", ROW, {}),
    "of experts": (
        {"x": 2, "y": 2, "z": 2}, "G_xX_yCF_z", "X_yF", SLOTS, {("all-reduce", ("x",)): 1, ("all-gather", ("z",)): 1}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_value_gradients_and_collectives(case, axis_type, check_form):
    mesh, spec, bias_spec, bias, expected = CASES[case]
    planned = check_form(
        lambda x, bias: add_bias(x, bias, spec, bias_spec), plain, (X, bias), (spec, bias_spec), spec,
        mesh=mesh, axis_type=axis_type, wrt=(0, 1),
    )  # fmt: skip
    assert planned == expected


def plain(x, bias):
    return x + jnp.expand_dims(bias, (0, 2) if bias.shape == SLOTS.shape else range(x.ndim - bias.ndim))


def test_compiler_chooses(axis_type, check_form):
    check_form(
        lambda x, bias: add_bias(x, bias, "B_xLH_yD", "H_yD"), plain, (X, HEADS), ("B_xLH_yD", "H_yD"), "B_xLH_yD",
        mesh={"x": 2, "y": 4}, axis_type=axis_type, lowering="xla", wrt=(0, 1),
    )  # fmt: skip


def test_refuses_to_truncate_a_bias(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        with pytest.raises(gspmd.SpecError, match="x is int32, but the bias is float32"):
            add_bias(jnp.ones((2, 4), "int32"), jnp.full(4, 0.5), "BF", "F")
        np.testing.assert_array_equal(add_bias(jnp.ones((2, 4), "int32"), jnp.ones(4, "int32"), "BF", "F"), 2)


def test_refuses_a_bias_of_dimensions_in_another_order(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError) as error:
        add_bias(jnp.ones((2, 4)), jnp.ones((4, 2)), "BF", "FB")
    assert str(error.value).splitlines() == [
        "cannot add a bias 'FB' to 'BF'",
        "    FB",
        "    ^^",
        "  x is BF of shape (2, 4), and the bias FB of shape (4, 2).",
        "  The dimensions of a bias must be dimensions of x, in the order of x and with the sizes of x.",
    ]


def test_refuses_a_bias_of_a_dimension_that_x_lacks(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError, match="and the bias H of shape"):
        add_bias(jnp.ones((2, 4)), jnp.ones(4), "BF", "H")
