"""The start of a command: a single message for its errors, its exit code, and advice after an interrupt."""

import logging
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from gspmd import host
from gspmd.annotate.errors import LayoutError, PlanError, SpecError
from gspmd.commands.messages import told
from gspmd.display import console as printing
from gspmd.display import terminal
from gspmd.interruption import number_of
from gspmd.training import processes
from gspmd.training.checkpoints import last_step
from gspmd.training.model.finding import blamed
from gspmd.training.run.folder import Unwritable
from gspmd.training.run.guard import Diverged
from gspmd.training.run.signals import Interrupted, terminable, unheard
from gspmd.training.toml import ConfigError

T = TypeVar("T")

_USER_ERRORS = (ConfigError, host.HostError, SpecError, PlanError, LayoutError)


class FlagError(ValueError):
    """The error for flags that cannot be parsed; it has the parser's message."""


def guarded(
    command: Callable[[Sequence[str]], int | None],
    argv: Sequence[str],
    called: str = "",
    errors: tuple[type[Exception], ...] = (),
    interrupted: str = "Interrupted before the run began.",
) -> int:
    """Run a command and return its exit code.

    The exit code is the code that the command returns, where None counts as 0. If the command raises an error, the exit
    code is 1 for a failed run, 2 for bad input and 130 for an interrupt.

    A run that SIGTERM ends returns 0 if it has a checkpoint to resume from, and otherwise 143.

    For an error made by the user, one message is printed on stderr. Any other exception is a bug, and keeps its
    traceback. With several processes, the first one prints the message, and all of them end.

    Args:
        command: the function to run, which takes the flags and returns an exit code or None.
        argv: the flags.
        called: the command line that advice gives for resuming; by default `python sys.argv[0]`.
        errors: further exceptions to treat as errors made by the user.
        interrupted: the message for an interrupt that the command does not handle itself.
    """
    for stream in (sys.stdout, sys.stderr):  # --help and messages do not go through a console.
        printing.never_fail(stream)
    # The checkpoint writer logs the traceback of every error several times, in addition to raising it; the writer of
    # events warns about each loss that is not finite.
    for name in ("absl", "asyncio", "tensorboardX"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    refused: tuple[type[Exception], ...] = (*_USER_ERRORS, *errors)
    together = False  # Whether all processes end in this way.
    sure = True  # Whether the fault arose in this process; if not, another process may have been lost.
    try:
        with terminable(), _naming_files():
            _check_encoding(argv)
            code = command(argv) or 0
        processes.leave()
        return code
    except FlagError as error:
        message, code = str(error), 2
    except refused as error:
        message, code = told(error), 2
    except Diverged as error:
        message, code, together = f"The run failed: {error}{_advice(error.step, error.out, called)}", 1, True
    except Unwritable as error:
        go_on = _advice(error.step, error.out, called, ", ".join(filter(None, ("To go on", error.once))))
        message, code = f"The run failed: {error}{go_on}", 1
    except Interrupted as stopped:
        message = f"\n{str(stopped).capitalize()}.{_advice(stopped.step, stopped.out, called)}"
        # Schedulers end jobs with SIGTERM, and count one that has saved its work as done.
        code = 0 if stopped.number == signal.SIGTERM and stopped.step is not None else 128 + stopped.number
        together = stopped.agreed
    except KeyboardInterrupt as stopped:
        message, code = f"\n{interrupted}", 128 + number_of(stopped)
    except Exception as error:
        if blame := blamed(error):
            message, code = told(ConfigError("the model failed:", blame)), 2
        elif not processes.several():
            raise
        else:
            message, code, sure = "".join(traceback.format_exception(error)).rstrip(), 1, False
    terminal.leave()  # Otherwise the message would fail if the terminal was closed.
    if processes.several() and not together:
        processes.fail(code, message, sure=sure)  # It may wait for processes that have not arrived.
    with unheard():
        if processes.first():
            print(message, file=sys.stderr)
        processes.leave()
    return code


def read(parse: Callable[[Sequence[str]], T], argv: Sequence[str], called: str = "") -> tuple[T | None, int]:
    """Parse the flags of a command before JAX is imported, so that --help and misspelled flags are answered at once.

    Args:
        parse: the function that parses the flags.
        argv: the flags.
        called: as in `guarded`.

    Returns:
        The settings and 0, or None and the exit code if there are no settings.
    """
    found: list[T] = []
    code = guarded(lambda argv: found.append(parse(argv)), argv, called)
    return (found[0] if found else None), code


def _check_encoding(argv: Sequence[str]) -> None:
    """Raise an error about flags that are not UTF-8, because file names and config.json cannot hold such text.

    Raises:
        ConfigError: some flags are not UTF-8, or have null bytes; the message lists each of them.
    """
    faults = [f"{flag!r:.200} is not UTF-8." for flag in argv if any("\ud800" <= each <= "\udfff" for each in flag)]
    faults += [f"{flag!r:.200} has a null byte, which no name has." for flag in argv if "\0" in flag]
    if faults:
        raise ConfigError("cannot read the flags:", faults)


@contextmanager
def _naming_files() -> Iterator[None]:
    """Turn a system error about a named file, such as a name that is too long, into an error made by the user."""
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str):  # The error is not about a named file.
            raise
        raise ConfigError(f"cannot use {error.filename!r}:", [f"{error.strerror or error}."]) from None


