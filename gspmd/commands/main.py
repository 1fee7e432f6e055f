"""`gspmd COMMAND ...`: which commands there are, and how one is started.

This imports nothing that takes time: a command that is misspelled is told at once.
"""

import _thread
import difflib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from threading import current_thread, main_thread
from typing import Any, TextIO

import gspmd
from gspmd.display import terminal
from gspmd.interruption import end, end_as_usual, end_at_once, number_of

#: Command -> what it does. Each is a module of this package with `run(argv, script) -> exit code`.
COMMANDS = {
    "explain": "what an equation will do on a mesh, drawn as the papers draw it",
    "train": "train a Mixture-of-Experts language model on text, every tensor placed by a layout",
    "generate": "continue prompts with a public checkpoint or a trained run, in any layout",
    "export": "write a trained run as a public checkpoint, which transformers loads",
    "search": "find the best layout of a model on a slice, and write it as a file to train with",
    "compile": "ask the TPU compiler whether a model fits on a slice, and what it will cost",
}
_EXAMPLES = (
    'gspmd explain "BLE_xyz, E_xF_yz -> BLF_yzx" --mesh x=4,y=4,z=4 --sizes B=512,L=1,E=18432,F=73728',
    "gspmd train --config tiny",
    'gspmd generate --checkpoint runs/001 --prompt "def "',
    "gspmd search --config llama-2-70b --topology tpu-v5p:4x8x8 --batch 1024 --out found.toml",
    "gspmd compile --config palm-8b --layout weight-stationary-2d --topology tpu-v4:4x4x4",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or list them; return the exit code: 2 for a command that there is not, 130 for an interrupt.

    Args:
        argv: the command and its flags; those of this process if not given, and then the process is to end with this.
    """
    name, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    return _run(name, flags) if argv is not None else _process(name, flags)


def script(name: str, file: str) -> int:
    """Run a command for the file in scripts/ that stands for it, with the flags of this process, which ends with this.

    Args:
        name: the command.
        file: the script's name.
    """
    return _process(name, sys.argv[1:], file)


def _process(name: str, flags: Sequence[str], file: str = "") -> int:
    """Run a command, with which the process ends."""
    sys.unraisablehook = partial(_interrupt_again, sys.unraisablehook)
    try:
        code = _written(partial(_run, name, flags, file, ends=True))
    except KeyboardInterrupt as stopped:  # while the last of the output was written
        code = 128 + number_of(stopped)
    finally:
        if _raises():  # the command has ended, and libraries tidy up
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code > 128:  # XLA may still be compiling in threads of its own, which crash when they are taken down
        os._exit(code)
    return code


def _written(command: Callable[[], int]) -> int:
    """Run a command to where its output is written; return its exit code, or another one where that is not possible.

    Of an output that is closed, as by `| head` or with its terminal, nothing is said: who closed it has seen enough.
    """
    try:
        try:
            code = command()
        except SystemExit:  # of --help
            _flush()
            raise
        _flush()
        return code
    except OSError as error:
        gone = error.errno == errno.EIO and (terminal.hung_up(terminal.OUT) or terminal.hung_up(terminal.ERR))
        if error.filename is not None or not (gone or error.errno in (errno.EPIPE, errno.ENOSPC)):
            raise
        full = error.errno == errno.ENOSPC
        if full:
            with suppress(OSError):
                print(f"Standard output cannot be written: {error.strerror}.", file=sys.stderr, flush=True)
        for stream in _streams():
            try:
                stream.flush()
            except OSError:  # what is left in it would fail once more when the interpreter ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 1 if full else 128 + signal.SIGPIPE  # also of a terminal: no SIGHUP has come


def _streams() -> list[TextIO]:
    return [stream for stream in (sys.stdout, sys.stderr) if stream is not None]


def _flush() -> None:
    for stream in _streams():
        stream.flush()


def _run(name: str, flags: Sequence[str], file: str = "", ends: bool = False) -> int:
    try:
        with _ending_at_once() if ends else nullcontext():
            if name not in COMMANDS:
                return _without_command(name)
            try:
                with _starting() if ends else nullcontext():
                    command = import_module(f"gspmd.commands.{name}")
            except ModuleNotFoundError as error:
                if error.name != "gspmd_models":  # installed with gspmd; a checkout alone does not have it by that name
                    raise
                print(f"{error}. Install gspmd first; in a checkout: pip install -e .", file=sys.stderr)
                return 2
        return command.run(flags, file)
    except KeyboardInterrupt as stopped:
        print("\nInterrupted.", file=sys.stderr)
        return 128 + number_of(stopped)


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Let a signal end the process, in one line, where there is nothing to save: while libraries are imported.

    As an exception it may come up anywhere in them, and some print it, or take it for a module that is not there.
    """
    ours = current_thread() is main_thread()  # only there can signals be handled
    if ours:
        end_at_once()
    try:
        yield
    finally:
        if ours:
            end_as_usual()


def _starting() -> Any:
    """Say on stderr that libraries are imported, once that has taken a while."""
    from gspmd.display.console import console  # here, as below: rich takes longer to import than all of this file
    from gspmd.display.progress import Progress

    return Progress(console(stderr=True), "Starting JAX")


def _raises() -> bool:
    """Whether an interrupt is this process's own concern, rather than being ignored, or the concern of the caller."""
    usual = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, end)
    return usual and current_thread() is main_thread()


def _interrupt_again(show: Callable[[Any], None], raised: Any) -> None:
    """Interrupt once more, and soon, where the exception of an interrupt came up in code that Python lets none leave.

    That is a callback of the garbage collector or a finalizer. JAX has such a callback; a signal that arrives during a
    collection, which takes longer the more there is, comes up in it.
    """
    if not issubclass(raised.exc_type, KeyboardInterrupt):
        return show(raised)
    number = number_of(raised.exc_type)
    _thread.start_new_thread(_interrupt_soon, (number,))  # a Thread takes locks, which may be held here


def _interrupt_soon(number: int) -> None:
    time.sleep(0.02)  # until the callback has returned
    os.kill(os.getpid(), number)  # rather than _thread.interrupt_main, which ends no wait


def _without_command(name: str) -> int:
    """Answer what is no command: the list of commands, the version, or the name of one that may be meant."""
    from gspmd.display.console import console

    if name in ("", "-h", "--help"):
        console().print(_overview(), soft_wrap=True)
        return 0
    if name == "--version":
        print(f"gspmd {gspmd.__version__}")
        return 0
    near = difflib.get_close_matches(name, [*COMMANDS, "--help", "--version"], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    print(f"gspmd: there is no command {name!r}.{hint} Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
    return 2


def _overview() -> Any:
    from rich.text import Text

    width = max(map(len, COMMANDS))
    rows = [Text.assemble("  gspmd ", (name.ljust(width), "bold cyan"), f"  {does}") for name, does in COMMANDS.items()]
    title = Text.assemble(("gspmd", "bold"), f" {gspmd.__version__}: {gspmd.__doc__[0].lower()}{gspmd.__doc__[1:]}")
    examples = [Text(f"  {line}", style="dim") for line in _EXAMPLES]
    closing = "gspmd COMMAND --help lists a command's flags; gspmd --version prints the version."
    return Text("\n").join([title, Text(), *rows, Text(), *examples, Text(), Text(closing)])
