"""Joining the processes of a run before JAX starts, and ending the processes together."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gspmd import host
from gspmd.interruption import interruptibly
from gspmd.training.processes import arrival
from gspmd.training.processes.native import keep_apart
from gspmd.training.processes.watch import Watch
from gspmd.training.syntax import Processes, parse_processes
from gspmd.training.toml import ConfigError

# Seconds for JAX to join processes that have all arrived, and for all of them to leave: before it leaves, the first
# process draws its plots.
_JOINING, _DEPARTURE = 300, 300
# Seconds to wait for the first process to read the text, of which others may have less; it is watched meanwhile.
_READING = 24 * 3600
# Seconds for all processes to reach a common point, such as the end of a compilation. They are watched meanwhile, so
# only processes that have diverged, or one that hangs, take longer.
_MEETING = 2 * 3600
# Seconds for a fault before `join` to reach the first process; after that, the process prints its fault itself.
_TELLING = 10
# Seconds for an interrupt before `join` to reach the first process, if that one listens already.
_INTERRUPTING = 1
_watch: Watch | None = None
_given = _expected = ""
_questions = _meetings = 0


def expect(given: str) -> None:
    """Arrange that a fault before `join` is reported to the other processes, since they wait for this one.

    Args:
        given: the argument that `join` will get; "" for one process. It is read from the flags alone, because reading
            all settings may fail.
    """
    global _expected
    _expected = given


def several() -> bool:
    """Return whether this process is one of several, or is going to join others."""
    return _watch is not None or bool(_expected)


def join(given: str) -> None:
    """Join the processes of a run as one cluster; from then on, if one process dies, all processes end.

    Args:
        given: "auto" for the cluster that JAX detects, `HOST:PORT,processes=N,process=I`, or "" for one process.

    Raises:
        ConfigError: no cluster is detected, or some of its processes do not arrive.
    """
    global _given, _expected
    _expected = ""
    if not given:
        return
    at = _found(given)
    _given = given if given == "auto" else f"{at.address},processes={at.processes},process=I"
    if at.processes > 1:
        met = _come(at, arrival.LIMIT).complete
        while not met.wait(0.2):  # Without a limit, no signal would be handled.
            pass
    named: dict[str, Any] = {}
    if given != "auto":
        named = {"coordinator_address": at.address, "num_processes": at.processes, "process_id": at.process}
        named["cluster_detection_method"] = "deactivate"
    import jax  # for a run of one process, this file is imported before JAX starts

    # JAX would handle SIGTERM itself, but a run handles it at the end of its step (`run.signals.Stop`).
    jax.config.update("jax_enable_preemption_service", False)
    keep_apart(_aborted)
    limits: dict[str, Any] = {"initialization_timeout": _JOINING, "shutdown_timeout_seconds": _DEPARTURE}
    try:
        interruptibly(partial(jax.distributed.initialize, **named, **limits))
    except RuntimeError as error:
        raise _not_joined(given, str(error).splitlines()[0]) from None
    host.share_devices(count())


def _found(given: str) -> Processes:
    """Return the processes described by `--distributed`, and the number of this process.

    Raises:
        ConfigError: the flag cannot be parsed, or no cluster is detected.
    """
    if given != "auto":
        return parse_processes(given)
    from gspmd.jax_internals import detected_processes

    try:
        found = interruptibly(detected_processes, arrival.LIMIT)
    except RuntimeError as error:
        raise _not_joined(given, str(error).splitlines()[0]) from None
    if found is None:
        fault = "neither SLURM, Open MPI, Kubernetes (with jax[k8s]) nor a TPU runtime has started this process. "
        fault += "Start it with srun or mpirun, or give HOST:PORT,processes=N,process=I."
        raise _not_joined(given, fault)
    return Processes(*found)


def _not_joined(given: str, fault: str) -> ConfigError:
    return ConfigError(f"cannot join the processes of --distributed {given}:", [fault])


def _come(at: Processes, limit: float) -> Watch:
    """Meet the other processes of a run, and start to watch them.

    Raises:
        ConfigError: the processes do not meet; `arrival.door` and `arrival.knock` list the possible reasons.
    """
    global _watch
    if at.process == 0:
        _watch = Watch(0, at.processes, {}, arrival.door(at), at.address)
    else:
        _watch = Watch(at.process, at.processes, {0: arrival.knock(at, limit)})
    _watch.start()
    return _watch


def _runtime() -> Any:
    """Return JAX's state of distributed processes, or None if JAX is not imported.

    If JAX is not imported, this process has not joined any other process.
    """
    if "jax" not in sys.modules:
        return None
    from gspmd.jax_internals import distributed_runtime

    return distributed_runtime


def index() -> int:
    """Return the number of this process without starting a backend or importing JAX, unlike `jax.process_index`."""
    return runtime.process_id if (runtime := _runtime()) else 0


def count() -> int:
    """Return the number of processes without starting a backend or importing JAX, unlike `jax.process_count`."""
    return runtime.num_processes if (runtime := _runtime()) else 1


def first() -> bool:
    """Return whether this is the first process, which writes and prints for all processes."""
    return index() == 0


def _client() -> Any:
    """Return the client of JAX's key-value store and barriers, which all processes share."""
    return _runtime().client


