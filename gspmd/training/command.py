"""The command line of a training run: settings from file, run folder and flags; error messages; exit codes."""

import argparse
import io
import logging
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import tyro

from gspmd import host
from gspmd.annotate.errors import LayoutError, PlanError, SpecError
from gspmd.display import console as printing
from gspmd.display import terminal
from gspmd.interruption import number_of
from gspmd.training import processes
from gspmd.training.checkpoints import load_settings, newest
from gspmd.training.choices import REGISTRY
from gspmd.training.config import TrainingConfig
from gspmd.training.flags import parse_relayout
from gspmd.training.model.finding import with_model
from gspmd.training.run.folder import newest_run
from gspmd.training.run.guard import Diverged
from gspmd.training.run.loop import Unwritable
from gspmd.training.run.signals import Interrupted, terminable, unheard
from gspmd.training.toml import ConfigError, Dataclass, beside, from_mapping, load_toml, to_mapping

T = TypeVar("T", bound=Dataclass)

# Booleans are pairs, --tied and --no-tied: with one of them, the one that changes the default, which flags there are
# would depend on the file that the defaults come from, and a run could not be resumed with the flags that began it.
_STYLE = (tyro.conf.AvoidSubcommands,)
_USER_ERRORS = (ConfigError, host.HostError, SpecError, PlanError, LayoutError)


class FlagError(ValueError):
    """Flags that cannot be read, with what the parser has to say of them."""


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
        cls: a dataclass of settings. If it has a field `model_class`, `--model` or `class` in [model] names a model of
            one's own, whose fields then are those of [model] (`gspmd.training.model.finding`); of such a model without
            `--config`, `default` is not read.
        argv: the flags. `--config FILE` names the TOML file. `--resume` without it starts from the settings of the run,
            without its platform, its number of devices if `--devices` or `--mesh` is given, its meshes if `--devices`
            is, its `--set` if `--layout` or `--set` is, and its changes of layout if `--layout` or `--relayout` is.
            `--resume STEP` is `--resume --resume-step STEP`, and excludes another step.
        default: the TOML file if neither is given.
        find: from the name in --config or `default` to the path of the TOML file.
        description: for --help.
        prog: the program name in --help; `sys.argv[0]` if not given.

    Raises:
        ConfigError: from `load_toml`, or from the dataclasses; the step to resume from is said more than once.
        FlagError: as of `parse_flags`; a flag has a value that takes none.
    """
    argv = _spelled_out(argv)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--config", nargs="?")
    early.add_argument("--out", nargs="?")
    early.add_argument("--resume", action=argparse.BooleanOptionalAction, default=False)
    for flag in ("--devices", "--mesh", "--layout", "--set", "--relayout"):
        early.add_argument(flag, nargs="?", const="")
    early.add_argument("--model", nargs="?", const="", default="")
    try:
        known, _ = early.parse_known_args(argv)
    except argparse.ArgumentError as error:  # such as --no-resume=3
        raise FlagError(f"the flags cannot be read: {error}.") from None
    may_be_own = any(field.name == "model_class" for field in fields(cls))
    own = known.model if may_be_own else ""

    def typed(cls: type[T], values: Mapping[str, Any], folder: Path) -> tuple[type[T], Mapping[str, Any]]:
        again = known.resume and not known.config
        return with_model(cls, values, own, folder, again=again) if may_be_own else (cls, values)

    if known.config:
        path = find(known.config)
        base = load_toml(cls, path, partial(typed, folder=Path(path).parent))
    elif known.resume:
        out = Path(known.out) if known.out else newest_run()
        cls, settings = typed(cls, _carried_over(load_settings(out), given=vars(known)), folder=out)
        base = from_mapping(cls, settings, source=str(out / "config.json"))
    elif own:
        cls, settings = typed(cls, {}, folder=Path())
        base = from_mapping(cls, settings)
    else:
        base = load_toml(cls, find(default)) if default else cls()
    return parse_flags(type(base), argv, base, description, prog)


def distributed(argv: Sequence[str]) -> str:
    """Return what the flags give as `--distributed`, whatever else is right or wrong about them; "" for --help.

    >>> distributed(["--steps", "many", "--distributed=auto"])
    'auto'
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--distributed", nargs="?", const="", default="")
    known, _ = early.parse_known_args(argv)
    return "" if {"-h", "--help"} & {*argv} else known.distributed


