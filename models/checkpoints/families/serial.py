"""Families of serial blocks with RMS norms and a gated feed-forward layer, which are Llama and its successors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .family import Family, Multiplier, Option, Stored, fused
from .window import Window

LAYER = "model.layers.{N}"

#: As many key/value heads as query heads: the meaning of an absent or null entry in most families, and of a null entry
#: in families with another default.
_HEADS = lambda fields: fields["heads"]  # noqa: E731
_HEAD_SIZE = lambda fields: fields["embed"] // fields["heads"]  # noqa: E731


def kv_heads(default: int) -> Option:
    """Return the option that reads the number of key/value heads, with the given default."""
    return Option("num_key_value_heads", default, null=_HEADS)


SIZES = {
    "vocabulary": Option("vocab_size"),
    "embed": Option("hidden_size"),
    "layers": Option("num_hidden_layers"),
    "heads": Option("num_attention_heads"),
    "kv_heads": Option("num_key_value_heads", _HEADS, null=_HEADS),
    "head_size": Option("head_dim", _HEAD_SIZE, null=_HEAD_SIZE),
    "feed_forward": Option("intermediate_size"),
}

#: Names, in transformers, of activations with a gate.
SILU = {"silu": "swiglu", "swish": "swiglu"}

OPTIONS = SIZES | {
    "activation": Option("hidden_act", "silu", SILU),
    "tied": Option("tie_word_embeddings", False),
    "norm_epsilon": Option("rms_norm_eps", 1e-6),
}

#: Fields with the same value in all families, except where a family below says otherwise.
FIXED = {
    "block": "serial",
    "parallel_norms": 1,
    "norm": "rms",
    "norm_bias": False,
    "latent": None,
    "qk_norm": "none",
    "attention_chunk": None,
    "query_growth": 0.0,
    "growth_interval": 8192,
    "norms": "before",
    "sinks": False,
    "score_softcap": None,
    "logit_softcap": None,
    "local_rope_base": None,
    "qkv_bias": False,
    "out_bias": False,
    "ffn_bias": False,
    "output_bias": False,
    "rotary_pairs": "halves",
    "positions": "rotary",
    "relative_buckets": 32,
    "relative_distance": 128,
    "alibi_max": 8.0,
    "alibi_scaled": False,
    "position_offset": 0,
    "embedding_norm": False,
    "qkv_clip": None,
    "attention_scale": None,
    "encoder_layers": 0,
    "start_token": 0,
    "moe": None,
}

#: Fields of experts with the same value in all families, except where a family below says otherwise.
ROUTED = {
    "moe.shared": 0,
    "moe.shared_width": 0,
    "moe.shared_mix": False,
    "moe.dense_layers": (),
    "moe.dense_feed_forward": 0,
    "moe.scores": "softmax",
    "moe.expert_groups": 1,
    "moe.choice_bias": False,
    "moe.gate_factor": 1.0,
    "moe.gate_inputs": False,
    "moe.router_bias": False,
}

ATTENTION = {
    "attention.norm": Stored(f"{LAYER}.input_layernorm.weight", "E"),
    "attention.w_q": Stored(f"{LAYER}.self_attn.q_proj.weight", "(HD)E"),
    "attention.w_k": Stored(f"{LAYER}.self_attn.k_proj.weight", "(KD)E"),
    "attention.w_v": Stored(f"{LAYER}.self_attn.v_proj.weight", "(KD)E"),
    "attention.w_o": Stored(f"{LAYER}.self_attn.o_proj.weight", "E(HD)"),
    "attention.b_q": Stored(f"{LAYER}.self_attn.q_proj.bias", "(HD)"),
    "attention.b_k": Stored(f"{LAYER}.self_attn.k_proj.bias", "(KD)"),
    "attention.b_v": Stored(f"{LAYER}.self_attn.v_proj.bias", "(KD)"),
    "attention.b_o": Stored(f"{LAYER}.self_attn.o_proj.bias", "E"),
    "attention.q_norm": Stored(f"{LAYER}.self_attn.q_norm.weight", "D"),
    "attention.k_norm": Stored(f"{LAYER}.self_attn.k_norm.weight", "D"),
}

FEED_FORWARD = {
    "ffn.norm": Stored(f"{LAYER}.post_attention_layernorm.weight", "E"),
    "ffn.w_in": Stored(f"{LAYER}.mlp.up_proj.weight", "FE"),
    "ffn.w_gate": Stored(f"{LAYER}.mlp.gate_proj.weight", "FE"),
    "ffn.w_out": Stored(f"{LAYER}.mlp.down_proj.weight", "EF"),
    "ffn.b_in": Stored(f"{LAYER}.mlp.up_proj.bias", "F"),
    "ffn.b_gate": Stored(f"{LAYER}.mlp.gate_proj.bias", "F"),
    "ffn.b_out": Stored(f"{LAYER}.mlp.down_proj.bias", "E"),
}

ENDS = {
    "embedding.table": Stored("model.embed_tokens.weight", "VE"),
    "output.norm": Stored("model.norm.weight", "E"),
    "output.table": Stored("lm_head.weight", "VE"),
}

TENSORS = ENDS | ATTENTION | FEED_FORWARD


def without(table: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a table without the rows with these names."""
    return {name: row for name, row in table.items() if name not in names}


