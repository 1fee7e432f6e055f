"""The figure of a plan's steps on the mesh: the blocks that each device holds before and after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gspmd.annotate.spec import Spec
from gspmd.display.units import amount_of_seconds
from gspmd.figures.canvas import Canvas, width_in
from gspmd.figures.figure import Figure
from gspmd.figures.grid import CellSize, MeshGrid, draw_grid, extent
from gspmd.figures.ownership import Ownership
from gspmd.figures.tensor import tensor_text
from gspmd.planner.steps import Step

if TYPE_CHECKING:
    from gspmd.planner.plan import Plan

_FEW, _SOME, _MANY = CellSize(34, 26, 0, 4, 4), CellSize(20, 16, 0, 3, 3), CellSize(10, 9, 0, 2, 3)
_LABEL, _BETWEEN = 18.0, 14.0


def steps_figure(plan: Plan) -> Figure:
    """Draw the tensors of every step of a plan on the mesh, before the step and after it.

    Args:
        plan: the plan.

    Returns:
        The figure. Every step is a group with the attributes `data-step`, `data-kind` and `data-operand`. Every tensor
        in this group is a group with `data-tensor` (`"before"`, `"other"` or `"after"`) and `data-spec`. The devices of
        the tensor have the attributes that `blocks_figure` describes.
    """
    canvas, grid = Canvas(), MeshGrid(plan.mesh)
    size = _FEW if grid.drawn <= 4 else _SOME if grid.drawn <= 16 else _MANY
    y = 0.0
    if grid.elided and plan.steps:
        canvas.text(0, y + 10, grid.elided, "small soft")
        y += 24
    for number, step in enumerate(plan.steps):
        given = {"class_": "step", "data_step": number, "data_kind": step.kind, "data_operand": step.operand}
        with canvas.group(**given):
            y = _draw_step(canvas, y, plan, number, step, size) + 22
    if not plan.steps:
        canvas.text(0, 12, "nothing to do", "soft")
    told = "; ".join(f"{step.name}: {step.before} to {step.after}" for step in plan.steps) or "nothing to do"
    return canvas.figure(f"The steps of {plan.equation} on the mesh", f"{told}.", lambda: _steps_text(plan))


def _draw_step(canvas: Canvas, y: float, plan: Plan, number: int, step: Step, size: CellSize) -> float:
    """Draw one step as a row with its top at `y`, and return the y of its bottom.

    A row has the tensors before the step, an arrow, and the tensor after the step.
    """
    tensors = [("before", step.before), *([("other", step.other)] if step.other is not None else [])]
    head = canvas.text(0, y + 12, f"{number + 1}  {step.name}", f"strong {step.kind}")
    moved = "" if step.kind == "einsum" else step.operand
    figures = f"{step.amount} · {amount_of_seconds(step.seconds)}" + (f" · {moved}" if moved else "")
    canvas.text(head + 8, y + 12, figures, "small soft")
    x, y, bottom = 0.0, y + 22, 0.0
    for at, (role, spec) in enumerate(tensors):
        if at:
            canvas.text(x, y + 20, "·", "strong ink", "middle")
            x += _BETWEEN
        wide, bottom = _draw_tensor(canvas, x, y, plan, role, spec, size)
        x += wide + _BETWEEN
    middle = y + (bottom - y - _LABEL) / 2
    canvas.path([(x, middle), (x + 22, middle)])
    head_ = f"{x + 20:g},{middle - 3.5:g} {x + 20:g},{middle + 3.5:g} {x + 26:g},{middle:g}"
    canvas.parts.append(f'<polygon class="head" points="{head_}"/>')
    _, bottom = _draw_tensor(canvas, x + 26 + _BETWEEN, y, plan, "after", step.after, size)
    return bottom


def _draw_tensor(
    canvas: Canvas, x: float, y: float, plan: Plan, role: str, spec: Spec, size: CellSize
) -> tuple[float, float]:
    """Draw a tensor on the mesh with its spec below, and return the drawing's width and the y of its bottom."""
    held, runs = Ownership(spec, tuple(plan.sizes[dim] for dim in spec.dims), plan.mesh), spec.runs()
    with canvas.group(data_tensor=role, data_spec=spec):
        wide, high = extent(plan.mesh, size)
        draw_grid(canvas, x, y, held, size)
        canvas.text(x, y + high + 15, runs, "ink")
    return max(wide, width_in("", runs)), y + high + _LABEL


def _steps_text(plan: Plan) -> str:
    parts = []
    for number, step in enumerate(plan.steps):
        parts.append(f"{number + 1}  {step.name}: {step.amount}, {amount_of_seconds(step.seconds)}")
        for spec in (step.before, *([step.other] if step.other is not None else []), step.after):
            held = Ownership(spec, tuple(plan.sizes[dim] for dim in spec.dims), plan.mesh)
            parts.append(tensor_text(held))
    return "\n".join(parts) or "nothing to do"
