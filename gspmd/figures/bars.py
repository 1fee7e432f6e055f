"""Bars: the bytes of collectives by kind and mesh axes, planned beside compiled, and the seconds of layouts."""

from collections.abc import Sequence
from dataclasses import dataclass

from gspmd.figures.canvas import Canvas
from gspmd.figures.figure import Figure
from gspmd.figures.notation import Run

_WIDE, _HIGH, _MOST = 340.0, 9.0, 14
"""Width of the longest bar, height of each, and the most rows that are drawn."""


@dataclass(frozen=True)
class Bar:
    """A row of the figure.

    Attributes:
      label: its name, which stands above it on the left.
      kind: the class that colors it: a collective's kind, or `"other"`.
      amounts: the lengths of its bars, one below the other.
      told: the same as text, which stands above it on the right.
    """

    label: str
    kind: str
    amounts: tuple[float, ...]
    told: str


def bars_figure(title: str, bars: Sequence[Bar], total: str = "", plain: str = "") -> Figure:
    """Draw bars below one another, as long as their amounts; where a row has two, the first is pale.

    Args:
        title: the subject.
        bars: the rows, in order; of more than 14 the first are drawn, and the others counted.
        total: a line below them.
        plain: the same as text.

    Returns:
        The figure. Every row is a group with `data-bar`, its label.
    """
    canvas = Canvas()
    y = canvas.lines(0, 14, [[Run(f"{word} ")] for word in title.split()], _WIDE, "title ink", 19)
    longest = max((amount for bar in bars for amount in bar.amounts), default=0.0) or 1.0
    for bar in bars[:_MOST]:
        with canvas.group(data_bar=bar.label):
            canvas.text(0, y + 8, bar.label, f"strong {'ink' if bar.kind == 'other' else bar.kind}")
            canvas.text(_WIDE, y + 8, bar.told, "ink", "end")
            y += 14
            for number, amount in enumerate(bar.amounts):
                pale = " pale" if number + 1 < len(bar.amounts) else ""
                canvas.rect(0, y, max(1.0, _WIDE * amount / longest), _HIGH, f"{bar.kind}{pale}", rx=2)
                y += _HIGH + 2
            y += 10
    if len(bars) > _MOST:
        canvas.text(0, y + 6, f"… and {len(bars) - _MOST} more", "small soft")
        y += 16
    if total:
        canvas.lines(0, y + 8, [[Run(f"{word} ")] for word in total.split()], _WIDE, "small soft", 15)
    canvas.hold(0, 0, _WIDE, y)
    told = "; ".join(f"{bar.label}: {bar.told}" for bar in bars) or "nothing"
    return canvas.figure(title, f"{told}.", plain or f"{title}: {told}")
