"""Programs that read and write a cache, by the compiler for TPUs: it copies none of it."""

import re
from importlib.util import find_spec
from math import prod

import jax
import jax.numpy as jnp
import pytest

import gspmd
import gspmd_models as models
from gspmd.audit import compile_offline, topology
from gspmd.layouts import Layout
from gspmd_models.config import LatentConfig
from gspmd_models.decoding import Sampling, decode_loop, phases, prefill_step, serving_program
from gspmd_models.decoding.cache import abstract_cache, abstract_whole
from gspmd_models.decoding.loop import WrittenTexts
from gspmd_models.shapes import abstract_tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"),
]
MACHINES = {"tpu-v4:2x2x2": {"x": 2, "y": 2, "z": 2}, "tpu-v4:4x4x4": {"x": 4, "y": 4, "z": 4}}
BY_BATCH, BY_LENGTH = "B_xyzTKD", "B_xyT_zKD"


def temporaries(program, machine, cache_spec, kv_heads, room, *, int8=False, layers=4):
    """Temporary bytes of a program on one chip, and the bytes of one layer of the cache there; 8 rows on each chip.

    Weights are small, and in the compiler's own order, as a `Generator` has them.
    """
    target, rows, chunk = topology(machine), 8 * prod(MACHINES[machine].values()), 16
    mesh = target.mesh(MACHINES[machine])
    layout = Layout.load("weight-stationary-2d").override({"cache.attention.key": cache_spec})
    sizes = {"embed": 256, "heads": 64, "kv_heads": kv_heads, "head_size": 128, "feed_forward": 512, "vocabulary": 512}
    config = models.ModelConfig(layers=layers, block="parallel", **sizes)
    given = tuple(config.sizes(rows, length) | {"T": room} for length in (chunk, 1))
    reading, writing = phases(layout, sizes=given, mesh=mesh)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        cache = abstract_cache(config, writing, mesh, rows, room, "bfloat16", int8=int8)
        each = abstract_whole(mesh, (rows,), jnp.int32)
        model = models.abstract(config, writing if program == "loop" else reading, mesh, "bfloat16", stored="bfloat16")
        if program == "loop":
            step, donated = decode_loop(model, Sampling(temperature=0), (), 8), 1
            others = (((rows,), jnp.uint32), ((rows,), jnp.bool_), ((), jnp.int32))
            inputs = WrittenTexts(cache, each, each), *(abstract_whole(mesh, *shape) for shape in others)
        else:
            step, donated = prefill_step(model, fresh=program == "first chunk"), 3
            inputs = abstract_tokens(reading, mesh, rows, chunk), each, cache
        report = compile_offline(
            step, models.arrays(model), *inputs, topology=target, donate_argnums=(donated,), auto_layout_argnums=(0,)
        )
    held = [leaf for leaf in jax.tree.leaves(cache) if leaf.ndim > 1]
    size = sum(leaf.dtype.itemsize * prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in held)
    assert report.argument_bytes < 1.1 * size + 2**23, "the cache is padded"
    return report.temporary_bytes, size // layers


@pytest.mark.parametrize(
    ("machine", "cache", "kv_heads", "room", "int8"),
    [
        ("tpu-v4:2x2x2", BY_BATCH, 1, 16384, False),
        ("tpu-v4:2x2x2", BY_BATCH, 2, 8192, False),
        ("tpu-v4:2x2x2", BY_BATCH, 8, 4096, True),
        ("tpu-v4:4x4x4", BY_BATCH, 1, 16384, True),
        ("tpu-v4:4x4x4", BY_LENGTH, 2, 16384, False),
        ("tpu-v4:4x4x4", BY_BATCH, 8, 2048, False),
    ],
)
def test_the_decode_loop_copies_nothing_of_the_cache(machine, cache, kv_heads, room, int8):
    """With tokens before heads, [N, B, T, K, D], it would copy the whole cache where a chip has 2 heads."""
    taken, layer = temporaries("loop", machine, cache, kv_heads, room, int8=int8)
    assert taken < layer / 16


@pytest.mark.parametrize(("machine", "heads"), [("tpu-v5p:2x2x1", 16), ("tpu-v5p:2x2x1", 64), ("tpu-v4:2x2x1", 16)])
@pytest.mark.parametrize("cache", [None, "int8"])
def test_a_step_over_latents_cuts_no_values_out_of_the_cache(machine, heads, cache):
    """Values are the first numbers of the latents; an array of them alone would be a copy of most of the cache."""
    target, layout, rank, room = topology(machine), Layout.load("megatron-1d"), 384, 2048
    latent = LatentConfig(rank=rank, rotary=64, values=128)
    sizes = {"embed": 256, "heads": heads, "kv_heads": heads, "head_size": 192, "feed_forward": 512, "vocabulary": 512}
    config = models.ModelConfig(layers=4, latent=latent, **sizes)
    mesh = target.mesh(layout.mesh_for(len(target.devices)))
    program = serving_program(config, layout, mesh, "decode", batch=32, room=room, cache=cache)
    with gspmd.lowering("blocking"):
        report = compile_offline(
            program.step, *program.arguments, topology=target, donate_argnums=(program.donated,),
            auto_layout_argnums=(program.stored,),
        )  # fmt: skip
    of_layer = 32 * room * (rank + 64) * (1 if cache else 2)
    assert report.temporary_bytes < of_layer / 2
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"[a-z0-9]+\[([0-9,]+)\]", report.hlo)}
    assert any({room, rank + 64} <= {*shape} for shape in shapes)
    assert not [shape for shape in shapes if {room, rank} <= {*shape}]


@pytest.mark.parametrize(("program", "int8"), [("first chunk", False), ("next chunk", True)])
def test_reading_a_prompt_copies_no_cache(program, int8):
    """The first chunk does not read the cache; a later one may have blocks of a layer and of logits, but no more."""
    taken, layer = temporaries(program, "tpu-v4:2x2x2", BY_BATCH, 8, 4096, int8=int8, layers=8)
    assert taken < (layer / 16 if program == "first chunk" else layer)
