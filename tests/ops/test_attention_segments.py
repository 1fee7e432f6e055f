"""Attention in segments: packed documents apart, in every placement, and padding that nothing depends on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops import attention
from tests.ops.test_attention_ring import shuffled

RNG = np.random.default_rng(0)
CUBE, ROW = {"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2}
CASES = {
    # query heads, key heads, queries, keys, mesh, query spec, key spec, whether causal
    "rows and heads": (6, 3, 10, 10, {"x": 2, "y": 3}, "B_xLH_yD", "B_xTK_yD", True),
    "an encoder's keys": (3, 3, 6, 10, CUBE, "B_xLHD", "B_xTKD", False),
    "queries split along the sequence": (4, 2, 8, 8, CUBE, "BL_xH_yD", "BTK_yD", True),
    "a ring": (3, 3, 16, 16, ROW, "BL_xHD", "BT_xKD", True),
    "a ring to a source": (6, 3, 16, 24, ROW, "B_yL_xHD", "B_yT_xKD", False),
}
PRODUCT = [(case, lowering) for case in CASES for lowering in ("blocking", "xla", "looped")]


def in_segments(q, k, v, of_queries, of_keys, causal):
    """Attention written out, with a logit of -1e30 for every key that is not seen."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("blhd,bthd->bhlt", q, k) / np.sqrt(q.shape[3])
    seen = (of_queries[:, None, :, None] == of_keys[:, None, None, :]) & (of_keys != 0)[:, None, None, :]
    if causal:
        seen &= np.tri(*logits.shape[2:], dtype=bool)[None, None]
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1), 0)
    return jnp.einsum("bhlt,bthd->blhd", weights, v)


def arrays(heads, key_heads, queries, keys, size=4):
    shapes = [(4, queries, heads, size)] + [(4, keys, key_heads, size)] * 2
    return tuple(RNG.normal(size=shape).astype(np.float32) for shape in shapes)


def segments(queries, keys):
    """Two documents and padding at the end, of other lengths in each row; one row is nothing but padding."""
    borders = np.array([[3, 5], [2, 5], [0, 0], [1, 3]])
    return tuple(
        np.where(at < first, 1, np.where(at < last, 2, 0)).astype(np.int32)
        for size in (queries, keys)
        for at, (first, last) in [(np.arange(size)[None], (borders * size // 5).T[..., None])]
    )


def in_order_of(order, function):
    """The function of arrays that lie in another order along their second dimension."""
    if order is None:
        return function
    back = np.argsort(order)
    return lambda *given: function(*(x[:, back] for x in given))[:, order]


def order_of(mesh, query, key, length, causal):
    cut = gspmd.Spec.parse(key).axes_of("T")
    return shuffled(mesh[cut[0]], length) if cut and causal else None


def check(case, lowering, axis_type, check_form):
    heads, key_heads, queries, keys, mesh, query, key, causal = CASES[case]
    order = order_of(mesh, query, key, keys, causal)
    of_queries, of_keys = segments(queries, keys)
    if order is not None:
        of_queries, of_keys = of_queries[:, order], of_keys[:, order]
    first, second = (str(gspmd.Spec(s.dims[:2], s.axes[:2])) for s in map(gspmd.Spec.parse, (query, key)))
    return check_form(
        lambda q, k, v, *pair: attention(q, k, v, query, key, causal=causal, segments=pair),
        in_order_of(order, lambda *given: in_segments(*given, causal)),
        (*arrays(heads, key_heads, queries, keys), of_queries, of_keys), (query, key, key, first, second), query,
        mesh=mesh, axis_type=axis_type, lowering=lowering, wrt=(0, 1, 2),
    )  # fmt: skip


@pytest.mark.turns(1)
@pytest.mark.parametrize(("case", "lowering"), PRODUCT)
def test_value_and_gradients(case, lowering, axis_type, check_form):
    check(case, lowering, axis_type, check_form)


@pytest.mark.turns(1)
@pytest.mark.parametrize(("case", "lowering"), PRODUCT)
def test_in_blocks(case, lowering, axis_type, check_form, tiny_blocks):
    check(case, lowering, axis_type, check_form)


def test_two_documents_in_a_row_are_as_each_alone(make_mesh):
    first, second = arrays(4, 2, 5, 5), arrays(4, 2, 3, 3)
    packed = [np.concatenate(pair, axis=1) for pair in zip(first, second)]
    pair = (np.repeat([[1, 1, 1, 1, 1, 2, 2, 2]], 4, axis=0),) * 2
    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        attend = jax.jit(lambda *given, **more: attention(*given, "B_xLHD", "B_xTKD", **more))
        together = attend(*packed, segments=pair)
        alone = [attend(*each) for each in (first, second)]
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), rtol=1e-5, atol=1e-5)


def _slopes(attend):
    def both(g, q, k, v, *more):
        y, transpose = jax.vjp(lambda *given: attend(*given, *more), q, k, v)
        return y, *transpose(g)

    return jax.jit(both)


@pytest.mark.parametrize("lowering", ["blocking", "xla", "looped"])
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("by", ["segments", "mask"])
@pytest.mark.turns(2)
def test_padding_changes_no_bit(by, in_blocks, lowering, make_mesh, place, request):
    """NaN and infinity behind padding: in keys, in values, and with segments in queries and their cotangents too."""
    if in_blocks:
        request.getfixturevalue("tiny_blocks")
    query, key = ("BL_xHD", "BT_xKD") if lowering == "looped" else ("B_xLHD", "B_xTKD")
    q, k, v = arrays(2, 2, 16, 16)
    g, mesh = arrays(2, 2, 16, 16)[0], make_mesh({"x": 4})
    real = segments(16, 16)[0][:, shuffled(4, 16) if lowering == "looped" else slice(None)]
    if by == "segments":
        program = _slopes(lambda q, k, v, s: attention(q, k, v, query, key, segments=(s, s)))
    else:
        program = _slopes(lambda q, k, v, s: attention(q, k, v, query, key, mask=s != 0))
    found = []
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        for garbage in (7.0, np.nan, np.inf):
            hide = lambda x: np.where(real[..., None, None] != 0, x, np.float32(garbage))  # noqa: E731, B023
            given = [hide(g), hide(q), hide(k), hide(v)] if by == "segments" else [g, q, hide(k), hide(v)]
            placed = [place(mesh, x, spec) for x, spec in zip(given, (query, query, key, key))]
            found.append(program(*placed, place(mesh, real, str(gspmd.Spec.parse(query))[:-2].removesuffix("H"))))
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.view(jnp.int32), b.view(jnp.int32)), found[0], other)
    y, d_q, d_k, d_v = (np.array(x)[real == 0] for x in found[0])
    assert not d_k.any()
    assert not d_v.any()
    if by == "segments":
        assert not y.any()
        assert not d_q.any()


