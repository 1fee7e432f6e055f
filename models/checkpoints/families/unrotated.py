"""Families in which some layers have no rotary embedding: Cohere 2 and SmolLM 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .entries import in_json, is_whole
from .family import Agreement, Family, Option
from .parallel import COHERE
from .serial import FIXED, LLAMA, kv_heads, without
from .window import Window, repeating

if TYPE_CHECKING:
    from ...config import ModelConfig

COHERE_2 = Family(
    title="Cohere 2",
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    options=COHERE.options,
    fixed=COHERE.fixed,
    tensors=COHERE.tensors,
    inactive={
        **COHERE.inactive,
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "rotary_pct": (1.0,),
        "position_embedding_type": ("rope_gptj",),
        "order_of_interleaved_layers": ("local_attn_first",),
    },
    ignored_entries=("layer_switch", "use_embedding_sharing", "use_parallel_embedding"),
    rope_base=10000.0,
    window=Window(4096, layered=True, pattern=4, patterned=True, unrotated=True),
    logit_scale=0.0625,
)
"""Cohere with sliding windows in three of four layers; every fourth layer, without a window, is not rotated."""


def read_rotated(json: Mapping[str, Any], layers: int, faults: list[str]) -> list[int] | None:
    """Return 1 for each rotated layer and 0 for each unrotated layer, as in the entry `no_rope_layers`.

    By default every fourth layer is unrotated.

    Args:
        json: the entries of config.json.
        layers: the model's number of layers.
        faults: a list to which a fault is appended. If there is a fault, the result is None.
    """
    listed = json.get("no_rope_layers")
    if listed is None:
        interval = json.get("no_rope_layer_interval", 4)
        if not is_whole(interval) or interval < 1:
            faults.append(f"no_rope_layer_interval is {in_json(interval)}; it must be a whole number of layers.")
            return None
        return [int((number + 1) % interval != 0) for number in range(layers)]
    if not isinstance(listed, list) or not all(each in (0, 1) and is_whole(each) for each in listed):
        faults.append(f"no_rope_layers is {in_json(listed)}; it must be a list of 0 and 1, one for each layer.")
        return None
    if len(listed) != layers:
        faults.append(f"no_rope_layers names {len(listed)} layers, but num_hidden_layers is {layers}.")
        return None
    return listed


def _read_kinds(json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    listed = read_rotated(json, fields["layers"], faults)
    if listed is None:
        return {}
    return {"layer_kinds": repeating(["full" if rotated else "unrotated" for rotated in listed])}


def written_rotated(config: ModelConfig) -> dict[str, Any]:
    """Return the entry that states which layers are rotated."""
    return {"no_rope_layers": [int(config.layer_kind(number) != "unrotated") for number in range(config.layers)]}


SMOLLM_3 = Family(
    title="SmolLM 3",
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    options={**LLAMA.options, "kv_heads": kv_heads(4), "tied": Option("tie_word_embeddings", True)},
    fixed=without(FIXED, "qkv_bias", "out_bias", "ffn_bias"),
    tensors=LLAMA.tensors,
    agreement=Agreement(
        ("no_rope_layers", "no_rope_layer_interval"), _read_kinds, written_rotated, fields=("layer_kinds",)
    ),
    inactive={"use_sliding_window": (False,)},
    rope_base=2e6,
)
"""Llama without rotary embedding in every fourth layer.

Source: Yang et al. 2025, *Rope to Nope and Back Again* (arXiv 2501.18795), for layers without rotary embedding.
"""
