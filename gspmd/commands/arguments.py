"""The parser of commands without settings files, and the parsing of flags such as `--mesh NAME=SIZE`."""

import argparse
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from gspmd.annotate.errors import shown, suggestion
from gspmd.annotate.parser import NAME
from gspmd.reading import WHOLE, whole_number


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated flags, and whose errors name the nearest flag or word.

    Attributes:
        flags: the parser's flags, each with the values that shell completion proposes.
        words: the words that shell completion proposes if no flag is expected.
        subcommands: the parsers of the parser's subcommands.
    """

    def __init__(self, **options: Any):
        self.flags: dict[str, tuple[str, ...]] = {}
        self.words: tuple[str, ...] = ()
        self.subcommands: Mapping[str, Parser] = {}
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--help-all", action="help", help=argparse.SUPPRESS)  # Commands with many flags have it.

    def add_argument(self, *names: Any, values: Iterable[str] = (), **options: Any) -> argparse.Action:
        """Add a flag or an argument as argparse does, with values for shell completion to propose.

        An empty value is an error, unless `options` has an entry `type` or `choices`.
        """
        if options.get("action") in (None, "append") and "choices" not in options:
            options.setdefault("type", _optional if names[0].startswith("-") else _given)
        given = tuple(values) or tuple(options.get("choices", ()))
        if names[0].startswith("-"):
            self.flags[names[-1]] = given
        else:
            self.words = (*self.words, *given)
        return super().add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the flags, and report unknown flags.

        argparse would let the parent parser report the unknown flags of a subcommand.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(word or repr(word) for word in unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print an error message without the description of usage that argparse prints first, and exit with code 2."""
        if found := re.fullmatch(r"argument \S+: invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL):
            words = [word.strip("' ") for word in found[2].split(",")]
            message = f"{found[1]!r} is not one of {', '.join(words)}. {suggestion(found[1], words)}".rstrip()
        elif found := re.fullmatch(r"argument (\S+): invalid int value: (.*)", message, re.DOTALL):
            message = f"argument {found[1]}: {found[2]} is not a whole number."
            message += f"\n  {self.prog} --help describes it."
        elif message.startswith("unrecognized arguments: "):
            flag = message.split()[2].partition("=")[0]
            flags = {*self.flags}.union(*(each.flags for each in self.subcommands.values()))
            message += f"\n  {suggestion(flag, flags)}{self.prog} --help lists all flags."
        elif message.startswith("the following arguments are required: ") and self.subcommands:
            message += f"\n  Give one of {', '.join(self.subcommands)}."
        elif "\n" not in message:
            message += f"\n  {self.prog} --help describes it."
        self.exit(2, f"{self.prog}: {message}\n")


def _given(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give it a value.")
    return text


def _optional(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give it a value, or leave it out.")
    return text


def mesh_sizes(text: str) -> dict[str, int]:
    """Parse sizes of mesh axes as `numbers` does; refuse a name that a mesh axis cannot have in a spec."""
    found = numbers(text)
    if wrong := [name for name in found if not NAME.fullmatch(name)]:
        fact = "mesh axes are named by a lowercase letter and then letters, digits or _"
        raise argparse.ArgumentTypeError(f"{fact}, not {shown(wrong[0])}.")
    return found


def dimension_sizes(text: str) -> dict[str, int]:
    """Parse sizes of dimensions as `numbers` does; refuse a name that is not a capital letter."""
    found = numbers(text)
    if wrong := [name for name in found if not re.fullmatch("[A-Z]", name)]:
        raise argparse.ArgumentTypeError(f"a dimension is one capital letter, not {shown(wrong[0])}.")
    return found


def numbers(text: str) -> dict[str, int]:
    """Parse pairs NAME=SIZE, separated by commas.

    >>> numbers("x=4,y=2")
    {'x': 4, 'y': 2}

    Raises:
        ArgumentTypeError: a pair is not NAME=SIZE with a positive size, or a name is given twice.
    """
    pairs = [pair.partition("=") for pair in text.split(",")]
    for name, equals, size in pairs:
        if not (name.strip() and equals):
            raise argparse.ArgumentTypeError(f"{shown(name + equals + size)} is not a name and a size, such as x=4.")
        if not whole_number(size):
            of = WHOLE.replace("a whole", "a positive whole")
            raise argparse.ArgumentTypeError(f"{name.strip()} has size {shown(size.strip())}, which is not {of}.")
    names = [name.strip() for name, *_ in pairs]
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} gives two sizes to one name.")
    return {name: int(n) for name, (*_, n) in zip(names, pairs)}


def without(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return the words of a command line without the given flags and without their values.

    Each of these flags has exactly one value.

    >>> without(["--batch", "8", "--out", "a.toml", "--json=b"], ["--out", "--json"])
    ['--batch', '8']
    """
    kept, skip = [], False
    for word in argv:
        if not skip and flag_of(word) not in flags:
            kept.append(word)
        skip = not skip and "=" not in word and flag_of(word) in flags
    return kept


def command_line(words: Iterable[str]) -> str:
    r"""Return words as they can be typed in a shell, on one line of printable characters.

    >>> print(command_line(["gspmd", "train", "--prompt", "def f():\n"]))
    gspmd train --prompt $'def f():\n'
    """
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    quoted = shlex.quote(word)
    if quoted.isprintable():
        return quoted
    # The quotes of bash, zsh and ksh that read escapes: in a comment of a TOML file a line ends at a line break, and no
    # other control character may stand.
    known = {"\n": "\\n", "\t": "\\t", "\\": "\\\\", "'": "\\'"}
    escaped = (known.get(each) or (each if each.isprintable() else f"\\u{ord(each):04x}") for each in word)
    return f"$'{''.join(escaped)}'"


def flag_of(word: str) -> str:
    """Return the flag in a command-line word, without `=VALUE`.

    Underscores, which are accepted as well, become hyphens.
    """
    return word.partition("=")[0].replace("_", "-")
