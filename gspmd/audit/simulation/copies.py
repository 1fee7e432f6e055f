"""Asynchronous copies: the bytes that they move, and the memories between which these bytes move."""

from dataclasses import dataclass

from gspmd.audit.hlo.module import Computation, Instruction, Module
from gspmd.audit.simulation.links import FROM_HOST, TO_HOST, Link
from gspmd.audit.simulation.roofline import HOST, in_memory, traffic
from gspmd.hardware.matmul import Traffic

_NOTHING = Traffic(0, 0)


@dataclass(frozen=True)
class Copy:
    """An asynchronous copy.

    Attributes:
        bytes: bytes that are moved. For a slice, they are the bytes of the slice. For an update of a slice in place,
            they are the bytes of the update.
        direction: `TO_HOST` or `FROM_HOST`; None if both memories belong to the device.
        moved: the bytes that are read from and written to main memory, of a copy without a direction.
    """

    bytes: int
    direction: Link | None
    moved: Traffic = _NOTHING


def started_copy(module: Module, computation: Computation, instruction: Instruction) -> Copy:
    """Return the copy that an instruction starts.

    Args:
        module: the program.
        computation: the computation of the instruction.
        instruction: a copy, a slice, or an update of a slice, whose opcode ends with `-start`. It may be wrapped:
            the opcode is then `async-start`, or `fusion-start` on a GPU.
    """
    if instruction.called:
        inner = module.computations[instruction.called[0]]
        done = inner.root
        while done.opcode == "bitcast":
            done = inner.by_name[done.operands[0]]
        wrapped = _copy(inner, done, done)
        if wrapped.direction:
            return wrapped
        if instruction.opcode == "async-start":
            moved = [traffic(module, inner, each) for each in inner.instructions if each.opcode != "parameter"]
            whole = Traffic(sum(each.read for each in moved), sum(each.written for each in moved))
            return Copy(int(whole.bytes), None, whole)
    users = (each for each in computation.instructions if each.operands[:1] == (instruction.name,))
    done = next((each for each in users if each.opcode.endswith("-done")), None)
    if done:
        return _copy(computation, instruction, done)
    size = instruction.arrays[0].bytes
    return Copy(size, None, Traffic(size, 0))


def _copy(computation: Computation, begun: Instruction, done: Instruction) -> Copy:
    """Return the copy from the operand of `begun` to the result of `done`, which may be the same instruction."""
    updates = begun.opcode.startswith("dynamic-update-slice")
    source = computation.by_name[begun.operands[1 if updates else 0]] if begun.operands else done
    from_host, to_host = HOST in source.type, HOST in done.type
    direction = None if from_host == to_host else TO_HOST if to_host else FROM_HOST
    size = source.bytes if updates else done.bytes
    read, written = (size if in_memory(array) else 0 for array in (source, done))
    return Copy(size, direction, Traffic(read, written))


def touches_host(computation: Computation, instruction: Instruction) -> bool:
    """Return whether an instruction has an operand or a result in host memory."""
    operands = (computation.by_name[name] for name in instruction.operands)
    return HOST in instruction.type or any(HOST in operand.type for operand in operands)
