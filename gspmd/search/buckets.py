"""Bucket elimination: the least cost of all picks, and of all picks with a given option, without enumerating picks.

Choices are eliminated one after another. When a choice is eliminated, its *bucket* consists of the terms and messages
that depend on this choice and are not yet in a bucket. The *scope* of the bucket is the other choices on which these
terms and messages depend. The *message* of the bucket gives, for each combination of options in the scope, the least
sum of the bucket over the options of the eliminated choice. The messages with an empty scope add up to the least cost
of all picks.

Source: R. Dechter, Bucket elimination: a unifying framework for reasoning, Artificial Intelligence 113 (1999).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

import numpy as np

from gspmd.annotate import PlanError
from gspmd.search.tables import Tables, aligned

LARGEST = 2**30
"""The largest number of combinations that are enumerated in one bucket. They take seconds; more take minutes."""
BLOCK = 2**16
"""Number of combinations that are added up at once. They take 512 KiB, which stay in a core's cache."""
TIE = 1e-12
"""The relative difference up to which costs count as equal, because they may be added up in different orders."""


@dataclass(frozen=True)
class Input:
    """A table in a bucket, which is a term or the message of another bucket.

    `number` is the index of the term or of that bucket, and `of` has the choice along each axis.
    """

    number: int
    of: tuple[int, ...]
    is_message: bool


@dataclass(frozen=True)
class Bucket:
    """A choice to eliminate, with the tables to add up for it.

    `inputs` has these tables, and `scope` the other choices, on which the message of the bucket depends.
    """

    choice: int
    scope: tuple[int, ...]
    inputs: tuple[Input, ...]


def eliminate(tables: Tables) -> tuple[Bucket, ...]:
    """Return the buckets in the order of elimination; the next bucket is always the one with the fewest combinations.

    Raises:
        PlanError: some bucket has too many combinations to enumerate.
    """
    names = tuple(choice.name for choice in tables.problem.choices)
    return _eliminated(tuple(map(len, tables.kept)), tuple(tables.of), names)


@lru_cache(maxsize=1 << 7)  # One mesh has many problems that differ only in their numbers.
def _eliminated(
    sizes: tuple[int, ...], terms: tuple[tuple[int, ...], ...], names: tuple[str, ...]
) -> tuple[Bucket, ...]:
    left = [Input(number, of, False) for number, of in enumerate(terms)]
    remaining = set(range(len(sizes)))
    buckets: list[Bucket] = []
    while remaining:
        scopes = {one: {one}.union(*(each.of for each in left if one in each.of)) for one in remaining}
        cost = {one: math.prod(sizes[other] for other in scopes[one]) for one in remaining}
        # Among equals the last choice is eliminated, so that earlier choices are made first when the answer is read
        # off.
        choice = min(remaining, key=lambda one: (cost[one], -one))
        if cost[choice] > LARGEST:
            lines = ", ".join(names[other] for other in sorted(scopes[choice]))
            raise PlanError(
                f"the lines {lines} depend on one another in {cost[choice]:.2g} combinations, more than the "
                f"{LARGEST:.2g} that can be searched.\n  Give some of them a spec, with fixed= (--fixed)."
            )
        scope = tuple(sorted(scopes[choice] - {choice}))
        taken = tuple(each for each in left if choice in each.of)
        left = [each for each in left if choice not in each.of]
        if scope:
            left.append(Input(len(buckets), scope, True))
        buckets.append(Bucket(choice, scope, taken))
        remaining.remove(choice)
    return tuple(buckets)


