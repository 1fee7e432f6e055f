"""The entries of config.json for a rotary embedding that differs between sliding and other layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config import ModelConfig
from .entries import in_json, is_number
from .family import Family
from .window import FULL, SLIDING

ENTRIES = ("rope_local_base_freq",)
"""The entries that `read_local_rope` reads, in addition to `rope.ENTRIES`."""


def read_local_rope(
    family: Family, json: Mapping[str, Any], faults: list[str]
) -> tuple[Mapping[str, Any], float | None]:
    """Separate the entries about the rotary embedding of sliding layers from the entries about all other layers.

    In files of transformers 5, `rope_parameters` has a table for each kind of layer. In older files
    `rope_local_base_freq` is the base for sliding layers, and `rope_theta` and `rope_scaling` are for the other layers.

    Returns:
        The entries for `read_rope`, which describe the rotary embedding of the other layers, and the base for sliding
        layers. The base is None if all layers of the family have one base, or on a fault.
    """
    if family.local_rope_base is None:
        return json, None
    given, scaling = json.get("rope_parameters") or {}, json.get("rope_scaling") or {}
    for name, table in (("rope_parameters", given), ("rope_scaling", scaling)):
        if not isinstance(table, dict):
            faults.append(f"{name} is {in_json(table)}; it must be an object of entries, or null.")
            return json, None
    tables = {kind: given.get(kind) or {} for kind in (FULL, SLIDING)}
    if unknown := [key for key in given if key not in tables]:
        faults.append(
            f"rope_parameters has {', '.join(unknown)}; its tables are {FULL} and {SLIDING}. "
            f"Put entries of all layers into {FULL}."
        )
    for kind, table in tables.items():
        if not isinstance(table, dict):
            faults.append(f"rope_parameters of {kind} is {in_json(table)}; it must be an object of entries, or null.")
            return json, None
    local = tables[SLIDING]
    if local.get("rope_type", "default") != "default" or {*local} - {"rope_type", "rope_theta"}:
        faults.append(f"rope_parameters of {SLIDING} is {in_json(local)}; only a rope_theta is supported there.")
    base = local.get("rope_theta", json.get("rope_local_base_freq", family.local_rope_base))
    if not is_number(base) or base <= 0:
        name = "rope_local_base_freq" if "rope_theta" not in local else f"rope_theta of {SLIDING}"
        faults.append(f"{name} is {in_json(base)}; it must be a positive number.")
        return json, None
    if (tables[FULL] | scaling).get("truncate", True) is not True:  # transformers does not find it in such a table
        faults.append(
            "truncate is false in the table of one kind of layers, where transformers reads it as true; leave it out."
        )
    rest = {key: value for key, value in json.items() if key not in ("rope_parameters", "rope_scaling")}
    return rest | {"rope_parameters": tables[FULL] | scaling}, float(base)


def local_fields(base: float | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `local_rope_base`, which is None if no layer is sliding or if all layers are rotated alike.

    Args:
        base: the base for sliding layers.
        fields: the other fields of the model, including `rope_base`, `rope_scaling` and `sliding_window`.
    """
    if base is None:
        return {}
    alike = base == fields["rope_base"] and fields["rope_scaling"] is None
    return {"local_rope_base": None if alike or fields["sliding_window"] is None else base}


def write_local_rope(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Return the entry with the base for a model's sliding layers, which every version of transformers reads."""
    if family.local_rope_base is None:
        return {}
    base = config.rope_base if config.local_rope_base is None else config.local_rope_base
    if family.local_rope_base == family.rope_base:  # OLMo 3 has no separate entry for it
        bases = {FULL: config.rope_base, SLIDING: base}
        return {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": each} for kind, each in bases.items()}}
    return {"rope_local_base_freq": base}


def local_rope_reasons(family: Family, config: ModelConfig) -> list[str]:
    """Return the reasons why a family cannot express the rotary embedding of a model's sliding layers."""
    if family.local_rope_base is not None and config.rope_scaling is not None and config.rope_scaling.truncate is False:
        return ["rope_scaling.truncate is False, and always True in its files"]
    slides = any(config.layer_kind(number) == "sliding" for number in range(config.layers))
    if family.local_rope_base is None or not slides or config.local_rope_base is not None:
        return []
    if config.rope_scaling is None:
        return []
    return ["rope_scaling is set for sliding layers too, but the family stretches only layers with full attention"]
