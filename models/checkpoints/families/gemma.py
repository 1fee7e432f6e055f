"""Gemma and its successors, with norms that scale by 1 + w, gates by gelu, and sliding windows since Gemma 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .entries import in_json, is_whole
from .family import Agreement, Family, Option, Stored
from .serial import FIXED, LAYER, OF_IMAGES, OF_TEXT, OPTIONS, TENSORS, kv_heads, without
from .window import Window

if TYPE_CHECKING:
    from ...config import ModelConfig

#: The first Gemma files say gelu, but mean the tanh approximation.
GEMMA_GELU = {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}

#: Gemma's norms scale by 1 + w, so that weight decay draws them to 1.
_NORMS = (
    "attention.norm", "attention.norm_after", "attention.q_norm", "attention.k_norm", "ffn.norm", "ffn.norm_after",
    "output.norm",
)  # fmt: skip


def _around_one(table: dict[str, Stored]) -> dict[str, Stored]:
    """Return a copy of a table in which norms scale by 1 + w."""
    return {path: Stored(row.name, row.dims, offset=1.0) if path in _NORMS else row for path, row in table.items()}


GEMMA = Family(
    title="Gemma",
    architecture="GemmaForCausalLM",
    model_type="gemma",
    options=OPTIONS
    | {
        "kv_heads": kv_heads(16),
        "head_size": Option("head_dim", 256),
        "activation": Option("hidden_act", "gelu_pytorch_tanh", GEMMA_GELU),
        "tied": Option("tie_word_embeddings", True),
        "qkv_bias": Option("attention_bias", False),
        "out_bias": Option("attention_bias", False),
    },
    fixed=without(FIXED, "qkv_bias", "out_bias"),
    tensors=_around_one(TENSORS),
    inactive={"hidden_activation": (None, *GEMMA_GELU)},  # some releases of transformers read it
    scale_embedding=True,
)

#: The norms before and after attention, and before and after the feed-forward layer.
SANDWICH = TENSORS | {
    "attention.norm_after": Stored(f"{LAYER}.post_attention_layernorm.weight", "E"),
    "ffn.norm": Stored(f"{LAYER}.pre_feedforward_layernorm.weight", "E"),
    "ffn.norm_after": Stored(f"{LAYER}.post_feedforward_layernorm.weight", "E"),
}


def _read_scale(json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Read the factor of attention scores, which is 1/√query_pre_attn_scalar."""
    scalar = json.get("query_pre_attn_scalar", 256)
    if not is_whole(scalar) or scalar < 1:
        faults.append(f"query_pre_attn_scalar is {in_json(scalar)}; it must be a whole number.")
        return {}
    return {"attention_scale": None if scalar == fields["head_size"] else scalar**-0.5}


def _written_scale(config: ModelConfig) -> dict[str, Any]:
    return {"query_pre_attn_scalar": round(_scalar(config))}


def _scalar(config: ModelConfig) -> float:
    return config.head_size if config.attention_scale is None else config.attention_scale**-2


def _no_whole_scale(config: ModelConfig) -> list[str]:
    """Return the reason why a model cannot be written if its query_pre_attn_scalar is not a whole number."""
    scalar = _scalar(config)
    if abs(scalar - round(scalar)) < 1e-9 * scalar:
        return []
    return [f"attention_scale is {config.attention_scale}, which is not 1/√n of a whole n"]


GEMMA_2 = Family(
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    options=without(GEMMA.options, "activation")
    | {
        "kv_heads": kv_heads(4),
        "activation": Option("hidden_activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu"}),
        "score_softcap": Option("attn_logit_softcapping", 50.0, null=None),
        "logit_softcap": Option("final_logit_softcapping", 30.0, null=None),
    },
    fixed=without(GEMMA.fixed, "norms", "score_softcap", "logit_softcap", "attention_scale") | {"norms": "both"},
    tensors=_around_one(SANDWICH),
    ignored_entries=("hidden_act",),
    agreement=Agreement(
        ("query_pre_attn_scalar",), _read_scale, _written_scale, ("attention_scale",), reasons=_no_whole_scale
    ),
    window=Window(4096, layered=True, pattern=2),
    scale_embedding=True,
)
"""Source: Gemma Team 2024, *Gemma 2: Improving Open Language Models at a Practical Size* (arXiv 2408.00118), §2."""

GEMMA_3 = Family(
    title="Gemma 3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    options={
        **without(GEMMA_2.options, "score_softcap"),
        "logit_softcap": Option("final_logit_softcapping", None, null=None),
    },
    fixed=without(GEMMA_2.fixed, "qk_norm", "local_rope_base") | {"qk_norm": "head", "score_softcap": None},
    inactive={"attn_logit_softcapping": (None,)},  # transformers reads these entries, but does not apply them
    tensors=_around_one(SANDWICH),
    ignored_entries=("hidden_act",),
    agreement=GEMMA_2.agreement,
    rope_base=1e6,
    local_rope_base=1e4,
    window=Window(4096, layered=True, pattern=6, patterned=True),
    scale_embedding=True,
)
"""The text models of Gemma 3.

Source: Gemma Team 2025, *Gemma 3 Technical Report* (arXiv 2503.19786), §2.
"""

GEMMA_3_IMAGES = replace(
    GEMMA_3,
    title="Gemma 3 with images",
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    ignored=(*GEMMA_3.ignored, OF_IMAGES),
    renamed=OF_TEXT,
    text_type="gemma3_text",
    # Published files leave out entries that have transformers' default, the value of the model of 2 billion parameters.
    text_part={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
)
"""The text models of Gemma 3 with 4 billion parameters or more, whose files also hold a part for images."""
