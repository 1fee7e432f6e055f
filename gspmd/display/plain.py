"""Text for an output without Unicode, with `->` for an arrow and `us` for microseconds."""

import codecs
import sys

# One character each, so that columns stay in line.
_PLAIN = {"─": "-", "━": "-", "═": "-", "│": "|", "┃": "|", "║": "|", "▶": ">", "µ": "u", "μ": "u", "·": "*"} | {
    "×": "x", "÷": "/", "−": "-", "–": "-", "—": "-", "…": "~", "→": ">", "←": "<", "≤": "<", "≥": ">", "≈": "~",
    "█": "#", "▓": "#", "▒": "=", "░": ".", "°": "o", "✓": "y", "✗": "n", "±": "~", "\N{NO-BREAK SPACE}": " ",
}  # fmt: skip
_CORNERS = range(0x250C, 0x2574)

HANDLER = "gspmd.plain"
"""The name of an error handler for Python's codecs that replaces a missing character by a similar plain character."""


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    return _PLAIN.get(character, "+" if ord(character) in _CORNERS else "?")


codecs.register_error(HANDLER, _replace)


def printable(text: str, encoding: str | None = None) -> str:
    """Replace each character of a text that an encoding lacks by a similar plain character, or by `?`.

    The default encoding is that of standard output.

    >>> printable("── all-gather yz ─▶ BLE_x, 28.6 µs", "ascii")
    '-- all-gather yz -> BLE_x, 28.6 us'
    """
    encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, HANDLER).decode(encoding)
