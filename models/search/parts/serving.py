"""Attention over a cache, and the two ends, as a model is served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspmd.annotate import Spec
from gspmd.ops._attention.placement import placement
from gspmd.search import Term

from ..costs import FLOAT32, Costs, Line
from .attention import Attention, Heads, together
from .ends import Tables


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
