"""Tables as HTML for notebooks: light and dark, numbers to the right, in colors that the color-blind can tell apart."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from gspmd.display.theme import FONT, TERMINAL, themed

_ROOT = ".gspmd-printed"

# (CSS class, property, color of the theme). The classes of colors are the color names that tables on terminals use.
_COLORED: tuple[tuple[str, str, str], ...] = (
    ("", "color", "ink"),
    ("caption", "color", "ink"),
    ("th", "color", "soft"),
    ("td", "color", "ink"),
    ("th,td", "border-color", "faint"),
    ("tr.total td", "border-top-color", "rule"),
    (".dim", "color", "soft"),
    *((f".{name}", "color", kind) for kind, name in TERMINAL.items()),
)
_NAMES = {selector[1:] for selector, *_ in _COLORED if selector.startswith(".")} | {"bold"}
_SHAPES = """\
{root}{{font:13px/1.45 {font};overflow-x:auto}}
{root} table{{border-collapse:collapse;margin:.4em 0 .8em;border:0;font-size:13px}}
{root} table{{display:table;width:auto;table-layout:auto}}
{root} caption{{text-align:left;font-weight:600;padding:.2em 0 .4em;caption-side:top;white-space:nowrap}}
{root} th,{root} td{{padding:.22em .9em .22em 0;text-align:left;vertical-align:top;border:0 solid;max-width:none}}
{root} th{{font-weight:600;border-bottom-width:1px;background:none}}
{root} tr,{root} tr:nth-child(even){{background:none}}
{root} td.right,{root} th.right{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
{root} tr.total td{{font-weight:600}}
{root} tr.first td{{border-top-width:1px}}
{root} td span,{root} small{{white-space:nowrap}}
{root} .bold{{font-weight:600}}
{root} p{{margin:.3em 0}}
{root} sub{{font-size:.76em;line-height:0}}
{root} svg{{display:block;margin:.4em 0}}
{root} pre{{margin:.3em 0;font:12px/1.4 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap}}
"""


def page(parts: Iterable[str]) -> str:
    """Return parts of HTML with their style sheet, for an object's `_repr_html_`."""
    style = _SHAPES.format(root=_ROOT, font=FONT) + themed(_ROOT, _COLORED)
    return f'<div class="{_ROOT[1:]}"><style>\n{style}</style>\n' + "\n".join(parts) + "\n</div>"


def table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[int] = (),
    totals: Iterable[Sequence[str]] = (),
) -> str:
    """Return a table as HTML.

    Args:
        title: the title of the table, as text.
        heads: the column headings, as text.
        rows: the cells of each row, as HTML.
        right: indices of the columns that are aligned to the right.
        totals: the cells of each row of totals, as HTML; these rows are below a line.

    >>> print(table("sizes", ("dim", "size"), [("B", "8")], right=[1]))
    <table><caption>sizes</caption><thead><tr><th>dim</th><th class="right">size</th></tr></thead>
    <tbody><tr><td>B</td><td class="right">8</td></tr></tbody></table>
    """
    figures = set(right)

    def row(cells: Sequence[str], tag: str, kind: str = "") -> str:
        opened = (f'<{tag} class="right">' if at in figures else f"<{tag}>" for at in range(len(cells)))
        inner = "".join(f"{opening}{cell}</{tag}>" for opening, cell in zip(opened, cells))
        return (f'<tr class="{kind}">' if kind else "<tr>") + f"{inner}</tr>"

    body = [row(cells, "td") for cells in rows]
    body += [row(cells, "td", "total first" if not at else "total") for at, cells in enumerate(totals)]
    head = f"<thead>{row([escape(name) for name in heads], 'th')}</thead>\n" if any(heads) else ""
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    return f"<table>{caption}{head}<tbody>" + "\n".join(body) + "</tbody></table>"


def rendered(renderable: Any) -> list[str]:
    """Convert the result of an object's `__rich__` to parts of HTML: tables for tables, and paragraphs for texts."""
    from rich.console import Group
    from rich.table import Table

    from gspmd.display.tables import Sheet

    if hasattr(renderable, "__rich__"):
        renderable = renderable.__rich__()
    if isinstance(renderable, Group):
        return [part for each in renderable.renderables for part in rendered(each)]
    if isinstance(renderable, Sheet):
        return [_sheet(renderable)]
    if isinstance(renderable, Table):
        return [_table(renderable)]
    text = _text(renderable).strip()
    return [f"<p>{text}</p>"] if text else []


def _sheet(sheet: Any) -> str:
    from rich.text import Text

    kept = [at for at, column in enumerate(sheet.columns) if column.name or any(row[at] for row, _ in sheet.rows)]
    cells = [([_text(row[at]) for at in kept], total) for row, total in sheet.rows]
    right = [number for number, at in enumerate(kept) if sheet.columns[at].justify == "right"]
    rows, totals = ([row for row, total in cells if total == wanted] for wanted in (False, True))
    title = Text.from_markup(sheet.title).plain
    return table(title, [sheet.columns[at].name for at in kept], rows, right=right, totals=totals)


def _table(given: Any) -> str:
    """Return a table of the library rich as HTML."""
    columns = given.columns
    rows = zip(*([_text(cell) for cell in column.cells] for column in columns))
    heads = [_plain(column.header) for column in columns] if given.show_header else []
    right = [at for at, column in enumerate(columns) if column.justify == "right"]
    return table(_plain(given.title or ""), heads, rows, right=right)


def _plain(text: Any) -> str:
    return text if isinstance(text, str) else text.plain


def _text(given: Any) -> str:
    """Return a text of the library rich, or a string with rich's markup, as HTML with colors as CSS classes."""
    from rich.text import Text

    text = Text.from_markup(given) if isinstance(given, str) else given
    ends = sorted({0, len(text), *(end for span in text.spans for end in (span.start, span.end))})
    parts = []
    for start, stop in pairwise(ends):
        styles = [str(text.style), *(str(span.style) for span in text.spans if span.start <= start < span.end)]
        names = sorted({name for style in styles for name in style.split()} & _NAMES)
        piece = escape(text.plain[start:stop]).replace("\n", "<br>")
        parts.append(f'<span class="{" ".join(names)}">{piece}</span>' if names else piece)
    return "".join(parts)
