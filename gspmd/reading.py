"""Read JSON, TOML and text from untrusted files: with bounds on size and depth, and with one error for any fault.

Files come from strangers (public checkpoints), from other versions, and from failing disks. For some of them Python's
own readers raise unexpected errors (RecursionError for deep nesting, a plain ValueError for a number of 5,000 digits),
block forever (on a FIFO that nobody writes to), or fill the memory. Callers of this module handle a single error,
`ReadError`.
"""

import json
import os
import re
import stat
import sys
import tomllib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

#: The largest JSON file that is read, in bytes. The tokenizers of public models have up to 35 MB.
LARGEST = 2**26
#: The largest TOML file that is read, in bytes: settings and layouts are written by hand, and have a few kB.
LARGEST_TOML = 2**22
#: The deepest nesting of objects, lists and tables that is accepted. Genuine files have fewer than ten levels. The
#: limit protects callers that walk through the values recursively.
DEEPEST = 64

# Matches a dotted key with more parts than the deepest nesting. Python's parser copies the key at each dot, so a key
# with 50,000 dots would take seconds. A key stands at the start of a line, of a header or of an entry of a table.
# Possessive quantifiers make this search linear.
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_DEEP_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*+{_PART}(?:\.[ \t]*+{_PART}){{{DEEPEST}}}", re.MULTILINE)

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# Messages of Python's parser for a key or a table that is defined twice.
_SECOND = ("Cannot overwrite a value", "Cannot declare")
_KEY = rf"{_PART}(?:\.[ \t]*+{_PART})*+"
_PLACE = re.compile(rf"[ \t]*+(?:(?P<header>\[\[?[ \t]*+(?P<table>{_KEY})\]\]?)|(?P<key>{_KEY})=)")
# The byte order mark that some editors put before the first character of a file; it is not part of the text.
_MARK = "\ufeff"

# Paths under which a shell passes the output of a command, as in `--config <(command)`: a pipe that is already open, so
# that opening it cannot block, as opening a FIFO can.
_PIPES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")


#: The numbers that `whole_number` accepts, for a message.
WHOLE = "a whole number of at most 18 digits"


class ReadError(ValueError):
    """The error for a file that cannot be read; its message is the reason, without file name or full stop."""


class ContentError(ReadError):
    """The error for text with a fault, such as a line that is not TOML: the remedy is to correct the file."""


class MissingError(ReadError):
    """The error for a file that does not exist."""


