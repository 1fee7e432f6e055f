"""The cost of rings and stripes, from the time of products in chunks and the time of the busiest link.

Time in which products and transfers do not overlap is included. Two effects are not modeled: other equations may use
the links at the same time, and the compiler's scheduler may miss an overlap.
"""

from collections.abc import Mapping, Sequence
from math import prod

from gspmd.hardware.dtypes import itemsize
from gspmd.hardware.links import neighbour
from gspmd.hardware.matmul import product_seconds
from gspmd.lowerings.looped.rings import Link, hops_by_link, shard_parts
from gspmd.planner.overlap import SCHEDULES, Ring, Stripes
from gspmd.planner.spans import CollectiveSpan, local_shape
from gspmd.planner.steps import Environment, Product, Routine, Tensor

CUT_COPIES, LANE_COPIES = 8, 6
"""Numbers of passes over main memory in compiled programs.

The first is for cutting data and adding up the parts, and the second is for joining parts along the lanes.
"""

NESTED_WAVE = 3e-6
"""Seconds that a wave of a ring over several axes takes besides its products and permutes, as compiled for TPU v4."""

REORDERED_PASSES = 8
"""Passes over main memory to reorder an operand of one-byte elements on a TPU, before parts are cut out of it.

In memory a tile has 32 rows of one-byte elements. But a part whose position is known only when the program runs can be
cut only out of tiles of 8 rows. In compiled programs one reordering of `s8[8192,2048]` takes as long as 8.0 passes on
v4, 5.7 on v6e, 4.9 on v5e and 4.5 on v5p.
"""

NEAR = 64e6
"""A float32 sum stays in a TPU's VMEM if at most this many bytes of the sum are read and written.

With twice as many bytes, the sum does not stay there.
"""

OverlappedSpan = tuple[CollectiveSpan, Ring, Sequence[Product]]
"""A collective, its ring, and the products with which the collective overlaps."""

Sent = tuple[float, Mapping[Link, int]]
"""The bytes that each hop sends, and the number of hops over each link."""


