"""The expert layers of a training step: groups of tokens, their slots, and the experts that take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gspmd.annotate import Spec
from gspmd.annotate.errors import PlanError
from gspmd.ops._plan import plan
from gspmd.search import Term
from gspmd.search.products import Member, Operand, Passes, Product

from ..costs import FLOAT32, Costs, Line
from ..weights import Weight, operand
from .feed_forward import activation, kept_of
from .part import Part

FIGURES = 6
"""Statistics of a group besides the choices of each expert."""


class Experts(Part):
    """The expert layers.

    Args:
        costs: of the mesh; its sizes have G groups of C slots for each expert.
        residual: where the residual stream may lie.
        layers: how many there are.
    """

    def __init__(self, costs: Costs, residual: Sequence[Spec], layers: int):
        super().__init__(costs)
        stack = costs.config.layers // costs.config.period
        self.layers, self.gates = layers, 1 + costs.config.gated
        self.tokens = costs.sizes["B"] * costs.sizes["L"] // costs.sizes["G"]
        keys = ("moe.w_in", "moe.w_gate")[: self.gates]
        count = layers // stack
        self.weights = [
            Weight("moe.w_in", "XEF", "", stack, self.gates * count, keys),
            Weight("moe.w_out", "XFE", "", stack, count),
            Weight("moe.router", "EX", "", stack, (1 + costs.config.moe.noisy) * count, wide=True),
        ]
        groups = tuple(costs.place("GLE", "LE"))
        sequences = {each for spec in groups if not (each := as_sequences(spec)).faults(costs.sizes, costs.mesh)}
        self.choices = {
            "residual": tuple(residual),
            "moe.groups": tuple(spec for spec in groups if as_sequences(spec) in sequences),
            "moe.expert_input": costs.place("GXCE", "C"),
            "moe.hidden": costs.place("GXCF", "C"),
        }
        self.choices |= {weight.key: weight.places(costs) for weight in self.weights}
        # Small, and a plan of its own in every place: whole, or over all mesh axes in their order.
        kept = {Spec(tuple("EX"), axes) for axes in (((), ()), (costs.axes, ()), ((), costs.axes))}
        self.choices["moe.router"] = tuple(each for each in self.choices["moe.router"] if each.spec in kept)
        w_in, w_out = (weight.operand(costs, self.choices[weight.key]) for weight in self.weights[:2])
        slots, hidden = (operand(dims, costs.dtype, self.choices[name])
                         for dims, name in (("GXCE", "moe.expert_input"), ("GXCF", "moe.hidden")))  # fmt: skip
        again = {"full": (2, 2), "dots-except-hidden": (2, 1)}.get(costs.remat, (1, 1))
        into = self._product(slots, Member(w_in, hidden, self.gates, "C"), again[0])
        out = self._product(hidden, Member(w_out, slots, 1, "C"), again[1])
        self.products = {
            "moe.in_via": (into, ("moe.expert_input", "moe.w_in", "moe.hidden"), layers),
            "moe.out_via": (out, ("moe.hidden", "moe.w_out", "moe.expert_input"), layers),
        }

    def _product(self, left: Operand, member: Member, results: int) -> Product:
        """A product of slots, whose results are made so often."""
        costs = self.costs
        return Product(costs.environment, left, [member], Passes(costs.times, results, int(costs.trains)))

    def terms(self) -> Iterator[Term]:
        """Tokens to groups and back, the router, slots to experts and back."""
        yield from super().terms()
        yield self._regrouped()
        yield self._routed()
        yield self.over("statistics", "moe.groups", self._statistics)
        yield from self._through()

    def _through(self) -> Iterator[Term]:
        """From groups to experts and back, but for the products."""
        yield self._exchanged()
        yield self.over("dispatch", "moe.groups", self._dispatch)
        yield self.over("activation", "moe.hidden", partial(activation, self.costs, self.layers, self.gates))
        yield from self.kept("moe.hidden", partial(kept_of, self.costs, self.layers, self.gates))

    def once(self) -> Iterator[Term]:
        """What the weights hold, and their update."""
        yield from super().once()
        for weight in self.weights:
            yield weight.stored(self.costs, self.choices[weight.key])

    def _regrouped(self) -> Term:
        """[residual, groups] seconds of tokens that come as the residual and are routed as sequences, and back."""
        costs, residual = self.costs, self.choices["residual"]
        sequences = [as_sequences(spec) for spec in self.choices["moe.groups"]]
        there = costs.between("BLE", costs.dtype, residual, sequences)
        back = costs.between("BLE", costs.dtype, sequences, residual).T
        # What is added to the residual is not computed again, and of the normed input the logits need it once more.
        total = (costs.times + costs.trains) * there + (1 + costs.trains) * back
        return Term("tokens to groups", ("residual", "moe.groups"), self.layers * total)

    def _exchanged(self) -> Term:
        """[groups, experts' slots] seconds of the all-to-alls."""
        costs = self.costs
        leave, arrive = [*map(dispatched, self.choices["moe.groups"])], self.choices["moe.expert_input"]
        there = costs.between("GXCE", costs.dtype, leave, arrive)
        back = costs.between("GXCE", costs.dtype, arrive, leave).T
        sent = 1 if costs.remat in ("selective", "none") else 2
        answered = 2 if costs.remat == "full" else 1
        total = (sent + costs.trains) * there + (answered + costs.trains) * back
        return Term("slots to experts", ("moe.groups", "moe.expert_input"), self.layers * total)

    def _routed(self) -> Term:
        """[groups, router] seconds of the logits, which no via pins: each is a plan of its own."""
        groups, options = self.choices["moe.groups"], self.choices["moe.router"]
        known = {(spec, each.gradient): 0.0 for spec in groups for each in options}
        for spec, gradient in known:
            known[spec, gradient] = self._logits(spec, gradient)
        table = np.array([[known[spec, each.gradient] for each in options] for spec in groups])
        return Term("router", ("moe.groups", "moe.router"), self.layers * table)

    def _logits(self, groups: Spec, gradient: Spec) -> float:
        costs, logits = self.costs, Spec(tuple("GLX"), (groups.axes_of("G"), (), ()))
        equation = f"{groups}, {gradient.cotangent} -> {logits}"
        sizes = {dim: costs.sizes[dim] for dim in "GEX"} | {"L": self.tokens}
        try:
            planned = plan(equation, sizes, costs.mesh, "float32", costs.chip, lowering="blocking")
            backward = sum(each.seconds for each in planned.gradients) if costs.trains else 0.0
        except PlanError:  # a partial sum that these groups do not make
            return np.inf
        brought = sum(step.seconds for each in planned.routine.moves for step in each.steps)
        made = planned.seconds - brought
        return costs.times * brought + (2 if costs.remat == "full" else 1) * made + backward

    def _statistics(self, groups: Spec) -> tuple[float, float]:
        """One all-reduce of the loss and the experts' load."""
        sizes = {"S": FIGURES + self.costs.sizes["X"]}
        summed = Spec(("S",), ((),))
        axes = groups.axes_of("G")
        seconds = self.costs.moved(summed.with_partial(axes), summed, FLOAT32, sizes=sizes) if axes else 0.0
        return self.layers * seconds, 0.0

    def _dispatch(self, groups: Spec) -> tuple[float, float]:
        """Passes over the slots of a device's groups: filled, emptied, and the same backward."""
        costs = self.costs
        slots = costs.local(dispatched(groups))
        held = 4 * slots * costs.width
        return self.layers * costs.in_memory(4 * (costs.times + costs.trains), slots, costs.width), held

    def lines(self, chosen: Mapping[str, Any]) -> Iterator[Line]:
        """Groups, slots, hidden layer and weights."""
        groups = chosen["moe.groups"]
        yield Line("moe.groups", str(groups), "moe.groups")
        yield Line("moe.dispatched", str(dispatched(groups)), "moe.groups")
        for name in ("moe.expert_input", "moe.hidden"):
            yield Line(name, str(chosen[name]), name)
        for weight in self.weights:
            yield from weight.lines(self.costs, chosen[weight.key])


def as_sequences(groups: Spec) -> Spec:
    """Where sequences lie that are routed as these groups."""
    return groups.rename({"G": "B"})


def dispatched(groups: Spec) -> Spec:
    """Where the slots or rows of these groups lie before they travel."""
    return Spec(tuple("GXCE"), (groups.axes_of("G"), (), (), ()))
