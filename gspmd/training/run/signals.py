"""SIGINT, SIGTERM and SIGHUP: deferred to the end of a step, where the run saves and stops.

A signal that is ignored when a run begins stays ignored: SIGHUP under `nohup`, and SIGINT for background jobs of a
script, since it is meant for the script's foreground. SIGTERM is always handled, since schedulers end jobs with it.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import NoReturn

from rich.console import Console

from gspmd.display import terminal
from gspmd.interruption import HungUp, Terminated


class Interrupted(Exception):
    """The run was interrupted; `step` is that of the newest checkpoint, from which it can be resumed.

    Attributes:
        step: the step of the newest checkpoint; None if there is none.
        out: the run's folder.
        number: the signal.
        agreed: whether all processes stop at this step.
    """

    def __init__(self, step: int | None, out: Path, number: int = signal.SIGINT, *, agreed: bool = False):
        self.step, self.out, self.number, self.agreed = step, out, number, agreed
        super().__init__("interrupted before a step was saved" if step is None else f"interrupted after step {step}")


_CLOSED = b"\nStandard output is closed: stopping at the end of this step.\n"
_HEARD = "\nStopping {}. To stop at once: interrupt again.\n"


class Stop:
    """Defer SIGINT, SIGTERM and SIGHUP until the end of a step; a second SIGINT or SIGTERM interrupts at once.

    A terminal that is closed sends SIGHUP more than once, from the kernel and from the shell, and a machine that shuts
    down sends SIGTERM after it: neither asks for a faster end. A second Ctrl-C in a terminal interrupts at once, since
    a step may take long, and the first one includes compilation.

    Attributes:
        when: the end of the sentence that answers a signal in a terminal: when the program stops, and what it does
            then.
        number: the first signal; None before it.
    """

    number: int | None = None

    def __init__(self, when: str = "at the end of this step, which is then saved"):
        self.when = when

    def __enter__(self) -> "Stop":
        self._before = {}
        for number in _heard():
            self._before[number] = signal.signal(number, self._ask)
        return self

    @contextmanager
    def closed(self, console: Console) -> Iterator[None]:
        """Treat a closed output of the console, such as a pipe whose reader has ended, as a signal."""

        def ask() -> None:
            console.quiet = True
            self.number = self.number or signal.SIGPIPE
            with suppress(OSError):
                os.write(2, _CLOSED)

        console.on_broken_pipe = ask  # type: ignore[method-assign]
        try:
            yield
        finally:
            del console.on_broken_pipe

    @property
    def asked(self) -> bool:
        """Return whether a signal has come to this process."""
        return self.number is not None

    def agreed(self) -> bool:
        """Return whether a signal has come to any process, so that all of them stop at the same step; every process
        must call this."""
        import jax  # which this module's exceptions do not need

        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            self.number = int(multihost_utils.process_allgather(self.number or 0).max()) or None
        return self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            terminal.leave()
            self.number = self.number or number
            return
        if self.number in (signal.SIGINT, signal.SIGTERM):
            _raise(number, frame)
        self.number = number
        if sys.stderr is not None and sys.stderr.isatty():
            os.write(
                2, _HEARD.format(self.when).encode()
            )  # The signal may interrupt print, which cannot be entered again.

    def interrupt(self) -> NoReturn:
        """Raise the first signal's exception, at a point where the program can stop."""
        _raise(self.number or signal.SIGINT, None)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated on SIGTERM and HungUp on SIGHUP, as Python raises KeyboardInterrupt on SIGINT."""
    before = {number: signal.signal(number, _raise) for number in _heard() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def unheard() -> Iterator[None]:
    """Ignore further signals while a program prints how it has ended, so that the message is printed exactly once."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heard() -> list[int]:
    """Return the signals that this thread handles; only the main thread can handle any."""
    if current_thread() is not main_thread():
        return []
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    return [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if number not in ignored]


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGHUP:
        terminal.leave()
    kinds: dict[int, type[KeyboardInterrupt]] = {signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}
    raise kinds.get(number, KeyboardInterrupt)
