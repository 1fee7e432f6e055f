"""The safetensors files of a checkpoint: their headers, checked at once, and byte ranges of their tensors."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from gspmd import reading

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

#: The dtypes of weights that are read, as the format names them.
DTYPES: dict[str, np.dtype] = {"F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype(jnp.bfloat16)}

#: Bits of an element of every dtype that the format knows: a tensor that is not read takes room in its file too.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


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
    """The place of a tensor: row-major, from byte `start` of its file."""

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
        CheckpointError: listing every file that is missing, truncated or malformed; or the index names a file outside
            of the folder. (A file of the folder may be a symbolic link to one elsewhere, as in a download cache.)

    Source: the format is public, https://github.com/huggingface/safetensors: eight bytes with the length of a JSON
        header, the header, and the tensors' bytes, which leave no gap, do not overlap, and end with the file. What
        that library refuses is refused here.
    Differs: a name that comes twice is refused, of which the format says that readers may differ; so is a header that
        is deeply nested.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)
        self.tensors: dict[str, StoredTensor] = {}
        self.bytes = 0
        self._maps: dict[Path, mmap.mmap] = {}
        doing = f"cannot read the checkpoint {str(self.directory)!r}:"
        if fault := reading.folder_fault(self.directory):
            raise CheckpointError(doing, [other_format(self.directory) or f"{fault}."])
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
        if not os.path.lexists(index):
            if not os.path.lexists(self.directory / WHOLE):
                if other := other_format(self.directory):
                    raise CheckpointError(doing, [other])
                others = sorted(path.name for path in self.directory.iterdir())[:8]
                found = f"it holds {', '.join(others)}" if others else "it is empty"
                raise CheckpointError(doing, [f"there is neither {WHOLE} nor {INDEX} in it; {found}."])
            return {self.directory / WHOLE: None}
        weights = read_json(index, doing, unique=True).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
            raise CheckpointError(doing, [f"{INDEX} has no weight_map from tensors to files."])
        if outside := sorted({file for file in weights.values() if not reading.is_inside(file)}):
            faults = [f"{INDEX} names {file!r}, which is not in the checkpoint's folder." for file in outside]
            raise CheckpointError(doing, faults)
        files: dict[Path, list[str]] = {}
        for name, file in weights.items():
            files.setdefault(self.directory / file, []).append(name)
        missing = [f"{path.name} is missing; {INDEX} names it." for path in files if not os.path.lexists(path)]
        if missing:
            raise CheckpointError(doing, missing)
        return {**files}


def all_finite(values: np.ndarray) -> bool:
    """Return whether floating numbers have neither a NaN nor an infinity, by two passes over them and no copy.

    In every IEEE format these are the bit patterns from infinity's on, once with each sign: the largest of all patterns
    as signed integers without the sign bit, and as unsigned ones with it.

    Example:
        >>> all_finite(np.array([1.0, -2.0])), all_finite(np.array([1.0, -np.inf]))
        (True, False)
    """
    if not values.size:
        return True
    width = values.dtype.itemsize
    infinity = np.array(np.inf, values.dtype)
    return bool(
        values.view(f"i{width}").max() < infinity.view(f"i{width}")
        and values.view(f"u{width}").max() < (-infinity).view(f"u{width}")
    )


ADAPTER = "adapter_config.json"

_SAVE = "transformers' AutoModelForCausalLM.from_pretrained({}).save_pretrained(OUT)"

#: How names of files end that hold weights in other ways: what they are, and what to do.
_FORMATS = {
    # Without dequantize=True transformers keeps GGUF's blocks, and cannot save them.
    ".gguf": "a GGUF file, which is not read here. transformers' AutoModelForCausalLM.from_pretrained(DIR, "
    "gguf_file=NAME, quantization_config=GgufConfig(dequantize=True)).save_pretrained(OUT) writes config.json and "
    "safetensors, and AutoTokenizer likewise tokenizer.json; give that folder.",
    ".bin": f"weights of torch, which may run code when they are read. {_SAVE.format('DIR')} writes them as "
    "safetensors; give that folder.",
    ".pth": "weights of torch as a model's authors publish them. Take the version of the model in the format of "
    "transformers, with config.json and safetensors.",
    ".safetensors": f"which are not all files of a checkpoint: it has config.json, and {WHOLE} or {INDEX}. Take "
    "all from where it comes from.",
}


def other_format(path: Path) -> str:
    """Return what a folder or file holds in place of a checkpoint, and what to do; empty if it is nothing known."""
    is_folder = os.path.isdir(path)  # where Path's own raise for a name that no file can have
    names = sorted(os.listdir(path)) if is_folder else [path.name] if os.path.isfile(path) else []
    holds = "it holds" if is_folder else "it is"
    if ADAPTER in names:
        return (
            f"{holds} a LoRA adapter ({ADAPTER}), which is a change to the weights of {_base(path / ADAPTER)}, and no "
            "model. Merge the two, and give the folder that this writes: peft's AutoPeftModelForCausalLM"
            ".from_pretrained(DIR).merge_and_unload().save_pretrained(OUT)."
        )
    for ending, remedy in _FORMATS.items():
        found = [name for name in names if name.endswith(ending)]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            return f"{holds} {found[0]}{more}, {remedy}"
    return ""


def _base(adapter: Path) -> str:
    """The model that a LoRA adapter changes, as a message calls it."""
    try:
        name = read_json(adapter, "").get("base_model_name_or_path")
    except CheckpointError:
        name = None
    return repr(name) if isinstance(name, str) else "another one"


def read_json(path: Path, doing: str, *, unique: bool = False) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        path: the file.
        doing: what the error says first.
        unique: whether a key may not come twice.

    Raises:
        CheckpointError: there is none, or it is something else.
    """
    try:
        value = reading.read_json(path, unique=unique)
    except reading.MissingError:
        raise CheckpointError(doing, [f"{path.name} is missing."]) from None
    except reading.ReadError as error:
        raise CheckpointError(doing, [f"{path.name} cannot be read: {error}."]) from None
    if not isinstance(value, dict):
        raise CheckpointError(doing, [f"{path.name} holds no JSON object."])
    return value


