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
    if family.text_part is not None:
        family = expressing(config)  # the text model alone is written
    length = 4096 if family.length else None
    if config.positions == "learned":
        length = config.context_length  # one vector for each position
    assert read(written(family, config, 4096, "bfloat16")) == dataclasses.replace(config, context_length=length)


@pytest.mark.parametrize("missing", [{"text_type": ""}, {"text_part": None}])
def test_a_family_with_images_says_what_its_text_model_is(missing):
    family = next(each for each in FAMILIES if each.text_part is not None)
    with pytest.raises(ValueError, match="has both text_part and text_type; set both"):
        dataclasses.replace(family, **missing)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_every_field_of_a_model_is_read_or_fixed_or_free(family):
    wanted = {field.name for field in dataclasses.fields(ModelConfig)} - {*FREE, "moe"}
    if "moe.experts" in family.options:
        named = (
            "experts", "k", "router", "every", "offset", "shared", "renormalize", "scores", "expert_groups",
            "choice_bias", "gate_factor", "gate_inputs", "router_bias", "shared_mix",
            "shared_width", "dense_layers", "dense_feed_forward",
        )  # fmt: skip
        wanted |= {f"moe.{name}" for name in named}
    wanted -= {"sliding_window", "layer_kinds"}  # which `Window` describes, or a family's agreement
    rope = {"rope_base", "rope_scaling", "rotary_size"} | ({"local_rope_base"} if family.local_rope_base else set())
    together = family.agreement.fields if family.agreement else ()
    known = {*family.options, *family.fixed, *family.derived, *together}
    known -= {"moe", "layer_kinds", "moe.kept_groups", "moe.group_best"}  # without groups, these two do nothing
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
        read({"architectures": ["MambaForCausalLM"]})
    assert "'MambaForCausalLM', which is not known. Known: LlamaForCausalLM, " in str(error.value)
    assert all(family.architecture in str(error.value) for family in FAMILIES)


