"""Preparation of a corpus: texts are hashed, read and checked, tokenized once to disk, and memory-mapped."""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gspmd import host
from gspmd.display.progress import Progress
from gspmd.training.data import shards
from gspmd.training.data.corpus import Corpus, digest_of
from gspmd.training.data.objectives import Objective, Pairs
from gspmd.training.data.sources import FIELD, Faults, compression, is_of_pairs, kind, matching
from gspmd.training.data.split import HELD_OUT, TRAIN, Piece, no_text, split
from gspmd.training.data.tokens import Encoding, of_bytes, of_tokenizer
from gspmd.training.toml import ConfigError

#: Bytes of text that are encoded together: enough pieces to keep every core busy, and little memory.
BATCH = 1 << 20
# Version of the stored tokens; raise it if the same texts would now give other tokens.
_FORMAT = 1
# The positions, in tokens, at which texts begin.
_STARTS = np.dtype("<i8")

Stamp = tuple[int, int]


def load(
    patterns: Sequence[str] = (),
    *,
    fraction: float = 0.05,
    tokenizer: Any = None,
    field: str = FIELD,
    prompt: str = "",
    source: str = "",
    objective: Objective | None = None,
    length: int = 0,
    cache: str | os.PathLike = "",
    console: Console | None = None,
) -> Corpus:
    """Read the files that match the patterns, or the source of Python's standard library.

    A file is one text, except that a file of JSON lines (.jsonl) or Parquet (.parquet) has one text per record. Files
    ending in .gz, .bz2 and .xz are decompressed. Texts are read in pieces, and their tokens are written to a folder,
    from which later runs map them into memory. The folder is found by a hash of the files, the tokenizer and the
    settings.

    The split depends only on the contents of the files, so it is the same on every machine. Copies of a file count
    once, and copies of a record are in the same part. Whole files are held out if possible. If there are too few files,
    or one file has most of the text, every file is cut near its end, and the ends are held out.

    Args:
        patterns: paths or glob patterns (`**` for folders within folders). If there are none, the source of
            Python's standard library is read.
        fraction: fraction of the bytes to hold out. If whole files are held out, they have between half and twice this
            fraction.
        tokenizer: an object with `backend` and `ends`, such as `gspmd_models.checkpoints.Tokenizer`. If it is None,
            the tokens are bytes.
        field: the field that holds the text of a record.
        prompt: the field that holds the prompt of a record. The prompt's tokens come before the text, each stored as
            its complement `~t`: they are read, but not predicted. It is empty if records have no prompt.
        source: the field that holds the source of a pair. The target is in the field named by `field`.
        objective: the objective that turns the texts into rows. If None, the rows are windows of the joined texts.
        length: number of tokens that a row predicts. The target of a pair, with its end token, must not be longer.
        cache: the folder for tokens; if empty, `$GSPMD_CACHE` or ~/.cache/gspmd.
        console: the console on which progress is shown.

    Raises:
        ConfigError: a pattern matches no file, a file or line cannot be read, a pair lacks a side or is too long, there
            is no text, or tokens cannot be written; the message lists all faults.

    Differs: a text longer than 64 KiB is tokenized in pieces that end with a line, or before a word. This makes no
        difference for tokenizers that split texts at these points anyway, such as byte-level tokenizers.
    """
    encoding = of_tokenizer(tokenizer) if tokenizer is not None else of_bytes()
    name = " ".join(patterns) or "Python's standard library"
    if isinstance(objective, Pairs) and not patterns:
        raise ConfigError("cannot find the data:", ["the objective pairs needs files of pairs; name them with --data."])
    stamps = {path: _stamp(path) for path in matching(patterns)}
    if isinstance(objective, Pairs):
        _check_pairs(stamps, source, field)
    elif field != FIELD and all(kind(path) == "text" for path in stamps):
        fault = f"no file has records with a field {field!r}: {name} is read as plain text. Leave out --data-field."
        raise ConfigError("cannot read the data:", [fault])
    if prompt and all(kind(path) == "text" for path in stamps):
        fault = f"no file has records with a field {prompt!r}: {name} is read as plain text. Leave out --data-prompt."
        raise ConfigError("cannot read the data:", [fault])
    if prompt and prompt == field:
        fault = f"prompt and text are both in the field {field!r}; name another with --data-prompt or --data-field."
        raise ConfigError("cannot read the data:", [fault])
    with Progress(console, "Reading the text") as progress:
        files = _files(stamps, name, progress)
        settings = [_FORMAT, fraction, field, encoding.digest, encoding.vocabulary, *([prompt] if prompt else [])]
        # Part of the key only for objectives that need borders, so that tokens stored by earlier versions are still
        # found.
        settings += ["borders"] if objective and objective.borders else []
        if rooms := (objective.source_length, length) if isinstance(objective, Pairs) else None:
            settings += ["pairs", source, *rooms]
        key = hashlib.sha256(json.dumps([settings, *files]).encode()).hexdigest()[:32]
        names = (TRAIN, HELD_OUT, *((_starts(TRAIN), _starts(HELD_OUT)) if objective and objective.borders else ()))
        folder = (Path(cache) if cache else host.cache_folder("tokens")) / key
        with _writing_to(folder.parent):
            index = _kept(folder, names, progress)
            if index is None:
                folder.parent.mkdir(parents=True, exist_ok=True)
                waiting = "Waiting for another process, which is tokenizing the text"
                with shards.locked(folder, lambda: progress.say(lambda: waiting)):
                    index = _kept(folder, names, progress, tell=True)
                    if index is None:
                        shutil.rmtree(folder, ignore_errors=True)
                        taken = {path: stamps[path] for path in files.values()}
                        fields = field, source if rooms else prompt
                        index = _tokenize(taken, folder, encoding, name, fields, fraction, progress, names, rooms)
        progress.begin("Mapping the tokens into memory")
        train, held_out, *starts = (shards.read_tokens(folder, part, index) for part in names)
        return Corpus(
            name,
            train,
            held_out,
            files=(index[TRAIN]["texts"], index[HELD_OUT]["texts"]),
            gzip_bits_per_byte=index["gzip_bits_per_byte"],
            vocabulary=encoding.vocabulary,
            bytes_per_token=index[HELD_OUT]["bytes"] / max(1, index[HELD_OUT].get("predicted", len(held_out))),
            tokenizer=encoding.digest,
            unit="pair" if rooms else "file" if {kind(path) for path in files.values()} == {"text"} else "record",
            digest=digest_of(*(index[part]["sha256"] for part in names)),
            objective=objective,
            starts=(starts[0], starts[1]) if starts else (None, None),
        )


