"""TPU slices that are not attached: their devices as the TPU compiler describes them, and meshes over their torus."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from gspmd.annotate.errors import PlanError, listed, shown
from gspmd.audit.offline.libtpu import require_libtpu, slice_devices
from gspmd.audit.offline.names import POD_CHIPS, read_name, shapes
from gspmd.audit.offline.torus import lay, nearest
from gspmd.display.units import mesh_text
from gspmd.hardware.chips import Chip
from gspmd.hardware.chips import chip as chip_named


@dataclass(frozen=True)
class Topology:
    """A TPU slice to compile for.

    Leaves out: twisted tori, broken chips, and the bandwidth between the two devices of one chip.

    Attributes:
        name: canonical, such as `tpu-v4:4x4x4`.
        chip: the figures of one device.
        shape: chips along each torus axis.
        devices: devices to compile for, not to run on; in torus order, last axis fastest, devices of one chip next to
            each other.
    """

    name: str
    chip: Chip = field(repr=False)
    shape: tuple[int, ...]
    devices: tuple[jax.Device, ...] = field(repr=False)

    def __reduce__(self) -> tuple:
        return topology, (self.name,)  # The compiler's devices cannot be pickled, and are recreated.

    @property
    def num_devices(self) -> int:
        """Devices of the slice: its chips, or twice as many if a chip is two devices."""
        return len(self.devices)

    @property
    def cores(self) -> int:
        """Number of devices of one chip: two on TPU v3 and TPU7x, one otherwise."""
        return len(self.devices) // prod(self.shape)

    def mesh(self, axes: Mapping[str, int], axis_type: "str | AxisType" = "explicit") -> Mesh:
        """Make a mesh over the slice, in which each mesh axis is one or several whole torus axes if the sizes allow it.

        Args:
            axes: mesh axis -> size; among equally good layouts, earlier mesh axes take earlier torus axes.
            axis_type: "explicit", "auto", or a `jax.sharding.AxisType`.

        Raises:
            PlanError: the sizes do not multiply to the number of devices, or the axis type is unknown.
        """
        if not isinstance(axes, Mapping) or not all(isinstance(axis, str) for axis in axes):
            raise PlanError(
                f"cannot lay the mesh {shown(axes)} over {self.name}: it does not say which axis has which size.\n"
                "  Give sizes by name, such as {'x': 4, 'y': 4, 'z': 4}."
            )
        sizes, types = tuple(axes.values()), (_axis_type(axis_type),) * len(axes)
        if not all(map(_is_size, sizes)) or prod(sizes) != self.num_devices:
            raise PlanError(self._wrong(axes))
        rows = lay((*self.shape, self.cores), sizes)
        parts = np.array(self.devices, dtype=object).reshape([part for row in rows for part in row])
        order = [row * len(sizes) + axis for axis in range(len(sizes)) for row in range(len(rows))]
        return Mesh(parts.transpose(order).reshape(sizes), tuple(axes), axis_types=types)

    def _wrong(self, axes: Mapping[str, int]) -> str:
        count = f" ({prod(axes.values())} in all)" if axes and all(map(_is_size, axes.values())) else ""
        laid = f"{mesh_text(axes) or 'without axes'}{count}"
        fact = f"cannot lay the mesh {laid} over {self.name}, which has {self.num_devices} devices."
        asked = {axis: size if _is_size(size) else 1 for axis, size in axes.items()} or {"x": 1}
        fits = [mesh_text(dict(zip(asked, sizes))) for sizes in nearest(self.num_devices, tuple(asked.values()))]
        return f"{fact}\n  The sizes have to multiply to {self.num_devices}, as in {listed(fits, 'or')}."

    def rings(self, mesh: Mesh) -> dict[str, tuple[int, ...]]:
        """Return for each axis of a mesh over this slice the sizes of the torus axes that it spans.

        An axis that spans no box of the torus counts as one ring. The two devices of one chip are not a ring.

        Example:
            >>> slice64 = topology("tpu-v4:4x4x4")                  # doctest: +SKIP
            >>> slice64.rings(slice64.mesh({"x": 16, "y": 4}))      # doctest: +SKIP
            {'x': (4, 4), 'y': (4,)}
        """
        if not all(hasattr(device, "coords") for device in getattr(getattr(mesh, "devices", None), "flat", (None,))):
            raise PlanError(
                f"cannot tell the rings of {shown(mesh)}: it is no mesh over a slice of TPUs.\n"
                f"  Make it with topology({self.name!r}).mesh(...)."
            )
        return {axis: _torus_axes(mesh, number) for number, axis in enumerate(mesh.axis_names)}


def _torus_axes(mesh: Mesh, number: int) -> tuple[int, ...]:
    along = np.moveaxis(mesh.devices, number, 0).reshape(mesh.devices.shape[number], -1)[:, 0]
    places = list(zip(*(device.coords for device in along)))
    spread = tuple(len(set(place)) for place in places)
    cores = len({device.core_on_chip for device in along})
    box = prod(spread) * cores == len(along)
    return tuple(size for size in spread if size > 1) if box else (len(along),)


def topology(name: str) -> Topology:
    """Describe a TPU slice, with its devices and its chip, by the real compiler; starts no backend, needs no TPU.

    Args:
        name: chip and torus: `tpu-v3:4x4`, `tpu-v4:4x4x4`, `tpu-v5e:16x16`, `tpu-v5p:8x8x16`, `tpu-v6e:16x16`,
            `tpu7x:4x4x4` and other sizes; `v4:4x4x4` and `TPU v4:4x4x4` are read too.

    Returns:
        The slice; the same object for the same name, so that meshes over it are equal.

    Raises:
        PlanError: the slice does not exist; libtpu is missing, is not the version that this JAX needs, or refuses.

    Example:
        >>> topology("v5p:4x4x8").mesh({"data": 8, "model": 16}).devices.shape  # doctest: +SKIP
        (8, 16)
        >>> topology("tpu-v5e:4x4x4")
        Traceback (most recent call last):
        gspmd.PlanError: there is no topology 'tpu-v5e:4x4x4': tpu-v5e is a 2D torus, and 4x4x4 has 3 dimensions.
          Did you mean 'tpu-v5e:4x4'? Known: tpu-v3:4x4, tpu-v4:4x4x4, tpu-v5e:4x4, ...

    Source: Google Cloud documentation, 'TPU v3' to 'TPU7x': dimensions of the torus, chips of a pod.
    """
    chip, shape = read_name(name)
    require_libtpu(name)
    return _slice(chip, shape)


def slices(chip: Chip | str) -> Iterator[Topology]:
    """Yield the slices of a chip from the smallest to a whole pod, doubling in size, each as near a cube as possible.

    Raises:
        PlanError: no chip has this name, or the chip is no TPU.
    """
    chip = chip_named(chip)
    if chip.name not in POD_CHIPS:
        raise PlanError(f"{chip.name} comes in no slices.\n  Those that do: {', '.join(POD_CHIPS)}.")
    for shape in shapes(chip):
        yield topology(f"{chip.name}:{'x'.join(map(str, shape))}")


def _is_size(size: object) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and bool(size > 0)


def _axis_type(kind: "str | AxisType") -> AxisType:
    known = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
    named = known.get(kind) if isinstance(kind, str) else kind
    if not isinstance(named, AxisType) or named not in known.values():
        raise PlanError(f"no mesh axis has the type {shown(kind)}.\n  Take 'explicit' or 'auto'.")
    return named


@cache
def _slice(chip: Chip, shape: tuple[int, ...]) -> Topology:
    sizes = "x".join(map(str, shape))
    return Topology(f"{chip.name}:{sizes}", chip, shape, slice_devices(chip, sizes))
