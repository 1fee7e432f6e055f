"""Attention to a cache with a relative position bias, and to a cache alone, as a decoder attends to its encoder."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops import Buckets, cached_attention
from gspmd.ops._attention import blocks
from tests.ops.test_attention_bias import bucket
from tests.references.caches import Case, random_case

FEW = Buckets(count=8, distance=12)


def plain(q, new, cache, lengths, table=None, scale=0.5):
    """Every row, query and head by itself, with the bias of every key looked up."""
    out = np.zeros(q.shape)
    for b, i, h in np.ndindex(*q.shape[:3]):
        head = h * cache[0].shape[2] // q.shape[2]
        keys, values = (
            np.concatenate([old[b, : lengths[b], head], *(x[b, : i + 1, head] for x in fresh)]).astype(np.float64)
            for old, fresh in zip(cache, [new[:1], new[1:]])
        )
        logits = scale * keys @ q[b, i, h]
        if table is not None:
            logits = logits + [table[bucket(n - int(lengths[b]) - i, FEW), h] for n in range(len(keys))]
        weights = np.exp(logits - logits.max(initial=-1e30))
        out[b, i, h] = weights @ values / max(weights.sum(), 1e-30)
    return out


def check(case, mesh, place, lowering, of_table=None, alone=False):
    """Compare with plain numpy, and what is compiled with what is planned. Returns the plan."""
    q, *new = case.new
    table = None if of_table is None else np.random.default_rng(1).normal(size=(8, q.shape[2])).astype(np.float32)
    more = {} if table is None else {"bias_spec": of_table, "buckets": FEW}
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        operands = [place(mesh, x, spec) for x, spec in zip(case.operands, case.specs)]
        if alone:
            operands[1:3] = None, None
        placed = None if table is None else place(mesh, table, of_table)

        scale_spec = str(gspmd.Spec.parse(case.held).without("D"))
        given = case.lengths, placed, {name: place(mesh, x, scale_spec) for name, x in case.scales.items()}

        @jax.jit
        def attend(operands, lengths, bias, scales):
            specs = case.query, case.key, case.held
            return cached_attention(*operands, *specs, lengths=lengths, bias=bias, scale=0.5, **more, **scales)

        compiled = attend.lower(operands, *given).compile()
        planned = gspmd.trace(attend, operands, *given)
        got = compiled(operands, *given)
    want = plain(q, [] if alone else new, case.cache, case.lengths, table)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    if lowering != "xla":
        assert not gspmd.ledger(compiled, mesh).compare(planned).differing
    return {(kind, "".join(axes)): count for (kind, axes), (count, _) in planned.by_kind_and_axes().items()}


SIZES = {"B": 4, "L": 2, "T": 8, "H": 6, "K": 3, "D": 4}
PLACES = [
    ("B_xLH_yD", "B_xLK_yD", "B_xK_yTD"), ("BLH_yD", "BLK_yD", "BT_xK_yD"), ("BL_xH_yD", "BLKD", "B_xTK_yD"),
]  # fmt: skip


@pytest.mark.turns(2)
@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("specs", PLACES)
def test_with_a_bias(specs, lowering, axis_type, make_mesh, place):
    case = Case(np.random.default_rng(0), SIZES, specs)
    check(case, make_mesh({"x": 2, "y": 3}, axis_type), place, lowering, "RH_y")


def test_a_table_elsewhere_is_moved_to_the_heads(make_mesh, place):
    case = Case(np.random.default_rng(0), SIZES, PLACES[0])
    assert check(case, make_mesh({"x": 2, "y": 3}), place, "blocking", "R_xH_y") == {("all-gather", "x"): 1}


@pytest.mark.turns(2)
@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("specs", PLACES)
def test_to_a_cache_alone(specs, lowering, axis_type, make_mesh, place):
    """A row whose cache is empty gets 0."""
    case = Case(np.random.default_rng(0), SIZES, specs)
    check(case, make_mesh({"x": 2, "y": 3}, axis_type), place, lowering, alone=True)


@pytest.mark.turns(2)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_random_placements(seed, alone, make_mesh, place):
    mesh, case = random_case(seed)
    lowering, axes = ("blocking", "xla", "looped")[seed % 3], ("explicit", "auto")[seed // 3 % 2]
    check(case, make_mesh(mesh, axes), place, lowering, None if seed % 5 == 0 else "RH", alone)


@pytest.mark.turns(1)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_in_blocks(lowering, alone, make_mesh, place, monkeypatch):
    jax.clear_caches()
    for name, value in (("LARGEST", 64), ("_BLOCK", 128), ("_LENGTHS", (2, 5)), ("_MULTIPLES", (2, 1))):
        monkeypatch.setattr(blocks, name, value)
    case = Case(np.random.default_rng(0), SIZES | {"L": 7, "T": 14}, ("B_xLH_yD", "B_xLK_yD", "BT_xK_yD"))
    check(case, make_mesh({"x": 2, "y": 3}), place, lowering, "RH_y", alone)
    jax.clear_caches()


@pytest.mark.parametrize("alone", [False, True])
def test_one_query_of_each_row_on_a_tpu(alone, make_mesh, place, monkeypatch):
    """One row goes with a second, which has a position of its own and is dropped."""
    monkeypatch.setattr("gspmd.lowerings.in_force.device_kind", lambda: "TPU v4")
    jax.clear_caches()
    case = Case(np.random.default_rng(0), SIZES | {"L": 1, "K": 6, "T": 16}, PLACES[0])
    check(case, make_mesh({"x": 2, "y": 3}), place, "blocking", "RH_y", alone)
    jax.clear_caches()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": None}, "k or v is missing.\n  Give both, or None for both"),
        ({"buckets": None}, "buckets is missing"),
        ({"bias": np.ones((8, 5))}, "H of the bias must have size 6, the number of query heads, but the size is 5."),
    ],
)
def test_refuses_what_does_not_fit(change, message, make_mesh):
    q, cache = jnp.ones((4, 2, 6, 4)), jnp.ones((4, 3, 8, 4))
    given = {"k": q[:, :, :3], "v": q[:, :, :3], "bias": np.ones((8, 6)), "buckets": FEW} | change
    k, v = given.pop("k"), given.pop("v")
    specs = "BLHD", "BLKD", "BKTD"
    with jax.set_mesh(make_mesh({"x": 1}, "auto")), pytest.raises(gspmd.SpecError, match=re.escape(message)):
        cached_attention(q, k, v, cache, cache, *specs, lengths=jnp.ones(4, int), bias_spec="RH", **given)


def test_refuses_a_cache_of_other_heads(make_mesh):
    q, cache = jnp.ones((4, 2, 6, 4)), jnp.ones((4, 5, 8, 4))
    message = "5 key heads do not divide 6 heads."
    with jax.set_mesh(make_mesh({"x": 1}, "auto")), pytest.raises(gspmd.SpecError, match=re.escape(message)):
        cached_attention(q, None, None, cache, cache, "BLHD", "BLKD", "BKTD", lengths=jnp.ones(4, int))
