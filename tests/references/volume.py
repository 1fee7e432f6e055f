"""How many random cases the slow suite draws: `DRAWS=5 python -m pytest -m slow ...` draws five times as many."""

import os

SCALE = float(os.environ.get("DRAWS", "1"))


def scaled(count: int) -> int:
    """So many cases, as the environment scales them."""
    return max(1, round(SCALE * count))
