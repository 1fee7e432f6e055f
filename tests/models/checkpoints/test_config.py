"""config.json to ModelConfig and back; what is refused, and by which words."""

import dataclasses
import json

import pytest

from gspmd.moe.config import MoEConfig
from gspmd_models import ModelConfig
from gspmd_models.checkpoints import CheckpointError, model_config
from gspmd_models.checkpoints.config import FREE, described, expressing, written
from gspmd_models.checkpoints.families import FAMILIES
from tests.models.checkpoints.published import PUBLISHED

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture
def read(tmp_path):
    """A function (entries of config.json) -> ModelConfig."""

    def of(entries: dict) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(entries))
        return model_config(tmp_path)

    return of


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_published_number_of_parameters(name, read):
    entries, count = PUBLISHED[name]
    assert read(entries).num_parameters == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_is_read_as_the_same_model(name, read, tmp_path):
    config = read(PUBLISHED[name][0])
    family = described(tmp_path).family
    assert read(written(family, config, 4096, "bfloat16")) == config


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_every_field_of_a_model_is_read_or_fixed_or_free(family):
    wanted = {field.name for field in dataclasses.fields(ModelConfig)} - {*FREE, "moe"}
    if "moe.experts" in family.options:
        wanted |= {"moe.experts", "moe.k", "moe.router", "moe.every", "moe.shared", "moe.renormalize"}
    rope = {"rope_base", "rope_scaling", "rotary_size"}
    known = {*family.options, *family.fixed, *family.derived} - {"moe"}
    assert known | rope == wanted


def test_old_and_new_names_of_the_rotary_entries_are_the_same(read):
    before = read(LLAMA | {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **SCALING}})
    assert before == read(LLAMA | {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **SCALING}})
    assert before == read(LLAMA | {"rope_parameters": {"rope_theta": 500.0, "rope_type": "llama3", **SCALING}})
    assert (before.rope_base, before.rope_scaling.original_length) == (500.0, 16)


def test_absent_entries_have_the_defaults_of_transformers(read):
    config = read({key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "head_dim")})
    assert (config.kv_heads, config.head_size, config.tied, config.rope_base) == (6, 4, False, 10000.0)


def test_an_unknown_architecture_is_one_error_that_names_those_known(read):
    with pytest.raises(CheckpointError) as error:
        read({"architectures": ["Llama4ForCausalLM"]})
    assert "'Llama4ForCausalLM', which is not known. Did you mean 'LlamaForCausalLM'?" in str(error.value)
    assert all(family.architecture in str(error.value) for family in FAMILIES)


REFUSED = {
    "a sliding window": ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window is 4096"),
    "Mistral's default window": ({"architectures": ["MistralForCausalLM"]}, "sliding_window is 4096"),
    "a window in some layers": (
        {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
        "sliding_window is 4096",
    ),
    "Qwen's window": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1},
        "sliding_window is 4096",
    ),
    "an activation": ({"hidden_act": "relu2"}, "hidden_act is 'relu2', which is not supported; supported: 'silu'"),
    "a rope type": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "the rope type is 'yarn'"),
    "half a scaling": ({"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor of the llama3 rope scaling"),
    "a scaling upside down": (
        {"rope_scaling": {"rope_type": "llama3", **SCALING, "low_freq_factor": 8.0}},
        "its rotary embedding cannot be read: ",
    ),
    "a base that is no number": ({"rope_theta": "x"}, "its rotary embedding cannot be read: could not convert string"),
    "a scaling that is text": ({"rope_scaling": "abc"}, "its rotary embedding cannot be read: "),
    "rope parameters that are text": ({"rope_parameters": "x"}, "its rotary embedding cannot be read: "),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which Llama models do not have"),
    "quantized weights": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "norms of heads": ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "use_qk_norm is True"),
    "dense layers between": (
        {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2, "moe_intermediate_size": 8},
        "decoder_sparse_step is 2",
    ),
    "a missing size": ({"hidden_size": None}, "hidden_size is missing"),
    "sizes that do not fit": ({"num_key_value_heads": 4}, "heads is 6, which kv_heads (4) does not divide"),
    "entries of wrong types": ({"rope_parameters": [1]}, "config.json has an entry of a wrong type"),
    "a scale that is no number": (
        {"architectures": ["CohereForCausalLM"], "logit_scale": "1"},
        "config.json has an entry of a wrong type",
    ),
    "no rotated elements": ({"architectures": ["GPTJForCausalLM"], "rotary_dim": 0}, "rotary_dim is 0: models that"),
    "elements that are null": (
        {"architectures": ["GPTJForCausalLM"], "rotary_dim": None},
        "rotary_dim is null, which is no whole number",
    ),
    "a size that is no number": ({"hidden_size": "24"}, "hidden_size is '24', which is no whole number"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_models_here_do_not_have_is_refused_by_name(what, read):
    entries, words = REFUSED[what]
    with pytest.raises(CheckpointError, match="cannot read the model of checkpoint") as error:
        read({**LLAMA, "max_position_embeddings": 32768, **entries})
    assert words in str(error.value)


def test_a_window_as_long_as_the_longest_sequence_has_no_effect(read):
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 4096}
    assert read(mistral).heads == 6


def test_all_faults_are_in_one_message(read):
    with pytest.raises(CheckpointError) as error:
        read({**LLAMA, "hidden_act": "relu2", "vocab_size": None, "quantization_config": {"quant_method": "awq"}})
    assert len(error.value.faults) == 3


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_broken_json_is_one_message(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        model_config(tmp_path)


def test_a_folder_without_config_json_and_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        model_config(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        model_config(tmp_path / "none")


def test_a_tied_model_is_read_before_its_tensors_are_there(read, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model-1.safetensors"}}')
    assert read({**LLAMA, "tie_word_embeddings": True}).tied


def test_a_model_of_no_family_is_refused_with_all_reasons():
    config = ModelConfig(activation="relu", moe=MoEConfig(experts=4, every=2, router="expert-choice", shared=1))
    with pytest.raises(CheckpointError) as error:
        expressing(config)
    mixtral = next(fault for fault in error.value.faults if fault.startswith("Mixtral"))
    for reason in ("activation is 'relu'", "moe.router is 'expert-choice'", "moe.every is 2", "moe.shared is 1"):
        assert reason in mixtral
    assert {fault.split(":")[0] for fault in error.value.faults} == {family.title for family in FAMILIES}


def test_a_model_takes_the_first_family_that_has_its_form():
    for changes, title in (
        ({}, "Llama"),
        ({"qkv_bias": True}, "Qwen2"),
        ({"qkv_bias": True, "out_bias": True}, "Llama"),
        ({"qk_norm": True}, "Qwen3"),
        ({"activation": "geglu"}, "Gemma"),
        ({"moe": MoEConfig(router="top-k", every=1)}, "Mixtral"),
        ({"moe": MoEConfig(router="top-k", every=1), "qk_norm": True}, "Qwen3-MoE"),
        ({"moe": MoEConfig(router="st-moe", every=1)}, "Mixtral"),
        ({"moe": MoEConfig(router="switch", every=1), "qk_norm": True}, "Qwen3-MoE"),
        ({"block": "parallel", "norm": "layer", "rotary_pairs": "neighbours"}, "Cohere"),
    ):
        assert expressing(ModelConfig(**changes)).title == title
