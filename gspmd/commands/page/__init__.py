"""`gspmd page`: the command, and what its pages ask of the other commands: searches and compilations."""

from gspmd.commands.page.command import make_parser, parse, run

__all__ = ["make_parser", "parse", "run"]
