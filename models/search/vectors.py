"""Vectors beside the products, scales of norms and biases: what their gradients send, and what is held of them.

A vector lies as the last dimensions of the activation that it is added to, or multiplies: so a layout has it that does
not say otherwise, and the value sends nothing. Each device has the summands of the gradient that its own rows make;
they are added up for every layer, or once in a step where microbatches or pipelines side by side add to them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from gspmd.annotate import Spec
from gspmd.search import Term

from .costs import FLOAT32, Costs
from .weights import held, update


@dataclass(frozen=True)
class Vector:
    """A kind of vector, of all layers.

    Attributes:
        dims: its dimensions, the last of an activation's.
        choice: that which places the activation.
        tensor: which of the choice's tensors it is; empty where an option is one spec.
        stacked: layers that are stacked in a leading N; 0 where it stands alone.
        copies: how many such stacks there are.
    """

    dims: str
    choice: str
    tensor: str = ""
    stacked: int = 0
    copies: int = 1

    def spec(self, option: Any) -> Spec:
        """Where it lies beside an option of the choice."""
        activation = self._activation(option)
        return Spec(tuple(self.dims), tuple(activation.axes_of(dim) for dim in self.dims))

    def rows(self, option: Any) -> tuple[str, ...]:
        """The mesh axes over which its gradient is summed."""
        activation = self._activation(option)
        return tuple(axis for dim in activation.dims if dim not in self.dims for axis in activation.axes_of(dim))

    def stack(self, spec: Spec) -> Spec:
        """Where the whole stack lies."""
        return Spec(("N", *spec.dims), ((), *spec.axes)) if self.stacked else spec

    def _activation(self, option: Any) -> Spec:
        return getattr(option, self.tensor) if self.tensor else option


def settled_each(
    name: str, costs: Costs, vectors: Sequence[Vector], choices: Mapping[str, Sequence[Any]]
) -> Iterator[Term]:
    """Seconds of a microbatch to add up the gradients of each layer, a term for each choice."""

    def price(vector: Vector, option: Any) -> float:
        rows = _settled(costs, vector, option, once=False)
        return vector.copies * max(vector.stacked, 1) * costs.settled(vector.spec(option), rows)

    if costs.trains:
        yield from _priced(f"{name}.vectors", vectors, choices, price)


def settled_once(
    name: str, costs: Costs, vectors: Sequence[Vector], choices: Mapping[str, Sequence[Any]]
) -> Iterator[Term]:
    """Seconds of a step to add up the gradients of whole stacks, where microbatches add to them first."""

    def price(vector: Vector, option: Any) -> float:
        rows = _settled(costs, vector, option, once=True)
        return vector.copies * costs.settled(vector.stack(vector.spec(option)), rows)

    if costs.trains and (costs.microbatches > 1 or costs.side is not None):
        yield from _priced(f"gradients of {name}.vectors", vectors, choices, price)


def stored(name: str, costs: Costs, vectors: Sequence[Vector], choices: Mapping[str, Sequence[Any]]) -> Iterator[Term]:
    """Bytes of the vectors, which are float32 whatever is computed in, and the seconds of their update."""
    for choice, beside in _by_choice(vectors).items():
        seconds, size = np.zeros(len(choices[choice])), np.zeros(len(choices[choice]))
        for each in beside:
            count = each.copies * max(each.stacked, 1) * prod(costs.sizes[dim] for dim in each.dims)
            shares = np.array([costs.shards(each.spec(option)) for option in choices[choice]])
            seconds += update(costs, count, shares) if costs.trains else 0.0
            size += held(costs, count, shares, shares, copy=0) if costs.trains else FLOAT32 * (count / shares)
        yield Term(f"stored: {name}.vectors {choice}", (choice,), seconds, bytes=size)


def _by_choice(vectors: Sequence[Vector]) -> dict[str, list[Vector]]:
    names = dict.fromkeys(vector.choice for vector in vectors)
    return {name: [vector for vector in vectors if vector.choice == name] for name in names}


def _priced(
    name: str,
    vectors: Sequence[Vector],
    choices: Mapping[str, Sequence[Any]],
    price: Callable[[Vector, Any], float],
) -> Iterator[Term]:
    for choice, beside in _by_choice(vectors).items():
        seconds = [sum(price(vector, option) for vector in beside) for option in choices[choice]]
        yield Term(f"{name}: {choice}", (choice,), np.array(seconds, float))


def _settled(costs: Costs, vector: Vector, option: Any, once: bool) -> tuple[str, ...]:
    """The mesh axes over which a gradient is settled once in a step, or in every microbatch.

    Of several microbatches all are settled once; in stages, those along which pipelines run side by side.
    """
    rows = vector.rows(option)
    if costs.side is not None:
        return tuple(axis for axis in rows if (axis in costs.side) == once)
    return rows if (costs.microbatches > 1) == once else ()