def _check_pairs(paths: Iterable[Path], source: str, target: str) -> None:
    """Raise an error if files cannot hold pairs, or lack the fields of a pair.

    Raises:
        ConfigError: there are faults; the message lists them all.
    """
    faults = Faults()
    for path in (path for path in paths if not is_of_pairs(path)):
        faults.add(f"{str(path)!r} holds no pairs: they are read from .jsonl, .parquet and .tsv.")
    if any(kind(path) != "text" for path in paths):
        if not source:
            faults.add("records need a field with the source of a pair; name it with --data-source.")
        elif source == target:
            faults.add(f"source and target are both in the field {target!r}; name another with --data-source.")
    elif source or target != FIELD:
        faults.add("lines with tabs have no fields; leave out --data-source and --data-field.")
    faults.refuse("cannot read the data:")


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fault = f"{error.strerror or error}; no part of them is kept. Name a folder that has room, with --data-cache."
        raise ConfigError(f"cannot write tokens to {str(folder)!r}:", [fault]) from None


def _kept(folder: Path, names: Sequence[str], progress: Progress, *, tell: bool = False) -> dict[str, Any] | None:
    """Return the index of stored tokens, or None if there are no tokens or they are damaged.

    If `tell` is true, damage is reported.
    """
    try:
        counter = progress.counter("Checking the tokens", shards.bytes_of(folder))
        return shards.read_index(folder, names, folder.name, counter)
    except FileNotFoundError:  # another process is replacing damaged tokens, and the caller waits for it
        return None
    except ValueError as error:
        if tell:
            progress.note(f"The tokens in {str(folder)!r} are damaged ({error}), and are made again.")
        return None


