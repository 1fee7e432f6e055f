"""The cost of each choice of rematerialization: bytes kept for the backward pass, and FLOPs computed again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, Mesh
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

from ..config import REMATS, ModelConfig
from ..objective import loss
from ..parameters import stages_axes
from ..shapes import abstract, abstract_batch
from ..transformer import arrays, with_arrays


@dataclass(frozen=True)
class Recomputation:
    """One choice of `ModelConfig.remat`, on one device.

    Attributes:
        remat: the choice.
        layers: number of blocks, or of periods of blocks, that are scanned; of all blocks, if they do not repeat.
        bytes: bytes that all these layers keep for the backward pass.
        flops: FLOPs of the products that the backward pass computes again, beyond those of `none`.
        seconds: time of these FLOPs at the chip's full rate.
    """

    remat: str
    layers: int
    bytes: int
    flops: int
    seconds: float

    @property
    def layer_bytes(self) -> int:
        """Bytes that one layer keeps; the mean, rounded down, if layers do not repeat."""
        return self.bytes // self.layers


def predicted(
    config: ModelConfig, layout: Layout, mesh: Mesh, batch: int, length: int, dtype: Any = jnp.float32
) -> tuple[Recomputation, ...]:
    """Predict bytes and FLOPs of every choice of rematerialization, from the program that JAX differentiates.

    The scan over blocks hands to the backward pass one stack for every array that a gradient reads. The bytes of these
    stacks on one device are counted, under the layout's planned programs.

    Args:
        config: the model; its `remat` is ignored.
        layout: a `gspmd.Layout`.
        mesh: devices with the layout's axes, possibly of an offline topology.
        batch: sequences per step, over all devices.
        length: tokens per sequence.
        dtype: compute dtype.

    Returns:
        A row for each of `REMATS`. There are no rows for a pipeline, whose schedule decides what stages keep. There are
        none either if the blocks have only one repeat, which leaves no stacks of arrays, unless this is because of
        their kinds: then each block is computed again by itself.

    Example:
        >>> from gspmd.layouts import Layout
        >>> mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"))
        >>> small = ModelConfig(embed=32, layers=2, heads=4, kv_heads=4, head_size=8, feed_forward=128)
        >>> rows = predicted(small, Layout.load("replicated"), mesh, batch=2, length=16)
        >>> {row.remat: row.layer_bytes for row in rows}["full"]  # [2, 16, 32] float32
        4096

    Differs: under lowering "xla", `none` keeps attention's logits too, which no planned program does.
    """
    repeats = config.repeats if config.stacked else 1
    if stages_axes(layout) or (repeats == 1 and not config.is_one_pattern):
        return ()
    layers = config.layers if config.is_one_pattern else repeats
    # Under Explicit axes an array's type has its sharding, from which `_kept` takes the shape of a shard.
    typed = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * mesh.devices.ndim)
    rows: list[Recomputation] = []
    with jax.set_mesh(typed), gspmd.lowering("blocking"):
        rate = context().chip.flops(jnp.dtype(dtype).name)
        batch_of = abstract_batch(layout, typed, batch, length)
        for remat in REMATS:
            model = abstract(replace(config, remat=remat), layout, typed, dtype)

            def of_parameters(params, tokens, key, model=model):
                return loss(with_arrays(model, params), tokens, key=key)[0]

            traced = jax.make_jaxpr(jax.grad(of_parameters))(arrays(model), batch_of, abstract_key(typed))
            program = without_dead_code(traced.jaxpr)
            flops = _flops(program) - (rows[0].flops if rows else 0)
            rows.append(Recomputation(remat, layers, repeats * _kept(program, repeats), flops, flops / rate))
    return (replace(rows[0], flops=0, seconds=0.0), *rows[1:])


def show_remat(
    console: Console, config: ModelConfig, layout: Layout, mesh: Mesh, batch: int, length: int, dtype: Any = jnp.float32
) -> None:
    """Print `predicted` as a table, the model's own choice in bold; print nothing if it has no rows."""
    columns = (
        Column("remat"),
        Column("kept by a layer", "right", goes=1),
        Column("by all", "right"),
        Column("recomputed", "right"),
        Column("seconds", "right", goes=2),
    )
    sheet = Sheet("Activations for the backward pass, one device, predicted", columns)
    rows = predicted(config, layout, mesh, batch, length, dtype)
    for row in rows:
        mark = "[bold]" if row.remat == config.remat else ""
        cells = (row.remat, amount_of_bytes(row.layer_bytes), amount_of_bytes(row.bytes), amount_of_flops(row.flops))
        sheet.add(*(f"{mark}{cell}" for cell in (*cells, amount_of_seconds(row.seconds))))
    if rows:
        console.print(sheet)


def _kept(program: Jaxpr, repeats: int) -> int:
    """Return the bytes on one device of one layer's part of all stacks that the forward scan over layers makes."""
    scans = (each for each in _equations(program) if each.primitive.name == "scan")
    scan = next(each for each in scans if each.params["length"] == repeats)
    stacks = [var.aval for var in scan.outvars[scan_operands(scan)[1] :]]
    return sum(math.prod(aval.sharding.shard_shape(aval.shape)[1:]) * aval.dtype.itemsize for aval in stacks)


def _equations(program: Jaxpr) -> Iterator[Any]:
    """Yield the equations of a program and of functions it calls, except those in loops and planned programs."""
    for equation in program.eqns:
        yield equation
        if equation.primitive.name in ("jit", CLOSED_CALL):
            for inner in inner_jaxprs(equation):
                yield from _equations(inner)


def _flops(program: Jaxpr, scopes: str = "") -> int:
    """Return the FLOPs of a program's products; those in planned programs are counted for one device's shards."""
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
