"""Layer norm against plain code, its collectives counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops import layer_norm

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6, 24)).astype(np.float32) + 1.5
SCALE, BIAS = (RNG.normal(size=24).astype(np.float32) for _ in range(2))

CASES = {
    "sharded rows": (
        {"x": 2, "y": 2, "z": 2}, "B_xLE_yz", "E_yz", "E_yz",
        {("all-reduce", ("y", "z")): 2, ("all-reduce", ("x",)): 2},
    ),
    "bias elsewhere": (
        {"x": 4, "y": 2}, "B_xLE_y", "E_y", "E",
        {("all-reduce", ("y",)): 2, ("all-reduce", ("x",)): 1, ("reduce-scatter", ("x",)): 1,
         ("all-gather", ("x", "y")): 1},
    ),
    "no bias": ({"x": 2, "y": 4}, "B_xLE_y", "E_y", None, {("all-reduce", ("y",)): 2, ("all-reduce", ("x",)): 1}),
    "whole rows": ({"x": 4}, "B_xLE", "E", "E", {("all-reduce", ("x",)): 2}),
}  # fmt: skip


def plain(x, scale, bias=None):
    y = (x - jnp.mean(x, axis=-1, keepdims=True)) / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5)
    return y * scale[None, None] + (0.0 if bias is None else bias[None, None])


@pytest.mark.parametrize("case", CASES)
def test_value_gradients_and_collectives(case, axis_type, check_form):
    mesh, spec, scale_spec, bias_spec, expected = CASES[case]
    arrays, specs = (X, SCALE), (spec, scale_spec)
    if bias_spec:
        arrays, specs = (*arrays, BIAS), (*specs, bias_spec)
    planned = check_form(
        lambda x, scale, bias=None: layer_norm(x, scale, bias, spec, scale_spec, bias_spec), plain, arrays, specs, spec,
        mesh=mesh, axis_type=axis_type, wrt=tuple(range(len(arrays))),
    )  # fmt: skip
    assert planned == expected


def test_compiler_chooses(axis_type, check_form):
    check_form(
        lambda *arrays: layer_norm(*arrays, "B_xLE_yz", "E_y", "E"), plain, (X, SCALE, BIAS), ("B_xLE_yz", "E_y", "E"),
        "B_xLE_yz", mesh={"x": 2, "y": 2, "z": 2}, axis_type=axis_type, lowering="xla", wrt=(0, 1, 2),
    )  # fmt: skip


def test_bfloat16_rows_have_float32_statistics(make_mesh):
    x = (300.0 * X).astype(jnp.bfloat16)
    with jax.set_mesh(make_mesh({"x": 8}, "auto")):
        y = jax.jit(lambda x: layer_norm(x, SCALE, BIAS, "BLE_x", "E"))(x)
    assert y.dtype == jnp.bfloat16
    exact = plain(jnp.asarray(x, jnp.float32), SCALE, BIAS)
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-8, atol=2**-8)


def test_a_mean_far_from_zero(make_mesh):
    """Three thousand deviations off, where rows are whole; a hundred where they are sharded and one all-reduce does."""
    noise = RNG.normal(size=(4, 6, 64)).astype(np.float32)
    with jax.set_mesh(make_mesh({"x": 4, "y": 1}, "auto")):
        for mean, spec, tolerance in ((3000, "B_xLE", 1e-3), (3000, "B_xLE_y", 1e-3), (100, "BLE_x", 1e-2)):
            x = noise + np.float32(mean)
            exact = x.astype(np.float64)
            exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
            y = jax.jit(lambda x, s=spec: layer_norm(x, np.ones(64, "float32"), None, s, "E"))(x)
            np.testing.assert_allclose(y, exact, atol=tolerance)


def test_refuses_a_bias_of_another_size(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError) as error:
        layer_norm(jnp.ones((2, 1, 4)), jnp.ones(4), jnp.ones(3), "BLE", "E")
    assert "the bias has to have the one dimension E, of size 4; its shape is (3,)." in str(error.value)
