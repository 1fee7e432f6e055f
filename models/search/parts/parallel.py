"""The parallel block, as it is served and as it is trained: attention and feed-forward of one input, added once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gspmd.annotate import Spec
from gspmd.search import Term
from gspmd.search.moves import Moves
from gspmd.search.products import Product

from ..costs import Costs, Line, Part, product_terms
from .attention import Attention
from .feed_forward import FeedForward


class ParallelBlock(Part):
    """Attention and feed-forward layer of one input, whose outputs are added before they are settled.

    The input is brought to one place for all weights (the choice `block.input`), and both outputs to one place in which
    they are added (`block.output`), which may be a partial sum. Its backward pass mirrors that: the cotangent is brought
    to one place for both outputs (`block.cotangent`), and what all weights make of it for the input is added in one
    place (`block.gradient`), which may be a partial sum too.

    Left out, where it is trained: outputs that are made in two places. A plan mirrors one; of two it would search where
    the cotangent goes.

    Args:
        costs: of the mesh.
        residual: where the residual stream may lie.
        attention: its attention, of all layers.

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.4.
    """

    def __init__(self, costs: Costs, residual: Sequence[Spec], attention: Attention):
        super().__init__(costs)
        self.attention, self.ffn = attention, FeedForward(costs, residual, costs.config.layers)
        self.stream = Moves(costs.environment, tuple("BLE"), costs.dtype)
        self.sums = np.arange(len(self.stream.paths.nodes))
        self.places = self.stream.numbers(residual)
        self.choices = {**self.attention.choices, **self.ffn.choices}
        self.choices |= {"block.input": tuple(residual), "block.output": tuple(self.sums.tolist())}
        if costs.trains:
            self.choices |= {"block.cotangent": tuple(residual), "block.gradient": tuple(self.sums.tolist())}
        self.inner = {**self.attention.products, **self.ffn.products}

    @property
    def vias(self) -> dict[str, Product]:
        """Its products, whose outer ends are shared."""
        return {name: product for name, (product, *_) in self.inner.items()}

    def terms(self) -> Iterator[Term]:
        """Those of attention and feed-forward, with one input and one output."""
        yield from self.attention.terms()
        yield from self.ffn.terms()
        layers, kept = self.costs.config.layers, self.costs.config.layers if self.costs.holds_all else 1
        yield from self._shared(layers)
        for name, (product, tensors, _) in self.inner.items():
            for term in product_terms(name, product, tensors, layers, kept):
                if "residual" not in term.of:  # those are shared
                    yield term
            yield from self._input(name, product) if tensors[0] == "residual" else self._output(name, product, layers)

    def _shared(self, layers: int) -> Iterator[Term]:
        """The residual to where it is multiplied, and the sum of the products home; their cotangents backward."""
        places, sums, between = self.places, self.sums, self.stream.between
        there, home = between(places, places, by="sources"), between(sums, places, by="targets")
        # Nothing in the block reads what it ends with, so that is not computed again.
        yield Term("block.input", ("residual", "block.input"), layers * self.costs.times * there)
        yield Term("block.output", ("block.output", "residual"), layers * home)
        if self.costs.trains:
            yield Term("block.cotangent", ("residual", "block.cotangent"), layers * there)
            yield Term("block.gradient", ("block.gradient", "residual"), layers * home)

    def _input(self, name: str, product: Product) -> Iterator[Term]:
        """A product of the block's input: where that is, and what it adds to its gradient."""
        nodes = product.members[0].left_nodes[product.vias[:, 0]]
        yield Term(f"{name}: input", ("block.input", name), self._same(nodes))
        if self.costs.trains:
            table = np.zeros((len(product.vias), len(self.sums)))
            for joint, rows in zip(product.members, product.vias.T):
                made = self.stream.between(joint.gradient_nodes[rows], self.sums, by="targets")
                table += joint.member.copies * made
            yield Term(f"{name}: gradient", (name, "block.gradient"), self.costs.config.layers * table)

    def _output(self, name: str, product: Product, layers: int) -> Iterator[Term]:
        """A product that is added to the block's output: what it is made in, its local products, and its cotangent."""
        joint, rows = product.members[0], product.vias[:, 0]
        local = joint.forward + product.passes.backward * joint.backward
        table = self.stream.between(joint.result_nodes[rows], self.sums, by="targets") + local[rows][:, None]
        yield Term(f"{name}: output", (name, "block.output"), layers * table)
        if self.costs.trains:
            yield Term(f"{name}: cotangent", ("block.cotangent", name), self._same(joint.mirror_nodes[rows]))

    def _same(self, nodes: np.ndarray) -> np.ndarray:
        """[place, via] 0 where the via has the tensor in this place, or else inf."""
        return np.where(self.places[:, None] == nodes[None, :], 0.0, np.inf)

    def once(self) -> Iterator[Term]:
        """What the weights hold, and their update."""
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
