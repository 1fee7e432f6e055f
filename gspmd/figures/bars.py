"""Bars: the planned and compiled bytes of collectives by kind and mesh axes, and the seconds of layouts."""

from collections.abc import Sequence
from dataclasses import dataclass

from gspmd.display.runs import Run
from gspmd.figures.canvas import Canvas, width_in
from gspmd.figures.figure import Figure, Text

_LEAST, _HIGH, _MOST, _APART = 340.0, 9.0, 14, 16.0
"""Minimum width of the longest bar, height of each bar, maximum number of rows, and space between texts of a row."""


@dataclass(frozen=True)
class Bar:
    """A row of the figure: one or more bars and their texts.

    Attributes:
      label: the name of the row, above its bars on the left.
      kind: the CSS class that colors the row: a collective's kind, `"other"`, or `"ink"` for the row that stands out.
      amounts: the amounts to which the bars' lengths are proportional, from top to bottom; all except the last are
          pale.
      told: the amounts as text, above the bars on the right.
      pale: whether the last bar is pale too.
    """

    label: str
    kind: str
    amounts: tuple[float, ...]
    told: str
    pale: bool = False

    @property
    def named(self) -> str:
        """The CSS classes of the row's label."""
        return f"strong {'ink' if self.kind == 'other' else self.kind}"


def bars_figure(title: str, bars: Sequence[Bar], total: str = "", plain: Text = "") -> Figure:
    """Draw bars from top to bottom, with lengths proportional to their amounts; an amount of 0 has no bar.

    Args:
        title: the subject of the figure.
        bars: the rows, in order; at most 14 are drawn, and a line states how many are left out.
        total: a line below the rows.
        plain: the same information as text, or a function that returns it.

    Returns:
        The figure. Every row is an SVG group whose attribute `data-bar` is the row's label.
    """
    canvas = Canvas()
    shown = bars[:_MOST]
    wide = max([_LEAST, *(width_in(bar.named, bar.label) + _APART + width_in("", bar.told) for bar in shown)])
    y = canvas.lines(0, 14, [[Run(f"{word} ")] for word in title.split()], wide, "title ink", 19)
    longest = max((amount for bar in bars for amount in bar.amounts), default=0.0) or 1.0
    for bar in shown:
        with canvas.group(data_bar=bar.label):
            canvas.text(0, y + 8, bar.label, bar.named)
            canvas.text(wide, y + 8, bar.told, "ink", "end")
            y += 14
            for number, amount in enumerate(bar.amounts):
                pale = " pale" if bar.pale or number + 1 < len(bar.amounts) else ""
                if amount:
                    canvas.rect(0, y, max(1.0, wide * amount / longest), _HIGH, f"{bar.kind}{pale}", rx=2)
                y += _HIGH + 2
            y += 10
    if len(bars) > _MOST:
        canvas.text(0, y + 6, f"… and {len(bars) - _MOST} more", "small soft")
        y += 16
    if total:
        canvas.lines(0, y + 8, [[Run(f"{word} ")] for word in total.split()], wide, "small soft", 15)
    canvas.hold(0, 0, wide, y)
    told = "; ".join(f"{bar.label}: {bar.told}" for bar in bars) or "nothing"
    return canvas.figure(title, f"{told}.", plain or f"{title}: {told}")
