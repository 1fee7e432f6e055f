"""The cost of each choice of rematerialization: bytes kept for the backward pass, and FLOPs that it recomputes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var
from jax.sharding import AbstractMesh, AxisType, Mesh
from rich.console import Console

import gspmd
from gspmd.display.tables import Column, Sheet
from gspmd.display.units import amount_of_bytes, amount_of_flops, amount_of_seconds
from gspmd.jax_internals import CLOSED_CALL, scan_operands
from gspmd.layouts import Layout
from gspmd.layouts.initial import abstract_key
from gspmd.lowerings.program import context
from gspmd.ops.interface.kernels import kernel_work
from gspmd.tracing.jaxprs import inner_jaxprs, without_dead_code

from ..blocks import part
from ..config import REMATS, ModelConfig
from ..context import context_of
from ..objective import loss, split_tokens
from ..parameters import stages_axes
from ..shapes import abstract, abstract_batch
from ..transformer import Transformer, arrays, run_first, with_arrays


@dataclass(frozen=True)
class Recomputation:
    """The predicted cost of one choice of `ModelConfig.remat` on one device.

    Attributes:
        remat: the choice.
        layers: number of steps of the scan, which are blocks or periods of blocks; the number of all blocks if they do
            not repeat.
        bytes: bytes that all blocks keep on the device for the backward pass, including the blocks before the repeating
            blocks.
        flops: FLOPs of products that the backward pass recomputes, beyond the FLOPs that it recomputes under `none`.
        seconds: duration of the recomputed FLOPs at the chip's peak rate.
        first_bytes: the part of `bytes` that the blocks before the repeating blocks keep (`ModelConfig.lead`).
        host_bytes: bytes that all blocks keep in host memory (`ModelConfig.offload`); they are not part of `bytes`.
    """

    remat: str
    layers: int
    bytes: int
    flops: int
    seconds: float
    first_bytes: int = 0
    host_bytes: int = 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of the device that each of the `layers` keeps.

        If blocks do not repeat, this is the mean over all blocks, rounded down.
        """
        return (self.bytes - self.first_bytes) // self.layers


class _Kept(NamedTuple):
    """Bytes that are kept for one device, in its own memory and in host memory."""

    device: int
    host: int


