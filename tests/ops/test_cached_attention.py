"""Attention to a cache, and writing to it: any placement, any lengths, against plain numpy, one row and head at a time."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops import cached_attention, quantize_heads, write_cache

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
        if lengths[b] + i < cache.shape[2]:
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
    "by length": ("BLH_xyzD", "BLKD", "BT_xyzKD", 8, 1, {(GATHER, "xyz"): 1, (SUM, "xyz"): 1, (SCATTER, "xyz"): 2}),
    "by batch, heads and length": (
        "B_xLH_yzD", "B_xLK_yD", "B_xT_zK_yD", 8, 2, {(GATHER, "z"): 1, (SUM, "z"): 1, (SCATTER, "z"): 2},
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


@pytest.mark.parametrize("seed", [*range(9), *(pytest.param(n, marks=pytest.mark.slow) for n in range(9, 150))])
def test_random_placements(seed, make_mesh, place):
    """Any placement of queries, keys and cache, ragged lengths with 0 and T among them, int8 in every fifth case."""
    mesh, case = random_case(seed)
    case.check(
        make_mesh(mesh, ("explicit", "auto")[seed % 2]), place, ("blocking", "xla", "looped", "blocking")[seed % 4]
    )
