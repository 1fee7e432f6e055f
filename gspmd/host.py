"""The devices of a process: fake devices on this host's cores, or the devices of an accelerator.

Everything that must happen before JAX starts a backend, or before JAX is imported, happens here and nowhere else.
`import gspmd` imports this module, and an interrupt of a command ends in a traceback until the import is done. So even
libraries that take only a millisecond to import are imported in the functions that need them.
"""

from __future__ import annotations

import atexit
import os

TYPE_CHECKING = False  # Type checkers treat this as typing.TYPE_CHECKING; to import typing takes as long as this file.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    import jax

# XLA:CPU serves all fake devices from one pool with a thread per core. Collectives that wait for each other hold
# their threads, so with more devices than cores a step with several independent collectives can deadlock. NPROC sets
# the size of that pool; it is read when the backend starts.
_THREADS = 32

# Environment variables that libtpu reads when it is loaded. JAX loads it to look for a TPU (0.1 s, unless JAX_PLATFORMS
# excludes TPUs), and gspmd.audit to compile for one. Without these variables, on a machine that has no TPU, libtpu asks
# a metadata server that does not exist, complains about every missing answer, keeps logs in /tmp, and refuses to be
# loaded by two processes at the same time, although there is no chip to guard. Compiled programs do not depend on the
# variables, not even on the accelerator type, since the topology is given separately.
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v4-32",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# libtpu writes the schedule of every kernel here, from which gspmd.audit reads the time of Pallas kernels: HLO has no
# estimate for them. Each process has its own folder, with a random name: a child process inherits the environment, and
# containers may share the temporary folder and have equal process ids.
_TEMPORARY = next((os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "/tmp")
_SCHEDULES = f"--xla_jf_dump_to={_TEMPORARY}/gspmd-schedules-"
_OWN = os.urandom(8).hex()
# This file has the bytes of host memory that a container's processes may use, or "max".
_LIMIT = "/sys/fs/cgroup/memory.max"
_DUMPED = "--xla_jf_dump_llo_text=true", "--xla_jf_dump_llo_pass_label_regex=final_bundles"


# Number of processes of the run, which share its devices (see `share_devices`).
_processes = 1


class HostError(RuntimeError):
    """The requested devices are not available."""


def use_host_devices(count: int) -> None:
    """Make the CPU backend, once it starts, offer `count` devices that share this host's cores.

    This does not choose the platform: JAX still prefers an accelerator if it finds one.

    Args:
        count: number of devices, at least 1.

    Raises:
        HostError: `count` is not positive, or a backend has already started with a different number of CPU devices.
    """
    import jax

    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count < 2**31:
        said = repr(count) if isinstance(count, int | float | str | None) else f"{type(count).__name__!r}"
        raise HostError(f"cannot make {said:.40} host devices: their number must be a whole number of at least 1.")
    quiet_libtpu()
    os.environ["NPROC"] = str(max(_THREADS, 4 * count, int(os.environ.get("NPROC") or 0)))
    if _option("jax_num_cpu_devices") == count:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        raise HostError(
            f"cannot make {count} host devices: JAX has already started a backend.\n"
            "  Their number is fixed when the backend starts. Call gspmd.host.use_host_devices first,\n"
            "  before any array is made and before jax.devices() is called."
        ) from None


def share_devices(processes: int) -> None:
    """Tell `start` that the devices of the run are divided evenly among several processes.

    This function is called as soon as JAX knows of the processes.

    Args:
        processes: the number of processes in the run.
    """
    global _processes
    _processes = processes


def start(devices: int | None = None, platform: str | None = None, *, host_devices: int = 8) -> list[jax.Device]:
    """Start the backend, and return the devices to use, which are those of all processes.

    On an accelerator, `devices` defaults to all devices. On the CPU, `devices` defaults to `host_devices` fake devices.

    Args:
        devices: number of devices; None means the default described above.
        platform: "cpu", "gpu" or "tpu"; None means the best platform that JAX finds.
        host_devices: number of fake devices to make if the platform is the CPU.

    Returns:
        The devices, in JAX's order.

    Raises:
        HostError: the platform is unknown or absent, there are fewer devices than asked for, or JAX has already started
            with a different number of CPU devices.
    """
    import jax

    count = host_devices if devices is None else devices
    if _processes > 1:
        if count % _processes:
            raise HostError(f"cannot divide {count} devices evenly among {_processes} processes.")
        count //= _processes
    use_host_devices(count)
    # "gpu" is CUDA or ROCm. JAX fails if it cannot start a platform that it is given by name, and we do not know which
    # of the two is there, so JAX has to find it.
    if platform not in (None, "gpu"):
        jax.config.update("jax_platforms", platform)
    try:
        found = jax.devices()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise HostError(f"cannot start platform {platform or 'default'!r}: {reason}") from None
    if platform == "gpu" and found[0].platform != "gpu":
        raise HostError(_no_gpu(found[0].platform))
    wanted = len(found) if devices is None else devices
    if wanted > len(found):
        raise HostError(_too_few(wanted, found))
    if wanted < len(found) and _processes > 1:
        fact = (
            f"cannot use {wanted} of {len(found)} devices in {_processes} processes: each process uses all its devices."
        )
        raise HostError(f"{fact}\n  Leave --devices (or --mesh) out, or start fewer processes.")
    return found[:wanted]


def cache_folder(name: str) -> Path:
    """Return the subfolder `name` of the cache folder: $GSPMD_CACHE, $XDG_CACHE_HOME/gspmd or ~/.cache/gspmd."""
    from pathlib import Path

    base = os.environ.get("GSPMD_CACHE")
    return Path(base or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gspmd") / name


def keep_compiled(wanted: bool = True) -> str:
    """Keep compiled programs on disk in JAX's persistent compilation cache, so that the next process can load them.

    A user's own JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE take precedence. Otherwise programs are kept
    in `compiled/` of the cache folder, with one subfolder for each kind of CPU, since the machine code for one kind of
    CPU does not run on another.

    Args:
        wanted: False to compile everything from scratch and keep nothing.

    Returns:
        The folder where programs are kept, or the reason why none are kept.
    """
    import warnings
    from pathlib import Path
    from tempfile import TemporaryFile

    import jax

    # By default JAX reuses a program compiled from other source lines; the ledger and profiles would then show those.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    if not wanted:
        jax.config.update("jax_enable_compilation_cache", False)
    if not _option("jax_enable_compilation_cache"):
        return "not kept"
    own = _option("jax_compilation_cache_dir")
    folder = Path(own) if own else cache_folder("compiled") / _cpu()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        jax.config.update("jax_enable_compilation_cache", False)
        return f"not kept: cannot write to {str(folder)!r}: {error.strerror}"
    # If the disk becomes full later, JAX goes on without the cache; its warning for every single program is hidden.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return f"kept in {folder}"


def _cpu() -> str:
    """Return the kind of this machine's CPU, and a digest of its features."""
    import hashlib
    import platform

    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read().splitlines()
    except OSError:
        lines = [platform.processor()]
    able = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0] if lines else "")
    return f"{platform.machine()}-{hashlib.sha256(able.encode()).hexdigest()[:8]}"


