"""A plan as the papers draw it: a chain of specs, each arrow a collective, with bytes and microseconds."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.text import Text

from gspmd.annotate.equation import Equation
from gspmd.display.console import columns, printable
from gspmd.display.theme import TERMINAL
from gspmd.display.units import amount_of_bytes, amount_of_seconds, axes_text
from gspmd.figures.plan import plan_figure, setting, totals
from gspmd.hardware.chips import Chip
from gspmd.planner.overlap import Overlap, Ring, Stripes
from gspmd.planner.spans import LONGEST, CollectiveSpan, loopable, ring_gather, ring_scatter
from gspmd.planner.steps import Routine, Step, Tensor

if TYPE_CHECKING:
    from gspmd.figures.figure import Figure

_INDENT = "  "
# The numbers of the cells before which a step's line may be broken; the first of these that fits is used.
_BREAKS = ((), (1,), (1, 3), (1, 2, 3))


class PlanFigures(Protocol):
    """The figures of a `Plan` that are drawn. A protocol, because `Plan` imports this module to print itself."""

    @property
    def equation(self) -> Equation: ...

    @property
    def sizes(self) -> Mapping[str, int]: ...

    @property
    def mesh(self) -> Mapping[str, int]: ...

    @property
    def dtypes(self) -> tuple[str, ...]: ...

    @property
    def chip(self) -> Chip: ...

    @property
    def lowering(self) -> str: ...

    @property
    def asked(self) -> str: ...

    @property
    def via(self) -> str | None: ...

    @property
    def routine(self) -> Routine: ...

    @property
    def inputs(self) -> Sequence[Tensor]: ...

    @property
    def loops(self) -> Overlap: ...

    @property
    def hidden_seconds(self) -> float: ...

    @property
    def steps(self) -> tuple[Step, ...]: ...

    @property
    def wire_bytes(self) -> int: ...

    @property
    def flops(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def gradients(self) -> tuple["PlanFigures", ...]: ...


def one_line(plan: PlanFigures) -> str:
    """Return the plan's `repr`."""
    figures = f"{amount_of_bytes(plan.wire_bytes)} sent, {amount_of_seconds(plan.seconds)}"
    return printable(f"<Plan {str(plan.equation)!r} {figures}>")


def plain(plan: PlanFigures) -> str:
    """Return the figure without colors, in characters that standard output can encode."""
    return printable(figure(plan).plain)


def as_html(plan: PlanFigures) -> str:
    """Return the steps as a table, and the picture, for a notebook."""
    from gspmd.display.html import page, table
    from gspmd.figures.notation import spec_html

    rows = [
        (
            " · ".join(map(spec_html, step.sources)),
            f'<span class="{TERMINAL[step.kind]}">{escape(step.name)}</span>',
            spec_html(step.after),
            step.amount,
            amount_of_seconds(step.seconds),
        )
        for step in plan.steps
    ]
    heads = ("from", "step", "to", "amount", "time")
    steps = table(str(plan.equation), heads, rows, right=(3, 4)) if rows else "<p>nothing to do</p>"
    return page([steps, picture(plan).document(standalone=False)])


def picture(plan: PlanFigures, *, gradients: bool = False) -> "Figure":
    """Draw the plan as a picture; see `Plan.figure`."""
    plain = lambda: figure(plan, gradients=gradients).plain  # noqa: E731
    return plan_figure(plan, gradients=gradients, notes=looped, plain=plain)


def figure(plan: PlanFigures, *, gradients: bool = False, width: int | None = None) -> Text:
    """Draw a plan: a heading, a line per step, and a total; with `gradients`, also the plans of the cotangents.

    Args:
        plan: the plan to draw.
        gradients: whether to draw the plans of the gradients too.
        width: the available columns. Longer lines are broken and never cut off: the heading between its figures, and a
            step before its arrow, before its figures, or before each of its cells.
    """
    drawn = [_one(plan, _heading(plan, width), width)]
    for number, gradient in enumerate(plan.gradients if gradients else (), 1):
        title = Text.assemble((f"\n\ngradient of operand {number}: ", "dim"), (f"{gradient.equation}\n", "bold"))
        drawn.append(_one(gradient, title, width))
    return Text().join(drawn)


