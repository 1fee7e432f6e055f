"""A timeline as a picture: what a device computes, and under it what each mesh axis carries meanwhile."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspmd.audit.simulation.machine import Span
from gspmd.audit.simulation.timeline import Timeline, amount, of_a_timeline, path_of
from gspmd.display.units import axes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = {
    "einsum": "#5b6b7f",
    "other": "#b4bfcc",
    "all-gather": "#56b4e9",
    "reduce-scatter": "#cc79a7",
    "all-reduce": "#d55e00",
    "all-to-all": "#e69f00",
    "collective-permute": "#0072b2",
    "copy": "#009e73",
}
"""The hues of a printed plan (`gspmd.planner.drawing.COLORS`), in the tones that Okabe and Ito (*Color Universal
Design*, 2008) chose so that everybody can tell them apart."""

_NAMES = {"einsum": "matrix products", "other": "other computing", "copy": "memory copies"}
_INK, _FAINT, _BAND = "#27313d", "#8b96a3", "#f4f6f8"
_WIDTH, _HEIGHT = 12.0, 0.66
_ROW, _LANE, _LANES = 0.55, 0.13, 6
"""Inches of a row, and of each of the lanes in it if they are too many for that; more of them are thinner."""

_DRAWN = 0.93 * _WIDTH
"""Inches of the time axis, about."""

_APART = 0.03
"""Inches of a bar from which on a white edge parts it from the next; narrower ones would be nothing but edge."""

_LABEL, _MARK = 7.5, 9.0
"""Points of a bar's label, and of a loop's."""

_NARROWEST = 0.25
"""No letter on average is narrower than so much of its font's size: what cannot fit by this is not measured."""


def draw(timeline: Timeline, path: str | Path) -> None:
    """Draw a timeline into a PNG, or what else the path's ending says that matplotlib can write; see `figure`."""
    figure(timeline).savefig(path_of(path))


def figure(timeline: Timeline) -> "Figure":
    """A timeline as a matplotlib figure.

    A row for computing, one per mesh axis, and one for copies between memories where there are any. The part of a
    collective for which the device does not wait is pale. A loop is drawn as one iteration, marked with how many it
    stands for, so the time axis is that of the drawing; the title has the times of the whole step.

    Args:
        timeline: from `gspmd.audit.timeline`.
    """
    from matplotlib.figure import Figure

    of_a_timeline(timeline, "draw")
    rows, (scale, unit) = _rows(timeline), _unit(timeline)
    places, marks = _places(timeline, rows), _marks(timeline)
    above = 0.34 * max(marks.values(), default=0)
    made = Figure(figsize=(_WIDTH, 1.9 + _ROW * (_bottom(places) + above)), dpi=150, layout="constrained")
    axes = made.subplots()
    axes.set_autoscale_on(False)  # else every bar works the limits out anew; `_frame` sets them
    for number, (row, (middle, height)) in enumerate(places.items()):
        if number % 2 == 0:
            axes.axhspan(middle - height / 2, middle + height / 2, color=_BAND, linewidth=0, zorder=0)
        _row(axes, timeline, row, middle, height, scale)
    for loop, tier in marks.items():
        _loop(axes, timeline, loop, tier, _bottom(places), scale)
    _frame(axes, timeline, places, marks, scale, unit)
    _legend(made, timeline)
    return made


def _unit(timeline: Timeline) -> tuple[float, str]:
    """What to multiply seconds by, for a time axis with readable numbers."""
    return next(((f, unit) for f, unit in ((1, "s"), (1e3, "ms")) if _end(timeline) * f >= 2), (1e6, "µs"))


def _end(timeline: Timeline) -> float:
    """When the last thing in the drawing ends."""
    return max((span.start + span.seconds for span in timeline.spans), default=1e-6)


def _rows(timeline: Timeline) -> tuple[str, ...]:
    """The timeline's rows, without one for copies too short to be seen."""
    seen = any(span.seconds > _end(timeline) / 1000 for span, _ in timeline.lanes("memory"))
    return tuple(row for row in timeline.rows if row != "memory" or seen)


