"""Asynchronous copies: the bytes that they move, and the memories between which these bytes move."""

from dataclasses import dataclass

from gspmd.audit.hlo.module import Computation, Instruction, Module
from gspmd.audit.simulation.links import FROM_HOST, TO_HOST, Link
from gspmd.audit.simulation.roofline import traffic

_HOST = "S(5)"
"""The memory of the host, as memory layouts write it.

Source: openxla/xla, `Layout::kHostMemorySpace` (`layout.h`).
"""


@dataclass(frozen=True)
class Copy:
    """An asynchronous copy.

    Attributes:
        bytes: bytes that are moved. For a slice, they are the bytes of the slice. For an update of a slice in place,
            they are the bytes of the update.
        direction: `TO_HOST` or `FROM_HOST`; None if both memories belong to the device.
    """

    bytes: int
    direction: Link | None


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
        wrapped = _between(inner, inner.root, inner.root)
        if wrapped.direction:
            return wrapped
        if instruction.opcode == "async-start":
            moved = (traffic(module, inner, each) for each in inner.instructions if each.opcode != "parameter")
            return Copy(int(sum(each.bytes for each in moved)), None)
    users = (each for each in computation.instructions if each.operands[:1] == (instruction.name,))
    done = next((each for each in users if each.opcode.endswith("-done")), None)
    return _between(computation, instruction, done) if done else Copy(instruction.arrays[0].bytes, None)


def _between(computation: Computation, begun: Instruction, done: Instruction) -> Copy:
    """Return the copy that one instruction begins, and whose result is the result of another or of the same one."""
    updates = begun.opcode.startswith("dynamic-update-slice")
    source = computation.by_name[begun.operands[1 if updates else 0]] if begun.operands else done
    came, goes = _HOST in source.type, _HOST in done.type
    direction = None if came == goes else TO_HOST if goes else FROM_HOST
    return Copy(source.bytes if updates else done.bytes, direction)
