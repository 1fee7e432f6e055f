"""The entries of config.json about a sliding window, in which a token attends to the last few tokens alone."""

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
    """The entries by which a family says that attention looks back over a few tokens only.

    Attributes:
        size: the default of `sliding_window`.
        switched: whether there is a window only where `use_sliding_window` is true, which it is not by default.
        layered: whether only those layers have it that `layer_types` names, or that come after `max_window_layers`;
            other families have it in all layers, whatever these entries say.
    """

    size: int | None
    switched: bool = False
    layered: bool = False


#: The default of `max_window_layers`.
_FIRST = 28


def read_window(window: Window | None, json: Mapping[str, Any], layers: int, faults: list[str]) -> int | None:
    """Return how many tokens the layers with a sliding window attend to; None if there is no such layer.

    Args:
        window: the family's; None if its models have none.
        json: config.json.
        layers: how many the model has.
        faults: to which is added what cannot be read, or is not supported.
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
    if size is not None and not (is_whole(size) and size >= 1):
        faults.append(f"sliding_window is {in_json(size)}; it must be a whole number of tokens, or null.")
        return None
    if window is None:
        # transformers would still cut the cache of such a model, though not the attention of its prompts.
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
    """Return the entries of a model without a sliding window."""
    if window is None:
        return {}
    return {"sliding_window": None} | ({"use_sliding_window": False} if window.switched else {})