REFUSED = {
    "a window of a family that has none": ({"sliding_window": 4096}, "sliding_window is 4096, which models of"),
    "a window of no token": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
        "sliding_window is 0; it must be a whole number of tokens, or null",
    ),
    "layers with a window where it is off": (
        {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has 'sliding_attention', but there is no sliding window (use_sliding_window)",
    ),
    "other layers": ({"layer_types": ["linear_attention"] * 2}, "layer_types has 'linear_attention', which is not"),
    "too few layers": ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, but num_hidden_layers is 2"),
    "attention to later tokens": ({"is_causal": False}, "is_causal is false, which is not supported; true is."),
    "attention to later tokens, by null": ({"is_causal": None}, "is_causal is null, which is not supported"),
    "Gemma's attention to later tokens": (
        {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "use_bidirectional_attention": True},
        "use_bidirectional_attention is true, which is not supported; false is.",
    ),
    "an entry that is not known": (
        {"residual_multiplier": 0.5},
        "residual_multiplier is 0.5, an entry of config.json that is not known for Llama; delete it if the model's",
    ),
    "another family's entry": ({"logit_scale": 0.5}, "logit_scale is 0.5, an entry of config.json that is not known"),
    "another family's type": (
        {"model_type": "mistral"},
        "model_type is 'mistral', not 'llama': they belong to different",
    ),
    "architectures that are no list": ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM';"),
    "no architecture": ({"architectures": None}, "config.json names no model"),
    "a type that is null": ({"model_type": None}, "model_type is null, not 'llama'"),
    "two names of one entry": (
        {"architectures": ["MixtralForCausalLM"], "num_experts": 4, "num_local_experts": 8},
        "num_local_experts is 8, num_experts is 4; they are names of one entry",
    ),
    "a length of no number": ({"max_position_embeddings": "2048"}, "max_position_embeddings is '2048'; it must be a"),
    "a length of null": ({"max_position_embeddings": None}, "max_position_embeddings is null; it must be a whole"),
    "a base of 0": ({"rope_theta": 0}, "rope_theta is 0; it must be a positive number"),
    "a base of null": ({"rope_parameters": {"rope_theta": None}}, "rope_theta is null; it must be a positive number"),
    "a base no float holds": ({"rope_theta": 10**400}, "it must be a positive number"),
    "both tables of the rotary embedding": (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "axial", "factor": 4.0}},
        "the rope type is 'axial'",
    ),
    "rotary entries that are not known": ({"rope_scaling": {"mrope_section": [1]}}, "rope_scaling has mrope_section"),
    "a table for each kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 500.0}}},
        "rope_parameters has full_attention, which is not supported",
    ),
    "a scaling factor of text": (
        {"rope_scaling": {"rope_type": "llama3", **SCALING, "factor": "8"}},
        "factor of the llama3 rope scaling is '8'; it must be a number.",
    ),
    "no element of a head": (
        {"architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new", "partial_rotary_factor": 0.01},
        "partial_rotary_factor is 0.01, which rotates no element of a head of 8",
    ),
    "part of a head that is null": (
        {"architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new", "partial_rotary_factor": None},
        "partial_rotary_factor is null; it must be a number above 0",
    ),
    "an activation": ({"hidden_act": "relu2"}, "hidden_act is 'relu2', which is not supported; supported: 'silu'"),
    "a rope type": ({"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "the rope type is 'axial'"),
    "half a scaling": ({"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor of the llama3 rope scaling"),
    "a scaling upside down": (
        {"rope_scaling": {"rope_type": "llama3", **SCALING, "low_freq_factor": 8.0}},
        "its rotary embedding cannot be read: ",
    ),
    "a base that is not a number": ({"rope_theta": "x"}, "rope_theta is 'x'; it must be a positive number"),
    "a scaling that is text": ({"rope_scaling": "abc"}, "rope_scaling is 'abc'; it must be an object of entries"),
    "rope parameters that are text": ({"rope_parameters": "x"}, "rope_parameters is 'x'; it must be an object"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which Llama models do not have"),
    "quantized weights": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "norms of heads": ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "use_qk_norm is true"),
    "experts in every layer of none": (
        {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0, "moe_intermediate_size": 8},
        "decoder_sparse_step is 0; it must be a whole number of layers",
    ),
    "dense layers that are no list": (
        {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": 1, "moe_intermediate_size": 8},
        "mlp_only_layers is 1; it must be a list of numbers of layers",
    ),
    "dense layers only": (
        {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 3, "moe_intermediate_size": 8},
        "decoder_sparse_step is 3, so none of the 2 layers has experts; at least one must.",
    ),
    "dense layers only, by default": (
        {"architectures": ["DeepseekV3ForCausalLM"], "moe_intermediate_size": 8},
        "first_k_dense_replace is 3 by default, so none of the 2 layers has experts; at least one must.",
    ),
    "a width of dense layers": (
        {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0], "moe_intermediate_size": 8}
        | {"intermediate_size": None},
        "intermediate_size is null; it must be a whole number",
    ),
    "a missing size": ({"hidden_size": None}, "hidden_size is null; it must be a whole number"),
    "sizes that do not fit": ({"num_key_value_heads": 4}, "heads is 6, which kv_heads (4) does not divide"),
    "entries of wrong types": ({"rope_parameters": [1]}, "rope_parameters is [1]; it must be an object"),
    "a scale that is not a number": (
        {"architectures": ["CohereForCausalLM"], "logit_scale": "1"},
        "logit_scale is '1'; it must be a number",
    ),
    "a scale that is null": (
        {"architectures": ["CohereForCausalLM"], "logit_scale": None},
        "logit_scale is null; it must be a number",
    ),
    "no rotated elements": ({"architectures": ["GPTJForCausalLM"], "rotary_dim": 0}, "rotary_dim is 0: models that"),
    "elements that are null": (
        {"architectures": ["GPTJForCausalLM"], "rotary_dim": None},
        "rotary_dim is null; it must be a whole number",
    ),
    "a multiplier of 0": (
        {"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 0},
        "embedding_multiplier is 0; it must be a positive number",
    ),
    "a yarn scaling of Phi-3 without its factors": (
        {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "yarn", "factor": 4.0}},
        "short_factor of the longrope rope scaling is missing",
    ),
    "a linear scaling of Phi-3": (
        {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "linear", "factor": 4.0}},
        "the rope type is 'linear', which is not supported; supported: 'default', 'longrope', 'su', 'yarn'",
    ),
    "norms of StableLM's heads": ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, "qk_layernorm is"),
    "a number for a block": (
        {"architectures": ["StableLmForCausalLM"], "use_parallel_residual": 1},
        "use_parallel_residual is 1, which is not supported; supported: False, True",
    ),
    "the base under another name": (
        {"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "rope_theta": 500.0},
        "rope_theta is 500.0, an entry of config.json that is not known for GPT-NeoX",
    ),
    "a size that is not a number": ({"hidden_size": "24"}, "hidden_size is '24'; it must be a whole number"),
}


M2M_100 = {
    "architectures": ["M2M100ForConditionalGeneration"],
    "vocab_size": 50,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 50,
    "d_model": 24,
    "d_kv": 4,
    "d_ff": 20,
    "num_layers": 2,
    "num_decoder_layers": 4,
    "num_heads": 3,
}
SWITCH = T5 | {"architectures": ["SwitchTransformersForConditionalGeneration"], "num_experts": 5}
NLLB = M2M_100 | {
    "architectures": ["NllbMoeForConditionalGeneration"],
    "num_experts": 5,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
}
SPARSE = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 2}

