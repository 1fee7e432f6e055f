"""Text files: finding them by patterns, opening them by their suffixes, and reading documents in pieces."""

import bz2
import codecs
import glob
import gzip
import importlib
import lzma
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from gspmd.reading import ReadError, parse_json, similar_file
from gspmd.training.toml import ConfigError

#: Largest number of bytes that are encoded as one text; longer documents are cut.
PIECE = 1 << 16
#: Largest number of bytes of a line of JSON: while a line is parsed, memory holds it several times. A compressed file
#: of 0.4 MB may be a line of 400 MB.
LINE = 1 << 24
# Folders of pip do not belong to the standard library, and tests repeat the text that they test.
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_RECORDS = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
_SHOWN = 20
OTHERS = "Name other files, or none for Python's standard library."
FIELD = "text"
"""The field that holds the text of a record, unless another field is named."""
# A cut after such a line feed, or before such a space, does not change the tokens of GPT-2 and its successors, which
# split white space depending on the text after it.
_BETWEEN_LINES = re.compile(rb"(?<=\S)\n(?=\S)")
_BEFORE_WORDS = re.compile(rb" (?=\S)")


class Faults:
    """A collection of faults, which keeps the first twenty and counts all of them.

    Example:
        >>> faults = Faults()
        >>> faults.add("a.txt: line 3 is not UTF-8.")
        >>> faults.refuse("cannot read the data:")
        Traceback (most recent call last):
        gspmd.training.toml.ConfigError: cannot read the data:
          a.txt: line 3 is not UTF-8.
    """

    def __init__(self) -> None:
        self._first: list[str] = []
        self._count = 0

    def add(self, fault: str) -> None:
        """Add a fault, one line."""
        self._count += 1
        if self._count <= _SHOWN:
            self._first.append(fault)

    def refuse(self, doing: str) -> None:
        """Raise ConfigError if there is any fault."""
        more = self._count - len(self._first)
        if self._count:
            raise ConfigError(doing, [*self._first, *([f"... and {more:,} more."] if more else [])])


def matching(patterns: Sequence[str]) -> list[Path]:
    """Return the files that match the patterns, sorted; without patterns, the files of Python's standard library.

    Raises:
        ConfigError: a pattern matches no file; the message names every such pattern.
    """
    if not patterns:
        return _standard_library()
    paths: set[Path] = set()
    faults = []
    for pattern in patterns:
        # A file's own name may contain brackets; a folder is not a text. Path.is_file raises for a name that no file
        # can have, such as one of 5,000 characters.
        names = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        files = {Path(name) for name in names if os.path.isfile(name)}
        if not files:
            near = similar_file(pattern)
            remedy = near.rstrip() or OTHERS
            if os.path.isdir(pattern):
                remedy = f"It is a folder; write '{pattern.rstrip('/')}/**/*.txt'."
            faults.append(f"no file matches {pattern!r}. {remedy}")
        paths |= files
    if faults:
        raise ConfigError("cannot find the data:", faults)
    return sorted(paths)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if not _SKIPPED & set(path.relative_to(root).parts)]
    if not paths:
        fault = f"Python's standard library at {str(root)!r} has no .py files. Give text with --data 'path/*.txt'."
        raise ConfigError("cannot find text:", [fault])
    return paths


def kind(path: Path) -> str:
    """Return the kind of a file by its name: "text" (one document), or "json" or "parquet" (a document per record).

    >>> [kind(Path(name)) for name in ("a.py", "a.jsonl", "a.jsonl.gz", "a.parquet")]
    ['text', 'json', 'json', 'parquet']
    """
    name = path.with_suffix("") if compression(path) else path
    return _RECORDS.get(name.suffix, "text")


def compression(path: Path) -> str:
    """Return the suffix of a file if `opened` decompresses files with this suffix, and "" if not."""
    return path.suffix if path.suffix in (*_COMPRESSED, ".zst") else ""


