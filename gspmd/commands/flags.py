"""The flags of a command: an early look at flags that decide how the rest is parsed, and the parser of all flags."""

import argparse
import io
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NoReturn, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from gspmd.annotate.errors import listed
from gspmd.commands.configs import fitted
from gspmd.commands.described import Describe, RefusedError, choices_of
from gspmd.commands.runner import FlagError
from gspmd.training.checkpoints import load_settings
from gspmd.training.model.finding import with_model
from gspmd.training.run.folder import newest_run
from gspmd.training.syntax import parse_relayout
from gspmd.training.toml import ConfigError, Dataclass, from_mapping, load_toml, not_a_choice

T = TypeVar("T", bound=Dataclass)

# Each boolean has two flags, --tied and --no-tied. With only the flag that changes the default, the set of flags would
# depend on the file with the defaults, and a run could not be resumed with the flags that began it.
_STYLE = (tyro.conf.AvoidSubcommands,)
HELP = {"-h", "--help", "--help-all"}


@dataclass(frozen=True)
class EarlyFlags:
    """The flags that must be known before all flags can be parsed, with the values that the user gave.

    The defaults of a command's flags come from a file or from a run's folder, and flags name this file or folder. A
    custom model also decides which flags exist. So these few flags are looked up first. A value is None if the flag is
    not given. A value is "" if the flag is given without a value or with an empty value; the parser of all flags
    refuses such a flag later.
    """

    config: str | None = None
    out: str | None = None
    resume: bool = False
    devices: str | None = None
    mesh: str | None = None
    layout: str | None = None
    set: str | None = None
    relayout: str | None = None
    model: str | None = None
    distributed: str | None = None
    checkpoint: str | None = None
    """The value of --from."""

    @classmethod
    def of(cls, argv: Sequence[str]) -> "EarlyFlags":
        """Look up these flags, without checking these or any other flags.

        No flag is refused here. The reason is that one of several processes must know where to join the other processes
        before it can tell them about faults in its flags.

        >>> EarlyFlags.of(["--steps", "many", "--resume", "300", "--distributed=auto"])
        EarlyFlags(..., resume=True, ..., distributed='auto', ...)
        """
        # tyro uses argparse too, so both take the same word as the value of a flag. Values are optional, so that
        # nothing is refused.
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        for field in fields(cls):
            if field.name == "resume":
                parser.add_argument("--resume", nargs="?", type=lambda _: True, const=True, default=False)
                parser.add_argument("--no-resume", nargs="?", type=lambda _: False, const=False, dest="resume")
            else:
                name = "from" if field.name == "checkpoint" else field.name
                parser.add_argument(f"--{name}", nargs="?", const="", dest=field.name)
        return cls(**vars(parser.parse_known_args(list(argv))[0]))


