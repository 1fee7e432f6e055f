"""The cost of giving one line of a layout a different spec, if all other lines are then chosen again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from gspmd.annotate import LayoutError, Spec, SpecError, parse_via
from gspmd.annotate.errors import listed
from gspmd.display.tables import counted
from gspmd.search import Answer, NothingFits
from gspmd.search.answers.candidate import Candidate
from gspmd.search.answers.options import written
from gspmd.search.phase import name_of

_NEAREST = 3
"""Number of keys that an error names."""
_SHOWN = 6
"""Number of options that an error lists."""


@dataclass(frozen=True)
class Why:
    """The best layout with one line given, compared with the best layout of all.

    Attributes:
        key, text: the given line: its key, and its spec or via.
        candidate: the mesh.
        best: the best layout of all.
        answer: the best layout with this line. If `over` is not 0, it is the best one without a limit on memory.
        over: the bytes by which the smallest known layout with this line exceeds the limit; 0 if one was found that
            fits.
    """

    key: str
    text: str
    candidate: Candidate
    best: Answer
    answer: Answer
    over: float = 0.0

    @property
    def terms(self) -> list[tuple[str, float, float]]:
        """The terms that differ, as (name, seconds in `best`, seconds in `answer`), with the greatest change first."""
        problem = self.candidate.unlimited
        ours, theirs = problem.seconds_of(self.best.picks), problem.seconds_of(self.answer.picks)
        changed = [(name, ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]]
        return sorted(changed, key=lambda row: -abs(row[2] - row[1]))

    @property
    def lines(self) -> list[tuple[str, str, str]]:
        """The lines that differ, as (key, text in `best`, text in `answer`); the text of a missing line is empty."""
        ours, theirs = (self.candidate.phase.written(answer.picks) for answer in (self.best, self.answer))
        keys = [*ours, *(key for key in theirs if key not in ours)]
        return [(key, ours.get(key, ""), theirs.get(key, "")) for key in keys if ours.get(key) != theirs.get(key)]


def why(candidate: Candidate, key: str, text: str) -> Why:
    """Find the best layout with one line given, and compare it with the best layout of all.

    Args:
        candidate: the mesh, whose problem has been solved.
        key: the key of the line, such as `ffn.w_in` or `optimizer.ffn.w_in`.
        text: the spec of the line; for a via, both specs.

    Raises:
        LayoutError: the line does not exist, or the text is not one of its options. The message names the fault and
            lists the options.
    """
    options, best = candidate.options, candidate.solve()
    section, name = _line(candidate, key)
    choice = options.choices[section, name]
    wanted = _read(candidate, key, text)
    fits = options.having(choice, section, name, wanted)
    if not fits:
        texts = (written(each, section, name) for each in options.texts[choice])
        raise LayoutError(_no_option(candidate, key, wanted, [each for each in texts if each]))
    without = {choice: sorted({*range(len(options.texts[choice]))} - fits)}
    try:
        return Why(key, text, candidate, best, candidate.best(without))
    except NothingFits as fault:
        if fault.nearest is None or fault.over is None:
            raise LayoutError(f"no layout has {key} = '{text}': it fits no options of the other lines.") from None
        answer = candidate.unlimited_search.best(without=without)
        return Why(key, text, candidate, best, answer, fault.over)


def _line(candidate: Candidate, key: str) -> tuple[str, str]:
    """Return the section and the key of a line.

    Raises:
        LayoutError: the search has no such line.
    """
    known = {name_of(*where): where for where in candidate.options.choices}
    if key not in known:
        near = get_close_matches(key, known, _NEAREST, cutoff=0.0)
        raise LayoutError(
            f"no line of the search is called {key!r}.\n  The nearest are {listed(map(repr, near))}. "
            "The file written by --out has all lines of the layout that the search found; `gspmd layouts keys` lists "
            "every key."
        )
    return known[key]


def _read(candidate: Candidate, key: str, text: str) -> tuple[Spec, ...]:
    try:
        specs = parse_via(text).specs if key.endswith("_via") else (Spec.parse(text),)
    except SpecError as error:
        raise LayoutError(f"cannot read {key} = {text!r}: {error}") from None
    return tuple(spec.without_trivial(candidate.phase.case.mesh) for spec in specs)


def _specs(text: str) -> tuple[Spec, ...]:
    return tuple(map(Spec.parse, text.split(", ")))


def _no_option(candidate: Candidate, key: str, wanted: tuple[Spec, ...], texts: list[str]) -> str:
    """Return a message about a text that is not an option, with every fault of the text and all options."""
    faults = dict.fromkeys(_faults(candidate, wanted, _specs(texts[0])))
    fault = "; ".join(each.removesuffix(".") for each in faults) or "it does not fit the other lines of this part"
    distinct = list(dict.fromkeys(texts))
    near = sorted(distinct, key=lambda text: (-_alike(_specs(text), wanted), distinct.index(text)))
    more = f", ... ({len(distinct)} in all)" if len(distinct) > _SHOWN else ""
    asked = ", ".join(map(str, wanted))
    return f"{key} cannot be '{asked}': {fault}.\n  The options are {', '.join(map(repr, near[:_SHOWN]))}{more}."


def _faults(candidate: Candidate, wanted: tuple[Spec, ...], option: tuple[Spec, ...]) -> Iterator[str]:
    if len(wanted) != len(option):
        yield f"it has {counted(len(wanted), 'spec')}, but needs {len(option)}."
        return
    for spec, other in zip(wanted, option):
        if spec.dims != other.dims:
            yield f"'{spec}' has dimensions {''.join(spec.dims)}, but needs {''.join(other.dims)}."
        sizes = dict.fromkeys(spec.dims, 0) | dict(candidate.phase.case.sizes)  # a missing size was reported above
        for fault in spec.faults(sizes, candidate.phase.case.mesh):
            yield fault.fact


def _alike(option: tuple[Spec, ...], wanted: tuple[Spec, ...]) -> int:
    """Return how many of the wanted mesh axes shard the same dimension in this option."""
    return sum(
        spec.dims == other.dims and axis in other.axes_of(dim)
        for spec, other in zip(option, wanted)
        for dim, axes in zip(spec.dims, spec.axes)
        for axis in axes
    )
