"""Models whose layers attend in chunks, and whose queries grow: packed rows, settings, and the work that is counted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.ops._attention.zigzag import ring_size
from gspmd_models.checkpoints.config import expressing
from gspmd_models.context import chunks_in
from gspmd_models.decoding.cache import abstract_cache
from gspmd_models.rotary import query_growth
from tests.models.conftest import BATCH, LENGTH, put

CHUNKED = {
    "layers": 2, "layer_kinds": ("chunked", "unrotated"), "attention_chunk": 3, "qk_norm": "rotated",
    "query_growth": 0.8, "growth_interval": 2,
}  # fmt: skip
LAYOUTS = [("weight-stationary-2d", "blocking"), ("context-parallel", "looped"), ("context-parallel", "xla")]


@pytest.mark.turns(1)
@pytest.mark.parametrize(("name", "lowering"), LAYOUTS)
def test_texts_in_a_packed_row_are_cut_into_their_own_chunks(config, one_device, placed, make_mesh, name, lowering):
    """Texts of 7 and 6 tokens, and padding, have the logits of each text alone: chunks begin where a text does."""
    alone, layout = one_device(config(**CHUNKED)), Layout.load(name)
    tokens = np.random.default_rng(0).integers(0, 64, (BATCH, LENGTH)).astype(np.int32)
    segments = np.broadcast_to(np.repeat([1, 2, 0], [7, 6, 3]), tokens.shape).astype(np.int32)
    with jax.set_mesh(make_mesh(layout.mesh_for(1))):
        of_text = jax.jit(lambda ids: alone(ids)[0])
        wanted = np.concatenate([of_text(tokens[:, :7]), of_text(tokens[:, 7:13])], axis=1)
    mesh = make_mesh(layout.mesh_for(8))
    model = placed(alone, layout, mesh)
    order = gspmd.ops.zigzag_positions(LENGTH, ring_size(layout.spec("attention.key")))
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        run = jax.jit(lambda ids, parts: model(ids, segments=parts)[0])
        ids = gspmd.annotate(tokens[:, order], layout.spec("embedding.tokens"))
        got = np.asarray(run(ids, put(segments, layout, mesh)))
    in_text = np.empty_like(got)
    in_text[:, order] = got
    np.testing.assert_allclose(in_text[:, :13], wanted, rtol=1e-4, atol=1e-5)


def test_chunks_and_growth_are_written_out():
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 2, 3, 3, 3, 0, 0, 0]])
    assert chunks_in(segments, 3).tolist() == [[1, 1, 1, 2, 2, 2, 3, 0], [1, 2, 3, 3, 3, 0, 0, 0]]
    at = np.array([[0, 6, 7, 14, 15, 16, 800_000]])
    settings = models.ModelConfig(layer_kinds=("unrotated",), query_growth=0.1, growth_interval=8)
    wanted = 1 + 0.1 * np.log1p([0, 0, 1, 1, 2, 2, 100_000])
    for positions in (at, jnp.asarray(at)):
        np.testing.assert_allclose(query_growth(positions, settings)[0, :, 0, 0], wanted, rtol=1e-6)


def test_a_chunk_is_the_length_of_a_layers_cache_and_of_its_scores(config, make_mesh):
    settings, layout = config(**CHUNKED | {"attention_chunk": 8, "layers": 4}), Layout.load("weight-stationary-2d")
    mesh = make_mesh(layout.mesh_for(8))
    cache = abstract_cache(settings, layout, mesh, 8, 32, "float32")
    assert [keys.shape[3] for keys in cache.keys] == [8, 32]
    full = replace(settings, layer_kinds=("full",), attention_chunk=None, qk_norm="none", query_growth=0.0,
                   growth_interval=8192)  # fmt: skip
    scores = 12 * settings.heads * settings.head_size
    assert full.flops_per_token(32) - settings.flops_per_token(32) == scores * 2 * (32 - 8)
    assert settings.num_parameters == full.num_parameters  # norms after rotation have no scales


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_chunk": 0}, "attention_chunk is 0; it must be at least 1"),
        ({"layer_kinds": ("chunked", "full")}, "layer_kinds has 'chunked', but there is no attention_chunk; set it"),
        (
            {"layer_kinds": ("sliding", "full"), "sliding_window": 3, "attention_chunk": 4},
            "attention_chunk is 4, but layer_kinds has no 'chunked'; leave it out",
        ),
        (
            {"sliding_window": 3, "attention_chunk": 4},
            "sliding_window and attention_chunk are set, but layer_kinds does not assign them to layers; set it",
        ),
        ({"query_growth": 0.1}, "query_growth is 0.1, but layer_kinds has no 'unrotated'; leave it out"),
        ({"query_growth": -1.0}, "query_growth is -1.0; it must not be negative"),
        ({"growth_interval": 0}, "growth_interval is 0; it must be at least 1"),
        ({"growth_interval": 4}, "growth_interval is 4, but query_growth is 0; leave it out"),
        (
            {"layer_kinds": ("unrotated",), "qk_norm": "rotated"},
            "qk_norm is 'rotated', but no layers are rotated; leave it out",
        ),
        (
            {"encoder_layers": 2, "attention_chunk": 4},
            "an encoder–decoder has no attention_chunk (given: 4); leave it out",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError) as error:
        models.ModelConfig(**changes)
    assert message in str(error.value)


def test_a_model_that_only_llama_4_is_like_is_not_written_as_another(config):
    with pytest.raises(ValueError) as error:
        expressing(config(attention_chunk=4))
    assert "attention_chunk is 4, not None" in str(error.value)
