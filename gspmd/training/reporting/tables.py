"""The table of specs, shapes and bytes that is printed before the first step; similar tensors share a row."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.markup import escape

from gspmd.annotate.spec import Spec
from gspmd.display.tables import Column, Sheet
from gspmd.display.units import amount_of_bytes

Placed = Mapping[str, tuple[Spec, tuple[int, ...]]]

# A narrow terminal omits shapes, but always shows names, specs and bytes.
_COLUMNS = (
    Column("tensor"),
    Column("spec"),
    Column("whole shape", goes=2),
    Column("on one device", goes=1),
    Column("bytes", "right"),
)


def tensors(title: str, placed: Placed, mesh: Mapping[str, int], itemsize: int | Mapping[str, int] = 4) -> Sheet:
    """Build a table of specs, shapes and bytes on one device, with a row for each tensor or group of similar tensors.

    Args:
        title: the title of the table.
        placed: the spec and the global shape of every tensor, by its name.
        mesh: sizes of the mesh axes.
        itemsize: the bytes of an element: one number for all tensors, or a mapping with a number for each name.
    """
    sheet, total = Sheet(title, _COLUMNS), 0
    for row in _alike(placed):
        local = row.spec.local_shape(row.shape, mesh)
        size = sum(int(np.prod(local)) * (itemsize if isinstance(itemsize, int) else itemsize[n]) for n in row.names)
        total += size
        spec = f"[cyan]{escape(str(row.spec))}[/]"
        sheet.add(escape(row.name), spec, _shape(row.shape), _shape(local), amount_of_bytes(size))
    sheet.add("all", "", "", "", amount_of_bytes(total), total=True)
    return sheet


@dataclass(frozen=True)
class _Row:
    """Tensors with the same spec and shape, shown in one row as `blocks.{0,1}.attention.{w_k,w_v}`."""

    names: tuple[str, ...]
    spec: Spec
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """All names combined into one name, with braces around the parts that differ."""
        parts = zip(*(name.split(".") for name in self.names))
        return ".".join(map(_braced, parts))


def _alike(placed: Placed) -> list[_Row]:
    """Group tensors of the same spec and shape whose names can be combined into one name with braces."""
    names = list(placed)
    rows = [_Row((name,), *placed[name]) for name in names]
    for position in (-1, -2, 1):
        rows = _joined(rows, position)
    return rows


def _joined(rows: Sequence[_Row], position: int) -> list[_Row]:
    """Join rows of the same spec and shape whose names differ only in the part at index `position`."""
    groups: dict[tuple, list[_Row]] = {}
    for row in rows:
        groups.setdefault((row.spec, row.shape, *_without(row, position)), []).append(row)
    return [_Row(sum((row.names for row in group), ()), group[0].spec, group[0].shape) for group in groups.values()]


def _without(row: _Row, position: int) -> tuple:
    """Return a key for joining rows: the name without the part at index `position`.

    If the name has no such part, the key is the whole name.
    """
    parts = row.name.split(".")
    if not -len(parts) <= position < len(parts):
        return position, row.name
    parts[position] = ""
    return tuple(parts)


def _braced(words: Iterable[str]) -> str:
    words = list(dict.fromkeys(words))
    if len(words) == 1:
        return words[0]
    if len(words) > 2 and words == [str(number) for number in range(len(words))]:
        return "{0.." + words[-1] + "}"
    return "{" + ",".join(words) + "}"


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) if shape else "scalar"
