"""Checkpoints of a run: saved in the background, checked against checksums, restored onto any mesh and layout."""

from gspmd.training.checkpoints.manager import Checkpoints
from gspmd.training.checkpoints.restore import check_step, load_parameters, newest, newest_intact, saved_steps
from gspmd.training.checkpoints.settings import kept_settings, load_settings, save_settings

__all__ = [
    "Checkpoints",
    "check_step",
    "kept_settings",
    "load_parameters",
    "load_settings",
    "newest",
    "newest_intact",
    "save_settings",
    "saved_steps",
]
