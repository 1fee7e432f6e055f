"""Caches that are rings, with windows, soft caps and sinks: against attention of the whole row, at every position."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops import cached_attention, quantize_heads, write_cache
from tests.references.attention import written_out
from tests.references.caches import MESHES, ORDERS, random_spec, stored


def row_by_row(q, k, v, **options):
    """Attention of each row with keys of its own number, [B][T, K, D], for its last queries [B, L, H, D]."""
    found = []
    for each, keys, values in zip(q, k, v):
        at = np.arange(len(keys) - len(each), len(keys)), np.arange(len(keys))
        found.append(written_out(each[None], keys[None], values[None], at=at, **options)[0])
    return np.stack(found)


def in_ring(rows, slots, garbage=7.0):
    """The last tokens of each row [n, K, D] in slots of its position mod `slots`: [B, T, K, D]; garbage elsewhere."""
    held = np.full((len(rows), slots, *rows[0].shape[1:]), garbage, np.float32)
    for row, ring in zip(rows, held):
        for position in range(max(len(row) - slots, 0), len(row)):
            ring[position % slots] = row[position]
    return held


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", range(60))
def test_random_rings(seed, make_mesh, place):
    """Attend and write, in any placement, with rows of any number of tokens: none, few, a ring full, many rings."""
    rng, mesh = np.random.default_rng(seed), MESHES[seed % 3]
    sizes = {"B": int(rng.choice((4, 2, 8))), "L": int(rng.choice((1, 1, 3, 8, 19))), "T": int(rng.choice((8, 16, 5)))}
    sizes |= {"K": int(rng.choice((1, 2, 4))), "D": 4}
    sizes["H"] = sizes["K"] * int(rng.choice((1, 2, 3)))
    specs = [random_spec(rng, dims, sizes, mesh) for dims in ("BLHD", "BLKD", ORDERS[seed % 5])]
    window = int(rng.choice((1, 2, sizes["T"] // 2, sizes["T"], sizes["T"] + 1)))
    reach = "chunk" if seed % 3 == 1 and window > 1 else "window"
    options = {reach: window} | ({"softcap": 0.8} if rng.integers(2) else {})
    of_sinks = {"sinks_spec": random_spec(rng, "H", sizes, mesh)} if rng.integers(2) else {}
    options |= {"slopes": tuple(2.0 ** -np.arange(sizes["H"]))} if rng.integers(2) else {}
    int8, padded = seed % 4 == 3, bool(rng.integers(2)) or sizes["L"] == 19
    b, n, t, k, d, h = (sizes[dim] for dim in "BLTKDH")
    lengths = rng.integers(0, 3 * t, b).astype(np.int32)
    lengths[:2] = 0, 5 * t + 1
    counts = rng.integers(0, n + 1, b).astype(np.int32) if padded else np.full(b, n, np.int32)

    past = [[rng.normal(size=(size, k, d)).astype(np.float32) for size in lengths] for _ in "kv"]
    new = [rng.normal(size=(b, n, k, d)).astype(np.float32) for _ in "kv"]
    q, sinks = rng.normal(size=(b, n, h, d)).astype(np.float32), rng.normal(size=h).astype(np.float32)
    if int8:
        rounded = lambda x: np.asarray(np.prod(jnp.broadcast_arrays(*widened(x)), axis=0))  # noqa: E731
        past = [[rounded(x) for x in rows] for rows in past]
        new = [rounded(x) for x in new]
    cache = [in_ring(rows, t) for rows in past]
    rows = [[np.concatenate([old, fresh]) for old, fresh in zip(*each)] for each in zip(past, new)]
    want = row_by_row(q, *rows, **options, sinks=sinks if of_sinks else None)
    kept = [
        [np.concatenate([old, fresh[:count]]) for old, fresh, count in zip(*each, counts)] for each in zip(past, new)
    ]
    later = [in_ring(each, t) for each in kept]

    axes, lowering = ("explicit", "auto")[seed // 4 % 2], ("blocking", "xla", "looped")[(seed + seed // 3) % 3]
    query, key, held = specs
    with jax.set_mesh(mesh := make_mesh(mesh, axes)), gspmd.lowering(lowering):
        arrays = [place(mesh, x, spec) for x, spec in zip((q, *new), (query, key, key))]
        if of_sinks:
            of_sinks["sinks"] = place(mesh, sinks, of_sinks["sinks_spec"])
        caches, scales = [], {}
        for name, x in zip(("key_scales", "value_scales"), cache):
            whole, scale = quantize_heads(x) if int8 else (x, None)
            caches.append(place(mesh, stored(np.asarray(whole), held), held))
            if int8:
                spec = str(gspmd.Spec.parse(held).without("D"))
                scales[name] = place(mesh, stored(np.asarray(scale), spec), spec)

        sinks_spec = {name: of_sinks.pop(name) for name in ("sinks_spec",) if of_sinks}

        @jax.jit
        def attend(arrays, caches, lengths, more):
            return cached_attention(*arrays, *caches, *specs, lengths=lengths, **more, **options, **sinks_spec)

        @jax.jit
        def write(cache, new, lengths, counts):
            more = {"counts": counts} if padded else {}
            return write_cache(cache[None], new[None], held, key, lengths=lengths, ring=True, **more)[0]

        given = arrays, caches, lengths, scales | of_sinks
        compiled = attend.lower(*given).compile()
        got, planned = compiled(*given), gspmd.trace(attend, *given)
        if not int8:
            writes = write.lower(caches[0], arrays[1], lengths, counts).compile()
            written = [write(old, fresh, lengths, counts) for old, fresh in zip(caches, arrays[1:])]
            to_write = gspmd.trace(write, caches[0], arrays[1], lengths, counts)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    if not int8:
        for found, wanted in zip(written, later):
            np.testing.assert_array_equal(found, stored(wanted, held))
    if lowering != "xla":
        assert not gspmd.ledger(compiled, mesh).compare(planned).differing
        if not int8:
            assert not gspmd.ledger(writes, mesh).compare(to_write).differing


def widened(x):
    whole, scale = map(np.asarray, quantize_heads(x))
    return whole.astype(np.float32), scale[..., None]


@pytest.mark.turns(9)
@pytest.mark.parametrize("lowering", ["blocking", "xla", "blocking on a TPU"])
@pytest.mark.parametrize("reach", ["window", "chunk"])
@pytest.mark.parametrize(("slots", "chunks"), [(6, (4, 1, 1, 1, 1, 5, 1, 1)), (4, (13, 1, 1, 2)), (16, (3, 1, 1, 1))])
def test_chunks_and_tokens_one_by_one(slots, chunks, reach, lowering, make_mesh, monkeypatch):
    """Chunks that are shorter and longer than the ring, and single tokens round its end, are as one whole sequence.

    The second row has a token less in every chunk of several, which is padding.
    """
    if lowering.endswith("TPU"):  # which multiplies all heads of one query at once
        monkeypatch.setattr("gspmd.lowerings.in_force.device_kind", lambda: "TPU v4")
        jax.clear_caches()
    rng, (b, h, k, d) = np.random.default_rng(0), (2, 4, 2, 4)
    total, options = sum(chunks), {reach: 5, "softcap": 0.9}
    rows = [[rng.normal(size=(total, heads, d)).astype(np.float32) for heads in (h, k, k)] for _ in range(b)]
    sinks, specs = rng.normal(size=h).astype(np.float32), ("BLH_xD", "BLK_xD", "BK_xT_yD")

    @jax.jit
    def step(caches, q, k, v, lengths, counts):
        y = cached_attention(q, k, v, *caches, *specs, lengths=lengths, sinks=sinks, sinks_spec="H_x", **options)
        more = {"lengths": lengths, "counts": counts, "ring": True}
        return y, [write_cache(c[None], x[None], specs[2], specs[1], **more)[0] for c, x in zip(caches, (k, v))]

    lengths, caches, found = np.zeros(b, np.int32), [jnp.zeros((b, k, slots, d))] * 2, [[], []]
    with jax.set_mesh(make_mesh({"x": 2, "y": 2}, "auto")), gspmd.lowering(lowering.split()[0]):
        for size in chunks:
            counts = np.array([size, max(size - 1, 1)], np.int32)
            padded = [np.full((b, size, heads, d), 1e4, np.float32) for heads in (h, k, k)]
            for b_at, (row, begin, count) in enumerate(zip(rows, lengths, counts)):
                for x, source in zip(padded, row):
                    x[b_at, :count] = source[begin : begin + count]
            y, caches = step(caches, *padded, lengths, counts)
            for b_at, count in enumerate(counts):
                found[b_at].append(np.asarray(y)[b_at, :count])
            lengths = lengths + counts
    for row, got, length in zip(rows, found, lengths):
        q, keys, values = (x[None, :length] for x in row)
        want = written_out(q, keys, values, sinks=sinks, **options)[0]
        np.testing.assert_allclose(np.concatenate(got), want, rtol=2e-5, atol=2e-5)
    jax.clear_caches()


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_chunks_of_new_tokens_begin_at_another_place_of_each_row(lowering, tiny_blocks, make_mesh):
    """24 tokens of two rows behind 5 and 11 others, in blocks, of which those of earlier chunks are left out."""
    rng, lengths = np.random.default_rng(0), np.array([5, 11], np.int32)
    rows = [[rng.normal(size=(24 + length, 1, 4)).astype(np.float32) for _ in "qkv"] for length in lengths]
    q, *new = (np.stack([row[at][-24:] for row in rows]) for at in range(3))
    cache = [in_ring([row[at][:-24] for row in rows], 16) for at in (1, 2)]
    want = row_by_row(q, *([row[at] for row in rows] for at in (1, 2)), chunk=16)
    with jax.set_mesh(make_mesh({"x": 1}, "auto")), gspmd.lowering(lowering):
        got = cached_attention(q, *new, *cache, "BLHD", "BLKD", "BTKD", lengths=lengths, chunk=16)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("reach", ["window", "chunk"])
def test_new_tokens_past_the_reach_are_not_multiplied_with_cached_keys(reach, make_mesh):
    """Among 16 new tokens 4 see cached keys, with 5 in reach: 4 · 8 products of a head with those, and 16 · 16."""
    q, held, lengths = jnp.ones((1, 16, 2, 4)), jnp.ones((1, 8, 2, 4)), jnp.array([6])

    def attend(q, **options):
        return cached_attention(q, q, q, held, held, "BLHD", "BLKD", "BTKD", lengths=lengths, **options)

    with jax.set_mesh(make_mesh({"x": 1}, "auto")):
        text = str(jax.make_jaxpr(lambda q: attend(q, **{reach: 5}))(q))
        assert "f32[1,2,1,4,8]" in text
        assert "f32[1,2,1,16,8]" not in text
        assert "f32[1,2,1,16,8]" in str(jax.make_jaxpr(attend)(q))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_rows_without_real_tokens_keep_their_ring(lowering, dtype, make_mesh):
    """One token of each row, written or not, as finished rows of a batch are decoded."""
    cache = np.arange(2 * 4 * 6 * 2).reshape(2, 4, 6, 1, 2).astype(dtype)
    new, want = np.full((2, 4, 1, 1, 2), 99, dtype), cache.copy()
    lengths, counts = np.array([0, 6, 11, 13], np.int32), np.array([1, 0, 1, 1], np.int32)
    want[:, 0, 0], want[:, 2, 5], want[:, 3, 1] = 99, 99, 99
    with jax.set_mesh(make_mesh({"x": 2, "y": 2}, "auto")), gspmd.lowering(lowering):
        for more in ({"counts": counts, "ring": True}, {"counts": np.where(lengths < 6, counts, 0)}):
            got = jax.jit(lambda *a, more=more: write_cache(*a, "B_xT_yKD", "B_xLKD", lengths=lengths, **more))(
                cache, new
            )
            if "ring" not in more:
                want = cache.copy()
                want[:, 0, 0] = 99
            np.testing.assert_array_equal(got, want)


def test_decoding_writes_one_slot_of_each_row(make_mesh):
    """A token's write to a ring is that to a plain cache: one slice of each row, and no scatter."""
    cache, new = jnp.zeros((3, 4, 2, 8, 4)), jnp.zeros((3, 4, 1, 2, 4))

    def primitives(**more):
        with jax.set_mesh(make_mesh({"x": 2}, "auto")):
            write = lambda *a: write_cache(*a, "BK_xTD", "BLK_xD", lengths=jnp.zeros(4, int), **more)  # noqa: E731
            text = str(jax.make_jaxpr(write)(cache, new))
        return [len(re.findall(rf"\b{name}\b", text)) for name in ("dynamic_update_slice", "scatter", "scan")]

    assert primitives(ring=True) == primitives() == [1, 0, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"window": 10},
            "the cache has room for 8 keys, but a query sees 9 keys before its own.\n  Give it 9 slots or more.",
        ),
        (
            {"chunk": 10},
            "the cache has room for 8 keys, but a query sees 9 keys before its own.\n  Give it 9 slots or more.",
        ),
        ({"window": -1}, "window is -1."),
        ({"window": 4, "k": None, "v": None}, "attention is not causal.\n  Leave window out"),
        (
            {"sinks": np.ones(5), "sinks_spec": "H"},
            "sinks must have size 6, the number of query heads, but the size is 5.",
        ),
    ],
)
def test_refuses_what_does_not_fit(given, message, make_mesh):
    q, cache = jnp.ones((4, 2, 6, 4)), jnp.ones((4, 3, 8, 4))
    given = {"k": q[:, :, :3], "v": q[:, :, :3]} | given
    k, v = given.pop("k"), given.pop("v")
    with jax.set_mesh(make_mesh({"x": 1}, "auto")), pytest.raises(gspmd.SpecError, match=re.escape(message)):
        cached_attention(q, k, v, cache, cache, "BLHD", "BLKD", "BKTD", lengths=jnp.ones(4, int), **given)


def test_refuses_counts_of_other_rows(make_mesh):
    cache, new = jnp.zeros((2, 4, 8, 2, 4)), jnp.zeros((2, 4, 3, 2, 4))
    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        for more, message in (
            ({"counts": jnp.ones(3, int)}, "counts must have shape (4,)"),
            ({"ring": 1}, "ring is 1."),
        ):
            with pytest.raises(ValueError, match=re.escape(message)):
                write_cache(cache, new, "BTKD", "BLKD", lengths=jnp.ones(4, int), **more)
