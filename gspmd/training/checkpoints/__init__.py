"""Checkpoints of a run: saved in the background, checked against checksums, restored onto any mesh and layout."""

from typing import TYPE_CHECKING

from gspmd.deferred import deferred

if TYPE_CHECKING:
    from gspmd.training.checkpoints.manager import Checkpoints
    from gspmd.training.checkpoints.restore import load_parameters, newest_intact
    from gspmd.training.checkpoints.saved import check_step, last_step, newest, saved_steps
    from gspmd.training.checkpoints.settings import has_settings, kept_settings, load_settings, save_settings

__all__ = [
    "Checkpoints",
    "check_step",
    "has_settings",
    "kept_settings",
    "last_step",
    "load_parameters",
    "load_settings",
    "newest",
    "newest_intact",
    "save_settings",
    "saved_steps",
]

_HOMES = {
    ".manager": "Checkpoints",
    ".restore": "load_parameters newest_intact",
    ".saved": "check_step last_step newest saved_steps",
    ".settings": "has_settings kept_settings load_settings save_settings",
}
__getattr__, __dir__ = deferred(__name__, _HOMES)
