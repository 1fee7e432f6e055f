"""The bars of a Gantt chart, with their colors, their lanes, and the labels that fit."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from gspmd.audit.simulation.machine import LOCAL_ROWS, Span
from gspmd.display.theme import KINDS, LIGHT, WORK
from gspmd.display.units import axes_text

_CATEGORIES = dict.fromkeys(("einsum", "other", *KINDS, "copy"))
PALETTE = {name: LIGHT[WORK.get(name, name)] for name in _CATEGORIES if name != "slice"}
"""The color of each category of bars, from `gspmd.display.theme`, in the order of the legend. There is no color for
slices, because a compiled program writes slices as copies."""

INK, FAINT = LIGHT["ink"], LIGHT["rule"]
WIDTH, LANE = 12.0, 0.13
"""Width of the figure in inches, and height in inches of a lane in a row with many lanes."""
HEIGHT, ROW = 0.66, 0.55
"""The fraction of a row's height that the bars fill, and the height of a row in inches."""
DRAWN = 0.93 * WIDTH
"""Approximate length of the time axis in inches."""

_EDGED = 0.03
"""Minimum width in inches of a bar that is drawn with a white edge. A narrower bar would be covered by its edge."""

_LABEL = 7.5
"""Font size of a bar's label, in points."""

_NARROWEST = 0.25
"""Lower bound on the mean width of a letter, as a fraction of the font size. If a text is too long by this bound, its
width is not measured."""


def draw_row(
    axes: Any,
    placed: list[tuple[Span, int]],
    stops: Sequence[float],
    middle: float,
    room: float,
    scale: float,
    inch: float,
) -> None:
    """Draw the bars of one row; bars that overlap in time are drawn in different lanes, one above the other.

    Args:
        axes: the axes of matplotlib.
        placed: pairs of a bar and the number of its lane, from `Timeline.lanes`.
        stops: times, in seconds, at which loops start, and the time at which the drawing ends. A label that is written
            beside a bar must end before the next of these times.
        middle, room: middle and height of the row, in units of the vertical axis.
        scale: units of the time axis per second.
        inch: seconds that one inch of the drawing represents.
    """
    whole, groups = room - 1 + HEIGHT, list(_overlapping(placed))
    stops = [*(group[0][0].start for group in groups), *stops]
    for group in groups:
        height = whole / (1 + max(lane for _, lane in group))
        end = group[-1][0].start + group[-1][0].seconds
        free = min((stop for stop in stops if stop > group[-1][0].start), default=end) - end
        for span, lane in group:
            bottom = middle - whole / 2 + lane * height
            _bar(axes, span, bottom, height, scale, inch)
            if height * ROW >= LANE * 0.95:
                beside = free if len(group) == 1 and not _is_local(span) else 0.0
                _label(axes, span, beside, bottom + height / 2, scale, inch)


def _overlapping(placed: list[tuple[Span, int]]) -> Iterator[list[tuple[Span, int]]]:
    """Yield groups of bars that overlap in time; a new group begins at a moment when all lanes are free."""
    group: list[tuple[Span, int]] = []
    end = 0.0
    for span, lane in placed:
        if group and lane == 0 and span.start >= end:
            yield group
            group = []
        group.append((span, lane))
        end = max(end, span.start + span.seconds * (1 - 1e-9))
    if group:
        yield group


def _bar(axes: Any, span: Span, bottom: float, height: float, scale: float, inch: float) -> None:
    """Draw one bar; for a collective, the exposed time, in which the device waits for it, is at the end of the bar."""
    for begun, seconds, color in _shades(span):
        edge = 0.5 if seconds > _EDGED * inch else 0.0
        style = {"edgecolors": "white", "linewidth": edge, "zorder": 3}
        axes.broken_barh([(begun * scale, seconds * scale)], (bottom, height), facecolors=color, **style)


def _shades(span: Span) -> list[tuple[float, float, str]]:
    """Return the hidden part and the exposed part of a bar, each as (start, seconds, color)."""
    color = PALETTE.get(span.category, FAINT)
    exposed = span.seconds if _is_local(span) else min(span.exposed, span.seconds)
    hidden = span.seconds - exposed
    parts = [(span.start, hidden, pale_of(color)), (span.start + hidden, exposed, color)]
    return [part for part in parts if part[1] > 0] or parts[1:]


def _is_local(span: Span) -> bool:
    return span.rows[0] in LOCAL_ROWS


def pale_of(color: str) -> str:
    """Return the color for hidden time, which is the given color mixed with twice as much white."""
    return "#" + "".join(f"{(int(color[at : at + 2], 16) + 2 * 255) // 3:02x}" for at in (1, 3, 5))


def _label(axes: Any, span: Span, beside: float, middle: float, scale: float, inch: float) -> None:
    """Write the longest label that fits into a bar's longer part, hidden or exposed.

    If no label fits there, write the longest label that fits into the `beside` seconds of free space after the bar.
    """
    begun, seconds, color = max(_shades(span), key=lambda part: part[1])
    style = {"va": "center", "fontsize": _LABEL, "zorder": 4, "clip_on": True}
    if text := _fitting(span, seconds / inch - 0.03):
        axes.text((begun + seconds / 2) * scale, middle, text, ha="center", color=ink_on(color), **style)
    elif text := _fitting(span, beside / inch - 0.12):
        axes.text((span.start + span.seconds + 0.05 * inch) * scale, middle, text, ha="left", color=INK, **style)


def _fitting(span: Span, inches: float) -> str:
    room = inches / (_NARROWEST * _LABEL / 72)  # Longer texts are not measured, which is slow.
    return next((name for name in _names(span) if len(name) < room and width_of(name, _LABEL) < inches), "")


@lru_cache(maxsize=4096)
def width_of(text: str, points: float) -> float:
    """Return the width in inches of a text whose font size is `points`."""
    from matplotlib.textpath import TextPath  # Slow to import, and only needed for pictures.

    return TextPath((0, 0), text, size=points).get_extents().width / 72 if text.strip() else 0.0


def ink_on(color: str) -> str:
    """Return a color for text that is legible on the given background color: white if it is dark, otherwise `INK`."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def _names(span: Span) -> list[str]:
    """Return the possible labels of a bar, from longest to shortest.

    If a collective is of a different kind than the planned step, its longest label also names the planned kind.
    """
    if _is_local(span):
        return [f"{span.name}  {span.equation}", span.equation, span.name] if span.equation else [span.name]
    name = f"{span.category} {axes_text(span.rows)}"
    planned = span.name.split(".")[1] if "." in span.name else span.category
    return [*([f"{name} (planned {planned})"] if planned != span.category else []), name, span.category]
