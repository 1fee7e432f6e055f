"""The sizes and the mesh that a layout is checked for, and what is wrong with a spec on them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gspmd.annotate import Fault, Spec
from gspmd.layouts.mesh import complete
from gspmd.layouts.rules.microbatches import microbatches, named, of_microbatch
from gspmd.layouts.rules.padding import padded, padding_faults, proposal
from gspmd.layouts.rules.table import LayoutTable


class GivenSizes:
    """Sizes and mesh to check specs against; dimensions without a size are assumed to divide."""

    def __init__(self, sizes: Mapping[str, int], mesh: Mapping[str, int], microbatches: int = 1, *, pads: bool = True):
        # G is B by default, and is checked only if there are experts.
        self.sizes = {**({"G": sizes["B"]} if {"B", "X"} <= set(sizes) else {}), **sizes}
        self.mesh, self.microbatches, self.pads = dict(mesh), microbatches, pads

    def faults(self, spec: Spec) -> list[Fault]:
        wrong = spec.faults({**dict.fromkeys(spec.dims, 0), **self.sizes}, self.mesh)
        return [self._of_size(fault, *fault.cause) if fault.cause else fault for fault in wrong]

    def _of_size(self, fault: Fault, dim: str, size: int, parts: int) -> Fault:
        """The fault of a size that does not divide, with its cause, and with padding among the remedies."""
        remedy = " ".join(filter(None, (fault.remedy, proposal(dim, size, parts) if self.pads else "")))
        fault = replace(fault, remedy=remedy, cause=self._cause(dim, size, parts))
        if self.microbatches > 1 and fault.cause[0] == "B":
            return named(fault, self.microbatches)
        return fault

    def _cause(self, dim: str, size: int, parts: int) -> tuple:
        """The cause of a size that does not divide; G and B of one size count as one cause."""
        return "B" if dim == "G" and size == self.sizes.get("B") else dim, size, parts


def given_sizes(layout: LayoutTable, sizes: Mapping[str, int], mesh: Any) -> GivenSizes:
    """Return the sizes, padded where the layout pads them, and the mesh with every axis of the layout (None: all 1).

    Where they say how many microbatches M there are, they are those of one microbatch.
    """
    axes = {axis: size for axis, size in complete(mesh or {}, layout.axes).items() if axis in layout.axes}
    sizes, count = of_microbatch(layout, sizes), microbatches(layout, sizes)
    wide = {} if any(padding_faults(layout.padding)) else padded(sizes, layout.padding)
    return GivenSizes(wide, axes, count, pads=not layout.own)  # the models that come with gspmd alone can pad
