"""Products of rows that are sorted by expert: experts that drop nothing.

A group sends one buffer of rows to each shard of its experts, which is as long as the most rows that may come: k of a
token's choices, or all experts of a shard where these are fewer. How many rows an expert will get is the router's to
say. So a plan, and a price here, takes every buffer as full and its rows as evenly spread over the shard's experts;
what moves is the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

import numpy as np

from gspmd.annotate import Spec
from gspmd.moe.dropless.rows import most_rows
from gspmd.search.moves import environment_of
from gspmd.search.products import Member, Operand, Passes, Product

from ..costs import Costs

ONCE = Passes()
"""Forward alone."""


def shards_of(spec: Spec, mesh: Mapping[str, int]) -> int:
    """Into how many shards a placement cuts the experts."""
    return prod(mesh[axis] for axis in spec.axes_of("X"))


def buffered(costs: Costs, shards: int) -> dict[str, int]:
    """The sizes of the buffers that groups send, [G, shards, rows, E]."""
    sizes, moe = costs.sizes, costs.config.moe
    assert moe is not None
    tokens = sizes["B"] * sizes["L"] // sizes["G"]
    return {**sizes, "X": shards, "C": most_rows(tokens, moe.choices, moe.experts, shards)}


def spread(costs: Costs, shards: int) -> dict[str, int]:
    """The sizes of what is multiplied, [G, X, C, E]: the rows of the buffers evenly over all experts, rounded up."""
    experts, sizes = costs.sizes["X"], buffered(costs, shards)
    return {**sizes, "X": experts, "C": -(-sizes["C"] * shards // experts)}


class RowProduct(Product):
    """All placements of a product of rows; X is sharded as the rows arrive, and they do not leave their device.

    Args:
        costs: of the mesh.
        left: rows [G, X, C, ·], or the hidden layer.
        members: weights and results.
        passes: how often each part runs; of moves, those of weights.
        arrivals: how often rows are moved forward.
    """

    def __init__(
        self, costs: Costs, left: Operand, members: Sequence[Member], passes: Passes = ONCE, arrivals: int = 1
    ):
        self.costs = costs
        counts = sorted({shards_of(spec, costs.mesh) for spec in left.options})
        multiplied, sent = (
            [environment_of(sizes(costs, count), costs.mesh, costs.chip) for count in counts]
            for sizes in (spread, buffered)
        )
        super().__init__(multiplied[0], left, members, passes)
        of_rows = replace(passes, moves=arrivals)
        # C is whole: all have the same vias in the same order, and as many rows as the shards of the via make
        self._kinds = {
            count: Product(environment, left, members, of_rows, travels)
            for count, environment, travels in zip(counts, multiplied, sent)
        }

    def forward(self) -> RowProduct:
        """The same product, run once and forward alone."""
        return RowProduct(self.costs, self.left, [joint.member for joint in self.members])

    @cached_property
    def met(self) -> list[Spec]:
        """Where rows are multiplied, for each via."""
        return [self.via(number)[0].specs[0] for number in range(len(self.vias))]

    @cached_property
    def _shards(self) -> np.ndarray:
        return np.array([shards_of(spec, self.costs.mesh) for spec in self.met])

    def _by_shards(self, table: Callable[[Product], np.ndarray]) -> np.ndarray:
        """[option, via] a table, with the rows that the shards of each via make."""
        found = {count: table(product) for count, product in self._kinds.items()}
        merged = np.full_like(next(iter(found.values())), np.inf)
        for count, each in found.items():
            merged[:, self._shards == count] = each[:, self._shards == count]
        return merged

    def _staying(self, options: Sequence[Spec], seconds: np.ndarray) -> np.ndarray:
        """Seconds where G and X lie at the via as in an option, and infinity elsewhere."""
        here, there = ([(spec.axes_of("G"), spec.axes_of("X")) for spec in specs] for specs in (options, self.met))
        number = {place: n for n, place in enumerate(dict.fromkeys((*here, *there)))}
        rows, columns = (np.array([number[place] for place in places]) for places in (here, there))
        return np.where(rows[:, None] == columns[None, :], seconds, np.inf)

    @cached_property
    def seconds_of_left(self) -> np.ndarray:
        """[left, via] seconds to the via, of rows that arrived there."""
        return self._staying(self.left.options, self._by_shards(lambda product: product.seconds_of_left))

    def seconds_of_result(self, member: int) -> np.ndarray:
        """[result, via] seconds of one member: the local products, the result from the via, its cotangent to it."""
        options = self.members[member].member.result.options
        return self._staying(options, self._by_shards(lambda product: product.seconds_of_result(member)))
