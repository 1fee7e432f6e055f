"""The parallel block, as it is served and as it is trained: attention and feed-forward of one input, added once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gspmd.annotate import Spec
from gspmd.search import Term
from gspmd.search.moves import Moves
from gspmd.search.products import Product

from ..costs import Costs, Line
from ..vectors import settled_each
from .attention import Attention
from .feed_forward import FeedForward
from .part import Part, brought, mirrored, product_terms

INPUTS, OUTPUTS = ("attention.in_via", "ffn.in_via"), ("attention.out_via", "ffn.out_via")
"""The products of the block's input, and those that are added to its output."""


class ParallelBlock(Part, ABC):
    """Attention and feed-forward layer of one input, whose outputs are added before they are settled.

    The input is brought to one place for all weights (the choice `block.input`), and both outputs to one place in which
    they are added (`block.output`), which may be a partial sum.

    Args:
        costs: of the mesh.
        residual: where the residual stream may lie.
        attention: its attention, of all layers.

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.4.
    """

    def __init__(self, costs: Costs, residual: Sequence[Spec], attention: Attention):
        super().__init__(costs)
        self.attention, self.ffn = attention, FeedForward(costs, residual, costs.config.layers)
        self.inner = {**self.attention.products, **self.ffn.products}
        self.stream = Moves(costs.environment, tuple("BLE"), costs.dtype)
        self.sums = np.arange(len(self.stream.paths.nodes))
        self.places = self.stream.numbers(residual)
        self.choices = {**self.attention.choices, **self.ffn.choices}
        self.weights = [*self.attention.weights, *self.ffn.weights]
        self.vectors = (*self.attention.vectors, *self.ffn.vectors)

    @property
    def vias(self) -> dict[str, Product]:
        """Its products, whose outer ends are shared."""
        return {name: product for name, (product, *_) in self.inner.items()}

    def terms(self) -> Iterator[Term]:
        """Those of attention and feed-forward, with one input and one output."""
        yield from self.attention.terms()
        yield from self.ffn.terms()
        layers = self.costs.config.layers
        for name, (product, tensors, _) in self.inner.items():
            for term in product_terms(name, product, tensors, layers, layers if self.costs.holds_all else 1):
                if "residual" not in term.of:
                    yield term
        for term in self._shared():
            yield replace(term, seconds=layers * term.seconds)

    @abstractmethod
    def _shared(self) -> Iterator[Term]:
        """The tables of one layer's input and output."""

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


class ServedBlock(ParallelBlock):
    """A parallel block that is served."""

    def __init__(self, costs: Costs, residual: Sequence[Spec], attention: Attention):
        super().__init__(costs, residual, attention)
        self.choices |= {"block.input": tuple(residual), "block.output": tuple(self.sums.tolist())}

    def _shared(self) -> Iterator[Term]:
        between, places = self.stream.between, self.places
        yield Term("block.input", ("residual", "block.input"), between(places, places, by="sources"))
        yield Term("block.output", ("block.output", "residual"), between(self.sums, places, by="targets"))
        for name in INPUTS:
            yield Term(f"{name}: input", ("block.input", name), _if_equal(places, brought(self.vias[name])))
        for name in OUTPUTS:
            product = self.vias[name]
            table = between(_made(product), self.sums, by="targets") + _local(product)[:, None]
            yield Term(f"{name}: output", (name, "block.output"), table)


