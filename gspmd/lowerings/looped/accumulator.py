"""Where the products of a travelling operand land: side by side, or added up."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from gspmd.lowerings import target
from gspmd.lowerings.looped.chunks import Region, RingTransfer, blank, part_of, put

if TYPE_CHECKING:
    from gspmd.lowerings.looped.executor import LoopedExecution


class Accumulator:
    """A product of a travelling operand, as its chunks arrive."""

    def __init__(self, execution: "LoopedExecution", product: int, move: int, transfer: RingTransfer, other):
        self.execution, self.number, self.move, self.transfer = execution, product, move, transfer
        found = execution.routine.products[product]
        self.dims = found.einsum.after.dims
        self.other_dims = () if found.right is None else self._spec_of_other(found).dims
        sizes = dict(zip(self.other_dims, () if other is None else other.shape))
        sizes |= {dim: transfer.whole(dim) for dim in transfer.dims}
        self.shape = tuple(sizes[dim] for dim in self.dims)
        looped = set(transfer.block({}))
        self.cut = looped | ({transfer.ring.split} if transfer.ring.split else set())
        self.adds = any(dim not in self.dims for dim in self.cut)
        self.placed = any(dim in self.dims for dim in looped)
        self.latest: jax.Array | None = None
        self.result: jax.Array | None = None
        self.parts: dict[tuple, jax.Array] = {}

    def _spec_of_other(self, found):
        return found.einsum.other if found.left == self.move else found.einsum.before

    def add(self, regions: Sequence[Region], chunks: Sequence[jax.Array], other: jax.Array | None) -> None:
        """Multiply what has arrived together; as one product where they need the same of the other operand.

        Not on host devices, which have no matrix unit to fill and would hold the chunks twice.
        """
        shared = not any(dim in self.other_dims for dim in self.cut)
        along = next((dim for dim in self.transfer.block({}) if dim in self.dims), None)
        if len(chunks) > 1 and shared and along and not target.is_host():
            at = self.transfer.dims.index(along)
            together = self._multiply(jnp.concatenate(chunks, at), other)
            values = jnp.split(together, len(chunks), self.dims.index(along))
        else:
            values = [self._multiply(x, self._part(other, region)) for x, region in zip(chunks, regions)]
        for region, value in zip(regions, values):
            self._land(region, value)

    def _part(self, other: jax.Array | None, region: Region) -> jax.Array | None:
        return None if other is None else part_of(other, self.other_dims, region)

    def _multiply(self, chunk: jax.Array, other: jax.Array | None) -> jax.Array:
        return self.execution.multiply(self.number, *self.execution.in_order(self.number, self.move, chunk, other))

    def _land(self, region: Region, value: jax.Array) -> None:
        if not self.placed:  # nothing but static parts, each with its own sum
            key = tuple((dim, region[dim][0]) for dim in self.dims if dim in region)
            self.parts[key] = self.latest = self.parts[key] + value if key in self.parts else value
            return
        if self.result is None:
            start = jnp.zeros if self.adds else blank  # every place is written, but only added to where sums are
            self.result = start(self.shape, self._dtype(value))
        self.result = self.latest = put(self.result, self.dims, region, value, add=self.adds)

    def _dtype(self, value: jax.Array):
        """Sums are kept in float32; a finished part of a result that goes nowhere else is stored as the result is."""
        execution = self.execution
        output = execution.routine.outputs[execution.output_of(self.number)]
        steps = execution.routine.products[self.number].steps or output.steps
        if self.adds or steps or len(output.products) > 1:
            return value.dtype
        return execution.outputs[execution.output_of(self.number)].dtype

    def state(self):
        """What a loop carries: the product so far."""
        return self.result if self.placed else list(self.parts.values())

    def load(self, state) -> None:
        """Go on from a product so far."""
        if self.placed:
            self.result = state
        else:
            self.parts = dict(zip(self.parts, state))

    def value(self) -> jax.Array:
        """The product with the whole operand."""
        if self.placed:
            return self.result
        if len(self.parts) == 1:
            return next(iter(self.parts.values()))
        return jnp.concatenate(list(self.parts.values()), self.dims.index(self.transfer.ring.split))
