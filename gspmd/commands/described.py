"""The help of flags: the docstrings of settings' fields, as running text; a short help has only the common flags.

tyro makes a flag of every field of a dataclass. The rule `Describe` tells tyro the fields, and the help text of each
field.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from gspmd.training.toml import ConfigError

_OURS = ("gspmd", "gspmd_models")


class RefusedError(Exception):
    """The error for values of flags that a dataclass refuses.

    This is not a ValueError, because tyro would print a ValueError itself.
    """

    def __init__(self, faults: Collection[str]):
        self.faults = tuple(faults)


def _given(word: str) -> str:
    """Return the text of a flag after checking that it is not empty.

    Raises:
        ValueError: the text is empty. In settings, an empty text stands for a flag that is not given.
    """
    if not word:
        raise ValueError("is empty; give it a value, or leave it out.")
    return word


_TEXT = PrimitiveConstructorSpec(
    nargs=1,
    metavar="STR",
    instance_from_str=lambda words: _given(*words),
    is_instance=lambda value: isinstance(value, str),
    str_from_instance=lambda value: [value],
)
_TEXTS = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[STR [STR ...]]",
    instance_from_str=lambda words: tuple(map(_given, words)),
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=list,
)

AnyText = Annotated[str, "empty too"]
"""The type of a setting whose flag accepts an empty string."""


def _filled(hint: Any) -> Any:
    """Return the type of a setting, changed so that the flag refuses an empty string; `AnyText` stays unchanged."""
    if hint is str:
        return Annotated[str, _TEXT]
    if hint == tuple[str, ...]:
        return Annotated[hint, _TEXTS]
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        if get_args(AnyText)[1] in marks:
            return hint
        if inner == tuple[str, ...] and tyro.conf.UseAppendAction in marks:
            return Annotated[tuple[Annotated[str, _TEXT], ...], *marks]
        return Annotated[_filled(inner), *marks]
    return hint


@dataclass(frozen=True)
class Describe:
    """The rule by which tyro turns dataclasses of settings into command-line flags.

    Attributes:
        common: names of the settings to show in the help. None shows all settings, with each table of settings in a
            group of its own.
    """

    common: Collection[str] | None = None

    def __call__(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        """Return the fields of a dataclass of settings, and a function that makes an instance."""
        cls = info.type
        if not (isinstance(cls, type) and is_dataclass(cls)):
            return None
        if cls.__module__.partition(".")[0] not in _OURS:  # A custom model may describe its fields in any way.
            return None
        hints, texts = get_type_hints(cls, include_extras=True), documented(cls)
        shown = []
        for field in fields(cls):
            if not field.init:
                continue
            default = getattr(info.default, field.name, ...) if is_dataclass(info.default) else ...
            if default is ...:
                made = field.default_factory
                default = field.default if made is MISSING else made()  # every setting has one of the two
            # Where a file or a run has set a text that is empty by default, an empty flag clears it.
            clears = field.default == "" and default != ""
            given = hints[field.name] if clears else _filled(hints[field.name])
            hint = self._annotated(given, field.name, default)
            shown.append(StructFieldSpec(field.name, hint, default, self._text(texts.get(field.name, ""), default)))
        return StructConstructorSpec(_constructor(cls), tuple(shown))

    def _annotated(self, hint: Any, name: str, default: Any) -> Any:
        """Return the type of a field with the annotations that tyro reads.

        The annotations hide the field's flag, put the flag into the common group, or state the field's default in
        words.
        """
        if is_dataclass(default):
            if self.common is None:
                return hint
            if type(default).__module__.partition(".")[0] not in _OURS:  # The few fields of a custom model.
                return hint
            merged = tyro.conf.OmitArgPrefixes in get_args(hint)
            return Annotated[hint, tyro.conf.arg(name="") if merged else tyro.conf.Suppress]
        if self.common is not None and name not in self.common:
            return Annotated[hint, tyro.conf.Suppress]
        if isinstance(default, bool):
            return Annotated[hint, tyro.conf.arg(help_behavior_hint=f"(default: {'on' if default else 'off'})")]
        if tyro.conf.UseAppendAction in get_args(hint):
            return hint
        said: dict[str, Any] = {}
        if default is None or default == "" or default == ():
            said["help_behavior_hint"] = ""
        if get_origin(hint) in (Union, UnionType):
            named = [kind for kind in (int, float, str) if kind in get_args(hint)]
            said |= {"metavar": named[0].__name__.upper()} if named else {}
        return Annotated[hint, tyro.conf.arg(**said)] if said else hint

    def _text(self, text: str, default: Any) -> str:
        """Return the help text of a flag.

        A boolean has two flags; the text describes the flag that turns the boolean on.
        """
        if isinstance(default, bool) and text.startswith("Whether "):
            text = text.removeprefix("Whether ").removeprefix("to ")
            text = text[:1].upper() + text[1:]
        return text if self.common is None else _first_clause(text)


def _first_clause(text: str) -> str:
    """Return a text up to its first full stop, semicolon or colon, without what is in parentheses.

    >>> _first_clause("Files (quoted; or patterns), or folders; none for all. More.")
    'Files, or folders.'
    """
    text = re.sub(r" \([^()]*\)", "", text)
    return re.split(r"[.;:] ", text, maxsplit=1)[0].rstrip(".") + "."


def _constructor(cls: type) -> Any:
    """Return a constructor of the class whose errors tyro passes on unchanged."""

    def make(**values: Any) -> Any:
        try:
            return cls(**values)
        except ConfigError as error:
            names = {field.name for field in fields(cls)}
            raise RefusedError([_flagged(fault, names) for fault in error.faults]) from None
        except (ValueError, TypeError) as error:
            raise RefusedError(str(error).splitlines()) from None

    return make


def _flagged(fault: str, names: Collection[str]) -> str:
    """Return a fault; if it begins with the name of one of these settings, the flag takes the place of the name.

    >>> _flagged("sample_bytes must not be negative, but is -1.", {"sample_bytes"})
    '--sample-bytes must not be negative, but is -1.'
    """
    name, space, rest = fault.partition(" ")
    return f"--{name.replace('_', '-')}{space}{rest}" if name in names else fault


def choices_of(hint: Any) -> tuple:
    """Return the values of a `Literal`, and None if the type is optional; return an empty tuple for any other type.

    >>> choices_of(Literal["cpu", "gpu"] | None)
    (None, 'cpu', 'gpu')
    """
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [arm for arm in arms if get_origin(arm) is Literal]
    if not literals or any(arm not in (*literals, NoneType) for arm in arms):
        return ()
    choices = [choice for arm in literals for choice in get_args(arm)]
    return (None, *choices) if NoneType in arms else tuple(choices)


@dataclass(frozen=True)
class Flag:
    """A flag that tyro makes of a setting.

    Attributes:
        name: the flag, such as "--model.heads". A boolean has two flags; this is the flag that turns the boolean on.
        table: the name of the settings table that contains the setting, followed by a dot, such as "model."; empty if
            no table contains the setting.
        field: the name of the setting, without its table.
        choices: the values that the flag accepts, if there are few.
        default: the value that the setting has without the flag.
        text: the documentation of the setting.
    """

    name: str
    table: str
    field: str
    choices: tuple[str, ...]
    default: Any
    text: str

    @property
    def off(self) -> str:
        """The flag that turns a boolean off, or an empty string if the flag takes a value."""
        if not isinstance(self.default, bool) or self.choices:
            return ""
        return f"--{self.table}no-{self.name.removeprefix(f'--{self.table}')}"


def every_flag(cls: type, default: Any, table: str = "") -> Iterator[Flag]:
    """Yield the flags that tyro makes of a dataclass of settings.

    Args:
        cls: the dataclass.
        default: an instance of the dataclass; it determines which of the optional tables exist.
        table: the prefix of the flags, such as "model.".
    """
    hints, texts = get_type_hints(cls, include_extras=True), documented(cls)
    for field in fields(cls):
        hint, value = hints[field.name], getattr(default, field.name)
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        if tyro.conf.Suppress in marks or tyro.conf.Positional in marks:
            continue
        named = next((mark.name for mark in marks if getattr(mark, "name", None)), field.name).replace("_", "-")
        if is_dataclass(value):
            merged = tyro.conf.OmitArgPrefixes in marks
            yield from every_flag(type(value), value, table if merged else f"{table}{named}.")
            continue
        choices = tuple(map(str, choices_of(get_args(hint)[0] if marks else hint)))
        yield Flag(f"--{table}{named}", table, field.name, choices, value, texts.get(field.name, ""))


def flags_of(cls: type, default: Any) -> dict[str, tuple[str, ...]]:
    """Return the flags of a dataclass of settings, each with its choices, as `every_flag` lists them."""
    found: dict[str, tuple[str, ...]] = {}
    for flag in every_flag(cls, default):
        found |= {flag.name: flag.choices, **({flag.off: ()} if flag.off else {})}
    return found


def _sentence(text: str) -> str:
    """Return a text on one line, beginning with a capital letter."""
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


@cache
def documented(cls: type) -> Mapping[str, str]:
    """Map the name of each field of a dataclass, inherited or not, to its documentation as running text.

    The documentation of a field is the docstring below it, or its entry under `Attributes` in the docstring of the
    class.

    >>> documented(RefusedError)
    {}
    """
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError, SyntaxError):  # A class without source: built-in, or made at run time.
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        _, _, attributes = (inspect.getdoc(each) or "").partition("\nAttributes:\n")
        for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", attributes, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), _sentence(text))
        for field, text in pairwise(body):
            name = field.target if isinstance(field, ast.AnnAssign) else None
            value = text.value if isinstance(text, ast.Expr) else None
            if isinstance(name, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[name.id] = " ".join(value.value.split())
    return found
