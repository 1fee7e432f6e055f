"""The figure of a plan: specs in boxes, and a collective on every arrow, with its bytes and seconds.

Source: Pope et al. 2022, Efficiently Scaling Transformer Inference (arXiv 2211.05102), figures 2 and 3.
Differs: time runs downward, so that the figure fits the column of a paper and the screen of a telephone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from gspmd.annotate.equation import Equation
from gspmd.annotate.spec import Spec
from gspmd.display.html import page, table
from gspmd.display.runs import Run, joined, runs_html
from gspmd.display.theme import TERMINAL
from gspmd.display.units import amount_of_seconds
from gspmd.figures.canvas import Canvas, width_in
from gspmd.figures.figure import Figure
from gspmd.planner.drawing import figure, looped, setting, totals
from gspmd.planner.steps import Step

if TYPE_CHECKING:
    from gspmd.planner.plan import Plan

_BOX, _NODE, _LINE, _GAP, _PAD = 26.0, 40.0, 15.0, 26.0, 12.0
"""Heights of a box, of an einsum's node and of a line of text; the space between columns; the margin inside boxes."""
_STEP = 62.0
"""Height of a step, which has a line, two lines of text and an arrow."""
_HEAD = 16.0
"""Height of an operand's name, which is above the operand's first box."""
_NARROW = 330.0
"""Minimum width for the lines of the heading."""


@dataclass
class _Chain:
    """A column of the figure: a spec in a box, then steps, each with its number and the spec after the step."""

    start: Spec
    steps: Sequence[tuple[int, Step]]
    title: str = ""
    boxed: bool = True

    @property
    def width(self) -> float:
        specs = [*([self.start] if self.boxed else ()), *(step.after for _, step in self.steps)]
        labels = [width_in(kind, text) for _, step in self.steps for text, kind in _label(step)]
        return max((*(width_in("", spec.runs()) + 2 * _PAD for spec in specs), *labels, width_in("small", self.title)))

    def draw(self, canvas: Canvas, x: float, y: float) -> float:
        """Draw the chain with its top at `y` and its center at `x`, and return the y of its bottom."""
        if self.title:
            canvas.text(x, y + 11, self.title, "small soft", "middle")
            y += _HEAD
        if self.boxed:
            y = _box(canvas, x, y, self.start)
        for number, step in self.steps:
            title = f"{step.name}: {step.before} to {step.after}"
            given = {"class_": "step", "data_step": number, "data_kind": step.kind, "data_operand": step.operand}
            with canvas.group(**given, title=title):
                canvas.path([(x, y), (x, y + 9)])
                for row, (text, kind) in enumerate(_label(step)):
                    canvas.text(x, y + 21 + row * (_LINE - 1), text, kind, "middle")
                canvas.arrow([(x, y + 42), (x, y + _STEP)])
                y = _box(canvas, x, y + _STEP, step.after)
        return y


def _label(step: Step) -> list[tuple[str, str]]:
    figures = f"{step.amount} · {amount_of_seconds(step.seconds)}"
    return [(step.name, f"strong {step.kind}"), (figures, "small soft")]


def _box(canvas: Canvas, x: float, y: float, spec: Spec) -> float:
    runs = spec.runs()
    wide = width_in("", runs) + 2 * _PAD
    with canvas.group(class_="spec", data_spec=spec):
        canvas.rect(x - wide / 2, y, wide, _BOX, "box", rx=5)
        canvas.text(x, y + _BOX / 2 + 4, runs, "ink", "middle")
    return y + _BOX


def plan_figure(plan: Plan, *, gradients: bool = False) -> Figure:
    """Draw a plan: the steps of every operand up to the local einsum, and the steps of the result after the einsum.

    Args:
        plan: the plan.
        gradients: whether to draw the plans of the gradients below the plan.

    Returns:
        The figure. Every step is a group with the attributes `data-step` (the step's number in `plan.steps`),
        `data-kind` and `data-operand`. Every spec is a group with `data-spec`. Each gradient is a group with
        `data-gradient`, a number counted from 1.
    """
    canvas = Canvas()
    y = _one(canvas, plan, 0.0, setting(plan))
    for number, gradient in enumerate(plan.gradients if gradients else (), 1):
        with canvas.group(data_gradient=number):
            canvas.text(0, y + 30, f"gradient of operand {number}", "small soft")
            y = _one(canvas, gradient, y + 36, ())
    told = f"The plan of {plan.equation}: " + "; ".join(f"{step.name}, {_label(step)[1][0]}" for step in plan.steps)
    return canvas.figure(
        f"Plan of {plan.equation}", f"{told}. {totals(plan)}.", lambda: figure(plan, gradients=gradients).plain
    )


