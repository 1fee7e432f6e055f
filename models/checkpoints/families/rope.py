"""The entries of config.json about the rotary position embedding, which all families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...config import ModelConfig, RopeScaling
from .entries import in_json, is_number
from .family import Family

_ORIGINAL = "original_max_position_embeddings"

#: For a kind of scaling, its entries inside the table, each with the field of `RopeScaling` that it sets.
_SCALINGS: dict[str, dict[str, str]] = {
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency",
        "high_freq_factor": "high_frequency",
        _ORIGINAL: "original_length",
    },
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "beta_slow": "low_frequency",
        "beta_fast": "high_frequency",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
        _ORIGINAL: "original_length",
    },
    "longrope": {
        "factor": "factor",
        "short_factor": "short_factors",
        "long_factor": "long_factors",
        "attention_factor": "attention_factor",
        _ORIGINAL: "original_length",
    },
}


def rope_entries(family: Family) -> tuple[str, ...]:
    """Return the names of the entries that `read_rope` reads."""
    return () if family.rope_base is None else ("rope_scaling", "rope_parameters", *family.rope_names, _ORIGINAL)


_OPTIONAL = ("beta_slow", "beta_fast", "truncate")

#: The entries that may be inside `rope_scaling` and `rope_parameters`.
_INNER = {
    *("rope_theta", "rope_type", "type", "partial_rotary_factor", "mscale", "mscale_all_dim"),
    *(key for entries in _SCALINGS.values() for key in entries),
}


def read_rope(family: Family, json: Mapping[str, Any], head_size: int, faults: list[str]) -> dict[str, Any]:
    """Return the fields rope_base, rope_scaling and rotary_size; append unsupported entries to `faults`.

    The fields are read from `rope_parameters`. In files older than transformers 5 they are read from `rope_theta`,
    `rope_scaling` and `partial_rotary_factor`.

    If several entries give the same setting, precedence is as in transformers. The table `rope_scaling` takes
    precedence over the table `rope_parameters`, and an entry inside the table takes precedence over the same entry
    outside. The exception is `original_max_position_embeddings`: outside the table it takes precedence over the same
    entry inside.
    """
    if family.rope_base is None:
        return {"rope_base": 10000.0, "rope_scaling": None}
    before = len(faults)
    name, entries = scaling_entries(json)
    if not isinstance(entries, dict):
        faults.append(f"{name} is {in_json(entries)}; it must be an object of entries, or null.")
        return {}
    if unknown := [key for key in entries if key not in _INNER]:
        faults.append(f"{name} has {', '.join(unknown)}, which is not supported.")
    base_name, _ = family.rope_names
    base = entries.get("rope_theta", json.get(base_name, family.rope_base))
    if not is_number(base) or base <= 0:
        key = "rope_theta" if "rope_theta" in entries else base_name
        faults.append(f"{key} is {in_json(base)}; it must be a positive number.")
    scaling, kind = None, entries.get("rope_type", entries.get("type", "default"))
    kinds = family.rope_types or {name: name for name in _SCALINGS}
    if isinstance(kind, str) and kind in kinds:
        scaling = _scaling(family, json, kinds[kind], entries, faults)
    elif kind != "default":
        known = ", ".join(map(repr, ["default", *kinds]))
        faults.append(f"the rope type is {in_json(kind)}, which is not supported; supported: {known}.")
    size = _rotary_size(family, json, entries, head_size, faults)
    if len(faults) > before:
        return {}
    found = {"rope_base": float(base), "rope_scaling": scaling, "rotary_size": 0 if size == head_size else size}
    if scaling is not None and scaling.kind == "dynamic":  # the entry with the length gives the original length
        found["context_length"] = round(scaling.factor * scaling.original_length)
    return found


def scaling_entries(json: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the contents of the table about the rotary embedding.

    The table is `rope_scaling`, or `rope_parameters` if there is no `rope_scaling`.
    """
    name = "rope_scaling" if json.get("rope_scaling") not in (None, {}) else "rope_parameters"
    entries = json.get(name)
    return name, {} if entries is None else entries


