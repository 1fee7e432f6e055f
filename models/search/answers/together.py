"""One layout for both phases of serving: weights and cache lie as they are best to decode, and prompts are read so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gspmd.layouts.rules.keys import KEYS
from gspmd.search import Answer, NothingFits

from ..problem import PhaseProblem
from .candidate import Candidate
from .finding import NoneFits


@dataclass(frozen=True)
class Prefill:
    """How prompts are read beside a layout to decode.

    Attributes:
        candidate: the problem, on the mesh of the layout.
        answer: the cheapest that stores what the layout stores.
        section: what it has otherwise, key to text.
    """

    candidate: Candidate
    answer: Answer
    section: Mapping[str, str]

    @property
    def text(self) -> str:
        """The section as TOML, to follow a layout's file; empty if both phases are alike."""
        keys = [f'"{key}"' for key in self.section]
        width = max(map(len, keys), default=0)
        rows = [f'{key.ljust(width)} = "{text}"' for key, text in zip(keys, self.section.values())]
        return "\n".join(["", "[prefill]", *rows, ""]) if rows else ""


def read_beside(phase: PhaseProblem, decode: PhaseProblem, answer: Answer, limit: float) -> Prefill:
    """Find how to read prompts with the weights and the cache that a layout to decode has.

    Args:
        phase: the problem of the prefill, on the mesh of the other one.
        decode: the problem of decoding.
        answer: to it.
        limit: bytes that a device may hold.

    Raises:
        NoneFits: there is nothing that fits and stores the same.
    """
    candidate = Candidate(phase, limit)
    without = {}
    for name, options in phase.choices.items():
        stored = _stored(name, decode.choices[name][answer.picks[name]])
        if stored is not None:
            without[name] = [n for n, option in enumerate(options) if _stored(name, option) != stored]
    try:
        found = candidate.search.best(without=without)
    except NothingFits as fault:
        raise NoneFits(candidate, fault.nearest, fault.over) from None
    return Prefill(candidate, found, dict(_others(phase, found, decode, answer)))


def _stored(name: str, option: Any) -> Any:
    """What an option says of what is stored: where a weight lies, or the cache; None if it says nothing of it."""
    if name == "heads":
        return option.cache
    return option if name in KEYS and KEYS[name].kind == "parameter" else None


def _others(phase: PhaseProblem, answer: Answer, decode: PhaseProblem, other: Answer) -> Iterator[tuple[str, str]]:
    """Activations and vias that are not as they are in decoding."""
    before = {line.key: line.text for line in decode.lines(other.picks) if not line.section}
    order = [*KEYS]
    for line in sorted(phase.lines(answer.picks), key=lambda line: order.index(line.key)):
        if not line.section and KEYS[line.key].kind != "parameter" and line.text != before[line.key]:
            yield line.key, line.text