def flag() -> str:
    """Return the flag with which a resumed run joins its processes again, as text, or "" for a single process."""
    return f" --distributed {_given}" if count() > 1 else ""


def told(make: Callable[[], str]) -> str:
    """Return, in all processes, the text that `make` returns in the first process."""
    global _questions
    if count() == 1:
        return make()
    _questions += 1
    key = f"gspmd/agreed/{_questions}"
    if first():
        _client().key_value_set(key, make())
    return interruptibly(_client().blocking_key_value_get, key, _READING * 1000)


def gathered(text: str) -> list[str]:
    """Return the texts of all processes in the first process, and [] in the other processes; no device is used."""
    global _questions
    if count() == 1:
        return [text]
    _questions += 1
    keys = [f"gspmd/gathered/{_questions}/{process}" for process in range(count())]
    _client().key_value_set(keys[index()], text)
    get = _client().blocking_key_value_get
    return [interruptibly(get, key, _READING * 1000) for key in keys] if first() else []


def meet(before: str) -> None:
    """Wait until all processes have called this function, so that they start the next program together.

    If all processes run a program, call this function after the program is compiled and before it runs for the first
    time. In the first run the processes open connections for the program's collectives, and Gloo waits only 30 seconds
    for each connection. But one process may have found the program in the cache, while another process compiles it for
    minutes.

    Args:
        before: the name of the next program, for the error message.

    Raises:
        RuntimeError: a process has not called this function within two hours.
    """
    global _meetings
    if count() == 1:
        return
    _meetings += 1
    import jax

    try:
        interruptibly(_client().wait_at_barrier, f"gspmd/meeting/{_meetings}", _MEETING * 1000)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        waited = f"process {index()} of {count()} has waited for the others for {_MEETING // 60} minutes"
        raise RuntimeError(f"{waited} before {before}: {str(error).splitlines()[0]}") from None


def agreed(choose: Callable[[], Path]) -> Path:
    """Return, in all processes, the folder that `choose` returns in the first process.

    Raises:
        ConfigError: this process cannot see the folder.
    """
    if count() == 1:
        return choose()
    folder = Path(told(lambda: str(choose().resolve())))
    if not folder.is_dir():
        fault = f"process {index()} on {socket.gethostname()} does not see it. Name a folder that all machines share."
        raise ConfigError(f"cannot write to {str(folder)!r}:", [fault])
    return folder


@contextmanager
def watching(advice: Callable[[], str]) -> Iterator[None]:
    """Add advice to the message that is printed if a process is lost inside a `with` block."""
    if _watch:
        _watch.advice = advice
    yield


def leave() -> None:
    """Wait until all processes have finished, and leave the cluster."""
    if _watch:
        import jax

        jax.distributed.shutdown()
        _watch.leave()


def fail(code: int, message: str, *, sure: bool = True) -> None:
    """Report a fault once, through the first process, and end all processes; this function does not return.

    Args:
        code: the exit code.
        message: the fault.
        sure: whether this process certainly caused the fault. If false, the loss of another process may be the cause.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # The process only waits from now on.
    try:
        said = False if _watch else _come_to_tell(code, message)
        if _watch:
            _watch.fail(message, code, sure=sure, said=said)
            time.sleep(0.2)  # The watch sends the message meanwhile.
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _come_to_tell(code: int, message: str) -> bool:
    """Meet the expected processes to tell them about a fault; return whether this process has printed the fault.

    Once this process and the first process have met, the fault is sent through the watch, and the first process prints
    it. If the first process does not arrive soon, this process prints the fault itself. It still waits for the first
    process, which would otherwise wait for it. An interrupted process does not wait. It tells the first process only if
    the first process is already listening, because otherwise no process is waiting yet.
    """
    spoken, interrupted = threading.Event(), code > 128

    def say() -> None:
        if not spoken.is_set():
            spoken.set()
            print(message, file=sys.stderr, flush=True)

    late = threading.Timer(_TELLING, say)
    late.daemon = True
    late.start()
    try:
        at = _found(_expected)
        if at.processes > 1 and not (interrupted and at.process == 0):
            _come(at, _INTERRUPTING if interrupted else arrival.LIMIT)
    except Exception:  # For example, the address is unreadable; only the earlier fault is reported.
        pass
    late.cancel()
    if _watch is None:
        say()
    return spoken.is_set()


def _aborted(said: str) -> None:
    """Report that a library aborted the process.

    If there are other processes, first wait for a moment: if the loss of another process is the cause, the watch ends
    this process, and the loss is reported instead.
    """
    if _watch:
        _watch.settle()
        _watch.fail(said)
    else:
        print(said, file=sys.stderr, flush=True)