def predicted(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    batch: int,
    length: int,
    dtype: Any = jnp.float32,
    microbatches: int = 1,
) -> tuple[Recomputation, ...]:
    """Predict the bytes and FLOPs of every choice of rematerialization, from the program of the gradient.

    For every array that a gradient reads, the scan over blocks passes a stack of arrays to the backward pass. The
    prediction adds up the bytes that these stacks take on one device, and the bytes of the arrays that the blocks
    before the scan keep. The programs are the layout's planned programs.

    Args:
        config: the model configuration; its `remat` is ignored. With its `offload`, kept arrays are in host memory,
            except under `none`.
        layout: a `gspmd.Layout`.
        mesh: a mesh with the layout's mesh axes. Its devices may be those of an offline topology.
        batch: number of sequences per step, over all devices.
        length: number of tokens per sequence.
        dtype: compute dtype.
        microbatches: number of parts of the batch that are computed one after another. The bytes are for one part.

    Returns:
        A row for each of `REMATS`. There are no rows for a pipeline, because its schedule decides what stages keep.
        There are also no rows for a model of a single period, because nothing is stacked for it. The exception is a
        model whose blocks are recomputed one by one (`ModelConfig.is_one_pattern`).

    Example:
        >>> from gspmd.layouts import Layout
        >>> mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"))
        >>> small = ModelConfig(embed=32, layers=2, heads=4, kv_heads=4, head_size=8, feed_forward=128)
        >>> rows = predicted(small, Layout.load("replicated"), mesh, batch=2, length=16)
        >>> {row.remat: row.layer_bytes for row in rows}["full"]  # [2, 16, 32] float32
        4096

    Differs: under the lowering "xla", `none` also keeps the logits of attention. Planned programs never keep these
        logits, so the prediction does not count them.
    """
    if not _is_predicted(config, layout):
        return ()
    layers = config.layers if config.is_one_pattern else _repeats(config)
    # Under Explicit axes an array's type has its sharding, from which `_kept` takes the shape of a shard.
    typed = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * mesh.devices.ndim)
    rows: list[Recomputation] = []
    with jax.set_mesh(typed), gspmd.lowering("blocking"):
        chip = context().chip
        rate = chip.flops(chip.arithmetic(jnp.dtype(dtype).name))
        for remat in REMATS:
            of = replace(config, remat=remat, offload=config.offload and remat != "none")
            program, kept, first = _backward(of, layout, typed, batch // microbatches, length, dtype)
            flops = microbatches * _flops(program) - (rows[0].flops if rows else 0)
            rows.append(
                Recomputation(remat, layers, kept.device, flops, flops / rate, first.device, host_bytes=kept.host)
            )
    return (replace(rows[0], flops=0, seconds=0.0), *rows[1:])


def kept_bytes(
    config: ModelConfig, layout: Layout, mesh: AbstractMesh, batch: int, length: int, dtype: Any = jnp.float32
) -> int | None:
    """Predict the bytes that all blocks keep on one device for the backward pass, under the config's `remat`.

    Args:
        config, layout, batch, length, dtype: as for `predicted`.
        mesh: the mesh, with Explicit axes; no devices are needed.

    Returns:
        The bytes in the memory of the device, or None if `predicted` has no rows for this model and layout.
    """
    if not _is_predicted(config, layout):
        return None
    with jax.sharding.use_abstract_mesh(mesh), gspmd.lowering("blocking"):
        return _backward(config, layout, mesh, batch, length, dtype)[1].device


def _repeats(config: ModelConfig) -> int:
    return config.repeats if config.stacked else 1


def _is_predicted(config: ModelConfig, layout: Layout) -> bool:
    return not stages_axes(layout) and (_repeats(config) > 1 or config.is_one_pattern)


def _backward(
    config: ModelConfig, layout: Layout, mesh: Any, batch: int, length: int, dtype: Any
) -> tuple[Jaxpr, _Kept, _Kept]:
    """Return the program of a gradient, the bytes that all blocks keep for it, and a part of these bytes.

    The part is kept by the blocks before the repeating blocks (`ModelConfig.lead`).
    """
    model, repeats = abstract(config, layout, mesh, dtype), _repeats(config)
    batch_of, key = abstract_batch(layout, mesh, batch, length), abstract_key(mesh)

    def of_parameters(params, tokens, key):
        return loss(with_arrays(model, params), tokens, key=key)[0]

    program = without_dead_code(jax.make_jaxpr(jax.grad(of_parameters))(arrays(model), batch_of, key).jaxpr)
    first = _kept_first(model, batch_of, key)
    looped = _kept(program, repeats)
    return program, _Kept(first.device + repeats * looped.device, first.host + repeats * looped.host), first


def show_remat(
    console: Console,
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    batch: int,
    length: int,
    dtype: Any = jnp.float32,
    microbatches: int = 1,
) -> None:
    """Print the rows of `predicted`, if there are any, as a table with the model's own choice in bold."""
    columns = (
        Column("remat"),
        Column("kept by a layer", "right", goes=1),
        Column("by all", "right"),
        *([Column("in host memory", "right")] if config.offload else []),
        Column("recomputed", "right"),
        Column("seconds", "right", goes=2),
    )
    sheet = Sheet("Activations for the backward pass, one device, predicted", columns)
    rows = predicted(config, layout, mesh, batch, length, dtype, microbatches)
    for row in rows:
        mark = "[bold]" if row.remat == config.remat else ""
        sizes = (row.layer_bytes, row.bytes, *([row.host_bytes] if config.offload else []))
        work = amount_of_flops(row.flops), amount_of_seconds(row.seconds)
        sheet.add(*(f"{mark}{cell}" for cell in (row.remat, *map(amount_of_bytes, sizes), *work)))
    if rows:
        console.print(sheet)


def _kept(program: Jaxpr, repeats: int) -> _Kept:
    """Return the bytes that each layer adds for one device to the stacked outputs of the forward scan."""
    scans = (each for each in _equations(program) if each.primitive.name == "scan")
    scan = next(each for each in scans if each.params["length"] == repeats)
    return _of_shards([var.aval for var in scan.outvars[scan_operands(scan)[1] :]], leading=1)


def _of_shards(avals: Sequence[Any], leading: int = 0) -> _Kept:
    """Return the bytes of the shards of arrays, without a number of leading dimensions."""
    sizes = {jax.memory.Space.Device: 0, jax.memory.Space.Host: 0}
    for aval in avals:
        shard = aval.sharding.shard_shape(aval.shape)[leading:]
        sizes[aval.memory_space] += math.prod(shard) * aval.dtype.itemsize
    return _Kept(sizes[jax.memory.Space.Device], sizes[jax.memory.Space.Host])


def _kept_first(model: Transformer, batch: Any, key: Any) -> _Kept:
    """Return the bytes kept for one device by the blocks that come before the repeating blocks.

    Weights and constants are not counted.
    """
    config, layout = model.config, model.layout
    definitions: list[Any] = []  # the blocks' definitions, set while `inputs` is traced
    if not config.lead or not config.stacked:
        return _Kept(0, 0)

    def inputs(params, tokens):
        placed = with_arrays(model, params)
        ids, _ = split_tokens(tokens, layout)
        with part(layout, "embedding"):
            x = placed.embedding(ids)
        definitions[:], weights = zip(*placed.stacked().cast(model.dtype).first)
        return weights, x

    def residuals(weights, x, key):
        context = context_of(config, layout, None, None, causal=True)
        keys = jax.random.split(key, config.lead)

        def run(weights, x):
            x, figures = run_first(config, [*zip(definitions, weights)], x, context, keys, train=True)
            return x, [each["aux_loss"] for each in figures]

        return jax.vjp(run, weights, x)[1]

    given = jax.eval_shape(inputs, arrays(model), batch)
    program = without_dead_code(jax.make_jaxpr(residuals)(*given, key).jaxpr)
    weights = len(jax.tree.leaves(given[0]))
    varying = {*program.invars}
    for equation in program.eqns:
        if not varying.isdisjoint(var for var in equation.invars if isinstance(var, Var)):
            varying |= {*equation.outvars}
    kept = {var for var in program.outvars if isinstance(var, Var)} & varying - {*program.invars[:weights]}
    avals: list[Any] = [var.aval for var in kept]
    return _of_shards(avals)


def _equations(program: Jaxpr) -> Iterator[Any]:
    """Yield the equations of a program and of functions that it calls, except inside loops and planned programs."""
    for equation in program.eqns:
        yield equation
        if equation.primitive.name in ("jit", CLOSED_CALL):
            for inner in inner_jaxprs(equation):
                yield from _equations(inner)


def _flops(program: Jaxpr, scopes: str = "") -> int:
    """Return the FLOPs of a program's products; inside planned programs, the FLOPs of one device are counted."""
    total = 0
    for equation in program.eqns:
        here = f"{scopes}/{equation.source_info.name_stack}"
        if equation.primitive.name == "pallas_call":
            work = kernel_work(here)
            total += work.flops if work else 0
            continue
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left: Any = equation.invars[0].aval
            result: Any = equation.outvars[0].aval
            shape = left.shape
            total += 2 * result.size * math.prod(shape[at] for at in contracted)
        inner = [_flops(each, here) for each in inner_jaxprs(equation)]
        if inner:
            each = max(inner) if equation.primitive.name == "cond" else sum(inner)
            total += equation.params.get("length", 1) * each
    return total
