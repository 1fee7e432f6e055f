"""The meeting of the processes of a run before JAX starts, at the port where JAX's service will listen.

JAX's own wait prints nothing, does not notice a process that is interrupted meanwhile, and accepts two processes with
number 0. Here each process opens a connection to process 0. `Watch` keeps the connections open during the whole run,
and notices by them that a process has ended.
"""

import contextlib
import errno
import socket
import sys
import time

from gspmd.reading import whole_number
from gspmd.training.syntax import Processes
from gspmd.training.toml import ConfigError

LIMIT = 300.0
"""Longest wait for all processes to arrive, in seconds."""
TELL = 10.0
"""Seconds of waiting after which the missing processes are reported."""
WELCOME = b"welcome\0"
"""The first process's answer to a process that has arrived."""
_AGAIN = 0.2
_CONNECTING = 5.0
"""Longest time for one attempt to connect, in seconds; a connected process may wait longer for an answer."""
_IN_USE = 2.0
"""Longest wait for a port that is in use, for example because a run has just ended, in seconds."""


def door(at: Processes) -> socket.socket:
    """Return the listening socket on which the first process accepts the other processes.

    Raises:
        ConfigError: the address cannot be parsed, the port is in use, or this process may not listen there.
    """
    _, port = _host_and_port(at)
    until = time.monotonic() + _IN_USE
    while True:
        try:
            return _listening(port, at.processes)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(_doing(at), [f"cannot listen on port {port}: {error.strerror}."]) from None
        if time.monotonic() >= until:
            fault = f"port {port} is in use on this machine: is another process process=0 too? "
            fault += f"Number the processes from 0 to {at.processes - 1}, or name another port."
            raise ConfigError(_doing(at), [fault])
        time.sleep(_AGAIN)


def knock(at: Processes, limit: float) -> socket.socket:
    """Return a connection from this process to the first process, as soon as the first process answers.

    Args:
        at: the processes of the run, and the number of this process.
        limit: number of seconds during which to try; at least one attempt is made.

    Raises:
        ConfigError: the address cannot be parsed, or the first process did not answer in time; the message has the last
            error.
    """
    where, began, said = _host_and_port(at), time.monotonic(), False
    heard, found = b"", ""
    connection: socket.socket | None = None
    while True:
        try:
            if connection is None:
                connection = socket.create_connection(where, timeout=_CONNECTING)
                connection.sendall(f"here {at.processes} {at.process}\0".encode())
                connection.settimeout(_AGAIN)
                heard, found = b"", "the listener there does not answer"
            # The greeting is not sent again while the connection holds: a first process that was stopped meanwhile
            # would mistake the second greeting for another process.
            words = connection.recv(len(WELCOME) - len(heard))
            heard += words
            if heard == WELCOME:
                connection.settimeout(None)
                return connection
            if not words or not WELCOME.startswith(heard):  # JAX may answer, for a complete run.
                raise OSError("something else answers there; name another port")
        except OSError as error:
            if connection is None or not isinstance(error, TimeoutError):  # Otherwise the answer may still come.
                found = error.strerror or str(error)
                if connection:
                    connection.close()
                connection = None
        waited = time.monotonic() - began
        if waited >= limit:
            if connection:
                connection.close()
            raise ConfigError(_doing(at), [f"process 0 did not listen there within {limit:.0f} seconds: {found}."])
        if waited >= TELL and not said:
            said = True
            say_waiting([0], at.processes, at.address, found)
        if connection is None:
            time.sleep(_AGAIN)


def say_waiting(missing: list[int], processes: int, address: str, found: str = "") -> None:
    """Report on stderr the processes that this process waits for, and the last error if there was one."""
    line = f"Waiting for {named(missing)} of {processes} at {address}, for at most {LIMIT:.0f} seconds"
    with contextlib.suppress(OSError):
        print(f"{line}: {found}." if found else f"{line}.", file=sys.stderr, flush=True)


def named(processes: list[int]) -> str:
    """Return process numbers as text.

    >>> named([1]), named([1, 2, 5]), named(list(range(1, 64)))
    ('process 1', 'processes 1, 2 and 5', '63 processes, among them 1, 2, 3 and 4')
    """
    few = [str(process) for process in processes[:4]]
    listed = " and ".join([", ".join(few[:-1]), few[-1]] if len(few) > 1 else few)
    if len(processes) > len(few):
        return f"{len(processes)} processes, among them {listed}"
    return f"process {listed}" if len(few) == 1 else f"processes {listed}"


def _host_and_port(at: Processes) -> tuple[str, int]:
    name, _, port = at.address.rpartition(":")
    host, number = name.strip("[]"), whole_number(port) or 0
    try:
        readable = bool(host.encode("idna"))  # the encoding in which the host is looked up
    except UnicodeError:
        readable = False
    if not readable or not 0 < number < 2**16:
        fault = f"{at.address!r} is not HOST:PORT, the name of a machine and a port from 1 to 65535."
        raise ConfigError(_doing(at), [fault])
    return host, number


def _listening(port: int, processes: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=processes)
        except OSError as error:  # If IPv6 is supported but has no address.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=processes)


def _doing(at: Processes) -> str:
    return f"cannot join the processes at {at.address} as process {at.process} of {at.processes}:"
