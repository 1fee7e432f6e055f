"""The split into training texts and held-out texts, which depends only on the contents of the texts."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gspmd.training.data.sources import OTHERS, Faults, check_text, kind, opened, pairs, records, text_pieces
from gspmd.training.toml import ConfigError

_BUCKETS = 1 << 16

TRAIN, HELD_OUT = "train", "validation"


class Piece(NamedTuple):
    """A piece of a text, to be tokenized.

    Attributes:
        part: the name of the part to which the piece belongs: training or held out.
        begins: whether the piece is the first one of a text.
        bytes: the bytes of the piece.
        read: whether the piece is read but not predicted, like a prompt or a source.
        where: the file and line of a pair, for error messages; empty for other texts.
    """

    part: str
    begins: bool
    bytes: bytes
    read: bool = False
    where: str = ""


@dataclass(frozen=True)
class Split:
    """The files of a corpus, and their division into training and held-out texts.

    Attributes:
        paths: the files, in the order of the hashes of their contents.
        held_out: the files of text that are held out as a whole.
        cuts: for other files of text, the number of bytes after which the rest is held out; a file that is missing here
            is not cut.
        bucket: a record is held out if its own bucket, a number from a hash, is below this number.
        field: the field that holds the text of a record.
        prompt: the field that holds the prompt of a record, or the source of a pair; empty if there is no such field.
        pairs: whether records are pairs. The source and the target of a pair are one piece each.
    """

    paths: Sequence[Path]
    held_out: frozenset[Path]
    cuts: dict[Path, int]
    bucket: int
    field: str
    prompt: str = ""
    pairs: bool = False

    def pieces(self, faults: Faults) -> Iterator[Piece]:
        """Yield all texts, in pieces."""
        for path in self.paths:
            if self.pairs:
                for where, source, target in pairs(path, self.prompt, self.field, faults):
                    part = HELD_OUT if _bucket(source) < self.bucket else TRAIN
                    yield Piece(part, True, source, True, where)
                    yield Piece(part, False, target, False, where)
            elif kind(path) == "text":
                last = None
                with opened(path, faults) as file:
                    for part, piece in text_pieces(file, self.cuts.get(path)) if file else ():
                        ours = HELD_OUT if part or path in self.held_out else TRAIN
                        yield Piece(ours, part != last, piece)
                        last = part
            else:
                for prompt, text in records(path, self.field, faults, self.prompt):
                    part = HELD_OUT if _bucket(prompt or text) < self.bucket else TRAIN
                    begins = True
                    for of, read in ((prompt, True), (text, False)):
                        for _, piece in text_pieces(BytesIO(of)):
                            yield Piece(part, begins, piece, read)
                            begins = False


def split(
    paths: Sequence[Path],
    field: str,
    fraction: float,
    name: str,
    *,
    utf8: bool,
    read: Callable[[int], None],
    prompt: str = "",
    of_pairs: bool = False,
) -> Split:
    """Read all texts once, without keeping them, and choose those that are held out.

    The first text files are held out as a whole, until they have about the given fraction of the bytes. If they have
    less than half of this fraction, the end of every file is held out instead. A record is held out if its hash is
    below a limit, so that all copies of a record are in the same part. If records have prompts or are pairs, the prompt
    or source is hashed, so that training never sees a held-out prompt or source with a different answer.

    Args:
        paths: the files, in an order that depends only on their contents.
        field: the field that holds the text of a record.
        fraction: the fraction of the bytes to hold out.
        name: the name of the data, for error messages.
        utf8: whether texts must be UTF-8, as a tokenizer needs.
        read: a function that is called after each read with the number of bytes that were read.
        prompt: the field that holds the prompt of a record, or the source of a pair; empty if there is no such field.
        of_pairs: whether records are pairs.

    Raises:
        ConfigError: a file has faults, or there is no text; the message lists all faults of all files.
    """
    faults, sizes = Faults(), {}
    buckets = np.zeros(_BUCKETS, np.int64)
    for path in paths:
        if of_pairs:
            for _, source, target in pairs(path, prompt, field, faults):
                buckets[_bucket(source)] += len(source) + len(target)
                read(len(source) + len(target))
        elif kind(path) == "text":
            with opened(path, faults) as file:
                sizes[path] = check_text(file, path, faults, utf8=utf8, read=read) if file else 0
        else:
            for asked, text in records(path, field, faults, prompt):
                buckets[_bucket(asked or text)] += len(asked) + len(text)
                read(len(asked) + len(text))
    faults.refuse("cannot read the data:")
    sizes = {path: size for path, size in sizes.items() if size}
    if not sizes and not buckets.any():
        raise no_text(len(paths), name)
    held, cuts = hold_out_files([*sizes.values()], fraction)
    files = [*sizes]
    bound = _bound(buckets, fraction, "source" if of_pairs else "prompt" if prompt else "") if buckets.any() else 0
    return Split(
        [path for path in paths if path in sizes or of_pairs or kind(path) != "text"],
        frozenset(files[index] for index in held),
        {files[index]: cut for index, cut in cuts.items()},
        bound,
        field,
        prompt,
        of_pairs,
    )


def hold_out_files(sizes: Sequence[int], fraction: float) -> tuple[frozenset[int], dict[int, int]]:
    """Choose what to hold out: whole files that have about `fraction` of all bytes, or the ends of all files.

    Whole files are chosen in order, and files with more than twice the wanted bytes are skipped. If the chosen files
    have less than half of the wanted bytes, or no file would be left for training, the end of every file is held out
    instead.

    Args:
        sizes: bytes of the files, all positive.
        fraction: the fraction of the bytes to hold out.

    Returns:
        The indices of the files that are held out whole, and a mapping from the index of a file to the number of bytes
        after which the rest is held out. One of the two is empty.

    Example:
        >>> hold_out_files([100] * 10, 0.2), hold_out_files([100], 0.1)
        ((frozenset({0, 1}), {}), (frozenset(), {0: 90}))
    """
    wanted = fraction * sum(sizes)
    # Files larger than twice the share are skipped; they do not end the search.
    able = [index for index, size in enumerate(sizes) if size <= 2 * wanted]
    sums = np.cumsum([0, *(sizes[index] for index in able)])
    number = int(np.abs(sums - wanted).argmin())
    if sums[number] >= wanted / 2 and number < len(sizes):
        return frozenset(able[:number]), {}
    return frozenset(), {index: size - max(1, round(fraction * size)) for index, size in enumerate(sizes)}


def _bound(buckets: np.ndarray, fraction: float, side: str) -> int:
    """Return how many of the first buckets to hold out, so that their share of the bytes is nearest to `fraction`.

    At least one bucket with records is held out, and at least one is not.

    Args:
        buckets: total bytes of the records in each bucket.
        fraction: the fraction of the bytes to hold out.
        side: the part of a record that is hashed, "source" or "prompt", for error messages; empty if the text is
            hashed.

    Raises:
        ConfigError: all records are in one bucket.
    """
    filled = np.flatnonzero(buckets)
    if len(filled) < 2:
        what = "pair" if side == "source" else "record"
        same = f", or all have the same {side}" if side else ""
        more = "" if side else ", or its text in a file of its own"
        fault = f"there is one {what}{same}, so none can be held out; give more {what}s{more}."
        raise ConfigError("cannot train on this data:", [fault])
    sums = np.cumsum(buckets[filled])[:-1]
    return int(filled[np.abs(sums - fraction * buckets.sum()).argmin()]) + 1


def _bucket(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=2).digest(), "little")


def no_text(files: int, name: str) -> ConfigError:
    """Return the error for files without any text."""
    fault = f"{name!r} holds no text" if files == 1 else f"the {count_of(files, 'file')} of {name!r} hold no text"
    return ConfigError("cannot train on this data:", [f"{fault}. {OTHERS}"])


def count_of(number: int, noun: str) -> str:
    """Return a count with its noun as text.

    >>> count_of(1, "file"), count_of(2500, "record")
    ('1 file', '2,500 records')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"
