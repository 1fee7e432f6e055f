"""What stands around the blocks of a training step: residual and norms, embedding, logits, loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gspmd.annotate import Spec
from gspmd.ops._plan import plan
from gspmd.search import Term
from gspmd.search.products import Member, Operand, Passes, Product, least_apart

from ..costs import FLOAT32, Costs, Line
from ..vectors import Vector
from ..weights import Placed, Weight, operand
from .part import Part

KEPT = {"full": 1, "dots": 2, "dots-except-hidden": 2, "selective": 6, "none": 8}
"""How many arrays of the residual's size a block keeps."""
KEPT_PARALLEL = {**KEPT, "dots": 1, "dots-except-hidden": 1, "selective": 4, "none": 6}
"""Those of a parallel block, which has one norm, and no residual between attention and feed-forward layer."""
PASSING = 4
"""How many there are besides while a block runs."""


class Stream(Part):
    """The residual stream: norms, additions, and what blocks keep of it."""

    name = "norms"

    def __init__(self, costs: Costs, residual: Sequence[Spec]):
        super().__init__(costs)
        config = costs.config
        self.choices = {"residual": tuple(residual)}
        self.norms, self.arrays = (1, KEPT_PARALLEL) if config.block == "parallel" else (2, KEPT)
        rows, stack = 1 + config.norm_bias, config.layers // config.period
        self.vectors = (
            Vector("E", "residual", "", stack, rows * self.norms * config.period),
            Vector("E", "residual", "", 0, rows),
        )

    def terms(self) -> Iterator[Term]:
        """Seconds and bytes of the stream."""
        yield from super().terms()
        yield self.over("norms", "residual", self._norms)
        yield from self.kept("residual", self._held)

    def _norms(self, residual: Spec) -> tuple[float, float]:
        """Norms and additions of each layer, two or one of a parallel block; the last norm; what blocks keep."""
        costs, layers, rows = self.costs, self.costs.config.layers, residual.without("E")
        statistic = costs.settled(rows, residual.axes_of("E"))
        forward = 1 if costs.remat == "selective" else costs.times  # which keeps what is normed
        of_gradient = statistic
        if costs.config.norm == "layer":  # a mean, then a variance; of the gradient two means together
            over = residual.axes_of("E")
            of_gradient = costs.moved(rows.with_partial(over), rows, 2 * FLOAT32) if over else 0.0
            statistic = 2 * statistic
        each, last = (runs * statistic + costs.trains * of_gradient for runs in (forward, 1))
        elements = costs.local(residual)
        passes = costs.in_memory(self.norms * (2 + 3) * (costs.times + costs.trains), elements, costs.width)
        held = (self._held(residual) + PASSING * elements) * costs.width
        return layers * (self.norms * each + passes) + last, held

    def _held(self, residual: Spec) -> int:
        """Elements that blocks keep."""
        costs = self.costs
        return costs.config.layers * self.arrays[costs.remat] * costs.local(residual) if costs.trains else 0

    def lines(self, chosen: Mapping[str, Any]) -> Iterator[Line]:
        """Tokens, residuals and the scales of norms."""
        residual = chosen["residual"]
        scale = str(Spec(("E",), (residual.axes_of("E"),)))
        yield Line("embedding.tokens", str(residual.without("E")), "residual")
        for part in ("attention", "ffn"):
            yield Line(f"{part}.residual", str(residual), "residual")
            yield Line(f"{part}.norm", scale, "residual")
        yield Line("output.norm", scale, "residual")