REFUSED_WITH_ENCODER = {
    "stacks of different widths": (
        M2M_100,
        {"decoder_ffn_dim": 40},
        "decoder_ffn_dim is 40, and encoder_ffn_dim is 20",
    ),
    "stacks of different heads": (M2M_100, {"decoder_attention_heads": 6}, "decoder_attention_heads is 6, and encoder"),
    "another padding token": (M2M_100, {"pad_token_id": 0}, "pad_token_id is 0, which is not supported; 1 is"),
    "tokens that are not scaled": (M2M_100, {"scale_embedding": False}, "scale_embedding is false"),
    "no encoder": (M2M_100, {"is_encoder_decoder": False}, "is_encoder_decoder is false, which is not supported"),
    "no layers of an encoder": (T5, {"num_layers": 0}, "its encoder has no layers"),
    "a token beyond the vocabulary": (
        T5,
        {"decoder_start_token_id": 50},
        "start_token is 50, which is not a token of 50",
    ),
    "another gate": (
        T5,
        {"is_gated_act": True},
        "is_gated_act is true; with feed_forward_proj 'relu' it must be false",
    ),
    "another activation": (
        T5,
        {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"},
        "it must be 'gelu_new'",
    ),
    "a scale that is no truth": (T5, {"scale_decoder_outputs": 1}, "scale_decoder_outputs is 1; it must be true or"),
    "different steps": (
        SWITCH,
        SPARSE | {"num_sparse_decoder_layers": 4},
        "1 of 2 blocks of the encoder has experts, and 1 of 1 of the decoder (num_sparse_encoder_layers, "
        "num_sparse_decoder_layers); here both stacks must have the same share",
    ),
    "a step of other layers": (SWITCH, SPARSE | {"encoder_sparse_step": 1}, "encoder_sparse_step is 1; with num_spar"),
    "too many experts' layers": (
        SWITCH,
        SPARSE | {"num_sparse_encoder_layers": 3},
        "num_sparse_encoder_layers is 3; it must be a whole number, at most the number of layers (2)",
    ),
    "a router's bias": (SWITCH, SPARSE | {"router_bias": True}, "router_bias is true"),
    "no slots": (SWITCH, SPARSE | {"expert_capacity": 0}, "expert_capacity is 0; it must be a whole number of tokens"),
    "experts with room for some": (
        NLLB,
        {"moe_eval_capacity_token_fraction": 0.5},
        "moe_eval_capacity_token_fraction is 0.5, which is not supported; 1.0 is",
    ),
    "second experts at random": (NLLB, {"second_expert_policy": "random"}, "second_expert_policy is 'random'"),
    "stacks with other shares": (
        NLLB,
        {"decoder_sparse_step": 1},
        "encoder_sparse_step is 2, and decoder_sparse_step 1; here both stacks must have the same share of experts",
    ),
    "a part of a period": (
        NLLB,
        {"encoder_sparse_step": 4, "decoder_sparse_step": 4},
        "encoder_layers is 2, which moe.every (4) does not divide",
    ),
    "no outputs": (NLLB, {"moe_token_dropout": 1.0}, "moe_token_dropout is 1.0; it must be in [0, 1)"),
    "an unrouted stack": (NLLB, {"encoder_sparse_step": 0}, "encoder_sparse_step is 0; it must be a whole number n"),
}


@pytest.mark.parametrize("what", REFUSED_WITH_ENCODER)
def test_what_encoder_decoders_here_do_not_have_is_refused_by_name(what, read):
    entries, changes, words = REFUSED_WITH_ENCODER[what]
    with pytest.raises(CheckpointError, match="cannot read the model of checkpoint") as error:
        read(entries | changes)
    assert words in str(error.value)
    assert len([fault for fault in error.value.faults if not fault.endswith("built:")]) == 1


@pytest.mark.parametrize(
    ("layers", "sparse", "every", "place"), [(2, 2, 1, 0), (4, 2, 2, 1), (6, 2, 3, 1), (4, 0, 4, 1)]
)
def test_switch_has_experts_in_the_second_block_of_each_period(layers, sparse, every, place, read):
    step = {"num_sparse_encoder_layers": sparse, "num_sparse_decoder_layers": sparse}
    config = read(SWITCH | {"num_layers": layers, "num_decoder_layers": layers} | step)
    assert (config.moe.every, config.expert_place, config.moe.router) == (every, place, "switch")


def test_the_token_that_a_decoder_begins_with_may_stand_beside_the_other_defaults_of_generation(read, tmp_path):
    assert (read(T5).start_token, read(M2M_100).start_token) == (0, 2)
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 7}')
    assert (read(T5).start_token, read(T5 | {"decoder_start_token_id": 8}).start_token) == (7, 8)


