"""The entries of config.json about sliding windows, in which a token attends only to the last few tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .entries import in_json, is_whole

if TYPE_CHECKING:
    from ...config import ModelConfig

ENTRIES = (
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
    "_sliding_window_pattern",  # transformers writes this entry, but does not read it
)  # fmt: skip
"""The entries that `read_window` reads."""

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Window:
    """The entries with which a family describes its sliding window.

    Attributes:
        size: the default of `sliding_window`, in tokens.
        switched: whether `use_sliding_window`, false by default, turns the window on.
        layered: whether only the layers that `layer_types` names have a window. By default these are the layers after
            `max_window_layers`, or the layers that the family's `pattern` selects. In families where this is False, all
            layers have the window, and these entries are ignored.
        pattern: the number n if every nth layer has full attention and the layers in between have a window; 0 for
            families whose layers are split by `max_window_layers`.
        patterned: whether the entry `sliding_window_pattern` sets another pattern, in files older than transformers 5.
        bounded: whether the layers from number `max_window_layers` on have full attention, whatever the pattern.
        unrotated: whether layers with full attention have no rotary embedding.
        sliding: whether all layers have a window by default, so that `max_window_layers` is not read.
    """

    size: int | None
    switched: bool = False
    layered: bool = False
    pattern: int = 0
    patterned: bool = False
    bounded: bool = False
    unrotated: bool = False
    sliding: bool = False


#: The default of `max_window_layers`.
_FIRST = 28


def read_window(window: Window | None, json: Mapping[str, Any], layers: int, faults: list[str]) -> dict[str, Any]:
    """Return the fields `sliding_window` and `layer_kinds` of a model.

    Args:
        window: the entries of the family, or None if its models have no window.
        json: the entries of config.json.
        layers: the model's number of layers.
        faults: a list, to which entries that cannot be read or are not supported are appended.
    """
    kinds = json.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        faults.append(f"layer_types is {in_json(kinds)}; it must be a list of names, one for each layer.")
        return {}
    if kinds is not None and len(kinds) != layers:
        faults.append(f"layer_types names {len(kinds)} layers, but num_hidden_layers is {layers}.")
        return {}
    known = {FULL, SLIDING} if window and window.layered else {FULL}
    if unknown := sorted({*(kinds or ())} - known):
        faults.append(f"layer_types has {', '.join(map(repr, unknown))}, which is not supported.")
        return {}
    size = json.get("sliding_window", window.size if window else None)
    if size == 0 and is_whole(size) and window and window.switched and json.get("use_sliding_window", False) is False:
        size = None  # transformers writes 0 for None in Qwen2-MoE
    if size is not None and not (is_whole(size) and size >= 1):
        faults.append(f"sliding_window is {in_json(size)}; it must be a whole number of tokens, or null.")
        return {}
    if window is None:
        # transformers would still truncate the cache of such a model, though not the attention within its prompts.
        if size is not None and json.get("use_sliding_window") is not False:
            faults.append(f"sliding_window is {size}, which models of this family do not have; null is supported.")
        if json.get("use_sliding_window"):
            faults.append("use_sliding_window is set, and models of this family have no sliding window.")
        return {}
    used = json.get("use_sliding_window", False) if window.switched else True
    if not isinstance(used, bool):
        faults.append(f"use_sliding_window is {in_json(used)}; it must be true or false.")
        return {}
    size = size if used else None
    if not window.layered:
        return {"sliding_window": size, "layer_kinds": ()}
    if kinds is None:
        kinds = _default_kinds(window, json, layers, size, faults)
        if kinds is None:
            return {}
    if SLIDING not in kinds:
        size = None
    elif size is None:
        faults.append(f"layer_types has {SLIDING!r}, but there is no sliding window (use_sliding_window).")
        return {}
    ours = {FULL: "unrotated" if window.unrotated else "full", SLIDING: "sliding"}
    return {"sliding_window": size, "layer_kinds": repeating([ours[kind] for kind in kinds])}


def _default_kinds(
    window: Window, json: Mapping[str, Any], layers: int, size: int | None, faults: list[str]
) -> list[str] | None:
    """Return the kinds of layers for a file that does not state them, or None if an entry cannot be read."""
    if window.sliding:
        return [FULL if size is None else SLIDING] * layers
    if not window.pattern:
        first = json.get("max_window_layers", _FIRST)
        if not is_whole(first):
            faults.append(f"max_window_layers is {in_json(first)}; it must be a whole number.")
            return None
        return [SLIDING if size is not None and number >= first else FULL for number in range(layers)]
    pattern = window.pattern
    if window.patterned and "sliding_window_pattern" in json:
        pattern = json["sliding_window_pattern"]
        if not is_whole(pattern) or pattern < 1:
            faults.append(f"sliding_window_pattern is {in_json(pattern)}; it must be a whole number of layers.")
            return None
    if window.switched and size is None:
        return [FULL] * layers
    most = layers
    if window.bounded:
        most = json.get("max_window_layers", _FIRST)
        if not is_whole(most):
            faults.append(f"max_window_layers is {in_json(most)}; it must be a whole number.")
            return None
    return [SLIDING if (number + 1) % pattern and number < most else FULL for number in range(layers)]


def repeating(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest repeating pattern of these kinds of layers; empty if all layers are full, or all sliding.

    >>> repeating(["sliding", "full"] * 3), repeating(["sliding"] * 4), repeating(["full", "sliding", "full"])
    (('sliding', 'full'), (), ('full', 'sliding', 'full'))
    """
    if {*kinds} in ({"full"}, {"sliding"}):
        return ()
    for length in range(1, len(kinds) + 1):
        if len(kinds) % length == 0 and [*kinds] == [*kinds[:length]] * (len(kinds) // length):
            return tuple(kinds[:length])
    return tuple(kinds)


def write_window(window: Window | None, config: ModelConfig) -> dict[str, Any]:
    """Return the entries about a model's sliding window."""
    if window is None:
        return {}
    entries: dict[str, Any] = {"sliding_window": config.sliding_window}
    if window.switched:
        entries["use_sliding_window"] = config.sliding_window is not None
    if window.layered:
        kinds = (config.layer_kind(number) for number in range(config.layers))
        entries["layer_types"] = [SLIDING if kind == "sliding" else FULL for kind in kinds]
        if not (window.pattern or window.sliding):
            entries["max_window_layers"] = config.layers  # for old readers; layer_types wins
    return entries


def window_reasons(window: Window | None, config: ModelConfig, *, named: bool = False) -> list[str]:
    """Return the reasons why a family with these entries cannot express a model's kinds of layers.

    Args:
        window: the entries of the family.
        config: the model configuration.
        named: whether another entry of the family lists the layers without a rotary embedding.
    """
    found = []
    kinds = {config.layer_kind(number) for number in range(config.layers)}
    if "sliding" in kinds and window is None:
        found.append(f"sliding_window is {config.sliding_window}, and its layers have none")
    elif "sliding" in kinds and len(kinds) > 1 and window is not None and not window.layered:
        found.append("layer_kinds differ, and all of its layers are sliding")
    unrotated = window is not None and window.unrotated
    if "unrotated" in kinds and not (unrotated or named):
        found.append("layer_kinds has 'unrotated', and all of its layers are rotated")
    if "full" in kinds and unrotated:
        found.append("layer_kinds has 'full', and its layers of full attention are not rotated")
    return found
