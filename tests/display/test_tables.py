"""Tables on narrow terminals: columns go in order, names and figures stay."""

import pytest
from rich.console import Console

from gspmd.display.printed import Printed
from gspmd.display.tables import Column, Sheet

NAME = "gradient of BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx) step 3  models/feedforward.py:41"


def sheet(columns=None):
    made = Sheet(
        "what is sent",
        columns
        or (
            Column("kind"),
            Column("dtype", goes=2),
            Column("count", "right", goes=1),
            Column("sent", "right"),
            Column("asked for by", folds=True),
        ),
    )
    made.add("[cyan]reduce-scatter[/]", "bf16", "118", "1,234.5 MB", NAME)
    made.add("all", "", "118", "1,234.5 MB", "", total=True)
    return made


def printed(shown, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


@pytest.mark.parametrize(
    ("width", "there"),
    [(160, ["kind", "dtype", "count", "sent"]), (70, ["kind", "count", "sent"]), (62, ["kind", "sent"])],
)
def test_columns_go_in_order_and_nothing_else_is_cut(width, there):
    text = printed(sheet(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "reduce-scatter" in text
    assert "1,234.5 MB" in text
    assert "…" not in text
    heading = text.splitlines()[2]
    assert [name for name in ("kind", "dtype", "count", "sent") if name in heading] == there
    told = "".join(line.split("│")[-2] for line in text.splitlines() if "│" in line)
    assert "".join(told.split()) == "".join(NAME.split())


def test_where_not_even_names_fit_they_go_on_in_the_next_line():
    text = printed(sheet(), 40)
    assert max(map(len, text.splitlines())) <= 40
    assert "1,234.5 MB" in text
    assert "".join(line.split("│")[1].strip() for line in text.splitlines() if "│" in line) == "reduce-scatterall"


def test_a_column_without_a_heading_and_without_cells_is_left_out():
    columns = (Column("a"), Column(""), Column("b"))
    without, within = Sheet("t", columns), Sheet("t", columns)
    without.add("1", "", "2")
    within.add("1", "async", "2")
    assert len(without.fitted(80).columns) == 2
    assert len(within.fitted(80).columns) == 3


def test_what_is_printed_is_shown_in_a_notebook_too(monkeypatch):
    class Shown(Printed):
        def __rich__(self):
            return sheet()

    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(Shown()).splitlines())) <= 80
    assert Shown()._repr_html_().startswith('<div class="gspmd-printed"><style>')
    assert "-&gt;" in Shown()._repr_html_()
