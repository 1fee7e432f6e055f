"""The experts that every token uses: a dense layer of their joint width beside the routed ones.

Both take one input, and what they add is one sum, so two moves begin at the same tensor: of the normed input, to groups
and to the dense layer's first product; and of the cotangent of the sum, to groups again and to its second product. As
far as the two go the same way they are one in a compiled program, and are priced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from gspmd.annotate import Spec
from gspmd.search import Term
from gspmd.search.moves import Moves, allowed
from gspmd.search.products import Product

from ...vectors import shared_sizes
from ..costs import Costs
from ..vectors import Vector
from .experts import Experts, as_sequences
from .feed_forward import FeedForward
from .part import brought, mirrored


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
        self.choices["moe.groups"] = routed.choices["moe.groups"]
        self.stream = Moves(self.costs.environment, tuple("BLE"), costs.dtype)

    def _sizes(self, costs: Costs) -> Mapping[str, int]:
        return shared_sizes(costs.config, costs.sizes)

    def _vectors(self, stack: int) -> Iterator[Vector]:
        yield from ()

    def _ends(self) -> int:
        return 1

    def terms(self) -> Iterator[Term]:
        """The activation function; less what the moves to groups and to the products have in common."""
        yield from super().terms()
        yield from self._in_common(self.stream.shared)

    def at_least(self) -> Iterator[Term]:
        """The same, less all of the shorter of two moves: parts of a batch may take other ways than the whole."""
        yield from super().terms()
        yield from self._in_common(self._shorter)

    def once(self) -> Iterator[Term]:
        """What the weights hold, and their update; and which vias a layout may have."""
        yield from super().once()
        for name, product in self.vias.items():
            if not (fits := self._divides(product)).all():
                yield Term(f"divides: {name}", (name,), np.where(fits, 0.0, np.inf))

    def _divides(self, product: Product) -> np.ndarray:
        """For each via whether its axes divide the width of one expert, by which layouts are checked."""
        joint, width = product.members[0], {"F": self.costs.config.feed_forward}
        return np.isin(joint.masks_of("F")[product.vias[:, 0], 0], [*allowed("F", width, joint.counts)[0]])

    def _in_common(self, of: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> Iterator[Term]:
        """[residual, groups, via] seconds, below 0, that two moves from the residual have in common."""
        residual = self.stream.numbers(self.choices["residual"])
        sequences = self.stream.numbers(map(as_sequences, self.choices["moe.groups"]))
        ends = zip(self.vias.items(), (brought, mirrored), (self.costs.times, int(self.costs.trains)))
        for (name, product), place, runs in ends:
            places, at = np.unique(place(product), return_inverse=True)
            seconds = -self.layers * runs * of(residual, sequences, places)[..., at]
            yield Term(f"{name}: moved already, to groups", ("residual", "moe.groups", name), seconds)

    def _shorter(self, sources: np.ndarray, ends: np.ndarray, others: np.ndarray) -> np.ndarray:
        """[sources, ends, others] seconds of the shorter of two moves."""
        one, other = (self.stream.between(sources, each, by="sources") for each in (ends, others))
        return np.minimum(one[:, :, None], other[:, None, :])
