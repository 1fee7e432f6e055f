"""libtpu, the compiler for TPUs: devices of slices that are not attached, kernel schedules, and a version check."""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from typing import Any

import jax
from jax.experimental import topologies

from gspmd.annotate.errors import PlanError
from gspmd.audit.hlo.bundles import KernelSchedule
from gspmd.audit.hlo.module import Module
from gspmd.hardware.chips import Chip, slice_of
from gspmd.host import quiet_libtpu, schedules_folder

_COMPILING = threading.RLock()

# JAX counts a v4 chip as one device ("megacore"), but the compiler by default does not. For the other chips the
# defaults agree: v5p is one device, v3 and tpu7x have one device for each of their two cores.
_OPTIONS = {"tpu-v4": {"chip_config_name": "megacore"}}


def slice_devices(chip: Chip, sizes: str, slices: int = 1) -> tuple[jax.Device, ...]:
    """Return the devices of one or several TPU slices, without starting a backend.

    The devices are ordered slice by slice, and in torus order within each slice.

    Args:
        chip: the TPU.
        sizes: the shape of one slice, such as `4x4x4`.
        slices: number of slices.

    Raises:
        PlanError: libtpu refuses the slice.
    """
    quiet_libtpu()
    options: dict[str, Any] = {**_OPTIONS.get(chip.name, {}), **({"num_slices": slices} if slices > 1 else {})}
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip.name.removeprefix('tpu-')}:{sizes}", **options
        )
    except RuntimeError as error:
        reason = re.sub(r"^[A-Z_]+: ", "", str(error).strip().splitlines()[0])
        raise PlanError(f"libtpu refuses the topology {f'{chip.name}:{sizes}'!r}: {reason}") from None
    return tuple(sorted(described.devices, key=lambda d: (slice_of(d), *d.coords, d.core_on_chip)))


@contextmanager
def own_schedules() -> Iterator[None]:
    """Let only one program compile at a time, and give it an empty folder for the schedules that libtpu writes.

    This is necessary because kernels of two programs may have the same name.
    """
    with _COMPILING:
        shutil.rmtree(schedules_folder(), ignore_errors=True)
        try:
            yield
        finally:
            shutil.rmtree(schedules_folder(), ignore_errors=True)


def with_schedules(module: Module) -> Module:
    """Return a program with the schedules of its Pallas kernels, if libtpu has written such schedules.

    Call this function directly after the program is compiled, within `own_schedules`.
    """
    kernels = {}
    for computation in module.computations.values():
        for name in (each.name for each in computation.instructions if each.is_kernel):
            dumps = [*schedules_folder().glob(f"*-{name}-[0-9]*-final_bundles.txt")]
            # With several schedules the right one is unknown; without a schedule the timeline notes that its time is a
            # lower bound.
            if len(dumps) == 1 and (schedule := KernelSchedule.read(dumps[0].read_text())):
                kernels[name] = schedule
    return replace(module, kernels=kernels)


def require_libtpu(name: str, chip: Chip) -> None:
    """Check that libtpu is installed, in the version that the installed JAX requires.

    libtpu can compile for every TPU in chips.toml.

    Args:
        name: the name of the topology, for the error message.
        chip: the TPU.

    Raises:
        PlanError: libtpu is missing or has a different version.
    """
    jax_version, pin = metadata.version("jax"), _pinned()
    try:
        found = metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        if os.path.isfile(os.environ.get("TPU_LIBRARY_PATH", "")):
            return  # The user's own build, which JAX loads.
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
    """Return the version of libtpu that the installed JAX requires, such as `0.0.42.*`, or `*` for any version."""
    pins = (re.match(r"libtpu\s*==\s*([\w.*]+)", line) for line in metadata.requires("jax") or ())
    return next((pin[1] for pin in pins if pin), "*")
