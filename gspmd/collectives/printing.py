"""How tables and figures reach a reader: as wide as the terminal, in characters that it has, and in notebooks as HTML.

A terminal or a log without Unicode (`PYTHONIOENCODING=ascii`) shows `-->` for an arrow and `us` for microseconds. One
error handler of Python's codecs does that: `printable` gives a text that can be printed, and `console` a rich console
whose stream knows the handler.
"""

import codecs
import os
import sys
from io import StringIO
from typing import Any

from rich.console import Console

# One character each, so that columns stay in line.
_PLAIN = {"─": "-", "━": "-", "═": "-", "│": "|", "┃": "|", "║": "|", "▶": ">", "µ": "u", "μ": "u", "·": "*"} | {
    "×": "x", "÷": "/", "−": "-", "–": "-", "—": "-", "…": "~", "→": ">", "←": "<", "≤": "<", "≥": ">", "≈": "~",
    "█": "#", "▓": "#", "▒": "=", "░": ".", "°": "o", "✓": "y", "✗": "n", "±": "~", "\N{NO-BREAK SPACE}": " ",
}  # fmt: skip
_CORNERS = range(0x250C, 0x254C)
_HANDLER = "gspmd.plain"


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    return "+" if ord(character) in _CORNERS else _PLAIN.get(character, "?")


codecs.register_error(_HANDLER, _replace)


def printable(text: str, encoding: str | None = None) -> str:
    """The text in characters that an encoding has, by default that of standard output; the same text where it has all.

    >>> printable("── all-gather yz ─▶ BLE_x, 28.6 µs", "ascii")
    '-- all-gather yz -> BLE_x, 28.6 us'
    """
    encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, _HANDLER).decode(encoding)


def console(**options: Any) -> Console:
    """A rich console on standard output that prints whatever it is given; `options` are those of `rich`."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:
        reconfigure(errors=_HANDLER)
    return Console(**options)


def columns(console: Console) -> int | None:
    """The columns of a terminal, or those that `COLUMNS` says; None for a file or a pipe, where no line is too long."""
    return console.width if console.is_terminal or os.environ.get("COLUMNS") else None


def html(renderable: Any, width: int = 160) -> str:
    """What rich prints, as HTML for a notebook."""
    recorder = Console(file=StringIO(), record=True, width=width, force_jupyter=False)
    recorder.print(renderable, soft_wrap=True, highlight=False)
    style = "font-family:ui-monospace,Menlo,Consolas,monospace;line-height:normal"
    return recorder.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def text(renderable: Any, width: int) -> str:
    """What rich prints in so many columns, without colors, in characters that standard output has."""
    recorder = Console(width=width, color_system=None)
    with recorder.capture() as captured:
        recorder.print(renderable)
    return printable(captured.get())
