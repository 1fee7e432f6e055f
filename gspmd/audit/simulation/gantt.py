"""A timeline as a Gantt chart, with a row for a device's computation and a row for the transfers on each mesh axis."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspmd.audit.arguments import file_path
from gspmd.audit.simulation.bars import (
    DRAWN,
    FAINT,
    HEIGHT,
    INK,
    LANE,
    PALETTE,
    ROW,
    WIDTH,
    draw_row,
    pale_of,
    width_of,
)
from gspmd.audit.simulation.machine import COPY_ROWS, LOCAL_ROWS, Span
from gspmd.audit.simulation.timeline import Timeline, amount, checked_timeline
from gspmd.display import images

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # Slow to import; only pictures need it.

_NAMES = {"einsum": "matrix products", "other": "other computing", "copy": "memory copies"}
_BAND = "#f4f6f8"
_LANES = 6
"""Number of lanes up to which a row gets taller with every lane. If a row has more lanes, the lanes get thinner."""

_MARK = 9.0
"""Font size, in points, of the label that states a loop's number of iterations."""


def draw(timeline: Timeline, path: str | Path, command: str = "") -> None:
    """Draw a timeline with `figure`, and save the drawing to a file in the format of the file's suffix.

    Args:
        timeline: the timeline to draw, from `gspmd.audit.timeline`.
        path: the file, with a suffix such as .png or .svg. A PNG also contains the version of gspmd, the numbers in the
            title, and `command`.
        command: the command line that made the timeline.
    """
    made, file = figure(timeline), file_path(path)
    images.save(made, file, _heading(timeline), " ".join(_figures(timeline).split()), command)


def figure(timeline: Timeline) -> "Figure":
    """Draw a timeline as a matplotlib figure.

    The figure has a row for computation and a row for each mesh axis. If there are copies between memories that are
    long enough to be seen, there is a row for them. The hidden part of a collective is pale. A loop is drawn as one
    iteration, labeled with the number of iterations. The time axis covers only the iterations that are drawn, but the
    title states the time of the whole step.

    Args:
        timeline: the timeline to draw, from `gspmd.audit.timeline`.
    """
    from matplotlib.figure import Figure

    checked_timeline(timeline, "draw")
    rows, (scale, unit) = _rows(timeline), _unit(timeline)
    places, marks = _places(timeline, rows), _marks(timeline)
    above = 0.34 * max(marks.values(), default=0)
    made = Figure(figsize=(WIDTH, 1.9 + ROW * (_bottom(places) + above)), dpi=150, layout="constrained")
    axes = made.subplots()
    axes.set_autoscale_on(False)  # Otherwise every bar recomputes the limits, which `_frame` sets.
    stops = [*(loop.start for loop in _loops(timeline)), _end(timeline)]
    for number, (row, (middle, height)) in enumerate(places.items()):
        if number % 2 == 0:
            axes.axhspan(middle - height / 2, middle + height / 2, color=_BAND, linewidth=0, zorder=0)
        draw_row(axes, timeline.lanes(row), stops, middle, height, scale, _end(timeline) / DRAWN)
    for loop, tier in marks.items():
        _loop(axes, timeline, loop, tier, _bottom(places), scale)
    _frame(axes, timeline, places, marks, scale, unit)
    _legend(made, timeline)
    return made


def _unit(timeline: Timeline) -> tuple[float, str]:
    """Return a readable unit for the time axis, as (number of units per second, name of the unit)."""
    return next(((f, unit) for f, unit in ((1, "s"), (1e3, "ms")) if _end(timeline) * f >= 2), (1e6, "µs"))


def _end(timeline: Timeline) -> float:
    """Return the time in seconds at which the drawing ends."""
    return max((span.start + span.seconds for span in timeline.spans), default=1e-6)


def _rows(timeline: Timeline) -> tuple[str, ...]:
    """Return the timeline's rows; a row of copies is left out if all its copies are too short to be seen."""

    def seen(row: str) -> bool:
        return any(span.seconds > _end(timeline) / 1000 for span, _ in timeline.lanes(row))

    return tuple(row for row in timeline.rows if row not in COPY_ROWS or seen(row))


