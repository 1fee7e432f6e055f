"""Dead experts: those that get no token for a whole interval."""

from typing import Any

import numpy as np


class DeadExperts:
    """Watch which experts get tokens, interval by interval.

    Args:
        interval: steps of an interval.
    """

    def __init__(self, interval: int):
        self._interval, self._steps = interval, 0
        self._alive: np.ndarray | None = None
        self._dead: dict[int, tuple[int, ...]] = {}

    def add(self, step: int, load: Any) -> list[str]:
        """Take the loads of a step. Return, at the end of an interval, a sentence for each layer that has changed.

        Args:
            step: the step's number.
            load: [layers, X], the share of choices sent to each expert; None for a model without experts.

        Example:
            >>> watch = DeadExperts(2)
            >>> watch.add(1, [[0.5, 0.5, 0.0]]), watch.add(2, [[1.0, 0.0, 0.0]])
            ([], ['expert layer 1: expert 2 has had no token in steps 1 to 2'])
            >>> watch.add(3, [[0.0, 0.0, 1.0]]), watch.add(4, [[0.0, 1.0, 0.0]])
            ([], ['expert layer 1: expert 0 has had no token in steps 3 to 4'])
            >>> watch.add(5, [[0.5, 0.0, 0.5]]), watch.add(6, [[0.0, 1.0, 0.0]])
            ([], ['expert layer 1: every expert has had tokens again in steps 5 to 6'])
        """
        if np.ndim(load) != 2:
            return []
        alive = np.asarray(load) > 0
        self._alive = alive if self._alive is None else self._alive | alive
        self._steps += 1
        if self._steps < self._interval:
            return []
        dead = {layer: tuple(np.flatnonzero(~row).tolist()) for layer, row in enumerate(self._alive, 1)}
        changed = [layer for layer in dead if dead[layer] != self._dead.get(layer, ())]
        span = f"in steps {step - self._steps + 1} to {step}"
        self._alive, self._steps, self._dead = None, 0, dead
        return [f"expert layer {layer}: {_named(dead[layer])} {span}" for layer in changed]


def _named(dead: tuple[int, ...]) -> str:
    if not dead:
        return "every expert has had tokens again"
    names = ", ".join(map(str, dead))
    return f"experts {names} have had no token" if len(dead) > 1 else f"expert {names} has had no token"
