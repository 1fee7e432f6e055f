"""The mesh of so many devices that fits a layout and divides a model's sizes."""

from collections.abc import Mapping
from typing import Any

from gspmd.annotate import LayoutError, report
from gspmd.annotate.errors import shown
from gspmd.display.units import mesh_text
from gspmd.layouts.keyed import KeyedTable
from gspmd.layouts.mesh import factorise, nearest
from gspmd.layouts.rules.check import faults_of

# Error messages propose numbers of devices that divide the sizes, up to this far from the requested one.
_NEAR = 33


def fitting_mesh(layout: KeyedTable, devices: int, sizes: Mapping[str, int] | None) -> dict[str, int]:
    """Return the mesh for a number of devices, the most similar to the default one that divides the sizes.

    Raises:
      LayoutError: none does; the nearest numbers of devices that would do are named.
    """
    first = factorise(devices, layout.axes, layout.factor)
    if sizes is None:
        return first
    mesh = _dividing(layout, devices, sizes)
    if mesh is not None:
        return mesh
    faults = faults_of(layout, sizes, first)
    error = report(LayoutError, f"cannot use layout '{layout.name}'{circumstances(sizes, first)}", faults)
    raise LayoutError(f"{error}{_devices_that_do(layout, devices, sizes)}", error.faults)


def circumstances(sizes: Mapping[str, int] | None, mesh: Any) -> str:
    """Sizes and mesh as an error names them: " for the sizes B=8 on the mesh x=2"."""
    given = f" for the sizes {', '.join(f'{d}={shown(n)}' for d, n in sizes.items())}" if sizes else ""
    shape = mesh if mesh is None or isinstance(mesh, Mapping) else mesh.shape
    return given + (f" on the mesh {mesh_text(shape)}" if shape else "")


def _dividing(layout: KeyedTable, devices: int, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """The mesh of so many devices that divides the sizes, most similar to the default one; None if none does."""
    for mesh in nearest(factorise(devices, layout.axes, layout.factor), layout.factor):
        if not faults_of(layout, sizes, mesh):
            return mesh
    return None


def _devices_that_do(layout: KeyedTable, devices: int, sizes: Mapping[str, int]) -> str:
    """A sentence with the nearest numbers below and above that divide the sizes; empty if none is near."""
    below, above = range(devices - 1, max(0, devices - _NEAR), -1), range(devices + 1, devices + _NEAR)
    nearest_of = (next((n for n in side if _dividing(layout, n, sizes)), 0) for side in (below, above))
    numbers = [str(n) for n in nearest_of if n]
    return f"\n  With {' or '.join(numbers)} device{'s' * (numbers != ['1'])} they divide." if numbers else ""
