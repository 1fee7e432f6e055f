"""Queries split over the positions of a prompt, as one long prompt wants them: a layout like any other."""

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd_models.decoding import decode_step, make_batch, prefill_step, serving_program

LENGTH, READ = 8, np.array([8, 5], np.int32)
LAYOUT = Layout.load("weight-stationary-2d").override(
    {
        "attention.query": "BL_xH_yzD",
        "attention.key": "BLKD",
        "prefill.attention.query": "BL_xH_yzD",
        "prefill.attention.key": "BLKD",
        "decode.attention.query": "BL_xH_yzD",  # one position cannot be split: L is whole
        "decode.attention.key": "BLKD",
    }
)


def whole_pass(config, layout, mesh, tokens, lowering="blocking"):
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        model = models.build(config, layout, mesh, jax.random.key(0))
        where = models.abstract_tokens(layout, mesh, *tokens.shape).sharding
        return np.asarray(jax.jit(lambda ids: model(ids)[0])(jax.device_put(tokens, where))), model


SLOW = (("auto", "looped", 4, 1), ("explicit", "blocking", 4, 4), ("auto", "blocking", 8, 1), ("explicit", "xla", 8, 2))


@pytest.mark.parametrize(
    ("axis_type", "lowering", "chunk", "kv_heads"),
    [("explicit", "blocking", 8, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_prompts_and_tokens_are_those_of_one_device(make_mesh, config, axis_type, lowering, chunk, kv_heads):
    settings = config(heads=4, kv_heads=kv_heads, block="parallel" if kv_heads == 1 else "serial")
    tokens = np.random.default_rng(0).integers(0, settings.vocabulary, (2, LENGTH + 1)).astype(np.int32)
    alone = Layout.load("replicated")
    expected, _ = whole_pass(settings, alone, make_mesh(alone.mesh_for(1)), tokens)
    mesh = make_mesh({"x": 2, "y": 2, "z": 2}, axis_type)
    found, model = whole_pass(settings, LAYOUT, mesh, tokens[:, :LENGTH], lowering)
    close = {"rtol": 0, "atol": 1e-5 * np.abs(expected).max()}
    np.testing.assert_allclose(found, expected[:, :LENGTH], **close)
    whole = jax.NamedSharding(mesh, jax.P())
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        cache = models.empty_cache(settings, LAYOUT, mesh, 2, LENGTH + 1, model.dtype)
        read = jax.jit(prefill_step(model, fresh=chunk == LENGTH))
        for start in range(0, LENGTH, chunk):
            counts = jax.device_put(np.clip(READ - start, 0, chunk), whole)
            part = jax.device_put(tokens[:, start : start + chunk], whole)
            logits, cache = read(models.arrays(model), part, counts, cache)
            for row in np.flatnonzero((start < READ) & (start + chunk >= READ)):
                np.testing.assert_allclose(np.asarray(logits)[row], expected[row, READ[row] - 1], **close)
        logits, _ = jax.jit(decode_step(model))(models.arrays(model), tokens[range(2), READ], cache)
    np.testing.assert_allclose(np.asarray(logits), expected[range(2), READ], **close)


def test_a_layout_for_prompts_alone_serves_both_phases(config, make_mesh):
    """Each phase is held to its own sizes: one token cannot be split, whatever is said of a prompt's."""
    mesh, settings = make_mesh({"x": 2, "y": 2, "z": 2}), config(kv_heads=1)
    prompts = Layout.load("weight-stationary-2d").override(
        {"prefill.attention.query": "BL_xH_yzD", "prefill.attention.key": "BLKD"}
    )
    for layout in (prompts, LAYOUT):
        sizes = make_batch(settings, layout, None, mesh, [[1, 2, 3]], tokens=4, chunk=4).sizes
        assert (sizes.prefill["attention.query"], sizes.chunk % 2) == ("BL_xH_yzD", 0)
        for phase, length, split in (("prefill", 8, ("x",)), ("decode", 1, ())):
            program = serving_program(settings, layout, mesh, phase, batch=2, room=16, length=length)
            assert program.layout.spec("attention.query").axes_of("L") == split
