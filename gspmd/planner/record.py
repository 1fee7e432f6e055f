"""A plan as plain data, under the keys that `Plan.to_json` documents."""

from typing import Any

from gspmd.planner.drawing import PlanFigures
from gspmd.planner.steps import Step

_FIGURES = ("wire_bytes", "flops", "seconds", "hidden_seconds", "peak_bytes")


def record(plan: PlanFigures, *, gradients: bool) -> dict[str, Any]:
    """A plan with what was asked, and its gradients."""
    asked = {"mesh": plan.mesh, "sizes": plan.sizes, "chip": plan.chip.name, "via": plan.via}
    return {**_totals(plan), **asked, "gradients": [_totals(each) for each in plan.gradients] if gradients else []}


def _totals(plan: PlanFigures) -> dict[str, Any]:
    said = {"equation": str(plan.equation), "lowering": plan.lowering, "dtypes": plan.dtypes}
    figures = {name: getattr(plan, name) for name in _FIGURES}
    return {**said, **figures, "steps": [_step(step) for step in plan.steps]}


def _step(step: Step) -> dict[str, Any]:
    return {
        "kind": step.kind,
        "axes": step.axes,
        "operand": step.operand,
        "before": str(step.before),
        "other": None if step.other is None else str(step.other),
        "after": str(step.after),
        "wire_bytes": step.wire_bytes,
        "flops": step.flops,
        "seconds": step.seconds,
    }
