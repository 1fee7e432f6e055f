"""Seconds against bytes: the cheapest layout for every limit on memory, sampled by a few searches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, log, sqrt

from gspmd.search import Answer
from gspmd.search.answers.candidate import TIE, Candidate

SEARCHES = 12
_NARROW = 1e-3
"""An interval of bytes is not divided further if its ends differ by less than this fraction."""
SEEN = 3.0
"""Layouts beyond this multiple of the cheapest layout's seconds, or of the limit's bytes, are not of interest."""


@dataclass(frozen=True)
class Point:
    """A layout that is the cheapest for all memory limits from its own bytes to `limit`.

    No layout within such a limit costs less than `answer.bound`. Unless the search was stopped early, this bound is the
    layout's own seconds, up to `TOLERANCE`.
    """

    answer: Answer
    limit: float


def frontier(
    candidate: Candidate, searches: int = SEARCHES, tell: Callable[[str], None] = lambda text: None
) -> list[Point]:
    """Find the cheapest layouts, from the one that holds the fewest bytes to the one that costs the fewest seconds.

    Each search has a memory limit between the bytes of two neighboring points, namely those with the largest gap.
    Between the limit of one point and the bytes of the next point, there may be layouts whose seconds lie between the
    seconds of the two points. The candidate's own answer, if it is known, is one of the points.

    Returns:
        Points by ascending bytes, each cheaper than all points before it.
    """
    free, least = candidate.free, candidate.least.bytes
    points = [Point(free, inf)]
    if least < free.bytes:
        points.insert(0, _within(candidate, least))
    found = candidate.answer
    if found and least < found.bytes < free.bytes and free.seconds < found.seconds < points[0].answer.seconds:
        points.insert(1, Point(found, candidate.limit))
    for number in range(searches):
        most = SEEN * free.seconds, SEEN * candidate.limit
        gaps = [(_unknown(*pair, *most), at) for at, pair in enumerate(pairwise(points))]
        size, at = max(gaps, default=(0.0, 0))
        if size <= 0.0:
            break
        tell(f"seconds against bytes: {number + 1} of at most {searches} limits")
        found = _within(candidate, sqrt(points[at].limit * points[at + 1].answer.bytes))
        if found.answer.seconds >= points[at].answer.seconds * (1 - TIE):
            known = points[at].answer
            bound, complete = min(known.bound, found.answer.bound), known.complete and found.answer.complete
            points[at] = Point(replace(known, bound=bound, complete=complete), found.limit)
        else:
            points.insert(at + 1, found)
    return _rising(points)


def _rising(points: list[Point]) -> list[Point]:
    """Return the points that are faster than all points with fewer bytes."""
    kept = points[:1]
    for each in points[1:]:
        if each.answer.seconds < kept[-1].answer.seconds * (1 - TIE):
            kept.append(each)
        else:
            bound = min(kept[-1].answer.bound, each.answer.bound)
            kept[-1] = Point(replace(kept[-1].answer, bound=bound), each.limit)
    return kept


def _within(candidate: Candidate, limit: float) -> Point:
    return Point(candidate.within(limit).best(), limit)


def _unknown(before: Point, after: Point, slowest: float, largest: float) -> float:
    """Return the area of the rectangle between two points, in which unknown layouts may lie.

    The sides are measured in logarithms of bytes and of seconds.
    """
    ratio = min(after.answer.bytes, largest) / before.limit
    slower = min(before.answer.seconds, slowest) / after.answer.seconds
    return log(ratio) * log(slower) if ratio > 1 + _NARROW and slower > 1 else 0.0
