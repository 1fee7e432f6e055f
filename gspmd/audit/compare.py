"""What was planned beside what was compiled: by kind and mesh axes, and step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from gspmd.audit.ledger import Entry, Key, Ledger, asked
from gspmd.audit.verdicts import VERDICTS, Row, in_whole, planned_steps, rows, served
from gspmd.collectives.figure import COLORS, amount_of_bytes, axes_text
from gspmd.collectives.trace import ProgramPlan


@dataclass(frozen=True)
class Comparison:
    """A program's plan beside its ledger; counts and bytes are per device and execution.

    Attributes:
        rows: a row per step.
        totals: (kind, mesh axes) -> (planned bytes, compiled bytes).
        notes: what could not be counted, on either side.
    """

    rows: tuple[Row, ...]
    totals: dict[Key, tuple[int, int]]
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether for every kind and set of axes the bytes are the planned ones, and nothing else is sent."""
        return all(planned == compiled for planned, compiled in self.totals.values())

    @property
    def differing(self) -> tuple[Row, ...]:
        """The rows that are not as planned."""
        return tuple(row for row in self.rows if row.verdict != "as planned")

    def __getitem__(self, verdict: str) -> tuple[Row, ...]:
        """The rows of one verdict."""
        if verdict not in VERDICTS:
            raise KeyError(f"no verdict is called {verdict!r}; there are {', '.join(VERDICTS)}")
        return tuple(row for row in self.rows if row.verdict == verdict)

    def table(self) -> Table:
        """Planned and compiled bytes of every kind and set of axes."""
        table = Table(title="planned and compiled, bytes sent per device", title_justify="left")
        for column, justify in (("kind", "left"), ("mesh axes", "left"), ("planned", "right"), ("compiled", "right")):
            table.add_column(column, justify=justify)
        table.add_column("")
        for (kind, axes), (planned, compiled) in sorted(self.totals.items(), key=lambda row: -max(row[1])):
            figures = amount_of_bytes(planned), amount_of_bytes(compiled)
            table.add_row(f"[{COLORS[kind]}]{kind}[/]", axes_text(axes), *figures, _ratio(planned, compiled))
        table.add_section()
        sums = [sum(side) for side in zip(*self.totals.values())] or [0, 0]
        table.add_row("all", "", *map(amount_of_bytes, sums), _ratio(*sums), style="bold")
        return table

    def steps_table(self, verdicts: Sequence[str] = VERDICTS[1:]) -> Table:
        """The steps of some verdicts, those that differ from the plan if not given."""
        table = Table(title="step by step, where they differ", title_justify="left")
        columns = ("", "kind", "mesh axes", "planned", "compiled", "asked for by")
        for column in columns:
            table.add_column(column, justify="right" if column in ("planned", "compiled") else "left", overflow="fold")
        for row in (row for verdict in verdicts for row in self[verdict]):
            told = f"{row.verdict}: {row.how}" if row.how else row.verdict
            amounts = [f"{n} × {amount_of_bytes(sent / max(1, n))}" for n, sent in (row.planned, row.compiled)]
            by = asked(Entry(row.kind, row.axes, 0, 0, "", row.source, row.equation, row.step))
            table.add_row(told, f"[{COLORS[row.kind]}]{row.kind}[/]", axes_text(row.axes), *amounts, by)
        return table

    def __str__(self) -> str:
        console = Console(width=140, color_system=None)
        counted = ", ".join(f"{len(self[verdict])} {verdict}" for verdict in VERDICTS if self[verdict])
        with console.capture() as capture:
            console.print(self.table())
            console.print(f"steps: {counted or 'none'}")
            if self.differing:
                console.print(self.steps_table())
            for note in self.notes:
                console.print(f"note: {note}", markup=False)
        return capture.get()


def _ratio(planned: int, compiled: int) -> str:
    if planned == compiled:
        return "[green]=[/]"
    return "not planned" if not planned else f"× {compiled / planned:.3g}" if compiled else "gone"


def compare(ledger: Ledger, plan: ProgramPlan) -> Comparison:
    """Put what was planned beside what was compiled.

    Compiled collectives are joined to steps by their scopes. Where a compiler merges several into one instruction it
    keeps the scopes of one of them: the others are then found by kind, axes and bytes. A step that was compiled in
    parts, over some of its axes and then over the rest, counts under the axes of the step. What two steps share is
    whatever of the two was compiled.

    Args:
        ledger: of the compiled program.
        plan: `gspmd.trace` of the same function with the same arguments.

    Example:
        >>> compare(Ledger((), 0, {}), ProgramPlan(())).agrees
        True
    """
    sent = [entry for entry in ledger.entries if entry.wire_bytes]
    entries = in_whole(planned_steps(plan.entries), served(plan, sent))
    planned, compiled = plan.by_kind_and_axes(), replace(ledger, entries=tuple(entries)).by_kind_and_axes()
    keys = [key for key in sorted({*planned, *compiled}) if planned.get(key, (0, 0))[1] or key in compiled]
    totals = {key: (planned.get(key, (0, 0))[1], compiled.get(key, (0, 0))[1]) for key in keys}
    return Comparison(tuple(rows(plan, entries)), totals, (*plan.notes, *ledger.notes))