FALCON = {
    "architectures": ["FalconForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}
REFUSED_OF_FALCON = {
    "Falcon's biases that are no switch": ({"alibi": 1}, "alibi is 1, which is not supported; supported: False"),
    "Falcon's serial block of the newer form": (
        {"parallel_attn": False, "new_decoder_architecture": True},
        "parallel_attn is false, which new_decoder_architecture does not have",
    ),
    "heads that Falcon does not group": (
        {"multi_query": False, "num_kv_heads": 3},
        "num_kv_heads is 3, and num_attention_heads is 6; fewer key/value heads need multi_query or new_decoder",
    ),
    "two norms of an older Falcon": ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2, which"),
    "three norms": (
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3},
        "num_ln_in_parallel_attn is 3; it must be 1 or 2",
    ),
    "Falcon's switch that is a number": ({"multi_query": 1}, "multi_query is 1; it must be true or false"),
}


@pytest.mark.parametrize("what", REFUSED_OF_FALCON)
def test_what_falcons_here_do_not_have_is_refused_by_name(what, read):
    entries, words = REFUSED_OF_FALCON[what]
    with pytest.raises(CheckpointError) as error:
        read(FALCON | entries)
    (fault,) = error.value.faults
    assert fault.startswith(words)


BLOOM = {"architectures": ["BloomForCausalLM"], "vocab_size": 50, "hidden_size": 24, "n_layer": 2, "n_head": 6}
MPT = {"architectures": ["MptForCausalLM"], "vocab_size": 50, "d_model": 24, "n_layers": 2, "n_heads": 6}
REFUSED_OF_ALIBI = {
    "norms as residuals": (
        BLOOM,
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm is true, which is not supported; false is.",
    ),
    "another width": (BLOOM, {"n_inner": 40}, "n_inner is 40, which is not supported; null is."),
    "two names of one entry": (BLOOM, {"n_embed": 12}, "hidden_size is 24, n_embed is 12; they are names of one entry"),
    "no biases": (MPT, {"attn_config": {"alibi": False}}, "alibi of attn_config is false, which is not supported"),
    "norms of heads": (MPT, {"attn_config": {"qk_ln": True}}, "qk_ln of attn_config is true, which is not supported"),
    "a prefix": (MPT, {"attn_config": {"prefix_lm": True}}, "prefix_lm of attn_config is true, which is not"),
    "one key head": (
        MPT,
        {"attn_config": {"attn_type": "multiquery_attention"}},
        "attn_type of attn_config is 'multiquery_attention', which is not supported; 'multihead_attention' is.",
    ),
    "an unknown entry": (MPT, {"attn_config": {"kv_n_heads": 2}}, "attn_config has kv_n_heads, which is not known"),
    "a bound of 0": (MPT, {"attn_config": {"clip_qkv": 0}}, "clip_qkv of attn_config is 0; it must be a positive num"),
    "half an exponent": (
        MPT,
        {"attn_config": {"alibi_bias_max": 2.5}},
        "alibi_bias_max of attn_config is 2.5; it must",
    ),
    "no exponent": (MPT, {"attn_config": {"alibi_bias_max": None}}, "alibi_bias_max of attn_config is null; it must"),
    "no table": (MPT, {"attn_config": [1]}, "attn_config is [1]; it must be an object."),
    "another width of MPT": (MPT, {"expansion_ratio": 2}, "expansion_ratio is 2, which is not supported; 4 is."),
    "scaled logits": (MPT, {"logit_scale": "inv_sqrt_d_model"}, "logit_scale is 'inv_sqrt_d_model', which is not"),
    "biases of MPT": (MPT, {"no_bias": False}, "no_bias is false, which is not supported; true is."),
}


@pytest.mark.parametrize("what", REFUSED_OF_ALIBI)
def test_what_models_with_alibi_here_do_not_have_is_refused_by_name(what, read):
    entries, changes, words = REFUSED_OF_ALIBI[what]
    with pytest.raises(CheckpointError) as error:
        read(entries | changes)
    (fault,) = error.value.faults
    assert fault.startswith(words)


def test_the_table_of_attention_of_an_mpt_is_read(read):
    config = read(MPT | {"attn_config": {"alibi_bias_max": 16, "clip_qkv": 6, "softmax_scale": 0.125}})
    assert (config.alibi_max, config.qkv_clip, config.attention_scale) == (16.0, 6.0, 0.125)
    config = read(MPT)
    assert (config.alibi_max, config.qkv_clip, config.attention_scale, config.context_length) == (8.0, None, None, 2048)


def test_a_serial_falcon_with_groups_of_heads_has_no_form(read):
    config = dataclasses.replace(read(FALCON | {"parallel_attn": False, "alibi": True}), kv_heads=3)
    with pytest.raises(CheckpointError) as error:
        expressing(config)
    assert "Falcon: kv_heads is 3, but a serial block has 1 or 6 of them." in error.value.faults


def test_a_falcon_has_the_heads_and_norms_of_its_form(read):
    newer = {"new_decoder_architecture": True, "num_kv_heads": 3}
    for entries, heads, norms in (
        ({}, 1, 1),
        ({"multi_query": False}, 6, 1),
        ({"num_kv_heads": 3}, 1, 1),
        (newer, 3, 2),
        (newer | {"num_ln_in_parallel_attn": 1, "multi_query": True}, 3, 1),
        (newer | {"num_kv_heads": None}, 6, 2),
    ):
        config = read(FALCON | entries)
        assert (config.kv_heads, config.parallel_norms, config.block) == (heads, norms, "parallel")


@pytest.mark.parametrize("what", REFUSED)
def test_what_models_here_do_not_have_is_refused_by_name(what, read):
    entries, words = REFUSED[what]
    with pytest.raises(CheckpointError, match="cannot read the model of checkpoint") as error:
        read({**LLAMA, "max_position_embeddings": 32768, **entries})
    assert words in str(error.value)


WINDOWS = {
    "Mistral's": ("Mistral", {"sliding_window": 128}, 128),
    "Mistral's default": ("Mistral", {}, 4096),
    "none": ("Mistral", {"sliding_window": None}, None),
    "one that has no switch": ("Mistral", {"use_sliding_window": False}, 4096),
    "one that has no layers": ("Mistral", {"layer_types": ["full_attention"] * 2, "max_window_layers": 9}, 4096),
    "Mixtral's default": ("Mixtral", {}, None),
    "Qwen2's default": ("Qwen2", {}, None),
    "the layers after the first 28": ("Qwen2", {"use_sliding_window": True}, None),
    "the layers after the first": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}, 4096),
    "named layers": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
        9,
    ),
    "all layers of Qwen3-MoE": (
        "Qwen3Moe",
        {"use_sliding_window": True, "max_window_layers": 28, "moe_intermediate_size": 8},
        4096,
    ),
}


