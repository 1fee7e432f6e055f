"""The command line of a training run: settings from file, run folder and flags; error messages; exit codes."""

import argparse
import logging
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import tyro

from gspmd import host
from gspmd.annotate.errors import LayoutError, PlanError, SpecError
from gspmd.display import console as printing
from gspmd.training import processes
from gspmd.training.checkpoints import load_settings, newest
from gspmd.training.choices import REGISTRY
from gspmd.training.config import TrainingConfig
from gspmd.training.flags import parse_relayout
from gspmd.training.run.folder import newest_run
from gspmd.training.run.guard import Diverged
from gspmd.training.run.loop import Unwritable
from gspmd.training.run.signals import Interrupted, terminable
from gspmd.training.toml import ConfigError, beside, from_mapping, load_toml, to_mapping

T = TypeVar("T")

_STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
_USER_ERRORS = (ConfigError, host.HostError, SpecError, PlanError, LayoutError)


def parse(
    cls: type[T],
    argv: Sequence[str],
    *,
    default: str | None = None,
    find: Callable[[str], str] = str,
    description: str = "",
    prog: str | None = None,
) -> T:
    """Read settings from a TOML file and from flags, which take precedence.

    Args:
        cls: a dataclass of settings.
        argv: the flags. `--config FILE` names the TOML file. `--resume` without it starts from the settings of the run,
            without its platform, its number of devices if `--devices`, `--mesh` or `--platform` is given, its meshes
            if `--devices` is, its `--set` if `--layout` or `--set` is, and its changes of layout if `--layout` or
            `--relayout` is. `--resume STEP` is `--resume --resume-step STEP`.
        default: the TOML file if neither is given.
        find: from the name in --config or `default` to the path of the TOML file.
        description: for --help.
        prog: the program name in --help; `sys.argv[0]` if not given.

    Raises:
        ConfigError: from `load_toml`, or from the dataclasses.
    """
    argv = _spelled_out(argv)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--config", nargs="?")
    early.add_argument("--out", nargs="?")
    early.add_argument("--resume", action="store_true")
    for flag in ("--devices", "--mesh", "--platform", "--layout", "--set", "--relayout"):
        early.add_argument(flag, nargs="?", const="")
    known, _ = early.parse_known_args(argv)
    if known.config:
        base = load_toml(cls, find(known.config))
    elif known.resume:
        out = Path(known.out) if known.out else newest_run()
        settings = _carried_over(load_settings(out), given=vars(known))
        base = from_mapping(cls, settings, source=str(out / "config.json"))
    else:
        base = load_toml(cls, find(default)) if default else cls()
    return parse_flags(cls, argv, base, description, prog)


def parse_flags(cls: type[T], argv: Sequence[str], base: T, description: str = "", prog: str | None = None) -> T:
    """Read settings from flags, with defaults from `base`."""
    return tyro.cli(
        cls, prog=prog, args=list(argv), default=base, description=description, config=_STYLE, registry=REGISTRY
    )


