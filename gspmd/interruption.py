"""Interrupts: the exception of each signal, and how one ends a command in one line while its libraries are imported.

This imports nothing that takes time: what begins a process that is a command imports it before all else, so that an
interrupt is answered from the first moment on.
"""

import os
import signal

# What answers a signal where nobody has asked for anything else; one that is ignored, as SIGINT is in the background of
# a script and SIGHUP under nohup, stays so.
_USUAL: "dict[signal.Signals, signal._HANDLER]" = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is not deferred.

    Attributes:
        number: the signal.
    """

    number = signal.SIGTERM


class HungUp(KeyboardInterrupt):
    """SIGHUP, where it is not deferred: the terminal is closed.

    Attributes:
        number: the signal.
    """

    number = signal.SIGHUP


def number_of(interrupt: BaseException | type[BaseException]) -> int:
    """Return the signal that an interrupt came from, by the exception or by its type.

    >>> number_of(KeyboardInterrupt()) == signal.SIGINT, number_of(Terminated) == signal.SIGTERM
    (True, True)
    """
    return getattr(interrupt, "number", signal.SIGINT)


def end(number: int, frame: object) -> None:
    """Handle a signal by ending the process, in one line."""
    cursor = b"\x1b[?25h" if os.isatty(2) else b""  # which a changing line has hidden
    try:
        os.write(2, cursor + b"\nInterrupted.\n")
    finally:
        os._exit(128 + number)


def end_at_once() -> None:
    """Let SIGINT, SIGTERM and SIGHUP end this process from here on."""
    for number, usual in _USUAL.items():
        if signal.getsignal(number) == usual:
            signal.signal(number, end)


def end_as_usual() -> None:
    """Take back `end_at_once`."""
    for number, usual in _USUAL.items():
        if signal.getsignal(number) == end:
            signal.signal(number, usual)
