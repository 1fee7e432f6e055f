"""Byte sequences from text files: found, split into training and validation, and batched by grain."""

import glob
import gzip
import hashlib
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np

from gspmd.display.units import amount_of_bytes
from gspmd.training.toml import ConfigError

VOCABULARY = 256
# What pip put there is not the standard library, and the tests repeat what they test.
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
# Text in ASCII, Latin or UTF-8 does not hold this byte, so it can stand between files.
_BETWEEN = b"\x00"


@dataclass(frozen=True)
class Corpus:
    """Text, split into a training part and a held-out part.

    Attributes:
        name: a description of its source.
        train: the training files, joined, as bytes [N] of uint8.
        validation: the held-out files, joined likewise.
        files: number of files in each part; a file that is split near its end is in both.
        gzip_bits_per_byte: bits per byte of the held-out files under gzip, each compressed by itself.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    files: tuple[int, int]
    gzip_bits_per_byte: float

    def describe(self) -> str:
        """One line: source, bytes and files of both parts."""
        train, held_out = (f"{amount_of_bytes(size)} in {_count(number, 'file')}" for size, number in self._sizes())
        return f"{self.name}: {train}, and {held_out} held out"

    def digest(self) -> str:
        """A hash of the text and of its split."""
        parts = (hashlib.sha256(part.tobytes()).hexdigest() for part in (self.train, self.validation))
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]

    def _sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (len(self.train), self.files[0]), (len(self.validation), self.files[1])


def load(patterns: Sequence[str] = (), *, fraction: float = 0.05) -> Corpus:
    """Read the text files that match the patterns, or the source of Python's standard library.

    The split depends on the contents of the files only, so it is the same on every machine. Duplicates count once, so
    that no text is in both parts. Whole files are held out; if there are too few, or one is most of the text, every
    file is split near its end.

    Args:
        patterns: paths or glob patterns (`**` for folders within folders); none for the standard library.
        fraction: share of the bytes held out; with whole files, between half and twice that.

    Raises:
        ConfigError: a pattern matches no file, a file cannot be read, or there is no text; all faults at once.
    """
    paths = _matching(patterns) if patterns else _standard_library()
    name = " ".join(patterns) or "Python's standard library"
    texts = _read(paths)
    if not texts:
        hold = "holds" if len(paths) == 1 else "hold"
        raise ConfigError("cannot train on this data:", [f"{_count(len(paths), 'file')} of {name!r} {hold} no text."])
    train, held_out = _split(texts, fraction)
    return Corpus(name, _join(train), _join(held_out), (len(train), len(held_out)), gzip_bits_per_byte(held_out))


def gzip_bits_per_byte(texts: Sequence[bytes]) -> float:
    """Bits per byte of the texts under gzip -9, each compressed by itself.

    Example:
        >>> gzip_bits_per_byte([b"a" * 1000]) < 0.3
        True
    """
    return 8 * sum(len(gzip.compress(text, mtime=0)) for text in texts) / sum(len(text) for text in texts)


def check_size(corpus: Corpus, batch: int, length: int) -> None:
    """Refuse text that is too short for one training batch or one held-out sequence.

    Raises:
        ConfigError: with both numbers.
    """
    faults = []
    if len(corpus.train) < batch * length + 1:
        needs = f"a batch of {batch} sequences of {length} needs {batch * length + 1}."
        faults.append(f"the training text has {len(corpus.train)} bytes, but {needs}")
    if len(corpus.validation) < length + 1:
        needs = f"a sequence of {length} needs {length + 1}."
        faults.append(f"the held-out text has {len(corpus.validation)} bytes, but {needs}")
    if faults:
        faults.append("Give more text with --data, or lower --batch or --length.")
        raise ConfigError(f"cannot train on {corpus.name!r}:", faults)


def stream(corpus: Corpus, config: Any) -> dict[str, Any]:
    """Return what determines the order of training batches, for `check_stream`; `config` is a TrainingConfig."""
    return {"text": corpus.digest(), "batch": config.batch, "length": config.length, "seed": config.seed}


def check_stream(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to resume with batches that differ from those of the run.

    Raises:
        ConfigError: naming everything that differs.
    """
    names = [name for name in wanted if saved.get(name) != wanted[name]]
    faults = [f"{name} was {saved.get(name)}, but is {wanted[name]}." for name in names if name != "text"]
    if "text" in names:
        faults.insert(0, "the text differs: other files, other contents, or another validation_fraction.")
    if faults:
        remedy = "Leave the data's flags out to go on with what the run began with, or start anew in another --out."
        raise ConfigError("cannot resume: the batches would not be those that the run began with.", [*faults, remedy])


