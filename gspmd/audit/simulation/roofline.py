"""The time of one instruction, from the compiler's estimate, a model of GPU kernels, or a roofline.

The two limits of the roofline are the rate of the matrix unit and the bandwidth of main memory.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gspmd.audit.hlo.bundles import least_seconds
from gspmd.audit.hlo.flops import ATTENTION, product, product_flops
from gspmd.audit.hlo.module import Computation, Instruction, Module
from gspmd.hardware.chips import Chip
from gspmd.hardware.matmul import Efficiency, Traffic, kernel_seconds, seconds_with_traffic, timed_kernels

FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id"),
    *("after-all", "add-dependency", "opt-barrier", "optimization-barrier", "domain", "async-update"),
    *("recv", "recv-done", "send-done"),
)
"""Opcodes of instructions that take no time, because they only name a value, allocate a buffer or wait."""

_PLACED = re.compile(r"\b[a-z]\w*\[[\d,<=]*\](\{[^}]*\})?")
HOST = "S(5)"
"""Host memory, as memory layouts write it.

Source: openxla/xla, `Layout::kHostMemorySpace` (`layout.h`).
"""
_REORDERING = ("copy", "transpose", "concatenate", "pad", "gather", "scatter", "sort", "reverse")
"""Opcodes of instructions that may move data within tiles. Nobody has published their time on a TPU."""
_UNTIMED = ("ragged-dot", "custom-call", "rng-bit-generator", "fft", "cholesky", "triangular-solve")
"""Opcodes of further instructions whose time on a TPU nobody has published, and whose bytes do not tell it."""
_SMALL = 0.1
"""The share of an instruction's bytes below which it does not matter where they are, and whether they are reordered.

For example, a product of few rows may reorder these rows, while it reads the weights as they are.
"""
_CHIP = re.compile(r"S\((?!0\)|5\))\d+\)")  # On-chip memory: space 0 is main memory, and 5 is host memory.
_PARTS = ("dynamic-slice", "slice", "gather")
_LIBRARIES = ("__cublas", "__cudnn")
SCATTER_EFFICIENCY = 0.11
"""The fraction of main memory's bandwidth that a scatter reaches on a GPU, where the updates of a scatter are atomic.

Source: benchmarks/results/device-h200.json, `scatter-add`. The measured 650 us include two copies, which take 147 us.
"""
_PRECISION = re.compile(r"\w+")
_ALIASED = re.compile(r": \((\d+),")


@dataclass(frozen=True)
class Cost:
    """The cost of one execution of one instruction.

    Attributes:
        seconds: predicted time of the execution, in seconds.
        flops: FLOPs of the instruction's matrix products.
        bytes: bytes read from and written to main memory.
        memory_bound: whether the bytes at the chip's peak memory bandwidth take longer than the matrix products at the
            chip's peak FLOP/s.
        memory_share: the share of main memory's time that the execution needs, so that copies that run beside it have
            only the rest. It is 0 on a chip whose kernels have not been timed, where this is not modelled.
    """

    seconds: float
    flops: int = 0
    bytes: int = 0
    memory_bound: bool = False
    memory_share: float = 0.0


def cost(module: Module, computation: Computation, instruction: Instruction, chip: Chip) -> Cost:
    """Return the cost of an instruction that does not communicate with other devices.

    On a TPU, the seconds of the cost are given by the first of these rules that applies:

    - Instructions that only name a value or allocate a buffer take no time. Instructions that compute only scalars take
      no time either, unless the compiler states an estimate of their cycles.
    - A Pallas kernel whose work the program states takes the seconds of the kernel's schedule, or a lower bound if
      there is no schedule.
    - On a chip whose kernels have been timed (`timed` in matmul.toml), an instruction that reads or writes main memory
      takes the seconds that timed kernels take for the same FLOPs and bytes. Relative to the seconds of the next rule,
      they stay between the least and the greatest share that timed kernels take (`least_share`, `most_share`). The next
      rule alone holds for kinds of instructions that have not been timed. If almost all bytes of an instruction are in
      on-chip memory, it takes the seconds of the next rule, less those by which estimates exceed timed instructions.
    - If the compiler states an estimate, an instruction takes the estimated cycles, divided by the chip's clock. Only
      the TPU compiler makes estimates.
    - A product whose estimate overflowed takes the time that is fitted to the estimates of other products
      (`gspmd.hardware.matmul.product_seconds`).
    - Any other instruction takes the time of the roofline, max(flops / peak FLOP/s, bytes / memory bandwidth).

    On a GPU, every kernel takes time, even a kernel that computes only scalars. A product takes as long as in cuBLAS
    (`gspmd.hardware.matmul.product_seconds`). Fused attention takes the time of its FLOPs plus the time of its bytes,
    at the rates that cuDNN reaches. A scatter takes the time of its bytes at `SCATTER_EFFICIENCY` of the memory
    bandwidth. Any other kernel takes the time of its bytes at the memory bandwidth that kernels reach.

    Args:
        module: the program.
        computation: the computation that contains the instruction.
        instruction: any instruction except a collective, a loop, a conditional or a call.
        chip: the hardware.

    Returns:
        The cost of one execution.
    """
    if not runs(computation, instruction, chip):
        return Cost(0.0)
    if chip.is_switch:
        return _on_gpu(module, computation, instruction, chip)
    if work := instruction.kernel_work:
        schedule = module.kernels.get(instruction.name)
        seconds = schedule.seconds(work, chip) if schedule else least_seconds(work, chip)
        bound = work.bytes / chip.hbm_bandwidth > work.flops / chip.flops("bfloat16")
        return Cost(seconds, work.flops, work.bytes, bound, _memory_share(Traffic(work.bytes, 0), seconds, chip))
    flops, moved = product_flops(module, computation, instruction), traffic(module, computation, instruction)
    arithmetic = _arithmetic(module, computation, instruction, chip)
    products, memory = flops / chip.flops(arithmetic), moved.bytes / chip.hbm_bandwidth
    seconds = instruction.cycles / chip.clock or max(products, memory)
    if instruction.cycles_overflowed and (found := product(module, computation, instruction)):
        seconds = seconds_with_traffic(found.sizes, moved, arithmetic, chip)
    if timed := timed_kernels(chip):
        seconds = _as_timed(module, computation, instruction, Cost(seconds, flops), moved, arithmetic, chip, timed)
    return Cost(seconds, flops, int(moved.bytes), memory > products, _memory_share(moved, seconds, chip))


def _memory_share(moved: Traffic, seconds: float, chip: Chip) -> float:
    """Return the share of main memory's time that an execution needs; 0 if the kernels of the chip are not timed."""
    timed = timed_kernels(chip)
    return min(1.0, timed.memory_seconds(moved, chip) / seconds) if timed and seconds else 0.0


