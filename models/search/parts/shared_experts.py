"""The experts that every token uses: a dense layer of their joint width beside the routed ones.

Both take one input, and what is added is one sum, so two moves begin at the same tensor: of the normed input, to the
groups and to the dense layer's first product; and of the cotangent of the sum, back to the groups and to its second
product. As far as the two go the same way they are one in a compiled program, and are priced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from gspmd.annotate import Spec
from gspmd.search import Term
from gspmd.search.moves import Moves, allowed

from ...vectors import shared_sizes
from ..costs import Costs
from ..vectors import Vector
from .experts import Experts, as_sequences
from .feed_forward import FeedForward
from .part import brought, if_equal, mirrored

INPUT, OUTPUT = "moe.shared_input", "moe.shared_output"
"""The choices of where the first product has the input, and the second one the cotangent of its result."""


class SharedExperts(FeedForward):
    """The shared experts of all expert layers.

    Args:
        costs: of the mesh.
        residual: where the residual stream may lie.
        routed: the experts that they stand beside.

    Source: Dai et al. 2024, DeepSeekMoE (arXiv 2401.06066), section 3.2.
    """

    keys: ClassVar[tuple[str, str]] = ("moe.shared_", "moe.shared_")

    def __init__(self, costs: Costs, residual: Sequence[Spec], routed: Experts):
        super().__init__(costs, residual, routed.layers)
        self.stream = Moves(self.costs.environment, tuple("BLE"), costs.dtype)
        self.choices["moe.groups"] = routed.choices["moe.groups"]
        (first, *_), (second, *_) = self.products.values()
        self._nodes = {INPUT: brought(first)} | ({OUTPUT: mirrored(second)} if costs.trains else {})
        self._places = {name: np.unique(nodes) for name, nodes in self._nodes.items()}
        for name, places in self._places.items():
            self.choices[name] = tuple(self.stream.paths.spec(self.stream.dims, node) for node in places.tolist())

    def _sizes(self, costs: Costs) -> Mapping[str, int]:
        return shared_sizes(costs.config, costs.sizes)

    def _vectors(self, stack: int) -> Iterator[Vector]:
        yield from ()

    def _ends(self) -> int:
        return 1

    def terms(self) -> Iterator[Term]:
        """The activation function; and what the moves of the input, and of the cotangent, have in common, once."""
        yield from super().terms()
        yield from self._moved_once(self.stream.shared)

    def at_least(self) -> Iterator[Term]:
        """The same with as much in common as may be: parts of a batch may take other ways than the whole."""
        yield from super().terms()
        yield from self._moved_once(self._most_shared)

    def once(self) -> Iterator[Term]:
        """What the weights hold, and their update; a via has the input in one place."""
        yield from super().once()
        for (name, nodes), via in zip(self._nodes.items(), self.vias):
            table = if_equal(self._places[name], nodes)
            yield Term(f"{via}: {name}", (name, via), np.where(self._fits[via], table, np.inf))

    @cached_property
    def _fits(self) -> dict[str, np.ndarray]:
        """For each via where its axes divide the width of one expert, by which layouts are checked."""
        width, found = {"F": self.costs.config.feed_forward}, {}
        for name, product in self.vias.items():
            joint = product.members[0]
            found[name] = np.isin(joint.masks_of("F")[product.vias[:, 0], 0], [*allowed("F", width, joint.counts)[0]])
        return found

    def _moved_once(self, common: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> Iterator[Term]:
        """[residual, groups, place] seconds that moves from the residual take in common, less."""
        residual = self.stream.numbers(self.choices["residual"])
        sequences = self.stream.numbers(map(as_sequences, self.choices["moe.groups"]))
        for name, runs in ((INPUT, self.costs.times), (OUTPUT, int(self.costs.trains))):
            if runs:
                seconds = -self.layers * runs * common(residual, sequences, self._places[name])
                yield Term(f"{name}: moved already, to groups", ("residual", "moe.groups", name), seconds)

    def _most_shared(self, sources: np.ndarray, ends: np.ndarray, others: np.ndarray) -> np.ndarray:
        """[sources, ends, others] seconds of the shorter of two moves."""
        one, other = (self.stream.between(sources, each, by="sources") for each in (ends, others))
        return np.minimum(one[:, :, None], other[:, None, :])
