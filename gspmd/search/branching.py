"""A depth-first search through the picks that lower bounds do not exclude, to close the gap left by a multiplier.

With a limit on bytes, the minimum of seconds + rate · (bytes - limit) is a lower bound on the seconds, but the bound
may stay below the seconds of the cheapest picks for every rate. In this case an option is picked for one choice after
the other, in the reverse order of elimination. The messages of bucket elimination give the least cost of any completion
by each measure of cost. If one of these costs exceeds its ceiling, the branch is cut. A branch is also cut if an
earlier branch had the same picks in all choices on which completions depend, and cost no more by any measure.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gspmd.search.buckets import Messages

ROUNDING = 1e-13
"""The relative difference up to which the costs of two incomplete picks count as equal, because they may be added up in
different orders.
"""


class Branching:
    """The tree of picks, walked depth first.

    Args:
        measures: Messages of the same buckets for three measures of cost: at some rate, at rate 0, and of bytes alone.
            Options are tried in the order of the first measure.
        ceilings: A function that returns the maximum cost of a completion by each measure. These maxima may fall during
            the walk.
        poll: A function that is called at every node. It raises an exception to end the walk.
    """

    def __init__(self, measures: Sequence[Messages], ceilings: Callable[[], Sequence[float]], poll: Callable[[], None]):
        self.measures = measures
        self.ceilings = ceilings
        self.poll = poll
        buckets = measures[0].buckets
        self._order = list(reversed(range(len(buckets))))
        self._picks = [0] * len(buckets)
        self._seen: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        # For each level, the earlier choices on which later costs depend.
        self._context: list[list[int]] = []
        for level in range(len(buckets)):
            rest = {buckets[at].choice for at in self._order[level:]}
            self._context.append(sorted({c for at in self._order[level:] for c in buckets[at].scope} - rest))

    def leaves(self) -> Iterator[list[int]]:
        """Yield complete picks that stay below all ceilings."""
        return self._below(0, np.array([each.total() for each in self.measures]))

    def _below(self, level: int, least: np.ndarray) -> Iterator[list[int]]:
        """Yield the complete picks below a node; `least` has the least cost of any such picks by each measure."""
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
        """Return whether an earlier visit to this level in the same context cost no more.

        If there was none, this visit is recorded. The context is the picks of the earlier choices on which later costs
        depend.
        """
        # Sorted by seconds, and so by falling bytes.
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
