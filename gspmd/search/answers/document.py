"""An answer as a layout file: sections and keys in the order of the presets, and behind each line what it costs.

    w_in = "E_yzF"   # 591 ms; next E_xyzF: +0.012%

The seconds are those of all terms of the cost that the choice is part of: of a weight its moves and its update, of an
activation its products and moves, of a via both. The next best is the cheapest layout that fits in which this choice is
another, all others as they are best for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gspmd.display.units import amount_of_seconds
from gspmd.layouts.rules.keys import KEYS, OVERRIDES, PARTS, PIPELINE
from gspmd.search import Answer, writing
from gspmd.search.answers.candidate import Candidate
from gspmd.search.phase import Case, LayoutLine

PRICED = "blocking"
"""The lowering whose seconds are searched."""
_SAME = 1e-9
"""The fraction of a step by which two layouts cost the same."""
_LATER = ("gradients", "optimizer")
_SECTIONS = (PIPELINE, *PARTS, *_LATER, *(name for name in OVERRIDES if name not in _LATER))


@dataclass(frozen=True)
class LineCost:
    """The remark behind a line.

    Attributes:
        seconds: of the terms that it is part of.
        next: the text of the next best, with the section that it stands in where that is no part of the model; empty if
            there is no other that fits.
        more: by which fraction of a step that costs more.
        other: the layout in which it stands; where it is not complete, there may be a cheaper one.
        alone: whether there is no other at all, on one device say, or of sizes that nothing else divides.
    """

    seconds: float
    next: str = ""
    more: float = 0.0
    other: Answer | None = field(default=None, repr=False)
    alone: bool = False

    def __str__(self) -> str:
        if not self.next:
            return f"{amount_of_seconds(self.seconds)}; {'the only option' if self.alone else 'nothing else fits'}"
        most = "at most " if self.other and not self.other.complete and self.more > 0 else ""
        return f"{amount_of_seconds(self.seconds)}; next {self.next}: {most}{_percent(self.more)}"


def remarks(candidate: Candidate, answer: Answer) -> Iterator[tuple[str, LineCost]]:
    """Yield the remark on each choice that has lines, one after the other, since each is a search of its own."""
    seconds = candidate.problem.seconds_of(answer.picks)
    for choice in candidate.problem.choices:
        if not any(candidate.options.texts[choice.name]):
            continue
        own = sum(seconds[term.name] for term in candidate.problem.terms if choice.name in term.of)
        other = candidate.next_best(answer, choice.name)
        if other is None:
            alike = candidate.options.alike(choice.name, answer.picks[choice.name])
            yield choice.name, LineCost(own, alone=len(alike) == len(choice.options))
        else:
            more = other.seconds / answer.seconds - 1
            yield choice.name, LineCost(own, _changed(candidate, choice.name, answer, other), more, other)


def _changed(candidate: Candidate, name: str, answer: Answer, other: Answer) -> str:
    """The first line of a choice that is another in the other answer."""
    (section, key), text = next(changed(candidate, name, answer, other))
    first = next(iter(candidate.options.texts[name][answer.picks[name]]))
    before = f"{section} " if section else "" if key == first[1] else f"{key.partition('.')[2]} "
    return f"{before}{text}"


def changed(candidate: Candidate, name: str, answer: Answer, other: Answer) -> Iterator[tuple[tuple[str, str], str]]:
    """Section and key, and text, of each line of a choice that is another in the other answer.

    The text of a line of a section that the other one does not have is that of the parameter.
    """
    texts = candidate.options.texts[name]
    ours, theirs = texts[answer.picks[name]], texts[other.picks[name]]
    for section, key in {**theirs, **ours}:
        if ours.get((section, key)) != theirs.get((section, key)):
            yield (section, key), theirs.get((section, key), theirs.get(("", key), ""))


def _percent(fraction: float) -> str:
    """Return how much dearer a step is, in percent.

    >>> [_percent(each) for each in (0.0, 0.014, -0.00047, 0.996, 2.345, 75.25, 123456.7)]
    ['the same', '+1.4%', '-0.047%', '+100%', '+230%', '+7,500%', '+12,000,000%']
    """
    if abs(fraction) < _SAME:
        return "the same"
    amount = float(f"{100 * fraction:.2g}")
    return f"{amount:+,.0f}%" if abs(amount) >= 10 else f"{amount:+.2g}%"


def document(
    candidate: Candidate, answer: Answer, header: Iterable[str], said: Mapping[str, LineCost], lowering: str = ""
) -> str:
    """The text of a layout file.

    Args:
        candidate: the mesh and its problem.
        answer: what was found on it.
        header: lines of the comment at the top.
        said: for each choice what is said of it; of those that are missing nothing is.
        lowering: what it asks for; `lowering_of` if not given.

    Returns:
        TOML that `gspmd.Layout.load` reads; the same for the same answer.
    """
    case = candidate.phase.case
    lines = candidate.phase.lines(answer.picks)
    return of_lines(lines, case, header, said, lowering or lowering_of(case))


def of_lines(
    lines: Iterable[LayoutLine],
    case: Case,
    header: Iterable[str],
    said: Mapping[str, LineCost] = MappingProxyType({}),
    lowering: str = PRICED,
    mesh: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """The text of a layout file, from its lines: of a pipeline say, which is no candidate.

    Args:
        lines: in any order; those of a model of one's own are written as they stand.
        case: the phase of a model.
        header, said: as of `document`.
        lowering: what it asks for.
        mesh: sizes of the mesh axes, if not those of the case.
    """
    kept = [line for line in lines if line.key not in case.absent]
    if all(line.key in KEYS for line in kept):
        order = {name: number for number, name in enumerate(KEYS)}
        kept.sort(key=lambda line: (_SECTIONS.index(line.section or line.key.partition(".")[0]), order[line.key]))
    return writing.document(
        header, mesh or case.mesh, {_named(line): line.text for line in kept}, lowering, dict(_comments(kept, said))
    )


def lowering_of(case: Case) -> str:
    """The lowering that a layout asks for where no compiler has compared any.

    Served it is `auto`, which loops what its model says gains more than the model's error: PaLM 540B's prompts on 16
    TPU v5p take 7.12 s so, compiled, and 7.63 s under `blocking`. The model is of forward passes; training lost by it.
    """
    return PRICED if case.trains else "auto"


def _named(line: LayoutLine) -> str:
    """The key of a line, with the section that it overrides in."""
    return f"{line.section}.{line.key}" if line.section else line.key


def _comments(lines: Sequence[LayoutLine], said: Mapping[str, LineCost]) -> Iterator[tuple[str, str]]:
    """A choice's first line says what it costs, and the others where that is said."""
    first: dict[str, str] = {}
    for line in lines:
        if line.choice in first:
            yield _named(line), f"with {first[line.choice]}"
        elif line.choice in said and not line.section and line.key not in _DERIVED:
            first[line.choice] = line.key
            yield _named(line), str(said[line.choice])


_DERIVED = ("embedding.tokens",)
"""Keys that lie as another does which is written later."""
