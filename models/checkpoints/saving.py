"""A model as a checkpoint that transformers loads: safetensors files, config.json, tokenizer.json."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config import ModelConfig
from ..transformer import Transformer, arrays
from .config import Described, expressing, written
from .families import Family
from .files import DTYPES, INDEX, WHOLE, CheckpointError, all_finite
from .sources import ParameterSource, sources
from .text import Tokenizer

#: Bytes of one file; a checkpoint that is larger is several files and an index.
FILE_BYTES = 5_000_000_000


def save(
    model: Transformer,
    directory: str | os.PathLike,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: Any = None,
    length: int | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a model as a public checkpoint, in the first family that has its form.

    The folder appears when it is complete; if anything fails, nothing is left.

    Args:
        model: a placed model, all of it on devices of this process.
        directory: a new folder.
        tokenizer: what its tokens mean, written beside it.
        dtype: of the tensors, float32, float16 or bfloat16; that of the model's embedding table if not given.
        length: tokens of the longest sequence that config.json promises; as the model says, or else 2048, if not
            given. A model with a sliding window, which attention here does not have, promises no more than that.
        file_bytes: largest size of a file, unless a single tensor is larger.

    Raises:
        CheckpointError: a ValueError: no family has the model's form (it gives all reasons), the folder exists, it
            cannot be written, or tensors have values that are NaN, infinite, or more than the dtype can hold (all of
            them named).

    Differs: where the model scales embedded tokens by √E and the family does not, √E is multiplied into the table, and
        divided out of the last norm if the table is tied: the same function. Experts are dropless in a checkpoint: a
        model with a capacity gives the same logits where it drops no token.
    """
    config, target = model.config, Path(directory)
    doing = f"cannot save a checkpoint to {str(target)!r}:"
    values = arrays(model)
    faults = ["its weights are int8; save the model that was quantized."] if config.int8 else []
    faults += [
        f"{path} has shards in other processes; gather the model in this one."
        for path, value in values.items()
        if not value.is_fully_addressable
    ]
    if os.path.lexists(target) and (not os.path.isdir(target) or any(target.iterdir())):
        faults.append("it exists; give a new folder.")
    names = {kept: name for name, kept in DTYPES.items()}
    dtype = np.dtype(values["embedding.table"].dtype if dtype is None else dtype)
    if not faults and dtype not in names:
        faults.append(f"the dtype {dtype} is not one of {', '.join(map(str, names))}.")
    if faults:
        raise CheckpointError(doing, faults)
    family = expressing(config)
    table = sources(Described(family, config, _factors(family, config)), config, model.layout)
    entries = written(family, config, length or config.context_length or 2048, dtype.name)
    if tokenizer is not None:
        entries |= {"bos_token_id": tokenizer.begin, "eos_token_id": sorted(tokenizer.ends) or None}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            faulty = _write_tensors(beside, table, values, dtype, names[dtype], file_bytes)
            if faulty:
                raise CheckpointError(doing, faulty)
            (beside / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save(beside)
            beside.chmod(0o755)  # a temporary folder is private
            beside.replace(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(doing, [f"{error.strerror or error}; nothing was written."]) from None


def _factors(family: Family, config: ModelConfig) -> dict[str, float]:
    """Return the factors of a family's tensors, so that its models' scaling of embedded tokens is this model's."""
    root = math.sqrt(config.embed)
    ratio = (root if config.scale_embedding else 1.0) / (root if family.scale_embedding else 1.0)
    of_norm = {"output.norm": ratio, "output.norm_bias": ratio} if config.tied else {}
    return {"embedding.table": 1 / ratio, **of_norm}


def _write_tensors(
    folder: Path,
    table: Mapping[str, ParameterSource],
    values: Mapping[str, jax.Array],
    dtype: np.dtype,
    kind: str,
    most: int,
) -> list[str]:
    """Write the files and, if there are several, their index; return what is wrong with the values of tensors."""
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = total = 0
    for path, source in table.items():
        count = math.prod(source.shape) * dtype.itemsize
        for numbers in source.counts():
            if files[-1] and size + count > most:
                files.append([])
                size = 0
            files[-1].append((path, numbers))
            size, total = size + count, total + count
    places: dict[str, str] = {}
    faults: list[str] = []
    for number, tensors in enumerate(files, 1):
        file = WHOLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for path, numbers in tensors:
            name, shape = table[path].name(numbers), table[path].shape
            end = start + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": (start, end)}
            start, places[name] = end, file
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors are aligned
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for path, numbers in tensors:
                tensor, largest, count = _tensor(table[path], numbers, _distinct(values[path]), dtype)
                out.write(tensor.view(np.uint8).data)
                name, limit = table[path].name(numbers), float(jnp.finfo(dtype).max)
                if largest:
                    faults.append(f"{name} has {largest:.6g}, and {dtype} ends at {limit:.6g}; take another dtype.")
                if count:
                    faults.append(
                        f"{name} has {count:,} of {tensor.size:,} values that are NaN or infinite, and so has the "
                        "model; take it from before it went wrong."
                    )
            out.flush()
            os.fsync(out.fileno())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return faults


def _tensor(
    source: ParameterSource, numbers: tuple[int, ...], shards: list[Any], dtype: np.dtype
) -> tuple[np.ndarray, float, int]:
    """One tensor of the checkpoint on the host, put together of the shards that have a part of it.

    Beside it the largest magnitude that became infinite in its dtype, 0 if none did; and how many values of the model
    are not finite.
    """
    out, beyond, count = np.empty(source.split, dtype), 0.0, 0
    for shard in shards:
        if numbers not in source.counts(shard.index):
            continue
        held = shard.data
        for dim, number in zip(shard.index, numbers):  # layers and experts are the first dimensions
            held = jax.lax.dynamic_index_in_dim(held, np.int32(number - (dim.start or 0)), keepdims=False)
        values = np.asarray(held)
        for place, region in source.pieces(shard.index, numbers):
            part = values[place[len(numbers) :]].transpose(source.order)
            if source.factor != 1.0 or source.stored.offset:
                part = part.astype(np.float32) / source.factor - source.stored.offset
            with np.errstate(over="ignore", invalid="ignore"):
                out[region] = part.astype(dtype)
            if not all_finite(out[region]):
                finite = np.isfinite(part)
                beyond = max(beyond, float(np.abs(part[finite & np.isinf(out[region])]).max(initial=0.0)))
                count += int((~finite).sum())
    return out, beyond, count


def _distinct(value: jax.Array) -> list[Any]:
    """The shards of an array, one of those that hold the same."""
    bounds = lambda shard: tuple(part.indices(size)[:2] for part, size in zip(shard.index, value.shape))  # noqa: E731
    return list({bounds(shard): shard for shard in value.addressable_shards}.values())
