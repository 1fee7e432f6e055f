"""The chunks of a ring: their positions in the whole tensor, and the permutes by which they are sent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.lowerings import in_force
from gspmd.lowerings.allocation import blank
from gspmd.lowerings.blocking import tpu
from gspmd.lowerings.looped.rings import Hop, Offset, ShardPart, walk
from gspmd.lowerings.scopes import step_scope
from gspmd.planner.overlap import Ring, RingSchedule
from gspmd.planner.spans import CollectiveSpan

Region = Mapping[str, tuple[jax.Array | int, int]]
"""A part of a local tensor: a mapping from dimension to first index and length. Other dimensions are complete."""


def part_of(x: jax.Array, dims: Sequence[str], region: Region) -> jax.Array:
    """Slice a region out of a local array; dimensions of the region that the array lacks are ignored."""
    for dim, (start, size) in region.items():
        if dim in dims and x.shape[dims.index(dim)] != size:
            at = dims.index(dim)
            if isinstance(start, int):
                x = lax.slice_in_dim(x, start, start + size, axis=at)
            else:
                x = lax.dynamic_slice_in_dim(x, start, size, axis=at)
    return x


def to_be_cut(x: jax.Array, dims: Sequence[str], cut: Iterable[str]) -> jax.Array:
    """Prepare an operand from which `part_of` will slice several regions along the dimensions `cut`.

    A TPU reorders one-byte elements before they are cut in a loop. The compiler makes one reordered copy for all
    regions, but it copies the array from which the operand itself was sliced. In a scan over layers, every layer then
    copied the weights of all layers, and a step of PaLM 62B took 450 ms instead of 10 ms. With a barrier, only the
    operand is copied.
    """
    if in_force.is_tpu() and x.dtype.itemsize == 1 and not set(dims).isdisjoint(cut):
        return lax.optimization_barrier(x)
    return x


def put(x: jax.Array, dims: Sequence[str], region: Region, part: jax.Array, *, add: bool = False) -> jax.Array:
    """Replace a region of a local array by `part`, or add `part` to the region if `add` is set."""
    part = part.astype(x.dtype)
    if part.shape == x.shape:
        return x + part if add else part
    # Cast to one dtype: with x64 enabled, loop counters and literals have 64 bits.
    starts = [lax.convert_element_type(region[dim][0] if dim in region else 0, jnp.int32) for dim in dims]
    if add:
        part = part + lax.dynamic_slice(x, starts, part.shape)
    return lax.dynamic_update_slice(x, part, starts)


@dataclass(frozen=True)
class RingTransfer:
    """A gather or reduce-scatter of a tensor by a ring, with its permutes, and the sizes and positions of its chunks.

    Attributes:
        span: the collectives that the ring replaces.
        ring: the ring's axes and schedule.
        mesh: mesh axis sizes.
        shard: the size of each dimension of one shard.
        first: the number, in the plan, of the first step that the ring replaces.
        wire: the dtype in which the tensor is sent.
    """

    span: CollectiveSpan
    ring: Ring
    mesh: Mapping[str, int]
    shard: Mapping[str, int]
    first: int
    wire: str

    @property
    def dims(self) -> tuple[str, ...]:
        """The dimensions of the tensor, in the tensor's order."""
        return self.span.shard.dims

    def whole(self, dim: str) -> int:
        """Return the size of a dimension after the gather, or before the reduce-scatter, on one device."""
        return self.shard[dim] * prod(self.mesh[axis] for axis in self.span.changed_axes.get(dim, ()))

    def chunk(self, dim: str) -> int:
        """Return the size of a dimension in one chunk of the loop, on one device."""
        return self.shard[dim] * prod(self.mesh[axis] for axis in self._over(dim, self.ring.within))

    def block(self, offset: Offset, zero: jax.Array | int = 0) -> Region:
        """Return the region of the whole tensor that is the chunk from the device at distance `offset`.

        `zero` is added to the indices, so that every use of the region waits for `zero`.
        """
        dims = [dim for dim in self.span.changed_axes if self._over(dim, self.ring.axes)]
        index = {dim: self._index(dim, self.ring.axes, offset) + zero for dim in dims}
        return {dim: (index[dim] * self.chunk(dim), self.chunk(dim)) for dim in dims}

    def along(self, axis: str, offset: Offset, size: int) -> Region:
        """Return the region of a part of size `size` that comes from the device at distance `offset` along an axis."""
        return {self.dim(axis): (self.place(axis, offset) * size, size)}

    def place(self, axis: str, offset: Offset) -> jax.Array:
        """Return the coordinate, along one mesh axis, of the device at distance `offset`."""
        return (lax.axis_index(axis) - offset.get(axis, 0)) % self.mesh[axis]

    def dim(self, axis: str) -> str:
        """Return the dimension that an axis shards."""
        return next(dim for dim, axes in self.span.changed_axes.items() if axis in axes)

    def divided(self, region: Region, start: int, size: int) -> Region:
        """Return the part of a region that begins at `start` and has length `size`.

        The region is cut along the same dimension as the ring's shards.
        """
        split = self.ring.split
        if split is None:
            return region
        before = region[split][0] if split in region else 0
        return {**region, split: (before + start, size)}

    def _over(self, dim: str, axes: Sequence[str]) -> list[str]:
        return [axis for axis in self.span.changed_axes.get(dim, ()) if axis in axes and self.mesh[axis] > 1]

    def _index(self, dim: str, axes: Sequence[str], offset: Offset) -> jax.Array | int:
        """Return the index, along a dimension, of the chunk from the device at distance `offset` along `axes`."""
        index: jax.Array | int = 0
        for axis in self._over(dim, axes):
            index = index * self.mesh[axis] + self.place(axis, offset)
        return index

    def hops(self, part: ShardPart) -> tuple[Hop, ...]:
        """Return the hops by which one part of every shard goes round the loop's axes."""
        return walk(part.axes, self.mesh, part.schedule, part.sign)

    def send(self, x: jax.Array, hop: Hop, *, back: bool = False) -> jax.Array:
        """Permute an array by a hop, in the named scope of the planned step that the ring replaces.

        With `back`, the array is sent in the opposite direction. An empty array is not sent.
        """
        if not x.size:
            return x
        number, size, by = self.span.step_number(hop.axis), self.mesh[hop.axis], -hop.by if back else hop.by
        step = replace(self.span.steps[number], kind="collective-permute")
        with step_scope(self.first + number, step):
            return lax.ppermute(x, hop.axis, [(place, (place + by) % size) for place in range(size)])


