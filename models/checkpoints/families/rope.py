"""The entries of config.json about the rotary position embedding, which all families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...config import ModelConfig, RopeScaling
from .entries import in_json, is_number
from .family import Family

#: Maps a field of `RopeScaling` to its entry.
_SCALING = {
    "factor": "factor",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
_ORIGINAL = _SCALING["original_length"]

ENTRIES = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", _ORIGINAL)
"""The entries that `read_rope` reads."""

#: The entries inside `rope_scaling` and `rope_parameters`.
_INNER = ("rope_theta", "rope_type", "type", "partial_rotary_factor", *_SCALING.values())


def read_rope(family: Family, json: Mapping[str, Any], head_size: int, faults: list[str]) -> dict[str, Any]:
    """Return the fields rope_base, rope_scaling and rotary_size; append unsupported entries to `faults`.

    They are read from `rope_parameters`, or, in files older than transformers 5, from `rope_theta`, `rope_scaling` and
    `partial_rotary_factor`. Where several entries say the same thing, precedence is that of transformers:
    `rope_scaling` wins over `rope_parameters`, and an entry inside that table over one beside it, except that
    `original_max_position_embeddings` wins if it stands beside the table.
    """
    if family.rope_base is None:
        return {"rope_base": 10000.0, "rope_scaling": None}
    before = len(faults)
    name = "rope_scaling" if json.get("rope_scaling") not in (None, {}) else "rope_parameters"
    entries = json.get(name)
    entries = {} if entries is None else entries
    if not isinstance(entries, dict):
        faults.append(f"{name} is {in_json(entries)}; it must be a table of entries, or null.")
        return {}
    if unknown := [key for key in entries if key not in _INNER]:
        faults.append(f"{name} has {', '.join(unknown)}, which is not supported.")
    base = entries.get("rope_theta", json.get("rope_theta", family.rope_base))
    if not is_number(base) or base <= 0:
        faults.append(f"rope_theta is {in_json(base)}; it must be a positive number.")
    scaling, kind = None, entries.get("rope_type", entries.get("type", "default"))
    if kind == "llama3":
        scaling = _llama3(family, json, entries, faults)
    elif kind != "default":
        faults.append(f"the rope type is {in_json(kind)}, which is not supported; 'default' and 'llama3' are.")
    size = _rotary_size(family, json, entries, head_size, faults)
    if len(faults) > before:
        return {}
    return {"rope_base": float(base), "rope_scaling": scaling, "rotary_size": 0 if size == head_size else size}


def _llama3(
    family: Family, json: Mapping[str, Any], entries: Mapping[str, Any], faults: list[str]
) -> RopeScaling | None:
    """Read the stretching of long wavelengths; on a fault, append it and return None."""
    given = {_ORIGINAL: json.get(family.length[0]), **entries}
    if _ORIGINAL in json:
        given[_ORIGINAL] = json[_ORIGINAL]
    values: dict[str, Any] = {name: given.get(key) for name, key in _SCALING.items()}
    wrong = {key: values[name] for name, key in _SCALING.items() if not is_number(values[name])}
    for key, value in wrong.items():
        is_it = f"is {in_json(value)}; it must be a number" if given.get(key) is not None else "is missing"
        faults.append(f"{key} of the llama3 rope scaling {is_it}.")
    if wrong:
        return None
    try:
        return RopeScaling(**values)
    except ValueError as error:
        faults.append(f"its rotary embedding cannot be read: {error}.")
        return None


def _rotary_size(
    family: Family, json: Mapping[str, Any], entries: Mapping[str, Any], head_size: int, faults: list[str]
) -> int:
    """Return the number of elements of a head that are rotated; append faults."""
    default = 1.0 if family.partial_rotary is None else family.partial_rotary
    share = entries.get("partial_rotary_factor", json.get("partial_rotary_factor", default))
    if family.partial_rotary is None:
        if share not in (1, None) or isinstance(share, bool):
            faults.append(f"partial_rotary_factor is {in_json(share)}, which {family.title} models do not have.")
        return head_size
    if not is_number(share) or not 0 < share <= 1:
        faults.append(f"partial_rotary_factor is {in_json(share)}; it must be a number above 0, and at most 1.")
        return head_size
    size = int(head_size * share)
    if not size:  # in ModelConfig, 0 stands for the whole head
        faults.append(f"partial_rotary_factor is {share}, which rotates no element of a head of {head_size}.")
    return size


def write_rope(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Return the entries that describe a model's rotary embedding, as every version of transformers reads them."""
    if family.rope_base is None:
        return {}
    entries: dict[str, Any] = {"rope_theta": config.rope_base}
    if config.rope_scaling:
        values = {key: getattr(config.rope_scaling, name) for name, key in _SCALING.items()}
        entries["rope_scaling"] = {"rope_type": "llama3", **values}
    if family.partial_rotary is not None:
        share = config.rotary / config.head_size
        if int(config.head_size * share) != config.rotary:  # 44 · (30 / 44) is 29.999…, which readers truncate to 29
            share = math.nextafter(share, 1.0)
        entries["partial_rotary_factor"] = share
    return entries


def rope_reasons(family: Family, config: ModelConfig) -> list[str]:
    """Return the reasons why a family cannot express a model's rotary embedding."""
    found = []
    if family.rope_base is None and (config.rope_base, config.rope_scaling) != (10000.0, None):
        found.append("its rope_base is always 10000, without scaling")
    if family.partial_rotary is None and "rotary_size" not in family.options and config.rotary != config.head_size:
        found.append(f"rotary_size is {config.rotary}, not the whole head ({config.head_size})")
    return found
