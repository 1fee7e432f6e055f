"""A timeline as a picture: what a device computes, and under it what each mesh axis carries meanwhile."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspmd.audit.machine import Span
from gspmd.audit.timeline import Timeline
from gspmd.collectives.figure import amount_of_seconds, axes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = {
    "einsum": "#5b6b7f",
    "other": "#b4bfcc",
    "all-gather": "#2aa5b8",
    "reduce-scatter": "#b04fb5",
    "all-reduce": "#d8504d",
    "all-to-all": "#e3a51f",
    "collective-permute": "#3f74d1",
    "copy": "#7fb069",
}
"""The hues of a printed plan (`gspmd.collectives.figure.COLORS`), as they look good on white."""

_NAMES = {"einsum": "matrix products", "other": "other computing", "copy": "memory copies"}
_INK, _FAINT, _BAND = "#27313d", "#8b96a3", "#f4f6f8"
_WIDTH, _HEIGHT = 12.0, 0.66
_LETTER = 0.058
"""Inches that a letter of a bar's label takes, about."""


def draw(timeline: Timeline, path: str | Path) -> None:
    """Draw a timeline into a PNG, or what else the path's ending says that matplotlib can write; see `figure`."""
    figure(timeline).savefig(path)


def figure(timeline: Timeline) -> "Figure":
    """A timeline as a matplotlib figure.

    A row for computing, one per mesh axis, and one for copies between memories where there are any. The part of a
    collective for which the device does not wait is pale. A loop is drawn as one iteration, marked with how many it
    stands for, so the time axis is that of the drawing; the title has the times of the whole step.

    Args:
        timeline: from `gspmd.audit.timeline.timeline`.
    """
    from matplotlib.figure import Figure

    rows, (scale, unit) = _rows(timeline), _unit(timeline)
    made = Figure(figsize=(_WIDTH, 1.9 + 0.55 * len(rows)), dpi=150, layout="constrained")
    axes = made.subplots()
    for number, row in enumerate(rows):
        if number % 2 == 0:
            axes.axhspan(number - 0.5, number + 0.5, color=_BAND, linewidth=0, zorder=0)
        _row(axes, timeline, row, number, scale)
    for loop in _loops(timeline):
        _loop(axes, timeline, loop, len(rows), scale)
    _frame(axes, timeline, scale, unit)
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


def _row(axes: Any, timeline: Timeline, row: str, number: int, scale: float) -> None:
    """The bars of one row; those that overlap lie over one another, in lanes."""
    for placed in _together(timeline.lanes(row)):
        height = _HEIGHT / (1 + max(lane for _, lane in placed))
        for span, lane in placed:
            bottom = number - _HEIGHT / 2 + lane * height
            _bar(axes, span, bottom, height, scale)
            _label(axes, timeline, span, bottom + height / 2, scale)


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


def _bar(axes: Any, span: Span, bottom: float, height: float, scale: float) -> None:
    """One bar; of a collective, what is waited for is its end."""
    color = PALETTE.get(span.category, _FAINT)
    begun, whole = span.start * scale, span.seconds * scale
    waited = whole if _on_chip(span) else min(span.exposed * scale, whole)
    style = {"edgecolors": "white", "linewidth": 0.5, "zorder": 3}
    axes.broken_barh([(begun, whole - waited)], (bottom, height), facecolors=_pale(color), **style)
    axes.broken_barh([(begun + whole - waited, waited)], (bottom, height), facecolors=color, **style)


def _on_chip(span: Span) -> bool:
    return span.rows in (("compute",), ("memory",))


def _pale(color: str) -> tuple[float, ...]:
    """A color mixed with as much white."""
    return tuple((int(color[at : at + 2], 16) + 255) / 510 for at in (1, 3, 5))


def _label(axes: Any, timeline: Timeline, span: Span, middle: float, scale: float) -> None:
    """The fullest name that fits into a bar, if any does."""
    room = span.seconds / _end(timeline) * _WIDTH * 0.93 / _LETTER
    text = next((name for name in _names(span) if len(name) < room), "")
    dark = span.category == "other" or not (_on_chip(span) or span.exposed > span.seconds / 2)
    style = {"ha": "center", "va": "center", "fontsize": 7.5, "color": _INK if dark else "white"}
    axes.text((span.start + span.seconds / 2) * scale, middle, text, zorder=4, clip_on=True, **style)


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


def _loop(axes: Any, timeline: Timeline, loop: Span, rows: int, scale: float) -> None:
    """A frame around one iteration, with its number over it; loops around loops stand higher."""
    top, begun, seconds = -0.52 - 0.34 * _depth(timeline, loop), loop.start * scale, loop.seconds * scale
    axes.vlines([begun, begun + seconds], top, rows - 0.5, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=5)
    axes.hlines(top, begun, begun + seconds, color=_INK, linewidth=1.2, zorder=5)
    text = f"× {loop.trips}"
    axes.text(begun + seconds / 2, top - 0.03, text, ha="center", va="bottom", fontsize=9, color=_INK, weight="bold")


def _depth(timeline: Timeline, loop: Span) -> int:
    """How many loops stand inside one another within a loop: those that are drawn under its mark."""
    end = loop.start + loop.seconds
    inside = [span for span in _loops(timeline) if span.start >= loop.start and span.start + span.seconds <= end]
    return 1 + max(_depth(timeline, span) for span in inside[: inside.index(loop)]) if inside.index(loop) else 0


def _frame(axes: Any, timeline: Timeline, scale: float, unit: str) -> None:
    """Scales, names of rows, and the title."""
    rows, loops = _rows(timeline), _loops(timeline)
    axes.set_xlim(0, _end(timeline) * scale)
    axes.set_ylim(len(rows) - 0.5, -1.0 - 0.34 * max(_depth(timeline, loop) for loop in loops) if loops else -0.5)
    axes.set_yticks(range(len(rows)), [row if row in ("compute", "memory") else f"axis {row}" for row in rows])
    axes.set_xlabel(f"{unit}, each loop drawn once" if loops else unit, color=_INK, fontsize=9)
    axes.tick_params(length=0, labelsize=9, labelcolor=_INK)
    axes.grid(axis="x", color="#dfe4e9", linewidth=0.6, zorder=1)
    axes.spines[:].set_visible(False)
    mesh = " ".join(f"{axis}={size}" for axis, size in timeline.mesh.items())
    heading = f"{timeline.name or 'program'} on one of {prod(timeline.mesh.values())} {timeline.chip.name}, {mesh}"
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
    amounts = [f"{name} {amount_of_seconds(seconds)}" for name, seconds in figures.items()]
    return "    ".join([*amounts, f"MFU {timeline.mfu:.1%}"])


def _legend(made: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    used = {span.category for span in timeline.spans if set(span.rows) & set(_rows(timeline))}
    patches = [Patch(color=color, label=_NAMES.get(kind, kind)) for kind, color in PALETTE.items() if kind in used]
    if timeline.hidden_seconds:
        patches.append(Patch(color=_pale(_FAINT), label="pale: not waited for"))
    style = {"fontsize": 8.5, "frameon": False, "labelcolor": _INK, "handlelength": 1.1, "handleheight": 0.9}
    made.legend(handles=patches, loc="outside lower left", ncols=len(patches), **style)
