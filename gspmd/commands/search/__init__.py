"""`gspmd search`: the best layout of a model on a slice, as a file to read, change and train with."""

from typing import TYPE_CHECKING

from gspmd.deferred import deferred

if TYPE_CHECKING:
    from gspmd.commands.search.command import main, run
    from gspmd.commands.search.settings import parse

__all__ = ["main", "parse", "run"]

_HOMES = {
    ".command": "main run",
    ".settings": "parse",
}
__getattr__, __dir__ = deferred(__name__, _HOMES)
