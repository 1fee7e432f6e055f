"""The figure of a timeline: one device over time, with a row for computation and a row for every mesh axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gspmd.audit.simulation.machine import LOCAL_ROWS, Span
from gspmd.display.runs import Run
from gspmd.display.units import amount_of_seconds, axes_text
from gspmd.figures.canvas import Canvas, number, width_in
from gspmd.figures.figure import Figure

if TYPE_CHECKING:
    from gspmd.audit.simulation.timeline import Timeline

_WIDE, _ROW, _GAP, _APART, _MOST = 460.0, 22.0, 6.0, 12.0, 8
"""Width of the time axis, height of a row, space between rows, space between columns, and the maximum number of parts
that are listed."""
_FINEST = 0.5
"""Distance, in units of the SVG, below which two bars are drawn as one. A figure of ten thousand instructions stays
small in this way."""


def timeline_figure(timeline: Timeline) -> Figure:
    """Draw a timeline, with a row of bars for each resource, and the totals below the rows.

    The hidden parts of collectives are pale. Only one iteration of each loop is drawn, so the time axis is shorter than
    the step. The totals are those of the whole step.

    Args:
        timeline: the timeline to draw.

    Returns:
        The figure. Every row is an SVG group with the attribute `data-row`.
    """
    canvas, name = Canvas(), timeline.name or "a program"
    end = max((span.start + span.seconds for span in timeline.spans), default=0.0) or 1e-9
    canvas.text(0, 14, f"timeline of {name}", "title ink")
    left = max((width_in("small", row) for row in timeline.rows), default=0.0) + _APART
    y = 28.0
    for row in timeline.rows:
        with canvas.group(data_row=row):
            canvas.text(0, y + _ROW / 2 + 4, row, "small soft")
            canvas.rect(left, y, _WIDE, _ROW, "panel", rx=2)
            _draw_row(canvas, left, y, timeline.lanes(row), _WIDE / end)
        y += _ROW + _GAP
    canvas.text(left, y + 8, "0", "small soft")
    canvas.text(left + _WIDE, y + 8, amount_of_seconds(end), "small soft", "end")
    y += 24
    shown = [(part, f"{part.category} {axes_text(part.axes)}".strip()) for part in timeline.parts[:_MOST]]
    amounts = 16 + max((width_in("", named) for _, named in shown), default=0.0) + _APART
    for part, named in shown:
        waits = part.axes and part.category != "copy"  # Waiting for a copy counts as computing.
        exposed = f", {amount_of_seconds(part.exposed)} of it exposed" if waits else ""
        canvas.rect(0, y - 8, 10, 10, part.category, rx=2)
        canvas.text(16, y + 1, named, "ink")
        canvas.text(amounts, y + 1, f"{amount_of_seconds(part.seconds)}{exposed}", "soft")
        y += 17
    if more := len(timeline.parts) - len(shown):
        canvas.text(16, y + 1, f"… and {more} more", "soft")
        y += 17
    loops = max((span.trips for span in timeline.spans if span.category == "loop"), default=1)
    words = [[Run(f"{word} ")] for word in timeline.summary.split()]
    y = canvas.lines(0, y + 6, words, left + _WIDE, "small soft", 15)
    if loops > 1:
        canvas.text(0, y, "One iteration of each loop is drawn.", "small soft")
    return canvas.figure(f"Timeline of {name}", timeline.summary, timeline.__str__)


def _draw_row(canvas: Canvas, left: float, y: float, placed: Sequence[tuple[Span, int]], scale: float) -> None:
    """Draw the bars of a row.

    For each lane and category there is one SVG path for the hidden parts, and one for the exposed parts.
    """
    lanes = 1 + max((lane for _, lane in placed), default=0)
    parts: dict[tuple[int, str, bool], list[tuple[float, float]]] = {}
    for span, lane in placed:
        local = span.rows[0] in LOCAL_ROWS
        waits = span.seconds if local else min(span.exposed, span.seconds)
        middle = span.start + span.seconds - waits  # The device waits last.
        for start, stop, hidden in ((span.start, middle, True), (middle, span.start + span.seconds, False)):
            if stop > start:
                parts.setdefault((lane, span.category, hidden), []).append((start * scale, stop * scale))
    high = (_ROW - 4) / lanes
    for (lane, kind, hidden), pieces in parts.items():
        top, thick = y + 2 + lane * high, max(0.5, high - (1 if high > 3 else 0))
        path = "".join(
            f"M{number(left + a)} {number(top)}h{number(b - a)}v{number(thick)}h{number(a - b)}z"
            for a, b in _merged(pieces)
        )
        canvas.parts.append(f'<path class="{kind}{" pale" if hidden else ""}" d="{path}"/>')


def _merged(pieces: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join intervals that touch or nearly touch, and widen intervals that would be too narrow to be seen."""
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(pieces):
        stop = max(stop, start + _FINEST)
        if joined and start - joined[-1][1] < _FINEST:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined
