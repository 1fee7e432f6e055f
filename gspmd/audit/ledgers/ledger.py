"""`Ledger`: the collectives of a compiled program and their bytes, to print or to compare."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from gspmd.annotate.errors import PlanError, article, shown
from gspmd.audit.ledgers.changes import Difference, changes
from gspmd.audit.ledgers.comparison import Comparison, compared
from gspmd.audit.ledgers.entries import Entry, Key, asked_for_by, by_kind_and_axes
from gspmd.audit.ledgers.slices import by_bytes
from gspmd.display.plain import printable
from gspmd.display.printed import Printed
from gspmd.display.tables import Column, Sheet, counted
from gspmd.display.theme import TERMINAL
from gspmd.display.units import amount_of_bytes, amount_of_flops, axes_text
from gspmd.planner.plan import Plan
from gspmd.tracing.program_plan import ProgramPlan, of_equation

if TYPE_CHECKING:
    from gspmd.figures.figure import Figure


@dataclass(frozen=True, repr=False)
class Ledger(Printed):
    """The collectives and matrix products that one device runs in one execution of a compiled program.

    For a conditional, the branch that sends the most bytes is counted. A loop whose trip count depends on computed
    values is counted as one iteration, and is named in `notes`.

    Attributes:
        entries: one entry for each collective, in program order. If the compiler combined several collectives into one
            instruction, each has its own entry.
        flops: FLOPs of the matrix products, where a multiplication and its addition count as two. A product in a loop
            is counted once per iteration.
        mesh: sizes of the mesh axes.
        name: the name of the compiled program.
        notes: descriptions of the parts of the program that could not be counted.
        slices: number of TPU slices. The devices of the mesh, in row-major order, fill one slice after another.
    """

    entries: tuple[Entry, ...]
    flops: int
    mesh: Mapping[str, int]
    name: str = ""
    notes: tuple[str, ...] = ()
    slices: int = 1

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in one execution."""
        return sum(entry.wire_bytes for entry in self.entries)

    @property
    def network_bytes(self) -> int:
        """Bytes that one device sends over the network between GPU nodes or TPU slices."""
        return sum(entry.network_bytes for entry in self.entries)

    def by_kind_and_axes(self) -> dict[Key, tuple[int, int]]:
        """Return, for each kind and set of mesh axes, the number of arrays and the number of bytes sent in all runs."""
        return by_kind_and_axes(self.entries)

    def compare(self, plan: ProgramPlan | Plan) -> Comparison:
        """Compare this ledger with a plan, by kind and mesh axes and for each step; see `gspmd.audit.compare`."""
        return compare(self, plan)

    def diff(self, other: "Ledger") -> Difference:
        """Return the changes from this ledger to another, by kind, mesh axes and dtype."""
        return difference(self, other)

    def to_json(self) -> str:
        """Return the whole ledger as JSON: name, mesh, wire_bytes, network_bytes, flops, notes and entries."""
        totals = {"name": self.name, "mesh": dict(self.mesh), "wire_bytes": self.wire_bytes}
        totals |= {"network_bytes": self.network_bytes, "flops": self.flops}
        return json.dumps({**totals, "notes": self.notes, "entries": [asdict(entry) for entry in self.entries]})

    def table(self, together: bool = False) -> Sheet:
        """Return a table of the collectives, sorted by bytes in descending order.

        Collectives that differ only in their counts and bytes share a row.

        Args:
            together: whether collectives share a row even if they belong to different steps of one equation.
        """
        sheet = Sheet(f"ledger of {self._named}: what one of {prod(self.mesh.values())} devices sends", _COLUMNS)
        for entry, count, sent in self._rows(together):
            kind = f"[{TERMINAL[entry.kind]}]{entry.kind}[/]"
            how = "async" if entry.asynchronous else ""
            figures = (axes_text(entry.axes), entry.dtype, how, str(count), amount_of_bytes(sent))
            step = "" if together else entry.step
            sheet.add(kind, *figures, escape(asked_for_by(entry.equation, step, entry.source)))
        count = str(sum(entry.count for entry in self.entries))
        work = f"{amount_of_flops(self.flops)} in matrix products"
        sheet.add("all", "", "", "", count, amount_of_bytes(self.wire_bytes), work, total=True)
        return sheet

    def figure(self) -> "Figure":
        """Draw the bytes that one device sends, as one bar for each kind and set of mesh axes, longest bar first.

        >>> Ledger((), 0, {}).figure().title
        'ledger of a program, bytes per device'
        """
        from gspmd.figures.bars import Bar, bars_figure

        rows = sorted(self.by_kind_and_axes().items(), key=lambda row: -row[1][1])
        bars = [
            Bar(f"{kind} {axes_text(axes)}", kind, (sent,), f"{counted(count, 'array')}, {amount_of_bytes(sent)}")
            for (kind, axes), (count, sent) in rows
        ]
        total = f"{amount_of_bytes(self.wire_bytes)} sent, {amount_of_flops(self.flops)} in matrix products"
        return bars_figure(f"ledger of {self._named}, bytes per device", bars, total, self.__str__)

    @property
    def _named(self) -> str:
        return self.name or "a program"

    def _rows(self, together: bool = False) -> list[tuple[Entry, int, int]]:
        """Return the entries with their counts and bytes, most bytes first.

        Entries that differ only in their counts and bytes are added up into one. If `together` is True, entries
        that also differ in their steps are added up too.
        """
        rows: dict[tuple, list] = {}
        for entry in self.entries:
            step = "" if together else entry.step
            alike = (entry.kind, entry.axes, entry.dtype, entry.equation, step, entry.source, entry.asynchronous)
            row = rows.setdefault(alike, [entry, 0, 0])
            row[1] += entry.count
            row[2] += entry.wire_bytes
        return sorted((tuple(row) for row in rows.values()), key=lambda row: (-row[2], row[0].kind, row[0].axes))

    def __rich__(self) -> Group:
        return Group(self.table(), *(Text(f"note: {note}") for note in self.notes))

    def __repr__(self) -> str:
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        figures = f"{amount_of_bytes(self.wire_bytes)} sent, {amount_of_flops(self.flops)}"
        entries = counted(len(self.entries), "collective")
        return printable(f"<Ledger of {self._named}, mesh {mesh}: {entries}, {figures}; print it for its table>")


