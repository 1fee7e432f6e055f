"""Loading of a checkpoint as a sharded model: each process reads only the byte ranges of its devices' shards."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from gspmd.annotate import LayoutError
from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.layouts import Layout
from gspmd.layouts.initial import nested

from ..config import ModelConfig
from ..parameters import check_placed, parameters
from ..quantization import quantize_together, scale_groups
from ..shapes import stored_dtype
from ..transformer import Transformer
from .config import Described, described
from .families.serial import LAYER
from .files import DTYPES, READ_AS, CheckpointError, Files, all_finite
from .sources import ParameterSource, Region, sources


@dataclass(frozen=True)
class LoadReport:
    """The cost of loading a checkpoint in this process. `str` makes a report that can be printed.

    Attributes:
        tensors: number of the checkpoint's tensors that were read, at least in part.
        bytes_read: bytes that were read. For a process with all shards, this is `file_bytes` without headers and unused
            tensors.
        file_bytes: size of the checkpoint's files in bytes.
        host_bytes: peak host memory in bytes, not counting the arrays themselves. It is the size of the largest shard.
        seconds: time from the first header to the last array.
        remark: a sentence if the tensors contradict config.json, or if images are not read; otherwise empty.
    """

    tensors: int
    bytes_read: int
    file_bytes: int
    host_bytes: int
    seconds: float
    remark: str = ""

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors, {amount_of_bytes(self.bytes_read)} of {amount_of_bytes(self.file_bytes)} read in "
            f"{amount_of_seconds(self.seconds)}; {amount_of_bytes(self.host_bytes)} of host memory besides the arrays"
            f"{self.remark and '; '}{self.remark}"
        )


def load(
    directory: str | os.PathLike, layout: Layout, mesh: Mesh, dtype: Any = jnp.bfloat16, *, int8: bool = False
) -> tuple[Transformer, LoadReport]:
    """Load a public checkpoint as a model whose parameters are sharded by a layout.

    Each shard is read as byte ranges of the files. A shard is read only once even if several devices hold it, and host
    memory holds one shard at a time. The config, the tensors' names, shapes and dtypes, and the layout are checked
    before any tensor is read.

    Args:
        directory: a folder with config.json and model.safetensors, or with several such files and their index.
        layout: the `gspmd.Layout` of the parameters.
        mesh: a mesh with the mesh axes of the layout.
        dtype: the dtype of the computation and of matrices. Norms, biases and routers are float32.
        int8: whether to quantize the matrices, from the dtype of the files, one by one as they are read. The result
            equals the result of `quantize`, but the whole model is never held in a wider dtype.

    Returns:
        The model, of the same kind as from `build`, and a report of the cost.

    Raises:
        CheckpointError (a ValueError): config.json cannot be used (see `model_config`); or files are missing or
            truncated; or tensors are missing, unexpected, misshapen or of an unsupported dtype (the message lists all
            of these tensors); or tensors turn out to contain NaN, infinities, or values that `dtype` cannot hold.
        LayoutError (a ValueError): the layout does not fit the model, or the mesh axes do not divide the model's sizes.

    Differs: the layout may pad a dimension, and the model may pad its vocabulary. The padding is filled with 0.
    """
    began = time.perf_counter()
    checkpoint = described(directory)
    config, dtype = checkpoint.config, jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        fault = f"models compute in float32 or bfloat16, not in {dtype}."
        raise CheckpointError(f"cannot load the checkpoint {str(directory)!r}:", [fault])
    with Files(directory, checkpoint.family.renamed) as files, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sizes = config.sizes(batch=1, length=1)
        layout.check({dim: size for dim, size in sizes.items() if dim not in "BLTG"}, mesh)
        table = sources(checkpoint, config, layout)
        check_placed(f"cannot load the checkpoint {str(directory)!r}", parameters(config, layout), mesh, LayoutError)
        _check(checkpoint, config, table, files)
        reader = _ShardReader(files, mesh, pool)
        values: dict[str, jax.Array] = {}
        if int8:
            config = replace(config, int8=True)
            rows = parameters(config, layout)
            for paths, scale in scale_groups(config, rows):
                weights = {path: reader.array(table[path], files.dtype(next(table[path].names()))) for path in paths}
                with jax.set_mesh(mesh):
                    values |= quantize_together(rows, weights, scale)
        for path, source in table.items():
            if path not in values:
                values[path] = reader.array(source, stored_dtype(source.row, dtype))
        if reader.faulty:
            doing = f"cannot load {checkpoint.family.architecture} from {str(files.directory)!r}:"
            raise CheckpointError(doing, reader.faults())
        report = LoadReport(
            tensors=len({name for source in table.values() for name in source.names()}),
            bytes_read=reader.bytes,
            file_bytes=files.bytes,
            host_bytes=reader.most,
            seconds=time.perf_counter() - began,
            remark=checkpoint.remark,
        )
    return Transformer(config, layout, nested(values), dtype), report


def _check(checkpoint: Described, config: ModelConfig, table: dict[str, ParameterSource], files: Files) -> None:
    """Raise one error that lists every tensor that the model cannot use.

    Raises:
        CheckpointError: tensors are missing, unexpected, misshapen or of an unsupported dtype; or a copy of the
            embedding table differs from the table.
    """
    wanted = {name: source.form.shape for source in table.values() for name in source.names()}
    faults = list(_tensor_faults(wanted, files))
    family, own = checkpoint.family, checkpoint.family.tensors["embedding.table"].name
    faults += [
        f"{name} differs from {own}, but a model here has only one embedding table."
        for name in family.copies
        if {name, own} <= files.tensors.keys() and not files.equal(name, own)
    ]
    ignored = [*family.ignored, *map(re.escape, family.copies), *_second_table(checkpoint, config)]
    ignored += [re.escape(f"{name}.") + ".*" for name in _modules(checkpoint, config, files)]
    faults += [
        f"{name} is in the checkpoint, but the model has no such tensor."
        for name in files.tensors
        if name not in wanted and not re.fullmatch("|".join(ignored), name)
    ]
    if faults:
        raise CheckpointError(f"cannot load {checkpoint.family.architecture} from {str(files.directory)!r}:", faults)


def _second_table(checkpoint: Described, config: ModelConfig) -> list[str]:
    """Return a list with a pattern for the name of the logits' table, which is redundant in files of a tied model.

    The list is empty if the model is not tied, or if its family has no such table.
    """
    table = checkpoint.family.tensors.get("output.table")
    return [re.escape(table.name)] if table and config.tied else []


def _modules(checkpoint: Described, config: ModelConfig, files: Files) -> Iterator[str]:
    """Yield the names of the prediction modules, which are numbered like layers after the last one.

    Such a module has a matrix that no layer has. If there are tensors after the last layer but this matrix is missing,
    the tensors are another layer, and config.json is wrong.
    """
    for number in range(config.layers, config.layers + checkpoint.modules):
        name = LAYER.format(N=number)
        if f"{name}.eh_proj.weight" in files.tensors:
            yield name


def _tensor_faults(wanted: dict[str, tuple[int, ...]], files: Files) -> Iterator[str]:
    for name, shape in wanted.items():
        tensor = files.tensors.get(name)
        if tensor is None:
            yield f"{name} is missing; the model needs it, of shape {shape}."
        elif tensor.shape != shape:
            yield f"{name} has shape {tensor.shape} in the checkpoint, but the model needs {shape}."
        elif tensor.dtype not in READ_AS:
            yield f"{name} has dtype {tensor.dtype}, which is not supported; {', '.join(DTYPES)} are."


class _ShardReader:
    """A reader of parameters, shard by shard, which counts bytes and records values that are not finite.

    A single value that is not finite makes the model return NaN or, after rounding to int8, meaningless results. The
    check is cheapest here, while the piece of the tensor is still in the processor's caches.
    """

    def __init__(self, files: Files, mesh: Mesh, pool: ThreadPoolExecutor):
        self.files, self.mesh = files, mesh
        self.bytes = self.most = 0
        self.faulty: dict[str, tuple[int, float, np.dtype]] = {}
        self.pool = pool

    def array(self, source: ParameterSource, dtype: np.dtype) -> jax.Array:
        """Read a parameter as an array; each process creates the shards of its own devices."""
        shape, sharding = source.row.shape, NamedSharding(self.mesh, source.row.spec.partition_spec())
        devices_of: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None  # the device belongs to this process
            bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape))
            devices_of.setdefault(bounds, []).append(device)
        arrays: list[jax.Array] = []
        for bounds, devices in devices_of.items():
            arrays += self._shard(source, tuple(slice(*bound) for bound in bounds), devices, dtype)
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def _shard(
        self, source: ParameterSource, index: tuple[slice, ...], devices: list[jax.Device], dtype: np.dtype
    ) -> list[jax.Array]:
        """Read one shard onto every device that holds this shard; the copy in host memory is freed on return."""
        shard = np.zeros([part.stop - part.start for part in index], dtype)
        self.most = max(self.most, shard.nbytes)

        def read(numbers: tuple[int, ...]) -> int:
            count = 0
            for place, region in source.pieces(index, numbers):
                out = shard[place].transpose(source.order)
                with np.errstate(over="ignore", invalid="ignore"):  # reported below, with the tensor's name
                    count += self.files.read_into(out, source.name(numbers), source.form, region)
                if not all_finite(shard[place]):
                    self._note(source, numbers, region, dtype)
                if source.factor != 1.0 or source.stored.offset:
                    out[...] = source.factor * (out.astype(np.float32) + source.stored.offset)
            return count

        self.bytes += sum(self.pool.map(read, source.counts(index)))
        return jax.block_until_ready([jax.device_put(shard, device) for device in devices])

    def _note(self, source: ParameterSource, numbers: tuple[int, ...], region: Region, dtype: np.dtype) -> None:
        """Record how many values of a region are not finite, and the largest magnitude among its finite values."""
        name = source.name(numbers)
        stored = np.empty([part.stop - part.start for part in region], self.files.dtype(name))
        self.files.read_into(stored, name, source.form, region)
        finite = np.isfinite(stored.astype(np.float32))
        largest = float(np.abs(stored[finite].astype(np.float32)).max(initial=0.0))
        count, beyond, _ = self.faulty.get(name, (0, 0.0, dtype))
        self.faulty[name] = count + int((~finite).sum()), max(beyond, largest), dtype

    def faults(self) -> list[str]:
        """Return a fault for each tensor with values that are not finite, in the order of the checkpoint's files."""
        told = []
        for name in (name for name in self.files.tensors if name in self.faulty):
            count, largest, dtype = self.faulty[name]
            total = math.prod(self.files.tensors[name].shape)
            if count:
                told.append(f"{name} has {count:,} of {total:,} values that are NaN or infinite; use an intact copy.")
            else:
                limit = float(jnp.finfo(dtype).max)
                told.append(f"{name} has {largest:.6g}, but {dtype} holds at most {limit:.6g}; use another dtype.")
        return told
