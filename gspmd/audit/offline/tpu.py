"""TPU slices that nobody here has: their devices as the TPU compiler describes them, and meshes over their torus."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from math import isqrt, prod

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from gspmd.annotate.errors import PlanError, listed, shown, suggestion
from gspmd.audit.offline.torus import lay, nearest
from gspmd.hardware.chips import CHIPS, Chip
from gspmd.hardware.chips import chip as chip_named
from gspmd.host import quiet_libtpu

# Chips of the largest slice that exists (Google Cloud documentation, 'TPU v3', 'TPU v4', ...: pod size). The compiler
# describes any.
_PODS = {"tpu-v3": 1024, "tpu-v4": 4096, "tpu-v5e": 256, "tpu-v5p": 8960, "tpu-v6e": 256, "tpu7x": 9216}

# A v4 chip runs as one device ("megacore") for everyone but its compiler, which has to be told. Later chips default to
# what JAX shows: v5p one device, v3 and tpu7x one for each of their two cores.
_OPTIONS = {"tpu-v4": {"chip_config_name": "megacore"}}


@dataclass(frozen=True)
class Topology:
    """A TPU slice to compile for.

    Leaves out: twisted tori, chips that are broken, and how fast the two devices of one chip reach each other.

    Attributes:
        name: canonical, such as `tpu-v4:4x4x4`.
        chip: the figures of one device.
        shape: chips along each axis of the torus.
        devices: to compile for, not to run on; in torus order, the last axis fastest, devices of one chip together.
    """

    name: str
    chip: Chip = field(repr=False)
    shape: tuple[int, ...]
    devices: tuple[jax.Device, ...] = field(repr=False)

    def __reduce__(self) -> tuple:
        return topology, (self.name,)  # devices of a compiler are not data; wherever there is one it has them again

    @property
    def num_devices(self) -> int:
        """Devices of the slice: its chips, or twice as many where a chip is two devices."""
        return len(self.devices)

    @property
    def cores(self) -> int:
        """Devices of one chip: two on TPU v3 and TPU7x, one otherwise."""
        return len(self.devices) // prod(self.shape)

    def mesh(self, axes: Mapping[str, int], axis_type: "str | AxisType" = "explicit") -> Mesh:
        """A mesh over the slice in which, wherever sizes allow, a mesh axis is one or several whole torus axes.

        Args:
            axes: mesh axis -> size; where two layings are equally good, earlier ones take earlier torus axes.
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
        fact = f"cannot lay the mesh {_written(axes)}{count} over {self.name}, which has {self.num_devices} devices."
        asked = {axis: size if _is_size(size) else 1 for axis, size in axes.items()} or {"x": 1}
        fits = [_written(dict(zip(asked, sizes))) for sizes in nearest(self.num_devices, tuple(asked.values()))]
        return f"{fact}\n  The sizes have to multiply to {self.num_devices}, as in {listed(fits, 'or')}."

    def rings(self, mesh: Mesh) -> dict[str, tuple[int, ...]]:
        """For each axis of a mesh over this slice, the sizes of the torus axes that its devices are laid over.

        An axis whose devices fill no box of the torus counts as one ring. The two devices of one chip are no ring.

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
        return {axis: self._ring(mesh, number) for number, axis in enumerate(mesh.axis_names)}

    def _ring(self, mesh: Mesh, number: int) -> tuple[int, ...]:
        along = np.moveaxis(mesh.devices, number, 0).reshape(mesh.devices.shape[number], -1)[:, 0]
        places = list(zip(*(device.coords for device in along)))
        spread = tuple(len(set(place)) for place in places)
        cores = len({device.core_on_chip for device in along})
        box = prod(spread) * cores == len(along)
        return tuple(size for size in spread if size > 1) if box else (len(along),)


def topology(name: str) -> Topology:
    """The devices and the chip of a TPU slice by name, from the real compiler; starts no backend, needs no TPU.

    Args:
        name: the chip and its torus: `tpu-v3:4x4`, `tpu-v4:4x4x4`, `tpu-v5e:16x16`, `tpu-v5p:8x8x16`, `tpu-v6e:16x16`,
            `tpu7x:4x4x4` and other sizes; `v4:4x4x4` and `TPU v4:4x4x4` are read too.

    Returns:
        The slice; the same object for the same name, so that meshes over it are equal.

    Raises:
        PlanError: no such slice exists; libtpu is absent, is not the one that this JAX needs, or refuses.

    Example:
        >>> topology("v5p:4x4x8").mesh({"data": 8, "model": 16}).devices.shape  # doctest: +SKIP
        (8, 16)
        >>> topology("tpu-v5e:4x4x4")
        Traceback (most recent call last):
        gspmd.PlanError: there is no topology 'tpu-v5e:4x4x4': tpu-v5e is a 2D torus, and 4x4x4 has 3 dimensions.
          Did you mean 'tpu-v5e:4x4'? Known: tpu-v3:4x4, tpu-v4:4x4x4, tpu-v5e:4x4, ...

    Source: Google Cloud documentation, 'TPU v3' to 'TPU7x': dimensions of the torus, chips of a pod.
    """
    chip, shape = _read(name)
    _require_libtpu(name)
    return _described(chip, shape)


def slices(chip: Chip | str) -> Iterator[Topology]:
    """Slices of a chip from the smallest to a whole pod, each twice the one before, as near a cube as can be.

    Raises:
        PlanError: no chip has this name, or it is none of a TPU.
    """
    chip = chip_named(chip)
    if chip.name not in _PODS:
        raise PlanError(f"{chip.name} comes in no slices.\n  Those that do: {', '.join(_PODS)}.")
    shape = [2, 2, 1][: chip.torus]
    while prod(shape) <= _PODS[chip.name]:
        yield topology(f"{chip.name}:{'x'.join(map(str, sorted(shape) if 1 not in shape else shape))}")
        shape[shape.index(min(shape))] *= 2


def _written(axes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in axes.items()) or "without axes"


def _is_size(size: object) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and size > 0


def _axis_type(kind: "str | AxisType") -> AxisType:
    known = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
    if not isinstance(kind, str | AxisType) or kind not in (*known, *known.values()):
        raise PlanError(f"no mesh axis has the type {shown(kind)}.\n  Take 'explicit' or 'auto'.")
    return known.get(kind, kind)


def _read(name: str) -> tuple[Chip, tuple[int, ...]]:
    if not isinstance(name, str):
        raise PlanError(f"there is no topology {shown(name)}: it is no text.\n  Write 'tpu-v4:4x4x4'.")
    head, _, tail = name.strip().lower().partition(":")
    chip = _chip(head)
    if chip is None:
        hint = suggestion(f"tpu-{_plain(head)}", _PODS) if head else ""
        raise PlanError(_no_such(name, f"no TPU is called {shown(head)}" if head else "it lacks a chip", hint))
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", tail):
        fact = f"{shown(tail)} is no shape" if tail else "it lacks a shape"
        raise PlanError(_no_such(name, fact, f"Did you mean {_example(chip)!r}? "))
    shape = tuple(map(int, tail.split("x")))
    if fact := _impossible(chip, shape):
        raise PlanError(_no_such(name, fact, f"Did you mean {_example(chip)!r}? "))
    return chip, shape


def _chip(head: str) -> Chip | None:
    named = {_plain(spelled): CHIPS[chip] for chip in _PODS for spelled in (chip, *CHIPS[chip].device_kinds)}
    return named.get(_plain(head)) or named.get(_plain(head).removeprefix("v"))


def _impossible(chip: Chip, shape: tuple[int, ...]) -> str:
    """Why no such slice exists, where the compiler would describe one nevertheless; or nothing."""
    pod, sizes = _PODS[chip.name], "x".join(map(str, shape))
    side = isqrt(pod)
    if len(shape) != chip.torus:
        return f"{chip.name} is a {chip.torus}D torus, and {sizes} has {len(shape)} dimension{'s' * (len(shape) > 1)}"
    if chip.torus == 2 and max(shape) > side:
        return f"a {chip.name} pod is {side}x{side}, and {sizes} is no part of it"
    return f"a {chip.name} pod has {pod} chips, and {sizes} takes {prod(shape)}" if prod(shape) > pod else ""


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower()).removeprefix("tpu")


def _example(chip: Chip) -> str:
    return f"{chip.name}:{'x'.join('4' * chip.torus)}"


def _no_such(name: str, fact: str, hint: str) -> str:
    known = ", ".join(_example(CHIPS[chip]) for chip in _PODS)
    return f"there is no topology {shown(name)}: {fact}.\n  {hint}Known: {known}, and other sizes."


@cache
def _described(chip: Chip, shape: tuple[int, ...]) -> Topology:
    sizes = "x".join(map(str, shape))
    name = f"{chip.name}:{sizes}"
    quiet_libtpu()
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip.name.removeprefix('tpu-')}:{sizes}", **_OPTIONS.get(chip.name, {})
        )
    except RuntimeError as error:
        reason = re.sub(r"^[A-Z_]+: ", "", str(error).strip().splitlines()[0])
        raise PlanError(f"libtpu refuses the topology {name!r}: {reason}") from None
    return Topology(name, chip, shape, tuple(sorted(found.devices, key=lambda d: (*d.coords, d.core_on_chip))))


def _require_libtpu(name: str) -> None:
    jax_version, pin = metadata.version("jax"), _pinned()
    try:
        found = metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        if os.path.isfile(os.environ.get("TPU_LIBRARY_PATH", "")):
            return  # the user's own build of it, which JAX will load
        raise PlanError(
            f"cannot describe {name!r}: libtpu, the compiler for TPUs, is not installed.\n"
            f"  Install it with pip install 'gspmd[tpu]', on Linux x86-64 (jax {jax_version} needs libtpu=={pin})."
        ) from None
    if found != pin and not (pin.endswith("*") and f"{found}.".startswith(pin[:-1])):
        raise PlanError(
            f"cannot describe {name!r}: libtpu {found} is installed, and jax {jax_version} needs libtpu=={pin}.\n"
            f"  Install that one with pip install 'libtpu=={pin}'."
        )


def _pinned() -> str:
    """The version of libtpu that this JAX asks for, such as `0.0.42.*`; `*` where it asks for none in particular."""
    pins = (re.match(r"libtpu\s*==\s*([\w.*]+)", line) for line in metadata.requires("jax") or ())
    return next((pin[1] for pin in pins if pin), "*")