@contextmanager
def opened(path: Path, faults: Faults) -> Iterator[BinaryIO | None]:
    """Open a file, decompressed according to its suffix, or yield None if it cannot be opened or decompressed.

    The reason for None is added to the faults. So are errors that occur while the file is read, in the `with` block.
    """
    opening: Any = _COMPRESSED.get(path.suffix, open)
    if path.suffix == ".zst":
        if sys.version_info < (3, 14):
            faults.add(
                f"{str(path)!r} is compressed by zstd, which Python {sys.version_info.major}.{sys.version_info.minor} "
                f"does not read; decompress it: zstd -d {path.name}."
            )
            yield None
            return
        opening = importlib.import_module("compression.zstd").open
    try:
        file = opening(path, "rb")
    except OSError as error:  # It may have been deleted since its name was found.
        faults.add(f"cannot read {str(path)!r}: {error.strerror or error}.")
        yield None
        return
    try:
        with file:
            yield file
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        faults.add(f"{str(path)!r} is damaged: {error}.")
    except OSError as error:
        faults.add(f"cannot read {str(path)!r}: {error.strerror or error}.")


def text_pieces(file: BinaryIO, cut: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield a text in pieces of at most `PIECE` bytes.

    A piece ends where most tokenizers end a token anyway: after a line if possible, and otherwise before a space. It
    never ends within a character of UTF-8.

    Args:
        file: an open file at the beginning of the text.
        cut: the number of bytes after which part 1 begins, reduced by up to three so that no character is cut; None if
            the whole text is part 0.

    Yields:
        The index of the part, 0 or 1, and a piece of this part.
    """
    held = b""
    for part, left in enumerate((None,) if cut is None else (cut, None)):
        while block := file.read(PIECE if left is None else min(PIECE, left)):
            left = left and left - len(block)
            held += block
            while len(held) > PIECE:
                at = _end(held, PIECE)
                yield part, held[:at]
                held = held[at:]
        at = len(held) if left is None else _last_character(held)
        if at:
            yield part, held[:at]
        held = held[at:]


def check_text(file: BinaryIO, path: Path, faults: Faults, *, utf8: bool, read: Callable[[int], None]) -> int:
    """Return the number of bytes of a text; if `utf8` is true, add a fault for the first line that is not UTF-8.

    `read` is called after each read, with the number of bytes that were read.
    """
    decoder, size, line = codecs.getincrementaldecoder("utf-8")(), 0, 1
    while True:
        block = file.read(1 << 20)
        size += len(block)
        read(len(block))
        if utf8:
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                faults.add(f"{str(path)!r}: line {line} is not UTF-8 (byte 0x{error.object[error.start]:02x}).")
                return size
            line += block.count(b"\n")
        if not block:
            return size


def records(path: Path, field: str, faults: Faults, prompt: str = "") -> Iterator[tuple[bytes, bytes]]:
    """Yield prompt and text of each document in a file of JSON lines or Parquet, as UTF-8; empty texts are left out.

    Args:
        path: the file.
        field: the field or column with the text.
        faults: the collection to which a fault is added for every record without a text; such records are skipped.
        prompt: the field or column with the prompt; empty for documents without one.
    """
    fields = {"prompt": prompt, "field": field} if prompt else {"field": field}
    for _, texts in _fields(path, fields, faults):
        if texts[-1]:
            yield texts[0].encode() if prompt else b"", texts[-1].encode()


def pairs(path: Path, source: str, target: str, faults: Faults) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the position, source and target of every pair in a file, as UTF-8.

    Args:
        path: a file of JSON lines, Parquet or tab-separated lines; a tab-separated line is SOURCE, a tab, TARGET.
        source: the field or column with the source.
        target: the field or column with the target.
        faults: the collection to which a fault is added for every pair without a source or without a target; such pairs
            are skipped.
    """
    fields = {"source": source, "field": target}
    rows = _tab_separated(path, faults) if kind(path) == "text" else _fields(path, fields, faults)
    for where, texts in rows:
        if missing := [side for side, text in zip(("source", "target"), texts) if not text]:
            faults.add(f"{str(path)!r}: {where} has no {missing[0]}; both sides of a pair need text.")
        else:
            yield f"{str(path)!r}: {where}", texts[0].encode(), texts[1].encode()


def is_of_pairs(path: Path) -> bool:
    """Return whether a file may hold pairs, by its name.

    >>> [is_of_pairs(Path(name)) for name in ("a.tsv", "a.tsv.gz", "a.jsonl", "a.txt")]
    [True, True, True, False]
    """
    name = path.with_suffix("") if compression(path) else path
    return name.suffix == ".tsv" or kind(path) != "text"


def _fields(path: Path, fields: Mapping[str, str], faults: Faults) -> Iterator[tuple[str, list[str]]]:
    """Yield the position of every record in its file, and the texts of the record's given fields."""
    rows = _parquet(path, fields, faults) if kind(path) == "parquet" else _json_lines(path, fields, faults)
    for where, texts in rows:
        wrong = [
            f"{name!r} is {_NAMES.get(type(text), 'a number')}, not a string"
            for name, text in zip(fields.values(), texts)
            if not isinstance(text, str)
        ]
        if wrong:
            faults.add(f"{str(path)!r}: {where}: {'; '.join(wrong)}.")
        else:
            yield where, texts


_LONG = "split that text, or put it into a file of its own, of any length."
_NAMES = {type(None): "null", bool: "true or false", dict: "an object", list: "a list", bytes: "binary"}


def _lines(path: Path, faults: Faults) -> Iterator[tuple[str, str]]:
    """Yield the position and the text of every line of a file that is not blank."""
    with opened(path, faults) as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE + 1), b"") if file else (), 1):
            where = f"line {number}"
            if len(line) > LINE:  # the rest of the file is not read
                faults.add(f"{str(path)!r}: {where} is longer than {LINE:,} bytes, the limit for a line; {_LONG}")
                return
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                yield where, line.decode()
            except UnicodeDecodeError as error:
                faults.add(f"{str(path)!r}: {where} is not UTF-8 (byte 0x{line[error.start]:02x}).")


