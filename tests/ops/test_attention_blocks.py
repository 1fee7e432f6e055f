"""Attention in blocks: the numbers and the gradients of attention whose logits are all in memory, which it has not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.ops import attention, cached_attention
from gspmd.ops._attention import blocks
from tests.ops.test_attention import plain
from tests.ops.test_cached_attention import Case

CUBE = {"x": 2, "y": 2, "z": 2}


def _arrays(batch, length, keys, heads, key_heads, size=4):
    rng = np.random.default_rng(0)
    shapes = [(batch, length, heads, size)] + [(batch, keys, key_heads, size)] * 2
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


CASES = {
    # rows, queries, keys, query heads, key heads, mesh, query spec, key spec, what else
    "causal": (4, 13, 13, 4, 2, {"x": 2}, "B_xLHD", "B_xTKD", {}),
    "all keys": (2, 9, 14, 4, 1, {"x": 2}, "BLH_xD", "BTKD", {"causal": False}),
    "offset": (2, 6, 15, 4, 4, {"x": 2, "y": 2}, "B_yLH_xD", "B_yTK_xD", {"offset": 9}),
    "queries split along the sequence": (2, 16, 16, 4, 2, CUBE, "B_xL_yH_zD", "B_xTK_zD", {}),
    "nothing seen": (2, 6, 15, 4, 4, {"x": 2, "y": 2}, "B_yLH_xD", "B_yTK_xD", {"offset": -3}),
    "padding on the left": (
        4,
        14,
        14,
        4,
        2,
        {"x": 2},
        "B_xLHD",
        "B_xTKD",
        {"mask": np.arange(14)[None] >= [[0], [7], [3], [14]]},
    ),
    "padding": (4, 10, 10, 4, 2, {"x": 2}, "B_xLHD", "B_xTKD", {"mask": np.arange(10)[None] < [[10], [7], [3], [1]]}),
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, lowering, tiny_blocks, axis_type, check_form):
    *sizes, mesh, query, key, options = CASES[case]
    options, masks = dict(options), [options["mask"]] if "mask" in options else []
    options.pop("mask", None)

    def with_mask(function):
        return lambda q, k, v, *mask: function(q, k, v, mask=mask[0] if mask else None)

    check_form(
        with_mask(lambda q, k, v, mask: attention(q, k, v, query, key, mask=mask, **options)),
        with_mask(lambda q, k, v, mask: plain(q, k, v, mask, **options)),
        (*_arrays(*sizes), *masks), (query, key, key, *["B_xT"] * len(masks)), query,
        mesh=mesh, axis_type=axis_type, lowering=lowering, wrt=(0, 1, 2),
    )  # fmt: skip


@pytest.mark.parametrize("case", ["causal", "all keys"])
def test_values_of_another_width(case, tiny_blocks, check_form):
    *sizes, mesh, query, key, options = CASES[case]
    q, k, v = _arrays(*sizes)
    check_form(
        lambda q, k, v: attention(q, k, v, query, key, **options), lambda q, k, v: plain(q, k, v, **options),
        (q, k, v[..., :3]), (query, key, key), query, mesh=mesh, axis_type="explicit", wrt=(0, 1, 2),
    )  # fmt: skip


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 24))])
def test_long_chunks_over_a_long_cache(seed, tiny_blocks, make_mesh, place):
    """Rows, new tokens and cached keys in blocks, in any of three placements, int8 among them."""
    sizes = {"B": 4, "L": 6 + seed, "T": 12 + 2 * (seed % 3), "H": 4, "K": 2, "D": 4}
    specs = (("B_xLH_yD", "B_xLK_yD", "BT_xK_yD"), ("BLH_yD", "BLK_yD", "B_xTKD"), ("BLH_xD", "BLKD", "BTKD"))[seed % 3]
    case = Case(np.random.default_rng(seed), sizes, specs, int8=seed % 2 == 1)
    lowering, axis_type = ("blocking", "xla")[seed // 2 % 2], ("auto", "explicit")[seed // 3 % 2]
    case.check(make_mesh({"x": 2, "y": 2}, axis_type), place, lowering)


def test_a_row_with_nan_spoils_no_other(tiny_blocks, make_mesh):
    q, k, v = _arrays(3, 13, 13, 2, 1)
    want = plain(q, k, v)
    q[0, 2], k[1, 9] = np.nan, np.nan
    with jax.set_mesh(make_mesh({"x": 1}, "auto")):
        y = np.array(attention(q, k, v, "BLHD", "BTKD"))
    spoilt = np.isnan(y).all(axis=(2, 3))
    np.testing.assert_array_equal(spoilt[0], np.arange(13) == 2)
    assert spoilt[1, 9:].all()
    assert not np.isnan(y[1, :6]).any()
    np.testing.assert_allclose(y[2], want[2], rtol=1e-5, atol=1e-5)


def test_no_array_has_all_logits(make_mesh):
    """Neither in the value nor in the gradients: of 2**31 logits of a device, a block has 2**24."""
    q, k = (jax.ShapeDtypeStruct((2, 32768, heads, 8), jnp.bfloat16) for heads in (2, 1))

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (x.aval.size for x in equation.outvars)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)

    def loss(q, k, v):
        return attention(q, k, v, "B_xLHD", "B_xTKD").astype(jnp.float32).sum()

    def step(q, k, v, cached):
        lengths = jnp.zeros(2, jnp.int32)
        return cached_attention(q, k, v, cached, cached, "B_xLHD", "B_xLKD", "B_xTKD", lengths=lengths)

    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        for program in (jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, k), jax.make_jaxpr(step)(q, k, k, k)):
            found = list(sizes(program.jaxpr))
            assert blocks.Blocks.of(1, 2, 32768, 32768).queries == 2048
            assert 2**22 < max(found) <= blocks._BLOCK


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [("bfloat16", {}, "cudnn"), ("float32", {}, None), ("bfloat16", {"mask": np.ones((2, 16), bool)}, None)],
)
def test_a_gpu_runs_the_kernel_for_what_it_takes(dtype, options, expected, tiny_blocks, make_mesh, monkeypatch):
    """No GPU is needed to see which implementation is asked for; blocks ask for none."""
    asked, original = [], jax.nn.dot_product_attention

    def record(*arrays, implementation=None, **rest):
        asked.append(implementation)
        return original(*arrays, **rest)

    monkeypatch.setattr("gspmd.lowerings.in_force.device_kind", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    q, k, v = (jnp.asarray(x, dtype) for x in _arrays(2, 16, 16, 4, 2, size=8))
    with jax.set_mesh(make_mesh({"x": 1}, "auto")):
        got = attention(q, k, v, "BLHD", "BTKD", **options)
    assert asked == [expected] * (expected is not None)
    exact = plain(*(x.astype("float32") for x in (q, k, v)))
    np.testing.assert_allclose(got.astype("float32"), exact, atol=0.05 if dtype == "bfloat16" else 1e-5)
