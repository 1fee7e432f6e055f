"""The figure of seconds against bytes: the cheapest layout for every amount of memory, as a stepped line."""

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log

from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.figures.canvas import Canvas
from gspmd.figures.figure import Figure
from gspmd.search.answer import Answer
from gspmd.search.answers.frontier import SEEN, Point

_WIDE, _HIGH = 360.0, 210.0
_STEEP = 1.5
"""The axis of seconds is logarithmic if the largest value is more than this many times the smallest."""
_DOT = 5.0


def frontier_figure(front: Sequence[Point], beside: Sequence[tuple[str, Answer]], limit: float, where: str) -> Figure:
    """Draw the seconds of the cheapest layouts over their bytes, and mark other layouts.

    Args:
        front: the points of `frontier`.
        beside: other layouts with their names, drawn as marks; the one named "found" is emphasized.
        limit: bytes that a device may hold.
        where: the mesh, for the title.

    Returns:
        The figure. Every point and mark is a group of class `point`, with `data-bytes`, `data-seconds` and a title.
    """
    points = [(point.answer.bytes, point.answer.seconds) for point in front]
    marks = [(name, answer.bytes, answer.seconds) for name, answer in beside]
    slowest = SEEN * min(took for _, took in points)
    largest = max(SEEN * limit, points[0][0])
    drawn = [each for each in points if each[0] <= largest and each[1] <= slowest] or [points[-1]]
    shown = [each for each in marks if each[1] <= largest and each[2] <= slowest]
    sizes = [held for held, _ in drawn] + [held for _, held, _ in shown]
    times = [took for _, took in drawn] + [took for _, _, took in shown]
    x, y = _Scale(min(sizes), max(sizes), False), _Scale(min(times), max(times), max(times) > _STEEP * min(times))
    at = lambda held, took: (_WIDE * x(held), _HIGH * (1 - y(took)))  # noqa: E731
    canvas = Canvas()
    canvas.text(0, -26, f"seconds of a step over memory, mesh {where}", "title ink")
    canvas.rect(0, 0, _WIDE, _HIGH, "panel", rx=3)
    if x(limit) <= 1:
        canvas.path([(_WIDE * x(limit), 0), (_WIDE * x(limit), _HIGH)], "line dashed")
        canvas.text(_WIDE * x(limit), -6, f"may be used: {amount_of_bytes(limit)}", "small soft", "middle")
    stairs = [at(*drawn[0])]
    for (_, before), (held, took) in pairwise(drawn):
        stairs += [at(held, before), at(held, took)]
    canvas.path([*stairs, (_WIDE, stairs[-1][1])])
    for name, held, took in [*(("", *each) for each in drawn), *shown]:
        _dot(canvas, *at(held, took), name, held, took)
    for share in (0.0, 0.5, 1.0):
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
        canvas.text(_WIDE * share, _HIGH + 17, amount_of_bytes(x.at(share)), "small soft", anchor)
        canvas.text(-8, _HIGH * (1 - share) + 4, amount_of_seconds(y.at(share)), "small soft", "end")
    told = [f"{amount_of_bytes(held)}: {amount_of_seconds(took)}" for held, took in points]
    told += [f"{name}, {amount_of_bytes(held)}: {amount_of_seconds(took)}" for name, held, took in marks]
    return canvas.figure(f"Seconds over memory, mesh {where}", "; ".join(told) + ".", "\n".join(told))


def _dot(canvas: Canvas, x: float, y: float, name: str, held: float, took: float) -> None:
    kind, half = ("all-reduce", _DOT + 1) if name == "found" else ("slice", _DOT + 1) if name else ("all-gather", _DOT)
    said = f"{name}: " if name else ""
    title = f"{said}{amount_of_bytes(held)} on each device, {amount_of_seconds(took)}"
    with canvas.group(class_="point", data_bytes=repr(held), data_seconds=repr(took), data_name=name, title=title):
        canvas.rect(x - half, y - half, 2 * half, 2 * half, kind, rx=2 if name else half)
        if name:
            left = x > _WIDE - 70
            canvas.text(x - 10 if left else x + 10, y - 9, name, "strong ink", "end" if left else "start")


class _Scale:
    """An axis of the figure: maps values to positions from 0 to 1, with margins at both ends, and back."""

    def __init__(self, least: float, most: float, logarithmic: bool):
        self._log = logarithmic
        low, high = (log(least), log(most)) if logarithmic else (least, most)
        room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
        self._low, self._span = low - room, high - low + 2 * room

    def __call__(self, value: float) -> float:
        return ((log(value) if self._log else value) - self._low) / self._span

    def at(self, share: float) -> float:
        """Return the value at a position from 0 to 1."""
        value = self._low + share * self._span
        return exp(value) if self._log else max(value, 0.0)
