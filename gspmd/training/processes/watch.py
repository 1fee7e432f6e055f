"""The watch over the other processes: if one process ends unexpectedly, all processes end, with one message.

The first process has a connection to every other process. The system closes the connections of a process that dies, so
the death is noticed immediately. A lost machine is noticed after `_SILENCE` seconds without a message. JAX's own
heartbeat takes longer, and its message names neither the process nor a remedy.
"""

import contextlib
import os
import re
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gspmd.training.processes import arrival

_BEAT, _SILENCE = 2.0, 30.0
"""Seconds between two signs of life, and seconds without a sign of life after which a process counts as lost."""
_GRACE = 3.0
"""Seconds that the first process waits before it prints another process's fault: it may find the same fault itself."""
_SETTLE = 1.0
"""Seconds to wait before an error counts as the cause of a failure.

If the loss of another process caused the error, this process knows by then, since the system closes all connections of
a process at once.
"""
_ANSWER = 10.0
"""Seconds that a process gives the first process to print its fault, before it prints the fault itself.

This is well over `_GRACE`, for slow networks and busy hosts, and well under `_SILENCE`.
"""
_PROMPT = 10.0
"""Seconds within which a caller must send its process number, which our processes do immediately.

Any other caller, such as a port scanner, is disconnected after this time, since it would keep a descriptor open.
"""
_PAUSE = 0.2
_GREETING = re.compile(rb"here ([0-9]{1,9}) ([0-9]{1,9})")
_END, _FAILED = re.compile("end ([0-9]{1,3})"), re.compile("failed ([0-9]{1,3}) ([01]) (.*)", re.DOTALL)
_LONGEST = 64
"""Largest number of bytes of a greeting."""


@dataclass(frozen=True)
class _Told:
    """A fault reported by another process: its text, whether that process surely caused it, and when to print it."""

    peer: int
    code: int
    sure: bool
    message: str
    until: float


