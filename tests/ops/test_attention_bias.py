"""T5's relative position bias: its buckets, and the table's value and gradient in every placement."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops import Buckets, attention
from tests.ops.test_attention_segments import CUBE, ROW, arrays, order_of, segments

RNG = np.random.default_rng(0)
FEW = Buckets(count=8, distance=12)
BOTH = Buckets(count=8, distance=12, bidirectional=True)
SUM = "all-reduce"
CASES = {
    # query heads, key heads, queries, keys, mesh, query spec, key spec, bias spec, whether causal, the bias's steps
    "rows and heads": (
        6, 3, 10, 10, {"x": 2, "y": 3}, "B_xLH_yD", "B_xTK_yD", "RH_y", True, {(SUM, ("x",)): 1},
    ),
    "odd heads, table sharded by buckets": (
        3, 3, 6, 10, {"x": 2, "y": 2}, "B_xLHD", "B_xTKD", "R_yH", False, {(SUM, ("x",)): 1, ("all-gather", ("y",)): 1},
    ),
    "queries split along the sequence": (
        4, 2, 8, 8, CUBE, "B_zL_xH_yD", "B_zTK_yD", "RH_y", True, {(SUM, ("x", "z")): 1},
    ),
    "each device one of two key heads": (8, 2, 8, 8, {"x": 4}, "BLH_xD", "BTKD", "RH_x", True, {}),
    "a ring": (3, 3, 16, 16, ROW, "BL_xHD", "BT_xKD", "RH", True, {(SUM, ("x",)): 1}),
    "a ring of two key heads": (8, 2, 16, 16, {"x": 2, "y": 4}, "BL_xH_yD", "BT_xKD", "RH_y", True, {(SUM, ("x",)): 1}),
    "a ring without order": (6, 3, 16, 16, ROW, "B_yL_xHD", "B_yT_xKD", "RH", False, {(SUM, ("x", "y")): 1}),
}  # fmt: skip
PRODUCT = [(case, lowering) for case in CASES for lowering in ("blocking", "xla", "looped")]


def bucket(relative, buckets):
    """T5's bucket, one number at a time."""
    count, after = buckets.count, 0
    if buckets.bidirectional:
        count //= 2
        after, relative = count * (relative > 0), -abs(relative)
    away, single = max(-relative, 0), count // 2
    if away < single:
        return after + away
    further = np.log(np.float32(away / single)) / np.log(buckets.distance / single) * (count - single)
    return after + min(single + int(further), count - 1)


