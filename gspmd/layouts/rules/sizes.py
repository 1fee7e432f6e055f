"""The sizes that specs are checked against: padded to multiples, and reduced to one microbatch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import numpy as np

from gspmd.annotate import Fault, Spec
from gspmd.annotate.errors import shown
from gspmd.annotate.spec import fits
from gspmd.annotate.validation import whole
from gspmd.layouts.mesh import complete
from gspmd.layouts.rules.faults import Line
from gspmd.layouts.rules.keys import DIMENSIONS
from gspmd.layouts.table import LayoutTable

# -- padding ----------------------------------------------------------------------------------------------------------

#: The dimensions that may be padded, each with the way in which `gspmd_models` gives padding no effect. Heads may be
#: padded for PaLM's 48 heads on 64 chips (Pope et al. 2022, section 4).
PADDED = {
    "H": "the attention core's result is 0 there; every key/value head has at least as many query heads as before",
    "K": "padded together with H, so that each real key/value head keeps its query heads; treated as H",
    "F": "the hidden layer is 0 there, or the rows of an expert's second matrix are 0",
    "V": "logits are -1e30 there",
    "T": "room in the cache that no position reaches",
}

#: The reasons why each of the other dimensions may not be padded.
_REFUSED = {
    "B": "the caller chooses the batch; give alternatives, a list of specs, for batches that fill fewer mesh axes",
    "L": "the caller pads the text, and knows which tokens are real",
    "E": "norms average over it",
    "D": "attention scales by it, and positions rotate it",
    "X": "a router would choose among experts that are not there",
    "G": "groups are made of the batch",
    "C": "some slots of the capacity are empty anyway: raise the capacity factor",
}


def padded(sizes: Mapping[str, int], padding: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes, with every dimension in `padding` rounded up to a multiple of the number given there.

    K is rounded up on its own. H is rounded up to a common multiple of its number in `padding` and of the padded K, so
    that H/K never decreases.

    >>> padded({"H": 48, "K": 1, "F": 10}, {"H": 64, "F": 8})
    {'H': 64, 'K': 1, 'F': 16}
    >>> padded({"H": 12, "K": 3}, {"H": 8, "K": 4}), padded({"H": 12, "K": 4}, {"H": 16})
    ({'H': 16, 'K': 4}, {'H': 16, 'K': 4})
    """
    result = {dim: _up(size, padding.get(dim, 1)) for dim, size in sizes.items()}
    if "H" in sizes and "K" in sizes and {"H", "K"} & set(padding) and sizes["K"]:
        # There are at least as many query heads per key/value head as without padding, so that no query head changes
        # its group.
        enough = sizes["H"] // sizes["K"] * result["K"]
        result["H"] = _up(enough, lcm(padding.get("H", 1), result["K"]))
    return result


@dataclass(frozen=True)
class Padded:
    """A padded dimension, in which each run of real entries is followed by padding.

    There may also be runs that consist of padding only.

    Attributes:
      runs: the number of runs of real entries. Dimension H has one run for each key/value head. Any other dimension has
        one run.
      length: the number of real entries per run.
      wide_runs, wide_length: the number and the length of the runs with their padding.

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
        """Number of entries, including padding."""
        return self.wide_runs * self.wide_length

    @property
    def real(self) -> int:
        """Number of real entries."""
        return self.runs * self.length

    @property
    def origins(self) -> np.ndarray:
        """The index of the real entry at each position, or -1 where there is padding."""
        places = np.full((self.wide_runs, self.wide_length), -1)
        places[: self.runs, : self.length] = np.arange(self.real).reshape(self.runs, self.length)
        return places.reshape(-1)


def paddings(sizes: Mapping[str, int], wide: Mapping[str, int]) -> dict[str, Padded]:
    """Return the padding of each dimension that is longer in `wide` than in `sizes`.

    Query heads stay with their key/value heads.

    >>> paddings({"H": 4, "K": 2, "V": 3}, {"H": 6, "K": 2, "V": 3})
    {'H': Padded(runs=2, length=2, wide_runs=2, wide_length=3)}
    """
    result = {}
    for dim in (dim for dim in sizes if wide[dim] != sizes[dim]):
        runs, wide_runs = (sizes["K"], wide["K"]) if dim == "H" and "K" in sizes else (1, 1)
        result[dim] = Padded(runs, sizes[dim] // runs, wide_runs, wide[dim] // wide_runs)
    return result


def padding_faults(padding: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for every invalid line of [padding]."""
    for dim, multiple in padding.items():
        line = Line(dim, str(multiple), "padding")
        known = f"It holds {', '.join(PADDED)}."
        if dim in _REFUSED:
            yield line.at_key(f"dimension {dim} ({DIMENSIONS[dim]}) cannot be padded: {_REFUSED[dim]}.", known)
        elif dim not in PADDED:
            yield line.at_key(f"{dim!r} is not a dimension that can be padded.", known)
        elif (whole(multiple) or 0) < 1:
            yield line.at_text(
                f"{dim} is padded to a multiple of {shown(multiple)}.", "Write a whole number, 1 or more."
            )


