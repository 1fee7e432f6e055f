"""A part of a model in a search: its choices, its products and vectors, what else it costs, and its lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gspmd.annotate.equation import Via
from gspmd.search import Term
from gspmd.search.products import Product

from ..costs import Costs, Line
from ..vectors import Vector, settled_each, settled_once, stored
from ..weights import Weight


@dataclass
class Part:
    """A part of a model: its choices, its products, what else it costs, and the lines of a layout that it becomes.

    Attributes:
        costs: of the mesh.
        choices: name to options. Names of several parts may be the same: they share the choice.
        products: by the name of their via, with the choices of their tensors (what comes in, then a weight and its
            result for each member), and how often they run in a step.
        vectors: its biases and scales of norms.
        weights: its matrices.
    """

    name: ClassVar[str] = ""
    """What the terms of its vectors begin with."""

    costs: Costs
    choices: dict[str, tuple] = field(default_factory=dict)
    products: dict[str, tuple[Product, tuple[str, ...], int]] = field(default_factory=dict)
    vectors: tuple[Vector, ...] = ()
    weights: Sequence[Weight] = ()

    @property
    def vias(self) -> dict[str, Product]:
        """Its products by the name of their via, which is a choice of its own."""
        return {name: product for name, (product, *_) in self.products.items()}

    def terms(self) -> Iterator[Term]:
        """The tables of one microbatch, but for those of its products."""
        yield from settled_each(self.name, self.costs, self.vectors, self.choices)

    def at_least(self) -> Iterator[Term]:
        """Those tables, or lower ones, of a batch: its parts, one after the other, cost no less than the whole."""
        return self.terms()

    def of_products(self, microbatches: int = 1) -> Iterator[Term]:
        """The tables of its products, in so many microbatches."""
        for name, (product, tensors, times) in self.products.items():
            kept = times if self.costs.holds_all else 1
            yield from product_terms(name, product, tensors, microbatches * times, kept)

    def accumulated(self) -> Iterator[Term]:
        """The tables of one microbatch's gradients, which are added in memory to those before."""
        if self.costs.accumulates:
            for weight in self.weights:
                yield weight.accumulated(self.costs, self.choices[weight.key])

    def once(self) -> Iterator[Term]:
        """The tables of what happens once in a step, and of what is held all along."""
        yield from settled_once(self.name, self.costs, self.vectors, self.choices)
        for name, (product, tensors, times) in self.products.items():
            yield from once_terms(name, product, tensors, times)
        yield from stored(self.name, self.costs, self.vectors, self.choices)

    def lines(self, chosen: Mapping[str, Any]) -> Iterator[Line]:
        """The lines of a layout, from the option of every choice."""
        yield from ()

    def over(self, name: str, choice: str, price: Callable[[Any], tuple[float, float]]) -> Term:
        """A term of one choice, from the seconds and bytes of each option."""
        found = [price(option) for option in self.choices[choice]]
        seconds, held = (np.array([each[n] for each in found], float) for n in (0, 1))
        return Term(f"{name}: {choice}", (choice,), seconds, bytes=held)

    def kept(self, choice: str, elements: Callable[[Any], int]) -> Iterator[Term]:
        """Seconds in which what blocks keep of a tensor is written and read again, from its elements by option."""
        if self.costs.trains:
            yield self.over("kept", choice, lambda option: (self.costs.stacked(elements(option)), 0.0))

    def via_lines(self, picks: Mapping[str, int]) -> Iterator[Line]:
        """The vias of its products; a second one is that of keys and values."""
        for name, (product, _, _) in self.products.items():
            for number, via in enumerate(product.via(picks[name])):
                yield Line(name if number == 0 else "attention.key_via", text_of(via), name)


def text_of(via: Via) -> str:
    """A via as a layout writes it."""
    return ", ".join(map(str, via.specs))


def product_terms(name: str, product: Product, tensors: Sequence[str], times: int, layers: int = 1) -> Iterator[Term]:
    """The tables of a product, as often as it runs; of so many layers at a time a device holds what is gathered."""
    left, *members = tensors
    # A gradient is as large until it is settled; of a layer's products about half are under way.
    copies = layers if layers > 1 else (1 + (product.passes.backward > 0)) / 2
    yield Term(f"{name}: {left}", (left, name), times * product.seconds_of_left)
    for number, (weight, result) in enumerate(zip(members[::2], members[1::2])):
        seconds, held = times * product.seconds_of_weight(number), copies * product.bytes_of_weight(number)
        yield Term(f"{name}: {weight} {number}", (weight, name), seconds, bytes=held)
        yield Term(f"{name}: to {result} {number}", (result, name), times * product.seconds_of_result(number))


def once_terms(name: str, product: Product, tensors: Sequence[str], times: int) -> Iterator[Term]:
    """What loops over microbatches take once: the first steps of weights that stay the same in them."""
    for number, (weight, joint) in enumerate(zip(tensors[1::2], product.members)):
        if joint.member.weight.invariant:
            yield Term(f"{name}: {weight} {number}, once", (weight, name), times * product.seconds_once(number))


def brought(product: Product) -> np.ndarray:
    """[via] where the common operand is multiplied."""
    return product.members[0].left_nodes[product.vias[:, 0]]


def mirrored(product: Product) -> np.ndarray:
    """[via] where the result's cotangent is multiplied."""
    return product.members[0].mirror_nodes[product.vias[:, 0]]
