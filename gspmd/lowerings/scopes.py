"""The named scopes of planned programs: how a jaxpr and compiled instructions say which step of which plan they are.

gspmd[BLE_xyz, E_xF_yz -> BLF_yzx]/step0.all-gather.y.z
"""

import re

import jax

from gspmd.planner.steps import Step

_STEP = re.compile(r"step(\d+)\.")


def program_scope(title: str) -> str:
    """The scope of a program, by what it computes."""
    return f"gspmd[{title}]"


def step_scope(number: int, step: Step):
    """Open the scope of step `number` of a program."""
    return jax.named_scope(step_name(number, step))


def step_name(number: int, step: Step) -> str:
    """The name of a step's scope: its number in the program, its kind and its mesh axes."""
    return f"step{number}.{step.kind}.{'.'.join(step.axes)}".rstrip(".")


def step_numbers(scopes: str) -> list[int]:
    """The numbers of the steps in whose scopes an operation stands, outermost first.

    >>> step_numbers("gspmd[BE_x -> BE]/step0.all-gather.x")
    [0]
    """
    return [int(number) for number in _STEP.findall(scopes)]
