"""A Gantt chart of several lowerings: the times when the links and the matrix unit of a device are busy."""

from collections.abc import Mapping

from gspmd.display.units import amount_of_seconds
from gspmd.figures.canvas import Canvas, width_in
from gspmd.figures.figure import Figure
from gspmd.planner.plan import Plan
from gspmd.planner.timetable import Bar, bars

_WIDE, _BAR, _BETWEEN, _ROW, _LEFT = 460.0, 15.0, 3.0, 54.0, 82.0


def lowerings_figure(plans: Mapping[str, Plan]) -> Figure:
    """Draw the plans of one equation under several lowerings, all on the same time scale.

    Args:
        plans: a mapping from the name of a lowering to its plan.

    Returns:
        The figure. Every lowering is a group with the attributes `data-lowering` and `data-seconds`. Every bar in this
        group is a group with `data-step` and `data-kind`.

    Raises:
        ValueError: there are no plans, or the plans have different equations.
    """
    equations = sorted({str(plan.equation) for plan in plans.values()})
    if len(equations) != 1:
        found = f"the equations {', '.join(equations)}" if equations else "no plans"
        raise ValueError(f"cannot compare the lowerings of {found}.\n  Give plans of one equation.")
    canvas, told = Canvas(), []
    most = max(plan.seconds for plan in plans.values()) or 1.0
    for row, (name, plan) in enumerate(plans.items()):
        y, scale = row * _ROW, _WIDE / most
        with canvas.group(data_lowering=name, data_seconds=repr(plan.seconds)):
            canvas.text(_LEFT - 10, y + 12, name, "strong ink", "end")
            canvas.text(_LEFT - 10, y + 28, amount_of_seconds(plan.seconds), "small soft", "end")
            for lane in range(2):
                canvas.rect(_LEFT, y + lane * (_BAR + _BETWEEN), _WIDE, _BAR, "panel", rx=2)
            for bar in bars(plan):
                if bar.seconds:
                    _draw(canvas, bar, y, scale)
        told.append(f"{name} {amount_of_seconds(plan.seconds)}")
    y = len(plans) * _ROW - 6
    canvas.text(_LEFT, y, "links above, matrix unit below", "small soft")
    canvas.text(_LEFT + _WIDE, y, amount_of_seconds(most), "small soft", "end")
    return canvas.figure(f"Lowerings of {equations[0]}", f"{', '.join(told)}.", "\n".join(told))


def _draw(canvas: Canvas, bar: Bar, y: float, scale: float) -> None:
    left, wide = _LEFT + bar.start * scale, max(1.0, bar.seconds * scale)
    top = y + bar.lane * (_BAR + _BETWEEN)
    loop = " in a loop" if bar.looped else ""
    title = f"{bar.step.name}{loop}: {bar.step.amount}, {amount_of_seconds(bar.step.seconds)}"
    with canvas.group(class_="bar", data_step=bar.number, data_kind=bar.step.kind, title=title):
        canvas.rect(left, top, wide, _BAR, bar.step.kind, rx=2)
        if width_in("small", bar.step.name) + 8 < wide:
            canvas.text(left + wide / 2, top + 11, bar.step.name, "small inverse", "middle")
