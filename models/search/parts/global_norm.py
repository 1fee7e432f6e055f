"""The global norm of the gradients: one number, summed over the mesh axes that shard any of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from gspmd.annotate import Spec
from gspmd.search import Choice, NothingFits, Problem, Search, Term

from ..costs import Costs
from .part import Part

NORM = "norm of gradients"
"""The choice of mesh axes, and its term. It has no line: the axes follow from where the optimizer's state lies."""
SCALAR = Spec((), ())
SHARE = 5e-4
"""Where the sum takes no more than this fraction of the cheapest step, it is priced over all mesh axes."""
MOST = 2
"""Mesh axes up to which there is a choice. All weights hang on it, so that a search goes through everything with each
set of axes: with the eight sets of three axes it took ten times as long, or was too large."""


def axes_to_sum(
    costs: Costs, choices: Mapping[str, Sequence[Any]], tables: Sequence[Term]
) -> tuple[tuple[str, ...], ...]:
    """The sets of mesh axes over which the norm may be summed: all of them, or that of all axes alone.

    Args:
        costs: of the mesh.
        choices, tables: of what a step takes besides.
    """
    every, seconds = costs.axes, costs.summed(SCALAR, costs.axes)
    # The least of each term is quick to add up, and no more than a step takes.
    if not 1 <= len(every) <= MOST or seconds <= SHARE * sum(float(term.seconds.min()) for term in tables):
        return (every,)
    try:
        cheapest = Search(Problem([Choice(name, tuple(of)) for name, of in choices.items()], tables)).best()
    except NothingFits:  # nor will it with the norm
        return (every,)
    if seconds <= SHARE * cheapest.seconds:
        return (every,)
    return tuple(axes for count in range(len(every) + 1) for axes in combinations(every, count))


def terms_of(costs: Costs, parts: Sequence[Part], options: Sequence[tuple[str, ...]]) -> Iterator[Term]:
    """Seconds of the sum, for each set of axes; and that it has every axis that shards some trained tensor."""
    if options:
        yield Term(NORM, (NORM,), np.array([costs.summed(SCALAR, axes) for axes in options]))
    for name, sharded in _sharded(parts).items() if len(options) > 1 else ():
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
