"""Print tables and figures, as wide as the terminal, and in characters that the terminal's encoding has.

`console` prints the messages of a command. `text` makes the text that `print` shows for an object
(`gspmd.display.printed`). `printable` of `gspmd.display.plain` converts one line. The module `tables` makes tables for
terminals, and the module `html` makes tables for notebooks.
"""

import errno
import os
import shutil
import sys
from io import StringIO
from threading import current_thread, main_thread
from typing import Any

from rich.console import Console

from gspmd.display import terminal
from gspmd.display.plain import HANDLER, printable

__all__ = ["columns", "console", "never_fail", "printable", "text"]

_WIDE = 140
"""Number of columns if there is no terminal."""


def console(width: int | None = None, *, stderr: bool = False, highlight: bool = False) -> Console:
    """Make a rich console whose output can always be encoded, and which raises BrokenPipeError if its stream is closed.

    Args:
        width: number of columns if there is no terminal and `COLUMNS` is not set; None for the default of rich.
        stderr: whether to write to standard error instead of standard output.
        highlight: whether numbers and names are colored.
    """
    stream = sys.stderr if stderr else sys.stdout
    never_fail(stream)
    free = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
    return _Console(width=None if free else width, stderr=stderr, highlight=highlight)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError as `print` does, so that the command can clean up.

        Without this method, rich would end the process. In a thread that reports progress, the error is not raised,
        because the next print of the main thread raises it.
        """
        del self._buffer[:]
        if current_thread() is main_thread():
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def _check_buffer(self) -> None:
        # Writing to a closed terminal raises an OSError, and rich handles only the BrokenPipeError of a pipe.
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO or not terminal.hung_up(self.file.fileno()):
                raise
            self.on_broken_pipe()


def never_fail(stream: Any) -> None:
    """Make a stream write plain characters in place of the characters that its encoding lacks."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure:
        reconfigure(errors=HANDLER)


def columns(console: Console) -> int | None:
    """Return the value of `COLUMNS` or a terminal's width; None for files and pipes, whose lines have no limit."""
    return console.width if console.is_terminal or os.environ.get("COLUMNS") else None


def text(renderable: Any, width: int | None = None) -> str:
    """Render an object as text without colors, in characters that the encoding of standard output has.

    Args:
        renderable: an object that rich can print, such as a table, a text, or a group of tables and texts.
        width: number of columns. By default, this is the value of `COLUMNS` or the width of the terminal, and 140 if
            there is neither.
    """
    width = width or shutil.get_terminal_size((_WIDE, 24)).columns
    # The text is rendered in memory: for a stream without Unicode, rich would draw borders that differ from those of
    # `printable`.
    recorder = Console(file=StringIO(), width=width, color_system=None, highlight=False, force_jupyter=False)
    with recorder.capture() as captured:
        recorder.print(renderable)
    return printable(captured.get())