_COLUMNS = (
    Column("kind"),
    Column("mesh axes"),
    Column("dtype", goes=3),
    Column("", goes=2),
    Column("count", "right", goes=1),
    Column("sent", "right"),
    Column("asked for by", folds=True),
)


def compare(ledger: Ledger, plan: ProgramPlan | Plan) -> Comparison:
    """Compare the compiled collectives with the planned steps.

    Compiled collectives are matched with planned steps by their scope names. If the compiler combines several
    collectives into one instruction, the instruction keeps the scope name of only one collective. The other collectives
    are matched by kind, mesh axes and bytes. A step may be compiled in parts, first over some of its mesh axes and then
    over the rest. Such parts are counted together, as one collective over all the mesh axes of the step. If two steps
    have the same result, the compiler may keep the collective of either step.

    Args:
        ledger: the ledger of the compiled program.
        plan: the result of `gspmd.trace` for the same function and the same arguments. If the program is a single
            equation without its gradient, the result of `gspmd.plan` for that equation is enough.

    Raises:
        PlanError: `ledger` is not a ledger, or `plan` is not a plan.

    Example:
        >>> compare(Ledger((), 0, {}), ProgramPlan(())).agrees
        True
    """
    plan = of_equation(plan) if isinstance(plan, Plan) else plan
    if not (isinstance(ledger, Ledger) and isinstance(plan, ProgramPlan)):
        raise PlanError(
            f"cannot compare {article(type(ledger).__name__)} with {article(type(plan).__name__)}.\n"
            "  Write gspmd.ledger(compiled).compare(gspmd.trace(fn, *args)), or gspmd.plan(...) for a single equation."
        )
    entries = ledger.entries
    if ledger.slices > 1:
        entries = tuple(by_bytes(plan.entries, entries, ledger.mesh, ledger.slices))
    return compared(entries, plan, (*plan.notes, *ledger.notes))


def difference(before: Ledger, after: Ledger) -> Difference:
    """Compare the ledgers of two programs, and return the differences.

    Args:
        before, after: the ledgers of two programs, on meshes with the same axis names.

    Raises:
        PlanError: `before` or `after` is not a ledger.

    Example:
        >>> before = Ledger((), 128, {"x": 4})
        >>> bool(difference(before, before)), bool(difference(before, Ledger((), 256, {"x": 4})))
        (False, True)
    """
    for each in (before, after):
        if not isinstance(each, Ledger):
            raise PlanError(
                f"cannot compare a ledger with {shown(each)}: it is not a ledger.\n  Give gspmd.ledger(compiled)."
            )
    sent, work = (before.wire_bytes, after.wire_bytes), (before.flops, after.flops)
    return Difference(changes(before.entries, after.entries), sent, work, (before.name, after.name))