#: The largest header that is read: the format's own limit.
_LONGEST = 100_000_000


def _header(path: Path, faults: list[str]) -> tuple[int, dict[str, StoredTensor]]:
    """Return the size of a file, and its tensors; add to the faults what is wrong with it."""
    try:
        with reading.open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or (8 + length > size and length <= _LONGEST):
                needed = f"{8 + length:,} bytes for its header" if size >= 8 else "8 bytes"
                faults.append(f"{path.name} is truncated: it has {size:,} bytes, and needs {needed} alone.")
                return size, {}
            if length > _LONGEST:
                faults.append(f"{path.name} is no safetensors file: its header would have {length:,} bytes.")
                return size, {}
            text = file.read(length)
    except (OSError, reading.ReadError) as error:
        faults.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}.")
        return 0, {}
    try:
        found = _extents(text)
    except ValueError as error:
        faults.append(f"{path.name} has a header that cannot be read: {error}.")
        return size, {}
    end = 8 + length + found[-1].end if found else 8 + length
    if end > size:
        faults.append(f"{path.name} is truncated: it has {size:,} bytes, and its header describes {end:,}.")
    elif end < size:
        faults.append(f"{path.name} has {size:,} bytes, of which its header describes {end:,}.")
    return size, {each.name: StoredTensor(path, each.dtype, each.shape, 8 + length + each.start) for each in found}


@dataclass(frozen=True)
class _Extent:
    """A tensor of a header, with its bytes from `start` to `end` behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _extents(header: bytes) -> list[_Extent]:
    """Return the tensors of a header, in the order of their bytes, which they divide among them.

    Raises:
        ValueError: the header is malformed, or its tensors overlap or leave a gap.
    """
    entries = reading.parse_json(header.decode(), unique=True)
    if not isinstance(entries, dict):
        raise ValueError("it is no JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is no object of texts")
    found = [_extent(name, entry) for name, entry in entries.items()]
    found.sort(key=lambda each: (each.start, each.end))
    before, last = 0, ""
    for each in found:
        if each.start < before:
            raise ValueError(f"{each.name} begins at byte {each.start:,}, where {last} still goes on to {before:,}")
        if each.start > before:
            raise ValueError(f"{each.name} begins at byte {each.start:,}, and nothing is in the bytes from {before:,}")
        before, last = each.end, each.name
    return found


def _extent(name: str, entry: Any) -> _Extent:
    match entry:
        case {"shape": [*sizes], "dtype": str(dtype), "data_offsets": [start, end]}:
            shape = tuple(sizes)
        case _:
            raise ValueError(f"{name} lacks a shape, a dtype or two data_offsets")
    if not all(type(number) is int and 0 <= number < 2**64 for number in (*shape, start, end)):
        raise ValueError(f"{name} has the shape {shape} from {start} to {end}")
    if dtype not in _BITS:
        raise ValueError(f"{name} has the dtype {dtype!r}, which the format does not know")
    # Python's integers do not overflow, so that a product of huge sizes is no small number.
    if math.prod(shape) * _BITS[dtype] != 8 * (end - start):
        raise ValueError(f"{name} is {dtype} of shape {shape}, and has {end - start:,} bytes")
    return _Extent(name, dtype, shape, start, end)
