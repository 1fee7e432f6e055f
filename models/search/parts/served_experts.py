"""The expert layers of a served model: rows sorted by expert, of which none is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.ops._plan import plan
from gspmd.search import Term
from gspmd.search.moves import Moves, environment_of
from gspmd.search.products import Member, Operand, Product

from ..costs import Costs
from .experts import Experts
from .feed_forward import activation
from .rows import RowProduct, buffered, shards_of, spread


class ServedExperts(Experts):
    """The expert layers as a model is served: every row of the batch is a group, and rows take the place of slots.

    The statistics of training are not asked for, and so not computed.
    """

    def _product(self, left: Operand, member: Member, results: int) -> Product:
        return RowProduct(self.costs, left, [member])

    def terms(self) -> Iterator[Term]:
        """Tokens to groups and back, the router, rows to experts and back."""
        yield self._regrouped()
        yield self._routed()
        yield self._exchanged()
        yield self.over("activation", "moe.hidden", self._activation)

    def _logits(self, groups: Spec, router: Spec) -> float:
        costs, logits = self.costs, Spec(tuple("GLX"), (groups.axes_of("G"), (), ()))
        noisy = costs.config.moe.noisy
        pair = ((router, router), (logits, logits)) if noisy else (router, logits)
        sizes = {dim: costs.sizes[dim] for dim in "GEX"} | {"L": self.tokens}
        equation = Equation.product(groups, *pair)
        return plan(equation, sizes, costs.mesh, "float32", costs.chip, lowering="blocking").seconds

    def _exchanged(self) -> Term:
        """[groups, rows at the experts] seconds of counts and rows on their way there, of answers back, of sorting."""
        costs, groups, held = self.costs, self.choices["moe.groups"], self.choices["moe.expert_input"]
        shards = np.array([shards_of(spec, costs.mesh) for spec in held])
        table = self._counted(groups, held)
        for count in np.unique(shards):
            of_count = shards == count
            table[:, of_count] += self._sent(groups, [held[n] for n in np.flatnonzero(of_count)], int(count))
        return Term("rows to experts", ("moe.groups", "moe.expert_input"), self.layers * table)

    def _counted(self, groups: tuple[Spec, ...], held: tuple[Spec, ...]) -> np.ndarray:
        """Seconds of the counts [G, X] of rows, which an expert's device has to know."""
        before, after = (
            [Spec(tuple("GX"), (spec.axes_of("G"), spec.axes_of("X"))) for spec in specs]
            for specs in (map(_dispatched, groups), held)
        )
        return self.costs.between("GX", "int32", before, after)

    def _sent(self, groups: tuple[Spec, ...], held: list[Spec], shards: int) -> np.ndarray:
        """Seconds of rows to so many shards and back, and of passes over them."""
        costs, sizes = self.costs, buffered(self.costs, shards)
        rows = Moves(environment_of(sizes, costs.mesh, costs.chip), tuple("GXCE"), costs.dtype)
        here, there = (rows.numbers(specs) for specs in (map(_dispatched, groups), held))
        seconds = rows.between(here, there, by="sources") + rows.between(there, here, by="targets").T
        of_buffers = replace(costs, sizes=sizes)
        filled = [self._passes(of_buffers, _dispatched(spec)) for spec in groups]
        sorted_there = [self._passes(of_buffers, spec) for spec in held]
        return seconds + np.array(filled)[:, None] + np.array(sorted_there)[None, :]

    def _passes(self, costs: Costs, spec: Spec) -> float:
        """Seconds to fill or sort buffers, and to empty them or sort them back."""
        return costs.in_memory(4, costs.local(spec), costs.width)

    def _activation(self, hidden: Spec) -> tuple[float, float]:
        costs = self.costs
        sizes = spread(costs, shards_of(hidden, costs.mesh))
        return activation(replace(costs, sizes=sizes), self.layers, self.gates, hidden)


def _dispatched(groups: Spec) -> Spec:
    """Where the rows of these groups lie before they travel."""
    return Spec(tuple("GXCE"), (groups.axes_of("G"), (), (), ()))
