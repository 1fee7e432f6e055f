"""Interrupts: the exception of each signal, and how one ends a command in one line while its libraries are imported.

This module imports nothing slow. The first file of a command imports it before everything else, so that interrupts are
handled from the start.
"""

import os
import signal

# The default handler of each signal: `end_at_once` replaces these handlers only. A signal that the caller ignores (as
# SIGINT for a background job of a script, or SIGHUP under nohup) stays ignored.
_USUAL: "dict[signal.Signals, signal._HANDLER]" = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


class Terminated(KeyboardInterrupt):
    """SIGTERM, unless it is deferred.

    Attributes:
        number: the signal.
    """

    number = signal.SIGTERM


class HungUp(KeyboardInterrupt):
    """SIGHUP, unless it is deferred: the terminal is closed.

    Attributes:
        number: the signal.
    """

    number = signal.SIGHUP


def number_of(interrupt: BaseException | type[BaseException]) -> int:
    """Return the signal that caused an interrupt, from the exception or its type.

    >>> number_of(KeyboardInterrupt()) == signal.SIGINT, number_of(Terminated) == signal.SIGTERM
    (True, True)
    """
    return getattr(interrupt, "number", signal.SIGINT)


def end(number: int, frame: object) -> None:
    """Handle a signal by ending the process, in one line."""
    cursor = b"\x1b[?25h" if os.isatty(2) else b""  # A progress line has hidden the cursor.
    try:
        os.write(2, cursor + b"\nInterrupted.\n")
    finally:
        os._exit(128 + number)


def end_at_once() -> None:
    """Make SIGINT, SIGTERM and SIGHUP end this process from here on."""
    for number, usual in _USUAL.items():
        if signal.getsignal(number) == usual:
            signal.signal(number, end)


def end_as_usual() -> None:
    """Undo `end_at_once`."""
    for number, usual in _USUAL.items():
        if signal.getsignal(number) == end:
            signal.signal(number, usual)
