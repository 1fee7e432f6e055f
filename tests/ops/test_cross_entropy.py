"""Cross-entropy over a vocabulary that stays where it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops._cross_entropy import cross_entropy

RNG = np.random.default_rng(0)
LOGITS = 3.0 * RNG.normal(size=(4, 6, 24)).astype(np.float32)
LABELS = RNG.integers(0, 24, size=(4, 6)).astype(np.int32)
MASK = RNG.random((4, 6)) > 0.3

CASES = [
    ({"x": 2, "y": 2, "z": 2}, "BLV_xyz", "BL", ("x", "y", "z")),
    ({"x": 2, "y": 2, "z": 2}, "B_xLV_zy", "B_xL", ("y", "z")),
    ({"x": 4, "y": 2}, "B_xL_yV", "B_xL_y", ()),
    ({"x": 3, "y": 2, "z": 1}, "B_yLV_xz", "B_yL", ("x",)),
]


def plain(logits, labels, mask=None, z_loss=0.0):
    log_z = jax.nn.logsumexp(logits, axis=-1)
    loss = log_z - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0] + z_loss * log_z**2
    return loss if mask is None else loss * mask


@pytest.mark.parametrize(("mesh", "spec", "rows", "axes"), CASES)
def test_value_gradient_and_collectives(mesh, spec, rows, axes, axis_type, check_form):
    planned = check_form(
        lambda *a: cross_entropy(*a, spec), plain, (LOGITS, LABELS), (spec, rows), rows, mesh=mesh, axis_type=axis_type
    )
    # the maximum, the sum and the label's logit; nothing more in the gradient, and the vocabulary is never gathered
    assert planned == ({("all-reduce", axes): 3} if axes else {})


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_mask_and_z_loss(lowering, axis_type, check_form):
    mesh, spec, rows, _ = CASES[1]
    check_form(
        lambda x, labels, mask: cross_entropy(x, labels, spec, mask=mask, z_loss=0.1),
        lambda *a: plain(*a, z_loss=0.1), (LOGITS, LABELS, MASK), (spec, rows, rows), rows,
        mesh=mesh, axis_type=axis_type, lowering=lowering,
    )  # fmt: skip


def test_bfloat16_logits_have_a_float32_loss(make_mesh):
    logits = LOGITS.astype(jnp.bfloat16)
    with jax.set_mesh(make_mesh({"x": 8}, "auto")):
        of = lambda x: cross_entropy(x, LABELS, "BLV_x")  # noqa: E731
        loss, gradient = jax.jit(lambda x: (of(x), jax.grad(lambda x: of(x).sum())(x)))(logits)
    assert (loss.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(loss, plain(logits.astype(np.float32), LABELS), rtol=1e-5, atol=1e-5)


def test_a_masked_label_may_be_anything(make_mesh):
    labels, mask = jnp.array([[-1, 0]]), jnp.array([[False, True]])
    with jax.set_mesh(make_mesh({"x": 1})):
        loss = cross_entropy(jnp.zeros((1, 2, 4)), labels, "BLV", mask=mask)
    np.testing.assert_allclose(loss, [[0.0, np.log(4.0)]], rtol=1e-6)


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_what_is_not_finite_stays_where_it_is(lowering, make_mesh, place):
    """Masked rows are zero, gradients too; a logarithm whose square is infinite is no NaN without z-loss."""
    x = np.tile(np.float32([1, 2, 3, 4]), (6, 1))
    x[0], x[1], x[2, 1], x[3], x[4, 0] = np.nan, np.inf, -np.inf, -1e38, 1e30
    labels, mask = np.array([1, 1, 1, 2, 2, 2]), np.array([0, 0, 0, 1, 1, 1])
    mesh = make_mesh({"x": 4})
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        of = lambda x: cross_entropy(x, labels, "BV_x", mask=mask)  # noqa: E731
        loss, transpose = jax.vjp(of, place(mesh, x, "BV_x"))
        (gradient,) = transpose(jax.device_put(np.ones(6, np.float32), loss.sharding))
    share = np.exp(x[5] - np.log(np.exp(x[5]).sum()))
    np.testing.assert_allclose(loss, [0, 0, 0, np.log(4), 1e30, -np.log(share[2])], rtol=1e-6)
    np.testing.assert_allclose(gradient[:3], 0)
    np.testing.assert_allclose(
        gradient[3:], [[0.25, 0.25, -0.75, 0.25], [1, 0, -1, 0], share - [0, 0, 1, 0]], rtol=1e-5
    )


def test_a_label_of_64_bits_is_no_other_one(make_mesh):
    with jax.enable_x64(True), jax.set_mesh(make_mesh({"x": 2})):
        labels = np.array([1, 2**32 + 1, -(2**32) + 1])
        loss = cross_entropy(gspmd.annotate(np.float32([[0, 5]] * 3), "BV_x"), labels, "BV_x")
    np.testing.assert_allclose(loss - loss[0], [0, 5, 5], rtol=1e-6)


def test_refuses_labels_of_another_shape(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError) as error:
        cross_entropy(jnp.zeros((2, 3, 4)), jnp.zeros((2, 4), jnp.int32), "B_xLV")
    assert str(error.value).splitlines() == [
        "cannot take the cross-entropy of 'B_xLV'",
        "    B_xLV",
        "    ^^^^",
        "  the labels must have the spec 'B_xL' and shape (2, 3), but the shape is (2, 4).",
    ]
