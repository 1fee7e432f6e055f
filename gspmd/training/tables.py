"""Tables printed before the first step: where every tensor stands, and what the step sends."""

from collections.abc import Mapping, Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gspmd.annotate.spec import Spec

_NUMBERS = ("count", "bytes", "bytes sent per device")
Sent = Mapping[tuple[str, tuple[str, ...]], tuple[int, int]]
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


def collectives(title: str, sent: Sent) -> Table:
    """A row for each kind of collective and the mesh axes it runs over, most bytes first.

    Args:
        title: of what.
        sent: kind and axes to how many and the bytes that one device sends, as `ProgramPlan.by_kind_and_axes` has it.
    """
    table = _table(title, "collective", "mesh axes", "count", "bytes sent per device")
    count = total = 0
    for (kind, axes), (times, size) in sorted(sent.items(), key=lambda entry: -entry[1][1]):
        table.add_row(kind, ", ".join(axes), f"{times:,}", human_bytes(size))
        count, total = count + times, total + size
    table.add_section()
    table.add_row("[bold]all", "", f"[bold]{count:,}", f"[bold]{human_bytes(total)}")
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
