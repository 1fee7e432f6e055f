"""The dense feed-forward layers of a training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

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

    name = "ffn"

    def __init__(self, costs: Costs, residual: Sequence[Spec], layers: int):
        super().__init__(costs)
        stack = costs.config.layers // costs.config.period
        self.layers, self.gates = layers, 1 + costs.config.gated
        if costs.config.ffn_bias:
            into = Vector("F", "ffn.hidden", "", stack, self.gates * layers // stack)
            self.vectors = (into, Vector("E", "residual", "", stack, layers // stack))
        keys = ("ffn.w_in", "ffn.w_gate")[: self.gates]
        self.weights = [
            Weight("ffn.w_in", "EF", "", stack, self.gates * layers // stack, keys),
            Weight("ffn.w_out", "FE", "", stack, layers // stack),
        ]
        self.choices = {"residual": tuple(residual), "ffn.hidden": costs.place("BLF")}
        self.choices |= {weight.key: weight.places(costs) for weight in self.weights}
        w_in, w_out = (weight.operand(costs, self.choices[weight.key]) for weight in self.weights)
        stream, hidden = (operand(dims, costs.dtype, self.choices[name])
                          for dims, name in (("BLE", "residual"), ("BLF", "ffn.hidden")))  # fmt: skip
        again, backward = costs.remat in ("full", "dots-except-hidden"), int(costs.trains)
        # What the blocks of a period end with is computed again for the next; what the period ends with is not.
        ends = 1 if layers == costs.config.layers else costs.times
        into = Product(
            costs.environment, stream, [Member(w_in, hidden, self.gates)], Passes(costs.times, 1 + again, backward)
        )
        out = Product(costs.environment, hidden, [Member(w_out, stream)], Passes(costs.times, ends, backward))
        self.products = {
            "ffn.in_via": (into, ("residual", "ffn.w_in", "ffn.hidden"), layers),
            "ffn.out_via": (out, ("ffn.hidden", "ffn.w_out", "residual"), layers),
        }

    def terms(self) -> Iterator[Term]:
        """The activation function."""
        yield from super().terms()
        yield self.over("activation", "ffn.hidden", partial(activation, self.costs, self.layers, self.gates))
        yield from self.kept("ffn.hidden", partial(kept_of, self.costs, self.layers, self.gates))

    def once(self) -> Iterator[Term]:
        """What the weights hold, and their update."""
        yield from super().once()
        for weight in self.weights:
            yield weight.stored(self.costs, self.choices[weight.key])

    def lines(self, chosen: Mapping[str, Any]) -> Iterator[Line]:
        """Hidden layer and weights; residual and norm are the block's."""
        yield Line("ffn.hidden", str(chosen["ffn.hidden"]), "ffn.hidden")
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
