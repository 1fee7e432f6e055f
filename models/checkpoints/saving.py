"""Saving a model as a checkpoint that transformers loads: safetensors files, config.json, tokenizer.json."""

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

#: Largest size of a file in bytes; a larger checkpoint is split into several files with an index.
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
    """Write a model as a public checkpoint, in the first family that can express it.

    The folder appears only when it is complete. If anything fails, nothing is left behind.

    Args:
        model: a sharded model, whose arrays are entirely on devices of this process.
        directory: a new folder.
        tokenizer: the model's tokenizer, which is written to the same folder.
        dtype: the dtype of the tensors, float32, float16 or bfloat16; by default the dtype of the model's embedding
            table.
        length: number of tokens of the longest sequence, for config.json. The default is the model's `context_length`,
            or 2048 if the model has none. Families with relative positions have no such entry.
        file_bytes: largest size of a file in bytes, unless a single tensor is larger.

    Raises:
        CheckpointError (a ValueError): no family can express the model (the message gives all reasons); or the folder
            exists or cannot be written; or tensors have values that are NaN, infinite, or too large for the dtype (the
            message lists all of these tensors).

    Differs: if the model scales embedded tokens by √E and the family does not, the table is multiplied by √E. If the
        table is tied, the last norm is also divided by √E, so that the model stays the same function. Experts are
        dropless in a checkpoint, so a model with a capacity has the same logits only where it drops no token.
    """
    config, target = model.config, Path(directory)
    doing = f"cannot save a checkpoint to {str(target)!r}:"
    values = arrays(model)
    faults = ["its weights are int8; save the model before it is quantized."] if config.int8 else []
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
            copies = () if config.tied else family.copies
            faulty = _write_tensors(beside, table, copies, values, dtype, names[dtype], file_bytes)
            if faulty:
                raise CheckpointError(doing, faulty)
            (beside / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save(beside)
            beside.chmod(0o755)  # mkdtemp makes a private folder
            beside.replace(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(doing, [f"{error.strerror or error}; nothing was written."]) from None


def _factors(family: Family, config: ModelConfig) -> dict[str, float]:
    """Return, by path, factors that make up for the family's different scaling of embedded tokens and logits."""
    root = math.sqrt(config.embed)
    ratio = (root if config.scale_embedding else 1.0) / (root if family.scale_embedding else 1.0)
    of_norm = ratio
    if family.root_scaled:  # readers of the checkpoint multiply tied logits by 1/√E
        of_norm /= root
    norms = {"output.norm": of_norm, "output.norm_bias": of_norm} if config.tied else {}
    return {"embedding.table": 1 / ratio, **norms}


def _write_tensors(
    folder: Path,
    table: Mapping[str, ParameterSource],
    copies: tuple[str, ...],
    values: Mapping[str, jax.Array],
    dtype: np.dtype,
    kind: str,
    most: int,
) -> list[str]:
    """Write the files, and an index if there are several files; return the faults of the tensors' values.

    `copies` are further names under which the embedding table is also written.
    """
    every: dict[str, list[tuple[str, tuple[int, ...]]]] = {}  # a tensor may have parts of several parameters
    for path, source in table.items():
        for numbers in source.counts():
            every.setdefault(source.name(numbers), []).append((path, numbers))
    every |= {name: [("embedding.table", ())] for name in copies}
    shapes = {name: table[parts[0][0]].form.shape for name, parts in every.items()}
    files: list[list[str]] = [[]]
    size = total = 0
    for name, shape in shapes.items():
        count = math.prod(shape) * dtype.itemsize
        if files[-1] and size + count > most:
            files.append([])
            size = 0
        files[-1].append(name)
        size, total = size + count, total + count
    places: dict[str, str] = {}
    faults: list[str] = []
    for number, tensors in enumerate(files, 1):
        file = WHOLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name in tensors:
            end = start + math.prod(shapes[name]) * dtype.itemsize
            header[name] = {"dtype": kind, "shape": shapes[name], "data_offsets": (start, end)}
            start, places[name] = end, file
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors are aligned
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in tensors:
                tensor, largest, count = np.empty(shapes[name], dtype), 0.0, 0
                for path, numbers in every[name]:
                    found = _fill(tensor, table[path], numbers, _distinct(values[path]))
                    largest, count = max(largest, found[0]), count + found[1]
                out.write(tensor.view(np.uint8).data)
                limit = float(jnp.finfo(dtype).max)
                if largest:
                    held = f"but {dtype} holds at most {limit:.6g}"
                    faults.append(f"{name} has {largest:.6g}, {held}; use another dtype.")
                if count:
                    faults.append(
                        f"{name} has {count:,} of {tensor.size:,} values that are NaN or infinite, as in the model; "
                        "save an earlier state, from before training diverged."
                    )
            out.flush()
            os.fsync(out.fileno())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return faults


def _fill(
    tensor: np.ndarray, source: ParameterSource, numbers: tuple[int, ...], shards: list[Any]
) -> tuple[float, int]:
    """Write the shards of a parameter into the part of a checkpoint's tensor that holds the parameter.

    Returns:
        The largest magnitude that overflowed in the tensor's dtype (0 if no value did), and the number of values that
        were already not finite in the model.
    """
    out, beyond, count = source.form.view(tensor), 0.0, 0
    assert np.shares_memory(out, tensor) or not out.size
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
                out[region] = part.astype(tensor.dtype).reshape(out[region].shape)
            if not all_finite(out[region]):
                part = part.reshape(out[region].shape)
                finite = np.isfinite(part)
                beyond = max(beyond, float(np.abs(part[finite & np.isinf(out[region])]).max(initial=0.0)))
                count += int((~finite).sum())
    return beyond, count


def _distinct(value: jax.Array) -> list[Any]:
    """Return one shard for each distinct region of an array."""
    bounds = lambda shard: tuple(part.indices(size)[:2] for part, size in zip(shard.index, value.shape))  # noqa: E731
    return list({bounds(shard): shard for shard in value.addressable_shards}.values())
