"""`gspmd COMMAND ...`: the list of commands, and the start of a command.

This file imports no slow library, so that a misspelled command is reported immediately.
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
from gspmd.display.manual import DOCS
from gspmd.interruption import begin_command, end, end_as_usual, end_at_once, is_left_working, number_of

#: Command -> its description. Each command is a module here with `run(argv, script, settings) -> exit code`.
COMMANDS = {
    "explain": "show the plan of an equation on a mesh, and draw it as specs and collectives",
    "page": "open a page in the browser that plans equations and layouts as you type",
    "train": "train a language model on text, every tensor placed by a layout",
    "generate": "continue prompts with a public checkpoint or a trained run, in any layout",
    "export": "write a trained run as a public checkpoint, which transformers loads",
    "layouts": "list, show, check and compare layouts",
    "search": "find the best layout of a model on a slice, and write its file",
    "compile": "ask the compiler whether a model fits on TPUs or GPUs, and what it will cost",
    "completion": "print a script that completes these commands and their flags in a shell",
}
#: Command -> the module here that parses its flags without importing JAX, by `parse(argv, script) -> settings`.
_SETTINGS = {
    "explain": "explain_settings",
    "page": "page",
    "train": "settings",
    "generate": "generate_settings",
    "export": "export_settings",
    "layouts": "layouts",
    "search": "search.settings",
    "compile": "compile_settings",
    "completion": "completion",
}
_EXAMPLES = (
    'gspmd explain "BLE_xyz, E_xF_yz -> BLF_yzx" --mesh x=4,y=4,z=4 --sizes B=512,L=1,E=18432,F=73728',
    "gspmd train --config tiny",
    'gspmd generate --checkpoint runs/001 --prompt "def "',
    "gspmd search --config llama-2-70b --topology tpu-v5p:4x8x8 --batch 1024 --out found.toml",
    "gspmd compile --config palm-8b --layout weight-stationary-2d --topology tpu-v4:4x4x4",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or list the commands; return the exit code: 2 for an unknown command, 130 for an interrupt.

    Args:
        argv: the command and its flags; by default the arguments of this process, and the process then ends with the
            exit code.
    """
    name, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    return _run(name, flags) if argv is not None else _process(name, flags)


def script(name: str, file: str) -> int:
    """Run a command on behalf of a file in scripts/, with the flags of this process, and end the process.

    Args:
        name: the command.
        file: the name of that file.
    """
    return _process(name, sys.argv[1:], file)


def _process(name: str, flags: Sequence[str], file: str = "") -> int:
    """Run a command, and end the process."""
    begin_command()
    sys.unraisablehook = partial(_interrupt_again, sys.unraisablehook)
    try:
        code = _written(partial(_run, name, flags, file, ends=True))
    except KeyboardInterrupt as stopped:  # It came while the last output was written.
        code = 128 + number_of(stopped)
    finally:
        if _raises():  # The command has ended, and libraries clean up.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A compiler that still runs in another thread crashes when the interpreter shuts down, even after a run that was
    # saved, whose exit code is 0.
    if code > 128 or is_left_working():
        os._exit(code)
    return code


def _written(command: Callable[[], int]) -> int:
    """Run a command, and write all its output; return its exit code, or a different code if writing fails.

    A closed output, as with `| head` or a closed terminal, is not reported, because nobody wants to read more.
    """
    try:
        try:
            code = command()
        except SystemExit:  # From --help.
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
            except OSError:  # Writing the remaining data would fail again when the interpreter ends.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 1 if full else 128 + signal.SIGPIPE  # Also for a closed terminal, if no SIGHUP has come.


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
            reader, runner = import_module(f"gspmd.commands.{_SETTINGS[name]}"), import_module("gspmd.commands.runner")
        settings = None
        if not _among_others(flags):
            settings, code = runner.read(partial(reader.parse, script=file), flags, "" if file else f"gspmd {name}")
            if settings is None:
                return code
        with _ending_at_once() if ends else nullcontext(), _starting() if ends else nullcontext():
            command = import_module(f"gspmd.commands.{name}")
        return command.run(flags, file, settings)
    except ModuleNotFoundError as error:
        if error.name != "gspmd_models":  # A checkout that is not installed lacks it.
            raise
        print(f"{error}. Install gspmd first; in a checkout: pip install -e .", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print("\nInterrupted.", file=sys.stderr)
        return 128 + number_of(stopped)


def _among_others(flags: Sequence[str]) -> bool:
    """Return whether this is one of several processes.

    If so, the other processes wait for this process, and must be told of faults in its flags. So this process parses
    its flags only when it is ready to join the other processes.
    """
    return any(flag.partition("=")[0] == "--distributed" for flag in flags)


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Inside a `with` block that imports libraries, let a signal end the process with a one-line message.

    The signal raises no exception, because the exception could come anywhere in these libraries. Some libraries would
    print the exception, or would take it for a missing module.
    """
    ours = current_thread() is main_thread()  # Only the main thread can handle signals.
    if ours:
        end_at_once()
    try:
        yield
    finally:
        if ours:
            end_as_usual()


def _starting() -> Any:
    """Report on stderr that libraries are being imported, if this takes a while."""
    from gspmd.display.console import console  # Rich is slow to import.
    from gspmd.display.progress import Progress

    return Progress(console(stderr=True), "Starting JAX")


def _raises() -> bool:
    """Return whether this process handles interrupts.

    This is so if interrupts are not ignored, no caller has installed a handler, and this is the main thread.
    """
    usual = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, end)
    return usual and current_thread() is main_thread()


def _interrupt_again(show: Callable[[Any], None], raised: Any) -> None:
    """Raise an interrupt again, soon after its exception has been swallowed by the code in which it was raised.

    Finalizers and callbacks of the garbage collector swallow exceptions. JAX has such a callback: if a signal arrives
    during a collection, the signal's exception is raised in the callback. The more objects there are, the longer a
    collection takes.
    """
    if not issubclass(raised.exc_type, KeyboardInterrupt):
        return show(raised)
    number = number_of(raised.exc_type)
    _thread.start_new_thread(_interrupt_soon, (number,))  # A Thread takes locks, which may be held here.


def _interrupt_soon(number: int) -> None:
    time.sleep(0.02)  # Meanwhile the callback returns.
    os.kill(os.getpid(), number)  # Not _thread.interrupt_main, which does not end a wait.


def _without_command(name: str) -> int:
    """Handle a first argument that is not a command: print the list of commands, the version, or the nearest name."""
    from gspmd.display.console import console

    if name in ("", "-h", "--help", "--help-all"):
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
    closing = (
        f"gspmd COMMAND --help lists a command's flags; gspmd --version prints the version.\nDocumentation: {DOCS}"
    )
    return Text("\n").join([title, Text(), *rows, Text(), *examples, Text(), Text(closing)])