@pytest.mark.parametrize("what", WINDOWS)
def test_a_sliding_window_is_the_one_that_some_layer_has(what, read):
    family, entries, wanted = WINDOWS[what]
    assert read(LLAMA | {"architectures": [f"{family}ForCausalLM"]} | entries).sliding_window == wanted


def test_the_longest_text_is_read_under_all_its_names(read):
    assert read(LLAMA).context_length is None
    assert read(LLAMA | {"max_position_embeddings": 77}).context_length == 77
    gptj = {"architectures": ["GPTJForCausalLM"], "vocab_size": 50, "n_embd": 24, "n_layer": 1, "n_head": 3}
    assert read(gptj | {"rotary_dim": 4, "n_positions": 66}).context_length == 66
    assert read(gptj | {"rotary_dim": 4, "max_position_embeddings": 66}).context_length == 66


def test_a_model_with_a_window_is_written_as_one_of_a_family_that_has_windows(read):
    config = dataclasses.replace(read(LLAMA), sliding_window=100)
    family = expressing(config)
    assert (family.title, written(family, config, 4096, "bfloat16")["sliding_window"]) == ("Mistral", 100)
    config = dataclasses.replace(config, sliding_window=None, layer_kinds=("full", "unrotated"))
    entries = written(expressing(config), config, 4096, "bfloat16")
    assert (expressing(config).title, entries["no_rope_layers"]) == ("SmolLM 3", [1, 0])


