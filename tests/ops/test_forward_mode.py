"""Forward mode of every operation: right under lowering "xla", one error of ours elsewhere; and second derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd import ops

RNG = np.random.default_rng(0)


def _numbers(*shape):
    return RNG.normal(size=shape).astype(np.float32)


ROWS, ROW, IDS = ((2, 8), "BE_x"), ((8,), "E_x"), np.array([[1, 7]])
HEADS, KEYS, CACHE = ((2, 6, 4, 2), "B_xLHD"), ((2, 6, 2, 2), "B_xTKD"), ((2, 4, 2, 2), "BT_xKD")
LEFT, LENGTHS, LABELS = np.arange(6)[None] >= [[0], [3]], np.array([1, 3]), np.array([1, 6])
SPECS = HEADS[1], KEYS[1], CACHE[1]

OPS = {
    "rms_norm": (lambda x, s: ops.rms_norm(x, s, "BE_x", "E_x"), ROWS, ROW),
    "layer_norm": (lambda x, s, b: ops.layer_norm(x, s, b, "BE_x", "E_x"), ROWS, ROW, ROW),
    "softmax": (lambda x: ops.softmax(x, "BE_x", "E"), ROWS),
    "logsumexp": (lambda x: ops.logsumexp(x, "BE_x", "E"), ROWS),
    "cross_entropy": (lambda x: ops.cross_entropy(x, LABELS, "BE_x", mask=np.array([2, 1]), z_loss=0.1), ROWS),
    "add_bias": (lambda x, b: ops.add_bias(x, b, "BE_x", "E_x"), ROWS, ROW),
    "embed": (lambda table: ops.embed(IDS, table, "BL, V_xE -> BLE"), ((8, 4), "V_xE")),
    "global_norm": (lambda x, s: ops.global_norm([x, s], ["BE_x", "E_x"]), ROWS, ROW),
    "attention": (lambda *qkv: ops.attention(*qkv, *SPECS[:2]), HEADS, KEYS, KEYS),
    "attention in blocks": (lambda *qkv: ops.attention(*qkv, *SPECS[:2]), HEADS, KEYS, KEYS),
    "padding in blocks": (lambda *qkv: ops.attention(*qkv, *SPECS[:2], mask=LEFT, offset=-1), HEADS, KEYS, KEYS),
}
CONSTANT = {
    "argmax": (lambda x: jnp.sum(x**2, axis=1) + ops.argmax(x, "BE_x", "E"), ROWS),
    "sample": (lambda x: jnp.sum(x**2, axis=1) + ops.sample(x, "BE_x", "E", seeds=LABELS, positions=LABELS), ROWS),
}
DECODING = {
    "cached_attention": (
        lambda *all: ops.cached_attention(*all, *SPECS, lengths=LENGTHS),
        HEADS, KEYS, KEYS, CACHE, CACHE,
    ),
    "write_cache": (
        lambda cache, new: ops.write_cache(cache, new, "BT_xKD", "BLKD", lengths=LENGTHS),
        ((1, 2, 4, 2, 2), "NBT_xKD"), ((1, 2, 2, 2, 2), "NBLKD"),
    ),
}  # fmt: skip


def _given(name, axis_type, make_mesh, place, request):
    """The mesh, the operation, its arrays and their tangents."""
    if "blocks" in name:
        request.getfixturevalue("tiny_blocks")
    f, *operands = (OPS | CONSTANT | DECODING)[name]
    mesh = make_mesh({"x": 2}, axis_type)
    return mesh, f, *(tuple(place(mesh, _numbers(*shape), spec) for shape, spec in operands) for _ in range(2))


def _axis_type(name):
    return "auto" if "padding" in name or len(name) % 2 else "explicit"


def _dot(some, others):
    return sum(float(np.vdot(np.asarray(a, float), np.asarray(b, float))) for a, b in zip(some, others))


@pytest.mark.parametrize("name", [*OPS, *CONSTANT])
def test_tangents_are_those_that_gradients_transpose(name, make_mesh, place, request):
    """<g, J t> = <Jᵀ g, t>, J t by lowering "xla" and Jᵀ g as planned."""
    mesh, f, arrays, tangents = _given(name, _axis_type(name), make_mesh, place, request)
    with jax.set_mesh(mesh):
        with gspmd.lowering("xla"):
            y, moved = jax.jit(lambda x, t: jax.jvp(f, x, t))(arrays, tangents)
        g = jax.device_put(_numbers(*y.shape), y.sharding)
        with gspmd.lowering("blocking"):
            gradients = jax.jit(lambda g, x: jax.vjp(f, *x)[1](g))(g, arrays)
    np.testing.assert_allclose(_dot([g], [moved]), _dot(gradients, tangents), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if "padding" in n else pytest.mark.slow) for n in OPS])
def test_forward_over_reverse_is_reverse_over_reverse(name, make_mesh, place, request):
    mesh, f, arrays, tangents = _given(name, _axis_type(name), make_mesh, place, request)

    def gradient(*arrays):
        return jax.grad(lambda *arrays: jnp.sum(jnp.sin(f(*arrays))), tuple(range(len(arrays))))(*arrays)

    def along(*arrays):
        return sum(jnp.sum(a * b) for a, b in zip(gradient(*arrays), tangents))

    with jax.set_mesh(mesh):
        with gspmd.lowering("xla"):
            one = jax.jit(lambda *x: jax.jvp(gradient, x, tangents)[1])(*arrays)
        with gspmd.lowering("blocking"):
            other = jax.jit(jax.grad(along, tuple(range(len(arrays)))))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), one, other)


@pytest.mark.parametrize("name", [*OPS, *DECODING])
def test_elsewhere_it_is_one_error(name, make_mesh, place, request):
    mesh, f, arrays, tangents = _given(name, "auto", make_mesh, place, request)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"), pytest.raises(gspmd.PlanError) as error:
        jax.linearize(f, *arrays)[1](*tangents)
    assert str(error.value).startswith("cannot differentiate '")
    assert str(error.value).endswith(
        "' forward: its lowering plans reverse mode only.\n  Use lowering='xla', or jax.vjp and jax.jacrev."
    )


@pytest.mark.parametrize("name", DECODING)
def test_what_decoding_reads_and_writes_has_tangents_too(name, make_mesh, place, request):
    mesh, f, arrays, tangents = _given(name, "auto", make_mesh, place, request)
    with jax.set_mesh(mesh), gspmd.lowering("xla"):
        y, moved = jax.jit(lambda *x: jax.jvp(f, x, tangents))(*arrays)
        g = _numbers(*y.shape)
        gradients = jax.jit(lambda *x: jax.vjp(f, *x)[1](g))(*arrays)
    np.testing.assert_allclose(_dot([g], [moved]), _dot(gradients, tangents), rtol=1e-4, atol=1e-4)