class Watch(threading.Thread):
    """A thread that listens to the other processes, and sends them signs of life and faults of this process.

    A fault of any process ends all processes, and is printed once, by the first process. Every other process reports a
    fault to the first process at once, and then stays until the first process ends it. So the first fault to arrive is
    not the consequence of another fault. If a fault occurs before all processes have arrived, the first process stays
    to tell the processes that arrive later, which may have the same fault. It does not stay if a process was
    interrupted or lost.

    Args:
        index: the number of this process.
        count: number of processes.
        peers: the connections by process number. Process 0 is connected to all others, and any other process only to
            process 0.
        door: the listening socket on which the other processes arrive; only for process 0, if it has no
            connections yet.
        address: the address of the listening socket.

    Attributes:
        advice: a function that returns the last words of a message: the saved step, and the command with which to
            continue.
        complete: an event that is set once all processes have arrived.
    """

    def __init__(
        self,
        index: int,
        count: int,
        peers: Mapping[int, socket.socket],
        door: socket.socket | None = None,
        address: str = "",
    ):
        super().__init__(daemon=True, name="watch")
        self._index, self._count, self._peers = index, count, dict(peers)
        self._done = threading.Event()  # Set when this process leaves.
        self._ending = threading.Lock()  # Held by the thread that ends this process and prints the reason.
        self._sending = threading.Lock()  # The main thread and this one send on the same connections.
        self._told: _Told | None = None  # The first fault of a peer.
        self._heard = dict.fromkeys(self._peers, time.monotonic())
        self._rest = dict.fromkeys(self._peers, b"")
        self._door, self._address, self._began = door, address, time.monotonic()
        # Callers that have not said their process number: their words, and the time of their arrival.
        self._callers: dict[socket.socket, tuple[bytes, float]] = {}
        self._over = 0  # The exit code to send to processes that arrive after a fault.
        self._staying = False  # Whether the fault is printed, and this process stays to send that code.
        self.complete = threading.Event()
        self.advice: Callable[[], str] = lambda: ""

    def run(self) -> None:
        """Watch until this process leaves, or until another process fails or is lost."""
        try:
            self._watch()
        except Exception:  # Nobody would notice: the processes would wait for one another forever.
            error = traceback.format_exc().strip()
            self._end(f"The run failed: process {self._index} cannot watch the others:\n{error}")

    def _watch(self) -> None:
        said, told_of_waiting = 0.0, False
        with selectors.DefaultSelector() as ready:
            for peer, connection in self._peers.items():
                ready.register(connection, selectors.EVENT_READ, peer)
            if self._door:
                ready.register(self._door, selectors.EVENT_READ)
            while not self._done.is_set():
                for key, _ in ready.select(_BEAT / 4):
                    if key.fileobj is self._door:
                        self._let_in(ready)
                    elif key.data is None:
                        if key.fileobj in self._callers:  # It is missing if the door was closed a moment ago.
                            self._greet(key.fileobj, ready)
                    else:
                        self._listen(key.data, ready)
                now = time.monotonic()
                if self._told and now >= self._told.until:
                    self._end_told()
                if now - said >= _BEAT:
                    said = now
                    self._tell("beat")
                for peer, last in self._heard.items():
                    if now - last > _SILENCE:
                        self._lose(peer, f"has been silent for {_SILENCE:.0f} seconds")
                for caller in [each for each, (_, since) in self._callers.items() if now - since >= _PROMPT]:
                    self._dismiss(caller, ready)
                if self._door and now - self._began >= arrival.TELL and not told_of_waiting:
                    told_of_waiting = True
                    arrival.say_waiting(self._missing(), self._count, self._address)
                if self._door and now - self._began >= arrival.LIMIT:
                    where = f"{arrival.named(self._missing())} of {self._count} at {self._address}"
                    self._end(f"The run failed: process 0 has waited for {where} for {arrival.LIMIT:.0f} seconds.")
                if self._staying and not self._stays(self._over):
                    os._exit(self._over)

    def leave(self) -> None:
        """Tell the other processes that this process is done, so that its end is not taken for a loss."""
        self._done.set()
        self._tell("done")

    def fail(self, message: str, code: int = 1, *, sure: bool = True, said: bool = False) -> None:
        """Let the first process print a fault of this process once, and end all other processes.

        The call returns only if this process has to end itself; otherwise the process ends during the call.

        Args:
            message: the fault.
            code: the exit code of all processes.
            sure: whether this process certainly caused the fault. If false, the loss of another process may be the
                cause.
            said: whether this process has already printed the fault.
        """
        if self._index != 0:
            if self._tell(f"failed {code} {int(sure)} {message}"):
                time.sleep(_ANSWER)
        elif not sure and not self._staying:
            time.sleep(_SETTLE)
            if self._told and self._told.message != message:
                time.sleep(_ANSWER)  # Another process's fault came first, and the watching thread is about to print it.
        while not self._ending.acquire(timeout=_PAUSE):
            if self._staying:  # A fault is printed, and a later event, such as an interrupt, ends the stay.
                os._exit(self._over)
        if self._index == 0:
            self._over = code
            self._tell(f"end {code}")
        if not said:
            _say(message if sure else self._advised(message))
        if self._stays(code):
            self._staying = True
            self.join()  # This ends the process.

    def settle(self) -> None:
        """Wait a few seconds, during which this process ends if another process is lost or has failed."""
        time.sleep(_SETTLE + _GRACE)

    def _let_in(self, ready: selectors.BaseSelector) -> None:
        """Accept a new connection; the caller must then send its process number."""
        if self._door:
            try:
                caller, _ = self._door.accept()
            except OSError:  # The caller is gone, or too many files are open, one of which may be closed soon.
                time.sleep(_PAUSE)
                return
            self._callers[caller] = b"", time.monotonic()
            ready.register(caller, selectors.EVENT_READ)

    def _greet(self, caller: Any, ready: selectors.BaseSelector) -> None:
        """Accept a caller that identifies itself as a process of this run, and disconnect any other caller."""
        words = _received(caller)
        before, since = self._callers[caller]
        greeting, over, rest = (before + words).partition(b"\0")
        if words and not over and len(greeting) < _LONGEST:
            self._callers[caller] = greeting, since
            return
        says = _GREETING.fullmatch(greeting)
        count, peer = map(int, says.groups()) if says else (0, 0)
        if not over or peer >= count:
            self._dismiss(caller, ready)
            return
        ready.unregister(caller)
        del self._callers[caller]
        _send(caller, arrival.WELCOME)
        fault = ""
        if count != self._count:
            fault = f"process {peer} was given {count} as the number of processes, but process 0 was given "
            fault += f"{self._count}; give all of them the same number."
        elif peer == 0 or peer in self._peers:
            fault = f"two processes are process={peer}; number them from 0 to {self._count - 1}."
        if fault:
            _send(caller, b"end 2\0")
            self._end(f"The run failed: {fault}", 2)
            return
        with self._sending:
            self._peers[peer], self._rest[peer], self._heard[peer] = caller, b"", time.monotonic()
        ready.register(caller, selectors.EVENT_READ, peer)
        self._take(peer, rest)
        if self._over:
            self._tell(f"end {self._over}")
        if not self._missing():
            self._close_door(ready)

    def _dismiss(self, caller: socket.socket, ready: selectors.BaseSelector) -> None:
        """Disconnect a caller that is not a process of this run."""
        ready.unregister(caller)
        del self._callers[caller]
        caller.close()

    def _close_door(self, ready: selectors.BaseSelector) -> None:
        """Close the listening socket, so that JAX can use its port, and let all processes start JAX."""
        if self._door:
            ready.unregister(self._door)
            for caller in [*self._callers]:
                self._dismiss(caller, ready)
            self._door.close()
            self._door = None
        if not self._over:
            self._tell("go")
            self.complete.set()

    def _missing(self) -> list[int]:
        """Return the processes that have not arrived."""
        return [process for process in range(1, self._count) if process not in self._peers]

    def _stays(self, code: int) -> bool:
        """Return whether this process stays after printing a fault, to report it to processes that arrive later."""
        waits = time.monotonic() - self._began < arrival.LIMIT
        return self._door is not None and waits and code <= 128  # Greater codes mean signals.

    def _listen(self, peer: int, ready: selectors.BaseSelector) -> None:
        """Read the messages of another process, and act on them."""
        connection = self._peers[peer]
        words = _received(connection)
        self._heard[peer] = time.monotonic()
        lines = self._take(peer, words)
        if b"done" in lines or not words:
            ready.unregister(connection)
            del self._heard[peer]
        if not words and b"done" not in lines:
            self._lose(peer, "ended without a word: it was killed, or ran out of memory")

    def _take(self, peer: int, words: bytes) -> list[bytes]:
        """Act on the complete messages in the bytes that another process has sent, and return these messages."""
        *lines, self._rest[peer] = (self._rest[peer] + words).split(b"\0")
        for line in lines:
            self._hear(peer, line.decode(errors="replace"))
        return lines

    def _hear(self, peer: int, line: str) -> None:
        if line == "go":
            self.complete.set()
        if (end := _END.fullmatch(line)) and self._ending.acquire(blocking=False):
            os._exit(int(end[1]))
        if (failed := _FAILED.fullmatch(line)) and self._told is None:
            code, sure, message = failed.groups()
            self._told = _Told(peer, int(code), sure == "1", message, time.monotonic() + _GRACE)

    def _lose(self, peer: int, how: str) -> None:
        if self._told and self._told.peer == peer:  # The other process has reported the reason for its end.
            self._end_told()
        self._end(self._advised(f"The run failed: process {peer} of {self._count} {how}."))

    def _end_told(self) -> None:
        """If another process has reported a fault, print it and end this process."""
        if self._told:
            message = f"Process {self._told.peer} of {self._count} failed: {self._told.message.strip()}"
            self._end(message if self._told.sure else self._advised(message), self._told.code, stay=True)

    def _advised(self, message: str) -> str:
        """Append `advice` to a message: after a space, or on a new line if the message has several lines."""
        advice = ""
        with contextlib.suppress(OSError):  # The run's folder may be lost too.
            advice = self.advice().strip()
        return message + ("\n" if "\n" in message else " ") + advice if advice else message

    def _end(self, message: str, code: int = 1, *, stay: bool = False) -> None:
        """End this process and those that it watches, unless another thread is already doing so.

        Args:
            message: the reason for the end, which is printed.
            code: the exit code of all processes.
            stay: whether to stay before ending, to tell processes that have not arrived.
        """
        if not self._ending.acquire(blocking=False):
            return
        self._over = code
        self._tell(f"end {code}")
        _say(message)
        self._staying = stay and self._stays(code)
        if not self._staying:
            os._exit(code)

    def _tell(self, word: str) -> bool:
        """Send a message to all connected processes, and return whether any of them received it."""
        got = False
        with self._sending:
            for connection in self._peers.values():
                got |= _send(connection, word.replace("\0", " ").encode(errors="replace") + b"\0")
        return got


def _send(connection: socket.socket, words: bytes) -> bool:
    """Send a message to another process, and return whether it could be sent.

    A failure does not count as the end of the other process; such an end is noticed on reading from the connection.
    """
    try:
        connection.sendall(words)
        return True
    except OSError:
        return False


def _received(connection: socket.socket) -> bytes:
    """Return the bytes that another process has sent, or no bytes if that process has ended."""
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


def _say(message: str) -> None:
    """Print the last message of the process, even if nobody can read it any more."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)