def test_rope_scaling_counts_before_rope_parameters_as_in_transformers(read):
    llama3 = {"rope_type": "llama3", **SCALING}
    config = read(LLAMA | {"rope_scaling": llama3, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    assert (config.rope_scaling.original_length, config.rope_base) == (16, 10000.0)
    assert read(LLAMA | {"rope_scaling": {}, "rope_parameters": {"rope_theta": 500.0}}).rope_base == 500.0


def test_an_original_length_beside_the_scaling_counts_before_the_one_in_it(read):
    llama3 = {"rope_scaling": {"rope_type": "llama3", **SCALING}}
    config = read(LLAMA | llama3 | {"original_max_position_embeddings": 32})
    assert config.rope_scaling.original_length == 32


@pytest.mark.parametrize(("size", "rotary"), [(44, 30), (45, 26), (49, 2), (64, 32)])
def test_a_part_of_a_head_that_is_written_is_read_as_the_same(size, rotary, read, tmp_path):
    phi = {"architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new", "head_dim": size}
    config = dataclasses.replace(read(LLAMA | phi), rotary_size=rotary)
    assert read(written(described(tmp_path).family, config, 64, "float32")).rotary_size == rotary


@pytest.mark.parametrize("architecture", ["BloomForCausalLM", "GPTNeoForCausalLM", "GptjForCausalLM"])
def test_no_architecture_is_suggested_in_place_of_another(architecture, read):
    with pytest.raises(CheckpointError) as error:
        read({"architectures": [architecture]})
    assert "Did you mean" not in str(error.value)


def test_a_lora_adapter_says_what_it_is_and_what_to_do(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/some-model"}')
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"holds a LoRA adapter.*'someone/some-model'.*merge_and_unload"):
        model_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"the weights of another model, not a model"):
        model_config(tmp_path)


def test_a_lora_adapter_beside_a_model_is_not_passed_over(read, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"a LoRA adapter \(adapter_config.json\) and a model"):
        read({})


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model-Q8_0.gguf", r"model-Q8_0\.gguf, a GGUF file, which is not supported.*gguf_file=NAME"),
        ("pytorch_model.bin", "PyTorch weights, which may run code"),
        ("consolidated.00.pth", "the version of the model in the format of transformers"),
        ("model.safetensors", "but a checkpoint also has config.json"),
    ],
)
def test_a_folder_or_a_file_of_another_format_says_which_and_what_to_do(file, words, tmp_path):
    (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=f"it holds {words}" if file.endswith("gguf") else words):
        model_config(tmp_path)
    with pytest.raises(CheckpointError, match=f"it is {file}, "):
        model_config(tmp_path / file)


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
    config = ModelConfig(activation="relu", moe=MoEConfig(experts=4, router="expert-choice", shared=1))
    with pytest.raises(CheckpointError) as error:
        expressing(config)
    *nearest, rest = error.value.faults
    assert nearest[0].startswith("Qwen2-MoE: ")
    for reason in (
        "activation is 'relu'",
        "moe.router is 'expert-choice'",
        "moe.shared_mix is False",
    ):
        assert reason in nearest[0]
    assert {fault.split(":")[0] for fault in nearest} < {family.title for family in FAMILIES}
    assert rest == f"The other {len(FAMILIES) - len(nearest)} families differ from it in at least as many points."


