"""The named scopes of planned programs, which say in jaxprs and HLO to which plan and step an operation belongs:

gspmd[BLE_xyz, E_xF_yz -> BLF_yzx]/step0.all-gather.y.z
"""

import re
from typing import Any, NamedTuple

import jax

from gspmd.planner.steps import KINDS, Step

_PROGRAM = re.compile(r"gspmd\[([^\]]*)\]")
_STEP = re.compile(rf"(?:^|[/(])(step\d+\.(?:{'|'.join(KINDS)})(?:\.[\w.]+)?)(?=/|$)")
_NUMBER = re.compile(r"step(\d+)\.")


def program_scope(title: str) -> str:
    """Return the name of a program's scope, which contains the computation in notation."""
    return f"gspmd[{title}]"


def step_scope(number: int, step: Step) -> Any:
    """Open the named scope of step `number` of a program."""
    return jax.named_scope(step_name(number, step))


def step_name(number: int, step: Step) -> str:
    """Return the name of a step's scope: the step's number in the program, its kind and its mesh axes."""
    return f"step{number}.{step.kind}.{'.'.join(step.axes)}".rstrip(".")


class StepName(NamedTuple):
    """The parts of the name of a step's scope."""

    number: int
    kind: str
    axes: tuple[str, ...]


def read_step(name: str) -> StepName:
    """Parse the name of a step's scope.

    >>> read_step("step0.all-gather.y.z")
    StepName(number=0, kind='all-gather', axes=('y', 'z'))
    """
    number, kind, *axes = name.split(".")
    return StepName(int(number.removeprefix("step")), kind, tuple(axes))


def step_numbers(scopes: str) -> list[int]:
    """Return the numbers of the steps that an operation's name stack names, from the outermost to the innermost."""
    return [int(number) for number in _NUMBER.findall(scopes)]


def innermost(scopes: str) -> tuple[str, str]:
    """Return the innermost program in a name stack, and the innermost step of this program.

    If there is no program, both results are empty strings. If the program has no step in the name stack, the second
    result is an empty string. A scope that looks like a step but is outside of every program belongs to the user's
    code, and is ignored.

    >>> innermost("jit(f)/gspmd[BE_x -> BE]/step0.all-gather.x/all_gather")
    ('BE_x -> BE', 'step0.all-gather.x')
    """
    programs = list(_PROGRAM.finditer(scopes))
    if not programs:
        return "", ""
    steps = _STEP.findall(scopes, programs[-1].end())
    return programs[-1][1], steps[-1] if steps else ""
