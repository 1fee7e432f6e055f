"""The figure of a tensor on a mesh: the block that each device holds."""

from collections.abc import Mapping, Sequence

from gspmd.annotate.spec import Spec
from gspmd.display.runs import Run
from gspmd.display.units import mesh_text
from gspmd.figures.canvas import Canvas
from gspmd.figures.figure import Figure
from gspmd.figures.grid import CellSize, MeshGrid, draw_grid, extent
from gspmd.figures.ownership import Ownership, sizes_text
from gspmd.figures.tensor import tensor_text

_FEW, _SOME, _MANY = CellSize(62, 46, 15, 8, 10), CellSize(48, 36, 14, 6, 8), CellSize(36, 27, 13, 4, 8)
_NARROW = 300.0


def blocks_figure(
    spec: Spec,
    sizes: Mapping[str, int] | Sequence[int],
    mesh: Mapping[str, int],
    *,
    devices: Sequence[int] | None = None,
) -> Figure:
    """Draw a tensor on a mesh: each device is a cell, in which the device's block of the tensor is filled.

    Copies of a block have the same color and position; summands of a partial sum are hatched and have a plus sign. On a
    mesh of more than 64 devices only some devices are drawn: along each axis either all, or the first few and the last,
    or only the first.

    Args:
        spec: a `gspmd.Spec` without open dimensions.
        sizes: the size of every dimension by letter, or the shape of the whole tensor.
        mesh: the size of every mesh axis, from major to minor.
        devices: the ids of the devices in the order of the mesh; by default 0, 1, ...

    Returns:
        The figure. Every device is an SVG group whose attribute `data-device` is the device's id. The group contains a
        rectangle, whose attribute `data-block` is the index of the device's block in row-major order. For a partial sum
        the rectangle also has `data-summand`, the index of the device's summand.

    Raises:
        SpecError: the spec does not fit the sizes and the mesh.
    """
    spec.check(sizes, mesh)
    shape = tuple(sizes[dim] for dim in spec.dims) if isinstance(sizes, Mapping) else tuple(sizes)
    held, grid, canvas = Ownership(spec, shape, dict(mesh)), MeshGrid(mesh), Canvas()
    size = _FEW if grid.columns <= 4 else _SOME if grid.columns <= 6 else _MANY
    named = spec.runs() if spec.dims or spec.partial or spec.reduced else []
    with canvas.group(data_spec=spec):
        y = canvas.lines(0, 0, [[*named, Run(f"  {sizes_text(shape)}")]], 600, "title ink", 19)
    lines, wide = _captions(held, grid, mesh), max(extent(mesh, size)[0], _NARROW)
    for line in lines:
        y = canvas.lines(0, y, [[Run(word + " ")] for word in line.split()], wide, "small soft", 15)
    draw_grid(canvas, 0, y - 4, held, size, devices)
    return canvas.figure(
        f"{spec} {sizes_text(shape)} on {mesh_text(mesh) or 'one device'}".strip(),
        " ".join(f"{line}." for line in lines),
        lambda: tensor_text(held, devices),
    )


def _captions(held: Ownership, grid: MeshGrid, mesh: Mapping[str, int]) -> list[str]:
    axes = "mesh " + " ".join(f"{axis}={size}" for axis, size in mesh.items()) if mesh else "one device"
    copies = f", {held.copies:,} copies of each" if held.blocks > 1 and held.copies > 1 else ""
    lines = [axes + (f" ({grid.named()})" if len(grid.shown) > 1 else ""), held.summary + copies]
    return [*lines, grid.elided] if grid.elided else lines
