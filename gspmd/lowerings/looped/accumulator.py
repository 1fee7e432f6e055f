"""A product with an operand that arrives in chunks round a ring; each chunk gives a part or a summand of the result."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gspmd.lowerings import in_force
from gspmd.lowerings.allocation import blank
from gspmd.lowerings.looped.chunks import Region, RingTransfer, part_of, put, to_be_cut


class Accumulator:
    """One product that is computed while the chunks of one of its operands arrive.

    The effect of a chunk depends on the dimension along which chunks are cut. A chunk of a free dimension gives a part
    of the result. A chunk of a contracted dimension gives a summand of the result. A chunk of a batch dimension gives a
    part of the result, and needs only a part of the other operand.

    Args:
        transfer: the transfer of the operand that arrives in chunks.
        other: the whole other operand, or None if the product has only one operand.
        other_dims: the dimensions of the other operand.
        dims: the dimensions of the product.
        multiply: a function, (chunk, part of the other operand) -> the local einsum of these arrays.
        stored: the dtype in which finished parts are stored. None keeps the dtype of the products, float32, because
            parts will still be sent or added.
    """

    def __init__(
        self,
        transfer: RingTransfer,
        other: jax.Array | None,
        other_dims: Sequence[str],
        dims: Sequence[str],
        multiply: Callable[[jax.Array, jax.Array | None], jax.Array],
        stored: Any,
    ):
        self.transfer, self.other_dims, self.dims = transfer, other_dims, dims
        self.multiply, self.stored = multiply, stored
        sizes = dict(zip(other_dims, () if other is None else other.shape))
        sizes |= {dim: transfer.whole(dim) for dim in transfer.dims}
        self.shape = tuple(sizes[dim] for dim in dims)
        looped = set(transfer.block({}))
        self.other = None if other is None else to_be_cut(other, other_dims, looped)
        self.cut = looped | ({transfer.ring.split} if transfer.ring.split else set())
        self.adds = any(dim not in dims for dim in self.cut)
        self.placed = any(dim in dims for dim in looped)
        self.latest: jax.Array | None = None
        self.result: jax.Array | None = None
        self.parts: dict[tuple, jax.Array] = {}

    def add(self, regions: Sequence[Region], chunks: Sequence[jax.Array]) -> None:
        """Multiply chunks that arrived together, in one product if all need the same part of the other operand.

        Host devices multiply chunks one by one. They have no matrix unit to fill, and joining the chunks for one
        product would hold the chunks twice.
        """
        alike = not any(dim in self.other_dims for dim in self.cut)
        along = next((dim for dim in self.transfer.block({}) if dim in self.dims), None)
        if len(chunks) > 1 and alike and along and not in_force.is_host():
            at = self.transfer.dims.index(along)
            together = self.multiply(jnp.concatenate(chunks, at), self.other)
            values = jnp.split(together, len(chunks), self.dims.index(along))
        else:
            values = [self.multiply(x, self._part_of_other(region)) for x, region in zip(chunks, regions)]
        for region, value in zip(regions, values):
            self._store(region, value)

    def _part_of_other(self, region: Region) -> jax.Array | None:
        return None if self.other is None else part_of(self.other, self.other_dims, region)

    def _store(self, region: Region, value: jax.Array) -> None:
        if not self.placed:  # regions are then static, and each has its own sum
            key = tuple((dim, region[dim][0]) for dim in self.dims if dim in region)
            self.parts[key] = self.latest = self.parts[key] + value if key in self.parts else value
            return
        if self.result is None:
            start = jnp.zeros if self.adds else blank  # sums start at 0; parts will cover the whole result
            self.result = start(self.shape, value.dtype if self.adds or self.stored is None else self.stored)
        self.result = self.latest = put(self.result, self.dims, region, value, add=self.adds)

    def state(self):
        """Return the partial result so far, to be carried through a loop."""
        return self.result if self.placed else list(self.parts.values())

    def load(self, state) -> None:
        """Restore the partial result, which a loop has carried."""
        if self.placed:
            self.result = state
        else:
            self.parts = dict(zip(self.parts, state))

    def value(self) -> jax.Array:
        """Return the product, after all chunks have been added."""
        if self.result is not None:
            return self.result
        if len(self.parts) == 1:
            return next(iter(self.parts.values()))
        return jnp.concatenate(list(self.parts.values()), self.dims.index(self.transfer.ring.split))
