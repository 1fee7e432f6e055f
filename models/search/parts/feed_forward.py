"""The dense feed-forward layers of a training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from gspmd.annotate import Spec
from gspmd.search import Term
from gspmd.search.products import Member, Passes, Product

from ..costs import Costs, Line
from ..vectors import Vector
from ..weights import Weight, operand
from .part import Part


class FeedForward(Part):
    """The feed-forward layers that have no experts.

    Args:
        costs: of the mesh.
        residual: where the residual stream may lie.
        layers: how many there are.
    """

    name: ClassVar[str] = "ffn"
    keys: ClassVar[tuple[str, str]] = ("ffn.", "ffn.w_")
    """What the layout's keys of activations and vias begin with, and those of weights."""

    def __init__(self, costs: Costs, residual: Sequence[Spec], layers: int):
        # Places are those that the model's sizes divide, by which layouts are checked; what they cost is by its own.
        super().__init__(replace(costs, sizes=self._sizes(costs)))
        stack, environment = costs.config.layers // costs.config.period, self.costs.environment
        self.layers, self.gates = layers, 1 + costs.config.gated
        activations, of = self.keys
        self.hidden = f"{activations}hidden"
        w_in, w_out = f"{of}in", f"{of}out"
        self.vectors = tuple(self._vectors(stack))
        self.weights = [
            Weight(w_in, "EF", "", stack, self.gates * layers // stack, (w_in, f"{of}gate")[: self.gates]),
            Weight(w_out, "FE", "", stack, layers // stack),
        ]
        self.choices = {"residual": tuple(residual), self.hidden: costs.place("BLF")}
        self.choices |= {weight.key: weight.places(costs) for weight in self.weights}
        into, out = (weight.operand(costs, self.choices[weight.key]) for weight in self.weights)
        stream, hidden = (operand(dims, costs.dtype, self.choices[name])
                          for dims, name in (("BLE", "residual"), ("BLF", self.hidden)))  # fmt: skip
        again, backward = costs.remat in ("full", "dots-except-hidden"), int(costs.trains)
        first = Product(
            environment, stream, [Member(into, hidden, self.gates)], Passes(costs.times, 1 + again, backward)
        )
        second = Product(environment, hidden, [Member(out, stream)], Passes(costs.times, self._ends(), backward))
        self.products = {
            f"{activations}in_via": (first, ("residual", w_in, self.hidden), layers),
            f"{activations}out_via": (second, (self.hidden, w_out, "residual"), layers),
        }

    def _sizes(self, costs: Costs) -> Mapping[str, int]:
        """Of every dimension."""
        return costs.sizes

    def _vectors(self, stack: int) -> Iterator[Vector]:
        if self.costs.config.ffn_bias:
            yield Vector("F", self.hidden, "", stack, self.gates * self.layers // stack)
            yield Vector("E", "residual", "", stack, self.layers // stack)

    def _ends(self) -> int:
        """How often the output is made: the next blocks of a period need it again, what the period ends with nobody."""
        return 1 if self.layers == self.costs.config.layers else self.costs.times

    def terms(self) -> Iterator[Term]:
        """The activation function."""
        yield from super().terms()
        yield self.over("activation", self.hidden, partial(activation, self.costs, self.layers, self.gates))
        yield from self.kept(self.hidden, partial(kept_of, self.costs, self.layers, self.gates))

    def once(self) -> Iterator[Term]:
        """What the weights hold, and their update."""
        yield from super().once()
        for weight in self.weights:
            yield weight.stored(self.costs, self.choices[weight.key])

    def lines(self, chosen: Mapping[str, Any]) -> Iterator[Line]:
        """Hidden layer and weights; residual and norm are the block's."""
        yield Line(self.hidden, str(chosen[self.hidden]), self.hidden)
        for weight in self.weights:
            yield from weight.lines(self.costs, chosen[weight.key])


def activation(costs: Costs, layers: int, gates: int, hidden: Spec) -> tuple[float, float]:
    """Seconds of an activation function's passes over the hidden layer, and bytes of what is held of it."""
    elements = costs.local(hidden)
    passes = (1 + gates) * costs.times + costs.trains * (1 + 2 * gates)
    held = kept_of(costs, layers, gates, hidden) + (gates + costs.trains) * elements
    return layers * costs.in_memory(passes, elements, costs.width), held * costs.width


def kept_of(costs: Costs, layers: int, gates: int, hidden: Spec) -> int:
    """Elements of the hidden layer that blocks keep: what is multiplied in, and what the activation function makes."""
    made = {"dots": 0, "selective": 1, "none": 3}.get(costs.remat) if costs.trains else None
    return 0 if made is None else layers * (gates + made) * costs.local(hidden)
