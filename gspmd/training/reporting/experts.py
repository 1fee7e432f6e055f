"""Idle experts, which get no token, or few tokens, during a whole interval of steps."""

from typing import Any

import numpy as np

from gspmd.annotate.errors import listed

FEW = 0.25
"""The fraction of an even load below which an expert counts as idle.

Such an expert has few tokens, learns little, and leaves its slots empty.
"""


class IdleExperts:
    """A check, once per interval of steps, for experts that get few tokens.

    Args:
        interval: number of steps in an interval.
    """

    def __init__(self, interval: int):
        self._interval, self._steps = interval, 0
        self._sum: np.ndarray | float = 0.0
        self._known: dict[int, dict[int, float]] = {}

    def add(self, step: int, load: Any) -> list[str]:
        """Add the loads of a step; after an interval, return a sentence for each layer whose idle experts changed.

        Args:
            step: the number of the step.
            load: [layers, X], the fraction of a layer's choices that each expert gets; None for a model without
                experts.

        Example:
            >>> watch = IdleExperts(2)
            >>> watch.add(1, [[0.5, 0.5, 0.0]]), watch.add(2, [[1.0, 0.0, 0.0]])
            ([], ['expert layer 1: expert 2 has had no token in steps 1 to 2'])
            >>> watch.add(3, [[0.1, 0.4, 0.5]]), watch.add(4, [[0.0, 0.5, 0.5]])
            ([], ['expert layer 1: expert 0 has had 15% of an even share in steps 3 to 4'])
            >>> watch.add(5, [[0.5, 0.0, 0.5]]), watch.add(6, [[0.0, 1.0, 0.0]])
            ([], ['expert layer 1: no expert has had less than 25% of an even share in steps 5 to 6'])
        """
        if np.ndim(load) != 2:
            return []
        self._sum, self._steps = self._sum + np.asarray(load, np.float64), self._steps + 1
        if self._steps < self._interval:
            return []
        shares = self._sum / self._steps * np.shape(load)[1]
        idle = {layer: _idle(row) for layer, row in enumerate(shares, 1)}
        # Only a change in which experts are idle is reported, not a change of a share from 15% to 14%.
        changed = [layer for layer in idle if {*idle[layer]} != {*self._known.get(layer, ())}]
        span = f"in steps {step - self._steps + 1} to {step}"
        self._sum, self._steps, self._known = 0.0, 0, idle
        return [f"expert layer {layer}: {_said(idle[layer])} {span}" for layer in changed]


def _idle(shares: np.ndarray) -> dict[int, float]:
    """Return the experts that get few tokens, each with its load relative to a balanced load."""
    return {expert: share for expert, share in enumerate(shares.tolist()) if share < FEW}


def _said(idle: dict[int, float]) -> str:
    if not idle:
        return f"no expert has had less than {FEW:.0%} of an even share"
    none = [str(expert) for expert, share in idle.items() if not share]
    said = [f"expert {expert} has had {share:.0%} of an even share" for expert, share in idle.items() if share]
    if none:
        said.insert(
            0, f"expert{'s' * (len(none) > 1)} {listed(none)} {'have' if len(none) > 1 else 'has'} had no token"
        )
    return listed(said)
