"""The planned forms together: a small model, scanned and rematerialised, and what a loop's trips cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops._argmax import argmax
from gspmd.ops._attention import attention, cached_attention, write_cache
from gspmd.ops._cross_entropy import cross_entropy
from gspmd.ops._embedding import embed
from gspmd.ops._global_norm import global_norm
from gspmd.ops._norm import rms_norm
from gspmd.ops._softmax import softmax
from gspmd.ops.interface.planned_op import Chains

RNG = np.random.default_rng(0)
LAYERS = 3
IDS = RNG.integers(0, 16, size=(4, 6)).astype(np.int32)
PARAMETERS = {
    "table": RNG.normal(size=(16, 8)).astype(np.float32),
    "scale": RNG.normal(size=(LAYERS, 8)).astype(np.float32),
}
SPECS = {"table": "V_yE", "scale": "NE"}


def sharded(parameters, ids):
    """Heads of size 2 attend over normalised rows; the table reads tokens out again."""

    def layer(h, scale):
        h = rms_norm(h, scale, "B_xLE", "E")
        heads = gspmd.annotate(h.reshape(4, 6, 4, 2), "B_xLHD")
        heads = gspmd.reshard(heads, "B_xLHD -> B_xLH_yD")
        mixed = attention(heads, heads, heads, "B_xLH_yD", "B_xTH_yD")
        mixed = gspmd.reshard(mixed, "B_xLH_yD -> B_xLHD")
        return softmax(h + gspmd.annotate(mixed.reshape(4, 6, 8), "B_xLE"), "B_xLE", "E"), None

    h = embed(ids, parameters["table"], "B_xL, V_yE -> B_xLE")
    h, _ = jax.lax.scan(jax.checkpoint(layer), h, parameters["scale"])
    logits = gspmd.einsum("B_xLE, V_yE -> B_xLV_y", h, parameters["table"])
    loss = cross_entropy(logits, ids, "B_xLV_y")
    return gspmd.einsum("B_xL -> ", loss) + 0.1 * global_norm(parameters, SPECS), argmax(logits, "B_xLV_y", "V")


def plain(parameters, ids):
    def layer(h, scale):
        h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6) * scale[None, None]
        heads = h.reshape(4, 6, 4, 2)
        mixed = jax.nn.dot_product_attention(heads, heads, heads, is_causal=True)
        return jax.nn.softmax(h + mixed.reshape(4, 6, 8)), None

    h, _ = jax.lax.scan(layer, parameters["table"][ids], parameters["scale"])
    logits = h @ parameters["table"].T
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], axis=-1).sum()
    norm = jnp.sqrt(sum(jnp.sum(array**2) for array in parameters.values()))
    return loss + 0.1 * norm, jnp.argmax(logits, axis=-1)


@pytest.mark.parametrize(("axis_type", "lowering"), [("explicit", "blocking"), ("auto", "blocking"), ("auto", "xla")])
def test_a_scanned_model(make_mesh, place, axis_type, lowering):
    mesh = make_mesh({"x": 2, "y": 4}, axis_type)
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        parameters = {name: place(mesh, array, SPECS[name]) for name, array in PARAMETERS.items()}
        got = jax.jit(jax.value_and_grad(sharded, has_aux=True))(parameters, place(mesh, IDS, "B_xL"))
    want = jax.jit(jax.value_and_grad(plain, has_aux=True))(PARAMETERS, IDS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_a_loop_counts_its_trips(make_mesh, place):
    mesh = make_mesh({"x": 2, "y": 4})

    def layer(h, scale):
        return jax.checkpoint(rms_norm, static_argnums=(2, 3))(h, scale, "BLE_y", "E"), None

    def loss(scales, h):
        return (jax.lax.scan(layer, h, scales)[0] ** 2).sum()

    with jax.set_mesh(mesh):
        h = place(mesh, np.ones((4, 6, 8), np.float32), "BLE_y")
        planned = gspmd.trace(jax.grad(loss, argnums=1), PARAMETERS["scale"], h).by_kind_and_axes()
    # the mean square in the value and again where it is rematerialised, and the projection in the gradient
    count, size = planned["all-reduce", ("y",)]
    assert (count, size) == (3 * LAYERS, 3 * LAYERS * 4 * 6 * 4 * 2 * 3 // 4)


def test_vmap(make_mesh):
    x = RNG.normal(size=(3, 4, 6)).astype(np.float32)
    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        y = jax.jit(jax.vmap(lambda x: softmax(x, "BV_x", "V")))(x)
    np.testing.assert_allclose(y, jax.nn.softmax(x), rtol=1e-6)


def test_equal_calls_share_one_program(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        x = jnp.ones((2, 4))
        text = jax.jit(lambda x: softmax(softmax(x, "BV_x", "V"), "BV_x", "V")).lower(x).as_text()
    assert text.count("all_reduce") == 2  # the maximum and the sum, in one function that is called twice


def test_needs_a_mesh():
    with pytest.raises(gspmd.PlanError, match="there is no mesh"):
        softmax(jnp.ones((2, 4)), "BV_x", "V")


def test_chains_number_their_steps_in_order(make_mesh, place):
    mesh = make_mesh({"x": 2, "y": 4})
    with jax.set_mesh(mesh):
        x = place(mesh, np.ones((2, 8), np.float32), "BV_xy")
        steps = gspmd.trace(lambda x: softmax(x, "BV_xy", "V"), x).steps
    assert [step.operand for step in steps] == ["maximum", "sum"]
    assert Chains({"x": 2}, first=steps[:1], second=steps[1:]).steps == steps


CALLS = {
    "softmax": lambda x, _: softmax(x, "BLHD", "D"),
    "attention": lambda x, _: attention(x, x, x, "BLHD", "BTKD"),
    "cached_attention": lambda x, _: cached_attention(*[x] * 5, "BLHD", "BLKD", "BTKD", lengths=np.array([0, 1])),
    "write_cache": lambda _, layers: write_cache(layers, layers, "BTKD", "BLKD", lengths=np.array([0, 1])),
}


@pytest.mark.parametrize("call", CALLS)
def test_arrays_that_are_older_than_the_mesh(call, make_mesh, axis_type):
    """They are brought to the mesh, outside of jit too; those committed to other devices are refused."""
    older = jnp.ones((2, 2, 2, 4)), jnp.ones((1, 2, 2, 2, 4))
    elsewhere = jax.device_put(older, jax.devices()[3])
    results = []
    for lowering in ("xla", "blocking"):
        with jax.set_mesh(make_mesh({"x": 2}, axis_type)), gspmd.lowering(lowering):
            results.append(CALLS[call](*older))
            with pytest.raises(gspmd.SpecError, match=r"on device 3, and the mesh in force has 2 devices"):
                CALLS[call](*elsewhere)
    np.testing.assert_allclose(*results, rtol=1e-6)