class TrainedBlock(ParallelBlock):
    """A parallel block that is trained: its backward pass mirrors the forward pass.

    What all weights make of the input's gradient is added in one place, which may be a partial sum, and so are the
    outputs; the cotangent of their sum is brought to one place for both. So an option of `block.input`, and of
    `block.output`, says where both products have all that they share, and the places of sums that are best for it are
    in its seconds: as choices of their own they would stand between everything.

    Left out are outputs that are made in two places (but for the axes of partial sums): a plan mirrors one, and of two
    it searches where the cotangent goes, and with it each of the four products of the gradient.
    """

    def __init__(self, costs: Costs, residual: Sequence[Spec], attention: Attention):
        super().__init__(costs, residual, attention)
        # for each via what it shares: a place that has to be the same, and what it adds to a sum
        of_inputs = [np.column_stack([brought(p), *_gradients(p)]) for p in map(self.vias.get, INPUTS)]
        of_outputs = [np.column_stack([mirrored(p), _made(p)]) for p in map(self.vias.get, OUTPUTS)]
        self.inputs, self.outputs = _Meetings(of_inputs), _Meetings(of_outputs)
        self.choices |= {"block.input": self.inputs.options, "block.output": self.outputs.options}

    def terms(self) -> Iterator[Term]:
        """Those of the block; less one of the sums of the biases of both outputs, whose gradients are one."""
        yield from super().terms()
        bias = [vector for vector in self.vectors if (vector.dims, vector.choice) == ("E", "residual")]
        for term in settled_each("both biases", self.costs, bias[1:], self.choices):
            yield replace(term, seconds=-term.seconds)

    def _shared(self) -> Iterator[Term]:
        products = [self.vias[name] for name in INPUTS]
        copies = [joint.member.copies for product in products for joint in product.members]
        there = self.costs.times * self._there(self.inputs)
        yield Term("block.input", ("residual", "block.input"), there + self._added(self.inputs, copies))
        # Nothing in the block reads what it ends with, so that is not computed again.
        there = self._there(self.outputs)
        yield Term("block.output", ("residual", "block.output"), there + self._added(self.outputs, [1, 1]))
        for names, choice, meetings in ((INPUTS, "block.input", self.inputs), (OUTPUTS, "block.output", self.outputs)):
            for name, kinds, kind in zip(names, meetings.pairs.T, meetings.kinds):
                yield Term(f"{name}: {choice}", (choice, name), _if_equal(kinds, kind))
        for name in OUTPUTS:
            yield Term(f"{name}: products", (name,), _local(self.vias[name]))

    def _there(self, meetings: _Meetings) -> np.ndarray:
        """[residual, option] seconds to bring the residual, or its cotangent, to where the products have it."""
        return self.stream.between(self.places, meetings.place, by="sources")

    def _added(self, meetings: _Meetings, copies: Sequence[int]) -> np.ndarray:
        """[residual, option] seconds to add up what the products make, and to bring the sum home."""
        home = self.stream.between(self.sums, self.places, by="targets")  # [common, residual]
        brought = np.zeros((len(meetings.place), len(self.sums)))
        for made, count in zip(meetings.summands.T, copies, strict=True):
            brought += count * self.stream.between(made, self.sums, by="targets")
        return np.stack([(brought + to_residual).min(axis=1) for to_residual in home.T])


class _Meetings:
    """The ways in which two products share a tensor.

    Args:
        shared: for each product, [via, n] the place in which it has the tensor, then the places of its summands.

    Attributes:
        kinds: for each product, [via] the number of what it shares: vias with the same share a number.
        pairs: [option, 2] these numbers, of every two that have the tensor in one place.
        place: [option] that place.
        summands: [option, m] the places of the summands of both.
        options: a name for each pair.
    """

    def __init__(self, shared: Sequence[np.ndarray]):
        (first, one), (second, other) = (np.unique(each, axis=0, return_inverse=True) for each in shared)
        self.kinds = one.ravel(), other.ravel()
        self.pairs = np.argwhere(first[:, :1] == second[:, 0])
        self.place = first[self.pairs[:, 0], 0]
        self.summands = np.hstack([first[self.pairs[:, 0], 1:], second[self.pairs[:, 1], 1:]])
        self.options = tuple(map(tuple, self.pairs.tolist()))


def _gradients(product: Product) -> list[np.ndarray]:
    """For each member [via] where it makes its part of the common operand's gradient."""
    return [joint.gradient_nodes[rows] for joint, rows in zip(product.members, product.vias.T)]


def _made(product: Product) -> np.ndarray:
    """[via] where the result is made."""
    return product.members[0].result_nodes[product.vias[:, 0]]


def _local(product: Product) -> np.ndarray:
    """[via] seconds of the local products, once forward."""
    joint = product.members[0]
    return (joint.forward + product.passes.backward * joint.backward)[product.vias[:, 0]]


def _if_equal(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """[one, other] 0 where two numbers are equal, or else inf."""
    return np.where(one[:, None] == other[None, :], 0.0, np.inf)
