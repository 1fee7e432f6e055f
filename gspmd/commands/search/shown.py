"""The printed results of `gspmd search`: the answer beside presets, the cost of other lines, missing presets."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.markup import escape

from gspmd.commands.search.compiling import Listed
from gspmd.commands.search.settings import SearchSettings
from gspmd.commands.search.written import plus_or_minus, seconds, where
from gspmd.display.tables import Column, Sheet
from gspmd.display.units import amount_of_bytes, mesh_text
from gspmd.search import Answer
from gspmd.search.answers import Candidate, SearchResult
from gspmd.search.answers.candidate import NEAR
from gspmd.search.answers.presets import Placed
from gspmd.search.answers.why import Why

_SMALL = 0.005
"""A part of the cost has its own column only if the part is more than this fraction of the slowest layout's seconds."""


def groups(terms: Mapping[str, float]) -> dict[str, float]:
    """Sum the seconds of terms by the first word of their names: attention, ffn, output, ...

    >>> groups({"ffn.in: residual": 1.0, "ffn.out: residual 0": 2.0, "norms: residual": 0.5})
    {'ffn': 3.0, 'norms': 0.5}
    """
    found: dict[str, float] = {}
    for name, amount in terms.items():
        group = name.partition(":")[0].partition(".")[0]
        found[group] = found.get(group, 0.0) + amount
    return found


def comparison(finding: SearchResult, presets: Iterable[Placed], written: str = "found") -> Sheet:
    """Return a table of the answer beside presets and layouts of the user, by parts of the cost.

    `written` is the name of the answer among the compiled layouts.
    """
    own_name, ratio_of = ("found", "of found") if written == "found" else (f"written: {written}", "of written")
    rows = [(own_name, finding.best, finding.best.named, finding.answer)]
    others = [(each.name, each.candidate, _mesh(each.mesh), each.answer) for each in presets if each.answer]
    rows += sorted(others, key=lambda row: (row[3].bytes > row[1].limit, row[3].seconds))  # Fitting layouts first.
    costs = [groups(candidate.unlimited.seconds_of(answer.picks)) for _, candidate, _, answer in rows]
    dearest = max(
        (answer.seconds for name, candidate, _, answer in rows if answer.bytes <= candidate.limit), default=0.0
    )
    fitting = costs[: sum(answer.bytes <= candidate.limit for _, candidate, _, answer in rows)]  # These are first.
    own = [group for group in costs[0] if max(each.get(group, 0.0) for each in fitting) > _SMALL * dearest]
    trained = _trained(candidate for _, candidate, _, _ in rows)
    names = ("layout", "mesh", *trained, "a step", ratio_of, *own, "rest", "memory", "fits")
    sheet = Sheet(
        f"the layout that was {ratio_of.removeprefix('of ')}, and every other on the mesh that is best for it",
        _columns(names),
    )
    for (name, candidate, mesh, answer), cost in zip(rows, costs):
        parts = [cost.get(group, 0.0) for group in own]
        parts.append(sum(cost.values()) - sum(parts))
        fits = answer.bytes <= candidate.limit
        style = "[bold]{}[/]" if name == own_name else "{}" if fits else "[dim]{}[/]"
        ratio = "1.000" if name == own_name else _ratio(answer, finding.answer, candidate, fits)
        what = (name, mesh, *(str(getattr(candidate, each)) for each in trained))
        cells = (*what, seconds(answer.seconds), ratio, *map(seconds, parts), amount_of_bytes(answer.bytes))
        sheet.add(*(style.format(escape(cell)) for cell in (*cells, "yes" if fits else "no")))
    return sheet


def _ratio(answer: Answer, ours: Answer, of: Candidate, fits: bool) -> str:
    """Return the seconds of a layout as a multiple of the answer's seconds.

    If the layout is cheaper than the answer, the text also says why the layout is not the answer.
    """
    ratio = answer.seconds / ours.seconds
    if abs(ratio - 1) <= NEAR:
        less = answer.bytes < ours.bytes and amount_of_bytes(answer.bytes) != amount_of_bytes(ours.bytes)
        return f"equal within {NEAR:.2%}{', less memory' if less else ''}"
    if ratio > 1:
        return f"{ratio:.3f}"
    # A layout with more microbatches becomes the answer only if it gains `GAIN`. Any other cheaper layout that fits is
    # cheaper only as planned: the answer was chosen among compiled programs.
    fitting = f"in {of.microbatches} microbatches" if of.microbatches > 1 else "as planned"
    return f"{ratio:.3f}, {fitting if fits else 'does not fit'}"


def _trained(candidates: Iterable[Candidate]) -> list[str]:
    """Return the columns that only training has: remat, and microbatches if a candidate has several microbatches."""
    every = [*candidates]
    cut = any(each.microbatches > 1 for each in every)
    return [*["remat"] * bool(every[0].remat), *["microbatches"] * cut]


def _columns(names: Sequence[str]) -> list[Column]:
    """Return the columns for parts of the cost; a narrow terminal drops the last ones first."""
    kept = dict.fromkeys(("layout", "a step", "of found", "of written", "memory", "fits"), 0)
    kept |= dict.fromkeys(("mesh", "remat", "microbatches"), 1)
    return [
        Column(
            name,
            "left" if name in ("layout", "mesh", "remat", "fits") else "right",
            goes=kept.get(name, 2 + number),
            folds=name in ("of found", "of written"),
        )
        for number, name in enumerate(names)
    ]


