"""What changes from one compiled program to another: `Ledger.diff`, by kind, mesh axes and dtype."""

from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from gspmd.audit.ledger import Ledger
from gspmd.collectives.figure import COLORS, amount_of_bytes, amount_of_flops, axes_text

_Key = tuple[str, tuple[str, ...], str]


@dataclass(frozen=True)
class Change:
    """Collectives of one kind, over the same mesh axes and of one dtype, in two programs.

    Attributes:
        kind, axes, dtype: as in the entries of a ledger; axes in alphabetical order.
        before: how often they run, and the bytes that one device sends; (0, 0) where there were none.
        after: the same of the other program.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    before: tuple[int, int]
    after: tuple[int, int]


@dataclass(frozen=True)
class Difference:
    """Two ledgers, one beside the other; counts and bytes are per device and execution. False where they are equal.

    Attributes:
        rows: what changed, most bytes first.
        wire_bytes: bytes that one device sends, before and after.
        flops: of the matrix products, before and after.
        names: of the programs.
    """

    rows: tuple[Change, ...]
    wire_bytes: tuple[int, int]
    flops: tuple[int, int]
    names: tuple[str, str] = ("", "")

    def __bool__(self) -> bool:
        return bool(self.rows) or self.flops[0] != self.flops[1]

    def table(self) -> Table:
        """What changed as a rich table, with the totals of bytes and operations below."""
        names = [name or "a program" for name in self.names]
        table = Table(title=f"from {names[0]} to {names[1]}: what one device sends", title_justify="left")
        for column, justify in _COLUMNS:
            table.add_column(column, justify=justify)
        for row in self.rows:
            amounts = [f"{count} × {amount_of_bytes(sent / max(1, count))}" for count, sent in (row.before, row.after)]
            told = _change(row.before[1], row.after[1])
            table.add_row(f"[{COLORS[row.kind]}]{row.kind}[/]", axes_text(row.axes), row.dtype, *amounts, told)
        table.add_section()
        for what, (before, after), amount in (
            ("all sent", self.wire_bytes, amount_of_bytes),
            ("matrix products", self.flops, amount_of_flops),
        ):
            table.add_row(what, "", "", amount(before), amount(after), _change(before, after), style="bold")
        return table

    def __str__(self) -> str:
        console = Console(width=140, color_system=None)
        with console.capture() as capture:
            console.print(self.table() if self else f"no difference: {amount_of_bytes(self.wire_bytes[0])} sent")
        return capture.get()


_COLUMNS = (
    ("kind", "left"),
    ("mesh axes", "left"),
    ("dtype", "left"),
    ("before", "right"),
    ("after", "right"),
    ("", "left"),
)


def _change(before: int, after: int) -> str:
    if before == after:
        return "="
    return "new" if not before else f"× {after / before:.3g}" if after else "gone"


def difference(before: Ledger, after: Ledger) -> Difference:
    """Put the ledgers of two programs beside each other.

    Args:
        before, after: of programs on meshes with the same names of axes.

    Example:
        >>> before = Ledger((), 128, {"x": 4})
        >>> bool(difference(before, before)), bool(difference(before, Ledger((), 256, {"x": 4})))
        (False, True)
    """
    sums = _sums(before), _sums(after)
    both = [Change(*key, *(each.get(key, (0, 0)) for each in sums)) for key in sorted({*sums[0], *sums[1]})]
    changed = [row for row in both if row.before != row.after]
    rows = sorted(changed, key=lambda row: -max(row.before[1], row.after[1]))
    sent, work = (before.wire_bytes, after.wire_bytes), (before.flops, after.flops)
    return Difference(tuple(rows), sent, work, (before.name, after.name))


def _sums(ledger: Ledger) -> dict[_Key, tuple[int, int]]:
    counts, sent = Counter(), Counter()
    for entry in ledger.entries:
        key = entry.kind, tuple(sorted(entry.axes)), entry.dtype
        counts[key] += entry.count
        sent[key] += entry.wire_bytes
    return {key: (counts[key], sent[key]) for key in counts}
