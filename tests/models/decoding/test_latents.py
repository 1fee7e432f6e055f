"""The cache of latent attention: its bytes, and what reads it."""

import jax
import pytest

import gspmd_models as models
from gspmd.layouts import Layout
from gspmd_models.config import LatentConfig
from gspmd_models.decoding import abstract_cache, cache_spec

#: DeepSeek-V2-Lite.
LITE = models.ModelConfig(
    vocabulary=102400, embed=2048, layers=27, heads=16, kv_heads=16, head_size=192, feed_forward=10944,
    rotary_pairs="neighbours", latent=LatentConfig(rank=512, rotary=64, values=128),
)  # fmt: skip


@pytest.mark.parametrize(("int8", "each"), [(False, 2 * (512 + 64)), (True, 512 + 64 + 4)])
def test_a_token_of_the_cache_is_one_latent_and_one_rotated_key_for_all_heads(int8, each, make_mesh):
    mesh = make_mesh({"x": 1, "y": 1, "z": 1})
    cache = abstract_cache(LITE, Layout.load("replicated"), mesh, 3, 40, "bfloat16", int8=int8)
    assert cache.values is None
    bytes_of_tokens = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
    assert bytes_of_tokens == 27 * 3 * 40 * each


def test_no_device_has_a_part_of_the_heads_of_latents(make_mesh):
    """Axes of key heads leave the latents whole; those of rows and of length shard them."""
    layout = Layout.load("megatron-1d").override({"cache.attention.key": "B_xT_yK_zD"})
    assert cache_spec(layout).axes_of("K") == ("z",)
    cache = abstract_cache(LITE, layout, make_mesh({"x": 2, "y": 2, "z": 2}), 4, 40, "bfloat16")
    assert cache.keys[0].shape == (27, 4, 1, 40, 576)
    assert cache.keys[0].sharding.shard_shape(cache.keys[0].shape) == (27, 2, 1, 20, 576)


def test_decoding_multiplies_by_fewer_numbers_than_there_are_in_keys_and_values_of_all_heads(make_mesh):
    """The products of a decode step with a long cache are those of queries and latents, not of expanded keys."""
    small = models.ModelConfig(
        layers=1, heads=8, kv_heads=8, head_size=24, latent=LatentConfig(rank=32, rotary=8, values=16), embed=64,
        feed_forward=64, vocabulary=64,
    )  # fmt: skip
    mesh, room = make_mesh({"x": 1, "y": 1, "z": 1}), 4096
    program = models.decoding.serving_program(
        small, Layout.load("replicated"), mesh, "decode", batch=1, room=room, dtype="float32"
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(program.step).lower(*program.arguments).compile()
    flops = compiled.cost_analysis()["flops"]
    absorbed = 2 * 8 * room * (40 + 40)  # scores and values of 8 heads over Z
    expanded = 2 * 8 * room * 32 * (16 + 16)  # keys and values of 8 heads from latents
    assert absorbed < flops < expanded
