"""`Comparison`: planned collectives beside compiled ones, by kind and mesh axes, and for each step."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from gspmd.audit.ledgers.entries import Entry, Key, asked_for_by, by_kind_and_axes, step_text
from gspmd.audit.ledgers.matching import credit_shared_steps, planned_steps, under_axes_of_steps
from gspmd.audit.ledgers.verdicts import VERDICTS, ComparedStep, rows
from gspmd.display.plain import printable
from gspmd.display.printed import Printed
from gspmd.display.tables import Column, Sheet, counted
from gspmd.display.theme import TERMINAL
from gspmd.display.units import amount_of_bytes, axes_text
from gspmd.tracing.program_plan import ProgramPlan

if TYPE_CHECKING:
    from gspmd.figures.figure import Figure


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """A comparison of a program's plan with its ledger; counts and bytes are per device and execution.

    Attributes:
        rows: one row for each planned step, and one for each compiled collective that belongs to no step.
        totals: a mapping from (kind, mesh axes) to (planned bytes, compiled bytes).
        notes: descriptions of the parts of the plan or of the program that could not be counted.
    """

    rows: tuple[ComparedStep, ...]
    totals: dict[Key, tuple[int, int]]
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the compiled bytes equal the planned bytes for every kind of collective and set of mesh axes."""
        return all(planned == compiled for planned, compiled in self.totals.values())

    @property
    def differing(self) -> tuple[ComparedStep, ...]:
        """The rows whose verdict is not `"as planned"`."""
        return tuple(row for row in self.rows if row.verdict != "as planned")

    def __getitem__(self, verdict: str) -> tuple[ComparedStep, ...]:
        """Return the rows that have the given verdict."""
        if verdict not in VERDICTS:
            raise KeyError(f"no verdict is called {verdict!r}; there are {', '.join(VERDICTS)}")
        return tuple(row for row in self.rows if row.verdict == verdict)

    def table(self) -> Sheet:
        """Return a table of planned and compiled bytes for every kind of collective and set of mesh axes."""
        sheet = Sheet("planned and compiled, bytes sent per device", _TOTALS)
        for (kind, axes), (planned, compiled) in sorted(self.totals.items(), key=lambda row: -max(row[1])):
            figures = amount_of_bytes(planned), amount_of_bytes(compiled)
            sheet.add(f"[{TERMINAL[kind]}]{kind}[/]", axes_text(axes), *figures, _ratio(planned, compiled))
        sheet.add("all", "", *map(amount_of_bytes, self._sums), _ratio(*self._sums), total=True)
        return sheet

    def steps_table(self, verdicts: Sequence[str] = VERDICTS[1:], together: bool = False) -> Sheet:
        """Return a table of the steps with the given verdicts.

        Rows that differ only in their counts and bytes are merged into one row, which has their sums.

        Args:
            verdicts: the verdicts to show; by default all except "as planned".
            together: whether steps without a collective of their own may share a row. The bytes of such a step are sent
                by a collective of another step. If True, steps of one kind and set of mesh axes share one row if the
                same collective sends their bytes; the row states the number of these steps.
        """
        sheet = Sheet("step by step, where they differ", _STEPS)
        found = [row for verdict in verdicts for row in self[verdict]]
        for row in _added_up(_carried_together(found) if together else found):
            told = f"{row.verdict}: {row.how}" if row.how else row.verdict
            amounts = [f"{n} × {amount_of_bytes(sent / n)}" if n else "none" for n, sent in (row.planned, row.compiled)]
            by = escape(asked_for_by(row.equation, row.step, row.source))
            sheet.add(told, f"[{TERMINAL[row.kind]}]{row.kind}[/]", axes_text(row.axes), *amounts, by)
        return sheet

    def figure(self) -> "Figure":
        """Draw planned and compiled bytes as pairs of bars, one pair for each kind of collective and set of axes.

        In each pair, the upper bar is pale and shows the planned bytes. The lower bar shows the compiled bytes.

        >>> Comparison((), {("all-gather", ("x",)): (96, 96)}).figure().title
        'planned (pale) and compiled, bytes per device'
        """
        from gspmd.figures.bars import Bar, bars_figure

        rows = sorted(self.totals.items(), key=lambda row: -max(row[1]))
        bars = [
            Bar(f"{kind} {axes_text(axes)}", kind, both, " → ".join(map(amount_of_bytes, both)))
            for (kind, axes), both in rows
        ]
        planned, compiled = map(amount_of_bytes, self._sums)
        total = f"{planned} planned, {compiled} compiled; steps: {self._counted}"
        return bars_figure("planned (pale) and compiled, bytes per device", bars, total, self.__str__)

    @property
    def _sums(self) -> tuple[int, int]:
        planned, compiled = zip(*self.totals.values()) if self.totals else ((), ())
        return sum(planned), sum(compiled)

    @property
    def _counted(self) -> str:
        return ", ".join(f"{len(self[verdict])} {verdict}" for verdict in VERDICTS if self[verdict]) or "none"

    def __rich__(self) -> Group:
        shown: list[RenderableType] = [self.table(), Text(f"steps: {self._counted}")]
        shown += [self.steps_table(together=True)] if self.differing else []
        return Group(*shown, *(Text(f"note: {note}") for note in self.notes))

    def __repr__(self) -> str:
        planned, compiled = map(amount_of_bytes, self._sums)
        figures = f"{planned} planned, {compiled} compiled; steps: {self._counted}"
        return printable(f"<Comparison: {figures}; print it for its tables>")


