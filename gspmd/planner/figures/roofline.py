"""The figure of a plan's roofline: the seconds of the matrix unit, of main memory and of the links, as bars."""

from gspmd.display.units import amount_of_seconds
from gspmd.figures.canvas import Canvas
from gspmd.figures.figure import Figure
from gspmd.planner.plan import Plan
from gspmd.planner.roofline import roofline

_WIDE, _HIGH, _ROW, _LEFT = 300.0, 14.0, 28.0, 66.0
_BARS = (("compute", "einsum"), ("memory", "soft"), ("links", "all-gather"))


def roofline_figure(plan: Plan) -> Figure:
    """Draw the seconds for which a plan keeps each resource busy, and a line at the planned seconds.

    Args:
        plan: the plan.

    Returns:
        The figure. Every bar is a rectangle with the attributes `data-resource` and `data-seconds`.
    """
    canvas, bounds = Canvas(), roofline(plan)
    most = max(plan.seconds, *(getattr(bounds, name) for name, _ in _BARS)) or 1.0
    for row, (name, kind) in enumerate(_BARS):
        seconds, y = getattr(bounds, name), row * _ROW
        strong = "strong " if name == bounds.bound and seconds else ""
        canvas.text(_LEFT - 10, y + 11, name, f"{strong}ink", "end")
        canvas.rect(_LEFT, y, _WIDE, _HIGH, "panel", rx=3)
        if seconds:
            wide = max(2.0, _WIDE * seconds / most)
            canvas.rect(_LEFT, y, wide, _HIGH, kind, rx=3, data_resource=name, data_seconds=repr(seconds))
        canvas.text(_LEFT + _WIDE + 10, y + 11, amount_of_seconds(seconds), f"{strong}ink")
    end, at = len(_BARS) * _ROW - (_ROW - _HIGH), _LEFT + _WIDE * plan.seconds / most
    canvas.path([(at, -6), (at, end + 6)], "line dashed")
    canvas.text(at, end + 20, f"planned {amount_of_seconds(plan.seconds)}", "small soft", "end")
    said = [f"{name} {amount_of_seconds(getattr(bounds, name))}" for name, _ in _BARS]
    told = f"{', '.join(said)}; planned {amount_of_seconds(plan.seconds)}."
    return canvas.figure(f"Roofline of {plan.equation}", told, told)
