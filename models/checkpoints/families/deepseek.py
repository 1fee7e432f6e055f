"""DeepSeek V2 and V3, with latent attention, shared experts, and experts that are chosen within groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...config import LatentConfig
from .dense_layers import DenseLayers
from .entries import in_json, is_number, is_whole
from .family import Agreement, Family, Option, Stored
from .mixtures import MIXED, MODULES
from .rope import scaling_entries
from .serial import ENDS, FEED_FORWARD, LAYER, OPTIONS, without

if TYPE_CHECKING:
    from ...config import ModelConfig

#: For each entry, the field of `LatentConfig` that it sets; the entry for the rank of queries may be null.
_LATENT = {"kv_lora_rank": "rank", "q_lora_rank": "query_rank", "qk_rope_head_dim": "rotary", "v_head_dim": "values"}
_DEFAULTS = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128}


def _read(
    json: Mapping[str, Any],
    fields: Mapping[str, Any],
    faults: list[str],
    dense: DenseLayers,
    groups: tuple[int, int] | None,
) -> dict[str, Any]:
    """Read the fields about latent attention, the factor of scores, layers without experts, and groups of experts.

    Args:
        json, fields, faults: see `Agreement.read`.
        dense: the entries about layers without experts.
        groups: the default number of groups of experts, and the default number of groups that are kept. None if the
            entry topk_method says whether there are groups.
    """
    values: dict[str, Any] = {key: json.get(key, default) for key, default in _DEFAULTS.items()}
    plain = json.get("qk_nope_head_dim", 128)
    entries: dict[str, Any] = {**values, "qk_nope_head_dim": plain}
    for key, value in entries.items():
        if value is None and key == "q_lora_rank":
            continue
        if not (is_whole(value) and value >= 1):
            faults.append(f"{key} is {in_json(value)}; it must be a whole number.")
    if "head_dim" in json and json["head_dim"] != values["qk_rope_head_dim"]:
        fact = f"head_dim is {in_json(json['head_dim'])}, and qk_rope_head_dim {in_json(values['qk_rope_head_dim'])}"
        faults.append(f"{fact}; they must be the same.")
    of_groups, of_dense = _groups(json, faults, groups), dense.read(json, fields, faults)
    if faults:
        return {}
    sizes = {name: values[key] or 0 for key, name in _LATENT.items()}
    head_size = plain + sizes["rotary"]
    return {
        "latent": LatentConfig(**sizes),
        "head_size": head_size,
        "attention_scale": _scale(json, head_size, faults),
        **of_groups,
        **of_dense,
    }


def _groups(json: Mapping[str, Any], faults: list[str], defaults: tuple[int, int] | None) -> dict[str, Any]:
    """Return the fields about groups of experts; in V2 the entry topk_method may say that there are no groups."""
    whole = {"moe.expert_groups": 1, "moe.kept_groups": None, "moe.group_best": 2}
    if defaults is None:
        method = json.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            faults.append(f"topk_method is {in_json(method)}; supported: 'greedy', 'group_limited_greedy'.")
        if method != "group_limited_greedy":
            return whole
    count, kept = (json.get(key, value) for key, value in zip(("n_group", "topk_group"), defaults or (None, None)))
    for key, value in (("n_group", count), ("topk_group", kept)):
        if not (is_whole(value) and value >= 1):
            faults.append(f"{key} is {in_json(value)}; it must be a whole number of groups.")
    if not faults and kept > count:
        faults.append(f"topk_group is {kept}; it must be at most n_group ({count}).")
    if faults or count == 1:
        return whole
    return {"moe.expert_groups": count, "moe.kept_groups": kept, "moe.group_best": 1 if defaults is None else 2}


def _scale(json: Mapping[str, Any], head_size: int, faults: list[str]) -> float | None:
    """Return the factor of attention scores, or None if no scaling of the rotary embedding changes this factor."""
    _, entries = scaling_entries(json)
    share = entries.get("mscale_all_dim", 0) if isinstance(entries, dict) else 0
    if not share or entries.get("rope_type", entries.get("type", "default")) == "default":
        return None
    factor = entries.get("factor")
    if not is_number(share) or not is_number(factor):
        faults.append(f"mscale_all_dim is {in_json(share)}, and factor {in_json(factor)}; they must be numbers.")
        return None
    return head_size**-0.5 * (0.1 * share * math.log(factor) + 1) ** 2 if factor > 1 else None


def _written(config: ModelConfig, dense: DenseLayers) -> dict[str, Any]:
    latent = config.latent
    assert latent is not None
    entries: dict[str, Any] = {key: getattr(latent, name) or None for key, name in _LATENT.items()}
    entries["qk_nope_head_dim"] = config.head_size - latent.rotary
    if config.moe is not None:
        entries |= dense.write(config) | {
            "n_group": config.moe.expert_groups,
            "topk_group": config.moe.kept_groups or config.moe.expert_groups,
        }
    return entries


def _written_v2(config: ModelConfig, dense: DenseLayers) -> dict[str, Any]:
    grouped = config.moe is not None and config.moe.expert_groups > 1
    return _written(config, dense) | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _written_scaling(config: ModelConfig) -> dict[str, Any]:
    """Return the entry that sets the factor of attention scores, for the table about the rotary scaling."""
    scaling = config.rope_scaling
    if config.attention_scale is None or scaling is None:
        return {}
    grown = math.sqrt(config.attention_scale * config.head_size**0.5)
    return {"mscale_all_dim": (grown - 1) / (0.1 * math.log(scaling.factor))}


def _reasons(config: ModelConfig, dense: DenseLayers) -> list[str]:
    if config.latent is None:
        return ["its attention is latent"]
    found = dense.reasons(config)
    moe = config.moe
    if moe is not None and moe.expert_groups > 1 and moe.group_best != (2 if moe.scores == "sigmoid" else 1):
        found.append(f"moe.group_best is {moe.group_best}, not {2 if moe.scores == 'sigmoid' else 1}")
    if moe is not None and moe.shared_width not in (0, moe.shared * config.feed_forward):
        found.append(f"moe.shared_width is {moe.shared_width}, not the width of {moe.shared} experts")
    if config.latent.norm_epsilon != LatentConfig.norm_epsilon:
        found.append(f"latent.norm_epsilon is {config.latent.norm_epsilon}, not {LatentConfig.norm_epsilon}")
    grows = config.rope_scaling is not None and config.rope_scaling.kind == "yarn"
    if config.attention_scale is not None and not grows:
        found.append(f"attention_scale is {config.attention_scale}, which only yarn scaling changes")
    return found


_DENSE_V3, _DENSE_V2 = DenseLayers(18432, first=3), DenseLayers(11008, first=0)

_V3 = Agreement(
    keys=(*_LATENT, "qk_nope_head_dim", "head_dim", "n_group", "topk_group", *_DENSE_V3.keys),
    read=partial(_read, dense=_DENSE_V3, groups=(8, 4)),
    write=partial(_written, dense=_DENSE_V3),
    fields=(
        *("latent", "head_size", "attention_scale", *_DENSE_V3.fields),
        *("moe.expert_groups", "moe.kept_groups", "moe.group_best", "moe.shared_width"),
    ),
    write_scaling=_written_scaling,
    reasons=partial(_reasons, dense=_DENSE_V3),
)
_V2 = replace(
    _V3,
    keys=(*_V3.keys, "topk_method"),
    read=partial(_read, dense=_DENSE_V2, groups=None),
    write=partial(_written_v2, dense=_DENSE_V2),
    reasons=partial(_reasons, dense=_DENSE_V2),
)

_OPTIONS = without(OPTIONS, "head_size", "feed_forward") | {
    "feed_forward": Option("moe_intermediate_size"),
    "moe.experts": Option(("n_routed_experts", "num_experts", "num_local_experts")),
    "moe.k": Option("num_experts_per_tok"),
    "moe.shared": Option("n_shared_experts"),
    "moe.gate_factor": Option("routed_scaling_factor"),
}

_FIXED = without(
    MIXED, "latent", "attention_scale", "moe.shared", "moe.shared_width", "moe.gate_factor", "moe.expert_groups",
)  # fmt: skip

_TENSORS = (
    ENDS
    | FEED_FORWARD
    | {
        "attention.norm": Stored(f"{LAYER}.input_layernorm.weight", "E"),
        "attention.w_q": Stored(f"{LAYER}.self_attn.q_proj.weight", "(HD)E"),
        "attention.w_q_down": Stored(f"{LAYER}.self_attn.q_a_proj.weight", "UE"),
        "attention.q_latent_norm": Stored(f"{LAYER}.self_attn.q_a_layernorm.weight", "U"),
        "attention.w_q_up": Stored(f"{LAYER}.self_attn.q_b_proj.weight", "(HD)U"),
        "attention.w_k_down": Stored(f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight", "ZE"),
        "attention.latent_norm": Stored(f"{LAYER}.self_attn.kv_a_layernorm.weight", "Z"),
        # For each head, the rows of its keys come first, then those of its values. W is the width of the part that does
        # not belong to the parameter.
        "attention.w_k_up": Stored(f"{LAYER}.self_attn.kv_b_proj.weight", "(H(D|W))Z", part=0),
        "attention.w_v_up": Stored(f"{LAYER}.self_attn.kv_b_proj.weight", "(H(W|D))Z", part=1),
        "attention.w_o": Stored(f"{LAYER}.self_attn.o_proj.weight", "E(HD)"),
        "moe.norm": Stored(f"{LAYER}.post_attention_layernorm.weight", "E"),
        "moe.router": Stored(f"{LAYER}.mlp.gate.weight", "XE"),
        "moe.choice_bias": Stored(f"{LAYER}.mlp.gate.e_score_correction_bias", "X"),
        "moe.w_in": Stored(f"{LAYER}.mlp.experts.{{X}}.up_proj.weight", "FE"),
        "moe.w_gate": Stored(f"{LAYER}.mlp.experts.{{X}}.gate_proj.weight", "FE"),
        "moe.w_out": Stored(f"{LAYER}.mlp.experts.{{X}}.down_proj.weight", "EF"),
        "moe.shared.w_in": Stored(f"{LAYER}.mlp.shared_experts.up_proj.weight", "FE"),
        "moe.shared.w_gate": Stored(f"{LAYER}.mlp.shared_experts.gate_proj.weight", "FE"),
        "moe.shared.w_out": Stored(f"{LAYER}.mlp.shared_experts.down_proj.weight", "EF"),
    }
)

DEEPSEEK_V3 = Family(
    title="DeepSeek V3",
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    options=_OPTIONS
    | {
        "moe.experts": Option(("n_routed_experts", "num_local_experts"), 256),
        "moe.k": Option("num_experts_per_tok", 8),
        "moe.shared": Option("n_shared_experts", 1),
        "moe.gate_factor": Option("routed_scaling_factor", 2.5),
        "moe.renormalize": Option("norm_topk_prob", True),
        "rotary_pairs": Option("rope_interleave", True, {True: "neighbours", False: "halves"}),
    },
    fixed=without(_FIXED, "rotary_pairs", "moe.scores", "moe.choice_bias")
    | {"moe.scores": "sigmoid", "moe.choice_bias": True},
    tensors=_TENSORS,
    agreement=_V3,
    inactive={
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    modules=MODULES,
    ignored_entries=("ep_size", "seq_aux", "qk_head_dim"),
)
"""Source: DeepSeek-AI 2024, *DeepSeek-V3 Technical Report* (arXiv 2412.19437), section 2.1."""

DEEPSEEK_V2 = Family(
    title="DeepSeek V2",
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    options=_OPTIONS
    | {
        "moe.experts": Option(("n_routed_experts", "num_experts"), 64),
        "moe.shared": Option("n_shared_experts", 2),
        "moe.gate_factor": Option("routed_scaling_factor", 1.0),
    },
    fixed=_FIXED | {"rotary_pairs": "neighbours", "moe.renormalize": False},
    tensors=without(_TENSORS, "moe.choice_bias"),
    agreement=_V2,
    inactive={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "scoring_func": ("softmax",),
        "moe_layer_freq": (1,),
    },
    ignored_entries=("norm_topk_prob", "ep_size", "seq_aux", "qk_head_dim"),  # transformers does not read these
)
"""Source: DeepSeek-AI 2024, *DeepSeek-V2* (arXiv 2405.04434), section 2."""
