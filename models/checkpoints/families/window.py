"""The entries of config.json about a sliding window, in which a token attends only to the last few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .entries import in_json, is_whole

ENTRIES = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
"""The entries that `read_window` reads."""

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Window:
    """The entries with which a family describes its sliding window.

    Attributes:
        size: the default of `sliding_window`.
        switched: whether `use_sliding_window`, false by default, turns the window on.
        layered: whether only the layers that `layer_types` names, or those after `max_window_layers`, have a window;
            in other families all layers have it, and these entries are ignored.
    """

    size: int | None
    switched: bool = False
    layered: bool = False


#: The default of `max_window_layers`.
_FIRST = 28


def read_window(window: Window | None, json: Mapping[str, Any], layers: int, faults: list[str]) -> int | None:
    """Return the number of tokens in the sliding window; None if no layer has one.

    Args:
        window: the family's entries; None if its models have no window.
        json: the entries of config.json.
        layers: the model's number of layers.
        faults: list to which entries that cannot be read, or are not supported, are appended.
    """
    kinds = json.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        faults.append(f"layer_types is {in_json(kinds)}; it must be a list of names, one for each layer.")
        return None
    if kinds is not None and len(kinds) != layers:
        faults.append(f"layer_types names {len(kinds)} layers, and num_hidden_layers is {layers}.")
    known = {FULL, SLIDING} if window and window.layered else {FULL}
    if unknown := sorted({*(kinds or ())} - known):
        faults.append(f"layer_types has {', '.join(map(repr, unknown))}, which is not supported.")
    size = json.get("sliding_window", window.size if window else None)
    if size == 0 and is_whole(size) and window and window.switched and json.get("use_sliding_window", False) is False:
        size = None  # as transformers writes it for Qwen2-MoE
    if size is not None and not (is_whole(size) and size >= 1):
        faults.append(f"sliding_window is {in_json(size)}; it must be a whole number of tokens, or null.")
        return None
    if window is None:
        # transformers would still truncate the cache of such a model, though not the attention within its prompts.
        if size is not None:
            faults.append(f"sliding_window is {size}, which models of this family do not have; null is supported.")
        if json.get("use_sliding_window"):
            faults.append("use_sliding_window is set, and models of this family have no sliding window.")
        return None
    used = json.get("use_sliding_window", False) if window.switched else True
    if not isinstance(used, bool):
        faults.append(f"use_sliding_window is {in_json(used)}; it must be true or false.")
        return None
    first = json.get("max_window_layers", _FIRST)
    if window.layered and not is_whole(first):
        faults.append(f"max_window_layers is {in_json(first)}; it must be a whole number.")
        return None
    size = size if used else None
    if not window.layered:
        return size
    if kinds is None:
        return size if first < layers else None
    if SLIDING not in kinds:
        return None
    if size is None:
        faults.append(f"layer_types has {SLIDING!r}, and there is no sliding window (use_sliding_window).")
    return size


def write_window(window: Window | None) -> dict[str, Any]:
    """Return the entries that say that a model has no sliding window."""
    if window is None:
        return {}
    return {"sliding_window": None} | ({"use_sliding_window": False} if window.switched else {})
