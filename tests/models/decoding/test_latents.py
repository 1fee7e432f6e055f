"""The cache of latent attention: its bytes, and what reads it."""

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd_models.config import LatentConfig, RopeScaling
from gspmd_models.decoding import abstract_cache, cache_spec, decode_step, empty_cache, for_serving

#: DeepSeek-V2-Lite.
LITE = models.ModelConfig(
    vocabulary=102400, embed=2048, layers=27, heads=16, kv_heads=16, head_size=192, feed_forward=10944,
    rotary_pairs="neighbours", latent=LatentConfig(rank=512, rotary=64, values=128),
)  # fmt: skip


@pytest.mark.parametrize(("int8", "each"), [(False, 2 * (512 + 64)), (True, 512 + 64 + 8)])
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


SMALL = models.ModelConfig(
    vocabulary=64, embed=32, layers=2, heads=8, kv_heads=8, head_size=16, feed_forward=64, tied=False,
    latent=LatentConfig(rank=6, query_rank=8, rotary=8, values=8),
)  # fmt: skip


def loss_and_gradients(config, layout, mesh, tokens, microbatches=1):
    """The loss of tokens [B, L+1], and its gradients, all on the host."""
    model = models.build(config, layout, mesh, jax.random.key(0))
    with jax.set_mesh(mesh):
        run = jax.jit(jax.value_and_grad(lambda values, ids: models.loss(models.with_arrays(model, values), ids)[0]))
        return jax.tree.map(np.asarray, run(models.arrays(model), tokens))


def test_keys_that_a_layout_keeps_whole_are_in_the_order_of_the_text(make_mesh):
    """Queries sharded along L attend to all latents, which are not in the order of a ring."""
    tokens = np.random.default_rng(0).integers(0, 64, (4, 17)).astype(np.int32)
    alone = Layout.load("replicated")
    wanted, wanted_gradients = loss_and_gradients(SMALL, alone, make_mesh({"x": 1, "y": 1, "z": 1}), tokens)
    layout = alone.override({"attention.query": "BL_xHD"})
    found, gradients = loss_and_gradients(SMALL, layout, make_mesh({"x": 2, "y": 1, "z": 1}), tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wanted_gradients[path], rtol=2e-3, atol=2e-5, err_msg=path)


@pytest.mark.parametrize("preset", ["megatron-sequence", "megatron-folded", "zero-2"])
def test_gradients_of_latents_are_partial_sums_over_the_axes_of_their_rows(preset, make_mesh):
    layout = Layout.load(preset)
    mesh = make_mesh(layout.mesh_for(8))
    trained = layout.for_loss(2)
    for name in ("w_q_down", "w_k_down", "latent_norm", "q_latent_norm"):
        line = "attention.latent_query" if "q" in name.replace("latent_", "") else "attention.latent"
        rows = {axis for dim in "BL" for axis in layout.spec(line).axes_of(dim)}
        assert {*gspmd.Spec.parse(trained[f"attention.{name}"]).reduced} <= rows, name
    model = models.abstract(SMALL, layout, mesh)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        from gspmd.training import OptimizerConfig
        from gspmd_models import step

        state = step.abstract_state(model, OptimizerConfig(), 10, mesh)
        arguments = state, models.abstract_batch(layout, mesh, 16, 16), models.abstract_key(mesh)
        gspmd.trace(step.training_step(model, OptimizerConfig(), 10, 2), *arguments)


def test_latent_attention_takes_every_scaling_of_its_rotated_part():
    factors = tuple(1.0 + number for number in range(4))
    scaling = RopeScaling(kind="longrope", factor=4.0, original_length=8, short_factors=factors, long_factors=factors)
    config = models.ModelConfig(head_size=16, latent=LatentConfig(rotary=8), rope_scaling=scaling)
    assert [rotary.rotary for rotary in config.rotaries] == [8]
    assert config.by_length


def read_one_by_one(model, mesh, tokens, *, int8):
    """Return logits [L, B, V] of tokens that are read one by one, and the cache after them."""
    rows, length = tokens.shape
    empty = empty_cache(model.config, model.layout, mesh, rows, length, "float32", int8=int8)
    decode = decode_step(model)

    @jax.jit
    def run(weights, cache, ids):
        return jax.lax.scan(lambda cache, ids: decode(weights, ids, cache)[::-1], cache, ids)

    cache, logits = run(models.arrays(model), empty, tokens.T)
    return np.asarray(logits), cache


@pytest.mark.parametrize("preset", ["replicated", pytest.param("weight-stationary-2d", marks=pytest.mark.slow)])
def test_latents_and_rotated_keys_of_an_int8_cache_have_a_scale_each(preset, make_mesh):
    """Rotated keys thirty times as large, which queries undo, change no logits, and must not round latents away."""
    layout = Layout.load(preset).one_position()
    mesh, config = make_mesh(layout.mesh_for(8 if preset != "replicated" else 1)), for_serving(SMALL)
    tokens = np.random.default_rng(0).integers(0, 64, (8, 12)).astype(np.int32)
    with jax.set_mesh(mesh):
        model = models.build(config, layout, mesh, jax.random.key(0))
        values, rank, plain = models.arrays(model), 6, 16 - 8
        values["blocks.0.attention.w_k_down"] = values["blocks.0.attention.w_k_down"].at[..., rank:].multiply(30)
        values["blocks.0.attention.w_q_up"] = values["blocks.0.attention.w_q_up"].at[..., plain:].divide(30)
        large = models.with_arrays(model, values)
        (exact, kept), (rounded, cache) = (read_one_by_one(large, mesh, tokens, int8=int8) for int8 in (False, True))
        same, without = (read_one_by_one(model, mesh, tokens, int8=int8)[0] for int8 in (False, True))
    np.testing.assert_allclose(exact, same, atol=1e-4)
    # The first layer's latents are the same, so its cache is numpy's rounding of them, part by part.
    wanted = np.asarray(kept.keys[0])[0]
    for numbers, scales in ((slice(rank), cache.key_scales), (slice(rank, None), cache.value_scales)):
        of = np.abs(wanted[..., numbers]).max(-1) / 127
        np.testing.assert_allclose(np.asarray(scales[0])[0], of, rtol=1e-5)
        off = np.abs(np.asarray(cache.keys[0])[0][..., numbers] - np.round(wanted[..., numbers] / of[..., None]))
        assert off.max() <= 1  # of numbers halfway between two steps
        assert (off > 0).mean() < 0.01
    error = [np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (rounded, without)]
    assert error[0] < 0.01
    assert error[0] < 1.2 * error[1]