def parse(
    cls: type[T],
    argv: Sequence[str],
    *,
    default: str | None = None,
    find: Callable[[str], str] = str,
    description: str = "",
    prog: str | None = None,
    common: Collection[str] = (),
) -> T:
    """Read settings from a TOML file and from flags; flags take precedence over the file.

    Args:
        cls: a dataclass of settings. If it has a field `model_class`, then `--model`, or `class` in [model], may name a
            custom model. The fields of the custom model replace the fields of [model] (`gspmd.training.model.finding`).
            For a custom model without `--config`, the file `default` is not read.
        argv: the flags. `--config FILE` names the TOML file. `--resume` without `--config` starts from the settings of
            the run, without the run's platform and without the settings that flags replace. `--devices` replaces the
            run's number of devices and its meshes. `--mesh` replaces its number of devices. `--set` replaces its
            `--set`. `--relayout` replaces its changes of layout. `--layout` replaces its `--set`, its changes of layout
            and its schedule of stages. `--resume STEP` means `--resume --resume-step STEP`; the step may be given only
            once.
        default: the TOML file to read if neither `--config` nor `--resume` is given.
        find: a function from the name in --config, or `default`, to the path of the TOML file.
        description: the description in --help.
        prog: the program's name in --help; by default `sys.argv[0]`.
        common: the settings that --help shows; see `parse_flags`.

    Raises:
        ConfigError: a settings file or the settings have faults; or the step to resume from is given more than once.
        FlagError: flags have faults; see `parse_flags`.
    """
    argv = _spelled_out(argv)
    early = EarlyFlags.of(argv)
    # An empty value of these would be taken for a flag that is not given; the parser of all flags refuses it. An empty
    # value of any other flag may clear what the file or the run has set.
    if "" in (early.config, early.model) or (early.resume and early.out == ""):
        return parse_flags(cls, argv, cls(), description, prog, common)
    may_be_own = any(field.name == "model_class" for field in fields(cls))
    own = (early.model or "") if may_be_own else ""

    def typed(cls: type[T], values: Mapping[str, Any], folder: Path) -> tuple[type[T], Mapping[str, Any]]:
        again = early.resume and not early.config
        return with_model(cls, values, own, folder, again=again) if may_be_own else (cls, values)

    if early.config:
        path = find(early.config)
        base = load_toml(cls, path, partial(typed, folder=Path(path).parent))
    elif early.resume:
        out = Path(early.out) if early.out else newest_run()
        cls, settings = typed(cls, _carried_over(load_settings(out), early), folder=out)
        base = from_mapping(cls, settings, source=str(out / "config.json"))
    elif own:
        cls, settings = typed(cls, {}, folder=Path())
        base = from_mapping(cls, settings)
    else:
        base = load_toml(cls, find(default)) if default else cls()
    return parse_flags(type(base), argv, base, description, prog, common)


def distributed(argv: Sequence[str]) -> str:
    """Return the value of `--distributed`, without checking other flags, or "" if the flags ask for help.

    >>> distributed(["--steps", "many", "--distributed=auto"])
    'auto'
    """
    return "" if HELP & {*argv} else EarlyFlags.of(argv).distributed or ""


def parse_flags(
    cls: type[T],
    argv: Sequence[str],
    base: T,
    description: str = "",
    prog: str | None = None,
    common: Collection[str] = (),
) -> T:
    """Read settings from flags, with defaults from `base`.

    Args:
        cls: the dataclass of the settings.
        argv: the flags.
        base: the settings in the absence of flags.
        description: the description in --help.
        prog: the program's name in --help; by default `sys.argv[0]`.
        common: names of the settings whose flags --help shows. If there are no names, --help shows all flags.
            --help-all always shows all flags.

    Raises:
        ConfigError: flags belong to a table that the settings do not have, or settings contradict each other.
        FlagError: flags are unknown, or their values cannot be parsed.
        SystemExit: help was asked for and printed.
    """
    _refuse_absent(argv, base)
    name, helps = prog or Path(sys.argv[0]).name, HELP & {*argv}
    brief = helps and common and "--help-all" not in helps
    registry = ConstructorRegistry()
    registry.primitive_rule(_literal)
    registry.struct_rule(Describe(common if brief else None))
    options: dict[str, Any] = {"prog": prog, "default": base, "config": _STYLE, "registry": registry}
    if helps:
        parts = description.strip().split("\n\n")
        if brief:  # With only the first paragraph and the examples, the help fits on a screen.
            examples = [part for part in parts[1:] if part.startswith("    ")]
            parts = [parts[0], *examples, f"{name} --help-all tells more, and lists all flags."]
        _print_help(cls, fitted("\n\n".join(parts), get_terminal_size().columns), options)
    said = io.StringIO()
    try:
        with redirect_stderr(said), _wide():
            return tyro.cli(cls, args=list(argv), **options)
    except RefusedError as error:
        raise ConfigError("cannot use these flags:", error.faults) from None
    except SystemExit as ended:
        if not ended.code:
            raise
        raise FlagError(_in_short(said.getvalue(), name, _merged(cls), argv)) from None


class _LikeOutput(io.StringIO):
    """A text buffer that tyro takes for standard output.

    The buffer has the encoding of standard output, and counts as a terminal if standard output is a terminal.
    """

    def __init__(self) -> None:
        super().__init__()
        self._like = sys.stdout

    encoding = property(lambda self: getattr(self._like, "encoding", None) or "utf-8")

    def isatty(self) -> bool:
        return self._like is not None and self._like.isatty()


