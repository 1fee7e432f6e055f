"""Layouts that cost little more than the cheapest, one of which may be faster by costs that are not priced."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import isclose

from gspmd.search import Answer, NothingFits
from gspmd.search.answers.candidate import NEAR, TIE, Candidate

KINDS = 3
"""Number of ways to shard each tensor that are tried, the cheapest first."""


def nearby(candidate: Candidate, most: float) -> Iterator[tuple[str, Answer]]:
    """Yield, for every tensor in the layers, the cheapest fitting layout for each of several ways to shard it.

    At most `KINDS` ways are tried for each tensor, the cheapest first. The cheapest layout of all is left out.

    Args:
        candidate: the mesh.
        most: a limit in seconds; layouts that cost more are left out.

    Yields:
        The name of the tensor's choice, and the answer. Of several answers with the same seconds and bytes, only the
        first is yielded.

    Raises:
        NothingFits: no layout fits.
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
    """Find, for every choice that has lines, the cheapest layout that differs from a given one in these lines only.

    Args:
        candidate: the mesh.
        picks: the layout, which fits.

    Returns:
        The name of each choice that can improve the layout, with the cheapest layout that fits and differs only in the
        lines of this choice. The choice with the cheapest layout comes first. Gains of less than 0.05% of a step are
        left out.
    """
    enough = with_picks(candidate, picks).seconds * (1 - NEAR)
    found = [
        (name, with_picks(candidate, picks, {name})) for name, texts in candidate.options.texts.items() if any(texts)
    ]
    return sorted((each for each in found if each[1].seconds < enough), key=lambda each: each[1].seconds)


def with_picks(candidate: Candidate, picks: Mapping[str, int], free: Collection[str] = ()) -> Answer:
    """Find the cheapest fitting layout with these picks for all choices that have lines, except the free choices.

    Raises:
        NothingFits: no such layout fits.
    """
    texts = candidate.options.texts
    return candidate.soon(fixed={name: pick for name, pick in picks.items() if name not in free and any(texts[name])})


def in_ends(key: str) -> bool:
    """Return whether a line, or a choice, belongs to the embedding or the output, which a step computes once.

    >>> [in_ends(key) for key in ("embedding.tokens", "attention.residual", "output.in_via")]
    [True, False, True]
    """
    return key.partition(".")[0] in ("embedding", "output")


def _same(one: Answer, other: Answer) -> bool:
    return isclose(one.seconds, other.seconds, rel_tol=TIE) and one.bytes == other.bytes
