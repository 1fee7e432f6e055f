"""Attention of sequences that are cut over devices: a ring of permutes, or gathered keys, in zigzag order."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.hardware.chips import chip
from gspmd.lowerings.program import Context
from gspmd.ops import attention, zigzag_positions
from gspmd.ops._attention import circulation
from gspmd.ops._attention.zigzag import in_order, zigzag
from gspmd.planner.graph.resharding import move
from gspmd.tracing.compilers import HOST
from tests.ops.test_attention import CUBE, FLAT, plain

RNG = np.random.default_rng(0)
ROW = {"x": 4, "y": 2, "z": 1}
CASES = {
    # query heads, key heads, length, mesh, query spec, key spec
    "multihead": (4, 4, 16, ROW, "BL_xH_yD", "BT_xK_yD"),
    "two devices": (2, 2, 8, CUBE, "B_xL_yHD", "B_xT_yKD"),
    "an odd ring": (2, 2, 12, {"x": 3, "y": 2, "z": 1}, "B_yL_xHD", "B_yT_xKD"),
    "two axes": (2, 2, 16, FLAT, "BL_yxHD", "BT_yxKD"),
    "grouped, keys replicated": (8, 2, 8, CUBE, "BL_xH_yzD", "BT_xKD"),
    "each device one of two key heads": (8, 2, 8, {"x": 2, "y": 4}, "BL_xH_yD", "BT_xKD"),
    "multiquery, an axis of one": (4, 1, 16, ROW, "BL_zxH_yD", "BT_zxKD"),
}
FAST = {("multihead", "blocking"), ("an odd ring", "looped"), ("each device one of two key heads", "looped"),
        ("two devices", "xla")}  # fmt: skip
PRODUCT = [
    pytest.param(case, lowering, marks=() if (case, lowering) in FAST else pytest.mark.slow)
    for case in CASES
    for lowering in ("blocking", "looped", "xla")
]


def _arrays(case):
    heads, key_heads, length = CASES[case][:3]
    shapes = [(4, length, heads, 4)] + [(4, length, key_heads, 4)] * 2
    return tuple(RNG.normal(size=shape).astype(np.float32) for shape in shapes)


def _devices(case):
    mesh, key = CASES[case][3], gspmd.Spec.parse(CASES[case][5])
    return int(np.prod([mesh[axis] for axis in key.axes_of("T")]))


def shuffled(devices, length):
    """Return the place of each token, from the definition: device i has chunks i and 2n - 1 - i."""
    size, order = length // (2 * devices), []
    for device in range(devices):
        for chunk in (device, 2 * devices - 1 - device):
            order += range(chunk * size, (chunk + 1) * size)
    return np.array(order)


def in_zigzag(devices, **more):
    """Plain attention of arrays that lie in zigzag order."""

    def f(q, k, v, mask=None):
        order = shuffled(devices, q.shape[1])
        back = np.argsort(order)
        mask = None if mask is None else mask[:, back]
        return plain(q[:, back], k[:, back], v[:, back], mask, **more)[:, order]

    return f


@pytest.mark.turns(2)
@pytest.mark.parametrize(("case", "lowering"), PRODUCT)
def test_value_gradients_and_collectives(case, lowering, axis_type, check_form):
    *_, mesh, query, key = CASES[case]
    planned = check_form(
        lambda q, k, v: attention(q, k, v, query, key), in_zigzag(_devices(case)), _arrays(case), (query, key, key),
        query, mesh=mesh, axis_type=axis_type, lowering=lowering, wrt=(0, 1, 2),
    )  # fmt: skip
    axes = tuple(sorted(axis for axis in gspmd.Spec.parse(key).axes_of("T") if mesh[axis] > 1))
    if lowering == "blocking":
        assert planned["all-gather", axes] == 2  # the gradient uses those of the value
        assert planned["reduce-scatter", axes] == 2
    elif lowering == "looped":
        assert {kind for kind, on in planned if set(on) & set(axes)} == {"collective-permute"}


def test_values_of_another_width(check_form):
    """They go round with the keys, padded to their width."""
    case = next(iter(CASES))
    *_, mesh, query, key = CASES[case]
    q, k, v = _arrays(case)
    check_form(
        lambda q, k, v: attention(q, k, v, query, key), in_zigzag(_devices(case)), (q, k, v[..., :3]),
        (query, key, key), query, mesh=mesh, axis_type="explicit", lowering="looped", wrt=(0, 1, 2),
    )  # fmt: skip


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "lowering", ["looped", *(pytest.param(n, marks=pytest.mark.slow) for n in ("blocking", "xla"))]
)
def test_padding(lowering, causal, axis_type, check_form):
    """A mask lies as the keys do; a query that sees nothing gets 0, and adds nothing to gradients."""
    *_, mesh, query, key = CASES["multihead"]
    mask = RNG.random((4, 16)) < np.array([[1.0], [0.8], [0.3], [0.1]])
    check_form(
        lambda q, k, v, mask: attention(q, k, v, query, key, mask=mask, causal=causal),
        in_zigzag(4, causal=causal), (*_arrays("multihead"), mask), (query, key, key, "BT_x"), query,
        mesh=mesh, axis_type=axis_type, lowering=lowering, wrt=(0, 1, 2),
    )  # fmt: skip


@pytest.mark.parametrize("lowering", ["looped", pytest.param("blocking", marks=pytest.mark.slow)])
def test_the_ledger_is_the_plan_and_no_device_has_more_work_than_another(lowering, make_mesh, place):
    query, key, arrays = "BL_xHD", "BT_xKD", _arrays("multihead")
    mesh, chunk = make_mesh({"x": 4}), 4 * 4 * 4 * 4 * 4

    def both(g, *arrays):
        y, transpose = jax.vjp(jax.checkpoint(lambda *each: attention(*each, query, key)), *arrays)
        return y, transpose(g)

    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        placed = [place(mesh, x, spec) for x, spec in zip((arrays[0], *arrays), (query, query, key, key))]
        program = jax.jit(both)
        ledger, plan = gspmd.ledger(program.lower(*placed).compile()), gspmd.trace(program, *placed)
    assert ledger.compare(plan).agrees
    # Of keys and of values three chunks come in the value, and three go home. In the gradient they come again: but for
    # the first one of a ring, and all that is gathered, which the compiler finds in the value. A compiler that keeps
    # recomputation apart finds it there, where the three come once more.
    again = not HOST.merges_across_barriers
    assert plan.wire_bytes == 2 * chunk * (3 + 3 + 3 * again + (2 if lowering == "looped" else 0))
    # Of 8 by 8 half chunks a device needs 2·4 and the halves of two, which it computes whole, with the one above them:
    # 10 of the 16 that its queries have, in the two products of the value, which may be computed again, and in the
    # gradient's five. With gathered keys, or beside what is computed again, the compiler finds the logits of its own
    # chunk.
    half = 2 * 4 * 4 * 2 * 2 * 4
    found = 4 if again or lowering == "blocking" else 0
    assert ledger.flops == ((7 + 2 * again) * 10 - found) * half


def test_half_precision_is_merged_in_float32(make_mesh):
    query, key, arrays = "BL_xHD", "BT_xKD", _arrays("multihead")
    with jax.set_mesh(make_mesh({"x": 4}, "auto")), gspmd.lowering("looped"):
        y = jax.jit(lambda *a: attention(*a, query, key))(*(x.astype("bfloat16") for x in arrays))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), in_zigzag(4)(*arrays), atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["looped", "blocking"])
def test_under_vmap_and_of_nothing(lowering, make_mesh, place):
    query, key, arrays = "BL_xHD", "BT_xKD", [x.reshape(2, 2, *x.shape[1:]) for x in _arrays("multihead")]

    def slopes(f):
        return jax.jit(jax.vmap(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1, 2))))

    want = slopes(in_zigzag(4))(*arrays)
    mesh = make_mesh({"x": 4})
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        placed = [place(mesh, x, spec) for x, spec in zip(arrays, ("NBL_xHD", "NBT_xKD", "NBT_xKD"))]
        got = slopes(lambda *a: attention(*a, query, key))(*placed)
        nothing = [place(mesh, np.ones((0, 8, 2, 2), np.float32), query)] * 3
        none = jax.jit(jax.grad(lambda *a: attention(*a, query, key).sum(), argnums=(0, 1, 2)))(*nothing)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)
    assert [x.shape for x in none] == [(0, 8, 2, 2)] * 3


def test_auto_takes_the_ring_where_products_hide_it():
    mesh, v4 = {"x": 16, "y": 4}, chip("tpu-v4")

    def looped(queries, key_heads, lowering="auto"):
        ctx = Context(tuple(mesh.items()), v4, True, lowering)
        rows, length, _, size = queries
        key = gspmd.Spec.parse("BT_xKD")
        whole = {"B": rows, "T": length * 16, "K": key_heads, "D": size}
        there, back = key.with_axes("T", ()), key.with_axes("T", ()).with_partial(("x",))
        steps = [*move(key, there, whole, mesh, 2, v4, "k")] * 4 + [*move(back, key, whole, mesh, 2, v4, "k")] * 2
        return circulation.is_looped(ctx, ("x",), queries, length // 2, "bfloat16", steps)

    assert looped((1, 8192, 16, 128), 2)
    assert not looped((64, 8, 16, 128), 16)
    assert looped((64, 8, 16, 128), 16, "looped")
    assert not looped((1, 8192, 16, 128), 2, "blocking")


@pytest.mark.parametrize(
    ("query", "key", "length", "options", "message"),
    [
        (
            "BL_xHD",
            "BT_xKD",
            12,
            {},
            "size 12, and zigzag order cuts it into 8 chunks",
        ),
        (
            "BL_xHD",
            "BT_xKD",
            16,
            {"offset": 1},
            "offset is not 0.\n  Leave out offset",
        ),
        (
            "BL_yHD",
            "BT_xKD",
            16,
            {},
            "T is sharded over x, and has to be over y: keys that are sharded along",
        ),
        ("BLHD", "BT_xKD", 16, {}, "T is sharded over x, and has to be unsharded: every device attends over the whole"),
    ],
)
def test_what_cannot_go_round(query, key, length, options, message, make_mesh, place):
    mesh = make_mesh({"x": 4, "y": 2})
    q, k = (place(mesh, np.ones((2, length, 2, 4), np.float32), spec) for spec in (query, key))
    with jax.set_mesh(mesh), pytest.raises(gspmd.PlanError, match=re.escape(message)):
        attention(q, k, k, query, key, **options)


def test_as_many_queries_as_keys(make_mesh, place):
    mesh = make_mesh({"x": 4})
    q, k = (place(mesh, np.ones((2, n, 2, 4), np.float32), spec) for n, spec in ((8, "BL_xHD"), (16, "BT_xKD")))
    with jax.set_mesh(mesh), pytest.raises(gspmd.SpecError, match="queries have length 8 and keys have length 16"):
        attention(q, k, k, "BL_xHD", "BT_xKD")


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_zigzag_order(devices):
    x = np.arange(24).reshape(1, 24)
    assert zigzag_positions(24, devices).tolist() == (shuffled(devices, 24) if devices > 1 else x[0]).tolist()
    np.testing.assert_array_equal(zigzag(jnp.asarray(x), devices)[0], zigzag_positions(24, devices))
    np.testing.assert_array_equal(in_order(zigzag(jnp.asarray(x), devices), devices), x)


def test_zigzag_order_needs_two_chunks_for_a_device():
    with pytest.raises(gspmd.PlanError, match="of 12 tokens into zigzag order over 4 devices"):
        zigzag_positions(12, 4)
