"""Tokens on disk, memory-mapped. They are written in files (shards), each of which is either complete or absent."""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gspmd.reading import MissingError, ReadError, read_json
from gspmd.training.disk import sync

#: Largest number of tokens in one file.
SHARD = 1 << 26
_INDEX = "index.json"
# Number of bytes that are read at a time.
_BLOCK = 1 << 20


class Tokens(Sequence):
    """A sequence of tokens that consists of several arrays, which stay on disk until they are read.

    Example:
        >>> tokens = Tokens([np.arange(3), np.arange(3, 5)])
        >>> len(tokens), tokens[1:4], int(tokens[-1])
        (5, array([1, 2, 3]), 4)
    """

    def __init__(self, shards: Sequence[np.ndarray]):
        self._shards = list(shards)
        self._starts = np.cumsum([0, *map(len, shards)])
        self.dtype = shards[0].dtype

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            at = range(len(self))[index]
            return self[at : at + 1][0]
        start, stop, step = index.indices(len(self))
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        parts = []
        for shard, begin in zip(self._shards[first:], self._starts[first:]):
            if begin >= stop:
                break
            parts.append(shard[max(start - begin, 0) : stop - begin])
        return np.concatenate(parts)[::step] if parts else np.empty(0, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)


class Writer:
    """A writer of tokens to the files `<folder>/<name>-00000.tokens`, ..., little-endian, without a header.

    Args:
        folder: an existing folder.
        name: the name of the part, such as "train".
        dtype: the dtype of the tokens.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype):
        self._folder, self._name, self._dtype = folder, name, dtype
        self._shards: list[int] = []
        self._digest = hashlib.sha256()
        self._file: Any = None

    def write(self, tokens: Any) -> None:
        """Append tokens."""
        tokens = np.asarray(tokens, self._dtype)
        while len(tokens):
            if self._file is None or self._shards[-1] == SHARD:
                self.flush()
                self.close()
                self._file = (self._folder / _file(self._name, len(self._shards))).open("wb")
                self._shards.append(0)
            here = tokens[: SHARD - self._shards[-1]]
            self._file.write(here.data)
            self._digest.update(here.data)
            self._shards[-1] += len(here)
            tokens = tokens[len(here) :]

    def flush(self) -> None:
        """Write tokens that are still in memory to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the last file."""
        if self._file is not None:
            self._file.close()

    def description(self) -> dict[str, Any]:
        """Return a description of the written files for the index: their sizes and a hash."""
        return {"shards": self._shards, "sha256": self._digest.hexdigest()}


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """Write the index of a folder, with a checksum of the index itself, for `read_index`."""
    with (folder / _INDEX).open("w", encoding="utf-8") as file:
        file.write(json.dumps({**index, "checksum": _checksum(index)}, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_index(
    folder: Path, names: Sequence[str], key: str, read: Callable[[int], None] = lambda size: None
) -> dict[str, Any] | None:
    """Check all tokens of a folder, and return the folder's index, or None if there is no such folder.

    All tokens are read once, and compared with the SHA-256 in the index, because training would not notice a flipped
    bit.

    Args:
        folder: the folder of the tokens.
        names: the names of the parts that the folder must have.
        key: a string that identifies the texts and the tokenizer from which the tokens were made. It must equal `key`
            in the index.
        read: a function that is called after each read with the number of bytes that were read.

    Raises:
        ValueError: the folder is damaged: a file is missing, its size or its contents differ from the index, or the
            index itself is damaged.
    """
    try:
        index = read_json(folder / _INDEX, unique=True)
    except MissingError:
        if os.path.isdir(folder):
            raise ValueError(f"{_INDEX} is missing") from None
        return None
    except ReadError as error:
        raise ValueError(f"{_INDEX}: {error}") from None
    if not isinstance(index, dict) or "checksum" not in index:
        raise ValueError(f"{_INDEX} is not an index of this version")
    if index.pop("checksum") != _checksum(index):
        raise ValueError(f"{_INDEX} does not have the contents that were written")
    if index["key"] != key:
        raise ValueError(f"{_INDEX} belongs to a different text or tokenizer")
    sizes = {
        _file(name, number): count * _dtype(index, name).itemsize
        for name in names
        for number, count in enumerate(index[name]["shards"])
    }
    for name, size in sizes.items():
        path = folder / name
        there = path.stat().st_size if path.exists() else None
        if there != size:
            raise ValueError(f"{name} is missing" if there is None else f"{name} has {there} bytes, not {size}")
    for name in names:
        if _digest_of(folder, name, len(index[name]["shards"]), read) != index[name]["sha256"]:
            raise ValueError(f"the tokens of {name} have changed since they were written")
    return index


def bytes_of(folder: Path) -> int:
    """Return the total size of the token files in a folder in bytes; the folder need not exist."""
    return sum(path.stat().st_size for path in folder.glob("*.tokens"))


def _digest_of(folder: Path, name: str, count: int, read: Callable[[int], None]) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    for number in range(count):
        with (folder / _file(name, number)).open("rb", buffering=0) as file:
            while size := file.readinto(block):
                digest.update(block[:size])
                read(size)
    return digest.hexdigest()


def _checksum(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def read_tokens(folder: Path, name: str, index: Mapping[str, Any]) -> Tokens:
    """Memory-map the tokens of a part, or the positions at which its texts begin."""
    paths = [folder / _file(name, number) for number in range(len(index[name]["shards"]))]
    dtype = _dtype(index, name)
    return Tokens([np.memmap(path, dtype, mode="r").view(np.ndarray) for path in paths] or [np.empty(0, dtype)])


@contextmanager
def created(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` at the end, or removed if anything fails."""
    partial = Path(tempfile.mkdtemp(prefix=_partial(folder), dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)  # a temporary folder is private
        sync(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / _INDEX).exists():  # otherwise a process on another machine was faster
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Let only one process of this machine create a folder at a time, and remove the leftovers of killed processes.

    Args:
        folder: the folder, which need not exist.
        waiting: a function that is called repeatedly while another process has the lock.
    """
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                time.sleep(0.2)
                continue
            except OSError:  # a file system without locks: then leftovers may be in use
                break
            for left in folder.parent.glob(f"{_partial(folder)}*"):
                shutil.rmtree(left, ignore_errors=True)
            break
        yield


def _dtype(index: Mapping[str, Any], name: str) -> np.dtype:
    """Return the dtype of a part's tokens, or of the positions at which its texts begin."""
    return np.dtype(index[name].get("dtype", index["dtype"]))


def _file(name: str, number: int) -> str:
    return f"{name}-{number:05}.tokens"


def _partial(folder: Path) -> str:
    """Return the prefix of this machine's temporary folders.

    The prefix contains the machine's name, because other machines may share the disk, but not the locks.
    """
    return f".{folder.name}.{socket.gethostname()}."