def is_fake(devices: Sequence[jax.Device]) -> bool:
    """Return whether the devices are fake devices on this host's cores, whose times say nothing about real devices."""
    return devices[0].platform == "cpu" and len(devices) > 1


def describe(devices: Sequence[jax.Device]) -> str:
    """Describe the devices in one line; fake devices as "8 fake host devices sharing 2 cores"."""
    if is_fake(devices):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return f"{len(devices)} fake host devices sharing {cores} core{'s' * (cores != 1)}"
    noun = "device" if len(devices) == 1 else "devices"
    return f"{len(devices)} {devices[0].device_kind} {noun} ({devices[0].platform})"


def memory(devices: Sequence[jax.Device]) -> int | None:
    """Return the bytes that programs may use on each of these devices, or None if the devices do not report them.

    Devices of a CPU share the memory of their host, or the part of it that the process's container may use.
    """
    if devices[0].platform != "cpu":
        return (devices[0].memory_stats() or {}).get("bytes_limit")
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # This is not a POSIX system.
        return None
    try:
        with open(_LIMIT) as file:
            there = min(there, int(file.read()))
    except (OSError, ValueError):  # No container, or one without a limit ("max").
        pass
    return there // len(devices)


def quiet_libtpu() -> None:
    """If this machine has no TPU, tell libtpu that it is only used to compile.

    Environment variables that the user has set are kept.
    """
    flags = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    if any(flag.startswith(_SCHEDULES) for flag in flags):  # Flags of the process that started this one.
        flags = [flag for flag in flags if not flag.startswith(_SCHEDULES) and flag not in _DUMPED]
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(flags)
    # A machine with TPUs has one of these files per chip; there, libtpu needs no help.
    if not (_numbered("/dev/accel") or _numbered("/dev/vfio/")):
        for variable, value in WITHOUT_TPU.items():
            os.environ.setdefault(variable, value)
        if not any(flag.startswith("--xla_jf_dump_") for flag in flags):  # The user's own dump.
            # os.putenv, since only libtpu needs it: os.environ is part of the keys of JAX's compilation cache, even for
            # CPUs and GPUs, and the folder's name differs in each process.
            os.putenv("LIBTPU_INIT_ARGS", " ".join((*flags, _SCHEDULES + _OWN, *_DUMPED)))
            atexit.unregister(_forget_schedules)
            atexit.register(_forget_schedules)


