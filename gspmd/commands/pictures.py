"""The flags `--svg` and `--png` of commands that draw."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from gspmd.annotate.errors import shown
from gspmd.commands import files
from gspmd.figures.figure import Figure

ENDINGS = ("svg", "png")


def add_flags(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the flags to a parser; `what` names the subject of the picture in their help, such as "the plan"."""
    for ending in ENDINGS:
        say = f"also draw {what} as a picture in this file, which ends in .{ending}"
        parser.add_argument(f"--{ending}", metavar="FILE", type=_ends_in(ending), help=say)


def asked(options: argparse.Namespace) -> list[Path]:
    """Return the paths of the pictures that the flags ask for."""
    return [path for ending in ENDINGS if (path := getattr(options, ending)) is not None]


def faults_of(options: argparse.Namespace) -> Iterator[str]:
    """Yield the reasons why pictures cannot be written, as far as they are known in advance."""
    for ending in ENDINGS:
        yield from files.faults_of(ending, str(getattr(options, ending) or ""))


def write(figure: Figure, options: argparse.Namespace) -> list[str]:
    """Write the pictures that the flags ask for; return a message for each file that could not be written."""
    faults = []
    for ending in ENDINGS:
        path = getattr(options, ending)
        if path is None:
            continue
        try:
            faults += files.unwritten(ending, str(path), figure.save)
        # No file can have this name; or resvg, which draws PNGs, or fonts are missing.
        except (ValueError, ImportError, RuntimeError) as error:
            faults.append(str(error))
    return faults


def _ends_in(ending: str):
    def path(text: str) -> Path:
        if Path(text).suffix.lower() != f".{ending}":
            raise argparse.ArgumentTypeError(f"{shown(text)} does not end in .{ending}.")
        return Path(text)

    return path
