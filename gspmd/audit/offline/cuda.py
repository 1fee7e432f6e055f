"""XLA's compiler for NVIDIA GPUs, in JAX's CUDA plugin: devices of nodes that are not attached, and a version check."""

import re
from importlib import metadata

import jax
from jax.experimental import topologies

from gspmd.annotate.errors import PlanError
from gspmd.audit.offline.cards import CARDS, CUDNN, HOST_GPUS, described
from gspmd.hardware.chips import Chip
from gspmd.host import has_nvidia_gpu
from gspmd.jax_internals import assume_cudnn

COMPILER_OPTIONS = {
    # The compiler would choose kernels by timing them on the GPU; without one it takes the first kernel that works.
    "xla_gpu_autotune_level": 0,
    # Products by cuBLAS: whether Triton's kernels are faster would also have to be measured on the GPU.
    "xla_gpu_enable_triton_gemm": False,
}
"""The compiler options, by name, that are needed to compile for a GPU that is not attached."""

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def node_devices(chip: Chip, *shape: int) -> tuple[jax.Device, ...]:
    """Return the devices of one or several nodes of GPUs, node by node, without starting a backend.

    Args:
        chip: a GPU whose name is in `CARDS`.
        shape: the number of GPUs per node. If there are several nodes, the number of nodes comes first.

    Raises:
        PlanError: the CUDA plugin refuses the GPU, or JAX failed to load the plugin.
    """
    *nodes, gpus = shape
    hosts = gpus // HOST_GPUS.get(chip.name, gpus) if gpus % HOST_GPUS.get(chip.name, gpus) == 0 else 1
    # Slices x hosts x devices of a host. There is one slice, since JAX takes several for fabrics that are not
    # connected.
    sizes = f"1x{hosts * (nodes[0] if nodes else 1)}x{gpus // hosts}"
    try:
        found = topologies.get_topology_desc(platform="cuda", target_config=described(chip), topology=sizes)
    except RuntimeError as error:
        # JAX's own error says that it does not know the platform; the plugin's error begins with a status.
        given_up = isinstance(error, NotImplementedError) and not str(error).startswith("UNIMPLEMENTED")
        raise PlanError(_given_up() if given_up else _refused(chip, str(error))) from None
    assume_cudnn(CUDNN)
    return tuple(found.devices)


def require_cuda_plugin(name: str, chip: Chip) -> None:
    """Check that programs can be compiled for a GPU.

    This needs JAX's CUDA plugin, in the version that the installed JAX requires.

    Args:
        name: the name of the topology, for the error message.
        chip: the GPU.

    Raises:
        PlanError: the GPU is not supported, or the plugin is missing or has a different version.
    """
    if chip.name not in CARDS:
        raise PlanError(
            f"cannot compile for {name!r}: gspmd compiles for GPUs of NVIDIA only, {', '.join(CARDS)}.\n"
            f"  gspmd.plan and gspmd search plan for {chip.name}, too."
        )
    found = {plugin: version for plugin in _PLUGINS if (version := _version(plugin))}
    wanted, jax_version = _pinned(), metadata.version("jax")
    if not found:
        raise PlanError(
            f"cannot describe {name!r}: JAX's plugin for CUDA, with the compiler for GPUs, is not installed.\n"
            f"  Install it with pip install 'gspmd[gpu-offline]', on Linux (jax {jax_version} needs "
            f"jax-cuda12-plugin=={wanted}); or ask gspmd search --topology {name}, which needs no compiler."
        )
    # The plugin loads the compiler, which is in a separate package, and reports nothing if that is missing.
    plugin = next((each for each, version in found.items() if version == wanted), next(iter(found)))
    pjrt = plugin.replace("plugin", "pjrt")
    for package in (plugin, pjrt):
        if (version := _version(package)) != wanted:
            fact = f"{package} {version} is installed" if version else f"{package} is not installed"
            raise PlanError(
                f"cannot describe {name!r}: {fact}, and jax {jax_version} needs {wanted}.\n"
                f"  Install that one with pip install '{plugin}=={wanted}' '{pjrt}=={wanted}'."
            )


def _given_up() -> str:
    """Return the error message for a CUDA plugin that is installed, but that JAX did not load when JAX started."""
    if has_nvidia_gpu():
        return (
            "cannot compile for GPUs: this machine has a GPU, but JAX did not load its plugin for CUDA: "
            "CUDA is missing.\n"
            "  Set JAX_PLATFORMS=cpu to compile only, or install CUDA's packages with pip install 'jax[cuda12]'."
        )
    return (
        "cannot compile for GPUs: JAX was started before gspmd was imported, and did not load its plugin for CUDA.\n"
        "  Import gspmd before the first use of jax.devices(), or set JAX_PLATFORMS=cpu."
    )


def _refused(chip: Chip, error: str) -> str:
    reason = re.sub(r"^[A-Z_]+: ", "", error.strip().partition("\n")[0])
    return (
        f"JAX's plugin for CUDA refuses {chip.name}: {reason}\n"
        "  gspmd is tested with the plugins of jax 0.10.2 and 0.12.0: install one of these, or name another card."
    )


def _version(package: str) -> str:
    """Return the version of an installed package, or an empty string if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _pinned() -> str:
    """Return the version of the CUDA plugin that the installed JAX requires."""
    pins = (re.match(r"jax-cuda12-plugin\b.*>=([\w.]+)", line) for line in metadata.requires("jax") or ())
    return next((pin[1] for pin in pins if pin), metadata.version("jax"))
