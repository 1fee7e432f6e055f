"""An answer as a layout file, with sections and keys in the order of the presets, and the cost after each line.

    w_in = "E_yzF"   # 591 ms; next E_xyzF: +0.012%

The seconds of a line are the sum of all terms of the cost that depend on the line's choice. For a weight these are its
moves and its update, for an activation its products and moves, and for a via all of these. The next best option is the
one in the cheapest fitting layout that gives the line a different spec. All other lines are chosen again for that
layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gspmd.display.units import amount_of_seconds
from gspmd.layouts import Layout
from gspmd.layouts.rules.keys import KEYS, OVERRIDES, PARTS, PIPELINE
from gspmd.search import Answer, writing
from gspmd.search.answers.candidate import Candidate
from gspmd.search.phase import Case, LayoutLine

PRICED = "blocking"
"""The lowering that the search prices."""
_SAME = 1e-9
"""The fraction of a step's seconds up to which a difference counts as none."""
_LATER = ("gradients", "optimizer")
_SECTIONS = (PIPELINE, *PARTS, *_LATER, *(name for name in OVERRIDES if name not in _LATER))


@dataclass(frozen=True)
class LineCost:
    """The comment after a line: its cost, and the next best option.

    Attributes:
        seconds: the seconds of the terms that depend on the choice.
        next: the line with the next best option, as text, with its section if it overrides a part of the model; empty
            if no other option of the choice fits.
        more: the slowdown of a step with the next best option, as a fraction of the step's seconds.
        other: the layout with the next best option. If it is not complete, the search was cut short, and a cheaper
            layout with a different option may exist.
        alone: whether the choice has only one option, as on one device.
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
    """Yield the name of each choice that has lines, and the comment on it; each comment takes one search."""
    seconds = candidate.unlimited.seconds_of(answer.picks)
    for choice in candidate.unlimited.choices:
        if not any(candidate.options.texts[choice.name]):
            continue
        own = sum(seconds[term.name] for term in candidate.unlimited.terms if choice.name in term.of)
        other = candidate.next_best(answer, choice.name)
        if other is None:
            alike = candidate.options.alike(choice.name, answer.picks[choice.name])
            yield choice.name, LineCost(own, alone=len(alike) == len(choice.options))
        else:
            more = other.seconds / answer.seconds - 1
            yield choice.name, LineCost(own, _changed(candidate, choice.name, answer, other), more, other)


def _changed(candidate: Candidate, name: str, answer: Answer, other: Answer) -> str:
    """Return, as text, the first line of a choice that differs in the other answer."""
    (section, key), text = next(changed(candidate, name, answer, other))
    first = next(iter(candidate.options.texts[name][answer.picks[name]]))
    before = f"{section} " if section else "" if key == first[1] else f"{key.partition('.')[2]} "
    return f"{before}{text}"


def changed(candidate: Candidate, name: str, answer: Answer, other: Answer) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield, for each line of a choice that differs in the other answer, its section and key, and its text there.

    If the other answer lacks the line in an overriding section, the text is that of the parameter.
    """
    texts = candidate.options.texts[name]
    ours, theirs = texts[answer.picks[name]], texts[other.picks[name]]
    for section, key in {**theirs, **ours}:
        if ours.get((section, key)) != theirs.get((section, key)):
            yield (section, key), theirs.get((section, key), theirs.get(("", key), ""))


def _percent(fraction: float) -> str:
    """Return the slowdown of a step, which is given as a fraction, as text in percent.

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
    """Return the text of a layout file.

    Args:
        candidate: the mesh and its problem.
        answer: the answer that the search found for this candidate.
        header: lines of the comment at the top of the file.
        said: the comment on each choice, by the name of the choice; a choice without an entry gets no comment.
        lowering: the lowering that the file sets; by default that of `lowering_of`.

    Returns:
        TOML text that `gspmd.Layout.load` reads. The same answer always has the same text.
    """
    case = candidate.phase.case
    lines = candidate.phase.lines(answer.picks)
    base = candidate.phase.question.lines.layout
    return of_lines(lines, case, header, said, lowering or lowering_of(candidate.phase.phase), base=base)


def of_lines(
    lines: Iterable[LayoutLine],
    case: Case,
    header: Iterable[str],
    said: Mapping[str, LineCost] = MappingProxyType({}),
    lowering: str = PRICED,
    mesh: Mapping[str, int] = MappingProxyType({}),
    base: Layout | None = None,
) -> str:
    """Return the text of a layout file from its lines alone, for answers that have no `Candidate`, such as pipelines.

    Args:
        lines: the lines, in any order; lines of a custom model are written in the order given.
        case: the phase and the sizes of the model.
        header, said: as in `document`.
        lowering: the lowering that the file sets.
        mesh: sizes of the mesh axes, if they differ from those of the case.
        base: as in `gspmd.search.writing.document`.
    """
    kept = ordered(lines)
    texts = {line.name: line.text for line in kept}
    return writing.document(header, mesh or case.mesh, texts, lowering, dict(_comments(kept, said)), base)


def ordered(lines: Iterable[LayoutLine]) -> list[LayoutLine]:
    """Return lines in the order of a layout file, which is that of the presets.

    Lines of a custom model keep their order.
    """
    kept = [*lines]
    if all(line.key in KEYS for line in kept):
        order = {name: number for number, name in enumerate(KEYS)}
        kept.sort(key=lambda line: (_SECTIONS.index(line.section or line.key.partition(".")[0]), order[line.key]))
    return kept


def lowering_of(phase: str) -> str:
    """Return the default lowering for a layout whose lowerings have not been compiled and compared.

    For prompts the lowering is `auto`, which loops a product if the predicted gain is above the cost model's error. In
    compiled programs, PaLM 540B's prompts on 16 TPU v5p take 7.12 s under `auto`, and 7.63 s under `blocking`. The cost
    model covers forward passes only, and training was slower with `auto`. Decoding was slower too, because its products
    have few rows. For a step of Qwen2 72B with 64 rows on 16 TPU v5e, the loops copy each piece of a weight before they
    use it, and the step takes 75.9 ms instead of 46.1 ms.
    """
    return "auto" if phase == "prefill" else PRICED


def _comments(lines: Sequence[LayoutLine], said: Mapping[str, LineCost]) -> Iterator[tuple[str, str]]:
    """Yield the name of each line that has a comment, and the comment.

    The comment on a choice stands after one of its lines; later lines of the same choice name that line.
    """
    first: dict[str, str] = {}
    for line in lines:
        if line.choice in first:
            yield line.name, f"with {first[line.choice]}"
        elif line.choice in said and not line.section and line.key not in DERIVED:
            first[line.choice] = line.key
            yield line.name, str(said[line.choice])


DERIVED = ("embedding.tokens",)
"""Keys that are always sharded like a key that is written later."""
