"""Scalings of the rotary embedding as transformers has them: turns, logits at each length, greedy text, and files."""

import json
import types

import jax
import numpy as np
import pytest

import gspmd_models as models
from gspmd_models.checkpoints import CheckpointError, load, model_config, save
from gspmd_models.rope_scaling import SCALINGS
from gspmd_models.rotary import turns
from tests.models.checkpoints.conftest import close, continued, logits_of
from tests.models.checkpoints.small import CONFIG
from tests.models.checkpoints.test_transformers import logits
from tests.models.test_rope_scaling import drawn

ORIGINAL = 16
TABLES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 4.0},
    "yarn-untruncated": {"factor": 4.0, "beta_fast": 4.0, "truncate": False, "attention_factor": 0.7},
    "yarn-mscale": {"factor": 4.0, "mscale": 1.5, "mscale_all_dim": 0.5, "beta_slow": 0.5},
    "longrope": {"factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 1.5, 3.0, 4.0]},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_turns_and_factors_are_those_of_transformers(kind, transformers):
    rope, draw = transformers.modeling_rope_utils, np.random.default_rng(0)
    for _ in range(100):
        config, entries = drawn(kind, draw)
        original = entries["original_max_position_embeddings"]
        like = types.SimpleNamespace(
            head_dim=config.head_size,
            hidden_size=1,
            num_attention_heads=1,
            max_position_embeddings=original,
            rope_parameters=entries,
            standardize_rope_params=lambda: None,
            per_layer_config={},
        )
        for length in (1, original, original + 1, 3 * original):
            wanted, factor = rope.ROPE_INIT_FUNCTIONS[kind](like, "cpu", seq_len=length)
            found = turns(config, length)
            np.testing.assert_allclose(2 * np.pi * found.per_position, wanted.numpy(), rtol=2e-5, err_msg=str(config))
            np.testing.assert_allclose(found.factor, factor, rtol=1e-6)


@pytest.fixture
def written(transformers, tmp_path):
    """A function (name of a table) -> the folder of a Llama with that scaling, and transformers' model of it."""
    import torch

    def make(name: str):
        sizes = {"vocab_size": 48, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
        table = {"rope_type": name.partition("-")[0], "rope_theta": 300.0, **TABLES[name]}
        if name.partition("-")[0] in ("llama3", "yarn", "longrope"):
            table["original_max_position_embeddings"] = ORIGINAL
        longest = ORIGINAL if name == "dynamic" else 4 * ORIGINAL
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, rope_parameters=table, max_position_embeddings=longest)
        model = transformers.LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for path, value in model.named_parameters():
                value.copy_(("norm" in path) + 0.4 * torch.randn_like(value))
        model.save_pretrained(tmp_path / "in")
        return tmp_path / "in", model

    return make


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", TABLES)
def test_a_scaled_llama_gives_the_logits_and_the_text_of_transformers(name, written, from_folder, placing, tmp_path):
    """Compare rows up to the original length and beyond it, and a batch with a prompt on either side of it."""
    folder, theirs = written(name)
    layout, mesh = placing("replicated")
    model, _ = load(folder, layout, mesh, "float32")
    assert model.config.context_length == 4 * ORIGINAL
    tokens = np.random.default_rng(0).integers(0, 48, (2, 3 * ORIGINAL))
    for length in (ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL):
        close(logits(model, mesh, tokens[:, :length]), logits_of(theirs, tokens[:, :length]))
    save(model, tmp_path / "out")
    assert model_config(tmp_path / "out") == model.config
    close(logits_of(from_folder(tmp_path / "out"), tokens), logits_of(theirs, tokens))
    if name == "dynamic":  # there every new token changes all angles: see the next test
        return
    generate, greedy = models.Generator(model, chunk=8), models.Sampling(temperature=0)
    with jax.set_mesh(mesh):
        # Texts of one batch are long or short by themselves.
        prompts = [tokens[0, :5].tolist(), tokens[1, : ORIGINAL + 1].tolist()]
        texts = generate(prompts, ORIGINAL - 4, sampling=greedy).texts
    for prompt, text in zip(prompts, texts):
        assert [*prompt, *text] == continued(theirs, np.array([prompt]), len(text))[0].tolist()


@pytest.mark.parametrize("name", ["dynamic", pytest.param("longrope", marks=pytest.mark.slow)])
def test_a_text_is_rotated_alike_from_its_first_token_to_its_last(name, written, placing):
    """Angles follow the most tokens that a text can have, even if it begins with fewer than the original length."""
    folder, _ = written(name)
    layout, mesh = placing("replicated")
    model, _ = load(folder, layout, mesh, "float32")
    prompt = np.random.default_rng(2).integers(0, 48, 9).tolist()
    with jax.set_mesh(mesh):
        generate, greedy = models.Generator(model, chunk=8), models.Sampling(temperature=0)
        texts = generate([prompt, prompt[:3]], 20, sampling=greedy, samples=2).texts
        searched = generate([prompt], 20, beams=2).texts
    for start, text in zip([prompt, prompt, prompt[:3], prompt[:3]], texts):
        row = [*start, *text]
        got = logits(model, mesh, np.array([row[:-1]])).argmax(-1)[0, len(start) - 1 :]
        assert got.tolist() == text
    assert len(searched[0]) == 20


def test_texts_of_a_packed_row_are_rotated_by_their_own_lengths(written, placing):
    folder, _ = written("longrope")
    layout, mesh = placing("replicated")
    model, _ = load(folder, layout, mesh, "float32")
    tokens = np.random.default_rng(0).integers(0, 48, (1, 20 + 7))
    segments = np.array([[1] * 20 + [2] * 7], np.int32)
    with jax.set_mesh(mesh):
        packed = np.asarray(jax.jit(lambda ids, of: model(ids, segments=of)[0])(tokens.astype(np.int32), segments))
    np.testing.assert_allclose(packed[:, :20], logits(model, mesh, tokens[:, :20]), atol=1e-5)
    np.testing.assert_allclose(packed[:, 20:], logits(model, mesh, tokens[:, 20:]), atol=1e-5)


def test_an_empty_cache_knows_the_lengths_of_its_texts_where_angles_depend_on_them(written, placing):
    folder, _ = written("longrope")
    layout, mesh = placing("replicated")
    config = model_config(folder)
    with pytest.raises(ValueError, match="depends on the lengths of texts"):
        models.empty_cache(config, layout, mesh, 2, 32, "float32")
    assert models.empty_cache(config, layout, mesh, 2, 32, "float32", totals=[3, 20]).totals.tolist() == [3, 20]
    with pytest.raises(ValueError, match=r"does not depend on the lengths of texts.\n  Leave totals out"):
        models.empty_cache(models.ModelConfig(), layout, mesh, 2, 32, "float32", totals=[3, 20])


REFUSED = {
    "another kind": ({"rope_type": "proportional"}, "the rope type is 'proportional', which is not supported; "),
    "no factor": ({"rope_type": "linear"}, "factor of the linear rope scaling is missing"),
    "no length": ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings of the yarn rope scaling is"),
    "no length to grow from": ({"rope_type": "dynamic", "factor": 2.0}, "original_max_position_embeddings of the dyn"),
    "a truncation of null": ({"rope_type": "yarn", "factor": 2.0, "truncate": None}, "truncate of the yarn rope"),
    "factors of text": ({"rope_type": "longrope", "short_factor": "x"}, "short_factor of the longrope rope scaling is"),
    "a scale of text": ({"rope_type": "yarn", "factor": 2.0, "mscale": "x", "mscale_all_dim": 1}, "mscale of the yarn"),
    "too few factors": (
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}
        | {"original_max_position_embeddings": 8},
        "rope_scaling has 1 short_factors and long_factors, but a head has 2 rotated pairs",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_scaling_that_cannot_be_read_is_refused_by_name(what, tmp_path):
    table, words = REFUSED[what]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": table}))
    with pytest.raises(CheckpointError) as error:
        model_config(tmp_path)
    assert words in str(error.value)


def test_a_factor_of_null_is_the_ratio_of_both_lengths(tmp_path):
    table = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8, "beta_fast": None}
    entries = CONFIG | {"rope_scaling": table, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    scaling = model_config(tmp_path).rope_scaling
    assert (scaling.factor, scaling.high_frequency) == (4.0, 32.0)
