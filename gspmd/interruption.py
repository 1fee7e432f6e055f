"""Interrupts: an exception for each signal, and a handler for the time in which a command imports its libraries.

The handler ends the command with one line of output instead of a traceback.

This module imports nothing slow. The first file of a command imports it before everything else, so that interrupts are
handled from the start.
"""

import os
import signal

TYPE_CHECKING = False  # As in typing, which takes as long to import as all of this.
if TYPE_CHECKING:
    import threading
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


_STACK = 64 * 2**20
"""Stack size, in bytes, of the thread in which `interruptibly` runs a function."""
_left: "list[threading.Event]" = []
"""One event for each function that still runs after an interrupt; the event is set when the function ends."""
_in_command = False
"""Whether this process runs a gspmd command, which ends the process after an interrupt."""


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
    """Return the number of the signal that caused an interrupt, given the exception or its type.

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


def begin_command() -> None:
    """Record that this process runs a command of gspmd, and ends when the command ends."""
    global _in_command
    _in_command = True


def is_left_working() -> bool:
    """Return whether a thread still runs after an interrupt; the thread would crash if the interpreter shut down."""
    return not all(finished.is_set() for finished in _left)


def answering(compile: "Callable[..., T]", *args: "Any", **more: "Any") -> "T":
    """Call a compiler; in the process of a command, signals are handled during the call, as by `interruptibly`.

    Any other process handles a signal only after the compiler has returned, as JAX does. The reason is that a program
    or a notebook continues after Ctrl-C. It could then exit, or call the compiler again, while the first call is still
    running.
    """
    return interruptibly(compile, *args, **more) if _in_command else compile(*args, **more)


def interruptibly(work: "Callable[..., T]", *args: "Any", **more: "Any") -> "T":
    """Call a function that spends a long time in C code; it runs in a thread, so that signals are handled meanwhile.

    Python handles signals in the main thread, between two instructions of Python code. After an interrupt the called
    function continues to run; see `is_left_working`. Settings that JAX keeps for each thread, such as those of
    `jax.log_compiles()`, do not apply inside the function.
    """
    from threading import Event, Thread, current_thread, main_thread, stack_size

    if current_thread() is not main_thread():  # No signal is handled here.
        return work(*args, **more)
    done: list[tuple[Any, BaseException | None]] = []
    # Not `thread.join`: in Python 3.11 and 3.12, if it is interrupted, it marks the thread as finished.
    finished = Event()

    def run() -> None:
        try:
            done.append((work(*args, **more), None))
        except BaseException as error:
            done.append((None, error))
        finished.set()

    thread = Thread(target=run, daemon=True)
    # Compilers recurse deeply. With `ulimit -s unlimited` the main thread has any size, but glibc gives threads 2 MB.
    before = stack_size(_STACK)
    try:
        try:
            thread.start()
        finally:
            stack_size(before)
        # Where locks are not semaphores, as on macOS, a wait without a limit would not handle signals either.
        while not finished.wait(0.2):
            pass
    except KeyboardInterrupt:
        _left.append(finished)
        raise
    value, error = done.pop()
    if error is None:
        return value
    try:
        raise error
    finally:
        del error  # Its traceback refers to this frame, so the two would keep each other alive.
