"""Tables that fit a narrow terminal: the least important columns are left out, but names and numbers are not cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.box import HEAVY_HEAD
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

_FOLDED = 24
"""Largest width, in characters, of a column with `folds`, whose text may continue on the next line."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: the heading of the column.
        justify: `"left"` or `"right"`.
        goes: 0 if the column is never left out of a narrow table. Of the other columns, the column with the largest
            `goes` is left out first.
        folds: whether a long text may continue on the next line.
    """

    name: str
    justify: Literal["left", "right"] = "left"
    goes: int = 0
    folds: bool = False


@dataclass
class Sheet:
    """A table that is fitted to the available width when it is printed.

    Attributes:
        title: the title above the table.
        columns: all columns, in order.
        rows: the cells of each row in rich's markup, and whether the row is a total below a line.
    """

    title: str
    columns: Sequence[Column]
    rows: list[tuple[tuple[str, ...], bool]] = field(default_factory=list)

    def add(self, *cells: str, total: bool = False) -> None:
        """Add a row of cells; if `total` is True, the row is a total below a line."""
        self.rows.append((cells, total))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield self.fitted(options.max_width)

    def fitted(self, width: int) -> Table:
        """Return the table, fitted to `width` characters."""
        kept = [at for at, column in enumerate(self.columns) if column.name or any(row[at] for row, _ in self.rows)]
        while self._width(kept) > width and (going := [at for at in kept if self.columns[at].goes]):
            kept.remove(max(going, key=lambda at: self.columns[at].goes))
        table = Table(title=self.title, title_justify="left", box=HEAVY_HEAD)
        tight = self._width(kept) > width
        for column in (self.columns[at] for at in kept):
            # If even the columns that stay are too wide, names continue on the next line; figures never do.
            whole = not column.folds and not (tight and column.justify == "left")
            table.add_column(column.name, justify=column.justify, no_wrap=whole, overflow="fold")
        for number, (cells, total) in enumerate(self.rows):
            if total and not (number and self.rows[number - 1][1]):
                table.add_section()
            table.add_row(*(cells[at] for at in kept), style="bold" if total else None)
        return table

    def _width(self, kept: Sequence[int]) -> int:
        """Return the width in characters that the columns at these indices need, including their borders."""
        return 1 + sum(3 + self._needs(at) for at in kept)

    def _needs(self, at: int) -> int:
        cells = (self.columns[at].name, *(row[at] for row, _ in self.rows))
        longest = max(Text.from_markup(cell).cell_len for cell in cells)
        return min(longest, _FOLDED) if self.columns[at].folds else longest


def counted(number: int, what: str) -> str:
    """Return a number with its noun in the singular or the plural.

    >>> counted(1, "step"), counted(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {what}{'s' * (number != 1)}"
