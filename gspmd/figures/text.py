"""Runs of text in SVG: their widths, and their elements."""

from collections.abc import Iterable

from gspmd.display.runs import Run
from gspmd.display.xml import escaped

_SIZES = {"": 1.0, "sub": 0.76, "sum": 0.86}
_DROP = 0.26
"""The depth of a subscript below the line, in ems of the text around it."""

# Widths of Helvetica's characters in thousandths of an em; `_WIDER` leaves room for wider fonts.
_WIDTHS = {
    **dict.fromkeys("ijl'|", 222), **dict.fromkeys("ft.,:;!/ []I", 278), **dict.fromkeys("r()-{}`", 333),
    **dict.fromkeys("ckvxyzsJ", 500), **dict.fromkeys("mM", 833), **dict.fromkeys("ABEKPSVXY", 667),
    **dict.fromkeys("CDHNRU", 722), **dict.fromkeys("GOQ", 778), **dict.fromkeys("FTZL", 611), "w": 722, "W": 944,
    "→": 1000, "·": 333, "×": 584, "+": 584, "=": 584, "…": 1000, "%": 889,
}  # fmt: skip
_WIDER = 1.14


def text_width(text: str, size: float) -> float:
    """Return the approximate width of a text, in the units of `size`; it errs on the large side."""
    return sum(_WIDTHS.get(character, 556) for character in text) / 1000 * size * _WIDER


def width(runs: Iterable[Run], size: float) -> float:
    """Return the approximate width of runs of text, in the units of `size`."""
    return sum(text_width(run.text, size * _SIZES[run.style]) for run in runs)


def tspans(runs: Iterable[Run], size: float) -> str:
    """Return runs of text as the content of an SVG `<text>` element of font size `size`."""
    drawn, depth = [], 0.0
    for text, kind in runs:
        wanted = _DROP * size if kind == "sub" else 0.0
        given = [f'dy="{wanted - depth:.4g}"'] if wanted != depth else []
        # An attribute instead of a style, because a page's policy may forbid styles; no rule of the theme sizes a
        # tspan.
        given += [f'font-size="{size * _SIZES[kind]:.4g}"'] if kind else []
        given += ['class="soft"'] if kind == "sum" else []
        opening = " ".join(("<tspan", *given))
        drawn.append(f"{opening}>{escaped(text)}</tspan>" if given else escaped(text))
        depth = wanted
    return "".join(drawn)
