"""SIGINT, SIGTERM and SIGHUP during a run, which are deferred to the end of a step, where the run saves and stops.

A signal that is ignored when a run begins stays ignored. This concerns SIGHUP under `nohup`, and SIGINT for the
background jobs of a script, because SIGINT is meant for foreground jobs. SIGTERM is always handled, because schedulers
end jobs with it.
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
    """Raised if the run was interrupted and has stopped.

    Attributes:
        step: the step of the newest checkpoint, from which the run can be resumed; None if there is none.
        out: the run's folder.
        number: the number of the signal.
        agreed: whether all processes stop at the same step.
    """

    def __init__(self, step: int | None, out: Path, number: int = signal.SIGINT, *, agreed: bool = False):
        self.step, self.out, self.number, self.agreed = step, out, number, agreed
        super().__init__("interrupted before a step was saved" if step is None else f"interrupted after step {step}")


_CLOSED = b"\nStandard output is closed: stopping at the end of this step.\n"
_HEARD = "\nStopping {}. To stop at once: interrupt again.\n"


class Stop:
    """A context that defers SIGINT, SIGTERM and SIGHUP to the end of a step; a second SIGINT or SIGTERM acts at once.

    A second Ctrl-C in a terminal interrupts at once, because a step may take long, and the first step includes
    compilation. A further SIGHUP, or the first SIGTERM after a SIGHUP, does not ask for a faster end: a terminal that
    is closed sends SIGHUP more than once, from the kernel and from the shell, and a machine that shuts down sends
    SIGTERM after SIGHUP.

    Attributes:
        when: the last words of the sentence that is printed in a terminal after a signal: when the program stops, and
            what it does then.
        number: the number of the first signal, or None before the first signal.
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
        """Inside a `with` block, treat the closing of the console's output, such as a pipe, as a signal."""

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
        """Whether this process has received a signal."""
        return self.number is not None

    def agreed(self) -> bool:
        """Return whether any process has received a signal, so that all processes stop at the same step.

        Every process must call this function.
        """
        import jax  # imported here, since the exceptions of this module do not need JAX

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
        """Raise the exception of the signal that arrived; call this method where the program can stop."""
        _raise(self.number or signal.SIGINT, None)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated on SIGTERM and HungUp on SIGHUP inside a `with` block, as Python does for SIGINT."""
    before = {number: signal.signal(number, _raise) for number in _heard() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def unheard() -> Iterator[None]:
    """Ignore further signals inside a `with` block, so that a program's last message is printed exactly once."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heard() -> list[int]:
    """Return the numbers of the signals that this thread handles; only the main thread can handle signals."""
    if current_thread() is not main_thread():
        return []
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    return [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if number not in ignored]


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGHUP:
        terminal.leave()
    kinds: dict[int, type[KeyboardInterrupt]] = {signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}
    raise kinds.get(number, KeyboardInterrupt)
