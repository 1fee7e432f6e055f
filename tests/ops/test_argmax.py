"""The position of the largest number, ties to the lowest, wherever the row lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.lowerings.partitioner import may_abort
from gspmd.ops._argmax import argmax

# few different numbers, so that nearly every row has ties, most of them across shards
TIES = np.random.default_rng(0).integers(-2, 3, size=(4, 6, 24)).astype(np.float32)

CASES = [
    ({"x": 2, "y": 2, "z": 2}, "BLV_xyz", "V", ("x", "y", "z")),
    ({"x": 2, "y": 2, "z": 2}, "B_xLV_zy", "V", ("y", "z")),
    ({"x": 4, "y": 2}, "B_xLV_y", "B", ("x",)),
    ({"x": 3, "y": 2, "z": 1}, "B_yLV_xz", "V", ("x",)),
    ({"x": 4}, "B_xLV", "V", ()),
]


@pytest.mark.turns(5)
@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize(("mesh", "spec", "dim", "axes"), CASES)
def test_lowest_position_of_the_largest(mesh, spec, dim, axes, lowering, axis_type, check_form):
    at = gspmd.Spec.parse(spec).dims.index(dim)
    planned = check_form(
        lambda x: argmax(x, spec, dim), lambda x: jnp.argmax(x, axis=at), (TIES,), (spec,),
        str(gspmd.Spec.parse(spec).without(dim)), mesh=mesh, axis_type=axis_type, lowering=lowering, wrt=(),
    )  # fmt: skip
    plans = lowering == "blocking" or may_abort(mesh)
    assert planned == ({("all-reduce", axes): 2} if axes and plans else {})


def test_is_a_constant_to_gradients(make_mesh, place):
    mesh = make_mesh({"x": 4})
    with jax.set_mesh(mesh):
        loss = lambda x: jnp.sum(x**2) + jnp.sum(argmax(x, "BV_x", "V"))  # noqa: E731
        gradient = jax.jit(jax.grad(loss))(place(mesh, TIES[0], "BV_x"))
    np.testing.assert_allclose(gradient, 2.0 * TIES[0])


def test_bfloat16_and_infinities(make_mesh):
    x = jnp.array([[-jnp.inf] * 4, [0.0, 1.0, jnp.inf, jnp.inf]], jnp.bfloat16)
    with jax.set_mesh(make_mesh({"x": 4}, "auto")):
        ids = jax.jit(lambda x: argmax(x, "BV_x", "V"))(x)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, [0, 2])


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_and_nan_are_no_answer(make_mesh, dtype, lowering):
    """Whatever six tokens beside two that pad them are, the answer is one of the six."""
    inf, nan = np.inf, np.nan
    none = [-inf] * 5
    real = [[*none, -inf], [*none, -1e35], [nan] * 6, [nan, 1, 2, nan, 2, 0], [*none, nan], [0, nan, 1, 2, 3, inf]]
    x = jnp.array([[*row, -1e30, -1e30] for row in real], dtype)
    with jax.set_mesh(make_mesh({"x": 4}, "auto")), gspmd.lowering(lowering):
        ids = jax.jit(lambda x: argmax(x, "BV_x", "V"))(x)
    np.testing.assert_array_equal(ids, [0, 5, 0, 2, 0, 5])


def test_whole_numbers_are_compared_as_they_are(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})):
        assert argmax(gspmd.annotate(jnp.array([[-3, -2, -2, -9]]), "BV_x"), "BV_x", "V").tolist() == [1]


def test_refuses_to_choose_among_none(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError) as error:
        argmax(jnp.zeros((2, 0)), "BV", "V")
    assert str(error.value).endswith("V has size 0, so no position has the largest value.")
