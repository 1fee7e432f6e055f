"""The drawing of a plan as text: a chain of specs, joined by arrows for the collectives, with bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from gspmd.display.console import columns, printable
from gspmd.display.theme import TERMINAL
from gspmd.display.units import amount_of_bytes, amount_of_flops, amount_of_seconds, axes_text
from gspmd.planner.overlap import Ring, Stripes
from gspmd.planner.spans import LONGEST, CollectiveSpan, loopable, ring_gather, ring_scatter
from gspmd.planner.steps import Step

if TYPE_CHECKING:
    from gspmd.planner.plan import Plan

_INDENT = "  "
# Cells of a step's row before which its line may be broken, in order of preference: the first that fits is used.
_BREAKS = ((), (1,), (1, 3), (1, 2, 3))


def one_line(plan: Plan) -> str:
    """Return the text for the `repr` of a plan."""
    figures = f"{amount_of_bytes(plan.wire_bytes)} sent, {amount_of_seconds(plan.seconds)}"
    return printable(f"<Plan {str(plan.equation)!r} {figures}>")


def plain(plan: Plan) -> str:
    """Return the drawing without colors, in characters that standard output can encode."""
    return printable(figure(plan).plain)


def figure(plan: Plan, *, gradients: bool = False, width: int | None = None) -> Text:
    """Draw a plan as text, with a heading, a line for each step, and the totals.

    Args:
        plan: the plan to draw.
        gradients: whether to draw the plans of the gradients too.
        width: the number of available columns, or None for no limit. Longer lines are broken and never cut off. The
            heading is broken between its figures. A step is broken before its arrow, before its arrow and its figures,
            or before each of its cells.
    """
    drawn = [_one(plan, _heading(plan, width), width)]
    for number, gradient in enumerate(plan.gradients if gradients else (), 1):
        title = Text.assemble((f"\n\ngradient of operand {number}: ", "dim"), (f"{gradient.equation}\n", "bold"))
        drawn.append(_one(gradient, title, width))
    return Text().join(drawn)


def _heading(plan: Plan, width: int | None) -> Text:
    said = setting(plan)
    lines = [said[0]]
    for each in said[1:]:
        fits = width is None or len(lines[-1]) + 3 + len(each) <= width
        lines = [*lines[:-1], f"{lines[-1]}   {each}"] if fits else [*lines, f"{_INDENT}{each}"]
    return Text.assemble((f"{plan.equation}\n", "bold"), ("\n".join(lines) + "\n", "dim"))


def _one(plan: Plan, heading: Text, width: int | None) -> Text:
    text = heading.copy()
    for line in _steps(plan.steps, width) or [Text(f"{_INDENT}(nothing to do)")]:
        text.append_text(line).append("\n")
    for line in looped(plan):
        text.append(f"{_INDENT}{line}\n", style="dim")
    return text.append(f"{_INDENT}{totals(plan)}", style="dim")


def setting(plan: Plan) -> tuple[str, ...]:
    """Return texts that say for which sizes, mesh, dtypes, chip and lowering a plan was made."""
    sizes, mesh = (" ".join(f"{name}={size}" for name, size in of.items()) for of in (plan.sizes, plan.mesh))
    said = (sizes, f"mesh {mesh}", " ".join(dict.fromkeys(plan.dtypes)), plan.chip.describe(plan.mesh), plan.lowering)
    return tuple(filter(None, said))


def totals(plan: Plan) -> str:
    """Return the last line of the drawing: the totals of the whole plan."""
    sent, held = amount_of_bytes(plan.wire_bytes), amount_of_bytes(plan.peak_bytes)
    work, time = amount_of_flops(plan.flops), amount_of_seconds(plan.seconds)
    return f"per device: {sent} sent, {work}, {time}, about {held} held"


def _steps(steps: tuple[Step, ...], width: int | None) -> list[Text]:
    """Draw the steps in columns with aligned arrowheads: source, arrow, target, bytes or FLOPs, and seconds."""
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
    """Draw a step on several lines, broken before the given cells; each line is indented more than the one before."""
    lines = []
    for depth, (start, stop) in enumerate(zip((0, *breaks), (*breaks, len(row))), 1):
        lines.append(Text(_INDENT * depth) + Text("  ").join(row[start:stop]))
        lines[-1].rstrip()
    return lines


def looped(plan: Plan) -> list[str]:
    """Return a line of text for each ring, and a line for the seconds that all rings together save."""
    routine, loops = plan.routine, plan.loops
    spans = [(ring_gather(routine.moves[number]), ring) for number, ring in loops.gathers.items()]
    spans += [(ring_scatter(routine, number), ring) for number, ring in loops.scatters.items()]
    lines = [_ring(span, ring, loops.stripes) for span, ring in spans]
    lines += _too_long(plan) if plan.asked == "auto" else ()
    gained = plan.hidden_seconds
    if gained:
        lines.append(f"looped: {amount_of_seconds(abs(gained))} {'less' if gained > 0 else 'more'} than blocking")
    return lines


def _too_long(plan: Plan) -> Iterator[str]:
    """Yield a line of text for each collective that is not looped because that would take too many hops."""
    gathers, scatters = loopable(plan.routine)
    left = [gathers[n] for n in gathers if n not in plan.loops.gathers]
    left += [scatters[n] for n in scatters if n not in plan.loops.scatters]
    for span in left:
        hops = max(plan.mesh.get(axis, 1) for axis in span.axes) - 1
        if hops >= LONGEST:
            what = f"{span.steps[0].kind} {axes_text(span.axes)}"
            yield f"not looped: {what}, of {hops} hops along an axis; at most {LONGEST - 1} are written out one by one"


def _ring(span: CollectiveSpan, ring: Ring, stripes: Stripes | None) -> str:
    text = f"looped: {span.steps[0].kind} {axes_text(span.axes)}, {ring.schedule}"
    if ring.axes and ring.within:
        text += f" over {axes_text(ring.axes)}, {axes_text(ring.within)} within a chunk"
    if ring.orders > 1:
        text += ", the axes in turns"
    if stripes:
        return f"{text}, {len(stripes.sizes)} stripes of {stripes.dim}"
    return text if ring.axes else f"{text}, apart from the einsum"


def show(plan: Plan, console: Console, *, gradients: bool = True) -> None:
    """Print the drawing of a plan in color, within the available columns."""
    drawn = figure(plan, gradients=gradients, width=columns(console))
    console.print(drawn, soft_wrap=True, highlight=False)
