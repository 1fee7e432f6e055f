"""Layouts as text, on one line or in full, and rankings as HTML for notebooks."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

from gspmd.annotate.errors import listed
from gspmd.display.html import page
from gspmd.display.html import table as html_table
from gspmd.layouts.table import LayoutTable


def short(layout: LayoutTable) -> str:
    """Return one line of text with the layout's name, its number of specs, and its mesh axes."""
    changed = sum(map(len, layout.overrides.values()))
    more = f", {changed} overridden" if changed else ""
    return f"<Layout {layout.name!r}: {len(layout.table)} specs over {listed(layout.axes)}{more}>"


def plain(layout: LayoutTable) -> str:
    """Return the table of a layout as text, section by section, as in a layout file."""
    width = max((len(key) for _, lines in sections(layout) for key, _ in lines), default=0)
    below = f"\n  {' ' * width}| "
    blocks = [
        "\n".join([f"[{section}]", *(f"  {key.ljust(width)}  {text.replace(' | ', below)}" for key, text in lines)])
        for section, lines in sections(layout)
    ]
    return "\n\n".join([layout.name, *blocks])


def lines_of(layout: LayoutTable) -> dict[str, str]:
    """Return the text of every line of a layout, in a mapping from names such as `"decode.ffn.residual"`."""
    return {f"{section}.{key}": text for section, lines in sections(layout) for key, text in lines}


def ranking(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a ranking as HTML; each row has the name of a layout and the layout's cost."""
    return page([html_table(title, ("layout", "feed-forward block"), [tuple(map(escape, row)) for row in rows])])


def sections(layout: LayoutTable) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each section of a layout as a pair: the section's name, and its lines as pairs (key, text)."""
    yield "mesh", [("axes", ", ".join(layout.axes)), ("factor", ", ".join(layout.factor))]
    parts = [(*name.partition(".")[::2], _text(spec)) for name, spec in layout.table.items()]
    for section, lines in groupby(sorted(parts, key=lambda line: _order(parts, line)), key=lambda line: line[0]):
        yield section, [(key, spec) for _, key, spec in lines]
    more = {
        **layout.overrides, "lowering": layout.lowerings, "dimensions": layout.dimensions, "padding": layout.padding
    }  # fmt: skip
    yield from ((name, [(key, _text(text)) for key, text in lines.items()]) for name, lines in more.items() if lines)


def _text(text: Any) -> str:
    return " | ".join(text) if isinstance(text, tuple) else str(text)


def _order(parts: Sequence[tuple[str, str, str]], line: tuple[str, str, str]) -> int:
    """Return the position of the first line that is in the same section as `line`.

    Sorted by this position, lines that were added later are listed with the other lines of their section.
    """
    return next(at for at, other in enumerate(parts) if other[0] == line[0])
