"""Attention to a cache, wherever and in whatever order it lies, against plain numpy: one row and head at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops import cached_attention, quantize_heads, write_cache
from tests.references.caches import MESHES, Case, plain, random_case, written

GATHER, SCATTER, SUM, EXCHANGE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
CASES = {
    # query spec, key spec, cache spec, query heads, key heads, planned
    "multihead by heads": ("BLH_xyzD", "BLK_xyzD", "BTK_xyzD", 8, 8, {}),
    "multiquery by heads": ("BLH_xyzD", "BLKD", "BTKD", 8, 1, {}),
    "multiquery by batch": ("BLH_xyzD", "BLKD", "B_xyzTKD", 8, 1, {(EXCHANGE, "xyz"): 2}),
    "multiquery by batch over one axis": ("BLH_yzxD", "BLKD", "B_xTKD", 8, 1, {(EXCHANGE, "x"): 2}),
    "by length": ("BLH_xyzD", "BLKD", "BT_xyzKD", 8, 1, {(GATHER, "xyz"): 1, (SUM, "xyz"): 2, (SCATTER, "xyz"): 1}),
    "by batch, heads and length": (
        "B_xLH_yzD", "B_xLK_yD", "B_xK_yT_zD", 8, 2, {(GATHER, "z"): 1, (SUM, "z"): 2, (SCATTER, "z"): 1},
    ),
    "grouped, keys replicated": ("BLH_xyzD", "BLK_xD", "BK_xTD", 8, 2, {}),
    "grouped, cache whole": ("B_xLH_yzD", "B_xLK_yD", "BTKD", 8, 4, {}),
}  # fmt: skip


@pytest.mark.turns(4)
@pytest.mark.parametrize("case", CASES)
def test_value_and_plan(case, make_mesh, place):
    query, key, held, heads, key_heads, expected = CASES[case]
    sizes = {"B": 8, "L": 2, "T": 8, "H": heads, "K": key_heads, "D": 4}
    planned = Case(np.random.default_rng(0), sizes, (query, key, held)).check(make_mesh(MESHES[1]), place)
    assert planned == expected


@pytest.mark.turns(2)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("specs", [("BLH_xyzD", "BLKD", "B_xT_yKD"), ("B_xLH_yzD", "B_xLKD", "BT_yKD")])
@pytest.mark.parametrize("lowering", ["blocking", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize("within", [False, True])
def test_values_narrower_than_keys(within, int8, length, specs, lowering, make_mesh, place):
    """Values of their own; or within the keys, as a latent with a rotated key behind it, thirty times as large."""
    sizes = {"B": 4, "L": length, "T": 8, "H": 8, "K": 1, "D": 6}
    case = Case(np.random.default_rng(0), sizes, specs, int8=int8, width=4, within=within)
    case.check(make_mesh(MESHES[1]), place, lowering)


def test_the_rest_of_keys_is_rounded_by_its_own_scale():
    """One scale for both would round a latent thirty times as small to a few steps."""
    sizes, specs = {"B": 4, "L": 2, "T": 64, "H": 8, "K": 1, "D": 96}, ("BLHD", "BLKD", "BTKD")
    exact, apart = (
        Case(np.random.default_rng(0), sizes, specs, int8=int8, width=64, within=True) for int8 in (False, True)
    )
    whole, scales = map(np.asarray, quantize_heads(exact.cache[0]))
    near = whole * scales[..., None]
    found = [plain(*exact.new, *cache, exact.lengths) for cache in (exact.cache, apart.cache, (near, near[..., :64]))]
    off = [np.linalg.norm(x - found[0]) / np.linalg.norm(found[0]) for x in found[1:]]
    assert off[0] < 0.015 < 0.1 < off[1]


OPEN = [("B_?LH_?D", "B_?LK_?D", "BKTD"), ("BL_?H_xD", "BL_?KD", "B_?T_yKD"), ("B_xLH_?D", "BLKD", "B_xT_?K_?D")]


@pytest.mark.parametrize("specs", OPEN)
def test_the_compiler_places_what_is_left_open(specs, make_mesh):
    case, mesh = Case(np.random.default_rng(0), SIZES, specs), make_mesh({"x": 2, "y": 2}, "auto")
    with jax.set_mesh(mesh), gspmd.lowering("xla"):
        attend = jax.jit(lambda *a: cached_attention(*a, *specs, lengths=case.lengths))
        got = attend(*(gspmd.annotate(jnp.asarray(x), spec) for x, spec in zip(case.operands, case.specs)))
    np.testing.assert_allclose(got, plain(*case.new, *case.cache, case.lengths), rtol=1e-5, atol=1e-5)


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", [*range(9), *(pytest.param(n, marks=pytest.mark.slow) for n in range(9, 90))])
def test_random_placements(seed, make_mesh, place):
    """Any placement of queries, keys and cache, ragged lengths with 0 and T among them, int8 in every sixth case.

    The dimensions of the cache stand in five orders.
    """
    mesh, case = random_case(seed)
    mesh = make_mesh(mesh, ("explicit", "auto")[seed // 4 % 2])  # each lowering meets both types of axes
    case.check(mesh, place, ("blocking", "xla", "looped", "blocking")[seed % 4])


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("heads", "key_heads", "specs", "products"),
    [
        (4, 4, ("BLH_xD", "BLK_xD", "BTK_xD"), {("bkqld,btkd->bkqlt", 2)}),  # alone with its key head: in two rows
        (8, 8, ("BLH_xD", "BLK_xD", "BTK_xD"), {("bhkd,btkd->bht", 2)}),
        (16, 8, ("BLH_xD", "BLK_xD", "BTK_xD"), {("bhkd,btkd->bht", 4)}),
        (12, 1, ("BLH_xD", "BLKD", "BTKD"), {("bhkd,btkd->bht", 8)}),  # three of one key head in a tile of eight
        (64, 2, ("BLH_xD", "BLKD", "BT_yKD"), {("bkqld,btkd->bkqlt", 1)}),  # enough of them as they are
        (8, 8, ("B_xLHD", "B_xLKD", "B_xKTD"), {("bhkd,btkd->bht", 8)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("int8", [False, True])
def test_one_query_of_each_row_on_a_tpu(heads, key_heads, specs, products, int8, make_mesh, place, monkeypatch):
    """Heads are rows of one product; one alone goes with a second, which is dropped. Nothing else changes."""
    made, original = set(), jnp.einsum

    def record(letters, x, y, **more):
        if letters.startswith("b") and letters.endswith("t") and y.shape[1] > 1:
            made.add((letters, x.shape[1 if "h" in letters else 3]))
        return original(letters, x, y, **more)

    monkeypatch.setattr(jnp, "einsum", record)
    monkeypatch.setattr("gspmd.lowerings.in_force.device_kind", lambda: "TPU v4")
    sizes = SIZES | {"L": 1, "T": 16, "H": heads, "K": key_heads}
    case = Case(np.random.default_rng(0), sizes, specs, int8=int8)
    jax.clear_caches()
    case.check(make_mesh({"x": 4, "y": 2}), place)
    if int8 and heads == 2 * key_heads:  # whose scales would be repeated
        products = {("bkqld,btkd->bkqlt", 1)}
    assert made == products
    jax.clear_caches()


# -- transformations --------------------------------------------------------------------------------------------------

SIZES = {"B": 4, "L": 2, "T": 8, "H": 4, "K": 2, "D": 4}
SPECS = ("B_xLH_yD", "B_xLK_yD", "BT_xK_yD")


def test_scans_over_layers_and_batches(make_mesh, place):
    """A scan over stacked layers, and jax.vmap over a dimension in front, give what each gives by itself."""
    case, mesh = Case(np.random.default_rng(0), SIZES, SPECS), make_mesh({"x": 2, "y": 2})
    one = plain(*case.new, *case.cache, case.lengths)
    two = plain(*case.new, case.cache[0][::-1], case.cache[1], case.lengths)
    with jax.set_mesh(mesh):
        new = [place(mesh, x, spec) for x, spec in zip(case.new, case.specs)]
        caches = [
            jax.device_put(np.stack([x, x[::step]]), jax.NamedSharding(mesh, jax.P(None, None, "x", "y")))
            for x, step in zip(case.cache, (-1, 1))
        ]

        def attend(cached_k, cached_v):
            return cached_attention(*new, cached_k, cached_v, *SPECS, lengths=case.lengths)

        scanned = jax.jit(lambda *caches: jax.lax.scan(lambda _, layer: (None, attend(*layer)), None, caches)[1])(
            *caches
        )
        mapped = jax.jit(jax.vmap(attend))(*caches)
    np.testing.assert_allclose(scanned, np.stack([one, two]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mapped, np.stack([one, two]), rtol=1e-5, atol=1e-5)


def _operands(case):
    return [jnp.asarray(x) for x in case.operands]


@pytest.mark.parametrize("empty", ["B", "L", "T"])
def test_nothing_to_do(empty, make_mesh):
    """No rows and no new tokens give nothing, and leave the cache as it is; an empty cache is not attended to."""
    specs = "BLH_xD", "BLK_xD", "BTK_xD"
    case = Case(np.random.default_rng(0), SIZES | {empty: 0}, specs)
    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        y = jax.jit(lambda *operands: cached_attention(*operands, *specs, lengths=case.lengths))(*_operands(case))
        np.testing.assert_allclose(y, plain(*case.new, *case.cache, case.lengths), rtol=1e-5, atol=1e-5)
        cache, new = jnp.asarray(case.cache[0])[None], jnp.asarray(case.new[1])[None]
        np.testing.assert_array_equal(
            write_cache(cache, new, "BTKD", "BLKD", lengths=case.lengths), written(cache, new, case.lengths)
        )


def test_refuses_to_be_differentiated(make_mesh):
    case = Case(np.random.default_rng(0), SIZES, ("BLHD", "BLKD", "BTKD"))
    q, *rest = _operands(case)
    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        with pytest.raises(
            gspmd.PlanError, match="cannot differentiate 'cached attention BLHD, BTKD': it reads a cache"
        ):
            jax.grad(lambda q: cached_attention(q, *rest, "BLHD", "BLKD", "BTKD", lengths=case.lengths).sum())(q)
        with pytest.raises(gspmd.PlanError, match="cannot differentiate 'cache NBTKD, NBLKD': it writes a cache"):
            jax.grad(lambda x: write_cache(x[None], rest[0][None], "BTKD", "BLKD", lengths=case.lengths).sum())(rest[2])


def test_refuses_what_does_not_agree(make_mesh):
    case = Case(np.random.default_rng(0), SIZES, SPECS)
    q, k, v, cached_k, cached_v = _operands(case)

    def message(*operands, specs=("BLHD", "BLKD", "BTKD"), lengths=case.lengths, kind=gspmd.SpecError, **more):
        with jax.set_mesh(make_mesh({"x": 2}, "auto")), pytest.raises(kind) as error:
            cached_attention(*operands, *specs, lengths=lengths, **more)
        return str(error.value)

    assert message(q, k[:, :1], v[:, :1], cached_k, cached_v).splitlines() == [
        "cannot attend from 'BLHD' to the cache 'BTKD'",
        "    BLKD",
        "     ^",
        "  queries have length 2, but keys have length 1.",
    ]
    assert "2 key heads do not divide 3 heads." in message(q[:, :, :3], k, v, cached_k, cached_v)
    assert "the batch has size 4, but the cache has 2 rows." in message(q, k, v, cached_k[:2], cached_v[:2])
    assert "cached heads have shape (1, 4), but new heads have (2, 4)." in message(
        q, k, v, cached_k[:, :, :1], cached_v[:, :, :1]
    )
    assert "lengths must have shape (4,), one number per row, but the shape is (3,)." in message(
        q, k, v, cached_k, cached_v, lengths=case.lengths[:3]
    )
    assert "one is missing" in message(q, k, v, cached_k, cached_v, key_scales=cached_k[..., 0])
    int8 = [x.astype(jnp.int8) for x in (cached_k, cached_v)]
    assert "there are rest_scales, but no key_scales" in message(
        q, k, v, cached_k, cached_v, rest_scales=cached_k[..., 0]
    )
    both = {"key_scales": cached_k[..., 0], "rest_scales": cached_k[..., 0]}
    assert "there are rest_scales, but no value_width" in message(
        q, k, v, cached_k, cached_v, value_scales=cached_k[..., 0], **both
    )
    assert "values are as wide as keys, so rest_scales have nothing to scale." in message(
        q, k, None, int8[0], None, value_width=4, **both
    )
    assert "(value_width), so v has no use" in message(q, k, v, cached_k, None, value_width=2)
    assert "value_width is 0." in message(q, k, None, cached_k, None, value_width=0)
    assert "the head size of the values is 5, but that of the keys is 4." in message(
        q, k, None, cached_k, None, value_width=5
    )
    wide = [jnp.concatenate([x, x], axis=-1) for x in (v, cached_v)]
    assert "the head size of the values is 8, but that of the keys is 4." in message(q, k, wide[0], cached_k, wide[1])
    assert "cached_v is missing" in message(q, k, v, cached_k, None)
    scales = {"key_scales": cached_k[..., 0], "value_scales": cached_v[..., 0]}
    assert "the cache is int8, and has no scales: give key_scales and value_scales" in message(q, k, v, *int8)
    assert "the cache is int8, and has no scales" in message(q, k, v, cached_k, int8[1])
    assert "the cache is float32, and only an int8 cache has scales: give none." in message(
        q, k, v, cached_k, cached_v, **scales
    )
    sharded = message(q, k, v, cached_k, cached_v, specs=("BLHD", "BLKD", "BTKD_x"), kind=gspmd.PlanError)
    assert "the head size is sharded over x, and every device needs whole heads." in sharded
    assert "Use 'BTKD', or shard another dimension." in sharded
