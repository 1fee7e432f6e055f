"""Joining the processes of a run, before JAX starts; leaving them together."""

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

import jax

from gspmd import host
from gspmd.jax_internals import detected_processes
from gspmd.jax_internals import distributed_runtime as _runtime
from gspmd.training.processes import arrival
from gspmd.training.processes.native import keep_apart
from gspmd.training.processes.watch import Watch
from gspmd.training.syntax import Processes, parse_processes
from gspmd.training.toml import ConfigError

# Seconds for JAX to join processes that are all there, and for all of them to go: the first one draws its pictures
# meanwhile.
_JOINING, _DEPARTURE = 300, 300
# Seconds until the first process has read the text, of which the others may have less: it is watched meanwhile.
_PATIENCE = 24 * 3600
# Seconds for all processes to come to a point that they pass together, such as the end of a compilation: they are
# watched meanwhile, so only processes that have gone different ways, or one that hangs, let it pass.
_MEETING = 2 * 3600
# Seconds in which a fault from before the processes have met reaches the first one, or is said by who has it.
_UNHEARD = 10
# Seconds in which an interrupt from before then is told to the first one, if that is there.
_QUICKLY = 1
_watch: Watch | None = None
_given = _expected = ""
_questions = _meetings = 0


def expect(given: str) -> None:
    """Let a fault that comes up before `join` reach the processes that this one was to join, which wait for it.

    Args:
        given: as of `join`, from the flags as they stand: settings may be at fault before they are read; "" for none.
    """
    global _expected
    _expected = given


def several() -> bool:
    """Return whether this is one of several processes, or shall join them."""
    return _watch is not None or bool(_expected)


def join(given: str) -> None:
    """Join the processes of a run; they are one cluster from then on, and one of them that dies ends all.

    Args:
        given: "auto" for the cluster that JAX detects, `HOST:PORT,processes=N,process=I`, or "" for one process.

    Raises:
        ConfigError: no cluster is detected, or its processes do not come.
    """
    global _given, _expected
    _expected = ""
    if not given:
        return
    at = _found(given)
    _given = given if given == "auto" else f"{at.address},processes={at.processes},process=I"
    if at.processes > 1:
        met = _come(at, arrival.LIMIT).complete
        while not met.wait(0.2):  # without a limit, no signal would be handled
            pass
    named: dict[str, Any] = {}
    if given != "auto":
        named = {"coordinator_address": at.address, "num_processes": at.processes, "process_id": at.process}
        named["cluster_detection_method"] = "deactivate"
    # JAX would handle SIGTERM itself, which a run answers at the end of its step (`run.signals.Stop`).
    jax.config.update("jax_enable_preemption_service", False)
    keep_apart(_aborted)
    limits: dict[str, Any] = {"initialization_timeout": _JOINING, "shutdown_timeout_seconds": _DEPARTURE}
    try:
        _interruptibly(partial(jax.distributed.initialize, **named, **limits))
    except RuntimeError as error:
        raise _not_joined(given, str(error).splitlines()[0]) from None
    host.share_devices(count())


def _found(given: str) -> Processes:
    """Return the processes that `--distributed` means, and which of them this is.

    Raises:
        ConfigError: it cannot be read, or no cluster is detected.
    """
    if given != "auto":
        return parse_processes(given)
    try:
        found = _interruptibly(detected_processes, arrival.LIMIT)
    except RuntimeError as error:
        raise _not_joined(given, str(error).splitlines()[0]) from None
    if found is None:
        fault = "neither SLURM, Open MPI, Kubernetes (with jax[k8s]) nor a TPU runtime has started this process. "
        fault += "Start it with srun or mpirun, or say HOST:PORT,processes=N,process=I."
        raise _not_joined(given, fault)
    return Processes(*found)


def _not_joined(given: str, fault: str) -> ConfigError:
    return ConfigError(f"cannot join the processes of --distributed {given}:", [fault])


def _come(at: Processes, limit: float) -> Watch:
    """Come to where the processes of a run meet; from then on they watch one another.

    Raises:
        ConfigError: as of `arrival.door` and `arrival.knock`.
    """
    global _watch
    if at.process == 0:
        _watch = Watch(0, at.processes, {}, arrival.door(at), at.address)
    else:
        _watch = Watch(at.process, at.processes, {0: arrival.knock(at, limit)})
    _watch.start()
    return _watch


def index() -> int:
    """Number of this process; unlike `jax.process_index`, without starting a backend."""
    return _runtime.process_id


def count() -> int:
    """Number of processes of the run; unlike `jax.process_count`, without starting a backend."""
    return _runtime.num_processes


