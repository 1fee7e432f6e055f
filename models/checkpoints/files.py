"""The safetensors files of a checkpoint. All headers are checked before byte ranges of tensors are read."""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from gspmd import reading

from . import packed
from .form import Form

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

#: The dtypes of weights that can be read, under the format's names.
DTYPES: dict[str, np.dtype] = {"F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype(jnp.bfloat16)}

#: The dtype in which each stored dtype is read: the same one, or for packed tensors that of their values.
READ_AS: dict[str, np.dtype] = {**DTYPES, **packed.DTYPES}

#: Bits per element of all dtypes of the format: the extents of all tensors are checked, even of those that are not
#: read.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


_SHOWN = 100
"""The largest number of faults that a message lists."""


class CheckpointError(ValueError):
    """The error for a checkpoint that cannot be read or written.

    The message lists the first hundred faults. The attribute `faults` holds all faults.
    """

    def __init__(self, doing: str, faults: Sequence[str]):
        self.faults = tuple(faults)
        shown = [f"  {fault}" for fault in self.faults[:_SHOWN]]
        more = len(self.faults) - len(shown)
        super().__init__("\n".join([doing, *shown, *([f"  ... and {more:,} more."] if more else [])]))


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor in a file: the tensor is stored row-major from byte `start` of the file `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class Files:
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    Use an instance as a context manager to close the files.

    Attributes:
        tensors: the location of each tensor, by name.
        bytes: total size of the files in bytes.

    Args:
        directory: the checkpoint's folder.
        renamed: pairs of a regular expression for the whole name of a tensor and the name that replaces it in
            `tensors`.

    Raises:
        CheckpointError: files are missing, truncated or malformed (the message lists all of these files), or the index
            names a file outside the folder. A file in the folder may be a symbolic link to a file elsewhere, as in a
            download cache.

    Source: https://github.com/huggingface/safetensors specifies the format. A file has eight bytes with the length of a
        JSON header, then the header, and then the tensors' bytes without gaps or overlaps up to the end of the file.
        Files that the safetensors library refuses are refused here too.
    Differs: duplicate names are refused, although the format leaves them to the reader. Deeply nested headers are
        refused too.
    """

    def __init__(self, directory: str | os.PathLike, renamed: Sequence[tuple[str, str]] = ()):
        self.directory = Path(directory)
        self.tensors: dict[str, StoredTensor] = {}
        self.bytes = 0
        self._maps: dict[Path, mmap.mmap] = {}
        doing = f"cannot read the checkpoint {str(self.directory)!r}:"
        if fault := reading.folder_fault(self.directory):
            raise CheckpointError(doing, [other_format(self.directory) or f"{fault}. Give the folder of a checkpoint."])
        faults: list[str] = []
        for path, named in self._files(doing).items():
            size, tensors = _header(path, faults)
            self.bytes += size
            faults += [
                f"{path.name} lacks {name}, which {INDEX} says it has. Download the file again."
                for name in named or ()
                if name not in tensors
            ]
            for name, tensor in tensors.items():
                name = next((re.sub(old, new, name) for old, new in renamed if re.fullmatch(old, name)), name)
                if name in self.tensors:
                    faults.append(f"{name} is in both {self.tensors[name].path.name} and {path.name}.")
                self.tensors[name] = tensor
        if faults:
            raise CheckpointError(doing, faults)
        self.tensors, self._packed = packed.unpacked(self.tensors)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._maps.clear()  # a map is closed once no array views it

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype in which the tensor `name` is read."""
        return READ_AS[self.tensors[name].dtype]

    def equal(self, first: str, second: str) -> bool:
        """Return whether two tensors have the same shape, dtype and bits; both are read piece by piece."""
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

    def read_into(self, out: np.ndarray, name: str, form: Form, region: Sequence[slice]) -> int:
        """Read a region of a parameter, cast to the dtype of `out`.

        Args:
            out: the destination, with the region's shape. Dimensions that are merged in the tensor may also be merged
                in `out`.
            name: the name of the tensor.
            form: the position of the parameter in the tensor, such as (heads, head size, embed) in (heads · head size,
                embed).
            region: one slice for each dimension of `form.split`.

        Returns:
            The number of bytes that were read.
        """
        tensor = self.tensors[name]
        dtype = self.dtype(name)
        if not out.size:
            return 0
        if name in self._packed:
            return self._convert_into(out, self._packed[name], form, region)
        mapped = self._mapped(tensor)
        stored = np.frombuffer(mapped, dtype, math.prod(form.shape), tensor.start)
        piece = form.view(stored)[tuple(region)].reshape(out.shape)
        if out.dtype == dtype:  # read as integers, which numpy copies without the GIL
            bits = f"u{dtype.itemsize}"
            np.copyto(out.view(bits), piece.view(bits))
        else:
            np.copyto(out, piece, casting="unsafe")
        # The pages stay in the page cache, but no longer count as this process's memory.
        first = tensor.start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_DONTNEED, first, tensor.start + stored.nbytes - first)
        return out.size * dtype.itemsize

    def _mapped(self, tensor: StoredTensor) -> mmap.mmap:
        """Return the file that holds a tensor, mapped into memory."""
        if tensor.path not in self._maps:
            with tensor.path.open("rb") as file:
                self._maps[tensor.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[tensor.path]

    def _convert_into(self, out: np.ndarray, tensor: packed.Packed, form: Form, region: Sequence[slice]) -> int:
        """Read a region of a packed tensor as `read_into` does.

        Every row that overlaps the region is unpacked as a whole, and counts as a whole in the bytes read.
        """

        def read(part: StoredTensor) -> np.ndarray:
            kind = np.dtype("float32") if part.dtype == "F32" else np.dtype("uint8")
            return np.frombuffer(self._mapped(part), kind, math.prod(part.shape), part.start).reshape(part.shape)

        first, last = form.rows(region)
        values = np.empty(math.prod(form.shape), READ_AS[tensor.kind])  # only the rows that are written take memory
        values.reshape(tensor.shape)[first:last] = tensor.values(first, last, read)
        np.copyto(out, form.view(values)[tuple(region)].reshape(out.shape), casting="unsafe")
        return tensor.bytes * (last - first) // tensor.shape[0]

    def _files(self, doing: str) -> dict[Path, list[str] | None]:
        """Return a mapping from each file to the names of the tensors that the index places in it.

        If there is no index, the only file is mapped to None.
        """
        index = self.directory / INDEX
        if not os.path.lexists(index):
            if not os.path.lexists(self.directory / WHOLE):
                if other := other_format(self.directory):
                    raise CheckpointError(doing, [other])
                others = sorted(path.name for path in self.directory.iterdir())[:8]
                found = f"it holds {', '.join(others)}" if others else "it is empty"
                raise CheckpointError(doing, [f"it has neither {WHOLE} nor {INDEX}; {found}."])
            return {self.directory / WHOLE: None}
        weights = read_json(index, doing, unique=True).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
            raise CheckpointError(doing, [f"{INDEX} has no weight_map from tensors to files."])
        if outside := sorted({file for file in weights.values() if not reading.is_inside(file)}):
            faults = [f"{INDEX} names {file!r}, which is outside the checkpoint's folder." for file in outside]
            raise CheckpointError(doing, faults)
        files: dict[Path, list[str]] = {}
        for name, file in weights.items():
            files.setdefault(self.directory / file, []).append(name)
        missing = [f"{path.name} is missing; {INDEX} names it." for path in files if not os.path.lexists(path)]
        if missing:
            raise CheckpointError(doing, missing)
        return {**files}


def all_finite(values: np.ndarray) -> bool:
    """Return whether an array is free of NaN and infinity, in two passes and without a copy.

    In every IEEE format, among the numbers of one sign, infinity and NaN have the largest bit patterns. If the bits are
    read as signed integers, positive infinities and NaNs are the largest numbers. If they are read as unsigned
    integers, negative infinities and NaNs are the largest numbers.

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

#: Maps the suffix of a file in another format to a description of the format, and the remedy.
_FORMATS = {
    # Without dequantize=True, transformers keeps GGUF's blocks, which it cannot save.
    ".gguf": "a GGUF file, which is not supported. transformers' AutoModelForCausalLM.from_pretrained(DIR, "
    "gguf_file=NAME, quantization_config=GgufConfig(dequantize=True)).save_pretrained(OUT) writes config.json and "
    "safetensors, and AutoTokenizer writes tokenizer.json in the same way; give that folder.",
    ".bin": f"PyTorch weights, which may run code when they are loaded. {_SAVE.format('DIR')} writes them as "
    "safetensors; give that folder.",
    ".pth": "PyTorch weights in the format of the model's authors. Use the version of the model in the format of "
    "transformers, with config.json and safetensors.",
    ".safetensors": f"but a checkpoint also has config.json, and its weights in {WHOLE} or {INDEX}. Download all of "
    "its files.",
}


def other_format(path: Path) -> str:
    """Describe a folder or file in a known format that is not a checkpoint's, with the remedy.

    The result is "" if the path has none of the known formats.
    """
    is_folder = os.path.isdir(path)  # Path.is_dir would raise for an impossible file name
    names = sorted(os.listdir(path)) if is_folder else [path.name] if os.path.isfile(path) else []
    holds = "it holds" if is_folder else "it is"
    if ADAPTER in names:
        return (
            f"{holds} a LoRA adapter ({ADAPTER}), which changes the weights of {_base(path / ADAPTER)}, not a model of "
            "its own. Merge the two, and give the folder that this writes: peft's AutoPeftModelForCausalLM"
            ".from_pretrained(DIR).merge_and_unload().save_pretrained(OUT)."
        )
    for ending, remedy in _FORMATS.items():
        found = [name for name in names if name.endswith(ending)]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            return f"{holds} {found[0]}{more}, {remedy}"
    return ""


def _base(adapter: Path) -> str:
    """Return the name of the model that a LoRA adapter is for, for a message."""
    try:
        name = read_json(adapter, "").get("base_model_name_or_path")
    except CheckpointError:
        name = None
    return repr(name) if isinstance(name, str) else "another model"


def read_json(path: Path, doing: str, *, unique: bool = False) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        path: the file.
        doing: the first line of the error message.
        unique: whether duplicate keys are an error.

    Raises:
        CheckpointError: the file is missing, or does not hold a JSON object.
    """
    try:
        value = reading.read_json(path, unique=unique)
    except reading.MissingError:
        raise CheckpointError(doing, [f"{path.name} is missing."]) from None
    except reading.ReadError as error:
        raise CheckpointError(doing, [f"{path.name} cannot be read: {error}."]) from None
    if not isinstance(value, dict):
        raise CheckpointError(doing, [f"{path.name} does not hold a JSON object."])
    return value


#: The largest header that is read, which is the format's own limit.
_LONGEST = 100_000_000


def _header(path: Path, faults: list[str]) -> tuple[int, dict[str, StoredTensor]]:
    """Return the size of a file in bytes, and the file's tensors by name; append the file's faults to `faults`."""
    try:
        with reading.open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or (8 + length > size and length <= _LONGEST):
                needed = f"{8 + length:,} bytes for its header" if size >= 8 else "8 bytes"
                faults.append(f"{path.name} is truncated: it has {size:,} bytes, but needs {needed} alone.")
                return size, {}
            if length > _LONGEST:
                faults.append(f"{path.name} is not a safetensors file: its header would have {length:,} bytes.")
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
        faults.append(f"{path.name} is truncated: it has {size:,} bytes, but its header describes {end:,}.")
    elif end < size:
        faults.append(f"{path.name} has {size:,} bytes, but its header describes only {end:,}.")
    return size, {each.name: StoredTensor(path, each.dtype, each.shape, 8 + length + each.start) for each in found}


@dataclass(frozen=True)
class _Extent:
    """A tensor in a header. Its bytes are from `start` to `end`, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _extents(header: bytes) -> list[_Extent]:
    """Return the tensors that a header describes, in the order of their bytes.

    Raises:
        ValueError: the header is malformed, or its tensors overlap or leave a gap.
    """
    entries = reading.parse_json(header.decode(), unique=True)
    if not isinstance(entries, dict):
        raise ValueError("it is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is not an object of strings")
    found = [_extent(name, entry) for name, entry in entries.items()]
    found.sort(key=lambda each: (each.start, each.end))
    before, last = 0, ""
    for each in found:
        if each.start < before:
            raise ValueError(f"{each.name} begins at byte {each.start:,}, but {last} goes on to {before:,}")
        if each.start > before:
            raise ValueError(f"{each.name} begins at byte {each.start:,}, but the bytes from {before:,} are unused")
        before, last = each.end, each.name
    return found


def _extent(name: str, entry: Any) -> _Extent:
    match entry:
        case {"shape": [*sizes], "dtype": str(dtype), "data_offsets": [start, end]}:
            shape = tuple(sizes)
        case _:
            raise ValueError(f"{name} lacks a shape, a dtype or two data_offsets")
    if not all(type(number) is int and 0 <= number < 2**64 for number in (*shape, start, end)):
        raise ValueError(f"{name} has the shape {shape} and the data_offsets {start}, {end}: not all are whole numbers")
    if dtype not in _BITS:
        raise ValueError(f"{name} has the dtype {dtype!r}, which is not a dtype of the format")
    # Python's integers do not overflow, so a product of huge sizes cannot pass for a small one.
    if math.prod(shape) * _BITS[dtype] != 8 * (end - start):
        raise ValueError(f"{name} is {dtype} of shape {shape}, but has {end - start:,} bytes")
    return _Extent(name, dtype, shape, start, end)
