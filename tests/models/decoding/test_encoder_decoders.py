"""Encoder–decoders generate from sources: as whole passes and as transformers do, in every layout."""

from dataclasses import replace
from types import ModuleType

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd import LayoutError
from gspmd.layouts import Layout
from gspmd_models.checkpoints import load
from gspmd_models.decoding import (
    GenerationError,
    cache_spec,
    encode_step,
    make_batch,
    rank_serving,
    serving_program,
)
from gspmd_models.decoding.serving import check_rows
from tests.models.checkpoints.cases import ENCODER_DECODERS
from tests.models.decoding import whole
from tests.models.decoding.whole import TRANSLATOR, Machine

SOURCES = [[5, 6, 7, 2], [9, 10, 11, 12, 13, 14, 15, 16, 2], [8, 2]]
PROMPTS = [[7], [], [9, 8, 7, 6, 5]]
TOKENS = 12


@pytest.fixture(scope="module")
def alone():
    """One device."""
    return Machine(TRANSLATOR, chunk=3, burst=4)


@pytest.fixture(scope="module")
def greedy(alone):
    """The likeliest texts of the sources, each with a beginning of another length."""
    return alone.texts(PROMPTS, TOKENS, sources=SOURCES)


@pytest.fixture(scope="module")
def searched(alone, stop):
    """The likeliest texts that a search with four beams finds."""
    return alone.texts(PROMPTS, TOKENS, sources=SOURCES, beams=4, stop=stop)


@pytest.fixture(scope="module")
def stop(greedy):
    """Two tokens that end texts: one ends the first text before it is complete."""
    return (greedy[0][5], 3)


def beginnings():
    return [[TRANSLATOR.start_token, *prompt] for prompt in PROMPTS]


def test_texts_are_those_of_whole_passes(greedy):
    for text, beginning, source in zip(greedy, beginnings(), SOURCES):
        assert text == whole.greedy(TRANSLATOR, beginning, TOKENS, source)
    assert min(len({*text}) for text in greedy) > 2, "texts are varied, so that they can differ"


def test_beams_find_the_texts_of_whole_passes(searched, stop):
    for text, beginning, source in zip(searched, beginnings(), SOURCES):
        assert text == whole.search(TRANSLATOR, beginning, TOKENS, 4, source, stop)


def test_a_stop_token_ends_a_text(alone, greedy, stop):
    cut = [next((text[:at] for at, token in enumerate(text) if token in stop), text) for text in greedy]
    assert alone.texts(PROMPTS, TOKENS, sources=SOURCES, stop=stop) == cut
    assert len(cut[0]) <= 5


def test_a_sample_depends_on_its_source_and_seed_alone(alone):
    draw = {"sampling": models.Sampling(top_k=20)}
    texts = alone.texts(PROMPTS, TOKENS, sources=SOURCES, samples=2, seed=3, **draw)
    assert len({tuple(text) for text in texts}) == 6
    assert alone.texts(PROMPTS[1:2], TOKENS, sources=SOURCES[1:2], seed=3 + 3, **draw) == [texts[3]]


