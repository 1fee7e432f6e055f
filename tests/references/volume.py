"""How much of the slow suite runs: `DRAWS=5 python -m pytest -m slow` draws five times as many random cases.

Below 1, long products of parameters are drawn from too: `DRAWS=0.5` runs half the cases of every slow test that has at
least `LONG`. Which ones depends on `DRAWS_SEED`, so that .ci/run, which gives the commit, comes round to all of them.
"""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

SCALE = float(os.environ.get("DRAWS", "1"))
SEED = os.environ.get("DRAWS_SEED", "0")
LONG = 10

Case = TypeVar("Case")


def scaled(count: int) -> int:
    """So many cases, as the environment scales them."""
    return max(1, round(SCALE * count))


def drawn(name: str, cases: Sequence[Case]) -> list[Case]:
    """The cases of a slow test that run, in their order."""
    if SCALE >= 1 or len(cases) < LONG:
        return [*cases]
    numbers = random.Random(f"{SEED} {name}").sample(range(len(cases)), scaled(len(cases)))
    return [cases[number] for number in sorted(numbers)]
