"""`gspmd page`: the command, and what its pages ask of the other commands: searches and compilations."""

from gspmd.commands.page.command import run

__all__ = ["run"]