def open_file(path: str | os.PathLike) -> BinaryIO:
    """Open a file to read bytes.

    A FIFO or a device is an error. Its name may have come from a stranger, and reading it could block. The exception is
    a pipe that is already open, such as `/dev/fd/63`, by which a shell passes the output of a command.

    Raises:
        ReadError: the file does not exist (`MissingError`), is neither a regular file nor such a pipe, or the system
            refuses it.
    """
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and os.fspath(path).startswith(_PIPES))):
            raise ReadError(f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file")
        return open(path, "rb")
    except (OSError, ValueError) as error:
        raise _reason(error) from None


def read_text(path: str | os.PathLike, most: int = LARGEST) -> str:
    """Read a text file of at most `most` bytes.

    Raises:
        ReadError: the file cannot be opened (as for `open_file`), is larger than `most`, or is not UTF-8.
    """
    try:
        with open_file(path) as file:
            data = b"".join(_chunks(file, most + 1))
    except OSError as error:
        raise _reason(error) from None
    if len(data) > most:
        raise ReadError(f"it is larger than {most:,} bytes, the most that is read")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ReadError(f"it is not UTF-8 text (byte 0x{data[error.start]:02x} in line {line})") from None


def _chunks(file: BinaryIO, most: int) -> Iterable[bytes]:
    """Yield a file in pieces, up to about `most` bytes; a single `read(most)` would allocate all bytes at once."""
    while most and (chunk := file.read(min(most, 2**20))):
        most -= len(chunk)
        yield chunk


def read_json(path: str | os.PathLike, *, unique: bool = False) -> Any:
    """Read a JSON file; `unique` is passed to `parse_json`.

    Raises:
        ReadError: as for `read_text` and `parse_json`.
    """
    return parse_json(read_text(path), unique=unique)


def read_toml(path: str | os.PathLike) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ReadError: as for `read_text` and `parse_toml`.
    """
    return parse_toml(read_text(path, LARGEST_TOML))


def parse_json(text: str, *, unique: bool = False) -> Any:
    """Parse JSON.

    Args:
        text: the JSON text.
        unique: whether an object with a repeated key is an error. If false, the last value of the key counts.

    Raises:
        ReadError: the text is not JSON, or nested too deeply.

    Example:
        >>> parse_json("[" * 5000 + "]" * 5000)
        Traceback (most recent call last):
        gspmd.reading.ContentError: it is nested more than 64 levels deep
    """
    try:
        value = json.loads(text.removeprefix(_MARK), object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise ContentError(f"it is not JSON: {error.msg} at {line}column {error.colno}") from None
    except ReadError:
        raise
    except ValueError:  # A number has too many digits; Python's message would propose one of its own settings.
        raise _too_long() from None
    # Nesting is at most the number of opening brackets, so most files need no walk.
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(value)
    if "\\u" in text and not _is_unicode(value):
        raise ContentError("it has half of a surrogate pair, which is not a character")
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ReadError: the text is not TOML, or nested too deeply.

    Example:
        >>> parse_toml("a.b = 1"), parse_toml("a = [1, 2]")
        ({'a': {'b': 1}}, {'a': [1, 2]})
    """
    text = text.removeprefix(_MARK)
    if _DEEP_KEY.search(text):
        raise _too_deep()
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except tomllib.TOMLDecodeError as error:
        if "\0" in text:
            raise ReadError("it is not text: it has a null byte") from None
        raise ContentError(f"it is not TOML: {_toml_fault(text, str(error))}") from None
    except ValueError as error:  # Raised for a number with too many digits, or an impossible date.
        raise (_too_long() if "digits" in str(error) else ContentError(f"it is not TOML: {error}")) from None
    _check_depth(value)
    _check_numbers(value)
    return value


def _toml_fault(text: str, said: str) -> str:
    """Return Python's message or, if a key or a table is defined twice, a message with the name and the line."""
    at = re.search(r"\(at line (\d+), column \d+\)$", said)  # without it, the fault is at the end
    lines = text.split("\n")[: int(at[1]) if at else None]
    twice = re.match(r"Duplicate inline table key (.*) \(", said, re.DOTALL)
    # The parser names the line in which the second value ends. If all lines before it are complete, its key is in this
    # line.
    if (twice or said.startswith(_SECOND)) and (before := _document_and_table(lines[:-1])) is not None:
        if twice:
            return f"{twice[1]} appears a second time in line {len(lines)}; write it once"
        if (place := _PLACE.match(lines[-1])) and "\\" not in place[0]:  # not a quote of a key, such as "a\\"="
            return _second_place(place, len(lines), *before)
    return f"{said}{'; text stands in quotes' if said.startswith('Invalid value') else ''}"


def _document_and_table(lines: Sequence[str]) -> tuple[dict[str, Any], list[str]] | None:
    """Return the values in lines of TOML, and the path of the last table; None if the last value is incomplete."""
    text, mark = "\n".join(lines), "-"
    while mark in text:
        mark += mark
    try:
        document = tomllib.loads(f"{text}\n{mark} = 0")
    except ValueError:
        return None
    level: list[tuple[list[str], dict[str, Any]]] = [([], document)]
    while mark not in level[-1][1]:
        path, table = level.pop()
        level += [([*path, key], inner) for key, value in table.items() if isinstance(inner := _last(value), dict)]
    return document, level[-1][0]


def _last(value: Any) -> Any:
    """Return the last element of an array, and any other value unchanged.

    For an array of tables, the last element is the current table.
    """
    return value[-1] if isinstance(value, list) and value else value


def _second_place(place: re.Match[str], number: int, document: dict[str, Any], table: Sequence[str]) -> str:
    """Return the fault of a line that defines a key or a table for the second time."""
    parts, inner = [], tomllib.loads(f"{place['table'] or place['key']} = 0")
    while isinstance(inner, dict):
        ((part, inner),) = inner.items()
        parts.append(part)
    written = place["header"] or ".".join([*map(_quoted, table), place["key"].strip()])
    path = parts if place["table"] else [*table, *parts]
    value: Any = document
    for depth, part in enumerate(path[: None if place["table"] else -1], 1):
        value = _last(value.get(part, {}))
        if not isinstance(value, dict):
            name = ".".join(map(_quoted, path[:depth]))
            return f"{written} in line {number}: {name} is a value, so it cannot be a table too"
    return f"{written} appears a second time in line {number}; write it once"


def _quoted(part: str) -> str:
    """Return a part of a TOML key, in quotes if it needs them."""
    return part if re.fullmatch("[A-Za-z0-9_-]+", part) else repr(part)


def folder_fault(path: str | os.PathLike) -> str | None:
    """Return the reason why a path is not a folder, or None if it is a folder.

    Example:
        >>> folder_fault("/"), folder_fault("/nowhere"), folder_fault("/" + 5000 * "a")
        (None, 'there is no such folder', 'File name too long')
    """
    try:
        return None if stat.S_ISDIR(os.stat(path).st_mode) else "it is not a folder"
    except (FileNotFoundError, NotADirectoryError):
        return "there is no such folder"
    except (OSError, ValueError) as error:
        return str(_reason(error))


def new_folder_fault(path: Path) -> str:
    """Return the reason why a folder cannot be created or written to, or "" if no reason is known in advance."""
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    fault = folder_fault(there)
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # For example, the name is too long; for such a name `lexists` returns False.
        there, fault = path, error.strerror
    if not fault and not os.access(there, os.W_OK | os.X_OK):
        fault = "you may not write there"
    return f"{'' if there == path else f'{str(there)!r}: '}{fault}" if fault else ""


def whole_number(text: str) -> int | None:
    """Parse a whole number of at most 18 digits, as flags accept it, or return None for any other text.

    `int` by itself also accepts underscores and digits of other scripts, and for 5,000 digits it raises an error about
    Python's settings. `str.isdigit` is true for `²`, which `int` does not accept.

    Example:
        >>> [whole_number(text) for text in ("8", " 8 ", "-8", "²", "٣", "1_000", "9" * 5000)]
        [8, 8, None, None, None, None, None]
    """
    found = re.fullmatch(r"\s*([0-9]{1,18})\s*", text)
    return int(found[1]) if found else None


def is_inside(name: str) -> bool:
    """Return whether a file name stays inside its folder: it is not absolute and does not go up by `..`.

    Checkpoints name their other files, and such a name must not lead elsewhere. Symbolic links are not followed, since
    a download cache keeps a model's files as links to another folder.

    Example:
        >>> [is_inside(name) for name in ("a.bin", "parts/a.bin", "../a.bin", "/etc/a.bin", "")]
        [True, True, False, False, False]
    """
    path = Path(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, each in pairs:
        if key in value:
            raise ContentError(f"the key {key!r} appears twice")
        value[key] = each
    return value


def _is_unicode(value: Any) -> bool:
    """Return whether all text in a value can be encoded.

    JSON allows half of a surrogate pair, which stays in the text and cannot be encoded.
    """
    try:
        return bool(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        return False


def _check_depth(value: Any) -> None:
    """Raise an error if nesting is deeper than `DEEPEST` levels; the check goes level by level, without recursion."""
    level: Sequence[Any] = [value]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return
    raise _too_deep()


def _inner(value: Any) -> Iterable[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in values if isinstance(each, dict | list)]


def _check_numbers(value: Any) -> None:
    """Raise an error about whole numbers beyond 64 bits.

    The integers of the TOML standard have 64 bits, but Python's parser accepts larger ones.
    """
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_numbers(each)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ContentError("it has a whole number that does not fit into 64 bits")


def _too_deep() -> ContentError:
    return ContentError(f"it is nested more than {DEEPEST} levels deep")


def _too_long() -> ContentError:
    return ContentError(f"it has a number of more than {sys.get_int_max_str_digits():,} digits")


def similar_file(path: str) -> str:
    """Return "Did you mean ...? " with the most similar name in a missing file's folder, or "" if none is similar."""
    folder, name = os.path.split(path)
    try:
        there = [each.name for each in os.scandir(folder or ".") if each.is_file()]
    except (OSError, ValueError):  # There is no such folder, or none could have this name.
        return ""
    # Names of one kind of file are alike in their endings, so the rest of the name has to be alike too.
    stem, ending = os.path.splitext(name)
    stems = [rest for rest, end in map(os.path.splitext, there) if end == ending]
    near = [f"{rest}{ending}" for rest in get_close_matches(stem, stems, n=1, cutoff=0.6)]
    near = near or get_close_matches(
        name, [each for each in there if os.path.splitext(each)[1] != ending], n=1, cutoff=0.7
    )
    return f"Did you mean {os.path.join(folder, near[0])!r}? " if near else ""


def _reason(error: OSError | ValueError) -> ReadError:
    if isinstance(error, ReadError):
        return error
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return MissingError("there is no such file")
    if isinstance(error, OSError):
        return ReadError(error.strerror or str(error))
    return ReadError("its name holds a null byte" if "null" in str(error) else str(error))
