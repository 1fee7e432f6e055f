"""Where a compiled collective comes from: the plan's step, by JAX's scopes, and the line that asked for it."""

import re
from dataclasses import dataclass

from gspmd.audit.hlo.module import Computation, Instruction, Module
from gspmd.planner.steps import KINDS

_EQUATION = re.compile(r"gspmd\[([^\]]*)\]")
_STEP = re.compile(rf"(?:^|[/(])(step\d+\.(?:{'|'.join(KINDS)})(?:\.[\w.]+)?)(?=/|$)")
_NEAR = 4
"""How many producers are asked for a line where the compiler left a collective without one."""


@dataclass(frozen=True)
class Origin:
    """The equation and step of a plan, and `file:line`; each empty where nothing tells it."""

    equation: str
    step: str
    source: str


def origin(
    module: Module, computation: Computation, scheduled: Instruction, instruction: Instruction, ours: str
) -> Origin:
    """Where a collective comes from.

    Args:
        module, computation: where it stands.
        scheduled: its line in the schedule.
        instruction: the collective itself, where that is wrapped or fused.
        ours: the path of files that are not where a collective was asked for, but how it was planned.

    A compiler that rewrites a reduction drops its scopes; those of the reduced function are still there, and the line
    is then that of what it reduces.
    """
    reducer = module.computations.get(instruction.attribute("to_apply").lstrip("%"))
    own = [instruction, scheduled, *([reducer.root] if reducer and not instruction.op_name else ())]
    near = own + _producers(computation, scheduled)
    equation, step = max((_scopes(each.op_name) for each in own), key=lambda found: (bool(found[1]), bool(found[0])))
    source = next((found for each in near if (found := module.source(each, (ours,)))), "")
    return Origin(equation, step, source)


def _scopes(op_name: str) -> tuple[str, str]:
    """The innermost equation, and the step below it: a scope elsewhere that reads like a step is a user's own."""
    equations = list(_EQUATION.finditer(op_name))
    if not equations:
        return "", ""
    steps = _STEP.findall(op_name, equations[-1].end())
    return equations[-1][1], steps[-1] if steps else ""


def _producers(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """What makes an instruction's first operand, and the first operand of that, for a few steps."""
    found = []
    while instruction.operands and len(found) < _NEAR:
        instruction = computation.by_name[instruction.operands[0]]
        found.append(instruction)
    return found