def _files(stamps: Mapping[Path, Stamp], name: str, progress: Progress) -> dict[tuple[str, str, str], Path]:
    """Return a sorted mapping from (hash, kind, compression) to a file, without empty files and copies."""
    faults, found = Faults(), {}
    counter = progress.counter("Reading the text", sum(size for size, _ in stamps.values()))
    for path in stamps:
        digest, size = hashlib.sha256(), 0
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    size += len(block)
                    counter(len(block))
        except OSError as error:
            faults.add(f"cannot read {str(path)!r}: {error.strerror}.")
        if size:
            found[digest.hexdigest(), kind(path), compression(path)] = path
    faults.refuse("cannot read the data:")
    if not found:
        raise no_text(len(stamps), name)
    return dict(sorted(found.items()))


class _Part:
    """One part of the corpus while it is being written.

    Args:
        folder: the folder to write in.
        name: the name of the part, such as "train".
        encoding: the encoding of the tokens.
        masked: whether some tokens are read but not predicted, such as those of prompts.
        borders: whether to store the positions at which texts begin. If so, the last text is followed by the same
            tokens as every other text.
    """

    def __init__(self, folder: Path, name: str, encoding: Encoding, *, masked: bool, borders: bool = False):
        self.writer, self._encoding = shards.Writer(folder, name, encoding.dtype(masked=masked)), encoding
        self.starts = shards.Writer(folder, _starts(name), _STARTS) if borders else None
        self.texts = self.bytes = self.predicted = self.written = 0

    def add(self, piece: Piece, tokens: Any) -> None:
        """Add a piece of text, in the order of the texts; only the bytes of predicted tokens are counted."""
        if piece.begins:
            if self.texts:  # the end of a text is predicted, so that the model learns to end
                self._write(self._encoding.between, 1)
            self._begin()
            self._write(self._encoding.begin, 0, read=piece.read)
            if self.starts is not None and self._encoding.begin and not piece.read:
                self.predicted -= 1  # Nothing precedes the first token of a text in its row.
            self.texts += 1
        self._write(tokens, len(piece.bytes), read=piece.read)

    def finish(self) -> None:
        """Write the tokens that come after the last text."""
        if self.starts is not None:
            self._write(self._encoding.between if self.texts else (), 1 if self.texts else 0)
            self._begin()

    def close(self) -> None:
        """Close the files."""
        for writer in (self.writer, self.starts):
            if writer is not None:
                writer.close()

    def _begin(self) -> None:
        if self.starts is not None:
            self.starts.write([self.written])

    def _write(self, tokens: Any, size: int, *, read: bool = False) -> None:
        self.written += len(tokens)
        if read:
            self.writer.write(~np.asarray(tokens, np.int64))
            return
        self.writer.write(tokens)
        self.bytes += size
        self.predicted += len(tokens)


class _PairedPart(_Part):
    """One part of a corpus of pairs. A source and its target are stored as one text each, without begin or end tokens.

    Args:
        folder, name, encoding: see `_Part`.
        rooms: the largest number of tokens of a source and of a target, each with its end token.
        faults: the collection to which a fault is added for every source or target that is too long.
    """

    def __init__(self, folder: Path, name: str, encoding: Encoding, rooms: tuple[int, int], faults: Faults):
        super().__init__(folder, name, encoding, masked=False, borders=True)
        self._rooms, self._faults = rooms, faults

    def add(self, piece: Piece, tokens: Any) -> None:
        """Add one side of a pair; only the target and its end token are predicted."""
        side, setting = ("source", "source-length") if piece.read else ("target", "length")
        room = self._rooms[0 if piece.read else 1]
        if len(tokens) + 1 > room:
            have = f"{piece.where}: the {side} has {len(tokens)} tokens, and one for its end"
            self._faults.add(f"{have}, but --{setting} is {room}; leave the pair out, or raise --{setting}.")
        self._begin()
        self.written += len(tokens)
        self.writer.write(tokens)
        if not piece.read:
            self.texts += 1
            self.bytes += len(piece.bytes) + 1
            self.predicted += len(tokens) + 1

    def finish(self) -> None:
        """Write the position at which the last target ends."""
        self._begin()


