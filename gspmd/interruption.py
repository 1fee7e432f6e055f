"""Interrupts: an exception for each signal, and a handler for the time in which a command imports its libraries.

The handler ends the command with one line of output instead of a traceback.

This module imports nothing slow. The first file of a command imports it before everything else, so that interrupts are
handled from the start.
"""

import os
import signal

TYPE_CHECKING = False  # As in typing, which takes as long to import as all of this.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

# The default handler of each signal: `end_at_once` replaces these handlers only. A signal that the caller ignores (as
# SIGINT for a background job of a script, or SIGHUP under nohup) stays ignored.
_USUAL: "dict[signal.Signals, signal._HANDLER]" = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


class Terminated(KeyboardInterrupt):
    """The exception that SIGTERM raises, unless the signal is deferred.

    Attributes:
        number: the signal.
    """

    number = signal.SIGTERM


class HungUp(KeyboardInterrupt):
    """The exception that SIGHUP raises (the terminal was closed), unless the signal is deferred.

    Attributes:
        number: the signal.
    """

    number = signal.SIGHUP


def number_of(interrupt: BaseException | type[BaseException]) -> int:
    """Return the signal that caused an interrupt, given the exception or its type.

    >>> number_of(KeyboardInterrupt()) == signal.SIGINT, number_of(Terminated) == signal.SIGTERM
    (True, True)
    """
    return getattr(interrupt, "number", signal.SIGINT)


def end(number: int, frame: object) -> None:
    """Handle a signal: write one line, and end the process."""
    cursor = b"\x1b[?25h" if os.isatty(2) else b""  # A progress line has hidden the cursor.
    try:
        os.write(2, cursor + b"\nInterrupted.\n")
    finally:
        os._exit(128 + number)


def end_at_once() -> None:
    """Install `end` as the handler of SIGINT, SIGTERM and SIGHUP."""
    for number, usual in _USUAL.items():
        if signal.getsignal(number) == usual:
            signal.signal(number, end)


def end_as_usual() -> None:
    """Undo `end_at_once`."""
    for number, usual in _USUAL.items():
        if signal.getsignal(number) == end:
            signal.signal(number, usual)


def interruptibly(work: "Callable[..., T]", *args: "Any", **more: "Any") -> "T":
    """Call a function that spends long in C code, such as a compiler, in a thread, so that signals are still handled.

    Python handles signals in the main thread, between two of its own instructions. After an interrupt the function goes
    on in its thread; it stops when the command ends the process.
    """
    from threading import Thread, current_thread, main_thread

    if current_thread() is not main_thread():  # No signal is handled here.
        return work(*args, **more)
    done: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            done.append((work(*args, **more), None))
        except BaseException as error:
            done.append((None, error))

    thread = Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)  # Without a limit, no signal would be handled here either.
    value, error = done[0]
    if error is not None:
        raise error
    return value
