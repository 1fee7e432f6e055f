"""`Timeline`: a simulated run of a compiled program, with the hidden and the exposed time of its communication."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from gspmd.annotate.errors import PlanError, article
from gspmd.audit.simulation.machine import COPY_ROWS, LOCAL_ROWS, Span
from gspmd.display.plain import printable
from gspmd.display.printed import Printed
from gspmd.display.tables import Column, Sheet
from gspmd.display.theme import TERMINAL
from gspmd.display.units import amount_of_seconds, axes_text
from gspmd.hardware.chips import Chip

if TYPE_CHECKING:
    from gspmd.figures.figure import Figure

_ROUNDING = 1e-12
"""Largest rounding error of a sum of seconds."""


@dataclass(frozen=True)
class CategoryTotal:
    """The sums over all bars of one category on the same rows.

    Attributes:
        category: the kind of a collective, `einsum`, `other` or `copy`.
        axes: the mesh axes of a collective; `("host memory",)`, which is no mesh axis, for copies to and from host
            memory; empty for all other copies and categories. The category says whether this is a collective.
        count: number of executions.
        seconds: total time of all executions.
        exposed: for a collective, the part of `seconds` in which the device waits for it; 0 in all other categories.
    """

    category: str
    axes: tuple[str, ...]
    count: int
    seconds: float
    exposed: float


@dataclass(frozen=True, repr=False)
class Timeline(Printed):
    """One simulated run of a compiled program on one device.

    All seconds are totals in which every iteration of every loop is counted.

    Attributes:
        compute_seconds: seconds in which the device computes, waits for its own memory or for host memory, or waits
            for launches.
        hidden_seconds: the part of `compute_seconds` in which a collective is in flight.
        exposed_seconds: seconds in which the device waits for a collective.
        memory_seconds: the part of `compute_seconds` that main memory limits. In this time, the device waits for
            copies between its own memories, or runs instructions for which moving the bytes at full bandwidth takes
            longer than computing the matrix products at peak FLOP/s. Instructions that access main memory but compute
            no products always belong to this part, with the seconds that the compiler estimates.
        flops: FLOPs of the matrix products, where a multiplication and its addition count as two.
        model_flops: the FLOPs from which `mfu` is computed. These are the model's FLOPs given to
            `gspmd.audit.timeline`, or `flops` if none were given.
        spans: the bars to draw. Only one iteration of a loop is drawn, and the bar of the loop states the number of
            iterations.
        parts: the sums over all bars with the same category and rows, longest first.
        chip: the simulated hardware.
        mesh: sizes of the mesh axes.
        name: the name of the program.
        notes: descriptions of the parts of the program whose time is modelled or could not be counted.
        warnings: descriptions of avoidable costs, each with a remedy. These are loops in which every iteration copies
            an array that the loop does not change, or a large part of such an array; and products that the compiler
            computes again to save memory.
        launch_seconds: the part of `compute_seconds` in which a GPU waits for the host to launch the next kernel.
        host_seconds: the part of `compute_seconds` in which the device waits for copies to or from host memory.
    """

    compute_seconds: float
    hidden_seconds: float
    exposed_seconds: float
    memory_seconds: float
    flops: int
    model_flops: float
    spans: tuple[Span, ...] = field(repr=False)
    parts: tuple[CategoryTotal, ...] = field(repr=False)
    chip: Chip
    mesh: Mapping[str, int]
    name: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    launch_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of one execution of the whole program."""
        return self.compute_seconds + self.exposed_seconds

    @property
    def mfu(self) -> float:
        """The model FLOPs utilization, model_flops / (step_seconds * peak FLOP/s in bfloat16)."""
        return self.model_flops / (self.step_seconds * self.chip.flops("bfloat16")) if self.step_seconds else 0.0

    @property
    def memory_share(self) -> float:
        """The fraction of `compute_seconds` that main memory limits."""
        return self.memory_seconds / self.compute_seconds if self.compute_seconds else 0.0

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows of a drawing: computation, the mesh axes of more than one device, other links, and memories."""
        axes = [axis for axis, size in self.mesh.items() if size > 1]
        used = dict.fromkeys(row for span in self.spans for row in span.rows)
        others = [row for row in used if row not in (*LOCAL_ROWS, *axes)]
        return ("compute", *axes, *others, *(row for row in COPY_ROWS if row in used))

    def lanes(self, row: str) -> list[tuple[Span, int]]:
        """Return the bars on a row, sorted by start, each with the number of the first lane that is free at its start.

        Loops are left out.
        """
        ends: list[float] = []
        placed = []
        spans = (span for span in self.spans if row in span.rows and span.category != "loop")
        for span in sorted(spans, key=lambda span: span.start):
            lane = next((lane for lane, end in enumerate(ends) if end <= span.start + _ROUNDING), len(ends))
            ends[lane : lane + 1] = [span.start + span.seconds]
            placed.append((span, lane))
        return placed

    def table(self) -> Sheet:
        """Return a table of `parts`, longest first, with the whole step in the last row."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        chips = f"{prod(self.mesh.values())} {self.chip.describe(self.mesh)}"
        title = f"timeline of {self.name or 'a program'}: one of {chips}, {mesh}"
        sheet = Sheet(title, _COLUMNS)
        for part in self.parts:
            sheet.add(f"[{TERMINAL.get(part.category, 'default')}]{part.category}[/]", *_figures(part))
        if self.launch_seconds:
            sheet.add("waiting for the host to launch", "", "", "", amount(self.launch_seconds), "")
        if self.host_seconds:
            sheet.add("waiting for host memory", "", "", "", amount(self.host_seconds), "")
        sheet.add("step", "", "", "", *_amounts(self.step_seconds, self.exposed_seconds), total=True)
        return sheet

    @property
    def summary(self) -> str:
        """One line of text with the times of the step and the model FLOPs utilization."""
        step, compute, exposed, hidden = _amounts(
            self.step_seconds, self.compute_seconds, self.exposed_seconds, self.hidden_seconds
        )
        bounds = [f"{self.memory_share:.0%} bound by memory"]
        if self.launch_seconds:
            bounds.append(f"{self.launch_seconds / self.compute_seconds:.0%} by launches")
        if self.host_seconds:
            bounds.append(f"{self.host_seconds / self.compute_seconds:.0%} waiting for host memory")
        return (
            f"{step} = {compute} computing ({', '.join(bounds)}) + {exposed} waiting for collectives; "
            f"{hidden} of collectives hidden; MFU {self.mfu:.1%}"
        )

    def figure(self) -> "Figure":
        """Draw the work of the device over time, as SVG; `gspmd.audit.gantt` makes a larger drawing with all names.

        Returns:
            A figure with a row for computation, a row for each mesh axis, and rows for copies between memories and to
            host memory.
        """
        from gspmd.audit.simulation.figure import timeline_figure

        return timeline_figure(self)

    def __rich__(self) -> Group:
        return Group(self.table(), Text(self.summary), *self.remarks())

    def remarks(self) -> list[Text]:
        """Return the warnings and the notes, each as one line of text."""
        warnings = [Text(f"warning: {warning}", style="yellow") for warning in self.warnings]
        return warnings + [Text(f"note: {note}") for note in self.notes]

    def __repr__(self) -> str:
        return printable(f"<Timeline of {self.name or 'a program'} on {self.chip.name}: {self.summary}>")


