"""One layout for both phases of serving: weights and cache as is best for decoding, and prompts read with these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gspmd.annotate import Spec
from gspmd.layouts.rules.keys import KEYS
from gspmd.search import Answer, NothingFits
from gspmd.search.answers.candidate import Candidate
from gspmd.search.answers.finding import NoneFits
from gspmd.search.phase import PhaseProblem


@dataclass(frozen=True)
class Prefill:
    """The reading of prompts with the weights and the cache of a layout for decoding.

    Attributes:
        candidate: the problem of reading prompts, on the mesh of the layout.
        answer: the cheapest layout with the same stored arrays.
        section: the lines that differ from decoding, key to text.
    """

    candidate: Candidate
    answer: Answer
    section: Mapping[str, str]

    @property
    def text(self) -> str:
        """The section as TOML, to be added to a layout's file; empty if both phases are alike."""
        keys = [f'"{key}"' for key in self.section]
        width = max(map(len, keys), default=0)
        rows = [f'{key.ljust(width)} = "{text}"' for key, text in zip(keys, self.section.values())]
        return "\n".join(["", "[prefill]", *rows, ""]) if rows else ""


def read_beside(phase: PhaseProblem, decode: PhaseProblem, answer: Answer, limit: float) -> Prefill:
    """Find how to read prompts with the weights and the cache of a layout for decoding.

    Args:
        phase: the problem of the prefill, on the mesh of decoding.
        decode: the problem of decoding.
        answer: the answer of decoding.
        limit: bytes that a device may hold.

    Raises:
        NoneFits: no layout that stores the same arrays fits.
    """
    candidate = Candidate(phase, limit)
    wanted = {(line.section, line.key): line.text for line in decode.lines(answer.picks)}
    without = {}
    for name in phase.choices:
        others = [
            number
            for number, lines in enumerate(phase.texts(name))
            if any(_stored(at, text) and wanted[at] != text for at, text in lines.items())
        ]
        if others:
            without[name] = others
    try:
        found = candidate.search.best(without=without)
    except NothingFits as fault:
        raise NoneFits(candidate, fault.nearest, fault.over) from None
    return Prefill(candidate, found, dict(_others(phase, found, decode, answer)))


def _stored(at: tuple[str, str], text: str) -> bool:
    """Return whether a line places a weight or the cache; vectors follow the tensors that they are added to."""
    section, key = at
    return section == "cache" or (not section and KEYS[key].kind == "parameter" and len(Spec.parse(text).dims) > 1)


def _others(phase: PhaseProblem, answer: Answer, decode: PhaseProblem, other: Answer) -> Iterator[tuple[str, str]]:
    """Yield the activations and vias that differ from those of decoding."""
    before = {line.key: line.text for line in decode.lines(other.picks) if not line.section}
    order = [*KEYS]
    for line in sorted(phase.lines(answer.picks), key=lambda line: order.index(line.key)):
        if not line.section and KEYS[line.key].kind != "parameter" and line.text != before[line.key]:
            yield line.key, line.text
