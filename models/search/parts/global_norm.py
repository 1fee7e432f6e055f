"""The global norm of the gradients: one number, summed over the mesh axes that shard any of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from gspmd.annotate import Spec
from gspmd.search import Term

from ..costs import Costs
from .part import Part

NORM = "norm of gradients"
"""The choice of mesh axes, and its term. It has no line: the axes follow from where the optimizer's state lies."""
SHARE = 1e-3
"""Below this fraction of what a step takes at least, the sum counts as one over all mesh axes: to search a choice on
which all weights hang takes two or three times as long."""


def axes_to_sum(costs: Costs, terms: Iterable[Term]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes over which the norm may be summed: any of them, or only all, where no step costs that little.

    Args:
        costs: of the mesh.
        terms: what a step takes besides.
    """
    every = costs.axes
    if costs.summed(Spec((), ()), every) <= SHARE * sum(float(term.seconds.min()) for term in terms):
        return (every,)
    return tuple(axes for count in range(len(every) + 1) for axes in combinations(every, count))


def terms_of(costs: Costs, parts: Sequence[Part], options: Sequence[tuple[str, ...]]) -> Iterator[Term]:
    """Seconds of the sum, an option for each set of axes; and that they are all which shard some trained tensor."""
    yield Term(NORM, (NORM,), np.array([costs.summed(Spec((), ()), axes) for axes in options]))
    if len(options) > 1:
        for name, sharded in _sharded(parts).items():
            within = [[used <= {*axes} for axes in options] for used in sharded]
            yield Term(f"{NORM}: {name}", (name, NORM), np.where(within, 0.0, np.inf))


def _sharded(parts: Sequence[Part]) -> dict[str, list[set[str]]]:
    """Every choice that places trained tensors, with the axes that shard them under each option."""
    found: dict[str, list[set[str]]] = {}

    def add(choice: str, options: Sequence[Any]) -> None:
        before = found.get(choice) or [set()] * len(options)
        found[choice] = [axes | {*spec.used} for axes, spec in zip(before, options)]

    for part in parts:
        for weight in part.weights:
            add(weight.key, [placed.optimizer for placed in part.choices[weight.key]])
        for vector in part.vectors:
            add(vector.choice, [vector.spec(option) for option in part.choices[vector.choice]])
    return found
