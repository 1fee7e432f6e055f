"""Entries that published files of config.json have beside sizes, which are no reason to refuse them."""

import json

import pytest

from gspmd_models.checkpoints import CheckpointError, model_config
from tests.models.checkpoints.published import PUBLISHED

#: Name of a published model to further entries of its file, or of files of its family.
FURTHER = {
    "Phi-3-mini": {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1,
                   "interpolate_factor": 1, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "Falcon-7B": {"apply_residual_connection_post_layernorm": False, "ff_factor": 4},
    "Falcon-RW-1B": {"apply_residual_connection_post_layernorm": False, "new_decoder_architecture": False},
    "BLOOM-560m": {"apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True,
                   "bias_dropout_fusion": True, "masked_softmax_fusion": True, "n_inner": None, "offset_alibi": 100,
                   "pretraining_tp": 1, "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False,
                   "hidden_dropout": 0.0, "attention_dropout": 0.0, "unk_token_id": 0, "pad_token_id": 3},
    "MPT-7B": {"emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4, "init_device": "cpu", "no_bias": True,
               "init_config": {"name": "kaiming_normal_"}, "learned_pos_emb": True, "logit_scale": None, "verbose": 0,
               "norm_type": "low_precision_layernorm", "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b",
               "use_cache": False, "torch_dtype": "bfloat16", "auto_map": {"AutoConfig": "x.MPTConfig"}},
    "StarCoder2-3B": {"activation_function": "gelu", "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-5,
                      "mlp_type": "default", "norm_type": "layer_norm", "scale_attention_softmax_in_fp32": True,
                      "scale_attn_weights": True},
    "Pythia-1.4B": {"rotary_emb_base": 10000, "rope_theta": 10000, "rotary_pct": 0.25, "partial_rotary_factor": 0.25,
                    "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    "StableLM-2-1.6B": {"norm_eps": 1e-5, "rope_pct": 0.25, "rotary_scaling_factor": 1.0},
    "GPT-2": {"n_special": 0, "predict_special_tokens": True, "output_past": True, "_num_labels": 1},
    "dots.llm1": {"moe_layer_freq": 1, "scoring_func": "noaux_tc", "topk_method": "noaux_tc"},
    "Mistral-7B": {"attention_bias": False, "mlp_bias": False},
    "SmolLM3-3B": {"use_sliding_window": False, "sliding_window": 4096},
    "Llama-4-Maverick-17B-128E": {"no_rope_layers": [], "attn_temperature_tuning": 4, "floor_scale": 8192,
                                  "attn_scale": 0.1, "moe_layers": [*range(1, 48, 2)], "no_rope_layer_interval": 4,
                                  "layer_types": [*["chunked_attention"] * 3, "full_attention"] * 12},
}  # fmt: skip


@pytest.mark.parametrize("name", FURTHER)
def test_entries_of_published_files_change_nothing(name, tmp_path):
    entries, _ = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    wanted = model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(entries | FURTHER[name]))
    assert model_config(tmp_path) == wanted


@pytest.mark.parametrize(
    ("name", "entries", "words"),
    [
        ("Phi-3-mini", {"attention_bias": True}, "attention_bias is true, which is not supported; false is"),
        ("Pythia-1.4B", {"rotary_emb_base": 10000, "rope_theta": 500}, "rope_theta is 500, an entry of config.json"),
        ("Falcon-7B", {"apply_residual_connection_post_layernorm": True}, "which is not supported; false is"),
        (
            "Mistral-Small-3.1-24B, with images",
            {"text_config": {"model_type": "ministral3"}},
            "model_type of text_config is 'ministral3', which is not supported; 'mistral' is.",
        ),
        (
            "Gemma-3-4b, with images",
            {"quantization_config": {"quant_method": "gptq"}},
            "a quantization of weights that is not",
        ),
        ("Llama-4-Maverick-17B-128E", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2, which is not supported"),
        ("Llama-4-Maverick-17B-128E", {"moe_layers": [48]}, "moe_layers is [48], so none of the 48 layers has"),
        (
            "Llama-4-Maverick-17B-128E",
            {"interleave_moe_layer_step": 49},
            "interleave_moe_layer_step is 49, so none of the 48 layers has experts; at least one must.",
        ),
        (
            "Llama-4-Maverick-17B-128E",
            {"moe_layers": [0], "intermediate_size_mlp": 0},
            "intermediate_size_mlp is 0; it must be a whole number.",
        ),
        ("Llama-4-Maverick-17B-128E", {"sliding_window": 64}, "sliding_window is 64, which models of this family"),
        ("Llama-4-Maverick-17B-128E", {"attention_chunk_size": 0}, "attention_chunk_size is 0; it must be a whole"),
        (
            "Llama-4-Maverick-17B-128E",
            {"layer_types": ["chunked_attention"] * 48},
            "layer 3 is chunked_attention (layer_types), but not rotated (no_rope_layers); only layers with full",
        ),
        (
            "Llama-4-Maverick-17B-128E",
            {"layer_types": ["chunked_attention"] * 48, "no_rope_layers": [1] * 48, "attention_chunk_size": None},
            "layer_types has 'chunked_attention', but attention_chunk_size is null",
        ),
        ("Llama-4-Maverick-17B-128E", {"floor_scale": 0}, "floor_scale is 0; it must be a whole number of tokens"),
        ("Llama-4-Maverick-17B-128E", {"attn_scale": -1}, "attn_scale is -1; it must be a number that is not negative"),
        ("Qwen1.5-MoE-A2.7B", {"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers is 'x'"),
    ],
)
def test_values_that_would_change_the_model_are_refused(name, entries, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name][0] | entries))
    with pytest.raises(CheckpointError) as error:
        model_config(tmp_path)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("entries", "sparse"),
    [
        ({"moe_layers": [0, 1, 5]}, [0, 1, 5]),
        ({"moe_layers": [7, 5, 60]}, [5, 7]),
        ({"interleave_moe_layer_step": 5}, [*range(4, 48, 5)]),
        ({"interleave_moe_layer_step": 1}, [*range(48)]),
    ],
)
def test_any_layers_of_llama_4_have_experts(entries, sparse, tmp_path):
    entries = PUBLISHED["Llama-4-Maverick-17B-128E"][0] | entries
    (tmp_path / "config.json").write_text(json.dumps(entries))
    config = model_config(tmp_path)
    assert [number for number in range(48) if config.is_sparse(number)] == sparse
    assert config.moe.dense_feed_forward == (0 if len(sparse) == 48 else 16384)


def test_windows_of_qwen2_moe_lie_in_every_other_layer_below_a_bound(tmp_path):
    entries = PUBLISHED["Qwen1.5-MoE-A2.7B"][0] | {"use_sliding_window": True, "max_window_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(entries | {"sliding_window": 64}))
    config = model_config(tmp_path)
    kinds = [config.layer_kind(number) for number in range(5)]
    assert (kinds, config.sliding_window) == (["sliding", "full", "sliding", "full", "full"], 64)
