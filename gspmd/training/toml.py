"""Read TOML files into nested frozen dataclasses, reporting all faults at once."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from gspmd.reading import ContentError, MissingError, ReadError, read_toml


class Dataclass(Protocol):
    """Any instance of a dataclass, recognized as the module `dataclasses` recognizes it."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar("T", bound=Dataclass)


_LINES, _WIDTH = 24, 600  # Limits of a message, because the values that it quotes may be long.


class ConfigError(ValueError):
    """An invalid configuration. The message lists the first faults, one per line; `.faults` has all of them."""

    def __init__(self, doing: str, faults: typing.Sequence[str]):
        self.faults = tuple(faults)
        more = len(self.faults) - _LINES
        lines = [_shortened(doing), *(f"  {_shortened(fault)}" for fault in self.faults[:_LINES])]
        super().__init__("\n".join(lines + [f"  ... and {more} more."] * (more > 0)))


def _shortened(line: str) -> str:
    """Return a line; if it is very long, the middle is left out."""
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH // 2]} … {line[-_WIDTH // 2 :]}"


Typing = Callable[[type[T], Mapping[str, Any]], tuple[type[T], Mapping[str, Any]]]
"""A function (dataclass, values of a file) -> (dataclass to read, values for the dataclass to read)."""


def load_toml(cls: type[T], path: str | Path, typed: Typing | None = None) -> T:
    """Read a TOML file as the dataclass `cls`; tables in the file become its nested dataclasses.

    Args:
        cls: a dataclass of numbers, strings, booleans, tuples, literals and dataclasses; each type may be `| None`.
        path: the TOML file. Missing keys keep their defaults.
        typed: a function that chooses the dataclass from the file's values; None to read `cls`.

    Returns: An instance of the dataclass, with relative paths resolved from the file's folder.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has unknown keys or values of a wrong type; the message
            lists all faults.
    """
    try:
        values = read_toml(path)
    except ReadError as error:
        hint = similar_config(Path(path)) if isinstance(error, MissingError) else ""
        hint = hint or ("" if isinstance(error, ContentError) else "Give a TOML file.")
        raise ConfigError(f"cannot read config {str(path)!r}:", [f"{error}. {hint}".rstrip()]) from None
    cls, values = typed(cls, values) if typed else (cls, values)
    return beside(from_mapping(cls, values, source=str(path)), Path(path).parent)


def beside(config: T, folder: Path) -> T:
    """Return a copy of a configuration with relative paths resolved from `folder`.

    Each dataclass in the configuration that has a method `beside` resolves its own paths.
    """
    inner = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    moved = {name: beside(value, folder) for name, value in inner.items() if _is_instance(value)}
    config = dataclasses.replace(config, **moved)
    return config.beside(folder) if hasattr(config, "beside") else config


def _is_instance(value: Any) -> typing.TypeGuard[Dataclass]:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def from_mapping(cls: type[T], values: Mapping[str, Any], *, source: str = "the given values") -> T:
    """Read settings from a mapping, as `load_toml` does from a file.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Width:
        ...     embed: int = 64
        >>> from_mapping(Width, {"embed": 128})
        Width(embed=128)
        >>> from_mapping(Width, {"embd": 128})
        Traceback (most recent call last):
        gspmd.training.toml.ConfigError: cannot use config 'the given values':
          unknown key 'embd'; did you mean 'embed'?
    """
    faults: list[str] = []
    result = _build(cls, values, "", faults, _tables(cls))
    if faults:
        raise ConfigError(f"cannot use config {source!r}:", faults)
    return result


def to_mapping(config: Any) -> dict[str, Any]:
    """Return settings as nested dictionaries and lists, without None values: the inverse of `from_mapping`."""
    out = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None:
            out[field.name] = to_mapping(value) if dataclasses.is_dataclass(value) else value
    return {key: list(value) if isinstance(value, tuple) else value for key, value in out.items()}


#: Steps, sizes and counts must be below this, because they are int32 on devices.
LIMIT = 2**31