def skip_check_of_cuda() -> None:
    """On a machine without an NVIDIA GPU, tell JAX's plugin for CUDA, if installed, that it is only used to compile.

    If it is not told, the plugin requires all CUDA libraries, and fails with a traceback whenever a backend starts.
    """
    import sys

    places = (f"{folder}/jax_plugins/xla_cuda{version}" for folder in sys.path for version in (12, 13))
    if not has_nvidia_gpu() and any(map(os.path.isdir, places)):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def has_nvidia_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU."""
    return _numbered("/dev/nvidia") or os.path.exists("/dev/dxg")  # the latter on WSL


def schedules_folder() -> Path:
    """Return the folder where libtpu, loaded by this process, writes the schedules of its programs."""
    from pathlib import Path

    return Path((_SCHEDULES + _OWN).partition("=")[2])


def _numbered(prefix: str) -> bool:
    """Return whether a file exists whose path is the prefix followed by a digit."""
    folder, _, name = prefix.rpartition("/")
    try:
        return any(found[len(name) : len(name) + 1].isdigit() for found in os.listdir(folder) if found.startswith(name))
    except OSError:
        return False


def _forget_schedules() -> None:
    if os.path.isdir(folder := schedules_folder()):  # There is no folder if nothing was compiled for a TPU.
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _option(name: str) -> Any:
    """Return an option of `jax.config`, for which JAX 0.10 has no type hints."""
    import jax

    return getattr(jax.config, name)


def _no_gpu(found: str) -> str:
    named = _option("jax_platforms")
    why = f"JAX_PLATFORMS is {named!r}; unset it." if named else "Install JAX for CUDA or ROCm, or drop --platform."
    return f"cannot start platform 'gpu': the best that JAX finds here is {found!r}.\n  {why}"


def _too_few(wanted: int, found: Sequence[jax.Device]) -> str:
    platform = found[0].platform
    fact = f"cannot use {wanted} devices: platform {platform!r} has {len(found)}."
    if platform == "cpu":
        return f"{fact}\n  Their number was fixed when the backend started."
    return f"{fact}\n  Leave --devices (or --mesh) out to use what is there, or use --platform cpu for fake devices."