def test_the_ledger_of_a_ring_is_its_plan(make_mesh, place):
    """The segments of the keys are gathered once, four bytes each; nothing else is added to the ring."""
    query, key, mesh = "BL_xHD", "BT_xKD", make_mesh({"x": 4})
    of_tokens = segments(16, 16)[0]

    def sent(*more):
        with jax.set_mesh(mesh), gspmd.lowering("looped"):
            given = [place(mesh, x, spec) for x, spec in zip(arrays(3, 3, 16, 16), (query, key, key))]
            program = jax.jit(lambda q, k, v, *pair: attention(q, k, v, query, key, segments=pair or None))
            given += [place(mesh, x, "BL_x") for x in more]
            ledger, plan = gspmd.ledger(program.lower(*given).compile()), gspmd.trace(program, *given)
        assert ledger.compare(plan).agrees
        return plan.wire_bytes

    assert sent(of_tokens, of_tokens) == sent() + 3 * of_tokens.nbytes // 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (np.ones((4, 6), int), None),
            "segments are not a pair.\n  Give one array for the queries and one for the keys",
        ),
        (np.ones((4, 6), int), "segments are not a pair"),
        (
            (np.ones((4, 6), int), np.ones((4, 6), int)),
            "the segments of the keys must have shape (4, 8), but the shape is (4, 6).",
        ),
        (
            (np.ones((4, 8), int), np.ones((4, 8), int)),
            "the segments of the queries must have shape (4, 6), but the shape is (4, 8).",
        ),
        (
            (np.ones((4, 6), np.float32), np.ones((4, 8), int)),
            "segments of the queries is an array of float32.\n  Cast it",
        ),
    ],
)
def test_refuses_segments_of_other_tokens(given, message, make_mesh):
    with jax.set_mesh(make_mesh({"x": 1}, "auto")), pytest.raises(gspmd.SpecError, match=re.escape(message)):
        attention(*arrays(2, 2, 6, 8), "BLHD", "BTKD", causal=False, segments=given)