_COLUMNS = (
    Column("what runs"),
    Column("mesh axes"),
    Column("count", "right", goes=2),
    Column("each", "right", goes=1),
    Column("together", "right"),
    Column("exposed", "right"),
)


def _figures(part: CategoryTotal) -> tuple[str, ...]:
    amounts = _amounts(part.seconds / part.count, part.seconds)
    exposed = amount_of_seconds(part.exposed) if part.category not in ("einsum", "other", "copy") else ""
    return axes_text(part.axes), str(part.count), *amounts, exposed


def _amounts(*seconds: float) -> tuple[str, ...]:
    return tuple(map(amount, seconds))


def amount(seconds: float) -> str:
    """Return seconds as text; less than a nanosecond is written as 0, because it is a rounding error."""
    return amount_of_seconds(seconds if seconds >= 1e-9 else 0)


def checked_timeline(given: Any, doing: str) -> Timeline:
    """Return `given`, after checking that it is a timeline.

    Args:
        given: the value of an argument.
        doing: a verb for the error message, such as "draw".

    Raises:
        PlanError: `given` is not a timeline.
    """
    if not isinstance(given, Timeline):
        raise PlanError(
            f"cannot {doing} {article(type(given).__name__)}: it is not a timeline.\n"
            "  Give the result of gspmd.audit.timeline(...), or the timeline of compile_offline's report."
        )
    return given
