"""Random caches of keys and values, attended to and written in plain numpy: one row and head at a time."""

import jax
import numpy as np

import gspmd
from gspmd.ops import cached_attention, quantize_heads

ORDERS = ("BKTD", "BTKD", "KBTD", "TDBK", "BKDT")
MESHES = ({"x": 8, "y": 1, "z": 1}, {"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2, "z": 1})


def plain(q, k, v, cached_k, cached_v, lengths, scale=None):
    """Every row and head by itself: softmax over its cached keys and over the new ones up to the query."""
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, i, h in np.ndindex(*q.shape[:3]):
        head = h * k.shape[2] // q.shape[2]
        keys = np.concatenate([cached_k[b, : lengths[b], head], k[b, : i + 1, head]]).astype(np.float64)
        values = np.concatenate([cached_v[b, : lengths[b], head], v[b, : i + 1, head]]).astype(np.float64)
        logits = keys @ q[b, i, h] * (q.shape[3] ** -0.5 if scale is None else scale)
        weights = np.exp(logits - logits.max())
        out[b, i, h] = weights @ values / weights.sum()
    return out


def written(cache, new, lengths):
    """Write every new key at its position of its row, one by one."""
    cache = np.array(cache)
    for n, b, i in np.ndindex(*new.shape[:3]):
        if 0 <= lengths[b] + i < cache.shape[2]:
            cache[n, b, lengths[b] + i] = new[n, b, i]
    return cache


def stored(x, held):
    """Return [..., B, T, K, D] in the order of `held`, or scales [..., B, T, K]."""
    dims = gspmd.Spec.parse(held).dims
    at = x.ndim - len(dims)
    return x.transpose(*range(at), *(at + "BTKD".index(dim) for dim in dims))


class Case:
    """Arrays and specs; the cache is [B, T, K, D] for numpy, and among the operands in the order of its spec.

    With a `width`, values are narrower than keys. If `within`, they are the first numbers of the keys, whose rest is
    larger and, in int8, has its own scales.
    """

    def __init__(self, rng, sizes, specs, int8=False, width=None, within=False):
        b, n, t, h, k, d = (sizes[dim] for dim in "BLTHKD")
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        self.new = draw(b, n, h, d), draw(b, n, k, d), draw(b, n, k, d)
        self.cache = 3 * draw(b, t, k, d), draw(b, t, k, d)
        if width and not within:
            self.new, self.cache = ((*keys, values[..., :width]) for *keys, values in (self.new, self.cache))
        if within:
            larger = np.where(np.arange(d) < width, 1, 30).astype(np.float32)
            self.new = self.new[0] / larger, self.new[1] * larger, (self.new[1] * larger)[..., :width]
            self.cache = self.cache[0] * larger, (self.cache[0] * larger)[..., :width]
        self.lengths = rng.integers(0, t + 1, b).astype(np.int32)
        self.lengths[: min(b, 3)] = (0, t, min(1, t))[: min(b, 3)]
        self.query, self.key, self.held = specs
        self.specs, self.scales, cache = [self.query, *[self.key] * 2], {}, self.cache
        if int8:
            spec, parts = gspmd.Spec.parse(self.held).without("D"), [*self.cache]
            if within:
                parts = [self.cache[0][..., :width], self.cache[1], self.cache[0][..., width:]]
            found = [[*map(np.asarray, quantize_heads(x))] for x in parts]
            self.scales = {
                name: stored(scales, spec)
                for name, (_, scales) in zip(("key_scales", "value_scales", "rest_scales"), found)
            }
            whole, near = [x for x, _ in found], [x * scales[..., None] for x, scales in found]
            cache, self.cache = ((np.concatenate([k, *rest], axis=-1), v) for k, v, *rest in (whole, near))
        self.operands = *self.new, *(stored(x, self.held) for x in cache)
        self.specs += [self.held] * 2
        self.options = {}
        if within:
            self.options["value_width"] = width
            self.operands = *self.operands[:2], None, self.operands[3], None
            self.scales.pop("value_scales", None)

    def check(self, mesh, place, lowering="blocking"):
        """Compare the value with numpy's, and the compiled program with the plan. Return the plan."""
        scale_spec = str(gspmd.Spec.parse(self.held).without("D"))
        with jax.set_mesh(mesh), gspmd.lowering(lowering):
            operands = [x if x is None else place(mesh, x, spec) for x, spec in zip(self.operands, self.specs)]
            scales = {name: place(mesh, x, scale_spec) for name, x in self.scales.items()}

            @jax.jit
            def attend(operands, lengths, scales):
                more = scales | self.options
                return cached_attention(*operands, self.query, self.key, self.held, lengths=lengths, **more)

            compiled = attend.lower(operands, self.lengths, scales).compile()
            planned = gspmd.trace(attend, operands, self.lengths, scales)
            got = compiled(operands, self.lengths, scales)
        np.testing.assert_allclose(got, plain(*self.new, *self.cache, self.lengths), rtol=1e-5, atol=1e-5)
        assert got.sharding.is_equivalent_to(place(mesh, self.new[0], self.query).sharding, 4)
        if lowering != "xla":
            compared = gspmd.ledger(compiled, mesh).compare(planned)
            assert not compared.differing, compared
        return {(kind, "".join(axes)): count for (kind, axes), (count, _) in planned.by_kind_and_axes().items()}


def random_spec(rng, dims, sizes, mesh):
    """Return a spec in which each mesh axis, in a random order, shards a random dimension that it divides, or none."""
    axes, left = {dim: [] for dim in dims}, dict(sizes)
    for axis in rng.permutation(list(mesh)):
        fitting = [dim for dim in dims if dim != "D" and left[dim] % mesh[axis] == 0]
        if fitting and rng.random() < 0.8:
            dim = str(rng.choice(fitting))
            axes[dim].append(str(axis))
            left[dim] //= mesh[axis]
    return str(gspmd.Spec(tuple(dims), tuple(tuple(axes[dim]) for dim in dims)))


def random_case(seed, mesh=None, factor=1):
    """Return a mesh and a case on it: the cache's dimensions in any order, some of them `factor` times as long."""
    rng = np.random.default_rng(seed)
    mesh = mesh or MESHES[seed % 3]
    sizes = {
        dim: int(rng.choice(some)) * (factor if dim in "BT" or (dim == "K" and factor > 1 and rng.integers(2)) else 1)
        for dim, some in zip("BLTKD", ((2, 4, 8, 1), (1, 2, 3, 4), (8, 4, 1, 16), (1, 2, 3, 4), (2, 4, 1)))
    }
    sizes["H"] = sizes["K"] * int(rng.choice((1, 2, 4, 8, 3)))
    specs = [random_spec(rng, dims, sizes, mesh) for dims in ("BLHD", "BLKD", ORDERS[seed % len(ORDERS)])]
    return mesh, Case(rng, sizes, specs, int8=seed % 6 == 4)
