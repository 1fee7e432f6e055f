"""The settings in force where a program is traced: the lowering, the chip, the devices and the manual mesh axes.

`gspmd.lowering` and the other `with` blocks here set JAX user contexts. These are part of jit's cache key, so a program
that was traced under other settings never runs by mistake.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import jax

from gspmd.annotate.errors import PlanError
from gspmd.display.units import mesh_text
from gspmd.hardware.chips import Chip, chip_of_device, slice_of
from gspmd.hardware.links import over_slices
from gspmd.jax_internals import concrete_mesh
from gspmd.lowerings.names import checked

_default = jax.make_user_context(default_value="auto")
_chip = jax.make_user_context(default_value=None)
_slices = jax.make_user_context(default_value=0)
_slice_shape = jax.make_user_context(default_value=())
_on_no_axes = jax.make_user_context(default_value=False)

# -- the lowering and the chip -----------------------------------------------------------------------------------------


def lowering(name: str) -> AbstractContextManager:
    """Set the default lowering of `gspmd.einsum` and `gspmd.reshard` inside a `with` block.

    Args:
        name: the lowering. `"xla"` annotates arrays, and the compiler chooses the collectives. `"blocking"` runs the
            plan's collectives in a shard_map. `"looped"` runs gathers and reduce-scatters inside the einsums, by the
            cheapest schedule. `"looped:<schedule>"` does the same by the named schedule, `halves` or `paired`. `"auto"`
            chooses blocking or looped for each equation, whichever is cheaper by the cost model. On devices that
            chips.toml does not list, `"auto"` chooses blocking.

    Raises:
        PlanError: `name` is not a lowering.

    Example:
        >>> with lowering("xla"):
        ...     current()
        'xla'
    """
    return _default(checked(name))


def planned_for(chip: Chip) -> AbstractContextManager:
    """Plan for a given chip inside a `with` block, on meshes whose devices are not known."""
    return _chip(chip)


def chip_in_force() -> Chip | None:
    """Return the chip that `planned_for` has set, or None outside of its `with` block."""
    return _chip.value


def current() -> str:
    """Return the lowering in force, which calls use by default."""
    return _default.value


def resolve(name: str | None) -> str:
    """Return the lowering of a call, which is `name`, or the lowering in force if `name` is None."""
    return checked(current() if name is None else name)


# -- the devices -------------------------------------------------------------------------------------------------------


def device_kind() -> str:
    """Return JAX's name for the kind of the mesh's devices, or an empty string if the mesh has no devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.device_kind


def is_tpu() -> bool:
    """Return whether the devices are TPUs."""
    return device_kind().startswith("TPU")


def is_gpu() -> bool:
    """Return whether the devices are GPUs."""
    return device_kind().startswith(("NVIDIA", "AMD"))


def is_host() -> bool:
    """Return whether the devices are host devices, which share CPU cores and have no links or matrix units."""
    return device_kind() == "cpu"


def on_slices(count: int) -> AbstractContextManager:
    """Plan for meshes over `count` TPU slices inside a `with` block, even if the devices say otherwise.

    JAX caches traced programs by the shape of a mesh and the kind of its devices. This setting becomes part of the
    cache key too, so that a program for one slice is not reused for several slices.
    """
    return _slices(count)


def slices() -> int:
    """Return the number of TPU slices of the mesh in force.

    The number is the one that `on_slices` has set, or else follows from the devices of the mesh.
    """
    return _slices.value or slices_of(concrete_mesh())


def on_slice_shape(shape: tuple[int, ...]) -> AbstractContextManager:
    """Plan for a TPU slice of this shape inside a `with` block, even if the devices are in a slice of another shape.

    Like `on_slices`, this setting is part of the key by which JAX caches programs.
    """
    return _slice_shape(shape)


def slice_shape() -> tuple[int, ...]:
    """Return the number of chips along each torus axis of the TPU slice that the mesh in force fills.

    The numbers are those that `on_slice_shape` has set, or else follow from the coordinates of the devices. The result
    is empty if the mesh does not fill one slice.
    """
    return _slice_shape.value or shape_of(concrete_mesh())