def proposal(dim: str, size: int, parts: int) -> str:
    """Return a sentence that proposes a line of [padding] that makes the dimension divisible into `parts` shards.

    The sentence is empty if the dimension cannot be padded, or if padding would more than double its size.
    """
    fits = dim in PADDED and _up(size, parts) <= 2 * size
    of_model = f", or vocabulary_multiple = {parts} in [model] (--model.vocabulary-multiple)" if dim == "V" else ""
    return f"Or pad it: {dim} = {parts} in [padding]{of_model}." if fits else ""


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# -- microbatches -----------------------------------------------------------------------------------------------------


def microbatches(layout: LayoutTable, sizes: Mapping[str, int]) -> int:
    """Return the number of microbatches, which is M in `sizes`.

    The result is 1 if M is not given, or if M is a custom dimension of the layout.
    """
    return 1 if "M" in layout.dimensions else sizes.get("M", 1)


def of_microbatch(layout: LayoutTable, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of one microbatch: B is divided by the number of microbatches.

    If every sequence is a token group, G is divided by this number too.
    """
    count, batch = microbatches(layout, sizes), sizes.get("B")
    if count < 2 or batch is None:
        return dict(sizes)
    groups = {"G": batch // count} if sizes.get("G") == batch else {}
    return {**sizes, "B": batch // count, **groups}


def microbatch_faults(layout: LayoutTable, sizes: Mapping[str, int]) -> list[Fault]:
    """Return a fault if the number of microbatches does not divide the batch."""
    count, batch = microbatches(layout, sizes), sizes.get("B")
    if batch is None or (count > 0 and batch % count == 0):
        return []
    text = f"B={batch}, M={count}"
    return [Fault(text, text.index("M"), len(text), f"a batch of {batch} cannot be cut into {count} microbatches.",
                  "Use a number that divides the batch.")]  # fmt: skip


# -- sizes and mesh ---------------------------------------------------------------------------------------------------


class GivenSizes:
    """The sizes and the mesh that specs are checked against.

    A dimension without a size counts as divisible by every number of shards.
    """

    def __init__(self, sizes: Mapping[str, int], mesh: Mapping[str, int], microbatches: int = 1, *, pads: bool = True):
        # By default every sequence is a group; a model without experts has no groups.
        self.sizes = {**({"G": sizes["B"]} if {"B", "X"} <= set(sizes) else {}), **sizes}
        self.mesh, self.microbatches, self.pads = dict(mesh), microbatches, pads

    def faults(self, spec: Spec) -> list[Fault]:
        """Return the faults that a spec has for these sizes on this mesh."""
        # Dimensions without a size have 0, which any number of shards divides.
        if fits(spec, {dim: self.sizes.get(dim, 0) for dim in spec.dims}, self.mesh):
            return []
        wrong = spec.faults({**dict.fromkeys(spec.dims, 0), **self.sizes}, self.mesh)
        return [self._of_size(fault, *fault.cause) if fault.cause else fault for fault in wrong]

    def _of_size(self, fault: Fault, dim: str, size: int, parts: int) -> Fault:
        """Return the fault of a size that mesh axes do not divide, with padding as a further remedy."""
        # G is the batch unless it is given, so if the batch does not divide, both faults have this cause.
        caused_by = "B" if dim == "G" and size == self.sizes.get("B") else dim
        remedies = [fault.remedy, proposal(dim, size, parts) if self.pads else ""]
        if self.microbatches > 1 and caused_by == "B":
            remedies.append(f"That is the size of a microbatch, of which there are M={self.microbatches}.")
        return replace(fault, remedy=" ".join(filter(None, remedies)), cause=(caused_by, size, parts))


def given_sizes(layout: LayoutTable, sizes: Mapping[str, int], mesh: Any) -> GivenSizes:
    """Return the sizes and the mesh that the specs of a layout are checked against.

    The sizes are padded as the layout says. If they include M, the number of microbatches, the result has the sizes of
    one microbatch. The mesh has every axis of the layout; if no mesh is given, all axes have size 1.
    """
    # Undeclared axes are left out: they are reported once as faults of the mesh, not with every spec.
    axes = {axis: size for axis, size in complete(mesh or {}, layout.axes).items() if axis in layout.axes}
    sizes, count = of_microbatch(layout, sizes), microbatches(layout, sizes)
    wide = {} if any(padding_faults(layout.padding)) else padded(sizes, layout.padding)
    return GivenSizes(wide, axes, count, pads=not layout.own)  # only the models that come with gspmd can pad
