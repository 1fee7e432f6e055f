"""Runs of text, which hold notation with subscripts before it is written as HTML or SVG."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple


class Run(NamedTuple):
    """Some text in one style: `""`, `"sub"` (mesh axes as a subscript) or `"sum"` (the words of a partial sum)."""

    text: str
    style: str = ""


def joined(parts: Iterable[Sequence[Run]], between: str) -> list[Run]:
    """Join lists of runs, with the text `between` between every two lists."""
    runs: list[Run] = []
    for part in parts:
        runs += [Run(between), *part] if runs else part
    return runs


def runs_html(runs: Iterable[Run]) -> str:
    """Return runs as HTML, with subscripts in `<sub>`.

    >>> runs_html([Run("B"), Run("data,model", "sub"), Run("LE")])
    'B<sub>data,model</sub>LE'
    """
    tags = {"": ("", ""), "sub": ("<sub>", "</sub>"), "sum": ("<small>", "</small>")}
    return "".join(f"{tags[style][0]}{escape(text)}{tags[style][1]}" for text, style in runs)
