"""The time of one instruction: the compiler's estimate, a model of GPU kernels, or a roofline.

The roofline has two limits: the matrix unit and main memory.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gspmd.audit.hlo.bundles import least_seconds
from gspmd.audit.hlo.flops import ATTENTION, product, product_flops
from gspmd.audit.hlo.module import Computation, Instruction, Module
from gspmd.hardware.chips import Chip
from gspmd.hardware.matmul import Traffic, kernel_seconds, seconds_with_traffic

FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id"),
    *("after-all", "add-dependency", "opt-barrier", "optimization-barrier", "domain", "async-update"),
    *("recv", "recv-done", "send-done"),
)
"""Opcodes that only name a value, allocate or wait: they take no time."""

_PLACED = re.compile(r"\b[a-z]\w*\[[\d,<=]*\](\{[^}]*\})?")
_CHIP = re.compile(r"S\((?!0\)|5\))\d+\)")  # On-chip memory: space 0 is main memory, 5 the host's.
_PARTS = ("dynamic-slice", "slice", "gather")
_LIBRARIES = ("__cublas", "__cudnn")
SCATTER_EFFICIENCY = 0.11
"""The fraction of main memory's bandwidth that a scatter reaches on a GPU, where its updates are atomic.

Source: benchmarks/results/device-h200.json, `scatter-add`: 650 us, of which two copies take 147 us.
"""
_PRECISION = re.compile(r"\w+")
_ALIASED = re.compile(r": \((\d+),")


@dataclass(frozen=True)
class Cost:
    """The cost of one execution of one instruction.

    Attributes:
        seconds: predicted duration of the execution.
        flops: FLOPs of its matrix products.
        bytes: bytes read from and written to main memory.
        memory_bound: whether the bytes take longer than the products, at the chip's peak bandwidth and peak FLOP/s.
    """

    seconds: float
    flops: int = 0
    bytes: int = 0
    memory_bound: bool = False


def cost(module: Module, computation: Computation, instruction: Instruction, chip: Chip) -> Cost:
    """Return the cost of an instruction that does not communicate with other devices.

    Args:
        module: the program.
        computation: the computation that contains the instruction.
        instruction: any except a collective, a loop, a conditional or a call.
        chip: the hardware.

    Returns:
        The cost. Its seconds are the compiler's estimated cycles divided by the clock, if there is an estimate (only
        the TPU compiler makes estimates). For a Pallas kernel whose work the program states, they are the seconds of
        its schedule; for instructions that only name a value, allocate a buffer, or compute scalars, zero; for a
        product whose estimate overflowed, a fit to such estimates (`gspmd.hardware.matmul.product_seconds`); otherwise
        the roofline: max(flops / peak, bytes / memory bandwidth). On a GPU every kernel takes time, even for scalars: a
        product takes as long as in cuBLAS (`gspmd.hardware.matmul.product_seconds`), fused attention takes the time of
        its FLOPs plus that of its bytes, at the rates that cuDNN reaches, and any other kernel takes the time of its
        bytes, at the bandwidth that kernels reach.
    """
    if not runs(computation, instruction, chip):
        return Cost(0.0)
    if chip.is_switch:
        return _on_gpu(module, computation, instruction, chip)
    if work := instruction.kernel_work:
        schedule = module.kernels.get(instruction.name)
        seconds = schedule.seconds(work, chip) if schedule else least_seconds(work, chip)
        bound = work.bytes / chip.hbm_bandwidth > work.flops / chip.flops("bfloat16")
        return Cost(seconds, work.flops, work.bytes, bound)
    flops, moved = product_flops(module, computation, instruction), traffic(module, computation, instruction)
    arithmetic = _arithmetic(module, computation, instruction, chip)
    products, memory = flops / chip.flops(arithmetic), moved.bytes / chip.hbm_bandwidth
    seconds = instruction.cycles / chip.clock or max(products, memory)
    if instruction.cycles_overflowed and (found := product(module, computation, instruction)):
        seconds = seconds_with_traffic(found.sizes, moved, arithmetic, chip)
    return Cost(seconds, flops, int(moved.bytes), memory > products)


def runs(computation: Computation, instruction: Instruction, chip: Chip) -> bool:
    """Return whether an instruction takes time: it computes something and, on a TPU, more than scalars.

    A custom call without operands allocates a buffer.
    """
    if instruction.opcode in FREE or (instruction.opcode == "custom-call" and not instruction.operands):
        return False
    if instruction.cycles or chip.is_switch:
        return True
    seen = [instruction, *(computation.by_name[name] for name in instruction.operands)]
    return any(array.size > 1 for each in seen for array in each.arrays)


def _on_gpu(module: Module, computation: Computation, kernel: Instruction, chip: Chip) -> Cost:
    """Return the cost of a GPU kernel."""
    flops, moved = product_flops(module, computation, kernel), traffic(module, computation, kernel)
    found = product(module, computation, kernel)
    arithmetic = found.dtype if found else "bfloat16"
    if arithmetic == "tensorfloat32":
        arithmetic = chip.arithmetic("float32")  # On AMD's GPUs XLA does not use it.
    memory_bound = moved.bytes / chip.hbm_bandwidth > flops / chip.flops(arithmetic)
    if found:
        seconds = seconds_with_traffic(found.sizes, moved, arithmetic, chip)
    elif kernel.target in ATTENTION:
        rate = chip.bf16_flops * chip.attention_efficiency
        seconds = flops / rate + kernel_seconds(0, moved.bytes, chip)
    elif _scatters(module, kernel):
        seconds = moved.bytes / (chip.hbm_bandwidth * SCATTER_EFFICIENCY) + chip.kernel_seconds
    else:
        seconds = kernel_seconds(flops, moved.bytes, chip)
    return Cost(seconds, flops, int(moved.bytes), memory_bound)


def _scatters(module: Module, kernel: Instruction) -> bool:
    if kernel.opcode == "fusion":
        return any(_scatters(module, each) for each in module.computations[kernel.called[0]].instructions)
    return kernel.opcode == "scatter"


def _arithmetic(module: Module, computation: Computation, instruction: Instruction, chip: Chip) -> str:
    """Return the arithmetic whose peak applies on a TPU, from the first operand's dtype and the products' precision."""
    first = computation.by_name[instruction.operands[0]].arrays[:1] if instruction.operands else ()
    dtype = {"f32": "float32", "f64": "float64"}.get(first[0].dtype, "bfloat16") if first else "bfloat16"
    inner = module.computations[instruction.called[0]].instructions if instruction.opcode == "fusion" else [instruction]
    asked = {each for one in inner for each in _PRECISION.findall(one.attribute("operand_precision"))}
    return chip.arithmetic(dtype, next((name for name in ("highest", "high") if name in asked), "default"))


def traffic(module: Module, computation: Computation, instruction: Instruction) -> Traffic:
    """Return the bytes that an instruction reads from main memory and writes to it.

    Arrays in on-chip memory (`S(1)`, ... in their layouts) do not count. If an array is sliced, only the slice counts;
    if it is updated in place or scattered into, only the update counts. An array in host memory (`S(5)`) counts as if
    it were in main memory; this is a lower bound, since the link to the host is slower.

    Source: memory spaces as openxla/xla numbers them, `Layout::kHostMemorySpace` (`layout.h`).
    """
    inner = module.computations[instruction.called[0]] if instruction.opcode == "fusion" else None
    read = 0
    for number, name in enumerate(instruction.operands):
        source = computation.by_name[name]
        if all(_in_memory(source)):
            read += _read(module, inner, number) if inner else _taken(instruction, number, source)
    written = list(_written(inner, inner.root)) if inner else [_made(computation, instruction)]
    placed = list(_in_memory(instruction))
    if len(written) != len(placed):
        written, placed = [sum(written)], [all(placed)]
    return Traffic(read, sum(size for size, there in zip(written, placed) if there))


def _in_memory(instruction: Instruction) -> Iterator[bool]:
    """Yield, for each array of the result, whether it is in main memory."""
    for layout in _PLACED.finditer(instruction.type):
        yield not _CHIP.search(layout[1] or "")


def _updates(instruction: Instruction) -> slice:
    """Return the positions of those operands that are updates, written in place into the first operands.

    The slice is empty for most instructions.
    """
    if instruction.opcode == "dynamic-update-slice":
        return slice(1, 2)
    arrays = len(instruction.operands) // 2 if instruction.opcode == "scatter" else 0
    return slice(arrays + 1, 2 * arrays + 1)  # The operands of a scatter are n arrays, indices, and n updates.


def _taken(user: Instruction, number: int, source: Instruction) -> int:
    """Return the number of bytes that an instruction reads of an operand."""
    if number == 0 and user.opcode in _PARTS:
        return user.bytes
    return 0 if number < len(user.operands[_updates(user)]) else source.bytes


def _made(computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that an instruction writes.

    The last result of a library's call may be its workspace, which does not count.
    """
    updates = instruction.operands[_updates(instruction)]
    if updates:
        return sum(computation.by_name[name].bytes for name in updates)
    arrays = instruction.arrays
    has_workspace = instruction.target.startswith(_LIBRARIES) and len(arrays) > 1 and arrays[-1].dtype in ("s8", "u8")
    return sum(array.bytes for array in (arrays[:-1] if has_workspace else arrays))