class Costs:
    """The predicted seconds of one routine's products, overlapped with its collectives by rings or by stripes."""

    def __init__(self, routine: Routine, inputs: Sequence[Tensor], outputs: Sequence[Tensor], environment: Environment):
        self.routine, self.inputs, self.outputs = routine, inputs, outputs
        self.sizes, self.mesh, self.chip = dict(environment.sizes), dict(environment.mesh), environment.chip
        self.precision = environment.precision

    def local(self, dim: str) -> int:
        """Return the size of a dimension on one device during the einsums."""
        specs = (spec for p in self.routine.products for spec in (p.einsum.before, p.einsum.other) if spec)
        return next(local_shape(spec, self.sizes, self.mesh)[dim] for spec in specs if dim in spec.dims)

    def gather(self, span: CollectiveSpan, ring: Ring, products: Sequence[Product]) -> float:
        """Return the seconds of a gather by a ring together with its products.

        This is the time of the gather within a chunk, plus max(communication, compute) for the loop.
        """
        before, loop, compute = self._ring(span, ring, products)
        inner = self._copied(span) / prod(self.mesh[axis] for axis in ring.axes) if ring.within else 0.0
        return before + inner + _overlapped(loop, compute, self._waves(ring))

    def scatter(self, span: CollectiveSpan, ring: Ring, products: Sequence[Product]) -> float:
        """Return the seconds of a reduce-scatter by a ring together with its products.

        No other ring may overlap with `products`.
        """
        after, loop, compute = self._ring(span, ring, products)
        looped = _overlapped(loop, compute + self._added(span, ring), self._waves(ring))
        return looped + after + self._cut_up(span, ring, local_shape(span.shard, self.sizes, self.mesh))

    @property
    def _copying(self) -> float:
        """Bytes/s at which copies are counted; on TPUs the full bandwidth, since their passes are fitted to it."""
        return self.chip.stream_bandwidth if self.chip.is_switch else self.chip.hbm_bandwidth

    def _cut_up(self, span: CollectiveSpan, ring: Ring, shard: Mapping[str, int]) -> float:
        """Return the seconds of cutting a chunk into parts and adding the parts that arrive."""
        whole = prod(shard.values()) * itemsize(self._wire(span)) * prod(self.mesh[axis] for axis in ring.within)
        return CUT_COPIES * whole / self._copying if ring.within else 0.0

    def _ring(self, span: CollectiveSpan, ring: Ring, products: Sequence[Product]) -> tuple[float, float, float]:
        shard = local_shape(span.shard, self.sizes, self.mesh)
        parts = shard_parts(ring.axes, ring.schedule, ring.orders)
        chunk, count = self._cut(span, ring, shard)
        compute = count * sum(self.product(found, chunk) for found in products)
        compute += self._reordered(span, ring, products)
        each = self._bytes(span) / len(parts)
        fat = each * prod(self.mesh[axis] for axis in ring.within)
        loop = [(fat, hops_by_link(part.axes, self.mesh, part.schedule, part.sign)) for part in parts]
        compute += NESTED_WAVE * self._waves(ring) * (len(ring.axes) > 1)
        inner = [sent for part in parts for sent in self._inner(each, ring.within, part.schedule, part.sign)]
        return self.links(inner), self.links(loop), compute

    def _reordered(
        self, span: CollectiveSpan, ring: Ring, products: Sequence[Product], stripe: Mapping[str, int] | None = None
    ) -> float:
        """Return the seconds of reordering operands of one-byte elements before the ring cuts them.

        If `stripe` is given, these are the seconds for one stripe of each operand. The operand that the ring gathers is
        not cut, because it arrives in chunks.
        """
        if self.chip.is_switch:  # only TPUs store tiles
            return 0.0
        cut = {dim for dim, axes in span.changed_axes.items() if set(axes) & set(ring.axes)}
        whole = 0
        for found in products:
            for number, spec in zip(found.operands, found.einsum.sources):
                tensor = self.inputs[self.routine.moves[number].source]
                if itemsize(tensor.dtype) == 1 and tensor.name != span.steps[0].operand and cut & set(spec.dims):
                    sizes = local_shape(spec, self.sizes, self.mesh)
                    sizes |= {dim: size for dim, size in (stripe or {}).items() if dim in sizes}
                    whole += prod(sizes.values())
        return REORDERED_PASSES * whole / self._copying

    def _inner(self, shard: float, axes: Sequence[str], schedule: str, sign: int) -> list[Sent]:
        """Return the transfers within a chunk, one for each axis, from minor to major.

        The array that is sent grows from one transfer to the next.
        """
        sent = []
        for axis in reversed(axes):
            sent.append((shard, hops_by_link([axis], self.mesh, schedule, sign)))
            shard *= self.mesh[axis]
        return sent

    def _bytes(self, span: CollectiveSpan) -> float:
        return prod(local_shape(span.shard, self.sizes, self.mesh).values()) * itemsize(self._wire(span))

    def _wire(self, span: CollectiveSpan) -> str:
        tensors = {tensor.name: tensor for tensor in (*self.inputs, *self.outputs)}
        return tensors[span.steps[0].operand].wire

    def steps(self, ring: Ring) -> int:
        """Return the number of products into which a ring cuts one product."""
        return prod(self.mesh[axis] for axis in ring.axes) * len(shard_parts(ring.axes, ring.schedule, ring.orders))

    def _waves(self, ring: Ring) -> int:
        return max(1, prod(self.mesh[axis] for axis in ring.axes) // (2 if SCHEDULES[ring.schedule].both_ways else 1))

    def _cut(self, span: CollectiveSpan, ring: Ring, shard: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Return the sizes of a chunk in the dimensions that are cut, on one device, and the number of chunks.

        If shards are cut into parts, these are the sizes and the number of the parts.
        """
        inside = lambda axes: prod(self.mesh.get(axis, 1) for axis in axes if axis in ring.within)  # noqa: E731
        cut = {dim: axes for dim, axes in span.changed_axes.items() if any(axis in ring.axes for axis in axes)}
        chunk = {dim: shard[dim] * inside(axes) for dim, axes in cut.items()}
        count = prod(self.mesh[axis] for axis in ring.axes)
        if ring.axes and ring.split:
            size = chunk.get(ring.split, shard[ring.split])
            number = min(size, len(shard_parts(ring.axes, ring.schedule, ring.orders)))
            chunk[ring.split], count = size // number, count * number
        return chunk, count

    def striped(self, stripes: Stripes, gathers: Sequence[OverlappedSpan], scatters: Sequence[OverlappedSpan]) -> float:
        """Return the seconds of all stripes, each of which is gathered, multiplied and scattered.

        If the stripes cut a contracted dimension, their results are summands. These are added up, and only the sum is
        scattered.

        Args:
            stripes: the dimension and the sizes of the stripes.
            gathers: the gathers before the products.
            scatters: the reduce-scatters after the products.
        """
        total = sum(stripes.sizes)
        alone = [p for p in self.routine.products if not any(p in products for _, _, products in scatters)]
        sums = [each for each in scatters if stripes.dim not in each[0].whole.dims]
        scatters = [each for each in scatters if stripes.dim in each[0].whole.dims]
        alone += [found for _, _, products in sums for found in products]
        there, back = (self.links(self._all_sent(side)) for side in (gathers, scatters))
        copied = sum(self._copied(span) for span, _, _ in gathers)
        last = 1 / max((self._waves(ring) for _, ring, _ in scatters if ring.axes), default=1)
        gathered = multiplied = scattered = 0.0
        for size in stripes.sizes:
            gathered += there * size / total
            chunk = {stripes.dim: size}
            compute = sum(self.product(found, chunk) for found in alone) + copied * size / total
            compute += sum(self.in_stripe(chunk, *each) for each in scatters)
            multiplied = max(multiplied, gathered) + compute
            sent = back * size / total
            scattered = max(multiplied + sent * last, scattered + sent)
        return max(multiplied, scattered) + sum(self.scatter(span, ring, ()) for span, ring, _ in sums)

    def _all_sent(self, transfers: Sequence[OverlappedSpan]) -> list[Sent]:
        return [sent for span, ring, _ in transfers for sent in self._whole(span, ring)]

    def in_stripe(
        self, stripe: Mapping[str, int], span: CollectiveSpan, ring: Ring, products: Sequence[Product]
    ) -> float:
        """Return the seconds of one stripe's products, if a ring scatters the products while they are computed."""
        shard = local_shape(span.shard, self.sizes, self.mesh) | dict(stripe)
        chunk, count = self._cut(span, ring, shard)
        added = self._added(span, ring) * prod(stripe.values()) / prod(self.local(dim) for dim in stripe)
        multiplied = count * sum(self.product(found, {**stripe, **chunk}) for found in products)
        multiplied += self._reordered(span, ring, products, stripe)
        return multiplied + self._cut_up(span, ring, shard) + added

    def _whole(self, span: CollectiveSpan, ring: Ring) -> list[Sent]:
        parts = shard_parts(ring.axes, ring.schedule, ring.orders)
        each = self._bytes(span) / len(parts)
        axes = ring.axes + ring.within
        return [sent for part in parts for sent in self._inner(each, axes, part.schedule, part.sign)]

    def _copied(self, span: CollectiveSpan) -> float:
        """Return the seconds of joining gathered parts.

        Parts are joined more slowly along the last dimension, which fills the lanes.
        """
        whole = self._bytes(span) * prod(self.mesh[axis] for axis in span.axes)
        return (LANE_COPIES if span.shard.dims[-1] in span.changed_axes else 2) * whole / self._copying

    def _added(self, span: CollectiveSpan, ring: Ring) -> float:
        """Return the seconds of adding the sums that arrive along several axes.

        Sums that arrive along a single axis cost nothing, because they are added inside the products.
        """
        if len(ring.axes) < 2:
            return 0.0
        whole = prod(local_shape(span.whole, self.sizes, self.mesh).values())
        return whole * 4 * itemsize("float32") / self._copying

    def product(self, found: Product, chunk: Mapping[str, int]) -> float:
        """Return the seconds of one product whose dimensions have the sizes given in `chunk`.

        Dimensions that `chunk` lacks have their whole size on one device.
        """
        if found.passes_through:
            return 0.0
        left, right, after = found.einsum.before, found.einsum.other, found.einsum.after
        sizes = local_shape(left, self.sizes, self.mesh)
        sizes |= {} if right is None else local_shape(right, self.sizes, self.mesh)
        adds = any(dim not in after.dims and size < sizes[dim] for dim, size in chunk.items() if dim in sizes)
        sizes |= {dim: size for dim, size in chunk.items() if dim in sizes}
        both = set(left.dims) & set(right.dims if right is not None else ())
        amount = lambda dims: prod(sizes[dim] for dim in dims)  # noqa: E731
        free = amount((set(left.dims) & set(after.dims)) - both), amount(set(after.dims) - set(left.dims))
        batch, contracted = amount(both & set(after.dims)), amount(set(sizes) - set(after.dims))
        dtypes = [self.inputs[self.routine.moves[n].source].dtype for n in found.operands]
        return self._seconds(batch, free[0], contracted, free[1], dtypes, adds)

    def _seconds(self, batch: int, left: int, contracted: int, right: int, dtypes: Sequence[str], adds: bool) -> float:
        """Return the seconds of a product: the time to multiply, or the time to read the operands if that is longer.

        A TPU reads operands ahead while it multiplies earlier operands, and keeps a small accumulator on the chip. On a
        GPU cuBLAS does neither, so products take the same time as under `blocking`.
        """
        dtype, accumulator = max(dtypes, key=itemsize), 2 * itemsize("float32") * batch * left * right
        read = batch * contracted * (left * itemsize(dtypes[0]) + right * itemsize(dtypes[-1]))
        stays = not self.chip.is_switch and accumulator <= NEAR
        multiplying = product_seconds(
            left,
            contracted,
            right,
            batch=batch,
            dtype=dtype,
            precision=self.precision,
            chip=self.chip,
            accumulate=adds,
            read_bytes=read if self.chip.is_switch else 0,
            accumulator_bytes=0 if stays else None,
        )
        return multiplying if self.chip.is_switch else max(multiplying, read / self._copying)

    def links(self, walks: Sequence[Sent]) -> float:
        """Return the seconds of transfers that run together.

        This is the time for the bytes of the busiest link, plus the latency of the hops over this link.
        """
        chip = self.chip
        busy: dict[Link, float] = {}
        hops: dict[Link, int] = {}
        for amount, sent in walks:
            for (axis, by), count in sent.items():
                closes = chip.is_switch or chip.wraps(self.mesh[axis])
                for sign in {by} if closes else (1, -1):  # without wrap-around links, the way back closes the ring
                    busy[axis, sign] = busy.get((axis, sign), 0.0) + amount * count
                    hops[axis, sign] = hops.get((axis, sign), 0) + count
        to = {axis: neighbour(axis, self.mesh, chip) for axis, _ in busy}  # bytes/s, and a step's latency
        taken = {link: amount / to[link[0]][0] for link, amount in busy.items()}
        waits = {link: hops[link] * to[link[0]][1] for link in busy}
        if chip.is_switch and not chip.full_mesh:  # all walks share the links into the switch
            return sum(taken.values()) + max(waits.values(), default=0.0)
        return max((taken[link] + waits[link] for link in busy), default=0.0)


def _overlapped(loop: float, compute: float, steps: int) -> float:
    """Return max(compute, communication + one product).

    One product does not overlap, because nothing is sent during the last product of a gather or during the first
    product of a reduce-scatter.
    """
    return max(compute, loop + compute / steps)
