"""The answer of the page for an equation: its plan, its pictures, and the alternatives that were compared."""

import json
import shlex
from html import escape
from typing import Any

import gspmd
from gspmd.annotate.spec import Spec
from gspmd.display.units import amount_of_bytes, amount_of_flops, amount_of_seconds
from gspmd.figures.figure import Figure
from gspmd.page import limits
from gspmd.page.requests import EquationRequest, read_dimensions, read_mesh
from gspmd.planner.figures.lowerings import lowerings_figure
from gspmd.planner.figures.roofline import roofline_figure
from gspmd.planner.plan import Plan
from gspmd.planner.roofline import roofline
from gspmd.planner.steps import Step

COMPARED = ("blocking", "looped", "xla")
"""The lowerings that are drawn next to each other."""


class EquationAnswer:
    """The plan of the equation that a request gives, and everything that the page shows about this plan.

    Raises:
        SpecError, PlanError: as for `gspmd.plan`.
    """

    def __init__(self, request: EquationRequest):
        self.request = request
        self.sizes, self.mesh = read_dimensions(request.sizes), read_mesh(request.mesh)
        self.plan = self._planned(request.lowering, request.via)

    def _planned(self, lowering: str, via: str) -> Plan:
        asked = self.request
        return gspmd.plan(
            asked.equation,
            self.sizes,
            self.mesh,
            dtype=asked.dtype,
            chip=asked.chip,
            lowering=lowering,
            via=via if via.strip() else None,
        )

    def record(self) -> dict[str, Any]:
        """Return the plan and its pictures as data for JSON.

        Each amount is there as a number, and also as text, written as in printed tables.
        """
        plan, measured = self.plan, roofline(self.plan)
        return {
            "plan": json.loads(plan.to_json(gradients=False)),
            "said": said(plan),
            "roofline": measured._asdict() | {"bound": measured.bound},
            "figures": {
                "plan": inline(plan.figure()),
                "steps": inline(plan.steps_figure()),
                "roofline": inline(roofline_figure(plan)),
            },
            "command": self.command,
        }

    def compared(self) -> dict[str, Any]:
        """Return the data that the page shows next to the plan: alternatives, lowerings and gradients."""
        plan = self.plan
        lowered = {name: self._planned(name, self.request.via) for name in COMPARED}
        return {
            "alternatives": self.alternatives(),
            "lowerings": {name: said(each) | {"seconds": each.seconds} for name, each in lowered.items()},
            "gradients": [
                json.loads(each.to_json(gradients=False)) | said(each) | {"figure": inline(each.figure())}
                for each in plan.gradients
            ],
            "figure": inline(lowerings_figure(lowered)),
        }

    def alternatives(self) -> list[dict[str, Any]]:
        """List the plans that the search compared, and how much more each plan costs than the cheapest."""
        ranked = self.plan.alternatives(limits.ALTERNATIVES + 1)
        pinnable = len(self.plan.equation.terms) == 1
        return [
            {
                "via": each.via,
                "added": "" if pinnable else str(_added(each)),
                "pinnable": pinnable,
                "chosen": each.routine == self.plan.routine,
                "seconds": each.seconds,
                "wire_bytes": each.wire_bytes,
                "steps": [step.name for step in each.steps],
                "why": why(each, ranked[0]),
                **said(each),
            }
            for each in ranked
        ]

    @property
    def command(self) -> str:
        """The command that prints the same plan."""
        asked, words = self.request, ["gspmd", "explain", self.request.equation]
        words += ["--mesh", ",".join(f"{name}={size}" for name, size in self.mesh.items())]
        words += ["--sizes", ",".join(f"{name}={size}" for name, size in self.sizes.items())]
        for name, usual in (("chip", "tpu-v4"), ("dtype", "bfloat16"), ("lowering", "auto"), ("via", "")):
            value = getattr(asked, name)
            words += [f"--{name}", value] if value.strip() and value != usual else []
        return shlex.join(words)


def said(plan: Plan) -> dict[str, str]:
    """Return the costs of a plan as text, as tables print them."""
    return {
        "said_seconds": amount_of_seconds(plan.seconds),
        "said_bytes": amount_of_bytes(plan.wire_bytes),
        "said_flops": amount_of_flops(plan.flops),
        "said_held": amount_of_bytes(plan.peak_bytes),
    }


def why(plan: Plan, best: Plan) -> str:
    """Return a sentence that says how much more a plan costs than the cheapest, and in which steps."""
    if plan.routine == best.routine:
        return "The cheapest."
    links, products = (_seconds(plan, collective) - _seconds(best, collective) for collective in (True, False))
    parts = []
    if links > 0:
        longest = max((step for step in plan.steps if step.is_collective), key=lambda step: step.seconds)
        sent = plan.wire_bytes - best.wire_bytes
        more = f"{amount_of_bytes(abs(sent))} {'more' if sent > 0 else 'less'}" if sent else "as much"
        parts.append(f"{amount_of_seconds(links)} more on the links ({more} sent), most in {_step_text(longest)}")
    if products > 0:
        parts.append(f"{amount_of_seconds(products)} more in products ({amount_of_flops(plan.flops)})")
    if (hidden := plan.hidden_seconds - best.hidden_seconds) > 0:
        parts.append(f"loops hide {amount_of_seconds(hidden)} more")
    if links < 0:
        parts.append(f"{amount_of_seconds(-links)} less on the links")
    if products < 0:
        parts.append(f"{amount_of_seconds(-products)} less in products")
    return "; ".join(parts) + "." if parts else "As fast, but it sends more, takes more steps, or comes later in order."


def _seconds(plan: Plan, collective: bool) -> float:
    return sum(step.seconds for step in plan.steps if step.is_collective == collective)


def _step_text(step: Step) -> str:
    return f"{step.name} of {step.operand} ({amount_of_seconds(step.seconds)})"


def _added(plan: Plan) -> Spec:
    """Return the spec that the products of a sum have when they are added."""
    output = plan.routine.outputs[0]
    return output.steps[0].before if output.steps else output.spec


def inline(figure: Figure) -> str:
    """Return a figure as an SVG element without a style sheet.

    The page's security policy allows only the style sheets of the page itself.
    """
    left, top, wide, high = (f"{value:.6g}" for value in figure.box)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="gspmd-figure" role="img" width="{wide}" height="{high}"'
    label = f'viewBox="{left} {top} {wide} {high}" aria-label="{escape(figure.title)}: {escape(figure.description)}"'
    return f"{head} {label}>{figure.body}</svg>"
