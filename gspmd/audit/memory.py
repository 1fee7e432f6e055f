"""What a device has to hold: the largest buffers of a program, and what would make each smaller."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import jax
from rich.markup import escape
from rich.table import Table

from gspmd.audit.hlo import Array, Instruction, Module
from gspmd.audit.ledger import OURS, short
from gspmd.collectives.figure import amount_of_bytes, axes_text

_FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "constant")
_STARTS = ("-start", "-update")  # these carry their operands too; what they make is that of their -done
_LAYOUT = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([\d,]*)(?::((?:T\([\d,]+\)(?:\([\d,]+\))*)?)([^}]*))?\})?")


@dataclass(frozen=True)
class Buffer:
    """One array that a device holds.

    Attributes:
        kind: `"argument"` or `"temporary"`.
        name: an argument's path, or the line of the program that makes a temporary.
        array: dtype and shape on one device.
        bytes: as it lies in memory, tiles padded.
        remedy: what would make it smaller.
    """

    kind: str
    name: str
    array: Array
    bytes: int
    remedy: str


def arguments(args: Any, mesh: Mapping[str, int]) -> list[Buffer]:
    """The arguments of a program on one device, largest first; tiles unpadded.

    Args:
        args: a tree of `jax.ShapeDtypeStruct`s or arrays with shardings.
        mesh: sizes of the mesh axes.
    """
    leaves = jax.tree_util.tree_flatten_with_path(args)[0]
    return sorted((_argument(path, leaf, mesh) for path, leaf in leaves), key=lambda buffer: -buffer.bytes)


def _argument(path: Any, leaf: Any, mesh: Mapping[str, int]) -> Buffer:
    sharding = getattr(leaf, "sharding", None)
    shape = tuple(leaf.shape) if sharding is None else sharding.shard_shape(tuple(leaf.shape))
    key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    bits = 8 * leaf.dtype.itemsize if key else jax.dtypes.itemsize_bits(leaf.dtype)
    used = jax.tree.leaves(tuple(getattr(sharding, "spec", ())))
    free = tuple(axis for axis, size in mesh.items() if size > 1 and axis not in used)
    share = prod(mesh[axis] for axis in free)
    remedy = f"shard it over {axes_text(free)} too: up to 1/{share}" if free else "more chips, or fewer bits"
    return Buffer("argument", _path(path), Array(str(leaf.dtype), shape), (prod(shape) * bits + 7) // 8, remedy)


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def temporaries(module: Module) -> list[Buffer]:
    """Values in main memory that a program makes for itself, largest first."""
    fused = {name for each in module.computations.values() for i in each.instructions for name in _inlined(i)}
    made = [
        _temporary(module, instruction, array, size)
        for computation in module.computations.values()
        if computation.name not in fused
        for instruction in computation.instructions
        if instruction.opcode not in _FREE and not instruction.opcode.endswith(_STARTS)
        for array, size in placed(instruction)
    ]
    return sorted(made, key=lambda buffer: -buffer.bytes)


def _inlined(instruction: Instruction) -> Sequence[str]:
    """Computations whose values are never whole: those of fusions and of reductions."""
    return () if instruction.opcode in ("while", "conditional", "call") else instruction.called


def _temporary(module: Module, instruction: Instruction, array: Array, size: int) -> Buffer:
    name = short(module.source(instruction, (OURS,))) or instruction.name
    return Buffer("temporary", name, array, size, "a smaller batch, a layout that shards it, or remat around it")


def placed(instruction: Instruction) -> list[tuple[Array, int]]:
    """An instruction's arrays in main memory, each with the bytes it takes there."""
    found = []
    for dtype, shape, order, tiles, rest in _LAYOUT.findall(instruction.type):
        if "S(" not in (rest or "") or "S(0)" in rest:
            array = Array(dtype, tuple(int(n.removeprefix("<=")) for n in shape.split(",") if n))
            found.append((array, _padded(array, order, tiles)))
    return found


def _padded(array: Array, order: str, tiles: str) -> int:
    """Bytes of an array whose minor dimensions are cut into tiles: `T(8,128)` pads to 8 rows of 128."""
    tile = [int(n) for n in re.findall(r"\d+", tiles.partition(")")[0])] if tiles else []
    shape = [array.shape[int(d)] for d in order.split(",") if d] if order else list(reversed(array.shape))
    shape += [1] * (len(tile) - len(shape))
    for place, size in enumerate(reversed(tile)):
        shape[place] = ceil(shape[place] / size) * size
    return Array(array.dtype, tuple(shape)).bytes


def buffers_table(buffers: Sequence[Buffer], title: str = "largest buffers of one device") -> Table:
    """Buffers as a rich table."""
    table = Table(title=title, title_justify="left")
    for column in ("", "bytes", "what", "shape", "smaller by"):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for buffer in buffers:
        shape = escape(f"{buffer.array.dtype} {list(buffer.array.shape)}")
        table.add_row(buffer.kind, amount_of_bytes(buffer.bytes), escape(buffer.name), shape, buffer.remedy)
    return table
