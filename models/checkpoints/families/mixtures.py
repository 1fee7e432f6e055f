"""Families with mixtures of experts, in which each token is sent to its k best experts."""

from __future__ import annotations

from typing import Any

from .dense_layers import DenseLayers
from .family import Family, Option, Stored, fused
from .serial import ATTENTION, ENDS, FIXED, GRANITE, LAYER, OPTIONS, QWEN3, ROUTED, TENSORS, kv_heads, without
from .window import Window

EXPERTS = without(FIXED, "moe") | ROUTED | {"moe.router": "top-k", "moe.every": 1, "moe.offset": 0}

#: The two names of the entry of `Family.modules`.
MODULES = ("num_nextn_predict_layers", "num_mtp_layers")

#: The fixed fields of families in which some layers may be dense.
MIXED = without(EXPERTS, *DenseLayers(None).fields)

MIXTRAL = Family(
    title="Mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    options=OPTIONS
    | {
        "kv_heads": kv_heads(8),
        "norm_epsilon": Option("rms_norm_eps", 1e-5),
        "moe.experts": Option(("num_local_experts", "num_experts"), 8),
        "moe.k": Option("num_experts_per_tok", 2),
    },
    fixed=EXPERTS | {"moe.renormalize": True},
    tensors=ENDS
    | ATTENTION
    | {
        "moe.norm": Stored(f"{LAYER}.post_attention_layernorm.weight", "E"),
        "moe.router": Stored(f"{LAYER}.block_sparse_moe.gate.weight", "XE"),
        "moe.w_in": Stored(f"{LAYER}.block_sparse_moe.experts.{{X}}.w3.weight", "FE"),
        "moe.w_gate": Stored(f"{LAYER}.block_sparse_moe.experts.{{X}}.w1.weight", "FE"),
        "moe.w_out": Stored(f"{LAYER}.block_sparse_moe.experts.{{X}}.w2.weight", "EF"),
    },
    rope_base=1e6,
    window=Window(None),
)

_OF_QWEN = {
    "moe.norm": Stored(f"{LAYER}.post_attention_layernorm.weight", "E"),
    "moe.router": Stored(f"{LAYER}.mlp.gate.weight", "XE"),
    "moe.w_in": Stored(f"{LAYER}.mlp.experts.{{X}}.up_proj.weight", "FE"),
    "moe.w_gate": Stored(f"{LAYER}.mlp.experts.{{X}}.gate_proj.weight", "FE"),
    "moe.w_out": Stored(f"{LAYER}.mlp.experts.{{X}}.down_proj.weight", "EF"),
}

QWEN2_MOE = Family(
    title="Qwen2-MoE",
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    options={
        **OPTIONS,
        "kv_heads": kv_heads(16),
        "qkv_bias": Option("qkv_bias", True),
        "feed_forward": Option("moe_intermediate_size", 1408),
        "moe.experts": Option(("num_experts", "num_local_experts"), 60),
        "moe.k": Option("num_experts_per_tok", 4),
        "moe.renormalize": Option("norm_topk_prob", False),
        "moe.shared_width": Option("shared_expert_intermediate_size", 5632),
    },
    fixed=without(MIXED, "qkv_bias", "moe.shared_width") | {"moe.shared": 1, "moe.shared_mix": True},
    tensors=TENSORS
    | _OF_QWEN
    | {
        "moe.shared.w_in": Stored(f"{LAYER}.mlp.shared_expert.up_proj.weight", "FE"),
        "moe.shared.w_gate": Stored(f"{LAYER}.mlp.shared_expert.gate_proj.weight", "FE"),
        "moe.shared.w_out": Stored(f"{LAYER}.mlp.shared_expert.down_proj.weight", "EF"),
        "moe.shared_mix": Stored(f"{LAYER}.mlp.shared_expert_gate.weight", "1E"),
    },
    agreement=DenseLayers(5632).agreement,
    window=Window(4096, switched=True, layered=True, pattern=2, bounded=True),
)