def _places(timeline: Timeline, rows: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Where the middle of each row is, and how high it is: the first at 0, and 1 high unless there are many lanes."""
    places, top = {}, -0.5
    for row in rows:
        lanes = 1 + max((lane for _, lane in timeline.lanes(row)), default=0)
        height = max(1.0, 1 - _HEIGHT + min(lanes, _LANES) * _LANE / _ROW)
        places[row], top = (top + height / 2, height), top + height
    return places


def _bottom(places: Mapping[str, tuple[float, float]]) -> float:
    return -0.5 + sum(height for _, height in places.values())


def _row(axes: Any, timeline: Timeline, row: str, middle: float, room: float, scale: float) -> None:
    """The bars of one row; those that overlap lie over one another, in lanes."""
    whole, inch = room - 1 + _HEIGHT, _end(timeline) / _DRAWN
    groups = list(_together(timeline.lanes(row)))
    stops = [*(group[0][0].start for group in groups), *(loop.start for loop in _loops(timeline)), _end(timeline)]
    for placed in groups:
        height = whole / (1 + max(lane for _, lane in placed))
        ends = placed[-1][0].start + placed[-1][0].seconds
        free = min((stop for stop in stops if stop > placed[-1][0].start), default=ends) - ends
        for span, lane in placed:
            bottom = middle - whole / 2 + lane * height
            _bar(axes, span, bottom, height, scale, inch)
            if height * _ROW >= _LANE * 0.95:
                beside = free if len(placed) == 1 and not _on_chip(span) else 0.0
                _label(axes, span, beside, bottom + height / 2, scale, inch)


def _together(placed: list[tuple[Span, int]]) -> Iterator[list[tuple[Span, int]]]:
    """Spans in groups that overlap; where all lanes are free again, lane 0 is taken, and another group begins."""
    group, end = [], 0.0
    for span, lane in placed:
        if group and lane == 0 and span.start >= end:
            yield group
            group = []
        group.append((span, lane))
        end = max(end, span.start + span.seconds * (1 - 1e-9))
    if group:
        yield group


def _bar(axes: Any, span: Span, bottom: float, height: float, scale: float, inch: float) -> None:
    """One bar; of a collective, what is waited for is its end."""
    for begun, seconds, color in _shades(span):
        edge = 0.5 if seconds > _APART * inch else 0.0
        style = {"edgecolors": "white", "linewidth": edge, "zorder": 3}
        axes.broken_barh([(begun * scale, seconds * scale)], (bottom, height), facecolors=color, **style)


def _shades(span: Span) -> list[tuple[float, float, str]]:
    """The pale and the full part of a bar: start, seconds, color."""
    color = PALETTE.get(span.category, _FAINT)
    waited = span.seconds if _on_chip(span) else min(span.exposed, span.seconds)
    pale = span.seconds - waited
    parts = [(span.start, pale, _pale(color)), (span.start + pale, waited, color)]
    return [part for part in parts if part[1] > 0] or parts[1:]


def _on_chip(span: Span) -> bool:
    return span.rows in (("compute",), ("memory",))


def _pale(color: str) -> str:
    """A color mixed with twice as much white."""
    return "#" + "".join(f"{(int(color[at : at + 2], 16) + 2 * 255) // 3:02x}" for at in (1, 3, 5))


def _label(axes: Any, span: Span, beside: float, middle: float, scale: float, inch: float) -> None:
    """The fullest name that fits into the longer part of a bar, or into the free seconds beside it, if any does."""
    begun, seconds, color = max(_shades(span), key=lambda part: part[1])
    style = {"va": "center", "fontsize": _LABEL, "zorder": 4, "clip_on": True}
    if text := _fitting(span, seconds / inch - 0.03):
        axes.text((begun + seconds / 2) * scale, middle, text, ha="center", color=_on(color), **style)
    elif text := _fitting(span, beside / inch - 0.12):
        axes.text((span.start + span.seconds + 0.05 * inch) * scale, middle, text, ha="left", color=_INK, **style)


def _fitting(span: Span, inches: float) -> str:
    room = inches / (_NARROWEST * _LABEL / 72)  # letters at most; to measure a text takes a hundred times as long
    return next((name for name in _names(span) if len(name) < room and _inches(name, _LABEL) < inches), "")


@lru_cache(maxsize=4096)
def _inches(text: str, points: float) -> float:
    """How wide a text is."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=points).get_extents().width / 72 if text.strip() else 0.0


def _on(color: str) -> str:
    """The ink that is legible on a color: white on a dark one."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return _INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def _names(span: Span) -> list[str]:
    """What a bar may be called, the fullest first; a collective by what it is, and by what was planned instead."""
    if _on_chip(span):
        return [f"{span.name}  {span.equation}", span.equation, span.name] if span.equation else [span.name]
    name = f"{span.category} {axes_text(span.rows)}"
    planned = span.name.split(".")[1] if "." in span.name else span.category
    return [*([f"{name} (planned {planned})"] if planned != span.category else []), name, span.category]


def _loops(timeline: Timeline) -> list[Span]:
    """The iterations that stand for more than themselves."""
    return [span for span in timeline.spans if span.category == "loop" and span.trips > 1]


def _marks(timeline: Timeline) -> dict[Span, int]:
    """The tier in which each loop is marked: above the loops within it, and where no other mark is in the way."""
    tiers: dict[Span, int] = {}
    for loop in sorted(_loops(timeline), key=lambda loop: (_depth(timeline, loop), loop.start)):
        tier = _depth(timeline, loop)
        while any(other == tier and _meet(timeline, loop, mark) for mark, other in tiers.items()):
            tier += 1
        tiers[loop] = tier
    return tiers


def _meet(timeline: Timeline, *loops: Span) -> bool:
    """Whether the marks of two loops would overlap: the line over each, and the number in its middle."""
    first, second = loops
    reach = [max(loop.seconds, _inches(_times(loop), _MARK) * _end(timeline) / _DRAWN * 1.2) / 2 for loop in loops]
    apart = abs(first.start + first.seconds / 2 - second.start - second.seconds / 2)
    return apart < sum(reach) * (1 - 1e-6)


def _times(loop: Span) -> str:
    return f"× {loop.trips}"


def _loop(axes: Any, timeline: Timeline, loop: Span, tier: int, bottom: float, scale: float) -> None:
    """A frame around one iteration, with its number over it."""
    top, begun, seconds = _height(tier), loop.start * scale, loop.seconds * scale
    axes.vlines([begun, begun + seconds], top, bottom, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=5)
    axes.hlines(top, begun, begun + seconds, color=_INK, linewidth=1.2, zorder=5)
    style = {"ha": "center", "va": "bottom", "fontsize": _MARK, "color": _INK, "weight": "bold", "zorder": 6}
    style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # over the frames of loops marked higher
    axes.text(begun + seconds / 2, top - 0.03, _times(loop), **style)


def _height(tier: int) -> float:
    return -0.52 - 0.34 * tier


def _depth(timeline: Timeline, loop: Span) -> int:
    """How many loops stand inside one another within a loop: those that are drawn under its mark."""
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
    """Scales, names of rows, and the title."""
    axes.set_xlim(0, _end(timeline) * scale)
    axes.set_ylim(_bottom(places), _height(max(marks.values())) - 0.48 if marks else -0.5)
    named = [row if row in ("compute", "memory") else f"axis {row}" for row in places]
    axes.set_yticks([middle for middle, _ in places.values()], named)
    axes.set_xlabel(f"{unit}, each loop drawn once" if marks else unit, color=_INK, fontsize=9)
    axes.tick_params(length=0, labelsize=9, labelcolor=_INK)
    axes.grid(axis="x", color="#dfe4e9", linewidth=0.6, zorder=1)
    axes.spines[:].set_visible(False)
    mesh = " ".join(f"{axis}={size}" for axis, size in timeline.mesh.items())
    chips = f"{prod(timeline.mesh.values())} {timeline.chip.describe(timeline.mesh)}"
    heading = f"{timeline.name or 'program'} on one of {chips}, {mesh}"
    axes.set_title(heading, loc="left", fontsize=11, weight="bold", color=_INK, pad=22)
    at = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    axes.annotate(_figures(timeline), **at, fontsize=9.5, color=_INK)


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
        patches.append(Patch(color=_pale(_FAINT), label="pale: not waited for"))
    style = {"fontsize": 8.5, "frameon": False, "labelcolor": _INK, "handlelength": 1.1, "handleheight": 0.9}
    made.legend(handles=patches, loc="outside lower left", ncols=len(patches), **style)
