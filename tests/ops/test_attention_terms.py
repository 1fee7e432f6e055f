"""Windows, chunks, soft caps, sinks and slopes, alone and together, in every placement, whole and in blocks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops import attention
from gspmd.ops._attention.blocks import Blocks
from gspmd.ops._attention.terms import Limits
from tests.ops.test_attention_segments import CUBE, ROW, arrays, order_of, segments
from tests.references.attention import written_out

RNG = np.random.default_rng(0)
CASES = {
    # query heads, key heads, queries, keys, mesh, query spec, key spec, spec of the sinks
    "rows and heads": (6, 3, 10, 10, {"x": 2, "y": 3}, "B_xLH_yD", "B_xTK_yD", "H_y"),
    "sinks elsewhere": (8, 2, 8, 8, {"x": 4, "y": 2}, "B_yLH_xD", "B_yTKD", "H_y"),
    "queries split along the sequence": (4, 2, 8, 8, CUBE, "B_zL_xH_yD", "B_zTK_yD", "H_y"),
    "a ring": (3, 3, 16, 16, ROW, "BL_xHD", "BT_xKD", "H"),
    "a ring of two key heads": (8, 2, 16, 16, {"x": 2, "y": 4}, "BL_xH_yD", "BT_xKD", "H_y"),
}
TERMS = [
    {"window": 3, "softcap": 0.7}, {"window": 1, "sinks": True}, {"window": 4, "slopes": True, "softcap": 1.5},
    {"window": 5, "slopes": True}, {"window": 4, "softcap": 0.7, "sinks": True}, {"sinks": True, "softcap": 0.7},
    {"window": 3}, {"softcap": 0.7}, {"sinks": True}, {"slopes": True}, {"window": 40, "slopes": True, "sinks": True},
    {"chunk": 3}, {"chunk": 4, "softcap": 0.7, "sinks": True}, {"chunk": 6, "slopes": True}, {"chunk": 7},
    {"chunk": 1, "sinks": True}, {"chunk": 40},
]  # fmt: skip
WITH = ["", "mask", "segments", "offset"]
LOWERINGS = ["blocking", "xla", "looped", "auto"]
DRAWS = 60


def draw(seed):
    """A placement, a lowering and terms, so that any two of them meet soon."""
    rng = np.random.default_rng(seed)
    case, lowering = (
        list(CASES)[seed % len(CASES)],
        LOWERINGS[seed // 5 % 4] if seed < 20 else str(rng.choice(LOWERINGS)),
    )
    terms = dict(TERMS[seed % len(TERMS)])
    more = str(rng.choice(WITH[:3] if "ring" in case else WITH))
    if "chunk" in terms and more == "segments":
        more = "mask"
    return case, lowering, terms, more


def check(seed, axis_type, check_form):
    case, lowering, terms, more = draw(seed)
    heads, key_heads, queries, keys, mesh, query, key, of_sinks = CASES[case]
    order = order_of(mesh, query, key, keys, True)
    at = [np.arange(n) if order is None else order for n in (queries, keys)]
    given, specs, options, names = [*arrays(heads, key_heads, queries, keys)], [query, key, key], {}, []
    constants = {}
    if terms.pop("sinks", False):
        given.append(2 * RNG.normal(size=heads).astype(np.float32))
        specs.append(of_sinks)
        names, options = ["sinks"], {"sinks_spec": of_sinks}
    wrt = tuple(range(len(given)))
    if terms.pop("slopes", False):
        values = (2.0 ** -np.arange(heads)).astype(np.float32)
        if seed % 2:
            given, specs, names, options = (
                [*given, values],
                [*specs, of_sinks],
                [*names, "slopes"],
                {**options, "slopes_spec": of_sinks},
            )
        else:
            options["slopes"] = constants["slopes"] = tuple(values.tolist())
    first, second = (str(gspmd.Spec(s.dims[:2], s.axes[:2])) for s in map(gspmd.Spec.parse, (query, key)))
    if more == "mask":
        given.append(RNG.random((4, keys)) < 0.7)
        specs, names = [*specs, second], [*names, "mask"]
    elif more == "segments":
        given += [x[:, where] for x, where in zip(segments(queries, keys), at)]
        specs, names = [*specs, first, second], [*names, "first", "second"]
    elif more == "offset":
        options["offset"], at[0] = -1 if seed % 2 else 2, at[0] + (-1 if seed % 2 else 2)

    def named(arrays):
        found = dict(zip(names, arrays))
        if "first" in found:
            found["segments"] = found.pop("first"), found.pop("second")
        return found

    return check_form(
        lambda q, k, v, *more: attention(q, k, v, query, key, **named(more), **terms, **options),
        lambda q, k, v, *more: written_out(q, k, v, at=at, **named(more), **terms, **constants),
        given, specs, query, mesh=mesh, axis_type=axis_type, lowering=lowering, wrt=wrt,
    )  # fmt: skip


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_value_and_gradients(seed, axis_type, check_form):
    check(seed, axis_type, check_form)


@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", range(DRAWS, 2 * DRAWS))
def test_in_blocks(seed, axis_type, check_form, tiny_blocks):
    check(seed, axis_type, check_form)


def test_slopes_have_no_gradient(make_mesh):
    given, slopes = arrays(4, 2, 8, 8), np.ones(4, np.float32)
    for lowering in ("blocking", "xla"):
        with jax.set_mesh(make_mesh({"x": 2}, "auto")), gspmd.lowering(lowering):
            attend = lambda s: attention(*given, "B_xLHD", "B_xTKD", slopes=s).sum()  # noqa: E731
            np.testing.assert_array_equal(jax.grad(attend)(slopes), np.zeros(4))


def test_a_query_that_sees_nothing_gives_nothing_to_its_sink(make_mesh):
    """Half a probability is that of the sink; where no key is seen, output and all gradients are 0."""
    q, v = np.zeros((1, 3, 2, 2), np.float32), np.ones((1, 3, 2, 2), np.float32)
    mask, sinks = np.array([[False, True, True]]), np.log([1.0, 3.0]).astype(np.float32)
    with jax.set_mesh(make_mesh({"x": 1}, "auto")):
        attend = lambda sinks, mask: attention(q, v, v, "BLHD", "BTKD", mask=mask, sinks=sinks, sinks_spec="H")  # noqa: E731
        np.testing.assert_allclose(attend(sinks, mask)[0, :, :, 0], [[0, 0], [1 / 2, 1 / 4], [2 / 3, 2 / 5]], rtol=1e-6)
        slope = jax.grad(lambda sinks: attend(sinks, mask & False).sum())(sinks)
        np.testing.assert_array_equal(slope, [0, 0])
        none = attend(np.full(2, -np.inf, np.float32), mask)
    np.testing.assert_allclose(none[0, :, :, 0], [[0, 0], [1, 1], [1, 1]], rtol=1e-6)


LIMITS = [*(Limits(window=size) for size in (5, 1, 40)), *(Limits(chunk=size) for size in (6, 5, 11, 1, 40)), Limits()]


@pytest.mark.parametrize(("causal", "limits"), [*((True, each) for each in LIMITS), (False, Limits())])
def test_blocks_that_no_query_sees_are_left_out(causal, limits):
    """Every pair that is seen is in exactly one block, and every block has one, or is the only one of its queries."""
    for rows, queries, keys, block in ((2, 24, 24, (1, 4, 6)), (1, 24, 10, (1, 8, 4)), (1, 21, 21, (1, 7, 5))):
        blocks, count = Blocks(*block), np.zeros((rows, queries, keys), int)
        starts = blocks.starts(rows, queries, keys, causal, limits)
        of_keys, of_queries = np.arange(keys)[None], np.arange(queries)[:, None]
        relative = of_keys - of_queries
        seen = np.ones_like(relative, bool) if not causal else relative <= 0
        seen = seen if limits.window is None else seen & (relative > -limits.window)
        seen = seen if limits.chunk is None else seen & (of_keys // limits.chunk == of_queries // limits.chunk)
        for row, query, key, new in starts:
            here = slice(row, row + block[0]), slice(query, query + block[1]), slice(max(key, new), key + block[2])
            count[here] += 1
            others = (starts[:, 0] == row) & (starts[:, 1] == query)
            assert (new == blocks.first_key(query, keys, limits)) == (new == starts[others, 3].min())
            assert seen[here[1:]].any() or others.sum() == 1
        assert count.max() == 1
        assert (count == 1)[:, seen].all()


@pytest.mark.parametrize("name", ["window", "chunk"])
@pytest.mark.parametrize("reach", [1, 2, 5, 9])
def test_blocks_move_with_the_position_of_the_first_query(name, reach):
    """Do the same from any position: all pairs that are seen are in one block, of as few as a window can touch."""
    limits = Limits(**{name: reach})
    for queries, keys, block in ((24, 48, (1, 4, 6)), (21, 80, (1, 7, 5)), (8, 30, (1, 8, 4))):
        blocks = Blocks(*block)
        for ahead in (-40, -3, 0, 1, 7, 26, 50, 90):
            starts = np.asarray(blocks.starts(1, queries, keys, True, limits, jnp.int32(ahead)))
            assert len(starts) == queries // block[1] * blocks.in_reach(reach) < queries // block[1] * (keys / block[2])
            count = np.zeros((queries, keys), int)
            relative = np.arange(keys)[None] - np.arange(queries)[:, None] - ahead
            for _, query, key, new in starts:
                assert 0 <= key <= keys - block[2]
                count[query : query + block[1], max(key, new) : key + block[2]] += 1
                others = starts[starts[:, 1] == query, 3]
                assert (new == blocks.first_key(query, keys, limits, ahead)) == (new == others.min())
            assert count.max() == 1
            assert (count == 1)[(relative <= 0) & (relative > -reach)].all()


@pytest.mark.parametrize("by", ["offset", "shards"])
def test_a_window_leaves_out_products_from_any_position(by, make_mesh):
    """With 32,768 keys, 8,192 queries multiply 4 by 3 blocks of 2,048, wherever they are, and not 4 by 16."""
    long, short = (jax.ShapeDtypeStruct((1, length, 2, 8), jnp.bfloat16) for length in (32768, 8192))
    options = {"window": 2048} | ({"offset": jnp.int32(12345)} if by == "offset" else {})
    queries, query = (short, "BLHD") if by == "offset" else (long, "BL_xHD")
    with jax.set_mesh(make_mesh({"x": 4}, "auto")), gspmd.lowering("blocking"):
        attend = lambda q, k, v: attention(q, k, v, query, "BTKD", **options).astype(float).sum()  # noqa: E731
        for function in (attend, jax.grad(attend)):
            program = str(jax.make_jaxpr(function)(queries, long, long))
            assert set(re.findall(r"length=(\d+)", program)) == {"12"}


def test_a_window_or_a_chunk_leaves_out_products(make_mesh):
    """With blocks of 2,048 tokens, 136 are causal, 31 in a window of 2,048, and 24 or 16 in chunks of two or one."""
    q = jax.ShapeDtypeStruct((1, 32768, 2, 8), jnp.bfloat16)

    def trips(**more):
        with jax.set_mesh(make_mesh({"x": 1}, "auto")):
            jaxpr = jax.make_jaxpr(lambda q, k, v: attention(q, k, v, "BLHD", "BTKD", **more))(q, q, q)
        return max(map(int, re.findall(r"length=(\d+)", str(jaxpr))))

    assert (trips(), trips(window=2048)) == (136, 31)
    assert (trips(chunk=4096), trips(chunk=2048), trips(chunk=32768)) == (24, 16, 136)


@pytest.mark.parametrize("lowering", ["looped", "blocking"])
@pytest.mark.parametrize("terms", [{"window": 3}, {"chunk": 4}])
def test_chunks_before_every_window_are_not_multiplied(lowering, terms, make_mesh, place):
    """Not-a-number in a chunk reaches only devices with queries near it: 0 times it would spoil the others, too."""
    mesh, of_place = make_mesh({"x": 4}), gspmd.ops.zigzag_positions(16, 4)
    q, k, v = arrays(2, 2, 16, 16)
    v[:, of_place < 2] = np.nan

    def value_and_gradient(g, *given):
        y, transpose = jax.vjp(lambda *each: attention(*each, "BL_xHD", "BT_xKD", **terms), *given)
        return y, transpose(g)[0]

    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        placed = [place(mesh, x, spec) for x, spec in zip((q, k, v), ("BL_xHD", "BT_xKD", "BT_xKD"))]
        y, d_q = map(np.asarray, jax.jit(value_and_gradient)(placed[0], *placed))
    want = written_out(q, k, np.nan_to_num(v), at=(of_place, of_place), **terms)
    np.testing.assert_allclose(y[:, 8:], want[:, 8:], rtol=2e-5, atol=2e-5)  # of the third and the last device
    assert np.isfinite(d_q[:, 8:]).all()
    assert np.isnan(y[:, :8]).any()


@pytest.mark.parametrize("terms", [{"chunk": 7}, {"chunk": 16}, {"window": 6}])
def test_blocks_in_zigzag_order_leave_out_nothing_that_is_seen(terms, tiny_blocks, check_form):
    """A device has two parts of the text one after the other, so that a chunk does not begin at a multiple of it."""
    at, (mesh, query, key) = gspmd.ops.zigzag_positions(48, 2), ({"x": 2}, "BL_xHD", "BT_xKD")
    check_form(
        lambda q, k, v: attention(q, k, v, query, key, **terms),
        lambda q, k, v: written_out(q, k, v, at=(at, at), **terms),
        arrays(1, 1, 48, 48), [query, key, key], query, mesh=mesh, axis_type="auto", lowering="looped", wrt=(0, 1, 2),
    )  # fmt: skip


@pytest.mark.slow
def test_higher_derivatives_and_vmap_in_blocks(tiny_blocks, make_mesh):
    given = [np.stack([x, 2 * x]) for x in (*arrays(2, 1, 7, 7), RNG.normal(size=2).astype(np.float32))]
    options = {"window": 3, "softcap": 0.7}

    def slopes(f):
        inner = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=(0, 3))
        return jax.jit(jax.vmap(jax.grad(lambda *a: sum(jnp.sum(jnp.cos(x)) for x in inner(*a)), argnums=(0, 1, 2, 3))))

    want = slopes(lambda q, k, v, sinks: written_out(q, k, v, sinks=sinks, **options))(*given)
    with jax.set_mesh(make_mesh({"x": 1}, "auto")), gspmd.lowering("xla"):
        attend = lambda q, k, v, s: attention(q, k, v, "BLHD", "BTKD", sinks=s, sinks_spec="H", **options)  # noqa: E731
        got = slopes(attend)(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), got, want)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_forward_mode(in_blocks, make_mesh, request):
    if in_blocks:
        request.getfixturevalue("tiny_blocks")
    given = (*arrays(4, 2, 9, 9), RNG.normal(size=4).astype(np.float32))
    moving, options = (*arrays(4, 2, 9, 9), RNG.normal(size=4).astype(np.float32)), {"window": 4, "softcap": 0.9}
    want = jax.jvp(lambda q, k, v, sinks: written_out(q, k, v, sinks=sinks, **options), given, moving)
    with jax.set_mesh(make_mesh({"x": 2, "y": 2}, "auto")), gspmd.lowering("xla"):
        attend = lambda q, k, v, s: attention(q, k, v, "B_xLH_yD", "B_xTK_yD", sinks=s, sinks_spec="H_y", **options)  # noqa: E731
        got = jax.jit(lambda *both: jax.jvp(attend, *both))(given, moving)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


def test_reduced_sinks_keep_their_gradient_a_partial_sum(make_mesh, place):
    mesh, given = make_mesh({"x": 2, "y": 2}), arrays(4, 2, 8, 8)
    sinks = RNG.normal(size=4).astype(np.float32)
    want = jax.grad(lambda s: written_out(*given, sinks=s).sum())(sinks)
    with jax.set_mesh(mesh):
        q, k, v = (place(mesh, x, spec) for x, spec in zip(given, ("B_xLH_yD", "B_xTK_yD", "B_xTK_yD")))
        for lowering in ("blocking", "xla"):
            with gspmd.lowering(lowering):
                spec = gspmd.Spec.parse("H_y reduced-x").partition_spec()
                placed = jax.device_put(sinks, jax.NamedSharding(mesh, spec))
                specs = {"query_spec": "B_xLH_yD", "key_spec": "B_xTK_yD", "sinks_spec": "H_y reduced-x"}
                got = jax.jit(jax.grad(lambda s, specs=specs: attention(q, k, v, sinks=s, **specs).sum()))(placed)
            assert jax.typeof(got).sharding.spec.unreduced == {"x"}
            np.testing.assert_allclose(gspmd.reshard(got, "H_y partialsum-x -> H_y"), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 0}, "window is 0.\n  It is the number of keys that a query sees, itself included: pass a whole"),
        ({"window": 2.5}, "window is 2.5."),
        ({"window": 4, "causal": False}, "attention is not causal.\n  Leave window out, or attend causally."),
        ({"chunk": 0}, "chunk is 0.\n  It is the number of tokens of a chunk, in which queries see keys: pass a whole"),
        ({"chunk": 4, "causal": False}, "attention is not causal.\n  Leave chunk out, or attend causally."),
        ({"chunk": 4, "window": 3}, "window is 3, and chunk 4, but a query sees either the last keys or those of its"),
        (
            {"chunk": 4, "segments": (np.ones((4, 8), int), np.ones((4, 8), int))},
            "chunk and segments cannot be combined, because chunks are counted from the start of a row, and a segment"
            " may begin anywhere in it.\n"
            "  Give every chunk of a document its own segment, and pass window=4 instead of chunk.",
        ),
        ({"softcap": -1.0}, "softcap is -1.0.\n  Pass a number above 0, or None for no cap."),
        ({"sinks": np.ones(4)}, "sinks_spec is missing.\n  Pass sinks and sinks_spec together."),
        ({"sinks_spec": "H"}, "sinks is missing."),
        (
            {"sinks": np.ones(3), "sinks_spec": "H"},
            "sinks must have size 4, the number of query heads, but the size is 3.",
        ),
        ({"sinks": np.ones(4), "sinks_spec": "K"}, "'K' is not the spec of sinks, one number for each query head."),
        ({"sinks": np.ones((4, 1)), "sinks_spec": "HD"}, "'HD' is not the spec of sinks"),
        ({"slopes": (1.0, 0.5)}, "slopes must have size 4, the number of query heads, but the size is 2."),
        ({"slopes_spec": "H"}, "slopes is missing.\n  Pass slopes and slopes_spec together."),
    ],
)
def test_refuses_what_does_not_fit(given, message, make_mesh):
    with jax.set_mesh(make_mesh({"x": 2}, "auto")), pytest.raises(gspmd.SpecError, match=re.escape(message)):
        attention(*arrays(4, 2, 8, 8), "B_xLHD", "B_xTKD", **given)
