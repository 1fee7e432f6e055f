"""The training step: gradients of microbatches, their way to the optimizer's layout and back, and the new state."""

from gspmd.training.step.building import Update, abstract_program
from gspmd.training.step.microbatches import Microbatches
from gspmd.training.step.moves import Moves, plan_moves
from gspmd.training.step.update import Step, jit_step, make_step

__all__ = ["Microbatches", "Moves", "Step", "Update", "abstract_program", "jit_step", "make_step", "plan_moves"]
