"""The models of the tests: small, with odd shapes, and with every option of a family in some of them."""

LENGTH = 7  # of a prompt

_SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = _SIZES | {"head_dim": 8}  # a head is not as wide as 24/12
_WIDE = _SIZES | {"hidden_size": 48}  # the width of a head cannot be set here
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_ALL_HEADS = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"} | {"hidden_size": 48}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_MULTIPLIED = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.2,
}
_FALCON = {key: value for key, value in _ALL_HEADS.items() if key != "intermediate_size"} | {"ffn_hidden_size": 40}
_PADDED = {"pad_token_id": 0}  # the default is beyond the vocabulary
_FEW_HEADS = _SIZES | _PADDED | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
_LONG = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}
_HALF_LONG = _LONG | {"short_factor": [1.5], "long_factor": [5.0], "partial_rotary_factor": 0.5}
_GPTJ = {
    "vocab_size": 50,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 12,
    "n_inner": 40,
    "rotary_dim": 2,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_BLOOM = {"vocab_size": 50, "hidden_size": 48, "n_layer": 2, "n_head": 12}
_MPT = {"vocab_size": 50, "d_model": 48, "n_layers": 2, "n_heads": 12, "max_seq_len": 80}
_CLIPPED = {"alibi_bias_max": 11, "clip_qkv": 0.75, "softmax_scale": 0.3}
_GPT2 = {"vocab_size": 50, "n_embd": 48, "n_layer": 2, "n_head": 12, "n_inner": 40, "n_positions": 80}
_GPT_OSS = _HEADS | {"sliding_window": 4, "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 16}

_LATENT = _SIZES | {
    "num_key_value_heads": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 12,
    "v_head_dim": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
_LLAMA_4 = _HEADS | {
    "num_hidden_layers": 4,
    "intermediate_size": 16,
    "intermediate_size_mlp": 40,
    "num_local_experts": 5,
    "attention_chunk_size": 3,
    "floor_scale": 4,
    "attn_scale": 0.5,
}

#: Name to the prefix of its classes in transformers, and the arguments of its config.
CASES = {
    "llama": ("Llama", _HEADS),
    "llama-tied-scaled": ("Llama", _HEADS | {"tie_word_embeddings": True, "rope_parameters": _SCALED}),
    "llama-biases": ("Llama", _HEADS | {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", _HEADS | {"sliding_window": None}),
    "qwen2": ("Qwen2", _HEADS),
    "qwen2-tied": ("Qwen2", _HEADS | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _HEADS | {"tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3", _HEADS | {"attention_bias": True}),
    "gemma": ("Gemma", _HEADS | {"num_key_value_heads": 1}),
    "mistral-window": ("Mistral", _HEADS | {"sliding_window": 4}),
    "ministral": ("Ministral", _HEADS | {"sliding_window": 4, "num_hidden_layers": 3, "layer_types": _KINDS}),
    "ministral-window": ("Ministral", _HEADS | {"sliding_window": 3}),
    "qwen2-window": ("Qwen2", _HEADS | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "gemma2": ("Gemma2", _HEADS | {"sliding_window": 4, "query_pre_attn_scalar": 6, "attn_logit_softcapping": 2.0}),
    "gemma2-uncapped": (
        "Gemma2",
        _HEADS | {"sliding_window": 9, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3", _HEADS | {"sliding_window": 4, "num_hidden_layers": 3, "layer_types": _KINDS}),
    "olmo2": ("Olmo2", _WIDE | {"attention_bias": True}),
    "olmo3": ("Olmo3", _WIDE | {"sliding_window": 4, "num_hidden_layers": 4}),
    "olmo3-yarn": (
        "Olmo3",
        _WIDE
        | {"sliding_window": 4, "num_hidden_layers": 4}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 900.0},
                "full_attention": _YARN,
            }
        },
    ),
    "llama4": ("Llama4", _LLAMA_4 | {"interleave_moe_layer_step": 2, "rope_parameters": _SCALED}),
    "llama4-sparse": ("Llama4", _LLAMA_4 | {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": True}),
    "llama4-listed": ("Llama4", _LLAMA_4 | {"moe_layers": [0, 1, 3]}),
    "llama4-biases": (
        "Llama4",
        _LLAMA_4
        | {"attention_bias": True, "use_qk_norm": False, "moe_layers": [0, 2], "attn_temperature_tuning": False}
        | {"layer_types": ["full_attention", "chunked_attention"] * 2, "no_rope_layers": [1, 1, 0, 1]},
    ),
    "smollm3": ("SmolLM3", _WIDE | {"num_hidden_layers": 4, "pad_token_id": 0}),
    "olmoe": ("Olmoe", _WIDE | {"num_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 16}),
    "gpt2": ("GPT2", _GPT2),
    "deepseek-v2": ("DeepseekV2", _LATENT | {"q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        _LATENT
        | {"n_routed_experts": 6, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
        | {"q_lora_rank": 7, "routed_scaling_factor": 1.5},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        _LATENT
        | {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "q_lora_rank": 7, "first_k_dense_replace": 1}
        | {"num_hidden_layers": 3, "rope_parameters": _YARN},
    ),
    "gpt-oss": ("GptOss", _GPT_OSS),
    "gpt-oss-full": (
        "GptOss",
        _GPT_OSS | {"layer_types": ["full_attention"] * 2, "rope_parameters": {"rope_type": "default"}},
    ),
    "glm": ("Glm", _HEADS | {"pad_token_id": None}),
    "glm4": ("Glm4", _HEADS | {"pad_token_id": None, "attention_bias": False}),
    "cohere2": ("Cohere2", _WIDE | {"sliding_window": 4, "num_hidden_layers": 4}),
    "mixtral": ("Mixtral", _HEADS | {"num_local_experts": 5}),
    "qwen3-moe": (
        "Qwen3Moe",
        _HEADS | {"moe_intermediate_size": 16, "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "qwen3-moe-steps": (
        "Qwen3Moe",
        _HEADS
        | {"moe_intermediate_size": 16, "num_experts": 5, "num_experts_per_tok": 3, "num_hidden_layers": 6}
        | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "phi3": ("Phi3", _HEADS | _PADDED),
    "phi3-long": ("Phi3", _FEW_HEADS | {"rope_parameters": _LONG, "original_max_position_embeddings": 4}),
    "phi3-short": ("Phi3", _FEW_HEADS | {"rope_parameters": _HALF_LONG, "original_max_position_embeddings": 128}),
    "granite": ("Granite", _WIDE | _MULTIPLIED | {"tie_word_embeddings": True}),
    "granite-untied-biases": ("Granite", _WIDE | _MULTIPLIED | {"attention_bias": True, "mlp_bias": True}),
    "granite-moe": ("GraniteMoe", _HEADS | _MULTIPLIED | {"num_local_experts": 5}),
    "starcoder2": ("Starcoder2", _WIDE),
    "starcoder2-untied": ("Starcoder2", _WIDE | {"tie_word_embeddings": False, "use_bias": False}),
    "stablelm": ("StableLm", _WIDE | _HALF),
    "stablelm-parallel": ("StableLm", _WIDE | _HALF | {"use_parallel_residual": True, "use_qkv_bias": True}),
    "gpt-neox": ("GPTNeoX", _ALL_HEADS | _HALF),
    "gpt-neox-serial": ("GPTNeoX", _ALL_HEADS | _HALF | {"use_parallel_residual": False, "attention_bias": False}),
    "gpt-neox-tied": ("GPTNeoX", _ALL_HEADS | _HALF | {"tie_word_embeddings": True, "hidden_act": "gelu_new"}),
    "falcon": ("Falcon", _FALCON),
    "falcon-two-norms": ("Falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 3}),
    "falcon-one-norm-biases": (
        "Falcon",
        _FALCON
        | {"new_decoder_architecture": True, "num_kv_heads": 6, "num_ln_in_parallel_attn": 1, "bias": True}
        | {"tie_word_embeddings": False},
    ),
    "falcon-all-heads": ("Falcon", _FALCON | {"multi_query": False}),
    "falcon-serial": ("Falcon", _FALCON | {"parallel_attn": False}),
    "falcon-alibi": (
        "Falcon",
        _FALCON | {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
    ),
    "falcon-alibi-parallel": ("Falcon", _FALCON | {"alibi": True}),
    "bloom": ("Bloom", _BLOOM),
    "bloom-untied": ("Bloom", _BLOOM | {"tie_word_embeddings": False, "layer_norm_epsilon": 0.1}),
    "mpt": ("Mpt", _MPT),
    "mpt-clipped-untied": ("Mpt", _MPT | {"tie_word_embeddings": False, "attn_config": _CLIPPED}),
    "qwen2-moe": (
        "Qwen2Moe",
        _WIDE | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 5},
    ),
    "qwen2-moe-no-biases": (
        "Qwen2Moe",
        _WIDE
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 56, "num_experts": 5, "norm_topk_prob": True}
        | {"num_experts_per_tok": 2, "qkv_bias": False, "tie_word_embeddings": True},
    ),
    "qwen2-moe-steps": (
        "Qwen2Moe",
        _WIDE
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 5, "num_hidden_layers": 5}
        | {"decoder_sparse_step": 2},
    ),
    "qwen2-moe-only": (
        "Qwen2Moe",
        _WIDE
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 5, "num_hidden_layers": 4}
        | {"mlp_only_layers": [0, 3, 4, 9]},
    ),
    "glm4-moe": (
        "Glm4Moe",
        _HEADS | {"moe_intermediate_size": 16, "n_routed_experts": 5, "num_experts_per_tok": 3, "num_hidden_layers": 3},
    ),
    "glm4-moe-groups": (
        "Glm4Moe",
        _HEADS
        | {"moe_intermediate_size": 16, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3}
        | {"n_shared_experts": 2, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False}
        | {"routed_scaling_factor": 2.5, "num_hidden_layers": 4, "first_k_dense_replace": 2},
    ),
    "glm4-moe-sparse": (
        "Glm4Moe",
        _HEADS
        | {"moe_intermediate_size": 16, "n_routed_experts": 5, "num_experts_per_tok": 3, "first_k_dense_replace": 0},
    ),
    "dots1-sparse": (
        "Dots1",
        _HEADS | {"moe_intermediate_size": 16, "n_routed_experts": 5, "num_experts_per_tok": 3, "n_shared_experts": 1},
    ),
    "dots1": (
        "Dots1",
        _HEADS
        | {"moe_intermediate_size": 16, "n_routed_experts": 5, "num_experts_per_tok": 3, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "norm_topk_prob": True, "attention_bias": True, "routed_scaling_factor": 2.5},
    ),
    "gptj": ("GPTJ", _GPTJ),
    "gptj-tied": ("GPTJ", _GPTJ | {"tie_word_embeddings": True, "n_inner": None, "activation_function": "gelu"}),
    "phi": ("Phi", _WIDE),
    "cohere": ("Cohere", _WIDE | {"logit_scale": 0.3}),
    "cohere-untied-biases": ("Cohere", _WIDE | {"tie_word_embeddings": False, "attention_bias": True}),
}

_PAIRS = {"vocab_size": 50, "d_model": 24}
_M2M = _PAIRS | {
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
}
_T5 = _PAIRS | {
    "d_kv": 4,  # a head is not as wide as 24/3
    "d_ff": 40,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 3,
}
_T5_1_1 = _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_SWITCH = _T5 | {"num_experts": 5}


def _sparse(layers: int, sparse: int, decoder_layers: int, decoder_sparse: int) -> dict[str, int]:
    return {
        "num_layers": layers,
        "num_sparse_encoder_layers": sparse,
        "num_decoder_layers": decoder_layers,
        "num_sparse_decoder_layers": decoder_sparse,
    }


def _nllb(layers: int, decoder_layers: int, step: int) -> dict[str, int]:
    return _M2M | {
        "encoder_layers": layers,
        "decoder_layers": decoder_layers,
        "encoder_sparse_step": step,
        "decoder_sparse_step": step,
        "num_experts": 5,
    }


#: As `CASES`, for encoder–decoders; the tables of "untied" ones differ.
ENCODER_DECODERS = {
    "m2m-100": ("M2M100", _M2M),
    "m2m-100-untied": ("M2M100", _M2M | {"tie_word_embeddings": False, "activation_function": "gelu"}),
    "nllb-moe": ("NllbMoe", _nllb(2, 4, 2)),
    "nllb-moe-fourth": ("NllbMoe", _nllb(4, 4, 4) | {"moe_token_dropout": 0.0, "batch_prioritized_routing": True}),
    "nllb-moe-every-untied": ("NllbMoe", _nllb(1, 2, 1) | {"tie_word_embeddings": False}),
    "t5": ("T5", _T5),
    "t5-1.1-untied": ("T5", _T5_1_1),
    "t5-1.1-unscaled": ("T5", _T5_1_1),  # one table, and logits as of two
    "switch": ("SwitchTransformers", _SWITCH | _sparse(4, 2, 2, 1)),
    "switch-every": ("SwitchTransformers", _SWITCH | _sparse(1, 1, 2, 2)),
    "switch-third-untied": ("SwitchTransformers", _SWITCH | _sparse(3, 1, 6, 2) | {"tie_word_embeddings": False}),
}

#: One of each family, with the layout of its test in the fast suite.
FIRST = {
    "llama-tied-scaled": "megatron-1d",
    "mistral": "replicated",
    "ministral": "replicated",
    "qwen2": "weight-stationary-2d",
    "qwen3": "replicated",
    "gemma": "replicated",
    "gemma2": "weight-stationary-2d",
    "gemma3": "replicated",
    "olmo2": "megatron-1d",
    "olmo3": "replicated",
    "smollm3": "replicated",
    "llama4": "weight-stationary-2d",
    "llama4-listed": "replicated",
    "olmoe": "replicated",
    "cohere2": "replicated",
    "gpt2": "megatron-1d",
    "deepseek-v2": "replicated",
    "deepseek-v3": "weight-stationary-2d",
    "gpt-oss": "weight-stationary-2d",
    "glm": "replicated",
    "glm4": "replicated",
    "mixtral": "replicated",
    "qwen2-moe": "replicated",
    "qwen3-moe": "replicated",
    "qwen3-moe-steps": "weight-stationary-2d",
    "phi3-long": "weight-stationary-2d",
    "granite": "replicated",
    "granite-moe": "replicated",
    "starcoder2": "replicated",
    "stablelm": "replicated",
    "gpt-neox": "weight-stationary-2d",
    "falcon": "megatron-1d",
    "falcon-two-norms": "replicated",
    "falcon-alibi": "replicated",
    "bloom": "megatron-1d",
    "mpt": "weight-stationary-2d",
    "glm4-moe": "replicated",
    "dots1": "replicated",
    "gptj": "replicated",
    "phi": "replicated",
    "cohere": "replicated",
}

#: Presets on eight devices, and what they pad.
LAYOUTS = {
    "weight-stationary-2d": {"V": 8},
    "weight-gathered-xy": {"V": 8},
    "megatron-1d": {"V": 4, "K": 4},
}

#: The layouts in which text is also decoded, with a cache.
DECODED = ("replicated", "weight-stationary-2d", "megatron-1d")


def architecture(kind: str) -> str:
    """Return the name of transformers' class of a language model."""
    return f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
