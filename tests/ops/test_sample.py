"""Sampling against plain numpy and transformers: the tokens that are left, their frequencies, the very tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd import ops
from gspmd.lowerings.partitioner import may_abort
from gspmd.ops._threshold import mass, words

RNG = np.random.default_rng(0)
VOCABULARY = 24
LOGITS = RNG.normal(scale=2.0, size=(8, VOCABULARY)).astype(np.float32)
LOGITS[0, 3:9] = 1.5  # ties across shards
LOGITS[1, 7], LOGITS[1, 8] = -np.inf, -1e30
ROWS = {
    "seeds": np.arange(8, dtype=np.uint32) * np.uint32(2654435761),
    "positions": np.array([0, 1, 2, 3, 4, 5, 6, 70_000], np.int32),
    "temperature": np.array([1, 0.7, 3, 0, 1, 1.3, 0.2, 1], np.float32),
    "top_k": np.array([3, 0, 12, 2, 5, 24, 1, 100], np.int32),
    "top_p": np.array([0.5, 0.9, 1, 0.3, 0.7, 0.95, 1, 0.999], np.float32),
    "min_p": np.array([0, 0.05, 0, 1, 0.1, 0, 0.5, 0], np.float32),
}


def threefry(key, counter):
    """Two words of random bits (Salmon et al. 2011, section 4.3: twenty rounds)."""
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    k = np.uint32([key[0], key[1], np.uint32(0x1BD11BDA) ^ np.uint32(key[0]) ^ np.uint32(key[1])])
    with np.errstate(over="ignore"):
        a, b = np.uint32(counter[0]) + k[0], np.uint32(counter[1]) + k[1]
        for n in range(5):
            for r in rotations[n % 2]:
                a = a + b
                b = a ^ ((b << np.uint32(r)) | (b >> np.uint32(32 - r)))
            a, b = a + k[(n + 1) % 3], b + k[(n + 2) % 3] + np.uint32(n + 1)
    return a, b


def noise(seed, position, vocabulary):
    tokens = np.arange(vocabulary, dtype=np.uint32)
    high, low = threefry((seed, np.uint32(position)), (np.zeros_like(tokens), tokens))
    return -np.log(-np.log1p(-(high * 2.0**-32 + low * 2.0**-64)))


def left(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return the tokens that the filters leave, by sorting, in float64."""
    x = np.where(logits > -1e29, logits, -np.inf).astype(np.float64)
    weights = np.exp((x - x.max()) / (temperature or 1))
    kept = np.isfinite(x) & (weights >= min_p)
    if top_k:
        some = x >= np.sort(x)[::-1][min(top_k, x.size) - 1]
        kept, weights = kept & some, weights * some
    if top_p < 1:
        _, level = np.unique(x, return_inverse=True)
        at = np.bincount(level, weights)[::-1]
        before = (np.cumsum(at) - at)[::-1][level]  # the share of all that are likelier
        kept &= before < np.float32(top_p) * weights.sum()
    return kept


def reference(logits, seed, position, temperature=1.0, **filters):
    kept = left(logits, temperature, **filters)
    x = logits.astype(np.float64)
    x = (x - x.max()) / temperature + noise(seed, position, logits.size) if temperature else x
    return int(np.where(kept, x, -np.inf).argmax())


def expected(logits, settings):
    per_row = [{name: value[b] if np.ndim(value) else value for name, value in settings.items()} for b in range(8)]
    return np.array([reference(x, row.pop("seeds"), row.pop("positions"), **row) for x, row in zip(logits, per_row)])


def test_random_bits_are_those_of_the_paper():
    for key, counter, bits in [  # of the generator's own known answers
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]:
        assert threefry(key, counter) == bits


