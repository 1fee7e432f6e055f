"""Layouts that are little dearer than the cheapest: among them is one that is faster by what no price has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import isclose

from gspmd.search import Answer, NothingFits
from gspmd.search.answers.candidate import NEAR, TIE, Candidate

KINDS = 3
"""Ways to shard each tensor that are gone through, the cheapest first."""


def nearby(candidate: Candidate, most: float) -> Iterator[tuple[str, Answer]]:
    """For every tensor of the layers, the cheapest layouts that fit with it sharded in one way or in another.

    The cheapest of all is not among them.

    Args:
        candidate: the mesh.
        most: seconds; what costs more is left out.

    Yields:
        The choice, and the answer; of answers that cost the same in seconds and bytes the first.

    Raises:
        NothingFits: nothing does.
    """
    known = [candidate.solve()]
    for name, costs in candidate.search.bounds().items():
        kinds = [] if in_ends(name) else candidate.options.kinds(name)
        for kind in sorted(kinds, key=lambda kind: costs[kind].min())[:KINDS]:
            if costs[kind].min() > most:
                break
            try:
                answer = candidate.soon(without={name: {*range(len(costs))} - {*kind}})
            except NothingFits:
                continue
            if answer.seconds <= most and not any(_same(answer, other) for other in known):
                known.append(answer)
                yield name, answer


def improved(candidate: Candidate, picks: Mapping[str, int]) -> list[tuple[str, Answer]]:
    """For every choice that writes lines, the layout that is cheaper with other ones, and all else as it is.

    Args:
        candidate: the mesh.
        picks: the layout, which fits.

    Returns:
        The choices, and the cheapest that fit; the cheapest first, none that gain less than 0.05% of a step.
    """
    enough = with_picks(candidate, picks).seconds * (1 - NEAR)
    found = [
        (name, with_picks(candidate, picks, {name})) for name, texts in candidate.options.texts.items() if any(texts)
    ]
    return sorted((each for each in found if each[1].seconds < enough), key=lambda each: each[1].seconds)


def with_picks(candidate: Candidate, picks: Mapping[str, int], free: Collection[str] = ()) -> Answer:
    """The cheapest layout that fits with these options, but for the choices that are free, and those without lines.

    Raises:
        NothingFits: there is none.
    """
    texts = candidate.options.texts
    return candidate.soon(fixed={name: pick for name, pick in picks.items() if name not in free and any(texts[name])})


def in_ends(key: str) -> bool:
    """Return whether a line, or a choice, is of a part that a step has once, beside the many layers.

    >>> [in_ends(key) for key in ("embedding.tokens", "attention.residual", "output.in_via")]
    [True, False, True]
    """
    return key.partition(".")[0] in ("embedding", "output")


def _same(one: Answer, other: Answer) -> bool:
    return isclose(one.seconds, other.seconds, rel_tol=TIE) and one.bytes == other.bytes