LLAMA = Family(
    title="Llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    options=OPTIONS
    | {
        "qkv_bias": Option("attention_bias", False),
        "out_bias": Option("attention_bias", False),
        "ffn_bias": Option("mlp_bias", False),
    },
    fixed=without(FIXED, "qkv_bias", "out_bias", "ffn_bias"),
    tensors=TENSORS,
)

MISTRAL = Family(
    title="Mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    options=OPTIONS | {"kv_heads": kv_heads(8)},
    fixed=FIXED,
    tensors=TENSORS,
    window=Window(4096),
)

MINISTRAL = replace(
    MISTRAL,
    title="Ministral",
    architecture="MinistralForCausalLM",
    model_type="ministral",
    window=Window(4096, layered=True, sliding=True),
)

#: The tensors for images in files of models of texts and images.
OF_IMAGES = r"(model\.)?(vision_tower|multi_modal_projector)\..*"

#: The prefixes of the text model's tensors in such files, as older and newer releases of transformers write them.
OF_TEXT = (
    (r"(?:language_model\.model|model\.language_model)\.(.*)", r"model.\1"),
    (r"language_model\.lm_head\.(.*)", r"lm_head.\1"),
)

LLAVA = replace(
    LLAMA,
    title="LLaVA",
    architecture="LlavaForConditionalGeneration",
    model_type="llava",
    ignored=(*LLAMA.ignored, OF_IMAGES),
    renamed=OF_TEXT,
    # Published files leave out entries that have the value of Llama 7B.
    text_part={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    text_type="llama",
)
"""The text model of LLaVA 1.5. Source: Liu et al. 2023, *Improved Baselines with Visual Instruction Tuning* (arXiv
2310.03744)."""

MISTRAL_3 = replace(
    MISTRAL,
    title="Mistral 3",
    architecture="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    ignored=(*MISTRAL.ignored, OF_IMAGES),
    renamed=OF_TEXT,
    text_part={},
    text_type="mistral",
)
"""The text model of Mistral Small 3.1 and 3.2, whose files also hold a part for images."""

QWEN2 = Family(
    title="Qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    options=OPTIONS | {"kv_heads": kv_heads(32)},
    fixed=FIXED | {"qkv_bias": True},
    tensors=TENSORS,
    window=Window(4096, switched=True, layered=True),
)

QWEN3 = Family(
    title="Qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    options=OPTIONS
    | {
        "kv_heads": kv_heads(32),
        "head_size": Option("head_dim", 128),
        "qkv_bias": Option("attention_bias", False),
        "out_bias": Option("attention_bias", False),
    },
    fixed=without(FIXED, "qkv_bias", "out_bias") | {"qk_norm": "head"},
    tensors=TENSORS,
    window=Window(4096, switched=True, layered=True),
)

PHI3 = Family(
    title="Phi-3",
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    options=OPTIONS | {"norm_epsilon": Option("rms_norm_eps", 1e-5)},
    fixed=FIXED,
    tensors=TENSORS
    | fused(f"{LAYER}.self_attn.qkv_proj.weight", "(HD|KD|KD)E", "attention.w_q", "attention.w_k", "attention.w_v")
    | fused(f"{LAYER}.mlp.gate_up_proj.weight", "(F|F)E", "ffn.w_gate", "ffn.w_in"),
    ignored_entries=("full_attn_mod", "interpolate_factor"),
    rope_types={"longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    original_length=4096,
    partial_rotary=1.0,
    window=Window(None),
)

_LAST = ("output.norm", "output.norm_bias")
_OF_BRANCHES = (
    *("attention.w_o", "attention.b_o", "ffn.w_out", "ffn.b_out"),
    *("moe.w_out", "moe.b_out"),
)

GRANITE = Family(
    title="Granite",
    architecture="GraniteForCausalLM",
    model_type="granite",
    options={**LLAMA.options, "attention_scale": Option("attention_multiplier", 1.0)},
    fixed=without(LLAMA.fixed, "attention_scale"),
    tensors=TENSORS,
    multipliers={
        "embedding_multiplier": Multiplier(multiplied=("embedding.table",), divided_if_tied=_LAST),
        "residual_multiplier": Multiplier(multiplied=_OF_BRANCHES),
        "logits_scaling": Multiplier(divided=_LAST),
    },
)
