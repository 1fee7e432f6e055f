"""Logsumexp and softmax over a dimension that may be sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops._softmax import logsumexp, softmax

X = 5.0 * np.random.default_rng(0).normal(size=(4, 6, 24)).astype(np.float32)
MESHES = {"cube": {"x": 2, "y": 2, "z": 2}, "flat": {"x": 4, "y": 2}, "odd": {"x": 3, "y": 2, "z": 1}}

CASES = [
    ("cube", "BLV_xyz", "V", ("x", "y", "z")),
    ("cube", "B_xLV_zy", "V", ("y", "z")),
    ("flat", "B_xLV_y", "B", ("x",)),
    ("odd", "B_yLV_xz", "V", ("x",)),
    ("odd", "B_yL_xV", "V", ()),
]


def _expected(axes, count):
    return {("all-reduce", axes): count} if axes else {}


@pytest.mark.parametrize(("mesh", "spec", "dim", "axes"), CASES)
def test_logsumexp(mesh, spec, dim, axes, axis_type, check_form):
    at = gspmd.Spec.parse(spec).dims.index(dim)
    out = str(gspmd.Spec.parse(spec).without(dim))
    planned = check_form(
        lambda x: logsumexp(x, spec, dim), lambda x: jax.nn.logsumexp(x, axis=at), (X,), (spec,), out,
        mesh=MESHES[mesh], axis_type=axis_type,
    )  # fmt: skip
    assert planned == _expected(axes, 2)


@pytest.mark.parametrize(("mesh", "spec", "dim", "axes"), CASES)
def test_softmax(mesh, spec, dim, axes, axis_type, check_form):
    at = gspmd.Spec.parse(spec).dims.index(dim)
    planned = check_form(
        lambda x: softmax(x, spec, dim), lambda x: jax.nn.softmax(x, axis=at), (X,), (spec,), spec,
        mesh=MESHES[mesh], axis_type=axis_type,
    )  # fmt: skip
    assert planned == _expected(axes, 3)


def test_compiler_chooses(axis_type, check_form):
    same = {"mesh": MESHES["cube"], "axis_type": axis_type, "lowering": "xla"}
    check_form(lambda x: softmax(x, "B_xLV_yz", "V"), jax.nn.softmax, (X,), ("B_xLV_yz",), "B_xLV_yz", **same)
    plain = lambda x: jax.nn.logsumexp(x, axis=-1)  # noqa: E731
    check_form(lambda x: logsumexp(x, "B_xLV_yz", "V"), plain, (X,), ("B_xLV_yz",), "B_xL", **same)


def test_rows_of_minus_infinity_and_large_numbers(make_mesh, place):
    x = np.array([[-np.inf] * 4, [1e4] * 4, [-np.inf, 0.0, -np.inf, -np.inf]], np.float32)
    mesh = make_mesh({"x": 4})
    with jax.set_mesh(mesh):
        y = logsumexp(place(mesh, x, "BV_x"), "BV_x", "V")
    np.testing.assert_allclose(y, [-np.inf, 1e4 + np.log(4.0), 0.0])


def test_bfloat16(make_mesh):
    x = X.astype(jnp.bfloat16)
    with jax.set_mesh(make_mesh({"x": 8}, "auto")):
        y, z = jax.jit(lambda x: (softmax(x, "BLV_x", "V"), logsumexp(x, "BLV_x", "V")))(x)
    assert (y.dtype, z.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(z, jax.nn.logsumexp(jnp.asarray(x, jnp.float32), axis=-1), rtol=1e-6)


def test_refuses_an_unknown_dimension(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError) as error:
        softmax(jnp.ones((2, 4)), "BV_x", "E")
    assert str(error.value).splitlines() == [
        "cannot take the softmax of 'BV_x' over 'E'",
        "    BV_x",
        "    ^^^^",
        "  there is no dimension E.",
        "  Its dimensions are B, V.",
    ]


def test_refuses_an_open_dimension(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2}, "auto")), pytest.raises(gspmd.PlanError, match="dimension V is left open"):
        softmax(jnp.ones((2, 4)), "BV_?", "V")


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_the_logsumexp_of_nothing(lowering, make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), gspmd.lowering(lowering):
        np.testing.assert_array_equal(logsumexp(jnp.zeros((2, 0)), "BV", "V"), [-np.inf] * 2)


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_large_numbers_keep_their_differences(lowering, make_mesh, place):
    mesh, differences = make_mesh({"x": 2}), np.float32([0, 1, 2, 3])
    share = np.exp(differences) / np.exp(differences).sum()
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        x = place(mesh, np.stack([differences + 2**20, differences - 2**20]), "BV_x")
        np.testing.assert_allclose(softmax(x, "BV_x", "V"), [share] * 2, rtol=1e-5)
        (slope,) = jax.vjp(lambda x: logsumexp(x, "BV_x", "V"), x)[1](jnp.ones(2))
    np.testing.assert_allclose(slope, [share] * 2, rtol=1e-5)
