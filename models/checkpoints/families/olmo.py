"""OLMo 2, OLMo 3 and OLMoE, which normalize queries and keys over all heads together.

OLMo 2 and 3 have their norms after attention and feed-forward.
"""

from __future__ import annotations

from .family import Family, Option, Stored
from .mixtures import EXPERTS, QWEN3_MOE
from .serial import ATTENTION, ENDS, FIXED, LAYER, OPTIONS, TENSORS, without
from .window import Window

#: A norm over all heads together, whose scale has a number for each element of each head.
_OVER_HEADS = {
    "attention.q_norm": Stored(f"{LAYER}.self_attn.q_norm.weight", "(HD)"),
    "attention.k_norm": Stored(f"{LAYER}.self_attn.k_norm.weight", "(KD)"),
}

_OPTIONS = OPTIONS | {
    "norm_epsilon": Option("rms_norm_eps", 1e-5),
    "qkv_bias": Option("attention_bias", False),
    "out_bias": Option("attention_bias", False),
}

OLMO_2 = Family(
    title="OLMo 2",
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    options=_OPTIONS,
    fixed=without(FIXED, "qkv_bias", "out_bias") | {"norms": "after", "qk_norm": "all"},
    tensors=without(TENSORS, "attention.norm", "ffn.norm")
    | _OVER_HEADS
    | {
        "attention.norm_after": Stored(f"{LAYER}.post_attention_layernorm.weight", "E"),
        "ffn.norm_after": Stored(f"{LAYER}.post_feedforward_layernorm.weight", "E"),
    },
)
"""Source: OLMo Team 2024, *2 OLMo 2 Furious* (arXiv 2501.00656), section 2.1."""

OLMO_3 = Family(
    title="OLMo 3",
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    options=_OPTIONS,
    fixed=without(OLMO_2.fixed, "local_rope_base"),
    tensors=OLMO_2.tensors,
    rope_base=500000.0,
    local_rope_base=500000.0,
    window=Window(4096, layered=True, pattern=4),
)
"""OLMo 2 with sliding windows in three of four layers. Only the layers without a window stretch wavelengths."""

OLMOE = Family(
    title="OLMoE",
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    options=_OPTIONS
    | {
        "moe.experts": Option(("num_experts", "num_local_experts"), 64),
        "moe.k": Option("num_experts_per_tok", 8),
        "moe.renormalize": Option("norm_topk_prob", False),
    },
    fixed=without(EXPERTS, "qkv_bias", "out_bias") | {"qk_norm": "all"},
    tensors=ENDS
    | ATTENTION
    | _OVER_HEADS
    | {path: row for path, row in QWEN3_MOE.tensors.items() if path.startswith("moe.")},
    inactive={"clip_qkv": (None,)},
)
"""Source: Muennighoff et al. 2024, *OLMoE: Open Mixture-of-Experts Language Models* (arXiv 2409.02060), section 2."""
