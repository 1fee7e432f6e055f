"""Tables printed before the first step: where every tensor stands, and what the step sends."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gspmd.annotate.spec import Spec

_NUMBERS = ("count", "bytes", "bytes sent per device")
Placed = Mapping[str, tuple[Spec, tuple[int, ...]]]


def tensors(title: str, placed: Placed, mesh: Mapping[str, int], itemsize: int | Mapping[str, int] = 4) -> Table:
    """A row for every tensor: its spec, its shape on one device, and the bytes of that.

    Args:
        title: what the tensors are.
        placed: a spec and a global shape by name.
        mesh: sizes by mesh axis.
        itemsize: bytes per element, of all or by name.
    """
    table = _table(title, "tensor", "spec", "whole shape", "on one device", "bytes")
    total = 0
    for name, (spec, shape) in placed.items():
        local = spec.local_shape(shape, mesh)
        size = int(np.prod(local)) * (itemsize if isinstance(itemsize, int) else itemsize[name])
        total += size
        table.add_row(name, str(spec), _shape(shape), _shape(local), human_bytes(size))
    table.add_section()
    table.add_row("[bold]all", "", "", "", f"[bold]{human_bytes(total)}")
    return table


def collectives(title: str, entries: Iterable[tuple[str, Sequence[str], float, float]]) -> Table:
    """A row for each kind of collective and the mesh axes it runs over.

    Args:
        title: of what.
        entries: kind, axes, how many, and wire bytes per device.
    """
    table = _table(title, "collective", "mesh axes", "count", "bytes sent per device")
    count = total = 0
    for kind, axes, times, size in sorted(entries, key=lambda entry: -entry[3]):
        table.add_row(kind, ", ".join(axes), f"{times:,.0f}", human_bytes(size))
        count, total = count + times, total + size
    table.add_section()
    table.add_row("[bold]all", "", f"[bold]{count:,.0f}", f"[bold]{human_bytes(total)}")
    return table


def human_bytes(size: float) -> str:
    """Bytes for people.

    Example:
        >>> human_bytes(1536), human_bytes(12), human_bytes(3 * 2**30)
        ('1.50 KiB', '12 B', '3.00 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, header_style="dim")
    for column in columns:
        side = "right" if column in _NUMBERS else "left"
        table.add_column(column, justify=side, style="cyan" if column == "spec" else None, no_wrap=True)
    return table


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) if shape else "scalar"


def step_entries(program: Any) -> list[tuple[str, Sequence[str], float, float]]:
    """The planned collectives of a traced program, by kind and axes: kind, axes, how many, wire bytes per device."""
    sums: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
    for step, trips, _ in program.steps:
        if step.wire_bytes:
            count, size = sums.get((step.kind, tuple(step.axes)), (0, 0))
            sums[step.kind, tuple(step.axes)] = count + trips, size + trips * step.wire_bytes
    return [(kind, axes, count, size) for (kind, axes), (count, size) in sums.items()]
