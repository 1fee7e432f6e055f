"""The norm of a tree of tensors, each counted once, with one all-reduce."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops._global_norm import global_norm

RNG = np.random.default_rng(0)
ARRAYS = tuple(RNG.normal(size=shape).astype(np.float32) for shape in ((12, 4), (12,), (2, 12, 4), (4,)))

CASES = [
    ({"x": 2, "y": 2, "z": 2}, ("E_xF_y", "E", "BE_xzF", "F_z"), ("x", "y", "z")),
    ({"x": 4, "y": 2}, ("E_yF_x", "E_x", "B_yEF_x", "F"), ("x", "y")),
    ({"x": 3, "y": 2, "z": 1}, ("E_xF", "E_yx", "BEF", "F_z"), ("x", "y")),
    ({"x": 2, "y": 4}, ("E_yF", "E", "BEF", "F_y"), ("y",)),
    ({"x": 2, "y": 4}, ("EF", "E", "BEF", "F"), ()),
]


def plain(*arrays):
    return jnp.sqrt(sum(jnp.sum(array**2) for array in arrays))


@pytest.mark.parametrize(("mesh", "specs", "axes"), CASES)
def test_value_gradients_and_collectives(mesh, specs, axes, axis_type, check_form):
    planned = check_form(
        lambda *a: global_norm(a, specs), plain, ARRAYS, specs, "", mesh=mesh, axis_type=axis_type, wrt=(0, 1, 2, 3)
    )
    assert planned == ({("all-reduce", axes): 1} if axes else {})


def test_compiler_chooses(axis_type, check_form):
    mesh, specs, _ = CASES[0]
    check_form(
        lambda *a: global_norm(a, specs), plain, ARRAYS, specs, "",
        mesh=mesh, axis_type=axis_type, lowering="xla", wrt=(0, 1, 2, 3),
    )  # fmt: skip


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_of_zeros_has_gradient_zero(make_mesh, lowering):
    with jax.set_mesh(make_mesh({"x": 2})), gspmd.lowering(lowering):
        norm, gradient = jax.value_and_grad(lambda x: global_norm([x], ["E"]))(jnp.zeros(4))
    assert norm == 0.0
    np.testing.assert_array_equal(gradient, 0.0)


def test_of_nothing_is_zero(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})):
        assert global_norm({}, {}) == 0.0


def test_trees_and_dtypes(make_mesh):
    tree = {"layer": [jnp.full((2, 8), 2.0, jnp.bfloat16)], "scale": jnp.full(4, 3.0)}
    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        norm = global_norm(tree, {"layer": [gspmd.Spec.parse("EF_x")], "scale": "E"})
    assert (norm, norm.dtype) == (10.0, jnp.float32)


def test_refuses_another_tree(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError) as error:
        global_norm({"w": jnp.ones(4)}, {"v": "E"})
    assert str(error.value).splitlines() == [
        "cannot take the norm: the arrays and their specs are not the same tree",
        "  the arrays: PyTreeDef({'w': *})",
        "  the specs:  PyTreeDef({'v': *})",
        "  Give one spec for each array.",
    ]
