"""Attention in a training step: where queries and keys lie, their projections, and the core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from gspmd.annotate import Spec
from gspmd.ops._attention.heads import share
from gspmd.search import Term
from gspmd.search.products import Member, Passes, Product

from ...config import ModelConfig
from ..costs import KEPT_PRODUCTS, Costs, Line
from ..vectors import Vector
from ..weights import Weight, operand
from .part import Part


@dataclass(frozen=True)
class Heads:
    """Where queries lie, and keys and values beside them."""

    query: Spec
    key: Spec

    def __str__(self) -> str:
        return f"{self.query}, {self.key}"


class Attention(Part):
    """The attention of all layers.

    Args:
        costs: of the mesh.
        residual: where the residual stream may lie.
    """

    name = "attention"

    def __init__(self, costs: Costs, residual: Sequence[Spec]):
        super().__init__(costs)
        layers, period = costs.config.layers, costs.config.period
        self.layers, self.vectors = layers, tuple(_vectors(costs.config))
        # Few heads of keys are split along D where they are made; of queries there are enough to split.
        self.weights = [
            Weight("attention.w_q", "EHD", "D", layers // period, period),
            Weight("attention.w_k", "EKD", "", layers // period, 2 * period, ("attention.w_k", "attention.w_v")),
            Weight("attention.w_o", "HDE", "D", layers // period, period),
        ]
        heads = self._heads()
        self.choices = {"residual": tuple(residual), "heads": heads}
        self.choices |= {weight.key: weight.places(costs) for weight in self.weights}
        stream = operand("BLE", costs.dtype, residual)
        queries, keys = (
            operand(dims, costs.dtype, [getattr(each, name) for each in heads])
            for dims, name in (("BLHD", "query"), ("BLKD", "key"))
        )
        w_q, w_k, w_o = (weight.operand(costs, self.choices[weight.key]) for weight in self.weights)
        again = costs.times if costs.remat == "full" else 1
        passes = Passes(costs.times, again, int(costs.trains))
        into = Product(costs.environment, stream, [Member(w_q, queries, 1, "D"), Member(w_k, keys, 2)], passes)
        out = Product(costs.environment, queries, [Member(w_o, stream, 1, "D")], passes)
        self.products = {
            "attention.in_via": (into, ("residual", "attention.w_q", "heads", "attention.w_k", "heads"), layers),
            "attention.out_via": (out, ("heads", "attention.w_o", "residual"), layers),
        }

    def _heads(self) -> tuple[Heads, ...]:
        return tuple(together(self.costs.place("BLHD", "D"), self.costs.sizes, self.costs.mesh))

    def terms(self) -> Iterator[Term]:
        """What the core moves and computes."""
        yield from super().terms()
        yield self.over("attention", "heads", self._core)
        yield from self.kept("heads", self._held)

    def once(self) -> Iterator[Term]:
        """What the weights hold, and their update."""
        yield from super().once()
        for weight in self.weights:
            yield weight.stored(self.costs, self.choices[weight.key])

    def _core(self, heads: Heads) -> tuple[float, float]:
        """Bringing keys to the queries and their gradients back; attention's own products; the rotation."""
        costs, query, key = self.costs, heads.query, heads.key
        queries, keys = costs.local(query), costs.local(key)
        rotated = costs.in_memory(2 * (costs.times + costs.trains), queries + keys, costs.width)
        seconds = self.layers * (2 * self._keys_moved(query, key) + self._products(query) + rotated)
        return seconds, self._held(heads) * costs.width

    def _held(self, heads: Heads) -> int:
        """Elements that blocks keep: queries, keys and values."""
        kept = self.costs.trains and self.costs.remat in (*KEPT_PRODUCTS, "none")
        return kept * self.layers * (self.costs.local(heads.query) + 2 * self.costs.local(heads.key))

    def _products(self, query: Spec) -> float:
        """Seconds of attention's own products, forward, again, and backward, at the chip's full rate."""
        costs = self.costs
        pairs = costs.sizes["L"] * costs.sizes["D"] * costs.local(query.without("D"))
        flops = 2 * pairs  # two products of 2 FLOPs a pair, of which half is causal
        return (costs.times + 2.5 * costs.trains) * flops / costs.chip.flops(costs.dtype)

    def _keys_moved(self, query: Spec, key: Spec) -> float:
        """Seconds to bring the keys to the queries, for the value and the gradient, and their own gradients back."""
        costs, width = self.costs, self.costs.width
        finer = query.axes_of("H")[len(key.axes_of("K")) :]
        found = share(finer, costs.sizes["K"] // prod(costs.mesh[a] for a in key.axes_of("K")), costs.mesh)
        assert found is not None  # or `together` had left it out
        used, ring = key.with_axes("K", (*key.axes_of("K"), *found.sliced)), key.axes_of("L")
        if not costs.trains:  # the forward pass alone
            heads = prod(costs.mesh[axis] for axis in used.axes_of("K"))
            sizes = {**costs.sizes, "K": heads} if found.heads > 1 else costs.sizes
            return costs.moved(key, used, width) + costs.moved(used, used.with_axes("L", ()), width, sizes=sizes)
        if not ring:
            home = used.with_partial((*found.common, *query.axes_of("L")))
            return 2 * costs.moved(key, used, width) + costs.moved(home, key, width)
        # of heads that several devices have, each sends round the one that it uses
        heads = prod(costs.mesh[axis] for axis in used.axes_of("K"))
        sizes = {**costs.sizes, "K": heads} if found.heads > 1 else costs.sizes
        whole = used.with_axes("L", ())
        # Computed again with their block, they are what the gradient needs; a head picked of several is not merged.
        again = found.heads > 1 and costs.times == 2 and costs.remat != "selective"
        seconds = (2 + again) * costs.moved(used, whole, width, sizes=sizes) + 2 * costs.moved(key, used, width)
        seconds += costs.moved(whole.with_partial(ring), used, width, sizes=sizes)
        return seconds + costs.moved(used.with_partial(found.common), key, width)

    def lines(self, chosen: Mapping[str, Any]) -> Iterator[Line]:
        """Queries, keys and weights; residual and norm are the block's."""
        yield Line("attention.query", str(chosen["heads"].query), "heads")
        yield Line("attention.key", str(chosen["heads"].key), "heads")
        for weight in self.weights:
            yield from weight.lines(self.costs, chosen[weight.key])


def _vectors(config: ModelConfig) -> Iterator[Vector]:
    """Biases of queries, keys, values and of what is added to the residual; scales of the norms of heads."""
    stack = config.layers // config.period, config.period
    if config.qkv_bias:
        yield Vector("HD", "heads", "query", *stack)
        yield from 2 * [Vector("KD", "heads", "key", *stack)]
    if config.qk_norm:
        yield Vector("D", "heads", "query", *stack)
        yield Vector("D", "heads", "key", *stack)
    if config.out_bias:
        yield Vector("E", "residual", "", *stack)


def together(queries: Sequence[Spec], sizes: Mapping[str, int], mesh: Mapping[str, int]) -> Iterator[Heads]:
    """Queries with the keys that attention takes beside them: the axes of K are the first of those of H."""
    for query in queries:
        ring = prod(mesh[axis] for axis in query.axes_of("L"))
        cut = [query.axes_of("L")] if ring > 1 and sizes["L"] % (2 * ring) == 0 else []
        for length in (*cut, ()):
            for count in range(len(query.axes_of("H")), -1, -1):
                first, finer = query.axes_of("H")[:count], query.axes_of("H")[count:]
                shards = prod(mesh[axis] for axis in first)
                if sizes["K"] % shards == 0 and share(finer, sizes["K"] // shards, mesh) is not None:
                    yield Heads(query, Spec(tuple("BLKD"), (query.axes_of("B"), length, first, ())))
