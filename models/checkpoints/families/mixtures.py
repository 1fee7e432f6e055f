"""Families with a mixture of experts in every layer, each token sent to its k most probable experts."""

from __future__ import annotations

from .family import Family, Option, Stored, fused
from .serial import ATTENTION, ENDS, FIXED, GRANITE, LAYER, OPTIONS, QWEN3, ROUTED, kv_heads, without
from .window import Window

EXPERTS = without(FIXED, "moe") | ROUTED | {"moe.router": "top-k", "moe.every": 1, "moe.offset": 0}

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
    fixed=without(EXPERTS, "qkv_bias", "moe.shared_width") | {"moe.shared": 1, "moe.shared_mix": True},
    tensors=ENDS
    | ATTENTION
    | _OF_QWEN
    | {
        "moe.shared.w_in": Stored(f"{LAYER}.mlp.shared_expert.up_proj.weight", "FE"),
        "moe.shared.w_gate": Stored(f"{LAYER}.mlp.shared_expert.gate_proj.weight", "FE"),
        "moe.shared.w_out": Stored(f"{LAYER}.mlp.shared_expert.down_proj.weight", "EF"),
        "moe.shared_mix": Stored(f"{LAYER}.mlp.shared_expert_gate.weight", "1E"),
    },
    inactive={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    ignored_entries=("intermediate_size",),  # only layers without experts use it
    window=Window(4096, switched=True),
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
    fixed=without(EXPERTS, "qkv_bias", "out_bias") | {"qk_norm": "head"},
    tensors=ENDS | ATTENTION | _OF_QWEN,
    inactive={
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
        "qkv_bias": (False,),
        "use_qk_norm": (True,),
        "shared_expert_intermediate_size": (0, None),
    },
    ignored_entries=("intermediate_size",),  # only layers without experts use it
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