def _places(timeline: Timeline, rows: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the middle and the height of each row, in units of the vertical axis.

    A row with few lanes has height 1. The top of the first row is at -0.5.
    """
    places, top = {}, -0.5
    for row in rows:
        lanes = 1 + max((lane for _, lane in timeline.lanes(row)), default=0)
        height = max(1.0, 1 - HEIGHT + min(lanes, _LANES) * LANE / ROW)
        places[row], top = (top + height / 2, height), top + height
    return places


def _bottom(places: Mapping[str, tuple[float, float]]) -> float:
    return -0.5 + sum(height for _, height in places.values())


def _loops(timeline: Timeline) -> list[Span]:
    """Return the loops whose drawn iteration stands for several iterations."""
    return [span for span in timeline.spans if span.category == "loop" and span.trips > 1]


def _marks(timeline: Timeline) -> dict[Span, int]:
    """Return the height level of each loop's label.

    The label of a loop is above the labels of its inner loops, at a level where it overlaps no other label.
    """
    tiers: dict[Span, int] = {}
    for loop in sorted(_loops(timeline), key=lambda loop: (_depth(timeline, loop), loop.start)):
        tier = _depth(timeline, loop)
        while any(other == tier and _overlap(timeline, loop, mark) for mark, other in tiers.items()):
            tier += 1
        tiers[loop] = tier
    return tiers


def _overlap(timeline: Timeline, *loops: Span) -> bool:
    """Return whether the labels of two loops would overlap at the same height; a label is a line with a number."""
    first, second = loops
    halves = [max(loop.seconds, width_of(_times(loop), _MARK) * _end(timeline) / DRAWN * 1.2) / 2 for loop in loops]
    apart = abs(first.start + first.seconds / 2 - second.start - second.seconds / 2)
    return apart < sum(halves) * (1 - 1e-6)


def _times(loop: Span) -> str:
    return f"× {loop.trips}"


def _loop(axes: Any, timeline: Timeline, loop: Span, tier: int, bottom: float, scale: float) -> None:
    """Draw a frame around the drawn iteration of a loop, and write the number of iterations above the frame."""
    top, begun, seconds = _height(tier), loop.start * scale, loop.seconds * scale
    axes.vlines([begun, begun + seconds], top, bottom, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=5)
    axes.hlines(top, begun, begun + seconds, color=INK, linewidth=1.2, zorder=5)
    style = {"ha": "center", "va": "bottom", "fontsize": _MARK, "color": INK, "weight": "bold", "zorder": 6}
    style["bbox"] = {
        "facecolor": "white",
        "edgecolor": "none",
        "pad": 0.6,
    }  # over frames of higher tiers
    axes.text(begun + seconds / 2, top - 0.03, _times(loop), **style)


def _height(tier: int) -> float:
    return -0.52 - 0.34 * tier


def _depth(timeline: Timeline, loop: Span) -> int:
    """Return the number of levels of loops that are nested inside a loop."""
    end = loop.start + loop.seconds
    inside = [span for span in _loops(timeline) if span.start >= loop.start and span.start + span.seconds <= end]
    return 1 + max(_depth(timeline, span) for span in inside[: inside.index(loop)]) if inside.index(loop) else 0


def _frame(
    axes: Any,
    timeline: Timeline,
    places: Mapping[str, tuple[float, float]],
    marks: Mapping[Span, int],
    scale: float,
    unit: str,
) -> None:
    """Set the limits and ticks of the axes, the names of the rows, and the title."""
    axes.set_xlim(0, _end(timeline) * scale)
    axes.set_ylim(_bottom(places), _height(max(marks.values())) - 0.48 if marks else -0.5)
    named = [row if row in LOCAL_ROWS else f"axis {row}" for row in places]
    axes.set_yticks([middle for middle, _ in places.values()], named)
    axes.set_xlabel(f"{unit}, each loop drawn once" if marks else unit, color=INK, fontsize=9)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.grid(axis="x", color="#dfe4e9", linewidth=0.6, zorder=1)
    axes.spines[:].set_visible(False)
    axes.set_title(_heading(timeline), loc="left", fontsize=11, weight="bold", color=INK, pad=22)
    at = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    axes.annotate(_figures(timeline), **at, fontsize=9.5, color=INK)


def _heading(timeline: Timeline) -> str:
    mesh = " ".join(f"{axis}={size}" for axis, size in timeline.mesh.items())
    chips = f"{prod(timeline.mesh.values())} {timeline.chip.describe(timeline.mesh)}"
    return f"{timeline.name or 'program'} on one of {chips}, {mesh}"


def _figures(timeline: Timeline) -> str:
    figures = {
        "step": timeline.step_seconds,
        "computing": timeline.compute_seconds,
        "exposed": timeline.exposed_seconds,
        "hidden": timeline.hidden_seconds,
    }
    amounts = [f"{name} {amount(seconds)}" for name, seconds in figures.items()]
    return "    ".join([*amounts, f"MFU {timeline.mfu:.1%}"])


def _legend(made: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    used = {span.category for span in timeline.spans if set(span.rows) & set(_rows(timeline))}
    patches = [Patch(color=color, label=_NAMES.get(kind, kind)) for kind, color in PALETTE.items() if kind in used]
    if timeline.hidden_seconds:
        patches.append(Patch(color=pale_of(FAINT), label="pale: not waited for"))
    style = {"fontsize": 8.5, "frameon": False, "labelcolor": INK, "handlelength": 1.1, "handleheight": 0.9}
    made.legend(handles=patches, loc="outside lower left", ncols=len(patches), **style)