@contextmanager
def on_these_devices() -> Iterator[None]:
    """Keep JAX from reusing, inside a `with` block, programs that were traced for devices at other positions.

    JAX caches programs by the shape of the mesh and the kind of the devices, not by their positions in slices.
    """
    with ExitStack() as stack:
        if (count := slices()) > 1:
            stack.enter_context(on_slices(count))
        if shape := slice_shape():
            stack.enter_context(on_slice_shape(shape))
        yield


def chip_of_devices() -> Chip | None:
    """Return the chip of the mesh's devices, with the shape of their slice, or None if chips.toml lacks the chip."""
    return _chip_in_slice(device_kind(), slice_shape())


@lru_cache(maxsize=64)
def _chip_in_slice(kind: str, shape: tuple[int, ...]) -> Chip | None:
    found = chip_of_device(kind)
    return found if found is None or found.is_switch or not shape else replace(found, slice_shape=shape)


@lru_cache(maxsize=64)
def shape_of(mesh: jax.sharding.Mesh | None) -> tuple[int, ...]:
    """Return the number of chips along each torus axis of the TPU slice that a mesh fills, without axes of one chip.

    The result is empty if the mesh is None, if it spans several slices or only part of a slice, or if each chip counts
    as two devices.
    """
    devices = [] if mesh is None else [*mesh.devices.flat]
    if not all(hasattr(device, "coords") for device in devices) or len({*map(slice_of, devices)}) != 1:
        return ()
    spread = [len({*places}) for places in zip(*(device.coords for device in devices))]
    return tuple(size for size in spread if size > 1) if prod(spread) == len(devices) else ()


def across_slices() -> Mapping[str, int]:
    """Return the number of TPU slices along each axis of the mesh in force; the result is {} on a single slice.

    Raises:
        PlanError: the slices do not divide evenly over the first axes.
    """
    if (count := slices()) == 1:
        return {}
    mesh = jax.sharding.get_abstract_mesh()
    parts = over_slices(tuple(mesh.shape.values()), count)
    if parts is None:
        raise _no_order(mesh, count)
    return dict(zip(mesh.shape, parts))


def slices_of(mesh: Any) -> int:
    """Return the number of TPU slices of a mesh, which is 1 if `mesh` is not a `jax.sharding.Mesh`.

    Raises:
        PlanError: the slices do not fill the mesh one after another.
    """
    return _count(mesh) if isinstance(mesh, jax.sharding.Mesh) else 1


@lru_cache(maxsize=64)
def _count(mesh: jax.sharding.Mesh) -> int:
    owners = [slice_of(device) for device in mesh.devices.flat]
    counts = {owners.count(owner) for owner in {*owners}}
    if owners != sorted(owners) or len(counts) > 1:
        raise _no_order(mesh, len({*owners}))
    return len({*owners})


def _no_order(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, count: int) -> PlanError:
    return PlanError(
        f"cannot tell which axes of the mesh {mesh_text(mesh.shape)} are over its {count} slices: the slices do not "
        "fill it one after the other.\n"
        "  Make the first axes those over slices, as gspmd.audit.topology(...).mesh(...) does."
    )


# -- manual mesh axes --------------------------------------------------------------------------------------------------


def on_no_axes() -> AbstractContextManager:
    """Allow calls of gspmd inside a shard_map over all mesh axes, in a `with` block.

    Such a call takes each device's arrays as whole tensors, and is planned without mesh axes.
    """
    return _on_no_axes(True)


def check_all_manual() -> None:
    """Check that a call in a shard_map over all mesh axes is inside the `with` block of `on_no_axes`.

    Raises:
        PlanError: the call is not inside this `with` block.
    """
    if not _on_no_axes.value:
        raise PlanError(
            "cannot plan inside another shard_map: its mesh axes are already manual, so arrays there are shards.\n"
            "  Call gspmd outside of the shard_map, or use jax.lax collectives inside it."
        )