def _read(module: Module, inner: Computation, number: int) -> int:
    """Return the number of bytes that a fusion reads of one operand."""
    parameter = inner.parameters[number]
    return min(parameter.bytes, _used(module, inner, parameter))


def _used(module: Module, inner: Computation, value: Instruction) -> int:
    total = 0
    for user in inner.instructions:
        renamed: list[int] = []
        read: list[int] = []
        for number, name in enumerate(user.operands):
            if name == value.name:
                (renamed if number in _aliased(user) else read).append(number)
        if renamed:
            total += _used(module, inner, user)
        if read and user.opcode == "fusion":
            total += sum(_read(module, module.computations[user.called[0]], number) for number in read)
        elif read:
            total += max(_taken(user, number, value) for number in read)
    return total


def _aliased(instruction: Instruction) -> set[int]:
    """Return the positions of operands that share the memory of the result under a different type or name."""
    if instruction.opcode == "bitcast":
        return {0}
    return {int(number) for number in _ALIASED.findall(instruction.attribute("output_to_operand_aliasing"))}


def _written(inner: Computation, root: Instruction) -> Iterator[int]:
    """Yield, for each array that a fusion returns, the bytes that it writes."""
    while root.opcode == "bitcast":
        root = inner.by_name[root.operands[0]]
    if root.opcode == "tuple":
        for name in root.operands:
            yield from _written(inner, inner.by_name[name])
    else:
        yield _made(inner, root)
