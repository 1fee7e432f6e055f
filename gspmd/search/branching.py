"""Depth first through the picks that several measures leave possible: what closes a gap of the multiplier.

With a limit on bytes the least of seconds + rate · bytes bounds the seconds from below, and may stay below them however
the rate is chosen. Picks are then made one by one, last eliminated first; the messages give, for each measure, the
least that any completion costs, and where one of them is too dear no completion is looked at. Nor is one where the
picks that completions depend on were the same before, and cost no more by any measure: those were gone through.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gspmd.search.buckets import Messages

ROUNDING = 1e-13
"""The fraction of their seconds by which prefixes differ that are the same sums in another order."""


class Branching:
    """The tree of picks.

    Args:
        measures: Messages of the same buckets: at some rate, by which options are tried in order; at none; of bytes.
        ceilings: What a completion may at most cost by each measure; they may fall while the tree is gone through.
        poll: Called at every node; it ends the walk by raising.
    """

    def __init__(self, measures: Sequence[Messages], ceilings: Callable[[], Sequence[float]], poll: Callable[[], None]):
        self.measures = measures
        self.ceilings = ceilings
        self.poll = poll
        buckets = measures[0].buckets
        self._order = list(reversed(range(len(buckets))))
        self._picks = [0] * len(buckets)
        self._seen: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        # For each level the choices made before on which what follows depends.
        self._context: list[list[int]] = []
        for level in range(len(buckets)):
            rest = {buckets[at].choice for at in self._order[level:]}
            self._context.append(sorted({c for at in self._order[level:] for c in buckets[at].scope} - rest))

    def leaves(self) -> Iterator[list[int]]:
        """Complete picks below all ceilings."""
        return self._below(0, np.array([each.total() for each in self.measures]))

    def _below(self, level: int, least: np.ndarray) -> Iterator[list[int]]:
        """The leaves below a node, from the least cost of any of them by each measure."""
        if level == len(self._order):
            yield list(self._picks)
            return
        at = self._order[level]
        rows = np.array([each.row(at, self._picks) for each in self.measures])  # [measures, options]
        costs = least[:, None] - rows.min(axis=1, keepdims=True) + rows
        for option in np.argsort(costs[0], kind="stable"):
            if not np.isfinite(costs[0, option]) or costs[0, option] > self.ceilings()[0]:
                return
            if (costs[:, option] > self.ceilings()).any():
                continue
            self.poll()
            self._picks[self.measures[0].buckets[at].choice] = int(option)
            _, seconds, held = costs[:, option].tolist()
            if level + 1 == len(self._order) or not self._dominated(level + 1, seconds, held):
                yield from self._below(level + 1, costs[:, option])

    def _dominated(self, level: int, seconds: float, held: float) -> bool:
        """Return whether a level was begun, in the same context, with as few seconds and bytes; if not, it is now."""
        # In order of seconds, and so of falling bytes.
        before = self._seen.setdefault((level, *(self._picks[choice] for choice in self._context[level])), [])
        place = bisect_right(before, seconds + ROUNDING * abs(seconds), key=lambda point: point[0])
        if place and before[place - 1][1] <= held:
            return True
        place = bisect_right(before, (seconds, held))
        end = place
        while end < len(before) and before[end][1] >= held:
            end += 1
        before[place:end] = [(seconds, held)]
        return False