def _json_lines(path: Path, fields: Mapping[str, str], faults: Faults) -> Iterator[tuple[str, list[Any]]]:
    for where, line in _lines(path, faults):
        try:
            record = parse_json(line.rstrip())
        except ReadError as error:
            faults.add(f"{str(path)!r}: {where}: {error}.")
        else:
            if not isinstance(record, dict):
                faults.add(f"{str(path)!r}: {where} is {_NAMES.get(type(record), 'a value')}, not an object.")
            elif missing := [flag for flag, field in fields.items() if field not in record]:
                has = ", ".join(map(repr, list(record)[:8])) or "none"
                fault = f"{where} has no field {fields[missing[0]]!r}; it has {has}. See --data-{missing[0]}."
                faults.add(f"{str(path)!r}: {fault}")
            else:
                yield where, [record[field] for field in fields.values()]


def _tab_separated(path: Path, faults: Faults) -> Iterator[tuple[str, list[str]]]:
    for where, line in _lines(path, faults):
        texts = line.rstrip("\r\n").split("\t")
        if len(texts) == 2:
            yield where, texts
        else:
            has = "no tab" if len(texts) == 1 else f"{len(texts) - 1} tabs"
            faults.add(f"{str(path)!r}: {where} has {has}; a pair is SOURCE, one tab, TARGET.")


def _parquet(path: Path, fields: Mapping[str, str], faults: Faults) -> Iterator[tuple[str, list[Any]]]:
    try:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        faults.add(f"{str(path)!r} is read by pyarrow, which is not installed: pip install 'gspmd[parquet]'.")
        return
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if missing := [flag for flag, field in fields.items() if field not in columns]:
                has = ", ".join(map(repr, columns[:8]))
                fault = f"has no column {fields[missing[0]]!r}; it has {has}. Name one with --data-{missing[0]}."
                faults.add(f"{str(path)!r} {fault}")
                return
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=[*dict.fromkeys(fields.values())]):
                for values in zip(*(batch.column(field).to_pylist() for field in fields.values())):
                    row += 1
                    yield f"row {row}", [*values]
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:  # a column of text may hold other bytes
        faults.add(f"{str(path)!r} cannot be read as Parquet: {str(error).splitlines()[0]}.")


def _end(text: bytes, most: int) -> int:
    """Return the index at which to cut a text that is longer than `most` bytes."""
    cuts = [match.end() for match in _BETWEEN_LINES.finditer(text, most // 2, most)]
    cuts = cuts or [match.start() for match in _BEFORE_WORDS.finditer(text, most // 2, most)]
    return cuts[-1] if cuts else _last_character(text[:most])


def _last_character(text: bytes) -> int:
    """Return the length of a text, not counting an incomplete character at its end."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:
            wanted = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - back if wanted > back else len(text)
        if byte < 0x80:
            break
    return len(text)
