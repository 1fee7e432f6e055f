"""`Difference`: the changes from one compiled program to another, by kind, mesh axes and dtype."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich.text import Text

from gspmd.audit.ledgers.entries import Entry
from gspmd.display.plain import printable
from gspmd.display.printed import Printed
from gspmd.display.tables import Column, Sheet, counted
from gspmd.display.theme import TERMINAL
from gspmd.display.units import amount_of_bytes, amount_of_flops, axes_text

_Key = tuple[str, tuple[str, ...], str]


@dataclass(frozen=True)
class Change:
    """The collectives of one kind, one set of mesh axes and one dtype, in two programs.

    Attributes:
        kind, axes, dtype: the fields of the same names in `Entry`, with `axes` in alphabetical order.
        before: (number of runs, bytes that one device sends) in the first program; (0, 0) if that program has no such
            collective.
        after: the same two numbers for the second program.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    before: tuple[int, int]
    after: tuple[int, int]


@dataclass(frozen=True, repr=False)
class Difference(Printed):
    """The differences between two ledgers, per device and execution.

    The truth value is False if the collectives and the FLOPs of the two ledgers are the same.

    Attributes:
        rows: the changes; those with the most bytes come first.
        wire_bytes: bytes that one device sends, in the first program and in the second.
        flops: FLOPs of the matrix products, in the first program and in the second.
        names: the names of the two programs.
    """

    rows: tuple[Change, ...]
    wire_bytes: tuple[int, int]
    flops: tuple[int, int]
    names: tuple[str, str] = ("", "")

    def __bool__(self) -> bool:
        return bool(self.rows) or self.flops[0] != self.flops[1]

    def table(self) -> Sheet:
        """Return a table of the changes, with the total bytes and FLOPs of each program."""
        sheet = Sheet(f"{self._title}: what one device sends", _COLUMNS)
        for row in self.rows:
            amounts = [f"{n} × {amount_of_bytes(sent / n)}" if n else "none" for n, sent in (row.before, row.after)]
            told = _change(row.before[1], row.after[1])
            sheet.add(f"[{TERMINAL[row.kind]}]{row.kind}[/]", axes_text(row.axes), row.dtype, *amounts, told)
        for what, (before, after), amount in (
            ("all sent", self.wire_bytes, amount_of_bytes),
            ("matrix products", self.flops, amount_of_flops),
        ):
            sheet.add(what, "", "", amount(before), amount(after), _change(before, after), total=True)
        return sheet

    @property
    def _title(self) -> str:
        before, after = (name or "a program" for name in self.names)
        return f"from {before} to {after}"

    def __rich__(self) -> Sheet | Text:
        return self.table() if self else Text(f"no difference: {amount_of_bytes(self.wire_bytes[0])} sent")

    def __repr__(self) -> str:
        before, after = map(amount_of_bytes, self.wire_bytes)
        changes = counted(len(self.rows), "change")
        return printable(f"<Difference {self._title}: {changes}, {before} sent before, {after} after>")


_COLUMNS = (
    Column("kind"),
    Column("mesh axes"),
    Column("dtype", goes=2),
    Column("before", "right"),
    Column("after", "right"),
    Column("", goes=1),
)


def _change(before: int, after: int) -> str:
    if before == after:
        return "="
    return "new" if not before else f"× {after / before:.3g}" if after else "gone"


def changes(before: Iterable[Entry], after: Iterable[Entry]) -> tuple[Change, ...]:
    """Return the changes from one list of entries to another, sorted by bytes in descending order."""
    sums = _sums(before), _sums(after)
    both = [Change(*key, *(each.get(key, (0, 0)) for each in sums)) for key in sorted({*sums[0], *sums[1]})]
    changed = [row for row in both if row.before != row.after]
    return tuple(sorted(changed, key=lambda row: -max(row.before[1], row.after[1])))


def _sums(entries: Iterable[Entry]) -> dict[_Key, tuple[int, int]]:
    counts: Counter[_Key] = Counter()
    sent: Counter[_Key] = Counter()
    for entry in entries:
        key = entry.kind, tuple(sorted(entry.axes)), entry.dtype
        counts[key] += entry.count
        sent[key] += entry.wire_bytes
    return {key: (counts[key], sent[key]) for key in counts}
