"""What one instruction takes: the compiler's own estimate, or else the slower of matrix unit and memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gspmd.audit.hlo.flops import product_flops
from gspmd.audit.hlo.module import Computation, Instruction, Module
from gspmd.hardware.chips import Chip

FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id"),
    *("after-all", "add-dependency", "opt-barrier", "optimization-barrier", "domain", "async-update"),
    *("recv", "recv-done", "send-done"),
)
"""Opcodes that name something, make room or wait for it, and run nothing."""

_PLACED = re.compile(r"\b[a-z]\w*\[[\d,<=]*\](\{[^}]*\})?")
_CHIP = re.compile(r"S\((?!0\)|5\))\d+\)")  # 0 is main memory, 5 the host's
_PARTS = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True)
class Cost:
    """One execution of one instruction.

    Attributes:
        seconds: that it takes.
        flops: of its matrix products.
        bytes: that it reads from the chip's main memory and writes there.
        waits: whether those bytes take longer than the products do, both at the chip's peak.
    """

    seconds: float
    flops: int = 0
    bytes: int = 0
    waits: bool = False


def cost(module: Module, computation: Computation, instruction: Instruction, chip: Chip) -> Cost:
    """What an instruction takes that runs on the chip alone.

    Args:
        module: the whole program.
        computation: where it stands.
        instruction: no collective, and nothing that runs other computations one by one.
        chip: that runs it.

    Returns:
        The compiler's estimated cycles over the clock, where it makes an estimate (only the TPU compiler does); nothing
        for what only names something, takes a buffer, or works on single numbers; otherwise the roofline: the longer of
        the matrix products at the chip's peak and the bytes at the bandwidth of its main memory.
    """
    if instruction.opcode in FREE or not (instruction.cycles or _runs(computation, instruction)):
        return Cost(0.0)
    flops = product_flops(module, computation, instruction)
    moved = traffic(module, computation, instruction)
    products, memory = flops / chip.flops(_dtype(computation, instruction)), moved / chip.hbm_bandwidth
    estimate = instruction.cycles / chip.clock
    return Cost(estimate or max(products, memory), flops, moved, memory > products)


def _runs(computation: Computation, instruction: Instruction) -> bool:
    """Whether an instruction does anything with arrays; a custom call without operands is a buffer."""
    if instruction.opcode == "custom-call" and not instruction.operands:
        return False
    seen = [instruction, *(computation.by_name[name] for name in instruction.operands)]
    return any(array.size > 1 for each in seen for array in each.arrays)


def _dtype(computation: Computation, instruction: Instruction) -> str:
    """Float32 where a product's first operand is: its peak is another."""
    first = computation.by_name[instruction.operands[0]].arrays[:1] if instruction.operands else ()
    return "float32" if first and first[0].dtype in ("f32", "f64") else "bfloat16"


def traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction reads from main memory and writes there.

    Arrays that the compiler placed in a memory of the chip (`S(1)` and so on in their layouts) have none. Of an array
    that is only sliced the slices count, and of one that is updated in place the update. An array in the host's memory
    (`S(5)`) counts as if it lay in main memory, the least that it can take: the link to the host is slower.

    Source: memory spaces as openxla/xla numbers them, `Layout::kHostMemorySpace` (`layout.h`).
    """
    inner = module.computations[instruction.called[0]] if instruction.opcode == "fusion" else None
    total = 0
    for number, name in enumerate(instruction.operands):
        source = computation.by_name[name]
        if all(_in_memory(source)):
            total += _read(module, inner, number) if inner else _taken(instruction, source)
    written = list(_written(inner, inner.root)) if inner else [_made(computation, instruction)]
    placed = list(_in_memory(instruction))
    if len(written) != len(placed):
        written, placed = [sum(written)], [all(placed)]
    return total + sum(size for size, there in zip(written, placed) if there)


def _in_memory(instruction: Instruction) -> Iterator[bool]:
    """For each array of the result, whether it lies in main memory."""
    for found in _PLACED.finditer(instruction.type):
        yield not _CHIP.search(found[1] or "")


def _taken(user: Instruction, source: Instruction) -> int:
    """Bytes of an operand that an instruction reads."""
    first = user.operands[0] == source.name
    if first and user.opcode in _PARTS:
        return user.bytes
    return 0 if first and user.opcode == "dynamic-update-slice" else source.bytes


def _made(computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction writes."""
    if instruction.opcode == "dynamic-update-slice":
        return computation.by_name[instruction.operands[1]].bytes
    return instruction.bytes


def _read(module: Module, inner: Computation, number: int) -> int:
    """Bytes that a fusion reads of its operand of this number."""
    parameter = inner.parameters[number]
    return min(parameter.bytes, _used(module, inner, parameter))


def _used(module: Module, inner: Computation, value: Instruction) -> int:
    total = 0
    for user in inner.instructions:
        if value.name not in user.operands:
            continue
        if user.opcode == "bitcast":
            total += _used(module, inner, user)
        elif user.opcode == "fusion":
            nested = module.computations[user.called[0]]
            total += sum(_read(module, nested, n) for n, name in enumerate(user.operands) if name == value.name)
        else:
            total += _taken(user, value)
    return total


def _written(inner: Computation, root: Instruction) -> Iterator[int]:
    """Bytes of each array that a fusion writes."""
    while root.opcode == "bitcast":
        root = inner.by_name[root.operands[0]]
    if root.opcode == "tuple":
        for name in root.operands:
            yield from _written(inner, inner.by_name[name])
    else:
        yield _made(inner, root)
