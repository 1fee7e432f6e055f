"""The memory of a device: the largest arrays of a program, each with advice on how to make it smaller."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Jaxpr
from rich.markup import escape

from gspmd.audit.hlo.module import Array, Instruction, Module
from gspmd.audit.hlo.origin import LAUNCHERS, OURS
from gspmd.audit.ledgers.entries import short
from gspmd.display.tables import Column, Sheet
from gspmd.display.units import amount_of_bytes, axes_text
from gspmd.tracing.jaxprs import inner_jaxprs

_NO_BUFFER = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "constant")
_SMALLER = "a smaller batch or length, or a layout that shards it; in training, remat around it"
KEPT = 64
"""Number of arrays that a report keeps. If the program does not fit, the report prints the five largest arrays."""

# The results of these instructions include their operands; the matching -done has only the result.
_STARTS = ("-start", "-update")
_LAYOUT = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([\d,]*)(?::((?:T\([\d,]+\)(?:\([\d,]+\))*)?)([^}]*))?\})?")


@dataclass(frozen=True)
class AllocatedArray:
    """One array in the memory of a device.

    Attributes:
        kind: `"argument"` or `"temporary"`.
        name: the path of an argument, or the source line that computes a temporary array.
        array: dtype and shape of the part of the array on one device.
        bytes: bytes in memory; for the temporaries of a compiled program, including the padding to tiles.
        remedy: advice on how to make the array smaller.
    """

    kind: str
    name: str
    array: Array
    bytes: int
    remedy: str


def arguments(args: Any, mesh: Mapping[str, int]) -> list[AllocatedArray]:
    """Return the arguments of a program that are in the memory of a device, largest first.

    Arguments in host memory are left out. Bytes do not include padding to tiles.

    Args:
        args: a tree of `jax.ShapeDtypeStruct`s or arrays with shardings.
        mesh: sizes of the mesh axes.
    """
    leaves = jax.tree_util.tree_flatten_with_path(args)[0]
    on_device = ((path, leaf) for path, leaf in leaves if hasattr(leaf, "dtype") and not _on_host(leaf))
    return sorted((_argument(path, leaf, mesh) for path, leaf in on_device), key=lambda buffer: -buffer.bytes)


def _on_host(leaf: Any) -> bool:
    """Return whether an argument is in host memory."""
    return "host" in (getattr(getattr(leaf, "sharding", None), "memory_kind", None) or "")


def values(jaxpr: Jaxpr, manual: bool = False) -> list[AllocatedArray]:
    """Return the values that a traced function computes, each as its part on one device, largest first.

    Only values whose types state a sharding are returned. Types state a sharding under Explicit axes, and inside a
    shard_map. Values in host memory are left out.

    Args:
        jaxpr: the traced function.
        manual: whether the function is the body of a shard_map.

    Leaves out: fusion, by which the compiler removes some values; the use of one buffer for several values.
    """
    buffers: list[AllocatedArray | None] = []
    for equation in jaxpr.eqns:
        inner = [*inner_jaxprs(equation)]
        for each in inner:
            buffers += values(each, manual or equation.primitive.name == "shard_map")
        if not inner or equation.primitive.name == "scan":
            buffers += [_value(var.aval, equation, manual) for var in equation.outvars if hasattr(var.aval, "shape")]
    return sorted(filter(None, buffers), key=lambda buffer: -buffer.bytes)[:KEPT]


def _value(aval: Any, equation: Any, manual: bool) -> AllocatedArray | None:
    explicit = set(getattr(aval.sharding.mesh, "axis_types", ())) == {jax.sharding.AxisType.Explicit}
    weightless = aval.dtype == jax.dtypes.float0 or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    if weightless or aval.memory_space == jax.memory.Space.Host or not (manual or explicit):
        return None
    shape = tuple(aval.shape) if manual else aval.sharding.shard_shape(tuple(aval.shape))
    size = (prod(shape) * jax.dtypes.itemsize_bits(aval.dtype) + 7) // 8
    return AllocatedArray("temporary", _line(equation), Array(str(aval.dtype), shape), size, _SMALLER)


def _line(equation: Any) -> str:
    """Return the source line that computes a value, from the innermost stack frame outside of this package and of JAX.

    If there is no such frame, return the name of the primitive.
    """
    frames = equation.source_info.traceback.frames if equation.source_info.traceback else ()
    ours = (OURS, *LAUNCHERS, str(Path(jax.__file__).parent))
    line = next((f"{f.file_name}:{f.line_num}" for f in frames if not f.file_name.startswith(ours)), "")
    return short(line) or str(equation.primitive)


def _argument(path: Any, leaf: Any, mesh: Mapping[str, int]) -> AllocatedArray:
    sharding = getattr(leaf, "sharding", None)
    shape = tuple(leaf.shape) if sharding is None else sharding.shard_shape(tuple(leaf.shape))
    key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    bits = 8 * leaf.dtype.itemsize if key else jax.dtypes.itemsize_bits(leaf.dtype)
    used = jax.tree.leaves(tuple(getattr(sharding, "spec", ())))
    free = tuple(axis for axis, size in mesh.items() if size > 1 and axis not in used)
    share = prod(mesh[axis] for axis in free)
    remedy = f"shard it over {axes_text(free)} too: up to 1/{share}" if free else "more chips, or fewer bits"
    return AllocatedArray("argument", _path(path), Array(str(leaf.dtype), shape), (prod(shape) * bits + 7) // 8, remedy)


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def temporaries(module: Module) -> list[AllocatedArray]:
    """Return the arrays that a program computes in main memory, largest first."""
    fused = {name for each in module.computations.values() for i in each.instructions for name in _inlined(i)}
    made = [
        _temporary(module, instruction, array, size)
        for computation in module.computations.values()
        if computation.name not in fused
        for instruction in computation.instructions
        if instruction.opcode not in _NO_BUFFER and not instruction.opcode.endswith(_STARTS)
        for array, size in placed(instruction)
    ]
    return sorted(made, key=lambda buffer: -buffer.bytes)


def _inlined(instruction: Instruction) -> Sequence[str]:
    """Return the names of those computations that an instruction runs without storing their values in memory.

    These are, for example, the computations of fusions and reductions.
    """
    return () if instruction.opcode in ("while", "conditional", "call") else instruction.called


def _temporary(module: Module, instruction: Instruction, array: Array, size: int) -> AllocatedArray:
    name = short(module.source(instruction, (OURS, *LAUNCHERS))) or instruction.name
    return AllocatedArray("temporary", name, array, size, _SMALLER)


def placed(instruction: Instruction) -> list[tuple[Array, int]]:
    """Return the result arrays of an instruction that are in main memory, each with its bytes including padding."""
    arrays = []
    for dtype, shape, order, tiles, rest in _LAYOUT.findall(instruction.type):
        if "S(" not in (rest or "") or "S(0)" in rest:
            array = Array(dtype, tuple(int(n.removeprefix("<=")) for n in shape.split(",") if n))
            arrays.append((array, _padded(array, order, tiles)))
    return arrays


def _padded(array: Array, order: str, tiles: str) -> int:
    """Return the bytes of an array whose minor dimensions are padded to whole tiles.

    Args:
        array: the array.
        order: the dimensions in the order of memory, from minor to major, as a text such as `1,0`.
        tiles: the text of the tiles in a memory layout. For example, `T(8,128)` means tiles of 8 × 128 elements.
    """
    tile = [int(n) for n in re.findall(r"\d+", tiles.partition(")")[0])] if tiles else []
    shape = [array.shape[int(d)] for d in order.split(",") if d] if order else list(reversed(array.shape))
    shape += [1] * (len(tile) - len(shape))
    for place, size in enumerate(reversed(tile)):
        shape[place] = ceil(shape[place] / size) * size
    return Array(array.dtype, tuple(shape)).bytes


def buffers_table(
    buffers: Sequence[AllocatedArray], most: int = KEPT, title: str = "largest buffers of one device"
) -> Sheet:
    """Return a table of the largest arrays; equal arrays share a row.

    Args:
        buffers: the arrays.
        most: maximum number of rows.
        title: title of the table.
    """
    alike = Counter(buffers)
    sheet = Sheet(title, _COLUMNS)
    for buffer in sorted(alike, key=lambda buffer: -buffer.bytes)[:most]:
        shape = escape(f"{buffer.array.dtype} {list(buffer.array.shape)}")
        times = f"{alike[buffer]} × " if alike[buffer] > 1 else ""
        sheet.add(buffer.kind, times + amount_of_bytes(buffer.bytes), escape(buffer.name), shape, buffer.remedy)
    return sheet


_COLUMNS = (
    Column("", goes=3),
    Column("bytes", "right"),
    Column("what"),
    Column("shape", goes=1),
    Column("smaller by", folds=True, goes=2),
)
