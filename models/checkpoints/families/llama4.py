"""Llama 4, with attention in chunks, growing queries in unrotated layers, and one chosen and one shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .dense_layers import DenseLayers, pattern
from .entries import in_json, is_number, is_whole
from .family import Agreement, Family, Option, Stored, fused
from .mixtures import EXPERTS
from .serial import ATTENTION, ENDS, LAYER, OPTIONS, kv_heads, without
from .unrotated import read_rotated, written_rotated
from .window import FULL, repeating

if TYPE_CHECKING:
    from ...config import ModelConfig

_CHUNKED = "chunked_attention"
_INTERVAL = 8192
"""Default of the entry `floor_scale`, and of the entry `attention_chunk_size`."""


def _read(json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Read the kinds of layers, the factors by which queries grow, and the layers that have experts."""
    found = _kinds(json, fields, faults) | _experts(json, fields, faults)
    if faults:
        return {}
    kinds = found["layer_kinds"] or ("full",)
    if "unrotated" in kinds:
        found |= _growth(json, faults)
    if {*kinds} == {"unrotated"}:
        found["qk_norm"] = "none"  # only rotated layers have these norms
    return found


def _kinds(json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    layers, chunk = fields["layers"], json.get("attention_chunk_size", _INTERVAL)
    if chunk is not None and not (is_whole(chunk) and chunk >= 1):
        faults.append(f"attention_chunk_size is {in_json(chunk)}; it must be a whole number of tokens, or null.")
        return {}
    # An empty list, as in the first published files, counts as absent in transformers.
    given = {key: value for key, value in json.items() if key != "no_rope_layers" or value not in ([], None)}
    rotated = read_rotated(given, layers, faults)
    if rotated is None:
        return {}
    listed = json.get("layer_types")
    if listed is None:
        listed = [_CHUNKED if each and chunk is not None else FULL for each in rotated]
    if not isinstance(listed, list) or len(listed) != layers or not all(each in (FULL, _CHUNKED) for each in listed):
        faults.append(
            f"layer_types is {in_json(listed)}; it must name {FULL} or {_CHUNKED} for each of {layers} layers."
        )
        return {}
    ours = {(FULL, 1): "full", (FULL, 0): "unrotated", (_CHUNKED, 1): "chunked"}
    pairs = [*zip(listed, map(int, rotated))]
    if (_CHUNKED, 0) in pairs:
        fact = f"layer {pairs.index((_CHUNKED, 0))} is {_CHUNKED} (layer_types), but not rotated (no_rope_layers)"
        faults.append(f"{fact}; only layers with full attention are read without rotary embedding.")
        return {}
    if _CHUNKED in listed and chunk is None:
        faults.append(f"layer_types has {_CHUNKED!r}, but attention_chunk_size is null.")
        return {}
    kinds = repeating([ours[pair] for pair in pairs])
    return {"layer_kinds": kinds, "attention_chunk": chunk if _CHUNKED in listed else None}


def _growth(json: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    tuned, interval, by = (
        json.get(key, default)
        for key, default in (("attn_temperature_tuning", True), ("floor_scale", _INTERVAL), ("attn_scale", 0.1))
    )
    if not isinstance(tuned, bool) and tuned != 4:  # 4 was the default in the first release, and means true
        faults.append(f"attn_temperature_tuning is {in_json(tuned)}; it must be true or false.")
    if not (is_whole(interval) and interval >= 1):
        faults.append(f"floor_scale is {in_json(interval)}; it must be a whole number of tokens.")
    if not (is_number(by) and by >= 0):
        faults.append(f"attn_scale is {in_json(by)}; it must be a number that is not negative.")
    if faults or not tuned or not by:
        return {}
    return {"query_growth": float(by), "growth_interval": interval}


def _experts(json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    layers, listed = fields["layers"], json.get("moe_layers")
    if listed is None:
        step = json.get("interleave_moe_layer_step", 1)
        if not (is_whole(step) and step >= 1):
            faults.append(f"interleave_moe_layer_step is {in_json(step)}; it must be a whole number of layers.")
            return {}
        listed, named = [*range(step - 1, layers, step)], f"interleave_moe_layer_step is {step}"
    elif not isinstance(listed, list) or not all(is_whole(each) for each in listed):
        faults.append(f"moe_layers is {in_json(listed)}; it must be a list of the numbers of layers.")
        return {}
    else:
        named = f"moe_layers is {in_json(listed)}"
    sparse = [number in listed for number in range(layers)]
    if not any(sparse):
        faults.append(f"{named}, so none of the {layers} layers has experts; at least one must.")
        return {}
    width: Any = json.get("intermediate_size_mlp", 16384)
    if not all(sparse) and not (is_whole(width) and width >= 1):
        faults.append(f"intermediate_size_mlp is {in_json(width)}; it must be a whole number.")
    return pattern(sparse) | {"moe.dense_feed_forward": 0 if all(sparse) else width}


def _written(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None
    kinds = [config.layer_kind(number) for number in range(config.layers)]
    return written_rotated(config) | {
        "attention_chunk_size": config.attention_chunk,
        "layer_types": [_CHUNKED if kind == "chunked" else FULL for kind in kinds],
        "attn_temperature_tuning": config.query_growth > 0,
        "attn_scale": config.query_growth or 0.1,
        "floor_scale": config.growth_interval,
        "moe_layers": [number for number in range(config.layers) if config.is_sparse(number)],
        "intermediate_size_mlp": config.moe.dense_feed_forward or config.feed_forward,
    }


LLAMA_4 = Family(
    title="Llama 4",
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    options=OPTIONS
    | {
        "kv_heads": kv_heads(8),
        "head_size": Option("head_dim", 128),
        "norm_epsilon": Option("rms_norm_eps", 1e-5),
        "qkv_bias": Option("attention_bias", False),
        "out_bias": Option("attention_bias", False),
        "qk_norm": Option("use_qk_norm", True, {True: "rotated", False: "none"}),
        "moe.experts": Option("num_local_experts", 16),
        "moe.k": Option("num_experts_per_tok", 1, {1: 1}),
    },
    fixed=without(
        EXPERTS,
        "qkv_bias",
        "out_bias",
        "qk_norm",
        "attention_chunk",
        "query_growth",
        "growth_interval",
        "moe.shared_width",
        *DenseLayers(None).fields,
    )
    | {
        "rotary_pairs": "neighbours",
        "moe.scores": "sigmoid",
        "moe.renormalize": False,
        "moe.gate_inputs": True,
        "moe.shared": 1,
    },
    derived={"moe.shared_width": lambda fields: fields["feed_forward"]},
    tensors=ENDS
    | without(ATTENTION, "attention.q_norm", "attention.k_norm")
    | {
        "ffn.norm": Stored(f"{LAYER}.post_attention_layernorm.weight", "E"),
        "ffn.w_in": Stored(f"{LAYER}.feed_forward.up_proj.weight", "FE"),
        "ffn.w_gate": Stored(f"{LAYER}.feed_forward.gate_proj.weight", "FE"),
        "ffn.w_out": Stored(f"{LAYER}.feed_forward.down_proj.weight", "EF"),
        "moe.norm": Stored(f"{LAYER}.post_attention_layernorm.weight", "E"),
        "moe.router": Stored(f"{LAYER}.feed_forward.router.weight", "XE"),
        **fused(f"{LAYER}.feed_forward.experts.gate_up_proj", "XE(F|F)", "moe.w_gate", "moe.w_in"),
        "moe.w_out": Stored(f"{LAYER}.feed_forward.experts.down_proj", "XFE"),
        "moe.shared.w_in": Stored(f"{LAYER}.feed_forward.shared_expert.up_proj.weight", "FE"),
        "moe.shared.w_gate": Stored(f"{LAYER}.feed_forward.shared_expert.gate_proj.weight", "FE"),
        "moe.shared.w_out": Stored(f"{LAYER}.feed_forward.shared_expert.down_proj.weight", "EF"),
    },
    agreement=Agreement(
        keys=(
            *("no_rope_layers", "no_rope_layer_interval", "attention_chunk_size", "layer_types"),
            *("attn_temperature_tuning", "floor_scale", "attn_scale"),
            *("moe_layers", "interleave_moe_layer_step", "intermediate_size_mlp"),
        ),
        read=_read,
        write=_written,
        fields=(
            *("layer_kinds", "attention_chunk", "query_growth", "growth_interval"),
            *DenseLayers(None).fields,
        ),
    ),
    ignored_entries=("for_llm_compressor",),
    rope_base=500000.0,
)
"""The text models of Llama 4, Scout and Maverick.

Source: Meta 2025, *The Llama 4 herd* (ai.meta.com/blog/llama-4-multimodal-intelligence).
"""

LLAMA_4_IMAGES = replace(
    LLAMA_4,
    title="Llama 4 with images",
    architecture="Llama4ForConditionalGeneration",
    model_type="llama4",
    ignored=(*LLAMA_4.ignored, r"(vision_model|multi_modal_projector)\..*"),
    renamed=((r"language_model\.(.*)", r"\1"),),
    text_part={},
    text_type="llama4_text",
)
"""The text models of Llama 4 as they are published, in files that also hold a part for images."""