@pytest.mark.parametrize("lowering", ["blocking", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mesh", "spec", "settings", "planned"),
    [
        ({"x": 2, "y": 2, "z": 2}, "BV_xyz", ROWS, 25),
        ({"x": 2, "y": 2, "z": 2}, "B_xV_zy", ROWS, 25),
        pytest.param({"x": 4, "y": 2}, "V_yB_x", ROWS | {"temperature": 0.7, "top_p": 0.9}, 25, marks=pytest.mark.slow),
        pytest.param({"x": 3, "y": 2}, "B_yV_x", ROWS | {"top_k": 4}, 25, marks=pytest.mark.slow),
        pytest.param({"x": 8}, "B_xV", ROWS, 0, marks=pytest.mark.slow),
        ({"x": 8}, "BV_x", ROWS | {"temperature": 0}, 2),
        ({"x": 4, "y": 2}, "B_yV_x", {name: ROWS[name] for name in ("seeds", "positions")}, 3),
    ],
)
def test_tokens_are_those_of_plain_numpy(mesh, spec, settings, planned, lowering, axis_type, check_form):
    first = spec[0] == "V"
    counted = check_form(
        lambda x: ops.sample(x, spec, "V", **settings),
        lambda _: jnp.asarray(expected(LOGITS, settings), jnp.int32),
        (LOGITS.T if first else LOGITS,), (spec,), str(gspmd.Spec.parse(spec).without("V")),
        mesh=mesh, axis_type=axis_type, lowering=lowering, wrt=(),
    )  # fmt: skip
    axes = tuple(sorted(gspmd.Spec.parse(spec).axes_of("V")))
    plans = lowering == "blocking" or may_abort(mesh)
    assert counted == ({("all-reduce", axes): planned} if planned and plans else {})


def drawn(mesh, logits, spec="BV_x", lowering="blocking", **settings):
    """The tokens of [B, V] logits."""
    count = logits.shape[0]
    settings = {"seeds": np.arange(count), "positions": np.zeros(count, int)} | settings
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        return np.asarray(jax.jit(lambda x: ops.sample(x, spec, "V", **settings))(gspmd.annotate(logits, spec)))


def test_what_is_left_and_how_often_is_that_of_transformers(make_mesh):
    processors = pytest.importorskip("transformers.generation.logits_process")
    torch = pytest.importorskip("torch")
    count, rows = 2048, [(1.0, 3, 1.0, 0.0), (0.8, 0, 0.7, 0.0), (2.0, 0, 1.0, 0.2), (1.5, 12, 0.9, 0.05)]
    logits = np.random.default_rng(3).normal(scale=1.5, size=(len(rows), 16)).astype(np.float32)
    names, each = ("temperature", "top_k", "top_p", "min_p"), np.repeat(np.arange(len(rows)), count)
    settings = {name: np.array([row[n] for row in rows])[each] for n, name in enumerate(names)}
    tokens = drawn(make_mesh({"x": 4}), logits[each], **settings).reshape(len(rows), count)
    for x, row, (temperature, k, p, m) in zip(logits, tokens, rows):
        scores = torch.from_numpy(x[None]) / temperature
        for warper in (
            k and processors.TopKLogitsWarper(k),
            processors.TopPLogitsWarper(p),
            processors.MinPLogitsWarper(m),
        ):
            scores = warper(None, scores) if warper else scores
        share, seen = scores.softmax(-1)[0].numpy(), np.bincount(row, minlength=16)
        some = share > 0
        np.testing.assert_array_equal(left(x, temperature, k, p, m), some)
        np.testing.assert_array_equal(seen > 0, some)
        # a chi-square statistic has a mean of its degrees of freedom, and a variance of twice that
        freedom = some.sum() - 1
        chi = np.sum((seen - count * share)[some] ** 2 / (count * share[some]))
        assert chi < freedom + 4 * np.sqrt(2 * freedom)


def test_a_large_vocabulary_is_as_exact(make_mesh):
    x, p = np.random.default_rng(5).normal(size=(4, 1 << 17)).astype(np.float32), np.float32([0.01, 0.9, 0.999, 1])
    x[3] = 0  # noise of 32 bits or fewer would tie the best of so many equal tokens
    tokens = drawn(make_mesh({"x": 8}), x, top_p=p)
    np.testing.assert_array_equal(tokens, [reference(x[b], b, 0, top_p=p[b]) for b in range(4)])


def test_masses_are_sums_of_all_tokens_however_small():
    count, bits = 1 << 17, 31 - (1 << 17).bit_length()
    for weights in (np.full(count, 1e-9), np.full(count, 1.0), np.geomspace(1, 1e-11, count)):
        total = [jnp.sum(word) for word in words(jnp.asarray(weights, jnp.float32), bits)]
        found = mass(jnp.stack(total), bits) * 2.0**-bits
        np.testing.assert_allclose(found, np.float32(weights).sum(dtype=float), rtol=2e-3)
    sums = np.sort(np.random.default_rng(0).integers(0, 1 << 40, 2000))  # and the larger is never the smaller
    split = jnp.asarray(np.stack([sums >> 26, sums >> 13 & 8191, sums & 8191], axis=-1), jnp.int32)
    assert np.all(np.diff(np.asarray(mass(split, 13))) >= 0)


def test_rows_without_a_defined_token(make_mesh):
    x = np.tile(np.float32([0, 1, 2, 3, 4, 5, 6, 7]), (8, 1))
    x[0, 5] = np.nan
    x[1] = -np.inf
    x[2] = -1e30
    x[3, :7] = -1e30
    x[4, :7] = -np.inf
    x[5, [2, 6]] = np.inf
    x[6] = [-np.inf, np.nan, *[np.inf] * 6]
    x[7] = np.finfo(np.float32).min
    want, infinite = np.array([-1, -1, -1, 7, 7, 2, -1, -1]), np.arange(8) == 5
    filters = {
        "top_k": np.repeat([0, 3, 3], 8),
        "top_p": np.repeat([1, 0.9, 0.9], 8),
        "min_p": np.repeat([0, 0.1, 1], 8),
    }
    tokens = drawn(make_mesh({"x": 4}), np.tile(x, (3, 1)), temperature=np.repeat([1, 1e30, 0], 8), **filters)
    for some in tokens.reshape(3, 8):
        np.testing.assert_array_equal(np.where(infinite & (some == 6), 2, some), want)
    np.testing.assert_array_equal(tokens[16:], want)
    np.testing.assert_array_equal(drawn(make_mesh({"x": 4}), x, temperature=0), want)
    np.testing.assert_array_equal(drawn(make_mesh({"x": 4}), x, lowering="xla", temperature=0), want)


def test_ties_are_left_together(make_mesh):
    x = np.float32([3, 1, 1, -0.0, 0.0, 1, -5, -5])
    filters = [(2, 1), (5, 1), (0, 0.75), (4, 0.7), (0, 1e-6)]
    rows = {"top_k": np.repeat([k for k, _ in filters], 512), "top_p": np.repeat([p for _, p in filters], 512)}
    tokens = drawn(make_mesh({"x": 4}), np.tile(x, (2560, 1)), **rows).reshape(5, 512)
    for some, kept, (k, p) in zip(tokens, ({0, 1, 2, 5}, {0, 1, 2, 3, 4, 5}, {0, 1, 2, 5}, {0}, {0}), filters):
        assert set(some) == kept
        assert left(x, top_k=k, top_p=p).nonzero()[0].tolist() == sorted(kept)


@pytest.mark.parametrize("lowering", ["blocking", pytest.param("xla", marks=pytest.mark.slow)])
def test_random_settings_at_their_limits(lowering, make_mesh):
    """Ties, a padded vocabulary, temperatures near 0 and far beyond 1, k beyond the vocabulary, tiny and whole p."""
    rng, count = np.random.default_rng(11), 256
    x = np.round(rng.normal(scale=3, size=(count, VOCABULARY)) * 2).astype(np.float32) / 2
    x[:, 19:] = np.where(rng.random(count) < 0.5, -np.inf, -1e30)[:, None]
    settings = {
        "seeds": rng.integers(0, 2**32, count, dtype=np.uint32),
        "positions": rng.integers(0, 2**31, count, dtype=np.int32),
        "temperature": rng.choice(np.float32([0, 1e-30, 1e-3, 0.5, 1, 10, 1e30]), count),
        "top_k": rng.choice(np.int32([0, 1, 2, 7, 19, 24, 1000, 2**31 - 1]), count),
        "top_p": rng.choice(np.float32([1e-30, 0.3, 0.6, 0.99, 1]), count),
        "min_p": rng.choice(np.float32([0, 1e-3, 0.2, 1]), count),
    }
    tokens = drawn(make_mesh({"x": 8}), x, lowering=lowering, **settings)
    rows = [{name: value[b] for name, value in settings.items()} for b in range(count)]
    want = [reference(x[b], row.pop("seeds"), row.pop("positions"), **row) for b, row in enumerate(rows)]
    np.testing.assert_array_equal(tokens, want)


def test_other_rows_change_nothing(make_mesh):
    some = [6, 1, 4, 2]
    again = drawn(make_mesh({"x": 3}), LOGITS[some], **{name: value[some] for name, value in ROWS.items()})
    np.testing.assert_array_equal(again, expected(LOGITS, ROWS)[some])


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_a_position_is_that_of_its_token(lowering, make_mesh):
    seeds, positions = np.array([7, 8]), np.array([3, 9])
    x = RNG.normal(size=(2, 4, 8)).astype(np.float32)
    tokens = drawn(make_mesh({"x": 2, "y": 2}), x, "BL_yV_x", lowering, seeds=seeds, positions=positions, min_p=0.1)
    want = [[reference(x[b, l], seeds[b], positions[b] + l, min_p=0.1) for l in range(4)] for b in range(2)]
    np.testing.assert_array_equal(tokens, want)


def test_settings_may_be_traced(make_mesh, place):
    mesh = make_mesh({"x": 4, "y": 2})
    one = {name: ROWS[name][1] for name in ROWS if name not in ("seeds", "positions")}
    with jax.set_mesh(mesh):
        program = jax.jit(lambda x, **rows: ops.sample(x, "B_yV_x", "V", **rows))
        tokens = program(place(mesh, LOGITS, "B_yV_x"), **ROWS | one)
    np.testing.assert_array_equal(tokens, expected(LOGITS, ROWS | one))


def test_bfloat16_logits_are_read_exactly(make_mesh):
    x, rows = jnp.asarray(LOGITS, jnp.bfloat16), {name: ROWS[name] for name in ROWS if name not in ("top_k", "top_p")}
    np.testing.assert_array_equal(drawn(make_mesh({"x": 4}), x, **rows), expected(np.asarray(x, np.float32), rows))


def test_is_a_constant_to_gradients(make_mesh, place):
    mesh = make_mesh({"x": 4})
    keys = {name: ROWS[name] for name in ("seeds", "positions")}
    with jax.set_mesh(mesh):
        loss = lambda x: jnp.sum(x**2) + jnp.sum(ops.sample(x, "BV_x", "V", **keys))  # noqa: E731
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(place(mesh, LOGITS, "BV_x")), 2 * LOGITS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": -1}, "top_k is -1.\n  Pass a number of tokens, or 0 to keep all."),
        ({"top_k": 2.5}, "top_k is a float.\n  Cast it to integers."),
        ({"top_p": 0.0}, "top_p is 0.0.\n  Pass a number above 0 and at most 1, which keeps all tokens."),
        ({"top_p": np.array([0.5] * 7 + [1.5])}, "top_p is 1.5.\n"),
        ({"min_p": 1.25}, "min_p is 1.25.\n  Pass a number from 0, which keeps all tokens, to 1."),
        (
            {"temperature": -0.5},
            "temperature is -0.5.\n  Pass 0, which chooses the likeliest token, or a number above 0.",
        ),
        ({"temperature": float("nan")}, "temperature is nan.\n"),
        ({"temperature": np.ones(3)}, "temperature has shape (3,).\n  Pass shape (8,), one value for each row of B."),
        ({"seeds": 3}, "seeds has shape ().\n  Pass shape (8,), one value for each row of B."),
        ({"seeds": np.ones(8)}, "seeds is an array of float64.\n  Cast it to integers."),
        ({"positions": np.arange(4)}, "positions has shape (4,).\n  Pass shape (8,), one value for each row of B."),
    ],
)
def test_bad_settings_are_refused_by_name(change, message, make_mesh):
    with pytest.raises(ValueError) as refused:
        drawn(make_mesh({"x": 4}), LOGITS, **change)
    assert str(refused.value).startswith(f"cannot sample from 'BV_x' over 'V': {message}")


def test_logits_of_another_shape_are_refused(make_mesh):
    for x, spec in ((LOGITS[0], "V"), (LOGITS.reshape(2, 2, 2, 24), "BCLV"), (LOGITS[:, :0], "BV")):
        with pytest.raises(gspmd.SpecError, match=r"Pass \[B, V\] or \[B, L, V\], with V not 0"):
            drawn(make_mesh({"x": 4}), x, spec)