class Tables(Part):
    """The tables of embedding and output, which are one where they are tied, and the product that makes logits.

    Args:
        costs: of the mesh.
        last: of what the logits are made for: all tokens, or the last one of each row.
        residual: where the residual stream may lie.
        whole: dimensions of the logits that are not sharded.
    """

    name = "output"

    def __init__(self, costs: Costs, last: Costs, residual: Sequence[Spec], whole: str = ""):
        super().__init__(costs)
        tied = costs.config.tied
        self.vectors = (Vector("V", "output.logits"),) * costs.config.output_bias
        output = Weight("embedding.table" if tied else "output.table", "VE")
        self.weights = [output] if tied else [Weight("embedding.table", "VE"), output]
        self.choices = {"residual": tuple(residual), "output.logits": last.place("BLV", whole)}
        self.choices |= {weight.key: weight.places(costs) for weight in self.weights}
        logits = operand("BLV", "float32", self.choices["output.logits"])
        table = output.operand(costs, self.choices[output.key])
        stream, passes = operand("BLE", costs.dtype, residual), Passes(1, 1, int(costs.trains))
        product = Product(last.environment, stream, [Member(table, logits)], passes)
        self.products = {"output.in_via": (product, ("residual", output.key, "output.logits"), 1)}

    def terms(self) -> Iterator[Term]:
        """The lookup."""
        yield from super().terms()
        yield Term("embedding", ("residual", "embedding.table"), self._lookup[0])

    @cached_property
    def _lookup(self) -> tuple[np.ndarray, np.ndarray]:
        return lookup(self.costs, self.choices["residual"], self.choices["embedding.table"])

    def once(self) -> Iterator[Term]:
        """What the tables hold, and their update."""
        yield from super().once()
        if self.costs.invariant(0):
            yield Term("embedding, once", ("residual", "embedding.table"), self._lookup[1])
        for weight in self.weights:
            yield weight.stored(self.costs, self.choices[weight.key])

    def lines(self, chosen: Mapping[str, Any]) -> Iterator[Line]:
        """Tables and logits."""
        for weight in self.weights:
            yield from weight.lines(self.costs, chosen[weight.key])
        yield Line("output.logits", str(chosen["output.logits"]), "output.logits")


class Ends(Tables):
    """Embedding, logits and loss of a training step."""

    def __init__(self, costs: Costs, residual: Sequence[Spec]):
        super().__init__(costs, costs, residual)

    def terms(self) -> Iterator[Term]:
        """The lookup, the loss, and the labels."""
        yield from super().terms()
        yield self.over("loss", "output.logits", self._loss)
        yield self._labels()

    def _loss(self, logits: Spec) -> tuple[float, float]:
        """Three statistics over the vocabulary, and the mean."""
        costs, rows, over = self.costs, logits.without("V"), logits.axes_of("V")
        seconds = costs.settled(rows, over, "max") + 2 * costs.settled(rows, over)
        # Of few rows the mean is that of all of them, gathered, rather than a sum of each device's.
        sizes = {dim: costs.sizes[dim] for dim in rows.dims}
        seconds += plan(f"{rows} ->", sizes, costs.mesh, "float32", costs.chip, lowering="blocking").seconds
        elements = costs.local(logits)
        return seconds + costs.in_memory(6, elements, FLOAT32), 2 * elements * FLOAT32

    def _labels(self) -> Term:
        """[residual, logits] seconds to bring labels to where the logits lie."""
        # a batch [B, L + 1] is whole along its length
        come = [each.without("E").with_axes("L", ()) for each in self.choices["residual"]]
        go = [each.without("V") for each in self.choices["output.logits"]]
        return Term("labels", ("residual", "output.logits"), self.costs.between("BL", "int32", come, go))


def lookup(costs: Costs, residuals: Sequence[Spec], tables: Sequence[Placed]) -> tuple[np.ndarray, np.ndarray]:
    """[residual, table] seconds to look tokens up, which lie as the residual, and of the table's gradient.

    Behind them the seconds of what a loop over microbatches takes once: the first steps of the table's move.
    """
    ids = operand("BL", "int32", [each.without("E") for each in residuals])
    table = Operand(tuple("VE"), costs.dtype, *zip(*((each.spec, each.gradient) for each in tables)))
    found = Product(costs.environment, ids, [Member(table, operand("BLE", costs.dtype, residuals))])
    elsewhere = found.elsewhere(residuals), found.elsewhere([each.spec for each in tables])
    seconds, vias = least_apart(found.seconds_of_left + found.result_moves(), found.weight_moves(), *elsewhere)
    hoisted = np.zeros(seconds.shape)
    if costs.invariant(0):
        hoisted = np.take_along_axis(found.hoisted_moves(), vias.T, axis=1).T
    if costs.trains:
        there = found.seconds_of_left + found.cotangent_moves()
        seconds = seconds + least_apart(there, found.gradient_moves(), *elsewhere)[0]
    return seconds - hoisted, hoisted