def positive(faults: list[str], **values: float | None) -> None:
    """Add a fault for every value that is not positive or not finite, or that is an integer of `LIMIT` or more.

    None is a valid value.

    Example:
        >>> faults = []
        >>> positive(faults, steps=10**18, batch=0, length=None, learning_rate=float("nan"))
        >>> print("\\n".join(faults))
        batch must be positive, but is 0.
        learning_rate must be positive, but is nan.
        steps must be less than 2**31, but is 1000000000000000000.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            faults.append(f"{name} must be positive, but is {value}.")
    _bounded(faults, values)


def not_negative(faults: list[str], **values: float | None) -> None:
    """Check numbers as `positive` does, but allow zero."""
    for name, value in values.items():
        if value is not None and not value >= 0:
            faults.append(f"{name} must not be negative, but is {value}.")
    _bounded(faults, values)


def _bounded(faults: list[str], values: Mapping[str, float | None]) -> None:
    for name, value in values.items():
        if isinstance(value, int) and value >= LIMIT:
            faults.append(f"{name} must be less than 2**31, but is {value}.")
        elif value == math.inf:
            faults.append(f"{name} must be finite, but is {value}.")


def not_a_choice(name: str, value: object, choices: typing.Sequence) -> str:
    """Return the message about a value that is not one of the choices; it proposes the nearest choice."""
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1, cutoff=0.7)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{name} must be one of {', '.join(map(repr, choices))}, but is {value!r}.{hint}"


def _tables(cls: type) -> dict[str, list[str]]:
    """Return a mapping from the name of each key to the tables of a file in which the key may appear."""
    tables: dict[str, list[str]] = {}
    for name, hint in typing.get_type_hints(cls).items():
        table, _ = _unwrap(hint)
        if isinstance(table, type) and dataclasses.is_dataclass(table):
            for field in dataclasses.fields(table):
                tables.setdefault(field.name, []).append(name)
    return tables


def _build(
    cls: type, values: Mapping[str, Any], prefix: str, faults: list[str], tables: Mapping[str, list[str]] | None = None
) -> Any:
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls)}
    before = len(faults)
    kwargs = {}
    for key, value in values.items():
        if key in names:
            kwargs[key] = _convert(hints[key], value, f"{prefix}{key}", faults, tables)
        elif tables and key in tables:
            faults.append(f"unknown key {prefix + key!r}; write {key} in [{'] or ['.join(tables[key])}].")
        else:
            faults.append(_unknown(f"{prefix}{key}", [prefix + name for name in sorted(names)]))
    return _construct(cls, kwargs, prefix, faults) if len(faults) == before else None


def _construct(cls: type, kwargs: dict[str, Any], prefix: str, faults: list[str]) -> Any:
    try:
        return cls(**kwargs)
    except ConfigError as error:
        faults.extend(error.faults)
    except (ValueError, TypeError) as error:
        faults.append(f"[{prefix.rstrip('.')}] {error}" if prefix else str(error))
    return None


def _unknown(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f"unknown key {key!r}; did you mean {close[0]!r}?"
    return f"unknown key {key!r}; known keys: {', '.join(known)}."


def _text_fault(text: str) -> str | None:
    """Return the reason why a string cannot be the value of a setting, or None if it can be."""
    if "\0" in text:  # No file name can contain it.
        return "must have no null bytes"
    try:
        text.encode()
    except UnicodeEncodeError:  # A run's config.json with a name in another encoding could not be read back.
        return "must be UTF-8"
    return None


def _convert(hint: Any, value: Any, key: str, faults: list[str], tables: Mapping[str, list[str]] | None = None) -> Any:
    hint, optional = _unwrap(hint)
    if value is None and optional:
        return None
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return _build(hint, value, f"{key}.", faults, tables)
    elif typing.get_origin(hint) is typing.Literal:
        return _choice(typing.get_args(hint), value, key, faults)
    elif typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, item, f"{key}[{i}]", faults) for i, item in enumerate(value))
    elif hint is str and isinstance(value, str) and (fault := _text_fault(value)):
        faults.append(f"{key} {fault}, but is {value!r:.80}.")
        return None
    elif _fits(hint, value):
        try:
            return float(value) if hint is float else value
        except OverflowError:  # A whole number of 400 digits, which JSON can have.
            pass
    faults.append(f"{key} must be {_wanted(hint)}, but is {value!r:.200}.")
    return None


def _unwrap(hint: Any) -> tuple[Any, bool]:
    """Return a type without its `Annotated` and `| None`, and whether None is allowed."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        if len(inner) == 1:
            return _unwrap(inner[0])[0], True
    return hint, False


def _fits(hint: Any, value: Any) -> bool:
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(hint, type) and isinstance(value, hint)


def _choice(choices: tuple, value: Any, key: str, faults: list[str]) -> Any:
    if value in choices:
        return value
    faults.append(not_a_choice(key, value, choices))
    return None


def _wanted(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return "a table"
    if typing.get_origin(hint) is tuple:
        return "a list"
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(hint, str(hint))


def similar_config(path: Path) -> str:
    """Return "Did you mean ...?" with a TOML file of a similar name near a missing file.

    The folder of the missing file and its subfolders are searched. The result is "" if no name is similar.
    """
    there = {str(near): near.stem for depth in ("*.toml", "*/*.toml") for near in path.parent.glob(depth)}
    close = difflib.get_close_matches(path.stem, there.values(), n=1, cutoff=0.7)
    hints = [f"Did you mean {name!r}?" for name, stem in there.items() if stem in close]
    return "".join(hints[:1])