RELATIVE = {"encoder_layers": 2, "positions": "relative", "attention_scale": 1.0, "activation": "relu"}
SINUSOIDAL = {
    "encoder_layers": 1,
    "positions": "sinusoidal",
    "position_offset": 2,
    "activation": "relu",
    "norm": "layer",
    "norm_epsilon": 1e-5,
    **dict.fromkeys(("norm_bias", "qkv_bias", "out_bias", "ffn_bias"), True),
}


PAIRED = {"block": "parallel", "parallel_norms": 2, "norm": "layer", "norm_bias": True}


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
        ({"attention_scale": 0.1}, "Granite"),
        ({"rotary_size": 8}, "Phi-3"),
        ({"norm": "layer", "norm_bias": True}, "StableLM"),
        ({"norm": "layer", "norm_bias": True, "activation": "gelu"}, "StarCoder 2"),
        (PAIRED | {"kv_heads": 2, "activation": "gelu"}, "Falcon"),
        (PAIRED | {"activation": "gelu_exact", "ffn_bias": True, "rotary_size": 4}, "GPT-NeoX"),
        (RELATIVE, "T5"),
        (RELATIVE | {"activation": "geglu", "tied": False}, "T5"),
        (RELATIVE | {"moe": MoEConfig(router="switch")}, "Switch Transformers"),
        (RELATIVE | {"moe": MoEConfig(router="top-k", k=1, renormalize=False, every=1)}, "Switch Transformers"),
        (SINUSOIDAL, "M2M-100"),
        (SINUSOIDAL | {"encoder_layers": 2, "moe": MoEConfig(router="gshard")}, "NLLB-MoE"),
    ):
        assert expressing(ModelConfig(**changes)).title == title
