"""The devices of a mesh as a grid of cells; in each cell, the block that the device holds is filled."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, prod

from gspmd.display.theme import fill
from gspmd.figures.canvas import Canvas, number
from gspmd.figures.ownership import Ownership

MOST = 64
"""The maximum number of devices that are drawn.

Of a larger mesh only some devices are drawn: along each axis either all, or the first few and the last, or only the
first.
"""
_ABREAST = 8
"""The maximum number of cells in a row."""
_THIN = 2.5
"""Minimum width and height of a filled block."""


@dataclass(frozen=True)
class Cell:
    """A device that is drawn: its number, its column and row in the grid, and the gaps left of it and above it."""

    device: int
    column: int
    row: int
    gaps: tuple[int, int]


@dataclass(frozen=True)
class MeshGrid:
    """The arrangement of a mesh: the last axis runs to the right, the second to last down, and all others form panels.

    Attributes:
      mesh: the size of every mesh axis.
    """

    mesh: Mapping[str, int]

    @cached_property
    def shown(self) -> dict[str, list[int]]:
        """The coordinates drawn along each axis: either all, or the first few and the last, or only the first."""
        counts = {axis: size for axis, size in self.mesh.items() if size > 1}
        while prod(counts.values()) > MOST:
            longest = max(counts, key=lambda axis: counts[axis])
            counts[longest] = max(1, ceil(counts[longest] / 2))
        return {axis: [*range(count - 1), self.mesh[axis] - 1] if count > 1 else [0] for axis, count in counts.items()}

    @property
    def drawn(self) -> int:
        """The number of devices that are drawn."""
        return prod(map(len, self.shown.values()))

    @property
    def elided(self) -> str:
        """The caption, such as `64 of 256 devices are drawn, a=0 and b=0 only`, or "" if all devices are drawn."""
        devices = prod(self.mesh.values())
        if self.drawn == devices:
            return ""
        alone = " and ".join(f"{axis}=0" for axis, places in self.shown.items() if len(places) == 1)
        return f"{self.drawn} of {devices:,} devices are drawn" + (f", {alone} only" if alone else "")

    @cached_property
    def _levels(self) -> list[tuple[str, int, int, int]]:
        """For every axis, from last to first: its name, its number of columns, and the size of one coordinate.

        The size is the width and the height that one coordinate takes up, counted in cells.
        """
        levels, wide, high = [], 1, 1
        for level, (axis, places) in enumerate(reversed(self.shown.items())):
            fitting = max(1, _ABREAST // wide)
            columns = min(len(places), fitting)
            if level == 1 and len(places) <= _ABREAST:
                columns = 1
            levels.append((axis, columns, wide, high))
            wide, high = wide * columns, high * ceil(len(places) / columns)
        return levels

    def cells(self) -> Iterator[Cell]:
        """Yield the devices that are drawn."""
        strides: dict[str, int] = {}
        size = 1
        for axis in reversed(list(self.mesh)):
            strides[axis] = size
            size *= self.mesh[axis]
        axes = list(self.shown)
        for places in product(*(range(len(self.shown[axis])) for axis in axes)):
            at = dict(zip(axes, places))
            column = row = across = down = 0
            for level, (axis, columns, wide, high) in enumerate(self._levels):
                y, x = divmod(at[axis], columns)
                column, row = column + x * wide, row + y * high
                across, down = across + (x if wide > 1 or level > 1 else 0), down + (y if high > 1 or level > 1 else 0)
            device = sum(strides[axis] * self.shown[axis][place] for axis, place in at.items())
            yield Cell(device, column, row, (across, down))

    @property
    def columns(self) -> int:
        """The number of cells in a row."""
        return 1 + max(cell.column for cell in self.cells())

    def named(self) -> str:
        """Return a sentence that says in which direction of the picture each mesh axis runs."""
        ways = []
        for level, (axis, columns, *_) in enumerate(self._levels):
            rows = ceil(len(self.shown[axis]) / columns)
            way = "in rows" if columns > 1 and rows > 1 else "across" if columns > 1 or rows == 1 else "down"
            ways.append(f"{axis} {way}" + (" by panel" if level > 1 else ""))
        return ", ".join(reversed(ways))


@dataclass(frozen=True)
class CellSize:
    """The sizes of a grid's cells, in CSS pixels; `head` is the height of a device's number, 0 to draw no numbers."""

    wide: float
    high: float
    head: float
    gap: float
    panel: float


def extent(mesh: Mapping[str, int], size: CellSize) -> tuple[float, float]:
    """Return the width and height of the picture of a mesh, in CSS pixels."""
    corners = [_corner(cell, size) for cell in MeshGrid(mesh).cells()]
    return max(x for x, _ in corners) + size.wide, max(y for _, y in corners) + size.head + size.high


def _corner(cell: Cell, size: CellSize) -> tuple[float, float]:
    left = cell.column * (size.wide + size.gap) + cell.gaps[0] * size.panel
    return left, cell.row * (size.high + size.head + size.gap) + cell.gaps[1] * size.panel


def draw_grid(
    canvas: Canvas, x: float, y: float, held: Ownership, size: CellSize, names: Sequence[int] | None = None
) -> None:
    """Draw the devices of a mesh, each with the block that it holds.

    Args:
        canvas: the canvas to draw on.
        x, y: the upper left corner of the grid.
        held: the blocks of the devices.
        size: the sizes of the cells.
        names: the devices' ids, in the order of the mesh; by default 0, 1, ...
    """
    for cell in MeshGrid(held.mesh).cells():
        left, top = _corner(cell, size)
        name = cell.device if names is None else names[cell.device]
        _draw_cell(canvas, x + left, y + top, held, cell.device, name, size)


def _draw_cell(canvas: Canvas, x: float, y: float, held: Ownership, device: int, name: int, size: CellSize) -> None:
    block = held.block(device)
    with canvas.group(data_device=name, title=describe(held, device, name)):
        if size.head:
            canvas.text(x + 1, y + size.head - 4, str(name), "tiny soft")
            if held.spec.partial:
                canvas.text(x + size.wide - 1, y + size.head - 4, "+", "small strong ink", "end")
        top = y + size.head
        color = fill(block, held.blocks)
        canvas.rect(x, top, size.wide, size.high, "cell", rx=2)
        canvas.rect(x, top, size.wide, size.high, "tint", rx=2, fill=color)
        left, above, wide, high = _within(held, device, size.wide, size.high)
        more = {"data_summand": held.summand(device)} if held.spec.partial else {}
        canvas.rect(x + left, top + above, wide, high, "block", data_block=block, fill=color, **more)
        if held.spec.partial:
            canvas.parts.append(f'<path class="hatch" d="{_hatching(x + left, top + above, wide, high)}"/>')


def _within(held: Ownership, device: int, wide: float, high: float) -> tuple[float, float, float, float]:
    """Return left, top, width and height of a device's block in a rectangle that stands for the whole tensor.

    The last sharded dimension runs across, the second to last down, the third to last across again, and so on.
    """
    split = [(place, count) for place, count in zip(held.place(device), held.parts) if count > 1]
    at, size = [0.0, 0.0], [wide, high]
    for number_, (place, count) in enumerate(split):
        way = (len(split) - 1 - number_) % 2
        size[way] /= count
        at[way] += place * size[way]
    for way, whole in enumerate((wide, high)):
        if size[way] < _THIN:  # A sliver would not be seen.
            at[way], size[way] = min(at[way], whole - _THIN), _THIN
    return at[0], at[1], size[0], size[1]


def _hatching(x: float, y: float, wide: float, high: float) -> str:
    """Return the path of diagonal lines that hatch a rectangle."""
    step, lines = 5.0, []
    for count in range(1, ceil((wide + high) / step)):
        along = count * step
        first = (x + max(0.0, along - high), y + min(high, along))
        last = (x + min(wide, along), y + max(0.0, along - wide))
        lines.append("M{} {}L{} {}".format(*map(number, (*first, *last))))
    return "".join(lines)


def describe(held: Ownership, device: int, name: int) -> str:
    """Return a device's coordinates and the part of the tensor that it holds, in words."""
    at = ", ".join(f"{axis}={place}" for axis, place in held.coordinates(device).items())
    parts = [
        f"{dim} {part.start}:{part.stop}"
        for dim, part, count in zip(held.spec.dims, held.slices(device), held.parts)
        if count > 1
    ]
    summand = f", summand {held.summand(device) + 1} of {held.summands}" if held.spec.partial else ""
    return f"device {name} ({at}): {', '.join(parts) or 'the whole tensor'}{summand}"
