"""The training step: the gradients of microbatches, moves to and from the optimizer's layout, and the new state."""

from typing import TYPE_CHECKING

from gspmd.deferred import deferred

if TYPE_CHECKING:
    from gspmd.training.config import Update
    from gspmd.training.step.building import abstract_program
    from gspmd.training.step.microbatches import Microbatches
    from gspmd.training.step.moves import Moves, plan_moves
    from gspmd.training.step.update import Step, jit_step, make_step

__all__ = ["Microbatches", "Moves", "Step", "Update", "abstract_program", "jit_step", "make_step", "plan_moves"]

_HOMES = {
    "gspmd.training.config": "Update",
    ".building": "abstract_program",
    ".microbatches": "Microbatches",
    ".moves": "Moves plan_moves",
    ".update": "Step jit_step make_step",
}
__getattr__, __dir__ = deferred(__name__, _HOMES)