def _print_help(cls: type[Dataclass], description: str, options: Mapping[str, Any]) -> NoReturn:
    """Print tyro's help with the command's description, and exit.

    The description is added here, because tyro would print it as a single paragraph.
    """
    shown = _LikeOutput()
    with suppress(SystemExit), redirect_stdout(shown):
        tyro.cli(cls, args=["--help"], description="", **options)
    usage, _, flags = shown.getvalue().partition("\n\n")
    usage = textwrap.fill(usage, get_terminal_size().columns, subsequent_indent="    ")
    print(usage, description, flags.strip("\n"), sep="\n\n")
    sys.exit(0)


@contextmanager
def _wide() -> Iterator[None]:
    """Keep tyro from wrapping its messages inside a `with` block, because `_in_short` parses their lines."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _merged(cls: type[Dataclass]) -> list[str]:
    """Return the names of the tables of settings that flags leave out, as in `--steps` for `training.steps`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return [name for name, hint in hints.items() if tyro.conf.OmitArgPrefixes in typing.get_args(hint)]


def _in_short(message: str, prog: str, merged: Collection[str], argv: Sequence[str] = ()) -> str:
    """Shorten an error message of tyro to a few lines with a remedy.

    tyro's message is a box that contains the help of similar flags.

    Args:
        message: the message of tyro.
        prog: the program's name.
        merged: the names of the tables of settings that flags leave out; see `_merged`.
        argv: the words of the command line.

    >>> box = "| Unrecognized options: --stpes, 3 |\\n| Perhaps you meant: |\\n|     --steps INT |"
    >>> print(_in_short(box, "gspmd train", []))
    Unrecognized options: --stpes, 3
      Did you mean --steps? gspmd train --help-all lists all flags.
    >>> print(_in_short("| Error parsing --steps: invalid literal for int() with base 10: 'a' |", "gspmd train", []))
    --steps must be a whole number, but is 'a'.
      gspmd train --help-all describes it.
    """
    lines = [line.strip(" │|") for line in message.splitlines()]
    first = next((line for line in lines if re.match("Unrecognized options: |Error parsing |Missing value ", line)), "")
    if found := re.fullmatch("Unrecognized options: (.*)", first):
        words = found[1].split(", ")
        remedy = f"{prog} --help-all lists all flags."
        flags = [word.split("=")[0] for word in words if word.startswith("--")]
        known = [name for line in lines if line.startswith("--") for name in re.findall(r"--[a-z][\w.-]*", line)]
        near = [hit for flag in flags for hit in _near(flag, known, merged)]
        if near:
            return f"{first}\n  Did you mean {listed([*dict.fromkeys(near)], 'or')}? {remedy}"
        if not flags:
            before = next((flag for flag, word in pairwise(argv) if word == words[0]), "")
            if before.startswith("--") and "=" not in before:  # Had it taken a value, the word would not be left.
                return f"{first}\n  {before} takes no value: write it alone, or leave it out. {remedy}"
            return f"{first}\n  Every value follows its flag, as in --flag value. {remedy}"
        return f"{first}\n  {remedy}"
    described = f"\n  {prog} --help-all describes it."
    if found := re.fullmatch(r"Missing value for argument '(.*?)'.*", first):
        return f"{found[1]} needs a value.{described}"
    if not (found := re.fullmatch("Error parsing ([^:]*): (.*)", first)):
        return "\n".join(filter(None, lines))
    flag, fault = found.groups()
    kinds = {"invalid literal for int": "a whole number", "could not convert string to float": "a number"}
    kind = next((wanted for begins, wanted in kinds.items() if fault.startswith(begins)), "")
    if kind:
        return f"{flag} must be {kind}, but is {fault.rpartition(': ')[2]}.{described}"
    if found := re.fullmatch(r"no type matching .*\b(INT|FLOAT)\b.* could be instantiated from \[(.*)\]\.?", fault):
        kind = {"INT": "a whole number", "FLOAT": "a number"}[found[1]]
        return f"{flag} must be {kind}, but is {found[2]}.{described}"
    return f"{flag} {fault.removeprefix('it ')}{described}"


