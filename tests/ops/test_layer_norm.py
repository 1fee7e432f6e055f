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
        {("all-reduce", ("y", "z")): 3, ("all-reduce", ("x",)): 2},
    ),
    "bias elsewhere": (
        {"x": 4, "y": 2}, "B_xLE_y", "E_y", "E",
        {("all-reduce", ("y",)): 3, ("all-reduce", ("x",)): 1, ("reduce-scatter", ("x",)): 1,
         ("all-gather", ("x", "y")): 1},
    ),
    "no bias": ({"x": 2, "y": 4}, "B_xLE_y", "E_y", None, {("all-reduce", ("y",)): 3, ("all-reduce", ("x",)): 1}),
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


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("spec", ["B_xLE", "B_xLE_y", "BLE_xy"])
def test_a_mean_far_from_zero(spec, lowering, make_mesh, place):
    """Value and gradient, as accurate as float32 holds the mean: some 2⁻²² of it, in standard deviations."""
    mesh = make_mesh({"x": 4, "y": 2}, "auto" if spec == "B_xLE_y" else "explicit")
    noise, g = (RNG.normal(size=(4, 6, 64)).astype(np.float32) for _ in range(2))

    def both(x, g):
        y, transpose = jax.vjp(lambda x: layer_norm(x, jnp.ones(64), None, spec, "E"), x)
        return y, *transpose(g)

    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        program = jax.jit(both)
        for dtype, wide in (("float32", 1), ("bfloat16", 500)):
            for mean in (1e3, -1e4, 1e5):
                x = jnp.asarray(wide * noise + np.float32(mean), dtype)
                y, d_x = (np.asarray(z, float) for z in program(*(place(mesh, z, spec) for z in (x, g.astype(dtype)))))
                exact, cotangent = np.asarray(x, float), np.asarray(g.astype(dtype), float)
                exact -= exact.mean(-1, keepdims=True)
                deviation = np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
                exact /= deviation
                slope = cotangent - cotangent.mean(-1, keepdims=True)
                slope -= exact * (slope * exact).mean(-1, keepdims=True)
                digits = 2.0**-20 + 2.0**-22 * abs(mean) / deviation + (2.0**-6 if dtype == "bfloat16" else 0)
                assert np.all(np.abs(y - exact) < digits)
                assert np.all(np.abs(d_x * deviation - slope) < digits)


def test_refuses_a_bias_of_another_size(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError) as error:
        layer_norm(jnp.ones((2, 1, 4)), jnp.ones(4), jnp.ones(3), "BLE", "E")
    assert "the bias must have the one dimension E, of size 4, but its shape is (3,)." in str(error.value)