def guarded(
    command: Callable[[Sequence[str]], int | None],
    argv: Sequence[str],
    called: str = "",
    errors: tuple[type[Exception], ...] = (),
    interrupted: str = "Interrupted before the run began.",
) -> int:
    """Run a command and return its exit code: its own, or 1 for a failed run, 2 for bad input, 130 for an interrupt.

    A run that SIGTERM ends returns 0 if it has a checkpoint to resume from, else 143.

    Errors of the user are one message on stderr; any other exception is a bug and keeps its traceback. Of several
    processes the first one says it, and all of them end.

    Args:
        command: takes the flags, and returns an exit code or None.
        argv: the flags.
        called: the command line of the program, for the advice how to resume; `python sys.argv[0]` if not given.
        errors: further types of errors of the user.
        interrupted: what is said of an interrupt that the command does not answer itself.
    """
    for stream in (sys.stdout, sys.stderr):  # --help and messages do not go through a console
        printing.never_fail(stream)
    # The checkpoint writer logs the traceback of every error several times, in addition to raising it; the writer of
    # events warns of each loss that is not finite.
    for name in ("absl", "asyncio", "tensorboardX"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    together = False  # whether all processes come to this end
    try:
        code = command(argv) or 0
        processes.leave()
        return code
    except (*_USER_ERRORS, *errors) as error:
        message, code = f"{type(error).__name__}: {error}", 2
    except Diverged as error:
        message, code, together = f"The run failed: {error}{_advice(error.step, error.out, called)}", 1, True
    except Unwritable as error:
        when = "To go on, once there is room" if error.file is None else "To go on, once it can be used"
        go_on = _advice(error.step, error.out, called, when)
        message, code = f"The run failed: {error}{go_on}", 1
    except Interrupted as stopped:
        message = f"\n{str(stopped).capitalize()}.{_advice(stopped.step, stopped.out, called)}"
        # Schedulers end jobs with SIGTERM, and count one that has saved its work as done.
        code = 0 if stopped.number == signal.SIGTERM and stopped.step is not None else 128 + stopped.number
        together = stopped.agreed
    except KeyboardInterrupt:
        message, code = f"\n{interrupted}", 130
    except Exception as error:
        if processes.count() == 1:
            raise
        processes.settle()
        message, code = "".join(traceback.format_exception(error)), 1
    if processes.first():
        print(message, file=sys.stderr)
    if together:
        processes.leave()
    else:
        processes.fail(code, message)
    return code


def _advice(step: int | None, out: Path, called: str, when: str = "To go on") -> str:
    """How to resume a run, if a step is saved."""
    return "" if step is None else f" {when}: {_resume_command(out, called)}"


@contextmanager
def interrupts(out: Path, called: str = "") -> Iterator[None]:
    """Convert a signal or a full disk, at any point of a run, to an error that names the newest checkpoint.

    Where another process is lost, its message names the checkpoint likewise.

    Raises:
        Interrupted: in place of KeyboardInterrupt, at SIGTERM, and where standard output is closed.
        Unwritable: in place of OSError.
    """
    try:
        with terminable(), processes.watching(lambda: _saved(out, called)):
            yield
    except KeyboardInterrupt as stopped:
        raise Interrupted(newest(out), out, getattr(stopped, "number", signal.SIGINT)) from None
    except BrokenPipeError:
        raise Interrupted(newest(out), out, signal.SIGPIPE) from None
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else None
        elsewhere = named is not None and not Path(named).resolve().is_relative_to(out.resolve())
        raise Unwritable(error.strerror or str(error), newest(out), out, named if elsewhere else None) from None


def _saved(out: Path, called: str) -> str:
    step = newest(out)
    return f" {'No step' if step is None else f'Step {step}'} is saved.{_advice(step, out, called)}"


def check_model(training: TrainingConfig, model: Any, tokens: int | None = None) -> None:
    """Refuse a model that does not fit the data, or that cannot generate the requested sample.

    Args:
        training: the settings of training.
        model: a model's settings, with `vocabulary`, `int8`, and `moe`: None, or with `groups`, `causal` and `router`.
        tokens: number of ids of the tokenizer; None if tokens are bytes.

    Raises:
        ConfigError: with every fault.
    """
    faults = []
    if tokens is None and model.vocabulary != 256:
        larger = " Give the file of its tokenizer with --tokenizer." if model.vocabulary > 256 else ""
        faults.append(f"model.vocabulary must be 256, since the data is bytes, but is {model.vocabulary}.{larger}")
    if tokens is not None and tokens > model.vocabulary:
        fault = f"the tokenizer {training.tokenizer!r} has {tokens:,} tokens, but model.vocabulary is "
        faults.append(f"{fault}{model.vocabulary:,}; it must be at least as large.")
    faults += group_faults(model, training.batch, training.length)
    if model.int8:
        faults.append("model.int8 is to serve: leave it out, and sample with 'gspmd generate --weights int8'.")
    if training.sample_bytes and model.moe and not model.moe.causal:
        fault = f"model.moe.router {model.moe.router} cannot generate text, since its experts read later tokens; "
        faults.append(fault + "set sample_bytes to 0, or take another router.")
    if faults:
        raise ConfigError("cannot train this model:", faults)


def group_faults(model: Any, batch: int, length: int) -> list[str]:
    """What is wrong with the groups of a model's experts for batches of these sizes."""
    groups, tokens = model.moe and model.moe.groups, batch * length
    if not groups or tokens % groups == 0:
        return []
    product = f"{batch} × {length} = {tokens}"
    return [f"model.moe.groups must divide the tokens of a batch, {product}, but is {groups}."]


def _spelled_out(argv: Sequence[str]) -> list[str]:
    """Flags with `--resume STEP` and `--resume=STEP` written as the two settings that they are.

    >>> _spelled_out(["--resume", "300", "--steps", "400"])
    ['--resume', '--resume-step', '300', '--steps', '400']
    """
    words = [word for flag in argv for word in (flag.split("=") if flag.startswith("--resume=") else [flag])]
    steps = [here for here, (flag, value) in enumerate(pairwise(words), 1) if flag == "--resume" and value.isdecimal()]
    for here in reversed(steps):
        words.insert(here, "--resume-step")
    return words


def _carried_over(settings: dict[str, Any], given: Mapping[str, str | None]) -> dict[str, Any]:
    """Settings of a run for a resume, without those of a machine and those that a flag replaces."""
    dropped = {"platform", "distributed"}
    if any(given[flag] is not None for flag in ("devices", "mesh", "platform")):
        dropped.add("devices")
    if given["devices"] is not None:
        dropped.add("mesh")
    if given["layout"] is not None or given["set"] is not None:
        dropped.add("set")
    if given["layout"] is not None:
        dropped |= {"rounds", "schedule"}  # of the stages of the layout before
    training, sharding = dict(settings.get("training", {})), settings.get("sharding", {})
    changes = [parse_relayout(change) for change in training.pop("relayout", ())]
    if given["layout"] is None and given["relayout"] is None:
        training["relayout"] = [str(each if given["devices"] is None else replace(each, mesh="")) for each in changes]
    kept = {name: value for name, value in sharding.items() if name not in dropped}
    return settings | {"training": training, "sharding": kept}


def next_commands(out: Path, steps: int, prompt: str | None, called: str = "") -> dict[str, str]:
    """The commands that train a run on, and that sample from it, by what they do.

    Args:
        out: the run's folder.
        steps: that it has done.
        prompt: the beginning of the text; None if the model cannot generate any.
        called: as of `guarded`; if not given, the file beside `sys.argv[0]` samples.

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


def _resume_command(out: Path, called: str) -> str:
    """The command that resumes this run; its settings are in its folder."""
    program = f"python {shlex.quote(sys.argv[0])}"
    return f"{called or program} --resume --out {shlex.quote(str(out))}{processes.flag()}"


def kept_settings(settings: Any) -> dict[str, Any]:
    """The settings to save for a resume, with absolute paths, without those of one start only."""
    kept = to_mapping(beside(settings, Path.cwd()))
    kept.pop("config", None)
    for name in ("resume", "resume_step", "profile"):
        kept.get("training", {}).pop(name, None)
    return kept
