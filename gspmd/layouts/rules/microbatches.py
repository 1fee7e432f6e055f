"""Sizes of one microbatch: those of a batch, and M, the number of microbatches that it is cut into."""

from collections.abc import Mapping
from dataclasses import replace

from gspmd.annotate import Fault
from gspmd.layouts.rules.table import LayoutTable


def microbatches(layout: LayoutTable, sizes: Mapping[str, int]) -> int:
    """Return the number of microbatches that sizes have, 1 if they do not say; M may also be a user's own dimension."""
    return 1 if "M" in layout.dimensions else sizes.get("M", 1)


def of_microbatch(layout: LayoutTable, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the tensors of one microbatch: its part of B, and of G if every sequence is a group."""
    count, batch = microbatches(layout, sizes), sizes.get("B")
    if count < 2 or batch is None:
        return dict(sizes)
    groups = {"G": batch // count} if sizes.get("G") == batch else {}
    return {**sizes, "B": batch // count, **groups}


def microbatch_faults(layout: LayoutTable, sizes: Mapping[str, int]) -> list[Fault]:
    """Return a fault if a batch cannot be cut into so many microbatches."""
    count, batch = microbatches(layout, sizes), sizes.get("B")
    if batch is None or (count > 0 and batch % count == 0):
        return []
    text = f"B={batch}, M={count}"
    return [Fault(text, text.index("M"), len(text), f"a batch of {batch} cannot be cut into {count} microbatches.",
                  "Use a number that divides the batch.")]  # fmt: skip


def named(fault: Fault, count: int) -> Fault:
    """Return the fault of a size that does not divide, which says that it is that of a microbatch."""
    told = f"That is the size of a microbatch, of which there are M={count}."
    return replace(fault, remedy=f"{fault.remedy} {told}".strip())
