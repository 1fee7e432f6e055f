"""The safetensors files of a checkpoint: their headers, checked at once, and byte ranges of their tensors."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

#: The dtypes of weights that are read, as the format names them.
DTYPES = {"F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype(jnp.bfloat16)}


_SHOWN = 100
"""Faults that a message lists."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; `.faults` holds every fault, of which the message lists
    the first hundred."""

    def __init__(self, doing: str, faults: Sequence[str]):
        self.faults = tuple(faults)
        shown = [f"  {fault}" for fault in self.faults[:_SHOWN]]
        more = len(self.faults) - len(shown)
        super().__init__("\n".join([doing, *shown, *([f"  ... and {more:,} more."] if more else [])]))


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: row-major, from byte `start` of its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class Files:
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    As a context manager, it closes the files at the end.

    Attributes:
        tensors: name to `StoredTensor`.
        bytes: size of all files.

    Args:
        directory: the checkpoint's folder.

    Raises:
        CheckpointError: listing every file that is missing, truncated or malformed.

    Source: the format is public, https://github.com/huggingface/safetensors: eight bytes with the length of a JSON
        header, the header, and the tensors' bytes.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)
        self.tensors: dict[str, StoredTensor] = {}
        self.bytes = 0
        self._maps: dict[Path, mmap.mmap] = {}
        doing = f"cannot read the checkpoint {str(self.directory)!r}:"
        if not self.directory.is_dir():
            raise CheckpointError(doing, ["there is no such folder."])
        faults: list[str] = []
        for path, named in self._files(doing).items():
            size, tensors = _header(path, faults)
            self.bytes += size
            faults += [
                f"{path.name} lacks {name}, which {INDEX} says it has." for name in named or () if name not in tensors
            ]
            for name, tensor in tensors.items():
                if name in self.tensors:
                    faults.append(f"{name} stands in {self.tensors[name].path.name} and in {path.name}.")
                self.tensors[name] = tensor
        if faults:
            raise CheckpointError(doing, faults)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._maps.clear()  # a map is closed when nothing views it any more

    def dtype(self, name: str) -> np.dtype:
        """The dtype of a tensor."""
        return DTYPES[self.tensors[name].dtype]

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors are the same in shape, dtype and every bit; a piece of each is in memory at a time."""
        one, two = self.tensors[first], self.tensors[second]
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            return False
        left, piece = math.prod(one.shape) * DTYPES[one.dtype].itemsize, 2**24
        with one.path.open("rb") as here, two.path.open("rb") as there:
            here.seek(one.start)
            there.seek(two.start)
            return all(
                here.read(size) == there.read(size)
                for size in (min(piece, left - done) for done in range(0, left, piece))
            )

    def read_into(self, out: np.ndarray, name: str, sizes: Sequence[int], region: Sequence[slice]) -> int:
        """Read a region of a tensor, cast to the dtype of `out`.

        Args:
            out: where to; its shape is the region's.
            name: the tensor.
            sizes: the shape under which to see it, such as (heads, head size, embed) for (heads · head size, embed).
            region: one slice for each of those dimensions.

        Returns:
            The number of bytes read.
        """
        tensor = self.tensors[name]
        dtype = self.dtype(name)
        if not out.size:
            return 0
        if tensor.path not in self._maps:
            with tensor.path.open("rb") as file:
                self._maps[tensor.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped = self._maps[tensor.path]
        view = np.frombuffer(mapped, dtype, math.prod(sizes), tensor.start).reshape(sizes)
        if out.dtype == dtype:  # as bits, which numpy copies without Python's lock
            bits = f"u{dtype.itemsize}"
            np.copyto(out.view(bits), view[tuple(region)].view(bits))
        else:
            np.copyto(out, view[tuple(region)], casting="unsafe")
        # The pages that were read stay in the system's cache, but no longer count as this process's memory.
        first = tensor.start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_DONTNEED, first, tensor.start + view.nbytes - first)
        return out.size * dtype.itemsize

    def _files(self, doing: str) -> dict[Path, list[str] | None]:
        """The files, each with the tensors that the index promises; None without an index."""
        index = self.directory / INDEX
        if not index.exists():
            if not (self.directory / WHOLE).exists():
                others = sorted(path.name for path in self.directory.iterdir())[:8]
                found = f"it holds {', '.join(others)}" if others else "it is empty"
                raise CheckpointError(doing, [f"there is neither {WHOLE} nor {INDEX} in it; {found}."])
            return {self.directory / WHOLE: None}
        weights = read_json(index, doing).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
            raise CheckpointError(doing, [f"{INDEX} has no weight_map from tensors to files."])
        files: dict[Path, list[str] | None] = {}
        for name, file in weights.items():
            files.setdefault(self.directory / file, []).append(name)
        missing = [f"{path.name} is missing; {INDEX} names it." for path in files if not path.exists()]
        if missing:
            raise CheckpointError(doing, missing)
        return files


def read_json(path: Path, doing: str) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        CheckpointError: there is none, or it is something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(doing, [f"{path.name} is missing."]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"it is not JSON: {error}"
        raise CheckpointError(doing, [f"{path.name} cannot be read: {reason}."]) from None
    if not isinstance(value, dict):
        raise CheckpointError(doing, [f"{path.name} holds no JSON object."])
    return value


#: The largest header that is read: the format's own limit.
_LONGEST = 100_000_000


def _header(path: Path, faults: list[str]) -> tuple[int, dict[str, StoredTensor]]:
    """The size of a file, and its tensors; adds to the faults what is wrong with it."""
    try:
        opened = path.open("rb")
    except OSError as error:
        faults.append(f"{path.name} cannot be read: {error.strerror}.")
        return 0, {}
    with opened as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            needed = f"{8 + length:,} bytes for its header" if size >= 8 else "8 bytes"
            faults.append(f"{path.name} is truncated: it has {size:,} bytes, and needs {needed} alone.")
            return size, {}
        if length > _LONGEST:
            faults.append(f"{path.name} is no safetensors file: its header would have {length:,} bytes.")
            return size, {}
        try:
            entries = json.loads(file.read(length).decode())
            tensors = dict(_tensors(path, entries, 8 + length))
        except ValueError as error:
            faults.append(f"{path.name} has a header that cannot be read: {error}.")
            return size, {}
    ends = {name: entry["data_offsets"][1] for name, entry in entries.items() if name in tensors}
    needed = 8 + length + max(ends.values(), default=0)
    if needed > size:
        faults.append(f"{path.name} is truncated: it has {size:,} bytes, and its header describes {needed:,}.")
    return size, tensors


def _tensors(path: Path, entries: Any, begin: int) -> Iterator[tuple[str, StoredTensor]]:
    if not isinstance(entries, dict):
        raise ValueError("it is no JSON object")
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"shape": [*sizes], "dtype": str(dtype), "data_offsets": [start, end]}:
                shape = tuple(sizes)
            case _:
                raise ValueError(f"{name} lacks a shape, a dtype or two data_offsets")
        if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, end)):
            raise ValueError(f"{name} has the shape {shape} from {start} to {end}")
        if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - start:
            raise ValueError(f"{name} is {dtype} of shape {shape}, and has {end - start:,} bytes")
        yield name, StoredTensor(path, dtype, shape, begin + start)