def _advice(step: int | None, out: Path, called: str, when: str = "To go on") -> str:
    """Return advice on how to resume a run, or an empty string if no step is saved."""
    return "" if step is None else f" {when}: {_resume_command(out, called)}"


@contextmanager
def interrupts(out: Path, called: str = "") -> Iterator[None]:
    """Turn a signal or a full disk, at any point of a run, into an error that names the newest checkpoint.

    If another process is lost, the message about it also names the checkpoint.

    Raises:
        Interrupted: in place of KeyboardInterrupt, after SIGTERM or SIGHUP, or when standard output is closed.
        Unwritable: in place of OSError.
    """
    try:
        with terminable(), processes.watching(lambda: _saved(out, called)):
            yield
    except KeyboardInterrupt as stopped:
        with unheard():
            step = last_step(out)
        raise Interrupted(step, out, number_of(stopped)) from None
    except BrokenPipeError:
        raise Interrupted(last_step(out), out, signal.SIGPIPE) from None
    except OSError as error:
        raise Unwritable(error, last_step(out), out) from None


def _saved(out: Path, called: str) -> str:
    step = last_step(out)
    return f" {'No step' if step is None else f'Step {step}'} is saved.{_advice(step, out, called)}"


def next_commands(out: Path, steps: int, prompt: str | None, called: str = "") -> dict[str, str]:
    """Return the command that continues a run and the command that samples from it, each under its purpose.

    Args:
        out: the run's folder.
        steps: number of steps that the run has done.
        prompt: the beginning of the sample, or None if the model cannot generate text.
        called: as in `guarded`. By default one command runs `sys.argv[0]`, and the other runs the file `generate.py` in
            the same folder.

    Example:
        >>> next_commands(Path("runs/001"), 800, "def ", "gspmd train")["to sample from it"]
        "gspmd generate --checkpoint runs/001 --prompt 'def '"
    """
    commands = {"to train on": f"{_resume_command(out, called)} --steps {2 * steps}"}
    if prompt is not None:
        script = shlex.quote(str(Path(sys.argv[0]).with_name("generate.py")))
        generate = f"{called.split()[0]} generate" if called else f"python {script}"
        commands["to sample from it"] = f"{generate} {shlex.join(['--checkpoint', str(out), '--prompt', prompt])}"
    return commands


def program_of(called: str) -> str:
    """Return the program of a command line; `called` is as in `guarded`."""
    return called or f"python {shlex.quote(sys.argv[0])}"


def _resume_command(out: Path, called: str) -> str:
    """Return the command that resumes a run, whose settings are in its folder."""
    return f"{program_of(called)} --resume --out {shlex.quote(str(out))}{processes.flag()}"
