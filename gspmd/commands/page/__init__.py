"""`gspmd page`: the command, and the searches and compilations that its pages ask for."""

from gspmd.commands.page.command import make_parser, parse, run

__all__ = ["make_parser", "parse", "run"]