def collect(transfer: RingTransfer, part: ShardPart, x: jax.Array) -> jax.Array:
    """Gather one chunk, axis by axis.

    The chunk consists of the shards of this device and of the other devices along the ring's axes `within`. If shards
    are cut into parts, the chunk consists of the same part of each of these shards.
    """
    for axis in reversed(transfer.ring.within):
        dim = transfer.dim(axis)
        at, hops = transfer.dims.index(dim), walk([axis], transfer.mesh, part.schedule, part.sign)
        size, arrived = x.shape[at], [x]
        shape = [n * (transfer.mesh[axis] if place == at else 1) for place, n in enumerate(x.shape)]
        chunk = put(blank(shape, x.dtype), transfer.dims, transfer.along(axis, {}, size), x)
        for hop in hops:
            arrived.append(transfer.send(arrived[hop.source], hop))
            chunk = put(chunk, transfer.dims, transfer.along(axis, hop.offset, size), arrived[-1])
        x = chunk
    return x


def spread(transfer: RingTransfer, part: ShardPart, chunk: jax.Array) -> jax.Array:
    """Reduce-scatter a chunk over the ring's axes `within`, axis by axis."""
    for axis in transfer.ring.within:
        at, number = transfer.dims.index(transfer.dim(axis)), transfer.mesh[axis]
        shape = (*chunk.shape[:at], number, chunk.shape[at] // number, *chunk.shape[at + 1 :])
        # Parts are moved to the front: if narrow parts were cut out of the last dimension, the compiler would transpose
        # the product.
        pieces = jnp.moveaxis(chunk.reshape(shape), at, 0)
        summand = lambda offset, _, x=pieces, a=axis: lax.dynamic_index_in_dim(x, transfer.place(a, offset), 0, False)  # noqa: E731
        chunk = reduce_back(transfer, walk([axis], transfer.mesh, part.schedule, part.sign), summand, chunk.dtype)
    return chunk


def reduce_back(
    transfer: RingTransfer, hops: Sequence[Hop], summand, wire, schedule: RingSchedule | None = None
) -> jax.Array:
    """Reduce-scatter round a ring: run through the hops backwards, add a summand at every node, and send the sum on.

    Args:
        transfer: the transfer whose permutes are used.
        hops: the hops of the gather that is the reverse of this reduce-scatter.
        summand: a function, (offset, zero) -> this device's summand for the device at distance `offset`. If the summand
            is a product, this product waits for `zero`.
        wire: the dtype in which sums are sent; sums are added in the dtype of the summands.
        schedule: the schedule of the ring if the summands are products that are computed while sums are sent, else
            None. A compiler fuses the addition of an arriving sum with the next product, so this product waits for the
            sum. With two directions, a product for one side is computed while a sum for the other side is sent. Only
            the last product is not paired in this way, and is computed after the last sum has been sent.
    """
    partial: dict[int, list[jax.Array]] = {}
    sent, cut = None, schedule is not None and schedule.is_cut
    for number in range(len(hops), -1, -1):
        last = tpu.zero_after(sent) if cut and not number and sent is not None else 0
        alone = schedule and (schedule.is_single or not number or (cut and number == len(hops) - 1))
        value, arrived = summand(hops[number - 1].offset if number else {}, last), partial.pop(number, ())
        if arrived and alone:
            value = lax.optimization_barrier(value)
        for other in arrived:
            value = value + other.astype(value.dtype)
        if number:
            hop, sent = hops[number - 1], value.astype(wire)
            partial.setdefault(hop.source, []).append(transfer.send(sent, hop, back=True))
    return value