LAYOUTS = [
    ("weight-stationary-2d", "weight-gathered-xyz", {}),
    ("megatron-1d", None, {"cache.cross.key": "B_xT_yzKD", "cross.key": "BTK_yzD"}),
    ("zero-3", None, {"encoder.ffn.hidden": "B_xyzLF"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "prefill", "changes"), LAYOUTS)
def test_texts_are_the_same_in_every_layout(preset, prefill, changes, greedy):
    machine = Machine(TRANSLATOR, preset, 8, prefill, changes, chunk=4)
    assert machine.texts(PROMPTS, TOKENS, sources=SOURCES) == greedy


@pytest.mark.turns(1)
@pytest.mark.parametrize(("preset", "prefill", "changes"), LAYOUTS)
def test_beams_are_the_same_in_every_layout(preset, prefill, changes, searched, stop):
    machine = Machine(TRANSLATOR, preset, 8, prefill, changes)
    assert machine.texts(PROMPTS, TOKENS, sources=SOURCES, beams=4, stop=stop) == searched


def in_transformers(transformers: ModuleType):
    """The same model in transformers."""
    import torch

    config, values = TRANSLATOR, whole.values(TRANSLATOR)
    found = transformers.M2M100Config(
        vocab_size=config.vocabulary, d_model=config.embed, encoder_layers=config.encoder_layers,
        decoder_layers=config.layers, encoder_attention_heads=config.heads, decoder_attention_heads=config.heads,
        encoder_ffn_dim=config.feed_forward, decoder_ffn_dim=config.feed_forward, tie_word_embeddings=False,
        max_position_embeddings=128,
    )  # fmt: skip
    names = {"attention": "self_attn", "cross": "encoder_attn"}
    norms = {"attention": "self_attn_layer_norm", "cross": "encoder_attn_layer_norm", "ffn": "final_layer_norm"}
    state = {"lm_head.weight": values["output.table"]}
    for stack in ("encoder", "decoder"):
        state[f"model.{stack}.embed_tokens.weight"] = values["embedding.table"]
        prefix = "encoder." if stack == "encoder" else ""
        for ours, theirs in (("norm", "weight"), ("norm_bias", "bias")):
            state[f"model.{stack}.layer_norm.{theirs}"] = values[f"{prefix}output.{ours}"]
        for path, stacked in values.items():
            if not path.startswith(f"{prefix}blocks.0."):
                continue
            part, name = path.removeprefix(f"{prefix}blocks.0.").split(".")
            for layer, x in enumerate(stacked):
                if name.startswith("norm"):
                    to = norms[part] + (".bias" if name == "norm_bias" else ".weight")
                elif part == "ffn":
                    to, x = f"fc{1 if name.endswith('in') else 2}" + (".weight" if name[0] == "w" else ".bias"), x.T
                else:
                    to = f"{names[part]}.{'out' if name[2] == 'o' else name[2]}_proj"
                    to += ".weight" if name[0] == "w" else ".bias"
                    rows = config.heads * config.head_size if name == "w_o" else config.embed
                    x = x.reshape(rows, -1).T if name[0] == "w" else x.reshape(-1)
                state[f"model.{stack}.layers.{layer}.{to}"] = x
    theirs = transformers.M2M100ForConditionalGeneration(found).eval()
    loaded = theirs.load_state_dict({key: torch.tensor(np.array(x)) for key, x in state.items()}, strict=False)
    assert not loaded.unexpected_keys
    assert [*loaded.missing_keys] in ([], ["model.shared.weight"])
    return theirs


@pytest.mark.parametrize("beams", [pytest.param(0, id="greedy", marks=pytest.mark.slow), 4])
def test_texts_are_those_of_transformers(beams, alone, transformers):
    """64 tokens from sources of different lengths, with a token forced after the start token."""
    import torch

    ids = np.full((len(SOURCES), 9), 1)
    for row, source in zip(ids, SOURCES):
        row[: len(source)] = source
    with torch.no_grad():
        found = in_transformers(transformers).generate(
            torch.tensor(ids), attention_mask=torch.tensor(ids != 1), do_sample=False, num_beams=max(beams, 1),
            length_penalty=1.0, early_stopping=False, forced_bos_token_id=40, max_new_tokens=65, eos_token_id=2,
            forced_eos_token_id=None, num_return_sequences=3 if beams else 1, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
    texts = [row[2:].tolist() for row in found.sequences]
    wanted = [text[: text.index(2)] if 2 in text else text for text in texts]
    if not beams:
        assert alone.texts([[40]] * 3, 64, sources=SOURCES, stop=[2]) == wanted
        return
    with jax.set_mesh(alone.mesh):
        best = alone.generator([[40]] * 3, 64, sources=SOURCES, stop=[2], beams=beams, n_best=3)
    assert best.texts == wanted
    # Theirs count the forced token, whose probability is 1 for them.
    length = np.array([len(text) + (len(text) < 64) for text in wanted])
    scores = found.sequences_scores.numpy() * (length + 1) / length
    np.testing.assert_allclose(best.scores, scores, rtol=1e-5)
    assert alone.texts([[40]] * 3, 64, sources=SOURCES, stop=[2], beams=beams) == wanted[::3]


@pytest.mark.slow
def test_texts_of_t5_are_those_of_transformers(transformers, tmp_path):
    """A checkpoint with relative positions, of whose buckets the last one is reached: 64 tokens, in a layout."""
    import torch

    torch.manual_seed(0)
    kind, entries = ENCODER_DECODERS["t5-1.1-unscaled"]
    # The cache of transformers 5.24 has as many layers as the encoder.
    config = transformers.T5Config(**entries | {"num_layers": 2})
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for path, value in theirs.named_parameters():
            value.copy_(0.5 * torch.randn_like(value) + path.endswith("norm.weight"))
    theirs.save_pretrained(tmp_path)
    ids = np.zeros((len(SOURCES), 9), np.int64)
    for row, source in zip(ids, SOURCES):
        row[: len(source)] = source
    layout = Layout.load("megatron-1d").override({"padding.V": 4, "padding.K": 4})
    mesh = jax.make_mesh((2, 4, 1), ("x", "y", "z"))
    with jax.set_mesh(mesh):
        model, _ = load(tmp_path, layout.phase("decode").resolved({}, mesh), mesh, "float32")
        generate = models.Generator(model, layout)
        for beams in (0, 4):
            with torch.no_grad():
                found = theirs.generate(
                    torch.tensor(ids), attention_mask=torch.tensor(ids != 0).long(), do_sample=False,
                    num_beams=max(beams, 1), max_new_tokens=64, eos_token_id=1, pad_token_id=0,
                )  # fmt: skip
            texts = [row[1:].tolist() for row in found]
            wanted = [text[: text.index(1)] if 1 in text else text for text in texts]
            how = {"beams": beams} if beams else {"sampling": models.Sampling(temperature=0)}
            assert generate(None, 64, sources=SOURCES, stop=[1], **how).texts == wanted
            assert len({token for text in wanted for token in text}) > 4


def test_what_is_planned_is_sent(make_mesh):
    """The encoder's step and the decoder's, which attends to the source where its keys lie, over batch and length."""
    changes = {"cache.attention.key": "B_xTK_yzD", "cache.cross.key": "B_xT_yzKD"}
    layout = Layout.load("weight-stationary-2d").override(changes)
    mesh = make_mesh(layout.mesh_for(8))
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        batch = make_batch(TRANSLATOR, layout, None, mesh, None, 2, sources=[[1] * 9] * 8)
        generator = models.Generator(models.abstract(TRANSLATOR, batch.sizes.decode, mesh), layout)
        steps = generator.programs(batch.sizes)
        for name in ("encode", "decode"):
            step, given = steps[name]
            plan, ledger = gspmd.trace(step, *given), gspmd.ledger(jax.jit(step).lower(*given).compile(), mesh)
            assert ledger.wire_bytes == plan.wire_bytes > 0
            assert ledger.compare(plan).agrees, (name, ledger.compare(plan))


@pytest.mark.parametrize(
    "changes",
    [{"positions": "relative", "position_offset": 0, "relative_buckets": 8, "relative_distance": 12},
     pytest.param({"positions": "rotary", "position_offset": 0, "kv_heads": 2}, marks=pytest.mark.slow)],
    ids=["relative", "rotary"],
)  # fmt: skip
def test_other_positions(changes):
    """Distances beyond those of the buckets, over chunks of a beginning and over the cache."""
    config = replace(TRANSLATOR, **changes)
    found = Machine(config, chunk=3).texts(PROMPTS[2:], TOKENS, sources=SOURCES[1:2])
    assert found == [whole.greedy(config, beginnings()[2], TOKENS, SOURCES[1])]


def test_an_int8_cache_keeps_sources_nearly_as_they_are(alone):
    tokens, counts = np.array(SOURCES[1:2] * 2, np.int32), np.array([9, 4], np.int32)
    with jax.set_mesh(alone.mesh):
        arrays = models.arrays(alone.model)
        exact, small = (jax.jit(encode_step(alone.model, int8=int8))(arrays, tokens, counts) for int8 in (False, True))
    for kept, numbers, scales in (
        (exact.keys, small.keys, small.key_scales),
        (exact.values, small.values, small.value_scales),
    ):
        assert numbers[0].dtype == np.int8
        near = np.asarray(numbers[0]) * np.asarray(scales[0])[..., None]
        np.testing.assert_allclose(near, np.asarray(kept[0]), atol=np.abs(kept[0]).max() / 100)


def test_a_source_takes_memory_where_its_line_says(make_mesh):
    layout = Layout.load("weight-stationary-2d").override({"cache.cross.key": "B_xT_yzKD"})
    mesh = make_mesh(layout.mesh_for(8))
    cache = models.abstract_cache(TRANSLATOR, layout, mesh, 8, 16, "bfloat16", source_length=32)
    spec = cache_spec(layout, "cross.key")
    assert cache.source.keys[0].shape == (2, 8, 8, 32, 4)
    assert cache.source.keys[0].sharding.shard_shape(cache.source.keys[0].shape)[1:] == spec.local_shape(
        {"B": 8, "K": 8, "T": 32, "D": 4}, dict(mesh.shape)
    )
    with pytest.raises(ValueError, match="has an encoder, but source_length is 0; it must be at least 1"):
        models.abstract_cache(TRANSLATOR, layout, mesh, 8, 16, "bfloat16")
    program = serving_program(TRANSLATOR, layout, mesh, "decode", batch=8, room=16, source_length=32)
    assert program.arguments[program.donated].source == cache.source
    with pytest.raises(GenerationError, match="the model has an encoder, but source_length is 0; it must be at least"):
        serving_program(TRANSLATOR, layout, mesh, "decode", batch=8, room=16)
    with pytest.raises(GenerationError, match="layouts are ranked for decoder-only models, but this one has"):
        rank_serving(TRANSLATOR, [layout], mesh, "decode", batch=8, room=16)


@pytest.mark.parametrize(
    ("config", "prompts", "options", "message"),
    [
        ({}, None, {}, "this model has an encoder, but there is no source for it; give at least one"),
        ({}, None, {"sources": []}, "this model has an encoder, but there is no source for it; give at least one"),
        (
            {}, [[1]], {"sources": [[1], [2]]},
            "cannot pair 1 prompt with 2 sources; give one prompt for each source, or no prompts",
        ),
        ({}, None, {"sources": [[1], []]}, "cannot encode an empty source (source 2 of 2); give at least one token"),
        ({}, None, {"sources": [[64]]}, "token 64 is not in the model's vocabulary, 0 to 63"),
        ({}, None, {"sources": [[1]], "source_length": 0}, "source_length is 0; it must be at least 1"),
        (
            {}, None, {"sources": [[1] * 9], "source_length": 8},
            "a source has 9 tokens, but the cache has room for 8; shorten the source, or raise source_length",
        ),
        (
            {"context_length": 8}, None, {"sources": [[1] * 9]},
            "a source has 9 tokens, but the model was made for at most 8 (context_length; max_position_embeddings in "
            "the config.json of most checkpoints); shorten it",
        ),
        (
            {"encoder_layers": 0, "start_token": 0}, [[1]], {"sources": [[1]]},
            "this model is decoder-only and reads no sources; give prompts only",
        ),
        ({"encoder_layers": 0, "start_token": 0}, None, {}, "there is no prompt to continue; give at least one"),
    ],
)  # fmt: skip
def test_sources_that_do_not_fit_are_said(config, prompts, options, message, alone):
    with pytest.raises(GenerationError) as error:
        make_batch(replace(TRANSLATOR, **config), Layout.load("replicated"), None, alone.mesh, prompts, 4, **options)
    assert str(error.value) == message


def test_rows_of_texts_and_sources_lie_together(make_mesh):
    layout = Layout.load("weight-stationary-2d").override({"cache.cross.key": "B_yT_xzKD"})
    mesh = make_mesh(layout.mesh_for(8))
    with pytest.raises(LayoutError, match="the cache of texts is 'B_yzTK_xD', and the cache of sources"):
        make_batch(TRANSLATOR, layout, None, mesh, None, 4, sources=SOURCES)


def test_caches_of_texts_and_sources_have_rows_on_the_same_devices():
    layout = Layout.load("replicated").override({"cache.attention.key": "B_xTKD", "cache.cross.key": "BTKD"})
    check_rows(layout, {"x": 1})  # a mesh axis of size 1 shards nothing
    with pytest.raises(LayoutError, match="the cache of texts is 'B_xTKD', and the cache of sources 'BTKD'"):
        check_rows(layout, {"x": 2})