def parse_flags(cls: type[T], argv: Sequence[str], base: T, description: str = "", prog: str | None = None) -> T:
    """Read settings from flags, with defaults from `base`.

    Raises:
        FlagError: in one of several processes, what is wrong with the flags; elsewhere it is printed, and the process
            ends.
    """
    said = io.StringIO()
    try:
        with redirect_stderr(said) if processes.several() else nullcontext():
            return tyro.cli(
                cls, prog=prog, args=list(argv), default=base, description=description, config=_STYLE, registry=REGISTRY
            )
    except SystemExit as ended:
        if not ended.code or not processes.several():
            raise
        raise FlagError(f"the flags cannot be read:\n{said.getvalue().strip()}") from None


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
    refused: tuple[type[Exception], ...] = (*_USER_ERRORS, *errors)
    together = False  # whether all processes come to this end
    sure = True  # whether the fault is this process's own, and not perhaps a consequence of the loss of another one
    try:
        with terminable(), _naming_files():
            _check_encoding(argv)
            code = command(argv) or 0
        processes.leave()
        return code
    except FlagError as error:
        message, code = str(error), 2
    except refused as error:
        message, code = f"{type(error).__name__}: {error}", 2
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
        if not processes.several():
            raise
        message, code, sure = "".join(traceback.format_exception(error)).rstrip(), 1, False
    terminal.leave()
    if processes.several() and not together:
        processes.fail(code, message, sure=sure)  # which may wait for processes that are still to come
    with unheard():
        if processes.first():
            print(message, file=sys.stderr)
        processes.leave()
    return code


def _check_encoding(argv: Sequence[str]) -> None:
    """Refuse flags that are not UTF-8: libraries cannot open such names, and a run's config.json cannot hold them.

    Raises:
        ConfigError: with each of them.
    """
    faults = [f"{flag!r:.200} is not UTF-8." for flag in argv if any("\ud800" <= each <= "\udfff" for each in flag)]
    if faults:
        raise ConfigError("cannot read the flags:", faults)


@contextmanager
def _naming_files() -> Iterator[None]:
    """Convert what the system says of a named file, such as that its name is too long, to an error of the user."""
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str):  # such as a closed standard output
            raise
        raise ConfigError(f"cannot use {error.filename!r}:", [f"{error.strerror or error}."]) from None


def _advice(step: int | None, out: Path, called: str, when: str = "To go on") -> str:
    """Return how to resume a run, if a step is saved."""
    return "" if step is None else f" {when}: {_resume_command(out, called)}"


@contextmanager
def interrupts(out: Path, called: str = "") -> Iterator[None]:
    """Convert a signal or a full disk, at any point of a run, to an error that names the newest checkpoint.

    Where another process is lost, its message names the checkpoint likewise.

    Raises:
        Interrupted: in place of KeyboardInterrupt, at SIGTERM and SIGHUP, and where standard output is closed.
        Unwritable: in place of OSError.
    """
    try:
        with terminable(), processes.watching(lambda: _saved(out, called)):
            yield
    except KeyboardInterrupt as stopped:
        with unheard():
            step = newest(out)
        raise Interrupted(step, out, number_of(stopped)) from None
    except BrokenPipeError:
        raise Interrupted(newest(out), out, signal.SIGPIPE) from None
    except OSError as error:
        raise Unwritable(error, newest(out), out) from None


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
    """Return the faults of the groups of a model's experts for batches of these sizes."""
    groups, tokens = model.moe and model.moe.groups, batch * length
    if not groups or tokens % groups == 0:
        return []
    product = f"{batch} × {length} = {tokens}"
    return [f"model.moe.groups must divide the tokens of a batch, {product}, but is {groups}."]


def _spelled_out(argv: Sequence[str]) -> list[str]:
    """Return flags with `--resume STEP` as the two settings that it is, and names with hyphens, as tyro reads them.

    >>> _spelled_out(["--resume", "300", "--steps", "400"])
    ['--resume', '--resume-step', '300', '--steps', '400']

    Raises:
        ConfigError: the step to resume from is said more than once.
    """
    hyphened = [_hyphened(flag) for flag in argv]
    words = [word for flag in hyphened for word in (flag.split("=") if flag.startswith("--resume=") else [flag])]
    steps = [here for here, (flag, value) in enumerate(pairwise(words), 1) if flag == "--resume" and value.isdecimal()]
    others = [flag for flag in words if flag.split("=")[0] == "--resume-step"]
    if steps and len(steps) + len(others) > 1:
        fault = "flags name the step to resume from more than once; write --resume STEP, once."
        raise ConfigError("cannot read the flags:", [fault])
    for here in reversed(steps):
        words.insert(here, "--resume-step")
    return words


def _hyphened(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else flag


def _carried_over(settings: dict[str, Any], given: Mapping[str, str | None]) -> dict[str, Any]:
    """Settings of a run for a resume, without those of a machine and those that a flag replaces."""
    dropped = {"platform", "distributed"}
    if given["devices"] is not None or given["mesh"] is not None:
        dropped.add("devices")
    if given["devices"] is not None:
        dropped.add("mesh")
    if given["layout"] is not None or given["set"] is not None:
        dropped.add("set")
    if given["layout"] is not None:
        dropped |= {"rounds", "schedule"}  # of the stages of the layout before
    training, sharding = settings.get("training", {}), settings.get("sharding", {})
    changed = training.get("relayout", ()) if isinstance(training, dict) and isinstance(sharding, dict) else None
    if not isinstance(changed, list | tuple) or not all(isinstance(change, str) for change in changed):
        return settings  # damaged, as `from_mapping` will say
    training = dict(training)
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
    if name := kept.pop("model_class", ""):
        kept["model"] = {"class": name, **kept["model"]}
    for name in ("resume", "resume_step", "profile"):
        kept.get("training", {}).pop(name, None)
    return kept
