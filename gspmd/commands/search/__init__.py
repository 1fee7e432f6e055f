"""`gspmd search`: the best layout of a model on a slice, as a file that can be read, changed and trained with."""

from gspmd.commands.search.command import main, parse, run

__all__ = ["main", "parse", "run"]
