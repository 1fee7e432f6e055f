"""The origin of a compiled instruction, by its metadata: the equation and step of a plan, and the source line."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from gspmd.audit.hlo.collectives import Collective
from gspmd.audit.hlo.module import Computation, Instruction, Module
from gspmd.lowerings.scopes import innermost

OURS = f"{Path(__file__).parents[2]}{os.sep}"
"""The directory of this package: the source line of an instruction is the innermost one outside of it."""

_KERNELS = f"{Path(jax.__file__).parent / 'experimental' / 'pallas'}{os.sep}"
"""The directory of JAX's kernels, whose lines are not the user's either."""

_NEAR = 4
"""Producers that are searched for a source line if the compiler left a collective without one."""


@dataclass(frozen=True)
class Origin:
    """The equation and step of a plan, and `file:line`; empty if the metadata does not say."""

    equation: str
    step: str
    source: str


def origin(
    module: Module, computation: Computation, scheduled: Instruction, instruction: Instruction, ours: str = OURS
) -> Origin:
    """Return the origin of an instruction.

    A compiler that rewrites a reduction drops its metadata. The reduction's computation still has the scopes, and the
    source line is then taken from the operand.

    Args:
        module, computation: the program and the computation that contain it.
        scheduled: its line in the schedule.
        instruction: the instruction itself; different from `scheduled` if it is wrapped or fused.
        ours: directory of the files whose lines do not count as source lines.
    """
    reducer = module.computations.get(instruction.attribute("to_apply").lstrip("%"))
    own = [instruction, scheduled, *([reducer.root] if reducer and not instruction.op_name else ())]
    equation, step = max(
        (innermost(each.op_name) for each in own), key=lambda scopes: (bool(scopes[1]), bool(scopes[0]))
    )
    sources = (module.source(each, (ours, _KERNELS)) for each in own + _producers(computation, scheduled))
    return Origin(equation, step, next(filter(None, sources), ""))


def _producers(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """Return the producer of an instruction's first operand, that of its own first operand, and a few more."""
    producers: list[Instruction] = []
    while instruction.operands and len(producers) < _NEAR:
        instruction = computation.by_name[instruction.operands[0]]
        producers.append(instruction)
    return producers


def by_origin(
    module: Module, computation: Computation, scheduled: Instruction, collective: Collective
) -> Iterator[tuple[Origin, Collective]]:
    """Split a collective into parts, each with the arrays of one origin: compilers combine several collectives.

    XLA gives the instruction that takes an array out of the combined result (`get-tuple-element`) the metadata of the
    array's own collective.

    Args:
        module, computation: the program and the computation that contain it.
        scheduled: its line in the schedule.
        collective: the collective of that line.
    """
    own = origin(module, computation, scheduled, collective.instruction)
    taken = _taken(computation, scheduled) if len(collective.arrays) > 1 and not collective.fused else {}
    parts: dict[Origin, list] = {}
    for number, array in enumerate(collective.arrays):
        out = taken.get(number)
        part = origin(module, computation, out, out) if out and out.op_name else own
        parts.setdefault(part, []).append(array)
    for part, arrays in parts.items():
        yield part, replace(collective, arrays=tuple(arrays))


def _taken(computation: Computation, scheduled: Instruction) -> dict[int, Instruction]:
    """Return the `get-tuple-element` of each array of a result; for an asynchronous collective, of its done's
    result."""
    users = [each for each in computation.instructions if each.operands == (scheduled.name,)]
    done = next((each for each in users if each.opcode.endswith("-done")), scheduled)
    out = (each for each in computation.instructions if each.operands == (done.name,))
    return {int(each.attribute("index")): each for each in out if each.opcode == "get-tuple-element"}
