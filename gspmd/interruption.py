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
"""Bytes of the stack of a thread that works for another."""
_left: "list[threading.Event]" = []
"""For each function that an interrupt left working: the event of its end."""
_in_command = False
"""Whether this process runs a command, which ends it after an interrupt."""


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


def begin_command() -> None:
    """Note that this process runs a command of gspmd, and ends with it."""
    global _in_command
    _in_command = True


def is_left_working() -> bool:
    """Return whether an interrupt has left a thread that still works: it crashes if the interpreter is taken down."""
    return not all(finished.is_set() for finished in _left)


def answering(compile: "Callable[..., T]", *args: "Any", **more: "Any") -> "T":
    """Call a compiler; in the process of a command, answer signals meanwhile, as `interruptibly` does.

    Any other process waits for the compiler before it handles a signal, as with JAX itself: a program or a notebook
    goes on after Ctrl-C, and would take down, or start again beside it, a compiler that still works.
    """
    return interruptibly(compile, *args, **more) if _in_command else compile(*args, **more)


def interruptibly(work: "Callable[..., T]", *args: "Any", **more: "Any") -> "T":
    """Call a function that works or waits in C for long in a thread, so that signals are handled meanwhile.

    Python handles signals in the main thread, between two of its own instructions. An interrupt leaves the function
    working; see `is_left_working`. Settings that JAX keeps for each thread, such as those of `jax.log_compiles()`, are
    not those of the caller.
    """
    from threading import Event, Thread, current_thread, main_thread, stack_size

    if current_thread() is not main_thread():  # No signal is handled here.
        return work(*args, **more)
    done: list[tuple[Any, BaseException | None]] = []
    # Not `thread.join`: interrupted, it takes the thread for ended in Python 3.11 and 3.12.
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
        # Where locks are no semaphores, as on macOS, an unlimited wait would handle no signal either.
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
        del error  # Its traceback has this frame, so they would keep one another alive.
