"""`gspmd.show`, which draws the blocks of an array and the devices that hold each block."""

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from gspmd.annotate import Spec, SpecError, mesh_sizes
from gspmd.annotate.arrays import placed_spec
from gspmd.annotate.errors import article, shown
from gspmd.figures.blocks import blocks_figure

if TYPE_CHECKING:
    from gspmd.figures.figure import Figure


def show(array: Any, sizes: Mapping[str, int] | Sequence[int] | str | None = None, mesh: Any = None) -> "Figure":
    """Show which device holds which block of an array of any rank, or of a tensor that is sharded as a spec says.

    Args:
        array: a `jax.Array`, a `jax.ShapeDtypeStruct` with a sharding, or a spec such as `"B_xLE_yz"`.
        sizes: if `array` is an array, the letters of its dimensions, such as `"BLE"`; by default A, B, C and so on.
            If `array` is a spec, the size of every dimension by its letter, or the shape.
        mesh: the size of every mesh axis, or a `jax.sharding.Mesh`. It is needed for a spec and refused for an array.

    Returns:
        A figure. A notebook shows it as a cell for each device, in which the device's block is filled. `print` draws a
        table of the blocks, each with the devices that hold it. `.save("blocks.svg")` writes a file. Copies of a block
        have the same color, and summands of a partial sum have a plus sign. On a mesh of more than 64 devices, only the
        first devices and the last along each axis are drawn.

    Raises:
        SpecError: the array has no sharding over a mesh, or its sharding is not known while it is traced; or there is
            not one letter for each dimension; or a spec does not fit the sizes and the mesh.

    Example:
        >>> print(show("B_xE_y partialsum-z", (8, 6), {"x": 2, "y": 2, "z": 2}))
        B_xE_y partialsum-z  8 × 6  on x=2 y=2 z=2: 4 blocks of 4 × 3, 2 summands
                 E 0:3   E 3:6
               ┌───────┬───────┐
        B 0:4  │ 0 + 1 │ 2 + 3 │
               ├───────┼───────┤
        B 4:8  │ 4 + 5 │ 6 + 7 │
               └───────┴───────┘

    Differs: `jax.debug.visualize_array_sharding` draws arrays of one and two dimensions, but no partial sums.
    """
    if isinstance(array, (str, Spec, jax.sharding.PartitionSpec)):
        spec = Spec.parse(array)  # type: ignore[arg-type]  # It refuses a PartitionSpec.
        if sizes is None or isinstance(sizes, str) or mesh is None:
            raise SpecError(
                f"cannot show '{spec}' without sizes and a mesh.\n  Write gspmd.show('B_xE', (8, 6), {{'x': 2}})."
            )
        axes, devices = mesh_sizes(mesh), _ids(mesh)
    else:
        if mesh is not None:
            raise SpecError("cannot show an array on a mesh other than its own.\n  Leave the mesh out, or give a spec.")
        spec, axes, devices = _read(array, sizes)
        sizes = tuple(array.shape)
    if spec.is_open:
        raise SpecError(f"cannot show '{spec}', which leaves a dimension to the compiler.\n  Name its mesh axes.")
    return blocks_figure(spec, sizes, axes, devices=devices)


def _read(array: Any, letters: Any) -> tuple[Spec, dict[str, int], list[int] | None]:
    """Return the spec of an array, the size of every mesh axis, and the ids of the mesh's devices in the mesh's order.

    The ids are None if the mesh is abstract.
    """
    sharding = jax.typeof(array).sharding if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    if sharding is None or not hasattr(array, "shape"):
        raise SpecError(
            f"cannot show {article(type(array).__name__)}: it has no sharding.\n"
            "  Give a jax.Array, or a spec with sizes and a mesh."
        )
    rank = len(array.shape)
    letters = ascii_uppercase[:rank] if letters is None else letters
    if not (isinstance(letters, str) and len(letters) == len(set(letters)) == rank <= len(ascii_uppercase)):
        raise SpecError(
            f"cannot show an array of {rank} dimensions as {shown(letters)}.\n"
            f"  Write one letter for each: '{ascii_uppercase[:rank]}'."
        )
    spec = placed_spec(array, tuple(letters))
    if isinstance(sharding, NamedSharding):
        return spec, dict(sharding.mesh.shape), _ids(sharding.mesh)
    if len(sharding.device_set) > 1:
        raise SpecError(
            f"cannot show an array with {article(type(sharding).__name__)}: it has no mesh axes.\n"
            "  Place it with jax.device_put(x, jax.NamedSharding(mesh, jax.P(...))), or with gspmd.annotate."
        )
    return spec, {}, [device.id for device in sharding.device_set]


def _ids(mesh: Any) -> list[int] | None:
    """Return the ids of a mesh's devices, or None if the mesh is abstract."""
    devices = getattr(mesh, "devices", None) if isinstance(mesh, jax.sharding.Mesh) else None
    return None if devices is None else [device.id for device in devices.flat]
