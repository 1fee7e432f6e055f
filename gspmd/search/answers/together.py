"""One layout for all phases of serving, in which weights and cache are sharded as decoding needs them.

Prefill uses weights and cache with this sharding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gspmd.annotate import Spec
from gspmd.layouts.rules.keys import KEYS
from gspmd.search import Answer, NothingFits
from gspmd.search.answers.candidate import Candidate
from gspmd.search.answers.finding import NoneFits
from gspmd.search.phase import PhaseProblem
from gspmd.search.writing import block


@dataclass(frozen=True)
class Reading:
    """The best layout for reading texts (prefill or encoding) that stores weights and cache as decoding does.

    Attributes:
        candidate: the problem of reading, on the mesh of the layout.
        answer: the cheapest layout for reading that stores weights and cache as decoding does.
        lines: the activations and vias of this layout, as key -> text.
        tied: lines whose tensors the program does not have; they only follow the sharding of other lines.
    """

    candidate: Candidate
    answer: Answer
    lines: Mapping[str, str]
    tied: frozenset[str] = frozenset()

    def after(self, other: Mapping[str, str]) -> dict[str, str]:
        """Merge these lines with the lines of another reading, given as key -> text.

        A line that is in both readings is taken from this one, unless this reading's program lacks the line's tensor.
        """
        return {**other, **{key: text for key, text in self.lines.items() if key not in other or key not in self.tied}}


def read_beside(
    phase: PhaseProblem,
    decode: PhaseProblem,
    answer: Answer,
    limit: float,
    kept: Mapping[str, str] = MappingProxyType({}),
) -> Reading:
    """Find the best layout for a reading phase that stores weights and cache in the same way as the decoding layout.

    Args:
        phase: the problem of the reading phase, on the mesh of decoding.
        decode: the problem of decoding.
        answer: the layout found for decoding.
        limit: bytes that a device may hold.
        kept: specs of activations that another reading phase has already chosen, as key -> text.

    Raises:
        NoneFits: no layout that stores these arrays in this way fits.
    """
    candidate = Candidate(phase, limit)
    wanted = {(line.section, line.key): line.text for line in decode.lines(answer.picks)}
    wanted = {at: text for at, text in wanted.items() if _stored(at, text)} | {("", key): kept[key] for key in kept}
    without = {}
    for name in phase.choices:
        others = [
            number
            for number, lines in enumerate(phase.texts(name))
            if any(wanted.get(at, text) != text for at, text in lines.items())
        ]
        if others:
            without[name] = others
    try:
        found = candidate.best(without)
    except NothingFits as fault:
        raise NoneFits(candidate, fault.nearest, fault.over, fault.proved) from None
    tied = frozenset(line.key for line in phase.lines(found.picks) if not line.section and not line.choice)
    return Reading(candidate, found, activations(phase, found), tied)


def _stored(at: tuple[str, str], text: str) -> bool:
    """Return whether a line is that of a weight matrix or of the cache.

    Lines of vectors do not count, because vectors follow the tensors that they modify.
    """
    section, key = at
    return section == "cache" or (not section and KEYS[key].kind == "parameter" and len(Spec.parse(text).dims) > 1)


def activations(phase: PhaseProblem, answer: Answer) -> dict[str, str]:
    """Return the activations and vias of a layout, as key -> text, in the order of the presets."""
    found = {line.key: line.text for line in phase.lines(answer.picks) if not line.section}
    return {key: found[key] for key in KEYS if key in found and KEYS[key].kind != "parameter"}


def section(name: str, lines: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Return an overriding section as TOML, to append to a layout's file, or an empty string if nothing differs.

    Args:
        name: the name of the section.
        lines: its lines, as key -> text.
        before: the lines of the layout that the section overrides.
    """
    changed = {f"{name}.{key}": text for key, text in lines.items() if before.get(key) != text}
    return f"\n{block(name, changed)}\n" if changed else ""
