"""A plan as text, as the papers draw it: a chain of specs, each arrow a collective, with bytes and microseconds."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from gspmd.collectives.loops import Ring, Stripes, Travel, gather_of, scatter_of
from gspmd.collectives.plan import Step

if TYPE_CHECKING:
    from gspmd.collectives.planning import Plan

COLORS = {
    "all-gather": "cyan",
    "reduce-scatter": "magenta",
    "all-reduce": "red",
    "all-to-all": "yellow",
    "collective-permute": "blue",
    "slice": "green",
    "einsum": "white",
}


def plain(plan: "Plan") -> str:
    """The figure without colors."""
    return figure(plan).plain


def figure(plan: "Plan", *, gradients: bool = False) -> Text:
    """The figure: a heading, a line per step, a total; with `gradients`, those of the cotangents behind it."""
    text = Text()
    mesh = " ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    sizes = " ".join(f"{dim}={size}" for dim, size in plan.sizes.items())
    dtypes = " ".join(dict.fromkeys(plan.dtypes))
    text.append(f"{plan.equation}\n", style="bold")
    text.append(f"{sizes}   mesh {mesh}   {dtypes}   {plan.chip.name}   {plan.lowering}\n", style="dim")
    _lines(text, plan)
    for number, gradient in enumerate(plan.gradients if gradients else (), 1):
        text.append(f"\n\ngradient of operand {number}: ", style="dim")
        text.append(f"{gradient.equation}\n", style="bold")
        _lines(text, gradient)
    return text


def _lines(text: Text, plan: "Plan") -> None:
    rows = [_row(step) for step in plan.steps] or [("(nothing to do)", "", "", "", "", Step)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for before, arrow, after, amount, time, step in rows:
        text.append(f"  {before.ljust(widths[0])}  ")
        text.append(arrow.ljust(widths[1]), style=COLORS.get(getattr(step, "kind", ""), ""))
        text.append(f"  {after.ljust(widths[2])}  {amount.rjust(widths[3])}  {time.rjust(widths[4])}\n")
    for line in looped(plan):
        text.append(f"  {line}\n", style="dim")
    sent, held = amount_of_bytes(plan.wire_bytes), amount_of_bytes(plan.peak_bytes)
    work, time = amount_of_flops(plan.flops), amount_of_seconds(plan.seconds)
    text.append(f"  per device: {sent} sent, {work}, {time}, {held} held", style="dim")


def looped(plan: "Plan") -> list[str]:
    """A line for each tensor that travels while it is multiplied, and how much sooner everything is done for that."""
    routine, loops = plan.routine, plan.loops
    travels = [(gather_of(routine.moves[number]), ring) for number, ring in loops.gathers.items()]
    travels += [(scatter_of(routine, number), ring) for number, ring in loops.scatters.items()]
    lines = [_ring(travel, ring, loops.stripes) for travel, ring in travels if travel]
    gained = plan.hidden_seconds
    if gained:
        lines.append(f"looped: {amount_of_seconds(abs(gained))} {'less' if gained > 0 else 'more'} than blocking")
    return lines


def _ring(travel: Travel, ring: Ring, stripes: Stripes | None) -> str:
    text = f"looped: {travel.steps[0].kind} {axes_text(travel.group)}, {ring.schedule}"
    if ring.axes and ring.within:
        text += f" over {axes_text(ring.axes)}, {axes_text(ring.within)} within a chunk"
    if ring.turns > 1:
        text += ", the axes in turns"
    if stripes:
        return f"{text}, {len(stripes.sizes)} stripes of {stripes.dim}"
    return text if ring.axes else f"{text}, apart from the einsum"


def _row(step: Step) -> tuple[str, str, str, str, str, Step]:
    if step.kind == "einsum":
        before = str(step.before) if step.other is None else f"{step.before} · {step.other}"
        work, time = amount_of_flops(step.flops), amount_of_seconds(step.seconds)
        return before, "── einsum ─▶", str(step.after), work, time, step
    return (
        str(step.before),
        f"── {step.kind} {axes_text(step.axes)} ─▶",
        str(step.after),
        amount_of_bytes(step.wire_bytes),
        amount_of_seconds(step.seconds),
        step,
    )


def axes_text(axes: tuple[str, ...]) -> str:
    """Mesh axes as a spec writes them: `yz`, or `data,model`.

    >>> axes_text(("y", "z"))
    'yz'
    """
    return ("" if all(len(axis) == 1 for axis in axes) else ",").join(axes)


def amount_of_bytes(amount: float) -> str:
    """Bytes for a reader.

    >>> amount_of_bytes(4423680)
    '4.42 MB'
    """
    return _scaled(amount, 1000, ("B", "kB", "MB", "GB", "TB"))


def amount_of_flops(amount: float) -> str:
    return _scaled(amount, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def amount_of_seconds(amount: float) -> str:
    return "0 µs" if not amount else _scaled(amount * 1e9, 1000, ("ns", "µs", "ms", "s"))


def _scaled(amount: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if amount < base:
            return f"{amount:.3g} {unit}" if amount < 100 else f"{amount:.0f} {unit}"
        amount /= base
    return f"{amount:.3g} {units[-1]}"


def show(plan: "Plan", console: Console, *, gradients: bool = True) -> None:
    """Print the figure in color."""
    console.print(figure(plan, gradients=gradients), soft_wrap=True, highlight=False)
