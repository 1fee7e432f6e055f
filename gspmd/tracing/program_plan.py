"""`ProgramPlan`: the planned steps of a whole function, each with the number of times that it runs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from gspmd.display.plain import printable
from gspmd.display.printed import Printed
from gspmd.display.tables import Column, Sheet, counted
from gspmd.display.theme import TERMINAL
from gspmd.display.units import amount_of_bytes, amount_of_flops, amount_of_seconds, axes_text
from gspmd.hardware.chips import Chip
from gspmd.hardware.links import network_bytes, sharing_node
from gspmd.planner.plan import Plan
from gspmd.planner.spans import ring_gather, ring_scatter
from gspmd.planner.steps import Step
from gspmd.tracing.steps import hlo_name

if TYPE_CHECKING:
    from gspmd.figures.figure import Figure


@dataclass(frozen=True, repr=False)
class PlannedStep:
    """A planned step of a function, with the number of times that it runs.

    Attributes:
        step: the step, with its kind, its mesh axes, and the bytes and seconds of one run.
        trips: the number of times that the step runs.
        equation: the equation to which the step belongs.
        number: the number of the step in this equation.
        dtype: the dtype that a collective sends, as HLO names it, such as `bf16`; empty if the step is a forecast (see
            `ProgramPlan`).
        first: the equation and number of the earlier step whose result this step uses instead of running; None if this
            step runs. Either both steps have the same result, or one collective reduces the sum of the values that both
            steps would reduce.
        hidden_seconds: for a collective of a looped equation, its share of the seconds that the equation's loops save
            by sending during products, summed over all runs.
        is_behind_loop: whether the compiler moves the step behind the loop that adds up its results
            (`gspmd.tracing.sums`).
    """

    step: Step
    trips: int
    equation: str
    number: int = 0
    dtype: str = ""
    first: tuple[str, int] | None = None
    hidden_seconds: float = 0.0
    is_behind_loop: bool = False

    @property
    def wire_bytes(self) -> int:
        """The number of bytes that one device sends in all runs of the step together."""
        return self.step.wire_bytes * self.trips

    def __repr__(self) -> str:
        what = f"{self.trips} × {self.step.kind} {axes_text(self.step.axes)}".rstrip()
        sent = amount_of_bytes(self.wire_bytes)
        return printable(f"<PlannedStep {what}: {sent}, step {self.number} of {self.equation}>")


@dataclass(frozen=True, repr=False)
class ProgramPlan(Printed):
    """All planned steps of a function, in program order; bytes, FLOPs and seconds are per device and per execution.

    For a conditional, only the branch with the largest `size` is counted. A while loop is counted as one iteration,
    because its trip count is not known in advance. Under vmap, the figures of a step are for the whole batch. For an
    equation lowered with `xla`, the steps are only a forecast, because the compiler chooses the collectives. The
    totals include these steps.

    Attributes:
        entries: the steps that run.
        shared: steps that reuse the result of an earlier step in `entries`. Shared steps send no bytes, and no total
            includes them.
        lowered: the equations under lowering `xla`, whose collectives the compiler chooses.
        notes: sentences about the parts of the function that could not be counted exactly.
    """

    entries: tuple[PlannedStep, ...]
    shared: tuple[PlannedStep, ...] = ()
    lowered: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps in `entries`, each repeated as often as it runs."""
        return tuple(entry.step for entry in self.entries for _ in range(entry.trips))

    @property
    def wire_bytes(self) -> int:
        """The number of bytes that one device sends in one execution."""
        return sum(entry.wire_bytes for entry in self.entries)

    def network_bytes(self, mesh: Mapping[str, int], chip: Chip) -> int:
        """Return the number of bytes that one device sends over the network between GPU nodes or TPU slices.

        Args:
            mesh: size of every mesh axis.
            chip: the hardware. Nodes (or slices), each with `chip.node_devices` devices, fill the mesh one after
                another.
        """
        if chip.nodes(mesh) == 1:
            return 0
        return sum(entry.trips * _over_network(entry.step, mesh, chip) for entry in self.entries)

    @property
    def size(self) -> tuple[int, float, int]:
        """The tuple (bytes, seconds, FLOPs), by which the branches of a conditional are compared."""
        return self.wire_bytes, self.seconds, self.flops

    @property
    def seconds(self) -> float:
        """The predicted time of all planned steps in seconds, if no steps overlap."""
        return sum(entry.step.seconds * entry.trips for entry in self.entries)

    @property
    def hidden_seconds(self) -> float:
        """The seconds that looped equations save because they send while they multiply, as their plans predict.

        If only some of an equation's collectives run, because the results of the others are already there, only the
        corresponding fraction of the equation's saved seconds is counted. The overlap of experts' chunks with one
        another is not counted.
        """
        return sum(entry.hidden_seconds for entry in self.entries)

    @property
    def flops(self) -> int:
        """The number of floating-point operations (FLOPs) of the planned einsums."""
        return sum(entry.step.flops * entry.trips for entry in self.entries)

    def by_kind_and_axes(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
        """Return the number of runs, and the bytes sent, for each kind of collective and set of mesh axes."""
        counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for entry in self.entries:
            if entry.step.is_collective:
                key = (entry.step.kind, tuple(sorted(entry.step.axes)))
                counts[key] += entry.trips
                sent[key] += entry.wire_bytes
        return {key: (counts[key], sent[key]) for key in sorted(counts)}

    def table(self) -> Sheet:
        """Return a table of the collectives, sorted by bytes in descending order."""
        sheet = Sheet("planned collectives, per device", _COLUMNS)
        rows = sorted(self.by_kind_and_axes().items(), key=lambda row: -row[1][1])
        for (kind, axes), (count, sent) in rows:
            sheet.add(f"[{TERMINAL[kind]}]{kind}[/]", axes_text(axes), str(count), amount_of_bytes(sent))
        total = sum(count for _, (count, _) in rows)
        sheet.add("all", "", str(total), amount_of_bytes(self.wire_bytes), total=True)
        return sheet

    def figure(self) -> "Figure":
        """Draw the bytes of the collectives, as one bar for each kind and set of mesh axes, longest bar first.

        >>> ProgramPlan(()).figure().title
        'planned collectives, bytes per device'
        """
        from gspmd.figures.bars import Bar, bars_figure

        rows = sorted(self.by_kind_and_axes().items(), key=lambda row: -row[1][1])
        bars = [
            Bar(f"{kind} {axes_text(axes)}", kind, (sent,), f"{counted(count, 'run')}, {amount_of_bytes(sent)}")
            for (kind, axes), (count, sent) in rows
        ]
        figures = f"{amount_of_bytes(self.wire_bytes)} sent, {amount_of_flops(self.flops)}"
        total = f"{figures}, {amount_of_seconds(self.seconds)} if nothing overlaps"
        return bars_figure("planned collectives, bytes per device", bars, total, self.__str__)

    def __rich__(self) -> Group:
        return Group(self.table(), *(Text(f"note: {note}") for note in self.notes))

    def __repr__(self) -> str:
        sent, work = amount_of_bytes(self.wire_bytes), amount_of_flops(self.flops)
        figures = f"{sent} sent, {work}, {amount_of_seconds(self.seconds)}"
        return printable(f"<ProgramPlan of {counted(len(self.entries), 'step')}: {figures}; print it for its table>")


def _over_network(step: Step, mesh: Mapping[str, int], chip: Chip) -> int:
    """Return the number of bytes that one run of a step sends over the network between nodes."""
    if not (step.is_collective and step.wire_bytes):
        return 0
    near = sharing_node(step.axes, tuple(mesh.items()), chip.node_devices)
    return network_bytes(step.kind, prod(mesh[axis] for axis in step.axes), near, step.wire_bytes, chip)


_COLUMNS = (Column("kind"), Column("mesh axes"), Column("count", "right", goes=1), Column("sent", "right"))


def of_equation(plan: Plan) -> ProgramPlan:
    """Return the program plan of a function that computes a single equation once, without a gradient."""
    routine, loops = plan.routine, plan.loops
    spans = [ring_gather(routine.moves[number]) for number in loops.gathers]
    spans += [ring_scatter(routine, number) for number in loops.scatters]
    looped = {id(step) for span in spans for step in span.steps}
    title, dtypes = str(plan.equation), {*plan.dtypes}
    dtype = hlo_name(plan.dtypes[0]) if len(dtypes) == 1 else ""
    steps = [replace(s, kind="collective-permute") if id(s) in looped else s for s in plan.steps]
    sent = sum(step.seconds for step in steps if step.is_collective)
    hidden = [plan.hidden_seconds * step.seconds / sent if sent and step.is_collective else 0.0 for step in steps]
    entries = [PlannedStep(step, 1, title, n, dtype, None, hidden[n]) for n, step in enumerate(steps)]
    return ProgramPlan(tuple(entries), lowered=frozenset({title} if plan.lowering == "xla" else ()))