def as_html(plan: Plan) -> str:
    """Return HTML for a notebook, with the steps of a plan as a table and the figure of the plan."""
    rows = [
        (
            " · ".join(runs_html(spec.runs()) for spec in step.sources),
            f'<span class="{TERMINAL[step.kind]}">{escape(step.name)}</span>',
            runs_html(step.after.runs()),
            step.amount,
            amount_of_seconds(step.seconds),
        )
        for step in plan.steps
    ]
    heads = ("from", "step", "to", "amount", "time")
    steps = table(str(plan.equation), heads, rows, right=(3, 4)) if rows else "<p>nothing to do</p>"
    return page([steps, plan_figure(plan).document(standalone=False)])


def _one(canvas: Canvas, plan: Plan, y: float, heading: Sequence[str]) -> float:
    """Draw one plan with its top at `y` and its heading at the left, and return the y of its bottom."""
    drawing = _Routine(plan)
    wide = max(drawing.width, _NARROW)
    y = canvas.lines(0, y + 14, _equation(plan.equation), wide, "title ink", 19)
    y = canvas.lines(0, y, _words(heading), wide, "small soft", _LINE)
    y = drawing.draw(canvas, (wide - drawing.width) / 2, y + 4) + 24
    for line in (*looped(plan), totals(plan)):
        y = canvas.lines(0, y, _words(line.split(", "), ", "), wide, "small soft", _LINE)
    return y - _LINE + 4


def _words(parts: Sequence[str], between: str = " · ") -> list[list[Run]]:
    return [[Run(part + between * (at + 1 < len(parts)))] for at, part in enumerate(parts)]


def _equation(equation: Equation) -> list[list[Run]]:
    """Return an equation as a list of words, between which a line may be broken."""
    words: list[list[Run]] = []
    for number, term in enumerate(equation.terms):
        words += [[Run("+ ")]] if number else []
        for at, operand in enumerate(term.operands):
            inner = _operand(operand.specs, operand.group)
            words.append([*inner, Run(", " if at + 1 < len(term.operands) else " ")])
    words.append([Run("→ "), *_operand(equation.outputs, equation.group)])
    return words


def _operand(specs: Sequence[Spec], group: bool) -> list[Run]:
    inner = joined((spec.runs() for spec in specs), ", ")
    return [Run("("), *inner, Run(")")] if group else inner