_TOTALS = (
    Column("kind"),
    Column("mesh axes"),
    Column("planned", "right"),
    Column("compiled", "right"),
    Column("", goes=1),
)
_STEPS = (
    Column("", folds=True),
    Column("kind", goes=2),
    Column("mesh axes", goes=1),
    Column("planned", "right"),
    Column("compiled", "right"),
    Column("asked for by", folds=True),
)


def _added_up(rows: Iterable[ComparedStep]) -> Iterator[ComparedStep]:
    """Add up the rows that differ only in their counts and bytes, and yield one row for each group."""
    alike: dict[ComparedStep, list[ComparedStep]] = defaultdict(list)
    for row in rows:
        alike[replace(row, planned=(0, 0), compiled=(0, 0))].append(row)
    for row, equal in alike.items():
        planned, compiled = zip(*((each.planned, each.compiled) for each in equal))
        yield replace(row, planned=_summed(planned), compiled=_summed(compiled))


def _carried_together(rows: Iterable[ComparedStep]) -> Iterator[ComparedStep]:
    """Combine the rows of steps whose bytes are all sent by one collective, which belongs to another step.

    Only rows with the same verdict, kind and mesh axes are combined. The combined row states the number of these steps.
    All other rows are yielded unchanged.
    """
    groups: dict[object, list[ComparedStep]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[(row.carrier, row.verdict, row.kind, row.axes) if row.carrier else number].append(row)
    for carried in groups.values():
        first, planned = carried[0], _summed(row.planned for row in carried)
        if len(carried) == 1 or not first.carrier:
            yield first
            continue
        equation, step = first.carrier
        how = f"in one collective with {step_text(step)} of {equation}"
        by = counted(len(carried), "step")
        yield replace(first, how=how, equation=by, step="", source="", planned=planned)


def _summed(figures: Iterable[tuple[int, int]]) -> tuple[int, int]:
    counts, sent = zip(*figures)
    return sum(counts), sum(sent)


def _ratio(planned: int, compiled: int) -> str:
    if planned == compiled:
        return "[green]=[/]"
    if not planned or not compiled:
        return "gone" if planned else "not planned"
    ratio = f"{compiled / planned:.3g}"
    more = f"{'+' if compiled > planned else '-'} {amount_of_bytes(abs(compiled - planned))}"
    return more if ratio == "1" else f"× {ratio}"


def compared(entries: Sequence[Entry], plan: ProgramPlan, notes: Sequence[str] = ()) -> Comparison:
    """Compare the entries of a ledger with a plan, and return the comparison."""
    sent = [entry for entry in entries if entry.wire_bytes]
    matched = under_axes_of_steps(planned_steps(plan.entries), credit_shared_steps(plan, sent))
    planned, compiled = plan.by_kind_and_axes(), by_kind_and_axes(matched)
    keys = [key for key in sorted({*planned, *compiled}) if planned.get(key, (0, 0))[1] or key in compiled]
    totals = {key: (planned.get(key, (0, 0))[1], compiled.get(key, (0, 0))[1]) for key in keys}
    return Comparison(tuple(rows(plan, matched)), totals, tuple(notes))