def first() -> bool:
    """Whether this is the process that writes and speaks for all of them."""
    return index() == 0


def _client() -> Any:
    """The client of the store of keys that all processes share; it has barriers, too."""
    return _runtime.client


def flag() -> str:
    """The flag that joins the processes of this run once more; empty for a run of one."""
    return f" --distributed {_given}" if count() > 1 else ""


def told(make: Callable[[], str]) -> str:
    """Return the text that the first process makes, in all of them."""
    global _questions
    if count() == 1:
        return make()
    _questions += 1
    key = f"gspmd/agreed/{_questions}"
    if first():
        _client().key_value_set(key, make())
    return _interruptibly(_client().blocking_key_value_get, key, _PATIENCE * 1000)


def gathered(text: str) -> list[str]:
    """Return the texts of all processes in their order in the first one, and none elsewhere; no device takes part."""
    global _questions
    if count() == 1:
        return [text]
    _questions += 1
    keys = [f"gspmd/gathered/{_questions}/{process}" for process in range(count())]
    _client().key_value_set(keys[index()], text)
    get = _client().blocking_key_value_get
    return [_interruptibly(get, key, _PATIENCE * 1000) for key in keys] if first() else []


def meet(before: str) -> None:
    """Wait until all processes have come here, so that they begin together with what follows.

    Call it between the compilation of a program that all of them run and its first run. There they open connections
    for its collectives, and Gloo waits for 30 seconds for each, while one process may have found in the cache what
    another one compiles for minutes.

    Args:
        before: what follows, for the message.

    Raises:
        RuntimeError: not all of them have come in two hours.
    """
    global _meetings
    if count() == 1:
        return
    _meetings += 1
    try:
        _interruptibly(_client().wait_at_barrier, f"gspmd/meeting/{_meetings}", _MEETING * 1000)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        waited = f"process {index()} of {count()} has waited for the others for {_MEETING // 60} minutes"
        raise RuntimeError(f"{waited} before {before}: {str(error).splitlines()[0]}") from None


def agreed(choose: Callable[[], Path]) -> Path:
    """Return the folder that the first process chooses.

    Raises:
        ConfigError: this process does not see it.
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
    """While this lasts, end the message that another process is lost with a piece of advice."""
    if _watch:
        _watch.advice = advice
    yield


def leave() -> None:
    """Wait for all processes to come to the end, and leave them."""
    if _watch:
        jax.distributed.shutdown()
        _watch.leave()


def fail(code: int, message: str, *, sure: bool = True) -> None:
    """Say a fault once, in the first process, and end this process and with it the others. It does not return.

    Args:
        code: exit code.
        message: the fault.
        sure: whether it is a fault of this process, and not perhaps the consequence of the loss of another one.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is left is to wait
    try:
        said = False if _watch else _come_to_tell(code, message)
        if _watch:
            _watch.fail(message, code, sure=sure, said=said)
            time.sleep(0.2)  # until the message has gone out
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _come_to_tell(code: int, message: str) -> bool:
    """Come to where the expected processes meet, to tell them of a fault. Return whether this process has said it.

    The first one says it once it is there, by the watch. Another one says it itself if the first does not come soon,
    and then goes on waiting for it, since the first one would wait for this one. An interrupted process does not wait:
    it tells the first one if that is there. Nobody waits yet for a first one that has not come.
    """
    spoken, interrupted = threading.Event(), code > 128

    def say() -> None:
        if not spoken.is_set():
            spoken.set()
            print(message, file=sys.stderr, flush=True)

    late = threading.Timer(_UNHEARD, say)
    late.daemon = True
    late.start()
    try:
        at = _found(_expected)
        if at.processes > 1 and not (interrupted and at.process == 0):
            _come(at, _QUICKLY if interrupted else arrival.LIMIT)
    except Exception:  # such as of an address that cannot be read: the fault of before is what counts, and is said
        pass
    late.cancel()
    if _watch is None:
        say()
    return spoken.is_set()


def _interruptibly(wait: Callable, *args: Any) -> Any:
    """Return what a function returns that waits in C, where no signal is handled: in a thread, so that signals are."""
    done: list[Any] = []

    def work() -> None:
        try:
            done.append((wait(*args), None))
        except Exception as error:
            done.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)  # without a limit, no signal would be handled here either
    value, error = done[0]
    if error is not None:
        raise error
    return value


def _aborted(said: str) -> None:
    """Say what a library's abort means: another process is lost, unless this one is alone."""
    if _watch:
        _watch.settle()
        _watch.fail(said)
    else:
        print(said, file=sys.stderr, flush=True)
