"""Attention to a cache and writing to it, wherever it lies, against plain numpy: one row and head at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops import cached_attention, quantize_heads, write_cache
from gspmd.ops._attention import local

MESHES = ({"x": 8, "y": 1, "z": 1}, {"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2, "z": 1})


def plain(q, k, v, cached_k, cached_v, lengths, scale=None):
    """Every row and head by itself: softmax over its cached keys and over the new ones up to the query."""
    out = np.zeros(q.shape)
    for b, i, h in np.ndindex(*q.shape[:3]):
        head = h * k.shape[2] // q.shape[2]
        keys = np.concatenate([cached_k[b, : lengths[b], head], k[b, : i + 1, head]]).astype(np.float64)
        values = np.concatenate([cached_v[b, : lengths[b], head], v[b, : i + 1, head]]).astype(np.float64)
        logits = keys @ q[b, i, h] * (q.shape[3] ** -0.5 if scale is None else scale)
        weights = np.exp(logits - logits.max())
        out[b, i, h] = weights @ values / weights.sum()
    return out


def written(cache, new, lengths):
    """Every new key at its own position of its row, one by one."""
    cache = np.array(cache)
    for n, b, i in np.ndindex(*new.shape[:3]):
        if 0 <= lengths[b] + i < cache.shape[2]:
            cache[n, b, lengths[b] + i] = new[n, b, i]
    return cache


class Case:
    """Arrays and specs; `extra` is what an int8 cache has besides."""

    def __init__(self, rng, sizes, specs, int8=False):
        b, n, t, h, k, d = (sizes[dim] for dim in "BLTHKD")
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        self.new = draw(b, n, h, d), draw(b, n, k, d), draw(b, n, k, d)
        self.cache = 3 * draw(b, t, k, d), draw(b, t, k, d)
        self.lengths = rng.integers(0, t + 1, b).astype(np.int32)
        self.lengths[: min(b, 3)] = (0, t, min(1, t))[: min(b, 3)]
        self.query, self.key, self.held = specs
        self.operands, self.specs, self.scales = (*self.new, *self.cache), [self.query, *[self.key] * 2], {}
        if int8:
            (whole_k, k_scales), (whole_v, v_scales) = (map(np.asarray, quantize_heads(x)) for x in self.cache)
            self.cache = whole_k * k_scales[..., None], whole_v * v_scales[..., None]
            self.operands = *self.new, whole_k, whole_v
            self.scales = {"key_scales": k_scales, "value_scales": v_scales}
        self.specs += [self.held] * 2

    def check(self, mesh, place, lowering="blocking"):
        """Compare the value with numpy's, and what is compiled with what is planned. Returns the plan."""
        scale_spec = str(gspmd.Spec.parse(self.held).without("D"))
        with jax.set_mesh(mesh), gspmd.lowering(lowering):
            operands = [place(mesh, x, spec) for x, spec in zip(self.operands, self.specs)]
            scales = {name: place(mesh, x, scale_spec) for name, x in self.scales.items()}

            @jax.jit
            def attend(operands, lengths, scales):
                return cached_attention(*operands, self.query, self.key, self.held, lengths=lengths, **scales)

            compiled = attend.lower(operands, self.lengths, scales).compile()
            planned = gspmd.trace(attend, operands, self.lengths, scales)
            got = compiled(operands, self.lengths, scales)
        np.testing.assert_allclose(got, plain(*self.new, *self.cache, self.lengths), rtol=1e-5, atol=1e-5)
        assert got.sharding.is_equivalent_to(place(mesh, self.new[0], self.query).sharding, 4)
        if lowering != "xla":
            compared = gspmd.ledger(compiled, mesh).compare(planned)
            assert not compared.differing, compared
        return {(kind, "".join(axes)): count for (kind, axes), (count, _) in planned.by_kind_and_axes().items()}