def _mesh(mesh: Mapping[str, int]) -> str:
    return mesh_text(mesh, trivial=False)


def outside(presets: Iterable[Placed]) -> list[str]:
    """Return a line for each preset that the search does not consider and that therefore has no row in the table."""
    lines = []
    for each in presets:
        if each.answer is None and each.traced is not None:
            lines.append(
                f"{each.name} on {_mesh(each.mesh)}: {seconds(each.traced)} by gspmd.trace, which leaves out "
                f"attention's own products and passes over memory; {each.reason}"
            )
        elif each.answer is None:
            lines.append(f"{each.name}: {'' if each.usable else 'not possible, '}{each.reason}")
    return lines


def reasons(asked: Why) -> list[Sheet]:
    """Return a table of the cost of giving a line another spec, by term, and a table of other lines that would change.

    The second table is left out if no other line would change.
    """
    ours, theirs = asked.best.seconds, asked.answer.seconds
    most = "" if asked.answer.complete else "at most "
    title = f"{asked.key} = {asked.text}: {most}{seconds(theirs)}, {theirs / ours - 1:+.2%}"
    if asked.over:
        title += f"; it needs at least {amount_of_bytes(asked.over)} more than fit, and these seconds ignore the limit"
    costs = Sheet(
        escape(title),
        (Column("part of the cost"), Column("found", "right"), Column("asked", "right"), Column("more", "right")),
    )
    for name, before, after in asked.terms:
        costs.add(escape(name), *_compared(before, after, seconds))
    costs.add("a step", *_compared(ours, theirs, seconds), total=True)
    costs.add("memory", *_compared(asked.best.bytes, asked.answer.bytes, amount_of_bytes), total=True)
    lines = Sheet("these lines would change too", (Column("line"), Column("found"), Column("asked")))
    for row in asked.lines:
        lines.add(*(escape(cell) if cell else "as the weight" for cell in row))
    return [costs, lines] if asked.lines else [costs]


def _compared(before: float, after: float, told: Callable[[float], str]) -> tuple[str, str, str]:
    """Return two amounts and their signed difference, as text."""
    return told(before), told(after), f"{'-' if after < before else '+'}{told(abs(after - before))}"


def compiled(shortlist: Sequence[Listed]) -> Sheet:
    """Return a table of the compiled programs in the order of the shortlist, with planned and compiled figures."""
    presets = [each.seconds for each in shortlist if each.preset]
    best = min(presets, default=None)
    trained = _trained(each.candidate for each in shortlist)
    hides = any(each.hidden for each in shortlist)
    names = (
        "layout",
        "mesh",
        *trained,
        "planned",
        *["loops hide"] * hides,
        "compiled",
        *["of preset"] * bool(presets),
        "planned memory",
        "compiled memory",
        "fits",
    )
    sheet = Sheet(
        "compiled for the slice, the fastest first",
        [Column(name, "left" if name in ("layout", "mesh", "remat", "fits") else "right") for name in names],
    )
    for each in shortlist:
        report, ran = each.report, each.seconds < float("inf")
        ratio = f"{each.seconds / best:.3f}" if ran and best is not None and best < float("inf") else ""
        cells = (
            each.called, _mesh(each.mesh), *(str(getattr(each.candidate, name)) for name in trained),
            seconds(each.answer.seconds), *[seconds(each.hidden) if each.hidden else ""] * hides,
            seconds(each.seconds) if ran else "", *[ratio] * bool(presets),
            amount_of_bytes(each.answer.bytes), amount_of_bytes(report.bytes_per_device) if report else "",
            "yes" if report and report.fits else "no",
        )  # fmt: skip
        sheet.add(*map(escape, cells))
    return sheet


def uncompiled(beside: Iterable[Placed]) -> list[str]:
    """Return a line about each layout of --beside that is not compiled, because the search does not consider it."""
    return [
        f"{each.name} is not compiled: gspmd compile --layout {each.name} does." for each in beside if not each.answer
    ]


def warnings(shortlist: Sequence[Listed]) -> list[str]:
    """Return a warning for every part of the compiled programs that costs more than necessary."""
    timelines = [(each.called, each.report.timeline) for each in shortlist if each.report and each.report.timeline]
    return [f"warning: {called}: {warning}" for called, timeline in timelines for warning in timeline.warnings]


def answer_line(finding: SearchResult, settings: SearchSettings) -> str:
    """Return the answer as one line of output, which also says whether it was compiled."""
    held = f"{amount_of_bytes(finding.answer.bytes)} on each device"
    cost = f"{seconds(finding.answer.seconds)}{plus_or_minus(settings)}"
    proved = f", no layout costs less than {seconds(finding.bound)}" if finding.complete else ""
    planned = "" if settings.compile else " Planned, not compiled: --compile 3 asks the compiler."
    return f"mesh {where(finding.best)}: {cost} a step{proved}; {held}.{planned}"
