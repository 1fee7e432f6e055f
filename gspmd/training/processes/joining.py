"""Joining the processes of a run, before JAX starts; leaving them together."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax._src.distributed import global_state as _runtime  # its store of keys has no public name

from gspmd import host
from gspmd.training.flags import parse_processes
from gspmd.training.processes.native import keep_apart
from gspmd.training.processes.watch import Watch
from gspmd.training.toml import ConfigError

# Seconds for all processes to come, and for all of them to go: the first one draws its pictures meanwhile.
_ARRIVAL, _DEPARTURE = 300, 300
# Seconds until the first process has read the text, of which the others may have less: it is watched meanwhile.
_PATIENCE = 24 * 3600
_watch: Watch | None = None
_given = ""
_questions = 0


def join(given: str) -> None:
    """Join the processes of a run; they are one cluster from then on, and one of them that dies ends all.

    Args:
        given: "auto" for the cluster that JAX detects, `HOST:PORT,processes=N,process=I`, or "" for one process.

    Raises:
        ConfigError: no cluster is detected, or its processes do not come.
    """
    global _watch, _given
    if not given:
        return
    doing = f"cannot join the processes of --distributed {given}:"
    named, _given = {}, given
    if given != "auto":
        at = parse_processes(given)
        _given = f"{at.address},processes={at.processes},process=I"
        named = {"coordinator_address": at.address, "num_processes": at.processes, "process_id": at.process}
        named["cluster_detection_method"] = "deactivate"
    # JAX would handle SIGTERM itself.
    jax.config.update("jax_enable_preemption_service", False)
    began = time.monotonic()
    keep_apart(lambda: _aborted(began))
    try:
        jax.distributed.initialize(**named, initialization_timeout=_ARRIVAL, shutdown_timeout_seconds=_DEPARTURE)
    except ValueError:  # "coordinator_address should be defined."
        fault = "neither SLURM, Open MPI, Kubernetes (with jax[k8s]) nor a TPU runtime has started this process. "
        fault += "Start it with srun or mpirun, or say HOST:PORT,processes=N,process=I."
        raise ConfigError(doing, [fault]) from None
    except RuntimeError as error:
        raise ConfigError(doing, [f"{str(error).splitlines()[0]}"]) from None
    host.share_devices(count())
    if count() > 1:
        _watch = Watch(index(), count(), _connections())
        _watch.start()


def index() -> int:
    """Number of this process; unlike `jax.process_index`, without starting a backend."""
    return _runtime.process_id


def count() -> int:
    """Number of processes of the run; unlike `jax.process_count`, without starting a backend."""
    return _runtime.num_processes


def first() -> bool:
    """Whether this is the process that writes and speaks for all of them."""
    return index() == 0


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
        _runtime.client.key_value_set(key, make())
    return _runtime.client.blocking_key_value_get(key, _PATIENCE * 1000)


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


def fail(code: int, message: str) -> None:
    """End this process, and with it the others, if there are some; else return.

    Args:
        code: exit code.
        message: what the first process has said, or shall say.
    """
    if _watch:
        _watch.fail(message)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.2)  # until the message has gone out
        os._exit(code)


def settle() -> None:
    """After an error: wait whether another process is lost, which ends this one with a message of its own."""
    if _watch:
        _watch.settle()


def _aborted(began: float) -> None:
    """Say what a library's abort means: another process is lost, or, while it is waited for, has not come."""
    settle()
    if _watch is None and time.monotonic() - began >= _ARRIVAL:
        where = f"process {index()} of {count()} has waited for the others at {_runtime.coordinator_address}"
        print(f"The run failed: {where} for {_ARRIVAL} seconds.", file=sys.stderr, flush=True)
        os._exit(1)


def _connections() -> dict[int, socket.socket]:
    """Connections of the first process to all others: all of them there, elsewhere the one."""
    key, host_name = "gspmd/watch", _runtime.coordinator_address.rsplit(":", 1)[0].strip("[]")
    if not first():
        port = int(_runtime.client.blocking_key_value_get(key, _ARRIVAL * 1000))
        connection = socket.create_connection((host_name, port), timeout=_ARRIVAL)
        connection.sendall(index().to_bytes(4, "big"))
        return {0: connection}
    with socket.create_server(("", 0), backlog=count()) as server:
        server.settimeout(_ARRIVAL)
        _runtime.client.key_value_set(key, str(server.getsockname()[1]))
        peers = {}
        while len(peers) < count() - 1:
            connection, _ = server.accept()
            peers[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")] = connection
    return peers
