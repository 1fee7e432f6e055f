"""Writing to a cache, wherever and in whatever order it lies, against plain numpy, and keys as int8 with scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.lowerings import in_force
from gspmd.ops import quantize_heads, write_cache
from gspmd.ops._attention.cache import _value, _written_at_once
from tests.references.caches import random_case, stored, written


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
        operands = [place(mesh, x, spec) for x, spec in zip((stored(cache, specs[0]), new), stacked)]
        write = jax.jit(lambda cache, new, lengths: write_cache(cache, new, *specs, lengths=lengths))
        compiled = write.lower(*operands, case.lengths).compile()
        planned = gspmd.trace(write, *operands, case.lengths)
        got = compiled(*operands, case.lengths)
    np.testing.assert_array_equal(got, stored(written(cache, new, case.lengths), specs[0]))
    assert got.sharding.is_equivalent_to(operands[0].sharding, got.ndim)
    if lowering != "xla":
        compared = gspmd.ledger(compiled, mesh).compare(planned)
        assert not compared.differing, compared


@pytest.mark.parametrize("seed", range(8))
def test_on_gpus_every_cache_is_written_as_elsewhere(seed, make_mesh, monkeypatch):
    """Rings, int8, padding and caches that are sharded by rows, heads or tokens: by one scatter, and row by row."""
    rng = np.random.default_rng(seed)
    held = "".join(rng.permutation([*"BKTD"]))
    held = held.replace("B", "B_x" if seed % 2 else "B").replace(*("T", "T_y") if seed % 4 < 2 else ("K", "K_y"))
    sizes = {"B": 4, "K": 2, "T": int(rng.choice([4, 8, 12])), "D": 2}
    spec = gspmd.Spec.parse(held)
    length, ring, dtype = int(rng.choice([1, 3, 9])), seed % 3 > 0, ("float32", "int8")[seed // 2 % 2]
    cache = np.rint(10 * rng.normal(size=[2, *(sizes[dim] for dim in spec.dims)])).astype(dtype)
    new = np.rint(10 * rng.normal(size=[2, 4, length, 2, 2])).astype(dtype)
    lengths = rng.integers(0 if ring else -12, 20, 4).astype("int32")
    counts = rng.integers(-1, length + 2, 4).astype("int32") if seed % 4 else None
    got = []
    for gpus in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(in_force, "is_gpu", lambda gpus=gpus: gpus)
            jax.clear_caches()  # A program is kept by its arguments and the kind of the devices.
            _value.cache_clear()
            with jax.set_mesh(make_mesh({"x": 2, "y": 2})), gspmd.lowering("blocking"):
                stored = jax.NamedSharding(jax.sharding.get_mesh(), jax.P(None, *spec.partition_spec()))
                write = jax.jit(
                    lambda *given: write_cache(*given, held, "BLKD", lengths=lengths, counts=counts, ring=ring)
                )
                got.append(np.asarray(write(jax.device_put(cache, stored), new)))
    jax.clear_caches()
    _value.cache_clear()
    np.testing.assert_array_equal(*got)


@pytest.mark.parametrize("order", ["NBKTD", "NBTKD", "NTBKD", "BNKDT", "TKBDN", "KNBT"])
def test_a_gpu_writes_all_rows_at_once(order):
    """Against plain numpy: rows that begin before the part or end after it, and padding that is not written."""
    rng, sizes = np.random.default_rng(0), {"N": 2, "B": 4, "K": 2, "T": 6, "D": 3}
    batch, along = order.index("B"), order.index("T")
    for length in (1, 3, 8):
        cache, new = (rng.normal(size=[(sizes | {"T": n})[dim] for dim in order]) for n in (6, length))
        first, begins = np.array([-1, 2, 5, -7]), np.array([0, 0, 1, 0])
        ends = np.minimum(length, np.array([2, 8, 8, 8]))
        wanted = cache.copy()
        for row in range(4):
            for token in range(begins[row], ends[row]):
                if 0 <= (at := first[row] + token) < 6:
                    place, source = [slice(None)] * len(order), [slice(None)] * len(order)
                    place[batch], place[along], source[batch], source[along] = row, at, row, token
                    wanted[tuple(place)] = new[tuple(source)]
        given = (*map(jnp.asarray, (cache, new, first)), (jnp.asarray(begins), jnp.asarray(ends)))
        np.testing.assert_array_equal(_written_at_once(*given, batch, along), wanted.astype("float32"))


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("ring", [False, True])
def test_a_donated_cache_is_written_in_place(ring, lowering, make_mesh):
    """Temporary memory does not grow with the cache."""
    mesh, temporary = make_mesh({"x": 2, "y": 2}), []
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        for length in (64, 4096):
            spec = jax.P(None, "x", None, "y")
            cache = jax.ShapeDtypeStruct((2, 4, 3, length, 8), "float32", sharding=jax.NamedSharding(mesh, spec))
            new, lengths = jax.ShapeDtypeStruct((2, 4, 3, 3, 8), "float32"), jax.ShapeDtypeStruct((4,), "int32")

            def write(cache, new, lengths):
                more = {"ring": True, "counts": lengths} if ring else {}
                return write_cache(cache, new, "B_xKT_yD", "BLKD", lengths=lengths, **more)

            stats = jax.jit(write, donate_argnums=0).lower(cache, new, lengths).compile().memory_analysis()
            assert stats.alias_size_in_bytes >= 2 * 2 * 3 * length // 2 * 8 * 4
            temporary.append(stats.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize(("length", "dtype"), [(1, "int8"), (1, "float32"), (3, "float32")])
def test_positions_outside_of_the_cache_are_dropped(length, dtype, lowering, make_mesh):
    """Positions below 0 are dropped too; and N may be a dimension of the specs."""
    lengths = np.array([-4, -1, 0, 7, 8, 9], np.int32)
    cache, new = (
        np.zeros((2, 6, 8, 1, 2), dtype),
        np.arange(1, 24 * length + 1).reshape(2, 6, length, 1, 2).astype(dtype),
    )
    with jax.set_mesh(make_mesh({"x": 2, "y": 2}, "auto")), gspmd.lowering(lowering):
        got = jax.jit(lambda *a: write_cache(*a, "N_xT_yKD", "N_xLKD", lengths=lengths))(cache, new)
    np.testing.assert_array_equal(got, written(cache, new, lengths))


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_a_cache_without_room_drops_everything(dtype, lowering, make_mesh):
    cache, new = jnp.zeros((1, 2, 1, 0, 4), dtype), jnp.ones((1, 2, 1, 1, 4), dtype)
    with jax.set_mesh(make_mesh({"x": 2}, "auto")), gspmd.lowering(lowering):
        got = write_cache(cache, new, "BKTD", "BLKD", lengths=jnp.array([0, 1]))
    assert got.shape == cache.shape
    assert got.dtype == dtype


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


def test_refuses_to_write_what_does_not_agree(make_mesh):
    cache, new = jnp.zeros((2, 4, 8, 2, 4)), jnp.zeros((2, 4, 3, 2, 4))

    def message(cache, new, rows=4, cache_spec="BTKD"):
        lengths = np.zeros(rows, np.int32)
        with jax.set_mesh(make_mesh({"x": 2}, "auto")), pytest.raises(gspmd.SpecError) as error:
            write_cache(cache, new, cache_spec, "BLKD", lengths=lengths)
        return str(error.value)

    assert message(cache[0], new[0]).splitlines() == [
        "cannot write 'BLKD' to the cache 'BTKD': cache has shape (4, 8, 2, 4).",
        "  Pass all layers, [N, B, K, T, D], or scales [N, B, K, T]; the spec leaves out N.",
    ]
    assert "cache has shape (2, 4)." in message(cache[:, :, 0, 0, 0], new)
    assert message(cache, new[:, :, :, :1]).splitlines() == [
        "cannot write 'BLKD' to the cache 'BTKD'",
        "    BLKD",
        "     ^",
        "  new heads have shape (1, 4), but cached heads have (2, 4).",
    ]
    assert message(cache, new, cache_spec="BTHD").splitlines() == [
        "cannot write 'BLKD' to the cache 'BTHD'",
        "    BTHD",
        "    ^^^^",
        "  the cache needs B, K, D of the keys 'BLKD', in any order, and a letter of its own for the length.",
    ]
    assert "new has 1 layers, but the cache has 2." in message(cache, new[:1])
    assert "new keys are float32, but the cache is int8: cast the new keys." in message(cache.astype("int8"), new)
    assert "lengths must have shape (4,), one number per row, but the shape is (2,)." in message(cache, new, rows=2)
