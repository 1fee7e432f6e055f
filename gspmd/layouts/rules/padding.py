"""Dimensions that a layout pads to a multiple, where sizes do not divide: which, to what, and what is real in them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Padded:
    """A dimension that is longer than what is real in it: runs of real entries, each at the start of a longer run.

    Attributes:
      runs: of real entries; one for each key/value head in H, one in every other dimension.
      length: real entries in each.
      wide_runs, wide_length: with the padding.

    Example:
      >>> Padded(2, 2, 2, 3).origins.tolist()
      [0, 1, -1, 2, 3, -1]
    """

    runs: int
    length: int
    wide_runs: int
    wide_length: int

    @property
    def size(self) -> int:
        """Number of entries, padding and all."""
        return self.wide_runs * self.wide_length

    @property
    def real(self) -> int:
        """Number of real entries."""
        return self.runs * self.length

    @property
    def origins(self) -> np.ndarray:
        """Return the real entry that stands at each place; -1 for padding."""
        places = np.full((self.wide_runs, self.wide_length), -1)
        places[: self.runs, : self.length] = np.arange(self.real).reshape(self.runs, self.length)
        return places.reshape(-1)


def paddings(sizes: Mapping[str, int], wide: Mapping[str, int]) -> dict[str, Padded]:
    """Return every dimension that is longer in `wide`; query heads stay with their key/value head.

    >>> paddings({"H": 4, "K": 2, "V": 3}, {"H": 6, "K": 2, "V": 3})
    {'H': Padded(runs=2, length=2, wide_runs=2, wide_length=3)}
    """
    result = {}
    for dim in (dim for dim in sizes if wide[dim] != sizes[dim]):
        runs, wide_runs = (sizes["K"], wide["K"]) if dim == "H" and "K" in sizes else (1, 1)
        result[dim] = Padded(runs, sizes[dim] // runs, wide_runs, wide[dim] // wide_runs)
    return result


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
