"""The entries of config.json about the rotary position embedding, which all families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config import ModelConfig, RopeScaling
from .family import Family

#: Field of `RopeScaling` to its entry.
_SCALING = {
    "factor": "factor",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}


def read_rope(family: Family, json: Mapping[str, Any], head_size: int, faults: list[str]) -> dict[str, Any]:
    """Return the fields rope_base, rope_scaling and rotary_size; add to the faults what is not supported.

    They stand in `rope_parameters`, or, as written before transformers 5, in `rope_theta`, `rope_scaling` and
    `partial_rotary_factor`.
    """
    if family.rope_base is None:
        return {"rope_base": 10000.0, "rope_scaling": None}
    entries = dict(json.get("rope_parameters") or json.get("rope_scaling") or {})
    base = entries.get("rope_theta") or json.get("rope_theta") or family.rope_base
    scaling, kind = None, entries.get("rope_type", entries.get("type", "default"))
    if kind == "llama3":
        lacking = [key for key in _SCALING.values() if entries.get(key) is None]
        faults += [f"{key} of the llama3 rope scaling is missing" for key in lacking]
        scaling = None if lacking else RopeScaling(**{name: entries[key] for name, key in _SCALING.items()})
    elif kind != "default":
        faults.append(f"the rope type is {kind!r}, which is not supported; 'default' and 'llama3' are")
    found = entries.get("partial_rotary_factor", json.get("partial_rotary_factor"))
    share = found or family.partial_rotary or 1.0
    if family.partial_rotary is None and share != 1.0:
        faults.append(f"partial_rotary_factor is {share}, which {family.title} models do not have")
    size = int(head_size * share)
    return {"rope_base": float(base), "rope_scaling": scaling, "rotary_size": 0 if size == head_size else size}


def write_rope(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Return the entries of a model, as all versions of transformers read them."""
    if family.rope_base is None:
        return {}
    entries: dict[str, Any] = {"rope_theta": config.rope_base}
    if config.rope_scaling:
        values = {key: getattr(config.rope_scaling, name) for name, key in _SCALING.items()}
        entries["rope_scaling"] = {"rope_type": "llama3", **values}
    if family.partial_rotary is not None:
        entries["partial_rotary_factor"] = config.rotary / config.head_size
    return entries


def rope_reasons(family: Family, config: ModelConfig) -> list[str]:
    """Return why a model's rotary embedding cannot be expressed in a family."""
    found = []
    if family.rope_base is None and (config.rope_base, config.rope_scaling) != (10000.0, None):
        found.append("its rope_base is always 10000, without scaling")
    if family.partial_rotary is None and "rotary_size" not in family.options and config.rotary != config.head_size:
        found.append(f"rotary_size is {config.rotary}, not the whole head ({config.head_size})")
    return found
