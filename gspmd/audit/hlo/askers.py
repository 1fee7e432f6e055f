"""Who asked for a collective: where a compiler makes several one, each of its arrays still says which it was."""

from collections.abc import Iterator
from dataclasses import replace

from gspmd.audit.hlo.collectives import Collective
from gspmd.audit.hlo.module import Computation, Instruction, Module
from gspmd.audit.hlo.origin import Origin, origin


def divided(
    module: Module, computation: Computation, scheduled: Instruction, found: Collective, ours: str
) -> Iterator[tuple[Origin, Collective]]:
    """A collective's askers, each with the part of it that holds its arrays.

    Args:
        module, computation: where it stands.
        scheduled: its line in the schedule.
        found: what that line is.
        ours: the path of files that are not where a collective was asked for, but how it was planned.

    XLA gives what takes an array out of the merged result (`get-tuple-element`) the metadata of the collective that
    the array was in before.
    """
    own = origin(module, computation, scheduled, found.instruction, ours)
    taken = _taken(computation, scheduled) if len(found.arrays) > 1 and not found.fused else {}
    parts: dict[Origin, list] = {}
    for number, array in enumerate(found.arrays):
        out = taken.get(number)
        came = origin(module, computation, out, out, ours) if out and out.op_name else own
        parts.setdefault(came, []).append(array)
    for came, arrays in parts.items():
        yield came, replace(found, arrays=tuple(arrays))


def _taken(computation: Computation, scheduled: Instruction) -> dict[int, Instruction]:
    """What takes each array out of a result, by its number; a started collective's result is that of its done."""
    done = next(
        (each for each in computation.instructions if each.operands == (scheduled.name,) and _ends(each)), scheduled
    )
    out = (each for each in computation.instructions if each.operands == (done.name,))
    return {int(each.attribute("index")): each for each in out if each.opcode == "get-tuple-element"}


def _ends(instruction: Instruction) -> bool:
    return instruction.opcode.endswith("-done")