def _near(flag: str, known: Sequence[str], merged: Collection[str]) -> list[str]:
    """Return the flags that the user may have meant by an unknown flag.

    If the flag begins with the name of a table in `merged`, the result is the flag without this name, because flags
    leave the name out. Otherwise the most similar known flags are returned.
    """
    table, dot, rest = flag.removeprefix("--").partition(".")
    if dot and table in merged:
        return [f"--{rest}"]
    return get_close_matches(flag, known, n=3, cutoff=0.0)[: 1 if get_close_matches(flag, known, cutoff=0.8) else 3]


_ABSENT = {"model.moe": "no experts", "model.lora": "no adapters", "model.latent": "no latent attention"}
"""A mapping from table to the words by which messages describe a configuration without this table."""


def _refuse_absent(argv: Sequence[str], base: Dataclass) -> None:
    """Raise an error about flags of a table that the settings do not have.

    The parser would only say that such flags are unknown.

    Raises:
        ConfigError: there are such flags. The message names the tables of these flags, and says where to write the
            tables.
    """
    faults = {}
    for flag in (word.partition("=")[0] for word in argv if word.startswith("--")):
        *tables, _ = flag.removeprefix("--").replace("-", "_").split(".")
        values: Any = base
        for number, name in enumerate(tables, 1):
            values = getattr(values, name, ...)
            if values is None:
                table = ".".join(tables[:number])
                what = _ABSENT.get(table, f"no [{table}]")
                fact = f"{flag} is a field of [{table}], and this configuration has {what}"
                written = "lora" if table == "model.lora" else table  # Adapters have a separate table.
                remedy = f"write [{written}] in a TOML file, and name it with --config."
                if written != table and hasattr(base, written):
                    remedy = f"write {flag.replace(f'--{table}.', f'--{written}.')}."
                faults[table] = f"{fact}; {remedy}"
                break
    if faults:
        raise ConfigError("cannot read the flags:", [*faults.values()])


def _spelled_out(argv: Sequence[str]) -> list[str]:
    """Return flags in the form that tyro reads: `--resume STEP` as two settings, and names with hyphens.

    >>> _spelled_out(["--resume", "300", "--steps", "400"])
    ['--resume', '--resume-step', '300', '--steps', '400']

    Raises:
        ConfigError: the step to resume from is given more than once.
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


def _carried_over(settings: dict[str, Any], given: EarlyFlags) -> dict[str, Any]:
    """Return the saved settings of a run, except settings of its machine and settings that a flag replaces."""
    dropped = {"platform", "distributed"}
    if given.devices is not None or given.mesh is not None:
        dropped.add("devices")
    if given.devices is not None:
        dropped.add("mesh")
    if given.layout is not None or given.set is not None:
        dropped.add("set")
    if given.layout is not None:
        dropped |= {"rounds", "schedule"}  # They belong to the stages of the previous layout.
    training, sharding = settings.get("training", {}), settings.get("sharding", {})
    changed = training.get("relayout", ()) if isinstance(training, dict) and isinstance(sharding, dict) else None
    if not isinstance(changed, list | tuple) or not all(isinstance(change, str) for change in changed):
        return settings  # Damaged, as `from_mapping` will report.
    training = dict(training)
    changes = [parse_relayout(change) for change in training.pop("relayout", ())]
    if given.layout is None and given.relayout is None:
        training["relayout"] = [str(each if given.devices is None else replace(each, mesh="")) for each in changes]
    kept = {name: value for name, value in sharding.items() if name not in dropped}
    return settings | {"training": training, "sharding": kept}


def _literal(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Return a parser for a flag with a few possible values; its error, unlike tyro's, names the nearest value."""
    choices = choices_of(info.type)
    if not choices:
        return None
    named = {str(choice): choice for choice in choices}

    def read(words: list[str]) -> Any:
        if words[0] not in named:
            raise ValueError(not_a_choice("it", words[0], tuple(named)))
        return named[words[0]]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(named) + "}",
        instance_from_str=read,
        is_instance=lambda value: value in choices,
        str_from_instance=lambda value: [str(value)],
    )