class _Gzip:
    """The size of texts under gzip -9, each compressed by itself.

    If a text has a prompt, only the bytes that the text adds to the compressed prompt count.
    """

    def __init__(self) -> None:
        self.plain = self.packed = 0
        self._here, self._asked = 0, False  # bytes of the current text, and whether all of them belong to its prompt
        self._packing: Any = None

    def add(self, piece: Piece) -> None:
        """Add a piece of text, in the order of the texts."""
        if piece.begins:
            self.end()
            self._packing, self._here, self._asked = zlib.compressobj(9, zlib.DEFLATED, 31), 0, piece.read
        if self._asked and not piece.read:
            self.packed -= self._here + len(self._packing.copy().flush())
            self._asked = False
        size = len(self._packing.compress(piece.bytes))
        self._here += size
        self.packed += size
        self.plain += 0 if piece.read else len(piece.bytes)

    def end(self) -> None:
        if self._packing is not None:
            self.packed += len(self._packing.flush())


def _tokenize(
    stamps: Mapping[Path, Stamp],
    folder: Path,
    encoding: Encoding,
    name: str,
    fields: tuple[str, str],
    fraction: float,
    progress: Progress,
    names: Sequence[str],
    rooms: tuple[int, int] | None,
) -> dict[str, Any]:
    """Write the tokens of all texts, and return the index of the written files.

    Args:
        stamps: the files, with their sizes and times.
        folder: the folder to create.
        encoding: the encoding of the tokens.
        name: the name of the data, for error messages.
        fields: the names of two fields of a record: the field of its text, and the field of its prompt or source.
        fraction: the fraction of the bytes to hold out.
        progress: the display of how much has been read.
        names: the names of everything to be written: the tokens of the training part and of the held-out part, and
            optionally the positions at which the texts of each part begin.
        rooms: for pairs, the largest number of tokens of each side; None for other texts.
    """
    field, prompt = fields
    whole = sum(size for size, _ in stamps.values())
    read = progress.counter("Checking the text", whole)
    utf8 = bool(encoding.digest)
    chosen = split([*stamps], field, fraction, name, utf8=utf8, read=read, prompt=prompt, of_pairs=bool(rooms))
    wrote = progress.counter("Tokenizing" if encoding.digest else "Copying the text", whole)
    faults, gzip = Faults(), _Gzip()
    with ExitStack() as stack:
        partial = stack.enter_context(shards.created(folder))
        masked, borders = bool(prompt) and not rooms, _starts(TRAIN) in names
        parts = {
            each: _PairedPart(partial, each, encoding, rooms, faults)
            if rooms
            else _Part(partial, each, encoding, masked=masked, borders=borders)
            for each in (TRAIN, HELD_OUT)
        }
        for part in parts.values():
            stack.callback(part.close)
        for batch in _batches(chosen.pieces(faults)):
            for piece, tokens in zip(batch, encoding.encode([piece.bytes for piece in batch])):
                parts[piece.part].add(piece, tokens)
                if piece.part == HELD_OUT:
                    gzip.add(piece)
                wrote(len(piece.bytes))
        gzip.end()
        for path, stamp in stamps.items():
            if _stamp(path) != stamp:
                faults.add(f"{str(path)!r} has changed while it was read; start again.")
        faults.refuse("cannot read the data:")
        bits = 8 * gzip.packed / max(1, gzip.plain)
        dtype = encoding.dtype(masked=masked).str
        index = {"key": folder.name, "format": _FORMAT, "dtype": dtype, "gzip_bits_per_byte": bits}
        for each, part in parts.items():
            part.finish()
            part.writer.flush()
            predicted = {"predicted": part.predicted} if masked or borders else {}
            index[each] = {"texts": part.texts, "bytes": part.bytes, **predicted, **part.writer.description()}
            if part.starts is not None:
                part.starts.flush()
                index[_starts(each)] = {"dtype": _STARTS.str, **part.starts.description()}
        shards.write_index(partial, index)
    return index


def _starts(part: str) -> str:
    """Return the name under which the positions of a part's texts are stored."""
    return f"{part}-starts"


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of pieces with about `BATCH` bytes each."""
    batch, size = [], 0
    for each in pieces:
        batch.append(each)
        size += len(each.bytes)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _stamp(path: Path) -> Stamp:
    """Return the size and modification time of a file, or zeros if the file no longer exists."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
