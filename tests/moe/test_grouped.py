"""Grouped products against a loop over rows: values, gradients, and rows that nobody owns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.moe.dropless.grouped import grouped_matmul
from gspmd.moe.platform import BLOCKS, grouped_form

E, F = 3, 5
LARGE, SMALL = BLOCKS
SIZES = {
    "one expert": [7],
    "no rows": [0, 0],
    "a row": [0, 1, 0],
    "empty groups": [0, 4, 0, 0, 9, 0],
    "all in the first": [40, 0, 0],
    "all in the last": [0, 0, 40],
    "blocks and a bit": [LARGE + 1, 2 * LARGE - 1, 1, SMALL + 1, LARGE + SMALL],
    "whole blocks": [LARGE, SMALL, 2 * LARGE],
    "a block but one": [LARGE - 1, SMALL - 1],
}
by_sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
by_spare = pytest.mark.parametrize("spare", [0, 3], ids=["all owned", "rows beyond"])
by_form = pytest.mark.parametrize("form", ["blocks", "ragged"])


@partial(jax.jit, static_argnames="form")
def _both(rows, weights, sizes, cotangent, form):
    y, pullback = jax.vjp(lambda rows, weights: grouped_matmul(rows, weights, sizes, form=form), rows, weights)
    return y, *pullback(cotangent)


@np.errstate(invalid="ignore")  # numpy's products report what other code has left in the processor's flags
def _looped(rows, weights, sizes, cotangent):
    expert = np.repeat(np.arange(len(sizes)), sizes)
    y, to_rows, to_weights = np.zeros_like(cotangent), np.zeros_like(rows), np.zeros_like(weights)
    for r, x in enumerate(expert):
        y[r] = rows[r] @ weights[x]
        to_rows[r] = weights[x] @ cotangent[r]
        to_weights[x] += np.outer(rows[r], cotangent[r])
    return y, to_rows, to_weights


def _integers(sizes, spare):
    draw = np.random.default_rng(sum(sizes))
    shapes = (sum(sizes) + spare, E), (len(sizes), E, F), (sum(sizes) + spare, F)
    return [draw.integers(-4, 5, shape).astype(np.float32) for shape in shapes]


@pytest.mark.turns(12)
@by_form
@by_spare
@by_sizes
def test_integers_come_out_exactly(sizes, spare, form):
    rows, weights, cotangent = _integers(sizes, spare)
    found = _both(rows, weights, np.int32(sizes), cotangent, form)
    jax.tree.map(np.testing.assert_array_equal, found, _looped(rows, weights, sizes, cotangent))


@by_form
def test_what_nobody_owns_is_never_used(form):
    rows, weights, cotangent = _integers([2, 3], 4)
    rows[5:], cotangent[5:] = np.nan, np.nan
    found = _both(rows, weights, np.int32([2, 3]), cotangent, form)
    assert all(np.isfinite(array).all() for array in found)
    assert not np.any(found[0][5:])
    assert not np.any(found[1][5:])


@by_form
def test_bfloat16_is_accumulated_in_float32(form):
    draw, rows = np.random.default_rng(0), 20
    x = draw.standard_normal((rows, 512)).astype(jnp.bfloat16)
    weights = draw.standard_normal((2, 512, 4)).astype(jnp.bfloat16)
    cotangent = draw.standard_normal((rows, 4)).astype(jnp.bfloat16)
    found = _both(x, weights, np.int32([13, 7]), cotangent, form)
    wide = [np.asarray(array, np.float64) for array in (x, weights, cotangent)]
    wanted = _looped(wide[0], wide[1], [13, 7], wide[2])
    for array, exact in zip(found, wanted):
        assert array.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(array, np.float64), exact, rtol=2**-8, atol=1e-4)


def test_inside_a_shard_map(make_mesh):
    rows, weights, _ = _integers([5, 6, 2, 3], 0)

    def local(rows, weights, sizes):
        return grouped_matmul(rows, weights, sizes[0])

    sizes = np.int32([[5, 3], [2, 3]])
    with jax.set_mesh(make_mesh({"x": 2})):
        mapped = jax.shard_map(local, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False)
        found = jax.jit(mapped)(*(jax.device_put(a, jax.P("x")) for a in (rows, weights, sizes)))
    each = [_looped(rows[8 * n : 8 * n + 8], weights[2 * n : 2 * n + 2], sizes[n], np.zeros((8, F)))[0] for n in (0, 1)]
    np.testing.assert_array_equal(found, np.concatenate(each))


def test_faults_are_named():
    rows, weights = jnp.ones((4, 2)), jnp.ones((3, 2, 5))
    with pytest.raises(ValueError, match=r"form is 'padded'\.\n  Choose from ragged, blocks"):
        grouped_matmul(rows, weights, jnp.array([1, 1, 1]), form="padded")
    with pytest.raises(ValueError, match=r"rows \(4, 2\), weights \(3, 2, 5\), sizes \(2,\)"):
        grouped_matmul(rows, weights, jnp.array([1, 1]))


@pytest.mark.parametrize(("platform", "form"), [("cpu", "blocks"), ("gpu", "blocks"), ("tpu", "ragged")])
def test_the_compilers_own_grouped_product_is_taken_where_it_is_none_of_every_expert(platform, form, monkeypatch):
    monkeypatch.setattr("gspmd.moe.platform.current_platform", lambda: platform)
    assert grouped_form() == form