def _as_timed(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    estimated: Cost,
    moved: Traffic,
    arithmetic: str,
    chip: Chip,
    timed: Efficiency,
) -> float:
    """Return the seconds of an instruction, given its `estimated` cost, on a TPU whose kernels have been timed."""
    products = estimated.flops / (chip.flops(arithmetic) * timed.matrix_efficiency)
    memory, seconds = timed.memory_seconds(moved, chip), estimated.seconds
    if moved.bytes < _SMALL * _bytes_on_chip(module, computation, instruction):
        # The fastest timed instruction bounds what is left of the smallest estimates.
        return max(seconds - timed.excess_seconds, products, memory, min(seconds, timed.least_seconds))
    # A fusion reshapes without moving data; what is left of a reshape by itself reorders it.
    if instruction.opcode == "reshape" or not _resembles_timed(module, instruction, _SMALL * moved.bytes):
        return max(seconds, memory)
    found = timed.overhead_seconds + timed.together(products, memory)
    if not instruction.cycles:
        return found
    # An estimate far above the time of the bytes may mean computation that the bytes do not show, and one far below it
    # that an array is not read as a whole. So the time stays between the shares that timed kernels take of theirs. On a
    # v5e no timed kernel took longer than its estimate.
    return min(max(found, timed.least_share * seconds), timed.most_share * seconds)


def _resembles_timed(module: Module, instruction: Instruction, small: float) -> bool:
    """Return whether an instruction is of a kind that has been timed on a TPU.

    It is not if it may reorder data within tiles, in an array of more than `small` bytes.
    """
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]].instructions
        return all(_resembles_timed(module, each, small) for each in inner)
    reorders = instruction.opcode in _REORDERING and instruction.bytes > small
    return not reorders and instruction.opcode not in _UNTIMED


