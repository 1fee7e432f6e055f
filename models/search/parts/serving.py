"""Attention over a cache, and the parallel block, as a model is served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspmd.annotate import Spec
from gspmd.ops._attention.placement import placement
from gspmd.search import Term
from gspmd.search.moves import Moves
from gspmd.search.products import Product

from ..costs import FLOAT32, Costs, Line
from .attention import Attention, Heads, together
from .ends import Tables
from .feed_forward import FeedForward
from .part import Part


@dataclass(frozen=True)
class CachedHeads(Heads):
    """Where queries lie, new keys and values, and those in the cache."""

    cache: Spec

    def __str__(self) -> str:
        return f"{self.query}, {self.key}, cache {self.cache}"


class CachedAttention(Attention):
    """The attention of all layers to what a cache holds, which it is added to.

    Args:
        costs: of the mesh; its sizes have room for T tokens in a row of the cache.
        residual: where the residual stream may lie.
        read: tokens of a row that the cache holds before.
    """

    def __init__(self, costs: Costs, residual: Sequence[Spec], read: int):
        self.read = read
        super().__init__(costs, residual)

    def _heads(self) -> tuple[Heads, ...]:
        """Keys as `together` has them; a cache that lies as they do, or over its length with all axes left."""
        costs, found = self.costs, []
        for each in together(costs.place("BLHD", "LD"), costs.sizes, costs.mesh):
            held = Spec(tuple("BTKD"), each.key.axes)
            left = tuple(axis for axis in costs.axes if axis not in held.used)
            found += [CachedHeads(each.query, each.key, spec) for spec in _along(held, left, costs)]
        return tuple(found)

    def _core(self, heads: Heads) -> tuple[float, float]:
        """Queries to the cache and back, statistics over its length; the cache is read once. New keys lie as it."""
        assert isinstance(heads, CachedHeads)
        costs, width = self.costs, self.costs.width
        query, key, cache = heads.query, heads.key, heads.cache
        seconds = self._to_cache(query, key, cache) if self.read else 0.0  # a prompt attends to itself alone
        held = 2 * self.layers * costs.local(cache) * width
        return self.layers * (seconds + self._attended(query, cache)), held

    def _attended(self, query: Spec, cache: Spec) -> float:
        """Seconds of attention's own products: those of reading what is cached, or of the chip's full rate."""
        costs, length = self.costs, self.costs.sizes["L"]
        read = 2 * self.read * costs.local(cache) // costs.sizes["T"]
        flops = 4 * costs.local(query) * (self.read + length / 2)
        return max(costs.in_memory(1, read, costs.width), flops / costs.chip.flops(costs.dtype))

    def _to_cache(self, query: Spec, key: Spec, cache: Spec) -> float:
        """Seconds to bring queries and new keys to where the cache lies, to settle statistics, and to come back."""
        costs, width = self.costs, self.costs.width
        shape = tuple(costs.sizes[dim] for dim in "BLHD")
        at = placement(query, key, cache, shape, costs.sizes["K"], costs.mesh)
        parts, rows = at.cache.axes[1], at.query.without("D")
        seconds = costs.moved(query, at.query, width) + 2 * costs.moved(key, at.key, width)
        seconds += costs.settled(rows, parts, "max") + costs.settled(rows, parts)
        return seconds + costs.moved(at.query.with_partial(parts), query, width)

    def lines(self, chosen: Mapping[str, Any]) -> Iterator[Line]:
        """Those of attention, and the cache."""
        yield from super().lines(chosen)
        yield Line("attention.key", str(chosen["heads"].cache), "heads", "cache")


def _along(held: Spec, left: tuple[str, ...], costs: Costs) -> Iterator[Spec]:
    yield held
    if left:
        longer = held.with_axes("T", left)
        if not longer.faults({dim: costs.sizes[dim] for dim in longer.dims}, costs.mesh):
            yield longer


class ParallelBlock(Part):
    """Attention and feed-forward layer of one input, whose outputs are added before they are settled.

    The input is brought to one place for all weights (the choice `block.input`), and both outputs to one place in which
    they are added (`block.output`), which may be a partial sum.

    Args:
        costs: of the mesh.
        residual: where the residual stream may lie.
        read: tokens of a row that the cache holds before.

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.4.
    """

    def __init__(self, costs: Costs, residual: Sequence[Spec], read: int):
        super().__init__(costs)
        self.attention, self.ffn = (
            CachedAttention(costs, residual, read),
            FeedForward(costs, residual, costs.config.layers),
        )
        self.stream = Moves(costs.environment, tuple("BLE"), costs.dtype)
        self.sums = np.arange(len(self.stream.paths.nodes))
        self.residual = self.stream.numbers(residual)
        self.choices = {**self.attention.choices, **self.ffn.choices}
        self.choices |= {"block.input": tuple(residual), "block.output": tuple(self.sums.tolist())}
        self.inner = {**self.attention.products, **self.ffn.products}

    @property
    def vias(self) -> dict[str, Product]:
        """Its products, whose outer ends are shared."""
        return {name: product for name, (product, *_) in self.inner.items()}

    def terms(self) -> Iterator[Term]:
        """Those of attention and feed-forward, with one input and one output."""
        yield from self.attention.terms()
        yield from self.ffn.terms()
        layers, stream, choices = self.costs.config.layers, self.stream, self.choices
        inputs = stream.numbers(choices["block.input"])
        there = stream.between(self.residual, inputs, by="sources")
        yield Term("block.input", ("residual", "block.input"), layers * there)
        home = stream.between(self.sums, self.residual, by="targets")
        yield Term("block.output", ("block.output", "residual"), layers * home)
        for name, (product, tensors, _) in self.inner.items():
            left, *members = tensors
            if name.endswith("in_via"):
                nodes = product.members[0].left_nodes[product.vias[:, 0]]
                same = np.where(inputs[:, None] == nodes[None, :], 0.0, np.inf)
                yield Term(f"{name}: input", ("block.input", name), same)
            else:
                yield Term(f"{name}: {left}", (left, name), layers * product.seconds_of_left)
            for number, (weight, result) in enumerate(zip(members[::2], members[1::2])):
                seconds, held = layers * product.seconds_of_weight(number), product.bytes_of_weight(number) / 2
                yield Term(f"{name}: {weight} {number}", (weight, name), seconds, bytes=held)
                if result == "residual":
                    joint = product.members[0]
                    made = joint.result_nodes[product.vias[:, 0]]
                    table = stream.between(made, self.sums, by="targets") + joint.forward[product.vias[:, 0]][:, None]
                    yield Term(f"{name}: output", (name, "block.output"), layers * table)
                else:
                    table = product.seconds_of_result(number)
                    yield Term(f"{name}: to {result} {number}", (result, name), layers * table)

    def once(self) -> Iterator[Term]:
        """What the weights hold."""
        yield from self.attention.once()
        yield from self.ffn.once()

    def lines(self, chosen: Mapping[str, Any]) -> Iterator[Line]:
        """Those of attention and feed-forward."""
        yield from self.attention.lines(chosen)
        yield from self.ffn.lines(chosen)

    def via_lines(self, picks: Mapping[str, int]) -> Iterator[Line]:
        """Their vias."""
        yield from self.attention.via_lines(picks)
        yield from self.ffn.via_lines(picks)


class Served(Tables):
    """The two ends of a served model: the lookup of tokens, and the logits of the last one of each row."""

    def __init__(self, costs: Costs, last: Costs, residual: Sequence[Spec]):
        super().__init__(costs, last, residual, "L")
        self.last = last

    def terms(self) -> Iterator[Term]:
        """The lookup, and the logits in memory."""
        yield from super().terms()
        yield self.over("logits", "output.logits", self._logits)

    def _logits(self, logits: Spec) -> tuple[float, float]:
        elements = self.last.local(logits)
        return self.costs.in_memory(2, elements, FLOAT32), elements * FLOAT32
