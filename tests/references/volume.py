"""The volume of the slow suite: `DRAWS=5 python -m pytest -m slow` draws five times as many random cases.

Below 1, long products of parameters are drawn from too: `DRAWS=0.3` runs three in ten cases of every slow test that has
at least `LONG`, and one in two of the tests that have fewer. Which ones depends on `DRAWS_SEED`. Left unset it is the
commit, so that one comes round to all of them.

In the fast suite the cases of a test that is marked `turns(count)` take turns: so many run, drawn by the same seed, and
the others are slow. They are instances of one property, each of which compiles a program of its own. A slow suite that
draws leaves them out, for the fast suite comes round to them.
"""

import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar


def commit(folder: Path = Path(__file__).parent) -> str:
    """The commit that is checked out there; "0" where there is none, or no git."""
    asked = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "0"


SCALE = float(os.environ.get("DRAWS", "1"))
if "DRAWS_SEED" not in os.environ:
    os.environ["DRAWS_SEED"] = commit()  # for pytest's workers, which all draw the same
SEED = os.environ["DRAWS_SEED"]
LONG = 10
SHORT = 0.5
"""The part of the slow tests with fewer cases that a run draws which draws from the others."""

Case = TypeVar("Case")


def scaled(count: int) -> int:
    """So many cases, as the environment scales them."""
    return max(1, round(SCALE * count))


def drawn(name: str, cases: Sequence[Case]) -> list[Case]:
    """The cases of a slow test that run, in their order."""
    if SCALE >= 1:
        return [*cases]
    if len(cases) < LONG:
        return [*cases] if random.Random(f"{SEED} {name}").random() < SHORT else []
    return sampled(name, cases, scaled(len(cases)))


def sampled(name: str, cases: Sequence[Case], count: int) -> list[Case]:
    """So many of the cases of a test by the seed, in their order; all of them where there are no more."""
    numbers = random.Random(f"{SEED} {name}").sample(range(len(cases)), min(count, len(cases)))
    return [cases[number] for number in sorted(numbers)]
