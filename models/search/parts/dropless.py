"""The expert layers whose tokens travel as rows sorted by expert, of which none is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gspmd.annotate import Spec
from gspmd.search import Term
from gspmd.search.moves import Moves, environment_of
from gspmd.search.products import Member, Operand, Passes, Product

from .experts import Experts, dispatched
from .rows import RowProduct, buffered, shards_of, spread

UNDER_WAY = 4
"""Buffers of rows that a device holds while an expert layer runs."""


class Dropless(Experts):
    """The expert layers, with rows in place of slots.

    Counts, rows, products and answers are one program with one gradient (`gspmd.moe.experts.program`). What it keeps
    for its gradient has one name, `moe.hidden`: rows where they are multiplied, hidden layers before the activation
    function, and counts; so a block that keeps products sends no row again. Weights are moved again all the same.
    """

    @property
    def sent(self) -> int:
        """How often a forward pass of this layer sends rows and multiplies them, in a step."""
        return 2 if self.costs.remat in ("full", "dots-except-hidden") else 1

    @property
    def answered(self) -> int:
        """How often it sends answers."""
        return 2 if self.costs.remat == "full" else 1

    @property
    def keeps(self) -> bool:
        """Whether a block keeps the rows and hidden layers that this layer's gradient takes."""
        return self.costs.trains and self.sent == 1

    def _product(self, left: Operand, member: Member, results: int) -> Product:
        costs = self.costs
        return RowProduct(costs, left, [member], Passes(costs.times, results, int(costs.trains)), self.sent)

    def _through(self) -> Iterator[Term]:
        yield self._exchanged()
        yield self.over("activation", "moe.hidden", self._activation)
        if self.costs.trains:
            yield self._held()
            yield from self.kept("moe.hidden", self._hidden_kept)
            yield from self._rows_kept()

    def _exchanged(self) -> Term:
        """[groups, rows at the experts] seconds of counts and rows on their way there, of answers back, of sorting."""
        groups, held = self.choices["moe.groups"], self.choices["moe.expert_input"]
        table = self.sent * self._counted(groups, held)
        for count, columns in self._by_shards():
            table[:, columns] += self._travelled(groups, [held[n] for n in columns], count)
        return Term("rows to experts", ("moe.groups", "moe.expert_input"), self.layers * table)

    def _by_shards(self) -> Iterator[tuple[int, np.ndarray]]:
        """Numbers of shards of the experts, and the places of rows that make so many."""
        shards = np.array([shards_of(spec, self.costs.mesh) for spec in self.choices["moe.expert_input"]])
        return ((count, np.flatnonzero(shards == count)) for count in np.unique(shards).tolist())

    def _counted(self, groups: tuple[Spec, ...], held: tuple[Spec, ...]) -> np.ndarray:
        """Seconds of the counts [G, X] of rows, which an expert's device has to know."""
        before, after = (
            [Spec(tuple("GX"), (spec.axes_of("G"), spec.axes_of("X"))) for spec in specs]
            for specs in (map(dispatched, groups), held)
        )
        return self.costs.between("GX", "int32", before, after)

    def _travelled(self, groups: tuple[Spec, ...], held: list[Spec], shards: int) -> np.ndarray:
        """Seconds of rows to so many shards and back, and of passes over them; of their gradients the other way."""
        costs, sizes = self.costs, buffered(self.costs, shards)
        rows = Moves(environment_of(sizes, costs.mesh, costs.chip), tuple("GXCE"), costs.dtype)
        here, there = (rows.numbers(specs) for specs in (map(dispatched, groups), held))
        sent, answered = self.sent + costs.trains, self.answered + costs.trains
        seconds = sent * rows.between(here, there, by="sources")
        seconds += answered * rows.between(there, here, by="targets").T
        of_buffers = replace(costs, sizes=sizes)
        passes = lambda count, spec: costs.in_memory(count, of_buffers.local(spec), costs.width)  # noqa: E731
        # Filled and emptied; and sorted by expert where they arrive, unless they stay, and back.
        filled = [passes(2 * (sent + 1 + costs.trains), dispatched(spec)) for spec in groups]
        placed = [passes(2 * (sent + answered), spec) for spec in held]
        stay = [[shards == 1 and of.axes_of("G") == to.axes_of("G") for to in held] for of in groups]
        return seconds + np.array(filled)[:, None] + np.where(stay, 0.0, placed)

    def _activation(self, hidden: Spec) -> tuple[float, float]:
        """Seconds of an activation function's passes over the hidden layer, and bytes of what is held of it.

        Its gradient computes it again, whatever is kept.
        """
        costs, elements = self.costs, self._local(hidden)
        passes = (1 + self.gates) * (self.sent + costs.trains) + costs.trains * (1 + 2 * self.gates)
        held = self._hidden_kept(hidden) + (self.gates + costs.trains) * elements
        return self.layers * costs.in_memory(passes, elements, costs.width), held * costs.width

    def _local(self, spec: Spec) -> int:
        """Elements of rows, or of their hidden layer, on one device: as many as the shards of X make."""
        return replace(self.costs, sizes=spread(self.costs, shards_of(spec, self.costs.mesh))).local(spec)

    # -- what is held of rows ------------------------------------------------------------------------------------------

    def _held(self) -> Term:
        """[groups, rows at the experts] bytes of buffers that are under way, and of answers that blocks keep."""
        costs, groups, held = self.costs, self.choices["moe.groups"], self.choices["moe.expert_input"]
        layers = 0 if costs.remat == "full" else self.layers
        stacked, size = np.zeros((len(groups), len(held))), np.zeros((len(groups), len(held)))
        for count, columns in self._by_shards():
            buffers = replace(costs, sizes=buffered(costs, count))
            local = [buffers.local(dispatched(spec)) for spec in groups]
            stacked[:, columns] = np.array([costs.stacked(layers * each) for each in local])[:, None]
            size[:, columns] = (UNDER_WAY + layers) * costs.width * np.array(local)[:, None]
        return Term("kept: answers", ("moe.groups", "moe.expert_input"), stacked, bytes=size)

    def _hidden_kept(self, hidden: Spec) -> int:
        """Elements of the hidden layer that blocks keep: before the activation function."""
        return self.layers * self.gates * self._local(hidden) if self.keeps else 0

    def _rows_kept(self) -> Iterator[Term]:
        """Seconds and bytes of the rows that blocks keep as they are multiplied, where that is not as they were."""
        if not self.keeps:
            return
        costs, hidden = self.costs, self.choices["moe.hidden"]
        met = {name: product.met for name, (product, *_) in self.products.items() if isinstance(product, RowProduct)}
        arrived, moved = ([self.layers * self._local(spec) for spec in specs] for specs in met.values())
        stays = [[spec == option for spec in met["moe.out_via"]] for option in hidden]
        tables = (("moe.in_via",), np.array(arrived)), (("moe.hidden", "moe.out_via"), np.where(stays, 0, moved))
        for of, elements in tables:
            yield Term(f"kept: rows at {of[-1]}", of, costs.stacked(1) * elements, bytes=costs.width * elements)