def runs(computation: Computation, instruction: Instruction, chip: Chip) -> bool:
    """Return whether an instruction takes time.

    Instructions that only name a value, allocate a buffer or wait take no time; a custom call without operands
    allocates a buffer. On a TPU, instructions that compute only scalars take no time either, unless the compiler states
    an estimate of their cycles.
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
    """Return the arithmetic in which a TPU computes the products of an instruction, as an argument of `Chip.flops`.

    It depends on the dtype of the first operand and on the precision that the matrix products request.
    """
    first = computation.by_name[instruction.operands[0]].arrays[:1] if instruction.operands else ()
    dtype = {"f32": "float32", "f64": "float64"}.get(first[0].dtype, "bfloat16") if first else "bfloat16"
    inner = module.computations[instruction.called[0]].instructions if instruction.opcode == "fusion" else [instruction]
    asked = {each for one in inner for each in _PRECISION.findall(one.attribute("operand_precision"))}
    return chip.arithmetic(dtype, next((name for name in ("highest", "high") if name in asked), "default"))


def traffic(module: Module, computation: Computation, instruction: Instruction) -> Traffic:
    """Return the bytes that an instruction reads from main memory, and the bytes that it writes to main memory.

    Arrays in on-chip memory, whose layouts contain `S(1)` or the like, are not counted. If an array is sliced, only the
    slice is counted. If an array is updated in place or scattered into, only the update is counted. An array in host
    memory (`HOST`) is counted as if it were in main memory. The resulting time is then a lower bound, because the link
    to the host is slower.
    """
    every = list(_accesses(module, computation, instruction))
    read, written = (
        sum(each.bytes for each in every if each.in_memory and each.writes is way) for way in (False, True)
    )
    return Traffic(read, written)


class _Access(NamedTuple):
    """The bytes of one array that an instruction reads or writes, and whether the array is in main memory."""

    bytes: int
    writes: bool
    in_memory: bool


def _accesses(module: Module, computation: Computation, instruction: Instruction) -> Iterator[_Access]:
    inner = module.computations[instruction.called[0]] if instruction.opcode == "fusion" else None
    for number, name in enumerate(instruction.operands):
        source = computation.by_name[name]
        taken = _read(module, inner, number) if inner else _taken(instruction, number, source)
        yield _Access(taken, False, in_memory(source))
    written = list(_written(inner, inner.root)) if inner else [_made(computation, instruction)]
    placed = list(_in_memory(instruction))
    if len(written) != len(placed):
        written, placed = [sum(written)], [all(placed)]
    yield from (_Access(size, True, there) for size, there in zip(written, placed))


def _bytes_on_chip(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that an instruction reads from and writes to on-chip memory."""
    return sum(each.bytes for each in _accesses(module, computation, instruction) if not each.in_memory)


def in_memory(instruction: Instruction) -> bool:
    """Return whether all arrays of an instruction's result are outside of on-chip memory."""
    return all(_in_memory(instruction))


def _in_memory(instruction: Instruction) -> Iterator[bool]:
    """Yield, for each array of an instruction's result, whether the array is outside of on-chip memory."""
    for layout in _PLACED.finditer(instruction.type):
        yield not _CHIP.search(layout[1] or "")


def _updates(instruction: Instruction) -> slice:
    """Return the positions of the operands that are updates, which the instruction writes in place into other operands.

    The result is an empty slice for all instructions except dynamic-update-slice and scatter.
    """
    if instruction.opcode == "dynamic-update-slice":
        return slice(1, 2)
    arrays = len(instruction.operands) // 2 if instruction.opcode == "scatter" else 0
    return slice(arrays + 1, 2 * arrays + 1)  # The operands of a scatter are n arrays, indices, and n updates.


def _taken(user: Instruction, number: int, source: Instruction) -> int:
    """Return the number of bytes that an instruction reads from operand `number`, which `source` computes."""
    if number == 0 and user.opcode in _PARTS:
        return user.bytes
    return 0 if number < len(user.operands[_updates(user)]) else source.bytes


def _made(computation: Computation, instruction: Instruction) -> int:
    """Return the number of bytes that an instruction writes.

    The last result of a library call may be the workspace of the library, which is not counted.
    """
    updates = instruction.operands[_updates(instruction)]
    if updates:
        return sum(computation.by_name[name].bytes for name in updates)
    arrays = instruction.arrays
    has_workspace = instruction.target.startswith(_LIBRARIES) and len(arrays) > 1 and arrays[-1].dtype in ("s8", "u8")
    return sum(array.bytes for array in (arrays[:-1] if has_workspace else arrays))


def _read(module: Module, inner: Computation, number: int) -> int:
    """Return the number of bytes that a fusion reads from operand `number`."""
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
            nested = module.computations[user.called[0]]
            total += sum(_read(module, nested, number) for number in read)
            if _renamed(module, nested) in [nested.parameters[number] for number in read]:
                total += _used(module, inner, user)  # The nested fusion only renames it.
        elif read:
            total += max(_taken(user, number, value) for number in read)
    return total


def _renamed(module: Module, nested: Computation) -> Instruction:
    """Return the value that a fusion returns, before the bitcasts and fusions that only rename it."""
    root = nested.root
    while root.opcode in ("bitcast", "fusion"):
        number = 0
        if root.opcode == "fusion":
            inner = module.computations[root.called[0]]
            source = _renamed(module, inner)
            renamed = [n for n, parameter in inner.parameters.items() if parameter is source]
            if not renamed:
                return root
            (number,) = renamed
        root = nested.by_name[root.operands[number]]
    return root


def _aliased(instruction: Instruction) -> set[int]:
    """Return the positions of the operands that share their memory with the result."""
    if instruction.opcode == "bitcast":
        return {0}
    return {int(number) for number in _ALIASED.findall(instruction.attribute("output_to_operand_aliasing"))}


def _written(inner: Computation, root: Instruction) -> Iterator[int]:
    """Yield, for each array that a fusion returns, the number of bytes that are written."""
    while root.opcode == "bitcast":
        root = inner.by_name[root.operands[0]]
    if root.opcode == "tuple":
        for name in root.operands:
            yield from _written(inner, inner.by_name[name])
    else:
        yield _made(inner, root)
