"""GLM 4, which rotates half of each head in neighbouring pairs; the second release also has norms after each part."""

from __future__ import annotations

from .family import Family, Option, Stored, fused
from .serial import FIXED, LAYER, OPTIONS, TENSORS, kv_heads, without

GLM = Family(
    title="GLM",
    architecture="GlmForCausalLM",
    model_type="glm",
    options=OPTIONS
    | {
        "kv_heads": kv_heads(2),
        "head_size": Option("head_dim", 128),
        "norm_epsilon": Option("rms_norm_eps", 1.5625e-07),
        "qkv_bias": Option("attention_bias", True),
    },
    fixed=without(FIXED, "qkv_bias") | {"rotary_pairs": "neighbours"},
    tensors=without(TENSORS, "ffn.w_in", "ffn.w_gate")
    | fused(f"{LAYER}.mlp.gate_up_proj.weight", "(F|F)E", "ffn.w_gate", "ffn.w_in"),
    partial_rotary=0.5,
)
"""The models that transformers calls GLM, such as glm-4-9b-hf."""

GLM_4 = Family(
    title="GLM 4",
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    options=GLM.options,
    fixed={**GLM.fixed, "norms": "both"},
    tensors={
        **GLM.tensors,
        "attention.norm_after": Stored(f"{LAYER}.post_self_attn_layernorm.weight", "E"),
        "ffn.norm_after": Stored(f"{LAYER}.post_mlp_layernorm.weight", "E"),
    },
    partial_rotary=0.5,
)
"""The second release, GLM-4-0414, which transformers calls GLM 4."""
