"""The volume of the test suite: how many cases of long products run, which ones, and for how long.

The fast suite runs the same cases at every commit. A test that is marked `turns(count)` has so many fast cases, drawn
once and for all by the name of its file, and the others are slow. Its cases are instances of one property, and each
compiles another program.

The slow suite runs all cases, unless the environment says otherwise:

- `DRAWS=5` draws five times as many random cases. Below 1, it draws from long products, too: `DRAWS=0.3` runs three in
  ten cases of every slow test that has at least `LONG`, and two in five of the tests that have fewer.
- `DRAWS_SEED` chooses which cases these are, and what the random ones contain. `.ci/run` gives the commit, so that in
  time all of them run.
- `MINUTES=10` runs tests in an order drawn by the seed, and skips those that have not begun after so many minutes. A
  test that takes minutes itself is marked `takes(minutes)`, and begins only if as many are left.
"""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

SCALE = float(os.environ.get("DRAWS", "1"))
SEED = os.environ.get("DRAWS_SEED", "0")
MINUTES = float(os.environ.get("MINUTES", "inf"))
LONG = 10
SHORT = 0.4
"""The fraction of slow tests with fewer cases than `LONG` that a run with DRAWS < 1 draws."""

Case = TypeVar("Case")


def scaled(count: int) -> int:
    """Return a number of cases, as the environment scales it."""
    return max(1, round(SCALE * count))


def drawn(name: str, cases: Sequence[Case]) -> list[Case]:
    """Return the cases of a slow test that run, in their order."""
    if SCALE >= 1:
        return [*cases]
    draw = random.Random(f"{SEED} {name}")
    if len(cases) < LONG:
        return [*cases] if draw.random() < SHORT else []
    return sampled(draw, cases, scaled(len(cases)))


def sampled(draw: random.Random, cases: Sequence[Case], count: int) -> list[Case]:
    """Return `count` of the cases of a test, in their order; all of them if there are no more."""
    numbers = draw.sample(range(len(cases)), min(count, len(cases)))
    return [cases[number] for number in sorted(numbers)]