GATHER, SCATTER, SUM, EXCHANGE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
CASES = {
    # query spec, key spec, cache spec, query heads, key heads, planned
    "multihead by heads": ("BLH_xyzD", "BLK_xyzD", "BTK_xyzD", 8, 8, {}),
    "multiquery by heads": ("BLH_xyzD", "BLKD", "BTKD", 8, 1, {}),
    "multiquery by batch": ("BLH_xyzD", "BLKD", "B_xyzTKD", 8, 1, {(EXCHANGE, "xyz"): 2}),
    "multiquery by batch over one axis": ("BLH_yzxD", "BLKD", "B_xTKD", 8, 1, {(EXCHANGE, "x"): 2}),
    "by length": ("BLH_xyzD", "BLKD", "BT_xyzKD", 8, 1, {(GATHER, "xyz"): 1, (SUM, "xyz"): 2, (SCATTER, "xyz"): 1}),
    "by batch, heads and length": (
        "B_xLH_yzD", "B_xLK_yD", "B_xT_zK_yD", 8, 2, {(GATHER, "z"): 1, (SUM, "z"): 2, (SCATTER, "z"): 1},
    ),
    "grouped, keys replicated": ("BLH_xyzD", "BLK_xD", "BTK_xD", 8, 2, {}),
    "grouped, cache whole": ("B_xLH_yzD", "B_xLK_yD", "BTKD", 8, 4, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_value_and_plan(case, make_mesh, place):
    query, key, held, heads, key_heads, expected = CASES[case]
    sizes = {"B": 8, "L": 2, "T": 8, "H": heads, "K": key_heads, "D": 4}
    planned = Case(np.random.default_rng(0), sizes, (query, key, held)).check(make_mesh(MESHES[1]), place)
    assert planned == expected


OPEN = [("B_?LH_?D", "B_?LK_?D", "BTKD"), ("BL_?H_xD", "BL_?KD", "B_?T_yKD"), ("B_xLH_?D", "BLKD", "B_xT_?K_?D")]


@pytest.mark.parametrize("specs", OPEN)
def test_the_compiler_places_what_is_left_open(specs, make_mesh):
    case, mesh = Case(np.random.default_rng(0), SIZES, specs), make_mesh({"x": 2, "y": 2}, "auto")
    with jax.set_mesh(mesh), gspmd.lowering("xla"):
        attend = jax.jit(lambda *a: cached_attention(*a, *specs, lengths=case.lengths))
        got = attend(*(gspmd.annotate(jnp.asarray(x), spec) for x, spec in zip(case.operands, case.specs)))
    np.testing.assert_allclose(got, plain(*case.new, *case.cache, case.lengths), rtol=1e-5, atol=1e-5)


def random_spec(rng, dims, sizes, mesh):
    """Each mesh axis, in a random order, shards a random dimension that it divides, or none."""
    axes, left = {dim: [] for dim in dims}, dict(sizes)
    for axis in rng.permutation(list(mesh)):
        fitting = [dim for dim in dims[:3] if left[dim] % mesh[axis] == 0]
        if fitting and rng.random() < 0.8:
            dim = str(rng.choice(fitting))
            axes[dim].append(str(axis))
            left[dim] //= mesh[axis]
    return str(gspmd.Spec(tuple(dims), tuple(tuple(axes[dim]) for dim in dims)))


def random_case(seed):
    rng = np.random.default_rng(seed)
    mesh = MESHES[seed % 3]
    sizes = {
        dim: int(rng.choice(some))
        for dim, some in zip("BLTKD", ((2, 4, 8, 1), (1, 2, 3, 4), (8, 4, 1, 16), (1, 2, 3, 4), (2, 4, 1)))
    }
    sizes["H"] = sizes["K"] * int(rng.choice((1, 2, 4, 8, 3)))
    specs = [random_spec(rng, dims, sizes, mesh) for dims in ("BLHD", "BLKD", "BTKD")]
    return mesh, Case(rng, sizes, specs, int8=seed % 5 == 4)


@pytest.mark.parametrize("seed", [*range(9), *(pytest.param(n, marks=pytest.mark.slow) for n in range(9, 90))])
def test_random_placements(seed, make_mesh, place):
    """Any placement of queries, keys and cache, ragged lengths with 0 and T among them, int8 in every fifth case."""
    mesh, case = random_case(seed)
    mesh = make_mesh(mesh, ("explicit", "auto")[seed // 4 % 2])  # each lowering meets both types of axes
    case.check(mesh, place, ("blocking", "xla", "looped", "blocking")[seed % 4])


def test_one_query_of_a_key_head_goes_with_a_second_on_a_tpu(make_mesh, place, monkeypatch):
    """Which is dropped again, and nothing else changes."""
    lengths, original = set(), local.attend

    def record(q, *rest, **more):
        lengths.add(q.shape[3])
        return original(q, *rest, **more)

    monkeypatch.setattr(local, "attend", record)
    monkeypatch.setattr("gspmd.lowerings.target.device_kind", lambda: "TPU v4")
    case = Case(np.random.default_rng(0), SIZES | {"L": 1, "K": 4}, ("BLH_xD", "BLK_xD", "BTK_xD"))
    jax.clear_caches()
    assert case.check(make_mesh({"x": 4}), place) == {}
    assert lengths == {2}
    jax.clear_caches()


# -- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 30))])
def test_writes_each_row_at_its_own_position(seed, make_mesh, place):
    """Any placement of the cache and the new keys; what would stand beyond T is dropped; planned as compiled."""
    mesh, case = random_case(seed)
    layers, scales, mesh = 1 + seed % 2, seed % 4 == 2, make_mesh(mesh, ("explicit", "auto")[seed // 3 % 2])
    new, cache = (np.stack([x] * layers) for x in (case.new[1], case.cache[0]))
    specs = [gspmd.Spec.parse(spec) for spec in (case.held, case.key)]
    if scales:
        new, cache, specs = new[..., 0], cache[..., 0], [spec.without("D") for spec in specs]
    if seed % 4 == 1:
        new, cache = (np.rint(10 * x).astype(np.int8) for x in (new, cache))
    stacked = [gspmd.Spec(("N", *spec.dims), ((), *spec.axes)) for spec in specs]
    lowering = ("blocking", "looped", "xla")[(seed + seed // 3) % 3]  # each meets every mesh
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        operands = [place(mesh, x, spec) for x, spec in zip((cache, new), stacked)]
        write = jax.jit(lambda cache, new, lengths: write_cache(cache, new, *specs, lengths=lengths))
        compiled = write.lower(*operands, case.lengths).compile()
        planned = gspmd.trace(write, *operands, case.lengths)
        got = compiled(*operands, case.lengths)
    np.testing.assert_array_equal(got, written(cache, new, case.lengths))
    assert got.sharding.is_equivalent_to(operands[0].sharding, got.ndim)
    if lowering != "xla":
        compared = gspmd.ledger(compiled, mesh).compare(planned)
        assert not compared.differing, compared


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_a_donated_cache_is_written_in_place(lowering, make_mesh):
    """Temporary memory does not grow with the cache."""
    mesh, temporary = make_mesh({"x": 2, "y": 2}), []
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        for length in (64, 4096):
            spec = jax.P(None, "x", "y")
            cache = jax.ShapeDtypeStruct((2, 4, length, 1, 8), "float32", sharding=jax.NamedSharding(mesh, spec))
            new, lengths = jax.ShapeDtypeStruct((2, 4, 3, 1, 8), "float32"), jax.ShapeDtypeStruct((4,), "int32")

            def write(cache, new, lengths):
                return write_cache(cache, new, "B_xT_yKD", "BLKD", lengths=lengths)

            stats = jax.jit(write, donate_argnums=0).lower(cache, new, lengths).compile().memory_analysis()
            assert stats.alias_size_in_bytes >= 2 * 2 * length // 2 * 8 * 4
            temporary.append(stats.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize(("length", "dtype"), [(1, "int8"), (1, "float32"), (3, "float32")])
def test_positions_outside_of_the_cache_are_dropped(length, dtype, lowering, make_mesh):
    """Those below 0 too; and N may be a dimension of the specs."""
    lengths = np.array([-4, -1, 0, 7, 8, 9], np.int32)
    cache, new = (
        np.zeros((2, 6, 8, 1, 2), dtype),
        np.arange(1, 24 * length + 1).reshape(2, 6, length, 1, 2).astype(dtype),
    )
    with jax.set_mesh(make_mesh({"x": 2, "y": 2}, "auto")), gspmd.lowering(lowering):
        got = jax.jit(lambda *a: write_cache(*a, "N_xT_yKD", "N_xLKD", lengths=lengths))(cache, new)
    np.testing.assert_array_equal(got, written(cache, new, lengths))


def test_int8_heads():
    """Within half a step of every number, a step being the head's largest magnitude over 127; zeros stay zeros."""
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 16)).astype(np.float32)
    x[0, 0] = 0
    whole, scales = quantize_heads(x)
    assert whole.dtype == jnp.int8
    assert scales.dtype == jnp.float32
    np.testing.assert_allclose(scales, np.abs(x).max(-1) / 127, rtol=1e-6)
    assert (
        np.abs(np.asarray(whole) * np.asarray(scales)[..., None] - x) <= 0.5001 * np.asarray(scales)[..., None]
    ).all()
    assert np.abs(whole).max() == 127


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
            gspmd.PlanError, match="cannot differentiate 'cached attention BLHD, BTKD': a cache is read"
        ):
            jax.grad(lambda q: cached_attention(q, *rest, "BLHD", "BLKD", "BTKD", lengths=case.lengths).sum())(q)
        with pytest.raises(gspmd.PlanError, match="cannot differentiate 'cache NBTKD, NBLKD': a cache is written"):
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
        "  there are 2 queries in a row, and 1 keys.",
    ]
    assert "2 key heads do not divide 3 heads." in message(q[:, :, :3], k, v, cached_k, cached_v)
    assert "batch 4 has a cache of 2 rows." in message(q, k, v, cached_k[:2], cached_v[:2])
    assert "cached heads are (1, 4), new (2, 4)." in message(q, k, v, cached_k[:, :, :1], cached_v[:, :, :1])
    assert "lengths have shape (3,), and have to be one a row." in message(
        q, k, v, cached_k, cached_v, lengths=case.lengths[:3]
    )
    assert "one is missing" in message(q, k, v, cached_k, cached_v, key_scales=cached_k[..., 0])
    int8 = [x.astype(jnp.int8) for x in (cached_k, cached_v)]
    scales = {"key_scales": cached_k[..., 0], "value_scales": cached_v[..., 0]}
    assert "the cache is int8, and has no scales: give key_scales and value_scales" in message(q, k, v, *int8)
    assert "the cache is int8, and has no scales" in message(q, k, v, cached_k, int8[1])
    assert "the cache is float32, and scales are those of int8: give none." in message(
        q, k, v, cached_k, cached_v, **scales
    )
    sharded = message(q, k, v, cached_k, cached_v, specs=("BLHD", "BLKD", "BTKD_x"), kind=gspmd.PlanError)
    assert "the head size is sharded over x, and every device needs whole heads." in sharded
    assert "Use 'BTKD', or shard another dimension." in sharded


def test_refuses_to_write_what_does_not_agree(make_mesh):
    cache, new = jnp.zeros((2, 4, 8, 2, 4)), jnp.zeros((2, 4, 3, 2, 4))

    def message(cache, new, rows=4):
        lengths = np.zeros(rows, np.int32)
        with jax.set_mesh(make_mesh({"x": 2}, "auto")), pytest.raises(gspmd.SpecError) as error:
            write_cache(cache, new, "BTKD", "BLKD", lengths=lengths)
        return str(error.value)

    assert message(cache[0], new[0]).splitlines() == [
        "cannot write 'BLKD' to the cache 'BTKD': cache has shape (4, 8, 2, 4).",
        "  Pass all layers, [N, B, T, K, D], or scales [N, B, T, K]; the spec leaves out N.",
    ]
    assert "cache has shape (2, 4)." in message(cache[:, :, 0, 0, 0], new)
    assert message(cache, new[:, :, :, :1]).splitlines() == [
        "cannot write 'BLKD' to the cache 'BTKD'",
        "    BLKD",
        "     ^",
        "  new heads are (1, 4), and cached (2, 4).",
    ]
    assert "1 new layers, and 2 cached." in message(cache, new[:1])
    assert "new keys are float32, and the cache is int8: cast them." in message(cache.astype("int8"), new)
    assert "lengths have shape (2,), and have to be one a row." in message(cache, new, rows=2)
