"""A cache that a scan over layers reads and one write extends, by the compiler for TPUs, for a v4 slice."""

from importlib import util

import jax
import jax.numpy as jnp
import pytest

import gspmd
from gspmd.audit import compile_offline, topology
from gspmd.ops import cached_attention, quantize_heads, write_cache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"),
]
LAYERS, ROWS, LENGTH, HEADS, SIZE = 4, 64, 8192, 64, 256


def test_a_step_over_an_int8_cache_takes_no_longer_than_over_bfloat16():
    """Attention of all layers and the writes of keys and values, of which only the loops' first rounds are counted."""
    target = topology("tpu-v4:2x2x1")
    mesh = target.mesh({"x": 4})
    query, key, held = "B_xLHD", "B_xLKD", "B_xTKD"

    def abstract(dtype, *shape, layers=()):
        sharding = jax.NamedSharding(mesh, jax.P(*[None] * len(layers), "x"))
        return jax.ShapeDtypeStruct((*layers, *shape), dtype, sharding=sharding)

    def seconds(int8):
        cache = abstract(jnp.int8 if int8 else jnp.bfloat16, ROWS, LENGTH, 1, SIZE, layers=(LAYERS,))
        scales = [abstract(jnp.float32, ROWS, LENGTH, 1, layers=(LAYERS,))] * 2 * int8

        def step(q, k, lengths, keys, values, *scales):
            def layer(q, cache):
                names = dict(zip(("key_scales", "value_scales"), cache[2:]))
                y = cached_attention(q, k, k, *cache[:2], query, key, held, lengths=lengths, **names)
                return y, quantize_heads(y[:, :, :1])[0] if int8 else y[:, :, :1]

            y, new = jax.lax.scan(layer, q, (keys, values, *scales))
            return y, *(write_cache(old, new, held, key, lengths=lengths) for old in (keys, values))

        q, k = (abstract(jnp.bfloat16, ROWS, 1, heads, SIZE) for heads in (16, 1))
        lengths = jax.ShapeDtypeStruct((ROWS,), "int32", sharding=jax.NamedSharding(mesh, jax.P()))
        with gspmd.lowering("blocking"):
            report = compile_offline(step, q, k, lengths, cache, cache, *scales, topology=target, donate_argnums=(3, 4))
        return report.timeline.step_seconds

    assert seconds(int8=True) < seconds(int8=False)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("cache", ["B_xyzTKD", "BT_xyzKD", "B_xT_yzKD", "B_zTKD"])
def test_a_step_copies_no_cache_and_sends_what_is_planned(cache, int8):
    """Bytes agree exactly in bfloat16; temporaries are a small part of a layer of the cache, and nothing is padded."""
    target = topology("tpu-v4:4x4x4")
    mesh = target.mesh({"x": 4, "y": 4, "z": 4})
    query, key, held = "BLH_xyzD", "BLKD", gspmd.Spec.parse(cache)
    dtype = jnp.int8 if int8 else jnp.bfloat16

    def abstract(spec, *shape, dtype=jnp.bfloat16, layers=()):
        spec = gspmd.Spec.parse(spec)
        partition = jax.P(*[None] * len(layers), *spec.partition_spec())
        return jax.ShapeDtypeStruct((*layers, *shape), dtype, sharding=jax.NamedSharding(mesh, partition))

    q, k = abstract(query, ROWS, 1, HEADS, SIZE), abstract(key, ROWS, 1, 1, SIZE)
    caches = [abstract(held, ROWS, LENGTH, 1, SIZE, dtype=dtype, layers=(LAYERS,))] * 2
    scales = [abstract(held.without("D"), ROWS, LENGTH, 1, dtype=jnp.float32, layers=(LAYERS,))] * 2 * int8

    def step(q, k, lengths, caches, scales):
        def layer(state, cache):
            q, k = state
            names = dict(zip(("key_scales", "value_scales"), cache[2:]))
            y = cached_attention(q, k, 2 * k, *cache[:2], query, key, held, lengths=lengths, **names)
            return (y, 1.5 * k), (k, 2 * k)

        (y, _), new = jax.lax.scan(layer, (q, k), (*caches, *scales))
        if int8:
            new, new_scales = zip(*map(quantize_heads, new))
            specs = held.without("D"), "BLK"
            scales = [write_cache(old, x, *specs, lengths=lengths) for old, x in zip(scales, new_scales)]
        return y, [write_cache(old, x, held, key, lengths=lengths) for old, x in zip(caches, new)], scales

    with gspmd.lowering("blocking"):
        report = compile_offline(
            step, q, k, abstract("B", ROWS, dtype=jnp.int32), caches, scales, topology=target, donate_argnums=(3, 4)
        )
    shards = {"x": 4, "y": 4, "z": 4}
    layer = 2 * jnp.dtype(dtype).itemsize * ROWS * LENGTH * SIZE
    for axes in held.axes:
        for axis in axes:
            layer //= shards[axis]
    assert not report.ledger.compare(report.plan).differing
    assert report.argument_bytes < 1.1 * LAYERS * layer + 2**22
    assert report.temporary_bytes < layer / 4
    assert report.output_bytes < layer / 4
