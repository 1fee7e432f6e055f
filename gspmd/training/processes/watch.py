"""Watching the other processes: one that ends without having said so ends all of them, with one message.

The first process has a connection to each other one. The system closes the connections of a process that dies, so that
this is noticed at once; of a machine that is lost, after `_SILENCE` seconds without a word. JAX's own heartbeat takes
longer, and its message says neither which process it was nor what to do.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

_BEAT, _SILENCE = 2.0, 30.0
"""Seconds between two signs of life, and without one until a process is held for lost."""
_GRACE = 5.0
"""Seconds in which a process that has failed waits for what the others say of it."""


class Watch(threading.Thread):
    """Listen to the other processes, and tell them how this one is.

    Args:
        index: of this process.
        count: number of processes.
        peers: a connection by process: those of all others for process 0, that of process 0 for any other.

    Attributes:
        advice: what a message ends with: which step is saved, and how to go on.
    """

    def __init__(self, index: int, count: int, peers: Mapping[int, socket.socket]):
        super().__init__(daemon=True, name="watch")
        self._index, self._count, self._peers = index, count, dict(peers)
        self._ended = threading.Event()
        self.advice: Callable[[], str] = lambda: ""

    def run(self) -> None:
        """Watch until this process leaves, or another one is lost."""
        heard = dict.fromkeys(self._peers, time.monotonic())
        rest, said = dict.fromkeys(self._peers, b""), 0.0
        with selectors.DefaultSelector() as ready:
            for peer, connection in self._peers.items():
                ready.register(connection, selectors.EVENT_READ, peer)
            while not self._ended.is_set():
                for key, _ in ready.select(_BEAT / 2):
                    peer, connection = key.data, self._peers[key.data]
                    heard[peer] = time.monotonic()
                    try:
                        words = connection.recv(1 << 16)
                    except OSError:
                        words = b""
                    *lines, rest[peer] = (rest[peer] + words).split(b"\0")
                    if b"done" in lines:
                        ready.unregister(connection)
                        del heard[peer]
                        continue
                    for line in lines:
                        self._hear(peer, line.decode())
                    if not words:
                        self._lose(peer, "ended without a word: it was killed, or ran out of memory")
                now = time.monotonic()
                if now - said >= _BEAT:
                    said = now
                    self._tell("beat")
                for peer, last in heard.items():
                    if now - last > _SILENCE:
                        self._lose(peer, f"has been silent for {_SILENCE:.0f} seconds")

    def leave(self) -> None:
        """Say that this process is done, so that its end is no loss."""
        self._ended.set()
        self._tell("done")

    def fail(self, message: str) -> None:
        """Say that this process fails; the first one shows it, unless it fails likewise, and ends the others."""
        self._ended.set()
        if self._index == 0:
            self._tell("end")
        elif not self._tell(f"failed {message}"):
            print(message, file=sys.stderr, flush=True)

    def settle(self) -> None:
        """Wait for a moment: if the cause of an error is that another process is lost, this one ends meanwhile."""
        self._ended.wait(_GRACE)

    def _hear(self, peer: int, line: str) -> None:
        if line == "end":
            os._exit(1)
        # What all of them find wrong, the main thread is about to say.
        if line.startswith("failed ") and not self._ended.wait(_GRACE):
            self._end(f"Process {peer} of {self._count} failed: {line.removeprefix('failed ')}")

    def _lose(self, peer: int, how: str) -> None:
        if not self._ended.is_set():
            self._end(f"The run failed: process {peer} of {self._count} {how}.")

    def _end(self, message: str) -> None:
        """End this process and those that it watches."""
        self._tell("end")
        with contextlib.suppress(OSError):  # the run's folder may be lost too
            message += self.advice()
        print(message, file=sys.stderr, flush=True)
        os._exit(1)

    def _tell(self, word: str) -> bool:
        """Send a word to all peers. Return whether one has got it."""
        got = False
        for connection in self._peers.values():
            try:
                connection.sendall(word.encode() + b"\0")
                got = True
            except OSError:  # it is gone, which is noticed where it is read
                pass
        return got