class Messages:
    """The messages of all buckets for one measure of cost: seconds + rate · bytes, or bytes alone.

    Args:
        tables: The terms, for the options that are allowed.
        buckets: The result of `eliminate` for these tables, or for tables with more options.
        rate: The seconds that one byte counts as. If None, only bytes count.
    """

    def __init__(self, tables: Tables, buckets: Sequence[Bucket], rate: float | None):
        self.buckets = buckets
        self.rate = rate
        self._sizes = [len(kept) for kept in tables.kept]
        # Axes of the tables of a bucket, and of its message: the scope, and last the choice itself.
        self._inputs: list[list[np.ndarray]] = []
        self.messages: list[np.ndarray] = []
        for bucket in buckets:
            axes = (*bucket.scope, bucket.choice)
            inputs = [np.zeros((1,) * len(bucket.scope) + (self._sizes[bucket.choice],))]
            for each in bucket.inputs:
                if each.is_message:
                    inputs.append(aligned(self.messages[each.number][..., 0], each.of, axes))
                else:
                    seconds, held, is_finite = tables.aligned(each.number, axes)
                    # Large tables that allow everything and hold nothing add nothing to the bytes.
                    if rate is not None or held is not None or not is_finite:
                        inputs.append(_measure(seconds, held, rate))
            self._inputs.append(inputs)
            self.messages.append(least(inputs, [True] * len(bucket.scope) + [False]))

    def total(self) -> float:
        """Return the smallest cost that any picks have, or `inf` if no picks are allowed."""
        return math.fsum(message.item() for message in self.messages if message.ndim == 1)

    def row(self, at: int, picks: Sequence[int]) -> np.ndarray:
        """Return the cost of each option of the choice of bucket `at`, given the picks of the bucket's scope.

        The cost includes the least cost of the choices that were eliminated earlier and whose messages are in the
        bucket.
        """
        where = tuple([picks[choice] for choice in self.buckets[at].scope])
        first, *rest = (t[tuple([i if size > 1 else 0 for i, size in zip(where, t.shape)])] for t in self._inputs[at])
        return sum(rest, first)

    def trace(self) -> list[int]:
        """Return the cheapest picks; among options that cost the same, the first one is picked.

        The picks are allowed only if `total` is finite.
        """
        picks = [0] * len(self.buckets)
        tie = TIE if self.rate is not None else 0.0  # Bytes are whole numbers, and one byte may be too many.
        for at in reversed(range(len(self.buckets))):
            row = self.row(at, picks)
            picks[self.buckets[at].choice] = int(np.argmax(row <= row.min() + tie * abs(row.min())))
        return picks

    def by_option(self) -> list[np.ndarray]:
        """Return, for each option of each choice, the least cost of all picks with this option.

        One backward pass over the buckets finds all of these costs.
        """
        result = [np.empty(0)] * len(self.buckets)
        outside: dict[int, np.ndarray] = {}  # For each bucket, over its scope, the least cost without its message.
        roots = [at for at, bucket in enumerate(self.buckets) if not bucket.scope]
        for at in roots:
            outside[at] = np.array([math.fsum(self.messages[other].item() for other in roots if other != at)])
        for at in reversed(range(len(self.buckets))):
            bucket = self.buckets[at]
            axes = (*bucket.scope, bucket.choice)
            joint: dict[tuple[int, ...], np.ndarray] = {}
            for over in [(bucket.choice,), *(each.of for each in bucket.inputs if each.is_message)]:
                if over not in joint:
                    joint[over] = least([outside[at], *self._inputs[at]], [choice in over for choice in axes])
            result[bucket.choice] = joint[(bucket.choice,)].ravel()
            for each in bucket.inputs:
                if each.is_message:
                    message = self.messages[each.number]
                    places = [axis for axis, choice in enumerate(axes) if choice not in each.of]
                    around = joint[each.of].squeeze(tuple(places))
                    left = [choice for choice in axes if choice in each.of]
                    around = around.transpose([left.index(choice) for choice in each.of])[..., None]
                    finite = np.isfinite(message)
                    outside[each.number] = np.where(finite, around - np.where(finite, message, 0.0), np.inf)
        return result


def _measure(seconds: np.ndarray, held: np.ndarray | None, rate: float | None) -> np.ndarray:
    if rate is None:
        return np.where(seconds == math.inf, math.inf, 0.0 if held is None else held)
    return seconds if held is None or rate == 0 else seconds + rate * held


def least(tables: Sequence[np.ndarray], keep: Sequence[bool]) -> np.ndarray:
    """Return the sum of broadcast tables, minimized over the axes that are not kept; these axes then have length 1.

    The first axis is cut into blocks, and so are the next axes if one row is still too large. Tables that have length 1
    along such an axis are added up outside the loop over its blocks.
    """
    shape = tuple(map(max, *(table.shape for table in tables))) if len(tables) > 1 else tables[0].shape
    if math.prod(shape) <= BLOCK or len(shape) == 1:
        gone = tuple([axis for axis, kept in enumerate(keep) if not kept])
        return np.minimum.reduce(_total(tables), axis=gone, keepdims=True)
    step = max(1, BLOCK // math.prod(shape[1:]))
    fixed = [table for table in tables if len(table) == 1]
    fixed = [_total(fixed)] if fixed else []
    result = np.full([size if kept else 1 for size, kept in zip(shape, keep)], np.inf)
    for start in range(0, shape[0], step):
        rows = slice(start, start + step)
        parts = [*fixed, *(table[rows] for table in tables if len(table) > 1)]
        # One row may still be too much: it is cut along the next axis.
        below = least([part[0] for part in parts], keep[1:]) if step == 1 else least(parts, keep)
        target = result[rows] if keep[0] else result
        np.minimum(target, below, out=target)
    return result


def _total(tables: Sequence[np.ndarray]) -> np.ndarray:
    first, *others = sorted(tables, key=attrgetter("size"))
    return sum(others, first)
