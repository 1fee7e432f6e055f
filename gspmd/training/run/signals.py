"""SIGINT and SIGTERM: deferred to the end of a step, where the run saves and stops."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

import jax
from jax.experimental import multihost_utils
from rich.console import Console


class Interrupted(Exception):
    """The run was interrupted; `step` is the newest checkpoint to resume from.

    Attributes:
        step: of the newest checkpoint; None if there is none.
        out: the run's folder.
        number: the signal.
        agreed: whether all processes stop at this step.
    """

    def __init__(self, step: int | None, out: Path, number: int = signal.SIGINT, *, agreed: bool = False):
        self.step, self.out, self.number, self.agreed = step, out, number, agreed
        super().__init__("interrupted before a step was saved" if step is None else f"interrupted after step {step}")


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is not deferred.

    Attributes:
        number: the signal.
    """

    number = signal.SIGTERM


_CLOSED = b"\nStandard output is closed: stopping at the end of this step.\n"
_HEARD = b"\nStopping at the end of this step. To stop at once: interrupt again.\n"


class Stop:
    """Defer SIGINT and SIGTERM until the end of a step; a second signal interrupts at once.

    Who presses Ctrl-C in a terminal is told so: a step may take long, and the first one is compiled.

    Attributes:
        number: the first signal; None before it.
    """

    number: int | None = None

    def __enter__(self) -> "Stop":
        self._before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread, which alone can handle signals
                break
        return self

    @contextmanager
    def closed(self, console: Console) -> Iterator[None]:
        """Take it for a signal where what the console writes to is closed, as a pipe is whose reader has ended."""

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
        """Whether a signal has come, to this process."""
        return self.number is not None

    def agreed(self) -> bool:
        """Whether a signal has come to any process, so that all of them stop at the same step; all have to ask."""
        if jax.process_count() > 1:
            self.number = int(multihost_utils.process_allgather(self.number or 0).max()) or None
        return self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            _raise(number, frame)
        self.number = number
        if number == signal.SIGINT and sys.stderr is not None and sys.stderr.isatty():
            os.write(2, _HEARD)  # print may be at work where the signal comes, and cannot be entered again

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated on SIGTERM, as KeyboardInterrupt on SIGINT."""
    try:
        before = signal.signal(signal.SIGTERM, _raise)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