def _heading(plan: PlanFigures, width: int | None) -> Text:
    said = setting(plan)
    lines = [said[0]]
    for each in said[1:]:
        fits = width is None or len(lines[-1]) + 3 + len(each) <= width
        lines = [*lines[:-1], f"{lines[-1]}   {each}"] if fits else [*lines, f"{_INDENT}{each}"]
    return Text.assemble((f"{plan.equation}\n", "bold"), ("\n".join(lines) + "\n", "dim"))


def _one(plan: PlanFigures, heading: Text, width: int | None) -> Text:
    text = heading.copy()
    for line in _steps(plan.steps, width) or [Text(f"{_INDENT}(nothing to do)")]:
        text.append_text(line).append("\n")
    for line in looped(plan):
        text.append(f"{_INDENT}{line}\n", style="dim")
    return text.append(f"{_INDENT}{totals(plan)}", style="dim")


def _steps(steps: tuple[Step, ...], width: int | None) -> list[Text]:
    """Draw the steps in columns: source, arrow, target, bytes or operations, and seconds. Arrowheads are aligned."""
    rows = [(step.source, step.name, str(step.after), step.amount, amount_of_seconds(step.seconds)) for step in steps]
    if not rows:
        return []
    source, name, after, amount, time = (max(map(len, column)) for column in zip(*rows))
    cells = []
    for step, row in zip(steps, rows):
        arrow = Text(f"── {row[1]} {'─' * (name - len(row[1]))}─▶", style=TERMINAL[step.kind])
        figures = Text(f"{row[3].rjust(amount)}  {row[4].rjust(time)}")
        cells.append((Text(row[0].ljust(source)), arrow, Text(row[2].ljust(after)), figures))
    drawn = ([part for row in cells for part in _broken(row, breaks)] for breaks in _BREAKS)
    fitting = (lines for lines in drawn if width is None or max(map(len, lines)) <= width)
    return next(fitting, [part for row in cells for part in _broken(row, _BREAKS[-1])])


def _broken(row: Sequence[Text], breaks: Sequence[int]) -> list[Text]:
    """Draw a step on several lines, broken before some of its cells; each line is indented more than the last."""
    lines = []
    for depth, (start, stop) in enumerate(zip((0, *breaks), (*breaks, len(row))), 1):
        lines.append(Text(_INDENT * depth) + Text("  ").join(row[start:stop]))
        lines[-1].rstrip()
    return lines


def looped(plan: PlanFigures) -> list[str]:
    """Return a line for each ring, and a line for the seconds that all rings together save."""
    routine, loops = plan.routine, plan.loops
    spans = [(ring_gather(routine.moves[number]), ring) for number, ring in loops.gathers.items()]
    spans += [(ring_scatter(routine, number), ring) for number, ring in loops.scatters.items()]
    lines = [_ring(span, ring, loops.stripes) for span, ring in spans]
    lines += _too_long(plan) if plan.asked == "auto" else ()
    gained = plan.hidden_seconds
    if gained:
        lines.append(f"looped: {amount_of_seconds(abs(gained))} {'less' if gained > 0 else 'more'} than blocking")
    return lines


def _too_long(plan: PlanFigures) -> Iterator[str]:
    """Yield a line for each collective that is not looped because it, or each stripe, would have too many hops."""
    gathers, scatters = loopable(plan.routine)
    left = [gathers[n] for n in gathers if n not in plan.loops.gathers]
    left += [scatters[n] for n in scatters if n not in plan.loops.scatters]
    for span in left:
        hops = max(plan.mesh.get(axis, 1) for axis in span.axes) - 1
        if hops >= LONGEST:
            what = f"{span.steps[0].kind} {axes_text(span.axes)}"
            yield f"not looped: {what}, of {hops} hops along an axis; up to {LONGEST - 1} are written out one by one"


def _ring(span: CollectiveSpan, ring: Ring, stripes: Stripes | None) -> str:
    text = f"looped: {span.steps[0].kind} {axes_text(span.axes)}, {ring.schedule}"
    if ring.axes and ring.within:
        text += f" over {axes_text(ring.axes)}, {axes_text(ring.within)} within a chunk"
    if ring.orders > 1:
        text += ", the axes in turns"
    if stripes:
        return f"{text}, {len(stripes.sizes)} stripes of {stripes.dim}"
    return text if ring.axes else f"{text}, apart from the einsum"


def show(plan: PlanFigures, console: Console, *, gradients: bool = True) -> None:
    """Print the figure in color, in the available columns."""
    drawn = figure(plan, gradients=gradients, width=columns(console))
    console.print(drawn, soft_wrap=True, highlight=False)