def train_batches(corpus: Corpus, batch: int, length: int, seed: int) -> grain.DatasetIterator:
    """Return an endless iterator over training batches, uint8 [B, L+1], reshuffled every epoch.

    The text is cut into windows of `length` predicted bytes; the rest after the last whole window is dropped. A batch
    may span two epochs. `get_state` and `set_state` read and set the iterator's position, a small dictionary that is
    saved in checkpoints.
    """
    windows = grain.MapDataset.source(_Windows(corpus.train, length))
    batches = windows.shuffle(seed=seed % 2**32).repeat().batch(batch, drop_remainder=True)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def validation_count(corpus: Corpus, batch: int, length: int, limit: int = 0) -> int:
    """The number of validation batches: all of the held-out text, at most `limit` unless it is 0."""
    sequences = -(-(len(corpus.validation) - 1) // length)
    whole = -(-sequences // batch)
    return min(whole, limit or whole)


def validation_batches(corpus: Corpus, batch: int, length: int, limit: int = 0) -> Iterator[np.ndarray]:
    """Yield the held-out text as full batches, uint8 [B, L+1].

    Without a limit every byte but the first is predicted. Sequences overlap as needed to fill all batches; the bytes of
    an overlap count twice.

    Args:
        corpus: the text.
        batch: sequences per batch.
        length: bytes that a sequence predicts.
        limit: at most so many batches, their sequences spread evenly over the text; 0 for all.
    """
    count = validation_count(corpus, batch, length, limit)
    starts = np.linspace(0, len(corpus.validation) - length - 1, count * batch).round().astype(np.int64)
    for row in starts.reshape(count, batch):
        yield np.stack([corpus.validation[start : start + length + 1] for start in row])


class _Windows:
    """Sequences of length + 1 bytes, each starting with the last byte of its predecessor."""

    def __init__(self, text: np.ndarray, length: int):
        self._text, self._length = text, length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self._length
        return self._text[start : start + self._length + 1]

    def __repr__(self) -> str:
        return f"windows of {self._length} bytes"


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if not _SKIPPED & set(path.relative_to(root).parts)]
    if not paths:
        fault = f"Python's standard library at {str(root)!r} has no .py files. Give text with --data 'path/*.txt'."
        raise ConfigError("cannot find text:", [fault])
    return paths


def _matching(patterns: Sequence[str]) -> list[Path]:
    paths: set[Path] = set()
    faults = []
    for pattern in patterns:
        # A file's own name may hold brackets; a folder is not a text.
        names = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
        files = {Path(name) for name in names if Path(name).is_file()}
        if not files:
            folder = f" It is a folder; write '{pattern.rstrip('/')}/**/*.txt'."
            faults.append(f"no file matches {pattern!r}.{folder if Path(pattern).is_dir() else ''}")
        paths |= files
    if faults:
        raise ConfigError("cannot find the data:", faults)
    return sorted(paths)


def _read(paths: Sequence[Path]) -> list[bytes]:
    """Read the texts, without empty ones and duplicates, in the order of their digests."""
    texts, faults = {}, []
    for path in paths:
        try:
            text = path.read_bytes()
        except OSError as error:
            faults.append(f"cannot read {str(path)!r}: {error.strerror}.")
            continue
        if text:
            texts[hashlib.sha256(text).digest()] = text
    if faults:
        raise ConfigError("cannot read the data:", faults)
    return [texts[digest] for digest in sorted(texts)]


def _split(texts: list[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Hold out the first whole files up to the share of bytes; if that misses it by half, the ends of all files."""
    wanted = fraction * sum(map(len, texts))
    # Skip files larger than twice the share, rather than stop at them.
    able = [index for index, text in enumerate(texts) if len(text) <= 2 * wanted]
    sizes = np.cumsum([0, *(len(texts[index]) for index in able)])
    number = int(np.abs(sizes - wanted).argmin())
    chosen = set(able[:number])
    if sizes[number] >= wanted / 2 and number < len(texts):
        train = [text for index, text in enumerate(texts) if index not in chosen]
        return train, [texts[index] for index in able[:number]]
    cuts = [len(text) - max(1, round(fraction * len(text))) for text in texts]
    parts = [(text[:cut], text[cut:]) for text, cut in zip(texts, cuts, strict=True)]
    return [begin for begin, _ in parts if begin], [end for _, end in parts]


def _join(texts: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(_BETWEEN.join(texts), dtype=np.uint8)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
