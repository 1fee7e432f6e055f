"""Specs and equations with their mesh axes as subscripts: runs of text, their width, and both as SVG and HTML."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple, Protocol

from gspmd.display.units import axes_text
from gspmd.display.xml import escaped


class SpecLike(Protocol):
    """The fields of a `Spec` that are drawn."""

    @property
    def dims(self) -> tuple[str, ...]: ...

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]: ...

    @property
    def partial(self) -> tuple[str, ...]: ...

    @property
    def reduced(self) -> tuple[str, ...]: ...


class OperandLike(Protocol):
    """One operand of an equation: a spec, or a group."""

    @property
    def specs(self) -> Sequence[SpecLike]: ...

    @property
    def group(self) -> bool: ...


class TermLike(Protocol):
    """One product of an equation."""

    @property
    def operands(self) -> Sequence[OperandLike]: ...


class EquationLike(Protocol):
    """The fields of an `Equation` that are drawn."""

    @property
    def terms(self) -> Sequence[TermLike]: ...

    @property
    def outputs(self) -> Sequence[SpecLike]: ...

    @property
    def group(self) -> bool: ...


class Run(NamedTuple):
    """Some text in one style: `""`, `"sub"` (mesh axes below the line) or `"sum"` (the words of a partial sum)."""

    text: str
    style: str = ""


_SIZES = {"": 1.0, "sub": 0.76, "sum": 0.86}
_DROP = 0.26
"""The depth of a subscript below the line, in ems of the text around it."""

# Widths of Helvetica's characters in thousandths of an em; wider fonts are allowed for by `_WIDER`.
_WIDTHS = {
    **dict.fromkeys("ijl'|", 222), **dict.fromkeys("ft.,:;!/ []I", 278), **dict.fromkeys("r()-{}`", 333),
    **dict.fromkeys("ckvxyzsJ", 500), **dict.fromkeys("mM", 833), **dict.fromkeys("ABEKPSVXY", 667),
    **dict.fromkeys("CDHNRU", 722), **dict.fromkeys("GOQ", 778), **dict.fromkeys("FTZL", 611), "w": 722, "W": 944,
    "→": 1000, "·": 333, "×": 584, "+": 584, "=": 584, "…": 1000, "%": 889,
}  # fmt: skip
_WIDER = 1.14


def text_width(text: str, size: float) -> float:
    """Return about the width of a text, in the units of its font size; rather more than less."""
    return sum(_WIDTHS.get(character, 556) for character in text) / 1000 * size * _WIDER


def width(runs: Iterable[Run], size: float) -> float:
    """Return about the width of runs of text."""
    return sum(text_width(run.text, size * _SIZES[run.style]) for run in runs)


def spec_runs(spec: SpecLike) -> list[Run]:
    """Return a spec as runs: `B_xLE` as B, x below the line, LE."""
    runs: list[Run] = []
    for dim, axes in zip(spec.dims, spec.axes):
        if runs and not runs[-1].style:
            runs[-1] = Run(runs[-1].text + dim)
        else:
            runs.append(Run(dim))
        runs += [Run(axes_text(axes), "sub")] if axes else []
    for word, axes in (("partialsum", spec.partial), ("reduced", spec.reduced)):
        if axes:
            runs.append(Run(f"{' ' if runs else ''}({word}-{axes_text(axes)})", "sum"))
    return runs or [Run("scalar", "sum")]


def joined(parts: Iterable[Sequence[Run]], between: str) -> list[Run]:
    """Join runs with a text between them."""
    runs: list[Run] = []
    for part in parts:
        runs += [Run(between), *part] if runs else part
    return runs


def equation_words(equation: EquationLike) -> list[list[Run]]:
    """Return an equation as words, before each of which a line may be broken."""
    words: list[list[Run]] = []
    for number, term in enumerate(equation.terms):
        words += [[Run("+ ")]] if number else []
        for at, operand in enumerate(term.operands):
            inner = _operand(operand.specs, operand.group)
            words.append([*inner, Run(", " if at + 1 < len(term.operands) else " ")])
    words.append([Run("→ "), *_operand(equation.outputs, equation.group)])
    return words


def _operand(specs: Sequence[SpecLike], group: bool) -> list[Run]:
    inner = joined(map(spec_runs, specs), ", ")
    return [Run("("), *inner, Run(")")] if group else inner


def tspans(runs: Iterable[Run], size: float) -> str:
    """Return runs as the content of an SVG `<text>` of this font size."""
    drawn, depth = [], 0.0
    for text, kind in runs:
        wanted = _DROP * size if kind == "sub" else 0.0
        given = [f'dy="{wanted - depth:.4g}"'] if wanted != depth else []
        # An attribute and no style, which the policy of a page may forbid; no rule of the theme sizes a tspan.
        given += [f'font-size="{size * _SIZES[kind]:.4g}"'] if kind else []
        given += ['class="soft"'] if kind == "sum" else []
        opening = " ".join(("<tspan", *given))
        drawn.append(f"{opening}>{escaped(text)}</tspan>" if given else escaped(text))
        depth = wanted
    return "".join(drawn)


def spec_html(spec: SpecLike) -> str:
    """Return a spec as HTML with subscripts.

    >>> from gspmd.annotate import Spec
    >>> spec_html(Spec.parse("B_xLE_{data,model}"))
    'B<sub>x</sub>LE<sub>data,model</sub>'
    """
    return runs_html(spec_runs(spec))


def runs_html(runs: Iterable[Run]) -> str:
    """Return runs as HTML."""
    tags = {"": ("", ""), "sub": ("<sub>", "</sub>"), "sum": ("<small>", "</small>")}
    return "".join(f"{tags[kind][0]}{escape(text)}{tags[kind][1]}" for text, kind in runs)