QWEN3_MOE = Family(
    title="Qwen3-MoE",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    options={
        **QWEN3.options,
        "kv_heads": kv_heads(4),
        "head_size": OPTIONS["head_size"],
        "feed_forward": Option("moe_intermediate_size"),
        "moe.experts": Option(("num_experts", "num_local_experts"), 128),
        "moe.k": Option("num_experts_per_tok", 8),
        "moe.renormalize": Option("norm_topk_prob", False),
    },
    fixed=without(MIXED, "qkv_bias", "out_bias") | {"qk_norm": "head"},
    tensors=TENSORS | _OF_QWEN,
    inactive={"qkv_bias": (False,), "use_qk_norm": (True,), "shared_expert_intermediate_size": (0, None)},
    agreement=DenseLayers(6144).agreement,
    window=Window(4096, switched=True),
)

GRANITE_MOE = Family(
    title="GraniteMoE",
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    options={
        **without(GRANITE.options, "ffn_bias"),
        "moe.experts": Option("num_local_experts", 8),
        "moe.k": Option("num_experts_per_tok", 2),
    },
    fixed=without(EXPERTS, "qkv_bias", "out_bias", "attention_scale") | {"moe.renormalize": True},
    tensors=ENDS
    | ATTENTION
    | {
        "moe.norm": Stored(f"{LAYER}.post_attention_layernorm.weight", "E"),
        "moe.router": Stored(f"{LAYER}.block_sparse_moe.router.layer.weight", "XE"),
        "moe.w_out": Stored(f"{LAYER}.block_sparse_moe.output_linear.weight", "XEF"),
    }
    | fused(f"{LAYER}.block_sparse_moe.input_linear.weight", "X(F|F)E", "moe.w_gate", "moe.w_in"),
    multipliers=GRANITE.multipliers,
)

#: Experts as in DeepSeek V3: sigmoid scores, groups, a bias for choosing, shared experts, and dense first layers.
_DEEPSEEK = {
    "feed_forward": Option("moe_intermediate_size", 1408),
    "moe.experts": Option(("n_routed_experts", "num_local_experts"), 128),
    "moe.expert_groups": Option("n_group", 1),
    "moe.kept_groups": Option("topk_group", 1),
    "moe.gate_factor": Option("routed_scaling_factor", 1.0),
    "qkv_bias": Option("attention_bias", False),
}
_OF_DEEPSEEK: dict[str, Any] = {
    "derived": {"moe.shared_width": lambda fields: fields["moe.shared"] * fields["feed_forward"]},
    "tensors": TENSORS
    | _OF_QWEN
    | {
        "moe.choice_bias": Stored(f"{LAYER}.mlp.gate.e_score_correction_bias", "X"),
        "moe.shared.w_in": Stored(f"{LAYER}.mlp.shared_experts.up_proj.weight", "FE"),
        "moe.shared.w_gate": Stored(f"{LAYER}.mlp.shared_experts.gate_proj.weight", "FE"),
        "moe.shared.w_out": Stored(f"{LAYER}.mlp.shared_experts.down_proj.weight", "EF"),
    },
}
_SCORED = without(MIXED, *_DEEPSEEK, "moe.shared", "moe.shared_width") | {
    "moe.scores": "sigmoid",
    "moe.choice_bias": True,
    "moe.group_best": 2,
}

GLM4_MOE = Family(
    title="GLM-4.5",
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    options={
        **OPTIONS,
        **_DEEPSEEK,
        "kv_heads": kv_heads(8),
        "norm_epsilon": Option("rms_norm_eps", 1e-5),
        "qk_norm": Option("use_qk_norm", False, {True: "head", False: "none"}),
        "moe.k": Option("num_experts_per_tok", 8),
        "moe.renormalize": Option("norm_topk_prob", True),
        "moe.shared": Option("n_shared_experts", 1),
    },
    fixed=without(_SCORED, "qk_norm"),
    agreement=DenseLayers(10944, first=1).agreement,
    modules=MODULES,
    partial_rotary=0.5,
    **_OF_DEEPSEEK,
)

DOTS = Family(
    title="dots.llm1",
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    options={
        **OPTIONS,
        **_DEEPSEEK,
        "kv_heads": kv_heads(32),
        "out_bias": Option("attention_bias", False),
        "moe.k": Option("num_experts_per_tok"),
        "moe.renormalize": Option("norm_topk_prob", False),
        "moe.shared": Option("n_shared_experts"),
    },
    fixed=without(_SCORED, "out_bias") | {"qk_norm": "head"},
    agreement=DenseLayers(10944, first=0).agreement,
    inactive={"moe_layer_freq": (1,)},
    ignored_entries=("scoring_func", "topk_method"),
    window=Window(4096, layered=True),
    **_OF_DEEPSEEK,
)