def biased(q, k, v, table, buckets, causal, positions=None, scale=1.0, pair=None):
    """Attention written out, with the bias looked up for every query and key by itself."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    of_queries, of_keys = (np.arange(x.shape[1]) for x in (q, k)) if positions is None else (positions, positions)
    chosen = np.array([[bucket(int(j - i), buckets) for j in of_keys] for i in of_queries])
    logits = scale * jnp.einsum("blhd,bthd->bhlt", q, k) + jnp.moveaxis(table[chosen], 2, 0)[None]
    seen = np.ones((1, 1, *chosen.shape), bool)
    if causal:
        seen = seen & (of_queries[:, None] >= of_keys[None])
    if pair is not None:
        seen = seen & ((pair[0][:, None, :, None] == pair[1][:, None, None, :]) & (pair[1] != 0)[:, None, None, :])
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1), 0)
    return jnp.einsum("bhlt,bthd->blhd", weights, v)


def check(case, lowering, axis_type, check_form):
    heads, key_heads, queries, keys, mesh, query, key, of_table, causal, _ = CASES[case]
    buckets, order = FEW if causal else BOTH, order_of(mesh, query, key, keys, causal)
    more = {"causal": causal, "scale": 1.0, "bias_spec": of_table, "buckets": buckets}
    table = RNG.normal(size=(buckets.count, heads)).astype(np.float32)
    return check_form(
        lambda q, k, v, table: attention(q, k, v, query, key, bias=table, **more),
        lambda q, k, v, table: biased(q, k, v, table, buckets, causal, order),
        (*arrays(heads, key_heads, queries, keys), table), (query, key, key, of_table), query,
        mesh=mesh, axis_type=axis_type, lowering=lowering, wrt=(0, 1, 2, 3),
    )  # fmt: skip


@pytest.mark.turns(2)
@pytest.mark.parametrize(("case", "lowering"), PRODUCT)
def test_value_and_gradients(case, lowering, axis_type, check_form):
    planned = check(case, lowering, axis_type, check_form)
    if lowering == "blocking":
        assert CASES[case][-1].items() <= planned.items()


@pytest.mark.turns(1)
@pytest.mark.parametrize(("case", "lowering"), PRODUCT)
def test_in_blocks(case, lowering, axis_type, check_form, tiny_blocks):
    check(case, lowering, axis_type, check_form)


@pytest.mark.turns(1)
@pytest.mark.parametrize("lowering", ["blocking", "xla", "looped"])
@pytest.mark.parametrize(
    ("query", "key", "queries", "causal"), [("B_xLH_yD", "B_xTK_yD", 6, False), ("BL_xH_yD", "BT_xK_yD", 16, True)]
)
def test_with_segments_and_a_mask(query, key, queries, causal, lowering, axis_type, check_form):
    """All terms at once. Positions are counted through the packed row."""
    mesh, buckets = {"x": 2, "y": 2}, FEW if causal else BOTH
    order = order_of(mesh, query, key, 16, causal)
    order = np.arange(16) if order is None else order
    of_queries, of_keys = segments(queries, 16)
    mask = RNG.random((4, 16)) < 0.7
    more = {"causal": causal, "scale": 0.5, "bias_spec": "RH_y", "buckets": buckets}

    def attend(q, k, v, table, of_queries, of_keys, mask):
        return attention(q, k, v, query, key, bias=table, segments=(of_queries, of_keys), mask=mask, **more)

    def plain(q, k, v, table, of_queries, of_keys, mask):
        pair = of_queries, jnp.where(mask, of_keys, 0)
        return biased(q, k, v, table, buckets, causal, order if causal else None, 0.5, pair)

    given = (*arrays(4, 2, queries, 16), RNG.normal(size=(8, 4)).astype(np.float32))
    tokens = (of_queries[:, order] if causal else of_queries, of_keys[:, order], mask)
    first, second = query.partition("H")[0], key.partition("K")[0]
    check_form(
        attend, plain, (*given, *tokens), (query, key, key, "RH_y", first, second, second), query,
        mesh=mesh, axis_type=axis_type, lowering=lowering, wrt=(0, 1, 2, 3),
    )  # fmt: skip


def test_the_offset_moves_the_queries(make_mesh):
    q, k, v = arrays(2, 2, 10, 10)
    more = {"bias": RNG.normal(size=(8, 2)), "bias_spec": "RH", "buckets": FEW}
    with jax.set_mesh(make_mesh({"x": 1}, "auto")):
        whole = attention(q, k, v, "BLHD", "BTKD", **more)
        last = attention(q[:, 7:], k, v, "BLHD", "BTKD", offset=7, **more)
    np.testing.assert_allclose(last, whole[:, 7:], rtol=1e-5, atol=1e-5)


def _program(lowering, mesh, query, key, of_table, place):
    given = [
        place(mesh, np.random.default_rng(n).normal(size=(4, 8, 4, 4)).astype(np.float32), spec)
        for n, spec in enumerate((query, query, key, key))
    ]
    table = jax.device_put(
        np.ones((8, 4), np.float32), jax.NamedSharding(mesh, gspmd.Spec.parse(of_table).partition_spec())
    )

    def both(g, *given):
        attend = lambda q, k, v, bias: attention(q, k, v, query, key, bias=bias, bias_spec=of_table, buckets=FEW)  # noqa: E731
        y, transpose = jax.vjp(attend, *given)
        return y, transpose(g)

    program = jax.jit(both)
    with gspmd.lowering(lowering):
        compiled = program.lower(*given, table).compile()
        return gspmd.ledger(compiled), gspmd.trace(program, *given, table), compiled(*given, table)


@pytest.mark.parametrize(
    ("query", "key", "of_table", "lowering"),
    [("BL_xHD", "BT_xKD", "RH", "looped"), ("B_yL_xHD", "B_yTKD", "RH", "blocking")],
)
def test_the_ledger_is_the_plan(query, key, of_table, lowering, make_mesh, place):
    mesh = make_mesh({"x": 2, "y": 2})
    with jax.set_mesh(mesh):
        ledger, plan, _ = _program(lowering, mesh, query, key, of_table, place)
    assert ledger.compare(plan).agrees
    axes = tuple(axis for axis in ("x", "y") if f"_{axis}" in query)
    of_bias = [step for step in plan.steps if step.operand == "gradient of bias"]
    assert [(step.kind, step.axes) for step in of_bias] == [(SUM, axes)]


def test_a_reduced_table_keeps_its_gradient_a_partial_sum(make_mesh, place):
    """Under every lowering, since annotations cannot ask a compiler for it."""
    mesh = make_mesh({"x": 2, "y": 2})
    with jax.set_mesh(mesh):
        _, plan, (_, (*_, want)) = _program("blocking", mesh, "B_xLH_yD", "B_xTK_yD", "RH_y", place)
        assert (SUM, ("x",)) in plan.by_kind_and_axes()
        for lowering in ("blocking", "xla"):
            _, plan, (_, (*_, got)) = _program(lowering, mesh, "B_xLH_yD", "B_xTK_yD", "RH_y reduced-x", place)
            assert plan.by_kind_and_axes() == {}
            assert jax.typeof(got).sharding.spec.unreduced == {"x"}
            settled = gspmd.reshard(got, "RH_y partialsum-x -> RH_y")
            np.testing.assert_allclose(settled, want, rtol=1e-5, atol=1e-5)


def test_a_narrow_table_is_added_in_float32(make_mesh):
    q, k, v = arrays(2, 2, 6, 6)
    table = RNG.normal(size=(8, 2)).astype(jnp.bfloat16)
    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        more = {"bias_spec": "RH", "buckets": FEW, "scale": 1.0}
        y, transpose = jax.vjp(lambda table: attention(q, k, v, "B_xLHD", "B_xTKD", bias=table, **more), table)
        (slope,) = transpose(jnp.ones_like(y))
    np.testing.assert_allclose(y, biased(q, k, v, table.astype(np.float32), FEW, True), rtol=1e-5, atol=1e-5)
    assert slope.dtype == jnp.bfloat16


@pytest.mark.slow
def test_higher_derivatives_and_vmap_in_blocks(tiny_blocks, make_mesh):
    given = [np.stack([x, 2 * x]) for x in (*arrays(2, 1, 7, 7), RNG.normal(size=(8, 2)).astype(np.float32))]

    def slopes(f):
        inner = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=(0, 3))
        return jax.jit(jax.vmap(jax.grad(lambda *a: sum(jnp.sum(jnp.cos(x)) for x in inner(*a)), argnums=(0, 1, 2, 3))))

    want = slopes(lambda *a: biased(*a, FEW, True))(*given)
    with jax.set_mesh(make_mesh({"x": 1}, "auto")), gspmd.lowering("xla"):
        attend = lambda q, k, v, t: attention(q, k, v, "BLHD", "BTKD", bias=t, bias_spec="RH", buckets=FEW, scale=1.0)  # noqa: E731
        got = slopes(attend)(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), got, want)


# -- buckets ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("count", "distance"), [(32, 128), (8, 12), (64, 1000), (16, 20), (128, 2048)])
def test_buckets_are_those_of_transformers(count, distance, bidirectional):
    t5, torch = (pytest.importorskip(name) for name in ("transformers.models.t5.modeling_t5", "torch"))
    relative = np.arange(-3 * distance, 3 * distance + 1)
    more = {"bidirectional": bidirectional, "num_buckets": count, "max_distance": distance}
    want = t5.T5Attention._relative_position_bucket(torch.tensor(relative), **more)
    got = Buckets(count, distance, bidirectional).of(jnp.asarray(relative))
    np.testing.assert_array_equal(got, want.numpy())
    assert set(np.unique(got)) <= set(range(count))


@pytest.mark.parametrize("buckets", [FEW, BOTH, Buckets(), Buckets(bidirectional=True)])
def test_buckets_one_at_a_time(buckets):
    relative = np.arange(-200, 201)
    np.testing.assert_array_equal(buckets.of(relative), [bucket(int(each), buckets) for each in relative])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 7}, "the number of buckets is 7.\n  Use a multiple of 2"),
        ({"count": 6, "bidirectional": True}, "the number of buckets is 6.\n  Use a multiple of 4"),
        ({"distance": 16}, "the largest distance is 16, and 16 buckets hold one distance each"),
        ({"bidirectional": 1}, "bidirectional is 1.\n  Pass True or False."),
    ],
)
def test_refuses_buckets_that_hold_nothing(given, message):
    with pytest.raises(gspmd.PlanError, match=re.escape(message)):
        Buckets(**given)


# -- what does not fit ------------------------------------------------------------------------------------------------

TABLE = np.ones((8, 4), np.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"bias": TABLE, "bias_spec": "RH_y"},
            "has bias, bias_spec and buckets; buckets is missing.\n  Give all three.",
        ),
        ({"buckets": FEW}, "bias and bias_spec are missing"),
        ({"bias": TABLE, "bias_spec": "RH", "buckets": 8}, "buckets are int.\n  Pass gspmd.ops.Buckets("),
        (
            {"bias": TABLE[:, :3], "bias_spec": "RH", "buckets": FEW},
            "H of the bias must have size 4, the number of query heads, but the size is 3.",
        ),
        (
            {"bias": TABLE[:6], "bias_spec": "RH", "buckets": FEW},
            "R of the bias must have size 8, the number of buckets, but the size is 6.",
        ),
        ({"bias": TABLE, "bias_spec": "RK", "buckets": FEW}, "'RK' is not the spec of a bias"),
        ({"bias": TABLE.T, "bias_spec": "HR", "buckets": FEW}, "'HR' is not the spec of a bias"),
        ({"bias": TABLE, "bias_spec": "RH_w", "buckets": FEW}, "the mesh has no axis w"),
    ],
)
def test_refuses_a_bias_that_does_not_fit(given, message, make_mesh):
    mesh = make_mesh({"x": 2, "y": 2}, "auto")
    with jax.set_mesh(mesh), pytest.raises(gspmd.SpecError, match=re.escape(message)):
        attention(*arrays(4, 2, 8, 8), "B_xLH_yD", "B_xTK_yD", **given)
