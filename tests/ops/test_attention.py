"""The attention core: local heads and batch, shared key heads, and gradients that are summed where they must be."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops._attention import attention, cached_attention

RNG = np.random.default_rng(0)
CUBE, FLAT, ODD = {"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2}, {"x": 3, "y": 2, "z": 1}


def _arrays(heads, key_heads, batch=4, length=6, size=4):
    shapes = [(batch, length, heads, size)] + [(batch, length, key_heads, size)] * 2
    return tuple(RNG.normal(size=shape).astype(np.float32) for shape in shapes)


def plain(q, k, v, mask=None, causal=True, offset=0):
    """Attention written out, every query head with its own copy of its key head."""
    k, v = (jnp.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    logits = jnp.einsum("blhd,bthd->bhlt", q, k) / np.sqrt(q.shape[3])
    seen = np.ones((1, 1, *logits.shape[2:]), bool)
    if causal:
        seen = offset + np.arange(seen.shape[2])[None, None, :, None] >= np.arange(seen.shape[3])[None, None, None, :]
    seen = seen if mask is None else seen & mask[:, None, None, :]
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1), 0)
    return jnp.einsum("bhlt,bthd->blhd", weights, v)


SUM = "all-reduce"
CASES = {
    # query heads, key heads, mesh, query spec, key spec, planned
    "multihead": (8, 8, CUBE, "B_xLH_yzD", "B_xTK_yzD", {}),
    "batch": (2, 2, FLAT, "B_xLHD", "B_xTKD", {}),
    "grouped, key heads sharded less": (8, 2, CUBE, "B_xLH_yzD", "B_xTK_yD", {(SUM, ("z",)): 2}),
    "grouped, keys replicated": (
        8, 2, CUBE, "B_xLH_yzD", "B_xTKD", {(SUM, ("z",)): 2, ("all-gather", ("y",)): 2},
    ),
    "each device one of two key heads": (8, 2, FLAT, "BLH_xD", "BTKD", {(SUM, ("x",)): 2}),
    "multiquery": (8, 1, CUBE, "B_xLH_yzD", "B_xTKD", {(SUM, ("y", "z")): 2}),
    "key heads all picked": (4, 4, FLAT, "BLH_xD", "BTKD", {("all-gather", ("x",)): 2}),
    "queries split along the sequence": (4, 2, CUBE, "B_xL_yH_zD", "B_xTK_zD", {(SUM, ("y",)): 2}),
    "odd": (6, 3, ODD, "B_yLH_xzD", "B_yLKD", {("all-gather", ("x",)): 2}),
    "an axis of one": (6, 3, ODD, "B_yLH_zxD", "B_yLK_xD", {}),
}  # fmt: skip


@pytest.mark.turns(5)
@pytest.mark.parametrize("case", CASES)
def test_value_gradients_and_collectives(case, axis_type, check_form):
    heads, key_heads, mesh, query, key, expected = CASES[case]
    planned = check_form(
        lambda q, k, v: attention(q, k, v, query, key), plain, _arrays(heads, key_heads), (query, key, key), query,
        mesh=mesh, axis_type=axis_type, wrt=(0, 1, 2),
    )  # fmt: skip
    assert planned == expected


@pytest.mark.parametrize("width", [3, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lowering", ["blocking", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    ["grouped, key heads sharded less", pytest.param("queries split along the sequence", marks=pytest.mark.slow)],
)
def test_values_of_another_width(case, lowering, width, check_form):
    heads, key_heads, mesh, query, key, _ = CASES[case]
    q, k, _ = _arrays(heads, key_heads)
    v = RNG.normal(size=(*k.shape[:3], width)).astype(np.float32)
    check_form(
        lambda q, k, v: attention(q, k, v, query, key), plain, (q, k, v), (query, key, key), query,
        mesh=mesh, axis_type="auto" if lowering == "xla" else "explicit", lowering=lowering, wrt=(0, 1, 2),
    )  # fmt: skip


@pytest.mark.turns(3)
@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("case", ["grouped, keys replicated", "queries split along the sequence"])
@pytest.mark.parametrize(("side", "offset"), [("right", 2), ("left", -1)])
def test_padding_and_offset(side, offset, case, lowering, axis_type, check_form):
    """Queries that see nothing, of padding on the left or before the first key, get 0, and add nothing to gradients."""
    heads, key_heads, mesh, query, key, _ = CASES[case]
    q, k, v = _arrays(heads, key_heads)
    mask = np.arange(6)[None, :] < np.array([[6], [5], [3], [1]])
    mask = mask[:, ::-1] if side == "left" else mask
    check_form(
        lambda q, k, v, mask: attention(q, k, v, query, key, mask=mask, offset=jnp.int32(offset)),
        lambda q, k, v, mask: plain(q, k, v, mask, offset=offset),
        (q[:, :4], k, v, mask), (query, key, key, "B_xT"), query,
        mesh=mesh, axis_type=axis_type, lowering=lowering, wrt=(0, 1, 2),
    )  # fmt: skip


def test_not_causal(check_form):
    heads, key_heads, mesh, query, key, expected = CASES["multiquery"]
    planned = check_form(
        lambda q, k, v: attention(q, k, v, query, key, causal=False, scale=0.5),
        lambda q, k, v: plain(q, k, v, causal=False), _arrays(heads, key_heads), (query, key, key), query,
        mesh=mesh, axis_type="explicit", wrt=(0, 1, 2),
    )  # fmt: skip
    assert planned == expected


def test_computes_the_logits_twice_only_where_they_are_gone(make_mesh):
    """Value and gradient in one program have the six products that plain code has."""
    q, k, v = _arrays(8, 2)

    def dots(f):
        slope = jax.jit(jax.value_and_grad(lambda *a: f(*a).sum(), argnums=(0, 1, 2)))
        text = slope.lower(q, k, v).compile().as_text()
        return len(re.findall(r" dot\(|custom-call\(.*matmul", text))

    with jax.set_mesh(make_mesh(CUBE, "auto")):
        mine = dots(lambda q, k, v: attention(q, k, v, "B_xLH_yzD", "B_xTK_yD"))
    assert mine == dots(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)) == 6


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_half_the_bytes(dtype, tolerance, make_mesh):
    q, k, v = (array.astype(dtype) for array in _arrays(8, 2))
    with jax.set_mesh(make_mesh({"x": 4}, "auto")):
        y = jax.jit(lambda q, k, v: attention(q, k, v, "B_xLHD", "B_xTKD"))(q, k, v)
    assert y.dtype == dtype
    exact = plain(*(jnp.asarray(array, jnp.float32) for array in (q, k, v)))
    np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=tolerance)


def _error(make_mesh, mesh, heads, key_heads, query, key):
    arrays = [jnp.asarray(array) for array in _arrays(heads, key_heads)]
    with jax.set_mesh(make_mesh(mesh, "auto")), pytest.raises(ValueError) as error:
        attention(*arrays, query, key)
    return error.value


def test_refuses_heads_that_cut_a_group(make_mesh):
    error = _error(make_mesh, {"x": 4}, 12, 3, "BLH_xD", "BTKD")
    assert isinstance(error, gspmd.PlanError)
    assert str(error).splitlines() == [
        "cannot attend from 'BLH_xD' to 'BTKD'",
        "    BLH_xD",
        "      ^^^",
        "  a device has 3 of 12 query heads, and 4 query heads share a key head: "
        "some device would need parts of two groups.",
        "  Shard it over axes whose size divides the number of key heads, or is a multiple of that number.",
    ]


def test_refuses_keys_in_another_place(make_mesh):
    error = _error(make_mesh, {"x": 2, "y": 2}, 4, 4, "B_xLH_yD", "BT_xK_yD")
    assert isinstance(error, gspmd.PlanError)
    assert str(error).splitlines() == [
        "cannot attend from 'B_xLH_yD' to 'BT_xK_yD': 2 faults",
        "    BT_xK_yD",
        "     ^^^",
        "  dimension T is sharded over x, and has to be unsharded: every device attends over the whole of it.",
        "  Move it before: gspmd.reshard(x, 'BT_xK_yD -> BTK_yD').",
        "    BT_xK_yD",
        "    ^",
        "  dimension B is unsharded, and has to be over x: the keys of a sequence have to be where its queries are.",
        "  Move it before: gspmd.reshard(x, 'BT_xK_yD -> B_xTK_yD').",
    ]


@pytest.mark.parametrize(("heads", "size", "dim"), [(0, 4, "K"), (2, 0, "D")])
def test_refuses_keys_without_heads_or_numbers(heads, size, dim, make_mesh):
    q, k, cache = (jnp.ones((2, length, n, size)) for length, n in ((3, 4), (3, heads), (8, heads)))
    fact = f"{dim} has size 0: there is nothing to attend to."
    with jax.set_mesh(make_mesh({"x": 1}, "auto")):
        with pytest.raises(gspmd.SpecError, match=fact):
            attention(q, k, k, "BLHD", "BTKD")
        with pytest.raises(gspmd.SpecError, match=fact):
            cached_attention(q, k, k, cache, cache, "BLHD", "BLKD", "BTKD", lengths=jnp.ones(2, int))


def test_refuses_sizes_that_do_not_agree(make_mesh):
    error = _error(make_mesh, {"x": 2}, 4, 3, "BLHD", "BTKD")
    assert isinstance(error, gspmd.SpecError)
    assert "3 key heads do not divide 4 query heads." in str(error)
