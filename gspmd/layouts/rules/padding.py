"""Dimensions that a layout pads to a multiple, where sizes do not divide: which, to what, and what is real in them."""

from collections.abc import Iterator, Mapping
from math import lcm
from typing import Any

import numpy as np

from gspmd.annotate import Fault
from gspmd.annotate.errors import shown
from gspmd.annotate.validation import whole
from gspmd.layouts.rules.keys import DIMENSIONS
from gspmd.layouts.rules.line import Line

#: The dimensions that may be padded, and how the padding is kept from having an effect.
PADDED = {
    "H": "the attention core's result is 0 there; every key/value head has as many query heads as before, or more",
    "K": "as H, which is padded along, so that the query heads of each real one stay",
    "F": "the hidden layer is 0 there, or the rows of an expert's second matrix are",
    "V": "logits are -1e30 there",
    "T": "room in the cache that no position reaches",
}

#: Why others may not.
_REFUSED = {
    "B": "sequences are the caller's: give alternatives, a list of specs, and a smaller batch takes fewer mesh axes",
    "L": "the text is padded where it is made, by whoever knows which tokens are real",
    "E": "norms take their mean over it",
    "D": "attention scales by it, and positions rotate it",
    "X": "a router would choose among experts that are not there",
    "G": "groups are made of the batch",
    "C": "the capacity is a number of slots, of which some are empty anyway: raise the capacity factor",
}


def padded(sizes: Mapping[str, int], padding: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes with every dimension of `padding` rounded up to its multiple.

    Heads: K is rounded up alone; H to a multiple of both its own and K, with H/K never less than before.

    >>> padded({"H": 48, "K": 1, "F": 10}, {"H": 64, "F": 8})
    {'H': 64, 'K': 1, 'F': 16}
    >>> padded({"H": 12, "K": 3}, {"H": 8, "K": 4}), padded({"H": 12, "K": 4}, {"H": 16})
    ({'H': 16, 'K': 4}, {'H': 16, 'K': 4})
    """
    result = {dim: _up(size, padding.get(dim, 1)) for dim, size in sizes.items()}
    if "H" in sizes and "K" in sizes and {"H", "K"} & set(padding) and sizes["K"]:
        enough = sizes["H"] // sizes["K"] * result["K"]
        result["H"] = _up(enough, lcm(padding.get("H", 1), result["K"]))
    return result


def origins(sizes: Mapping[str, int], padding: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return, of each dimension that becomes larger, which real entry stands at each place; -1 for padding.

    Query heads stay with their key/value head: H is K blocks, each of them padded at its end.

    >>> {dim: places.tolist() for dim, places in origins({"H": 4, "K": 2, "V": 3}, {"H": 6, "V": 4}).items()}
    {'H': [0, 1, -1, 2, 3, -1], 'V': [0, 1, 2, -1]}
    """
    wide = padded(sizes, padding)
    return {dim: _origin(dim, sizes, wide) for dim in sizes if wide[dim] != sizes[dim]}


def _origin(dim: str, sizes: Mapping[str, int], wide: Mapping[str, int]) -> np.ndarray:
    blocks, groups = (sizes.get("K", 1), wide.get("K", 1)) if dim == "H" else (1, 1)
    result = np.full((groups, wide[dim] // groups), -1)
    result[:blocks, : sizes[dim] // blocks] = np.arange(sizes[dim]).reshape(blocks, -1)
    return result.reshape(-1)


def padding_faults(padding: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for every line of [padding] that cannot be."""
    for dim, multiple in padding.items():
        line = Line(dim, str(multiple), "padding")
        known = f"It holds {', '.join(PADDED)}."
        if dim in _REFUSED:
            yield line.at_key(f"dimension {dim} ({DIMENSIONS[dim]}) cannot be padded: {_REFUSED[dim]}.", known)
        elif dim not in PADDED:
            yield line.at_key(f"{dim!r} is no dimension that can be padded.", known)
        elif (whole(multiple) or 0) < 1:
            yield line.at_text(
                f"{dim} is padded to a multiple of {shown(multiple)}.", "Write a whole number, 1 or more."
            )


def proposal(dim: str, size: int, parts: int) -> str:
    """A sentence that proposes the line of [padding] for so many shards; empty where half would be waste."""
    fits = dim in PADDED and _up(size, parts) <= 2 * size
    return f"Or pad it: {dim} = {parts} in [padding]." if fits else ""


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
