"""TPU slices and nodes of GPUs that are not attached: their devices, and meshes over these devices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from gspmd.annotate.errors import PlanError, listed, shown
from gspmd.audit.offline.cuda import COMPILER_OPTIONS, node_devices, require_cuda_plugin
from gspmd.audit.offline.libtpu import require_libtpu, slice_devices
from gspmd.audit.offline.names import Named, read_name, shapes
from gspmd.display.units import mesh_text
from gspmd.hardware.chips import Chip, slice_of
from gspmd.hardware.chips import chip as chip_named
from gspmd.hardware.links import over_slices
from gspmd.hardware.torus import lay, nearest


@dataclass(frozen=True)
class Topology:
    """One or several TPU slices, or nodes of GPUs, for which programs can be compiled.

    Leaves out: twisted tori; broken chips; the bandwidth between the two devices of one chip.

    Attributes:
        name: the canonical name, such as `tpu-v4:4x4x4`, `tpu-v5p:4x8x8*4` or `h100:16x8`.
        chip: the figures of one device. If there are several slices, each slice counts as a node.
        shape: for TPUs, the number of chips along each torus axis of one slice. For GPUs, the number of GPUs per node;
            if there are several nodes, the number of nodes comes first.
        devices: the devices. Programs can be compiled for these devices, but cannot run on them. TPU devices are listed
            slice by slice. Within a slice they are in torus order with the last axis fastest, and the devices of one
            chip are next to each other. GPUs are listed node by node.
        slices: number of TPU slices, which are connected by the data-centre network; 1 for GPUs.
    """

    name: str
    chip: Chip = field(repr=False)
    shape: tuple[int, ...]
    devices: tuple[jax.Device, ...] = field(repr=False)
    slices: int = field(default=1, repr=False)

    def __reduce__(self) -> tuple:
        return topology, (self.name,)  # The compiler's devices cannot be pickled, and are recreated.

    @property
    def num_devices(self) -> int:
        """Number of devices, which is the number of chips, or twice the number of chips if a chip is two devices."""
        return len(self.devices)

    @property
    def cores(self) -> int:
        """Number of devices per chip: two on TPU v3 and TPU7x, one on all other chips."""
        return len(self.devices) // (self.slices * prod(self.shape))

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Compiler options that make compiling possible without attached devices.

        `compile_offline` passes these options by default.
        """
        return dict(COMPILER_OPTIONS) if self.chip.is_switch else {}

    def mesh(self, axes: Mapping[str, int], axis_type: "str | AxisType" = "explicit") -> Mesh:
        """Make a mesh over the devices.

        On a TPU slice, each mesh axis consists of one or several whole torus axes, if the sizes allow this. If several
        assignments are equally good, earlier mesh axes get earlier torus axes. If there are several slices, they fill
        the mesh one after another. The first mesh axis, or the first few axes together, then extend over the slices,
        and the other axes lie within each slice. GPUs fill the mesh node by node, with the last mesh axis fastest.

        Args:
            axes: a mapping from mesh axes, in order, to sizes.
            axis_type: the type of all mesh axes: "explicit", "auto", or a `jax.sharding.AxisType`.

        Raises:
            PlanError: `axes` is not a mapping from names to sizes, the product of the sizes is not the number of
                devices, the first axes do not divide the slices evenly, or the axis type is unknown.
        """
        if not isinstance(axes, Mapping) or not all(isinstance(axis, str) for axis in axes):
            raise PlanError(
                f"cannot lay the mesh {shown(axes)} over {self.name}: it does not say which axis has which size.\n"
                "  Give sizes by name, such as {'x': 4, 'y': 4, 'z': 4}."
            )
        sizes, types = tuple(axes.values()), (_axis_type(axis_type),) * len(axes)
        if not all(map(_is_size, sizes)) or prod(sizes) != self.num_devices:
            raise PlanError(self._wrong(axes))
        across = over_slices(sizes, self.slices)
        if across is None:
            raise PlanError(self._uneven(axes))
        inside = tuple(size // part for size, part in zip(sizes, across))
        rows = (sizes,) if self.chip.is_switch else (across, *lay((*self.shape, self.cores), inside))
        parts = np.array(self.devices, dtype=object).reshape([part for row in rows for part in row])
        order = [row * len(sizes) + axis for axis in range(len(sizes)) for row in range(len(rows))]
        return Mesh(parts.transpose(order).reshape(sizes), tuple(axes), axis_types=types)

    def _uneven(self, axes: Mapping[str, int]) -> str:
        """Return the error message for a mesh whose first axes do not divide the slices evenly."""
        first, size = next((axis, size) for axis, size in axes.items() if size > 1)
        second = next((axis for axis in axes if axis != first), "y")
        meant = {first: self.slices, second: self.num_devices // self.slices}
        return (
            f"cannot lay the mesh {mesh_text(axes)} over {self.name}: {first}={size} does not divide its "
            f"{self.slices} slices.\n  The first axis lies over the slices: give it {self.slices}, or a divisor or "
            f"multiple of it, as in {mesh_text(meant)}."
        )

    def _wrong(self, axes: Mapping[str, int]) -> str:
        count = f" ({prod(axes.values())} in all)" if axes and all(map(_is_size, axes.values())) else ""
        laid = f"{mesh_text(axes) or 'without axes'}{count}"
        nodes = f", {self.shape[0]} nodes of {self.shape[1]}" if self.chip.is_switch and len(self.shape) > 1 else ""
        fact = f"cannot lay the mesh {laid} over {self.name}, which has {self.num_devices} devices{nodes}."
        asked = {axis: size if _is_size(size) else 1 for axis, size in axes.items()} or {"x": 1}
        fits = [mesh_text(dict(zip(asked, sizes))) for sizes in nearest(self.num_devices, tuple(asked.values()))]
        return f"{fact}\n  The sizes have to multiply to {self.num_devices}, as in {listed(fits, 'or')}."

    def rings(self, mesh: Mesh) -> dict[str, tuple[int, ...]]:
        """Return, for each mesh axis, the sizes of the torus axes of which it consists.

        A mesh axis whose devices do not form a rectangular block of the torus counts as one ring. The two devices of
        one chip do not form a ring, and several slices do not form a ring. GPUs are connected by switches and have no
        rings, so the result for GPUs is empty.

        Args:
            mesh: a mesh over the devices of this topology.

        Raises:
            PlanError: this is a topology of TPUs, and `mesh` is not a mesh over TPU devices.

        Example:
            >>> slice64 = topology("tpu-v4:4x4x4")                  # doctest: +SKIP
            >>> slice64.rings(slice64.mesh({"x": 16, "y": 4}))      # doctest: +SKIP
            {'x': (4, 4), 'y': (4,)}
        """
        if self.chip.is_switch:
            return {}
        if not all(hasattr(device, "coords") for device in getattr(getattr(mesh, "devices", None), "flat", (None,))):
            raise PlanError(
                f"cannot tell the rings of {shown(mesh)}: it is not a mesh over a slice of TPUs.\n"
                f"  Make it with topology({self.name!r}).mesh(...)."
            )
        return {axis: _torus_axes(mesh, number) for number, axis in enumerate(mesh.axis_names)}


def _torus_axes(mesh: Mesh, number: int) -> tuple[int, ...]:
    along = np.moveaxis(mesh.devices, number, 0).reshape(mesh.devices.shape[number], -1)[:, 0]
    along = [device for device in along if slice_of(device) == slice_of(along[0])]
    places = list(zip(*(device.coords for device in along)))
    spread = tuple(len(set(place)) for place in places)
    cores = len({device.core_on_chip for device in along})
    box = prod(spread) * cores == len(along)
    return tuple(size for size in spread if size > 1) if box else (len(along),)


def topology(name: str) -> Topology:
    """Return TPU slices, or nodes of GPUs, as the compiler for the chip describes them.

    No TPU or GPU needs to be attached, and no backend is started.

    Args:
        name: the name of a chip, followed by sizes. For a TPU the sizes are those of the torus, as in `tpu-v3:4x4`,
            `tpu-v4:4x4x4`, `tpu-v5e:16x16`, `tpu-v5p:8x8x16`, `tpu-v6e:16x16` and `tpu7x:4x4x4`; `v4:4x4x4` and
            `TPU v4:4x4x4` are accepted too. The name `tpu-v5p:4x8x8*4` means four slices, connected by the data-centre
            network. For GPUs on one node, the size is the number of GPUs, as in `h100:8`, `a100:8`, `a100-40gb:8`,
            `h200:8` and `b200:8`; fewer are accepted too. For several nodes, the sizes are the number of nodes and the
            number of GPUs per node, as in `h100:16x8` and `gb200:2x72`.

    Returns:
        The topology. The same name always gives the same object, so two meshes over its devices with the same axes are
        equal.

    Raises:
        PlanError: there is no such topology, or no compiler supports the GPU. Or the compiler (libtpu, or JAX's plugin
            for CUDA) is missing, is not the version that the installed JAX requires, or refuses the topology.

    Example:
        >>> topology("v5p:4x4x8").mesh({"data": 8, "model": 16}).devices.shape  # doctest: +SKIP
        (8, 16)
        >>> topology("v5p:4x8x8*4").mesh({"slices": 4, "x": 4, "y": 64}).devices.shape  # doctest: +SKIP
        (4, 4, 64)
        >>> topology("h100:32x8").mesh({"data": 32, "model": 8}).devices.shape  # doctest: +SKIP
        (32, 8)
        >>> topology("tpu-v5e:4x4x4")
        Traceback (most recent call last):
        gspmd.PlanError: there is no topology 'tpu-v5e:4x4x4': tpu-v5e is a 2D torus, and 4x4x4 has 3 dimensions.
          Did you mean 'tpu-v5e:4x4'? Known: tpu-v3:4x4, tpu-v4:4x4x4, tpu-v5e:4x4, ...

    Source: Google Cloud documentation, 'TPU v3' to 'TPU7x', for the dimensions of the torus and the chips of a pod. For
    GPUs, the data sheets named in `gspmd/hardware/chips.toml` and `gspmd/audit/offline/cards.py`.
    """
    named = read_name(name)
    (require_cuda_plugin if named.chip.is_switch else require_libtpu)(name, named.chip)
    return _described(named)


def slices(chip: Chip | str, count: int = 1) -> Iterator[Topology]:
    """Yield topologies of a chip, from the smallest slice to a full pod.

    Each slice is twice as large as the one before, and is nearly a cube. For a GPU, yield parts of a node, and then 1,
    2, 4, ... whole nodes.

    Args:
        chip: a chip, or the name of a chip.
        count: number of slices of each topology; 1 for GPUs.

    Raises:
        PlanError: no chip has the name `chip`, or the compiler for the chip is missing (the same errors that `topology`
            raises).
    """
    chip = chip_named(chip)
    for shape in shapes(chip, count):
        yield topology(Named(chip, shape, count).name)


def _is_size(size: object) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and bool(size > 0)


def _axis_type(kind: "str | AxisType") -> AxisType:
    known = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
    named = known.get(kind) if isinstance(kind, str) else kind
    if not isinstance(named, AxisType) or named not in known.values():
        raise PlanError(f"no mesh axis has the type {shown(kind)}.\n  Use 'explicit' or 'auto'.")
    return named


@cache
def _described(named: Named) -> Topology:
    chip, shape, slices = named
    sizes = "x".join(map(str, shape))
    devices = node_devices(chip, *shape) if chip.is_switch else slice_devices(chip, sizes, slices)
    return Topology(named.name, chip, shape, devices, slices)