def _scaling(
    family: Family, json: Mapping[str, Any], kind: str, entries: Mapping[str, Any], faults: list[str]
) -> RopeScaling | None:
    """Read a scaling of the rotary embedding; if there is a fault, append it to `faults` and return None."""
    given, before = _given(family, json, kind, entries), len(faults)
    original = {} if kind == "linear" else {_ORIGINAL: "original_length"}
    values: dict[str, Any] = {"kind": kind}
    for key, name in {**_SCALINGS[kind], **original}.items():
        value = given.get(key)
        if (key in _OPTIONAL and key not in given) or (key == "attention_factor" and value is None):
            continue
        if fault := _wrong(key, value):
            is_it = "is missing" if value is None else f"is {in_json(value)}; it must be {fault}"
            faults.append(f"{key} of the {kind} rope scaling {is_it}.")
        values[name] = tuple(value) if isinstance(value, list) else value
    scales: list[Any] = [given.get(key) for key in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and "attention_factor" not in values and all(scales):
        faults += [
            f"mscale of the yarn rope scaling is {in_json(each)}; it must be a number."
            for each in scales
            if not is_number(each)
        ]
        if len(faults) == before and values["factor"] > 1:
            grown = 0.1 * math.log(values["factor"])
            values["attention_factor"] = (scales[0] * grown + 1) / (scales[1] * grown + 1)
    if len(faults) > before:
        return None
    try:
        return RopeScaling(**values)
    except ValueError as error:
        faults.append(f"its rotary embedding cannot be read: {error}.")
        return None


def _given(family: Family, json: Mapping[str, Any], kind: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a scaling, including entries outside the table and entries that follow from others."""
    longest = json.get(family.length[0])
    given = {_ORIGINAL: longest, **entries}
    if _ORIGINAL in json or family.original_length is not None:
        given[_ORIGINAL] = json.get(_ORIGINAL, family.original_length)
    if kind == "dynamic":
        given[_ORIGINAL] = longest
    # A factor that is null, or absent for longrope, is the ratio of both lengths.
    by_ratio = kind == "longrope" or (kind == "yarn" and "factor" in given)
    if by_ratio and given.get("factor") is None and is_number(longest) and is_number(given[_ORIGINAL]):
        given["factor"] = longest / given[_ORIGINAL] if given[_ORIGINAL] else None
    return {key: value for key, value in given.items() if value or not key.startswith("beta_")}


def _wrong(key: str, value: Any) -> str:
    """Describe the values that an entry may have, or return an empty string if the entry's value is allowed."""
    if key == "truncate":
        return "" if isinstance(value, bool) else "true or false"
    if key in ("short_factor", "long_factor"):
        return "" if isinstance(value, list) and all(map(is_number, value)) else "a list of numbers"
    return "" if is_number(value) else "a number"


def _rotary_size(
    family: Family, json: Mapping[str, Any], entries: Mapping[str, Any], head_size: int, faults: list[str]
) -> int:
    """Return the number of rotated elements of a head; append faults in the entries to `faults`."""
    default = 1.0 if family.partial_rotary is None else family.partial_rotary
    key = "partial_rotary_factor" if "partial_rotary_factor" in entries else family.rope_names[1]
    share = entries.get("partial_rotary_factor", json.get(key, default))
    if family.partial_rotary is None:
        if share not in (1, None) or isinstance(share, bool):
            faults.append(f"{key} is {in_json(share)}, which {family.title} models do not have.")
        return head_size
    if not is_number(share) or not 0 < share <= 1:
        faults.append(f"{key} is {in_json(share)}; it must be a number above 0, and at most 1.")
        return head_size
    size = int(head_size * share)
    if not size:  # in ModelConfig, 0 stands for the whole head
        faults.append(f"{key} is {share}, which rotates no element of a head of {head_size}.")
    return size


def write_rope(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Return the entries about a model's rotary embedding, in a form that every version of transformers reads."""
    if family.rope_base is None:
        return {}
    base, part = family.rope_names
    entries: dict[str, Any] = {base: config.rope_base}
    if scaling := config.rope_scaling:
        values = {key: getattr(scaling, name) for key, name in _SCALINGS[scaling.kind].items()}
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        entries["rope_scaling"] = {
            "rope_type": scaling.kind,
            **{key: value for key, value in values.items() if value is not None},
        }
        if scaling.kind == "dynamic":
            entries[family.length[0]] = scaling.original_length
    if family.original_length is not None:
        entries[_ORIGINAL] = config.rope_scaling.original_length if config.rope_scaling else family.original_length
    if family.partial_rotary is not None:
        share = config.rotary / config.head_size
        if int(config.head_size * share) != config.rotary:  # 44 · (30 / 44) is 29.999…, which readers truncate to 29
            share = math.nextafter(share, 1.0)
        entries[part] = share
    return entries


def rope_reasons(family: Family, config: ModelConfig) -> list[str]:
    """Return the reasons why a family cannot express a model's rotary embedding."""
    found = []
    if family.rope_base is None and (config.rope_base, config.rope_scaling) != (10000.0, None):
        found.append("its rope_base is always 10000, without scaling")
    kinds = {*family.rope_types.values()} or {*_SCALINGS}
    if family.rope_base is not None and config.rope_scaling and config.rope_scaling.kind not in kinds:
        found.append(f"rope_scaling is {config.rope_scaling.kind}, not {' or '.join(sorted(kinds))}")
    part = config.latent is None and config.rotary != config.head_size
    if family.partial_rotary is None and "rotary_size" not in family.options and part:
        found.append(f"rotary_size is {config.rotary}, not the whole head ({config.head_size})")
    return found