class _Routine:
    """The chains of steps of one routine, the nodes of its einsums, and their horizontal positions."""

    def __init__(self, plan: Plan):
        routine, numbers = plan.routine, iter(range(len(plan.steps)))
        self.routine = routine
        self.lanes = [
            _Chain(routine.inputs[move.source], _numbered(move.steps, numbers), _named(plan, move.source))
            for move in routine.moves
        ]
        self.einsums: list[int | None] = []
        self.products: list[_Chain] = []
        for product in routine.products:
            self.einsums.append(None if product.passes_through else next(numbers))
            chain = _Chain(product.einsum.after, _numbered(product.steps, numbers), "", not product.passes_through)
            self.products.append(chain)
        self.outputs = [_Chain(o.spec, _numbered(o.steps, numbers), "", False) for o in routine.outputs]
        self._place()

    def _place(self) -> None:
        """Choose the horizontal center of every chain, product and output.

        An operand that several products share is drawn to the left of the operands that belong to one product each. A
        single node spans the columns of all these products, so that no lines cross.
        """
        products = self.routine.products
        uses = [sum(lane in product.operands for product in products) for lane in range(len(self.lanes))]
        # The lanes that only this product uses. A product without such lanes stands below all lanes that it uses.
        own = [[lane for lane in dict.fromkeys(p.operands) if uses[lane] == 1] or list(p.operands) for p in products]
        wide = [lane.width for lane in self.lanes]
        for product, lanes in enumerate(own):
            needed = max(self.products[product].width, self._node_width(product), self._output_width(product))
            missing = needed - sum(wide[lane] for lane in lanes) - _GAP * (len(lanes) - 1)
            for lane in lanes if missing > 0 else ():
                wide[lane] += missing / len(lanes)
        middles, x = [], 0.0
        for lane in wide:
            middles.append(x + lane / 2)
            x += lane + _GAP
        self.width = x - _GAP
        self.middles, self.edges = middles, [(m - w / 2, m + w / 2) for m, w in zip(middles, wide)]
        self.under = [
            (min(self.edges[n][0] for n in lanes) + max(self.edges[n][1] for n in lanes)) / 2 for lanes in own
        ]
        self.below = [sum(self.under[p] for p in o.products) / len(o.products) for o in self.routine.outputs]

    def _node_width(self, product: int) -> float:
        if self.einsums[product] is None:
            return 0.0
        return max(width_in(kind, text) for text, kind in self._node(product)) + 2 * _PAD

    def _output_width(self, product: int) -> float:
        return max((self.outputs[n].width for n, o in enumerate(self.routine.outputs) if product in o.products
                    and len(o.products) == 1 and o.steps), default=0.0)  # fmt: skip

    def _node(self, product: int) -> list[tuple[list[Run], str]]:
        step = self.routine.products[product].einsum
        specs = [step.before, *([step.other] if step.other is not None else [])]
        said = [*joined((spec.runs() for spec in specs), " · ")]
        return [([Run(_label(step)[0][0])], "strong einsum"), (said, "ink"),
                ([Run(_label(step)[1][0])], "small soft")]  # fmt: skip

    def draw(self, canvas: Canvas, left: float, y: float) -> float:
        """Draw the whole routine with its top at `y`, and return the y of its bottom."""
        ends = [lane.draw(canvas, left + x, y) for lane, x in zip(self.lanes, self.middles)]
        met = max(ends) + 24
        for lanes, products in self._nodes():
            self._draw_node(canvas, left, met, lanes, products, ends)
        node = met + _NODE + _LINE
        done = []
        for number, (chain, x) in enumerate(zip(self.products, self.under)):
            if self.einsums[number] is None:
                (lane,) = self.routine.products[number].operands
                done.append(chain.draw(canvas, left + x, ends[lane]))
                continue
            canvas.arrow([(left + x, node), (left + x, node + 20)])
            done.append(chain.draw(canvas, left + x, node + 20))
        settled = max(done)
        return max(self._draw_output(canvas, left, n, done, settled) for n in range(len(self.outputs)))

    def _nodes(self) -> Iterator[tuple[set[int], list[int]]]:
        """Yield the chains and the products that each node joins; products that share an operand share a node."""
        left = [number for number, einsum in enumerate(self.einsums) if einsum is not None]
        while left:
            together, lanes = [left[0]], set(self.routine.products[left[0]].operands)
            while more := [n for n in left if n not in together and lanes & {*self.routine.products[n].operands}]:
                together += more
                lanes.update(*(self.routine.products[n].operands for n in more))
            yield lanes, sorted(together)
            left = [number for number in left if number not in together]

    def _draw_node(
        self, canvas: Canvas, left: float, y: float, lanes: set[int], products: list[int], ends: Sequence[float]
    ) -> None:
        for lane in lanes:
            canvas.arrow([(left + self.middles[lane], ends[lane]), (left + self.middles[lane], y)])
        first, last = min(self.edges[lane][0] for lane in lanes), max(self.edges[lane][1] for lane in lanes)
        canvas.rect(left + first, y, last - first, _NODE + _LINE, "node", rx=8)
        for product in products:
            step, x = self.routine.products[product].einsum, left + self.under[product]
            with canvas.group(class_="step", data_step=self.einsums[product], data_kind=step.kind):
                for row, (runs, kind) in enumerate(self._node(product)):
                    canvas.text(x, y + 17 + row * (_LINE + 0.5), runs, kind, "middle")

    def _draw_output(self, canvas: Canvas, left: float, number: int, done: Sequence[float], settled: float) -> float:
        """Draw the sum of an output's products, and the steps after this sum."""
        output, x = self.routine.outputs[number], left + self.below[number]
        if len(output.products) == 1:
            y = done[output.products[0]]
        else:
            y = settled + 24
            for product in output.products:
                at = left + self.under[product]
                canvas.path([(at, done[product]), (at, settled + 12), (x, settled + 12)])
            canvas.arrow([(x, settled + 12), (x, y)])
            canvas.rect(x - 13, y, 26, _BOX, "node", rx=13)
            canvas.text(x, y + _BOX / 2 + 4.5, "+", "strong ink", "middle")
            y += _BOX
            if not output.steps:
                canvas.arrow([(x, y), (x, y + 20)])
                y = _box(canvas, x, y + 20, output.spec)
        y = self.outputs[number].draw(canvas, x, y)
        return y


def _numbered(steps: Sequence[Step], numbers: Iterator[int]) -> list[tuple[int, Step]]:
    return [(next(numbers), step) for step in steps]


def _named(plan: Plan, source: int) -> str:
    return plan.inputs[source].name if source < len(plan.inputs) else ""
