"""The sizes in config.json of published models, and the numbers of parameters that their pages state."""


def _of(architecture: str, embed: int, hidden: int, layers: int, heads: int, shared: int, vocabulary: int, **more):
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": embed,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": vocabulary,
        **more,
    }


_SCALED = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}

_T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": 512,
    "d_kv": 64,
    "vocab_size": 32128,
    "relative_attention_num_buckets": 32,
    "decoder_start_token_id": 0,
    "n_positions": 512,
}

_MULTIPLIED = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.015625,
}
_NEOX = {
    "architectures": ["GPTNeoXForCausalLM"],
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 50304,
}
_FALCON = {"architectures": ["FalconForCausalLM"], "num_hidden_layers": 32, "vocab_size": 65024}

#: Name to the entries of config.json, and the number of parameters.
PUBLISHED = {
    "Llama-2-7b": (_of("Llama", 4096, 11008, 32, 32, 32, 32000, rms_norm_eps=1e-5), 6_738_415_616),
    "Llama-3.1-8B": (_of("Llama", 4096, 14336, 32, 32, 8, 128256, **_SCALED), 8_030_261_248),
    "Llama-3.2-1B": (
        _of("Llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True, **_SCALED),
        1_235_814_400,
    ),
    "Mistral-7B": (_of("Mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=None), 7_241_732_096),
    "Mixtral-8x7B": (
        _of("Mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Qwen2.5-0.5B": (
        _of("Qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True, sliding_window=32768),
        494_032_768,
    ),
    "Qwen2.5-7B": (_of("Qwen2", 3584, 18944, 28, 28, 4, 152064, rope_theta=1000000.0), 7_615_616_512),
    "Qwen3-0.6B": (_of("Qwen3", 1024, 3072, 28, 16, 8, 151936, tie_word_embeddings=True), 596_049_920),
    "Qwen1.5-MoE-A2.7B": (
        _of(
            "Qwen2Moe",
            2048,
            5632,
            24,
            16,
            16,
            151936,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
        ),
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        _of(
            "Qwen3Moe",
            2048,
            6144,
            48,
            32,
            4,
            151936,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
        30_532_122_624,
    ),
    "Phi-3-mini": (_of("Phi3", 3072, 8192, 32, 32, 32, 32064), 3_821_079_552),
    "Phi-4-mini": (
        _of("Phi3", 3072, 8192, 32, 24, 8, 200064, tie_word_embeddings=True, partial_rotary_factor=0.75),
        3_836_021_760,
    ),
    "Granite-3.1-2B": (
        _of("Granite", 2048, 8192, 40, 32, 8, 49155, tie_word_embeddings=True, **_MULTIPLIED),
        2_533_531_648,
    ),
    "Granite-3.0-1B-A400M": (
        _of("GraniteMoe", 1024, 512, 24, 16, 8, 49155, tie_word_embeddings=True, num_local_experts=32)
        | {"num_experts_per_tok": 8, **_MULTIPLIED},
        1_334_628_352,
    ),
    "StarCoder2-3B": (_of("Starcoder2", 3072, 12288, 30, 24, 2, 49152), 3_030_371_328),
    "StableLM-2-1.6B": (_of("StableLm", 2048, 5632, 24, 32, 32, 100352, use_qkv_bias=True), 1_644_515_328),
    "Pythia-1.4B": (_NEOX | {"hidden_size": 2048, "intermediate_size": 8192}, 1_414_647_808),
    "Falcon-7B": (_FALCON | {"hidden_size": 4544, "num_attention_heads": 71}, 6_921_720_704),
    "Falcon-40B": (
        _FALCON
        | {"hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60}
        | {"num_kv_heads": 8, "new_decoder_architecture": True},
        41_303_293_952,
    ),
    "GLM-4.5-Air": (
        _of(
            "Glm4Moe",
            4096,
            10944,
            46,
            96,
            8,
            151552,
            head_dim=128,
            attention_bias=True,
            moe_intermediate_size=1408,
            num_experts_per_tok=8,
            n_routed_experts=128,
            n_shared_experts=1,
            first_k_dense_replace=1,
            rope_theta=1000000,
        ),
        106_852_251_264,
    ),
    "dots.llm1": (
        _of(
            "Dots1",
            4096,
            10944,
            62,
            32,
            32,
            152064,
            moe_intermediate_size=1408,
            num_experts_per_tok=6,
            n_routed_experts=128,
            n_shared_experts=2,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            rope_theta=10000000,
            sliding_window=None,
        ),
        142_774_381_696,
    ),
    "Gemma-2b": (_of("Gemma", 2048, 16384, 18, 8, 1, 256000, hidden_act="gelu"), 2_506_172_416),
    "Command-R": (_of("Cohere", 8192, 22528, 40, 64, 64, 256000, rope_theta=8000000.0), 34_980_831_232),
    "Phi-2": (_of("Phi", 2560, 10240, 32, 32, 32, 51200, partial_rotary_factor=0.4), 2_779_683_840),
    "GPT-J-6B": (
        {
            "architectures": ["GPTJForCausalLM"],
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "n_inner": None,
            "rotary_dim": 64,
            "vocab_size": 50400,
        },
        6_050_882_784,
    ),
    "M2M100-418M": (
        {
            "architectures": ["M2M100ForConditionalGeneration"],
            "model_type": "m2m_100",
            "d_model": 1024,
            "encoder_layers": 12,
            "decoder_layers": 12,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096,
            "vocab_size": 128112,
            "num_hidden_layers": 12,
        },
        483_905_536,
    ),
    "T5-small": (_T5 | {"d_ff": 2048, "num_layers": 6, "num_heads": 8}, 60_506_624),
    "FLAN-T5-small": (
        _T5
        | {"d_ff": 1024, "num_layers": 8, "num_heads": 6, "num_decoder_layers": 8, "tie_word_embeddings": False}
        | {"feed_forward_proj": "gated-gelu"},
        76_961_152,
    ),
    "Switch-base-8": (
        _T5
        | {"architectures": ["SwitchTransformersForConditionalGeneration"], "model_type": "switch_transformers"}
        | {"d_model": 768, "d_ff": 3072, "num_heads": 12, "num_experts": 8, "num_layers": 12, "num_decoder_layers": 12}
        | {"num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6, "feed_forward_proj": "relu"},
        619_339_008,
    ),
}
