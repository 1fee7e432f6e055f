"""Lowering `looped`: gathers and reduce-scatters of a plan run inside its einsums, as permutes to neighbors.

    all-gather, then einsum      shards go round a ring; each chunk is multiplied while permutes bring the next chunk
    einsum, then reduce-scatter  partial sums go round a ring; each device adds its product for the sum's target device

Several products of one operand share the ring of the operand, and several products of one sum share the ring of the
sum. If a dimension is cut into stripes, one stripe is multiplied while the next stripe is gathered and the previous
stripe is scattered.

Source: Wang et al. 2023, *Overlap Communication with Dependent Computation via Decomposition* (ASPLOS), §5; Pope et al.
2022 (arXiv 2211.05102), §3.5.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.lowerings import in_force
from gspmd.lowerings.allocation import blank
from gspmd.lowerings.blocking.executor import Executor
from gspmd.lowerings.blocking.lowering import passes
from gspmd.lowerings.call import Call, Passes
from gspmd.lowerings.looped.accumulator import Accumulator
from gspmd.lowerings.looped.chunks import Region, RingTransfer, part_of, put, reduce_back, spread, to_be_cut
from gspmd.lowerings.looped.ring_loop import RingLoop
from gspmd.lowerings.looped.rings import ring_parts
from gspmd.lowerings.looped.stream import ChunkStream, multiply_wave_by_wave
from gspmd.planner.overlap import SCHEDULES, Overlap, Stripes
from gspmd.planner.spans import LONGEST, local_shape, ring_gather, ring_scatter, settling
from gspmd.planner.steps import Chain, Routine

Value = Callable[[Region], jax.Array]
"""A function that returns a region of a product.

The function either slices the finished product, or computes the region when it is called.
"""


def lower(call: Call) -> Passes:
    """Return the passes that run the steps of a plan; collectives that overlap with einsums run chunk by chunk."""
    plan = call.plan

    def executor(routine, inputs, outputs, overlap):
        return LoopedExecutor(routine, inputs, outputs, plan.sizes, plan.mesh, call.precision, overlap)

    return passes(call, executor)


class LoopedExecutor(Executor):
    """An executor that runs the collectives of `overlap` inside the einsums, and all other steps as `blocking` does."""

    def __init__(self, routine: Routine, inputs, outputs, sizes, mesh, precision, overlap: Overlap):
        super().__init__(routine, inputs, outputs, sizes, mesh, precision=precision)
        self.overlap, gathers = overlap, overlap.gathers
        self.spans = {number: ring_gather(routine.moves[number]) for number in gathers}
        self.scattered = {product for number in overlap.scatters for product in routine.outputs[number].products}
        self.in_rings = {p for number, ring in gathers.items() if ring.axes for p in self._products_of(number)}
        striped = overlap.stripes and overlap.stripes.dim
        # Operands that are gathered once, before everything else: they have no ring, and no stripe cuts them.
        self.gathered_first = {n for n, ring in gathers.items() if not ring.axes and striped not in self._dims_of(n)}

    def __call__(self, *pieces: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the shards of the outputs, and the moved operands, which are kept for the gradient.

        Operands that a ring gathers are kept as shards.
        """
        shards = self.move_all(range(len(self.routine.moves)), pieces, self._stop)
        held = [self._gathered(n, x) if n in self.gathered_first else x for n, x in enumerate(shards)]
        if self.overlap.stripes is not None:
            return self._by_stripes(self.overlap.stripes, held), shards
        values = self._values(held)
        return [self._settled(number, values, {}) for number in range(len(self.routine.outputs))], shards

    def _values(self, shards: Sequence[jax.Array]) -> dict[int, Value]:
        """Return a `Value` for every product, indexed by the number of the product.

        `shards` has the operands' shards, or one stripe of each shard.
        """
        held, gathers = list(shards), self.overlap.gathers
        values: dict[int, Value] = {}
        for number in gathers:
            if not gathers[number].axes and number not in self.gathered_first:
                held[number] = self._gathered(number, shards[number])
        for number in gathers:
            if gathers[number].axes:
                values |= self._in_ring(number, shards[number], held)
        for number in range(len(self.routine.products)):
            if number not in values:
                values[number] = self._plain(number, held)
        return values

    def _stop(self, number: int) -> int | None:
        """Return the index of the first looped gather in a move, or None if no gather of the move is looped."""
        return len(self.routine.moves[number].steps) - len(self.spans[number].steps) if number in self.spans else None

    def _dims_of(self, move: int) -> tuple[str, ...]:
        return self.routine.moves[move].spec.dims

    def _products_of(self, move: int) -> list[int]:
        return [number for number, product in enumerate(self.routine.products) if move in product.operands]

    # -- stripes -------------------------------------------------------------------------------------------------------

    def _by_stripes(self, stripes: Stripes, shards: Sequence[jax.Array]) -> list[jax.Array]:
        """Compute the outputs stripe by stripe.

        The stripes of an output are joined if the output has the striped dimension. Otherwise they are added up, and
        the sum is reduced.

        If nothing is scattered, every stripe waits for the stripe two before it, because a compiler would otherwise
        send all stripes at once. Scattered stripes are ordered by their own permutes.
        """
        done: list[list] = []  # the outputs of each stripe
        start = 0
        for size in stripes.sizes:
            stripe = [part_of(x, self._dims_of(n), {stripes.dim: (start, size)}) for n, x in enumerate(shards)]
            if len(done) > 1 and not self.overlap.scatters:
                before = jax.tree.leaves(done[-2])
                for n in sorted(self.overlap.gathers.keys() - self.gathered_first):
                    stripe[n] = lax.optimization_barrier((stripe[n], before))[0]
            values = self._values(stripe)
            done.append(
                [
                    self._settled(number, values, {stripes.dim: size})
                    if stripes.dim in output.spec.dims
                    else {product: values[product]({}) for product in output.products}
                    for number, output in enumerate(self.routine.outputs)
                ]
            )
            start += size
        return [self._joined(stripes.dim, number, parts) for number, parts in enumerate(zip(*done))]

    def _joined(self, dim: str, number: int, parts: Sequence) -> jax.Array:
        spec = self.routine.outputs[number].spec
        if dim in spec.dims:
            return jnp.concatenate(parts, spec.dims.index(dim))
        added = {p: self._whole(p, _added([each[p] for each in parts])) for p in parts[0]}
        return self._settled(number, added, {})

    # -- all-gather, then einsum ---------------------------------------------------------------------------------------

    def _transfer(self, number: int, shard: jax.Array) -> RingTransfer:
        """Return the transfer that gathers the operand of a move from its shard, or from a stripe of its shard."""
        span, wire = self.spans[number], self.inputs[self.routine.moves[number].source].wire
        before = len(self.routine.moves[number].steps) - len(span.steps)
        first, shape = self.chains.moves[number].first + before, dict(zip(span.shard.dims, shard.shape))
        return RingTransfer(span, self.overlap.gathers[number], self.mesh, shape, first, wire)

    def _streams(self, transfer: RingTransfer, shard: jax.Array) -> list[ChunkStream]:
        split = transfer.ring.split
        parts = ring_parts(transfer.ring, transfer.shard[split] if split else 1)
        return [ChunkStream(transfer, shard.astype(transfer.wire), shard.dtype, *part) for part in parts]

    def _gathered(self, number: int, shard: jax.Array) -> jax.Array:
        """Gather an operand by permutes before it is multiplied."""
        transfer = self._transfer(number, shard)
        streams = self._streams(transfer, shard)
        whole = blank([transfer.whole(dim) for dim in transfer.dims], shard.dtype)  # every place is written
        for stream in streams:
            regions, chunks = stream.wave(0, [])
            whole = put(whole, transfer.dims, regions[0], chunks[0])
        return whole

    def _in_ring(self, number: int, shard: jax.Array, held: Sequence[jax.Array]) -> dict[int, Value]:
        """Multiply an operand chunk by chunk while it goes round a ring, and return the products with this operand."""
        transfer, products = self._transfer(number, shard), self._products_of(number)
        accumulators = [self._accumulator(product, number, transfer, held) for product in products]
        streams = self._streams(transfer, shard)
        # On a TPU every step is written out, unless the ring is too long: its compiler keeps the given order, and
        # overlaps more if it sees all steps. Other devices run a loop, in which they hold fewer chunks at a time. A
        # loop needs a single axis, so that all waves are alike.
        axes = self.overlap.gathers[number].axes
        if len(axes) == 1 and (not in_force.is_tpu() or self.mesh[axes[0]] > LONGEST):
            RingLoop(streams, accumulators).run()
        else:
            multiply_wave_by_wave(streams, accumulators)
        return {product: self._whole(product, each.value()) for product, each in zip(products, accumulators)}

    def _accumulator(self, number: int, move: int, transfer: RingTransfer, held: Sequence[jax.Array]) -> Accumulator:
        product, einsum = self.routine.products[number], self.routine.products[number].einsum

        def multiply(chunk: jax.Array, part: jax.Array | None) -> jax.Array:
            if part is None:
                return self.multiply(number, chunk)
            return self.multiply(number, *((chunk, part) if product.left == move else (part, chunk)))

        output = self.routine.outputs[self.output_of(number)]
        finished = not (product.steps or output.steps) and len(output.products) == 1
        stored = self.outputs[self.output_of(number)].dtype if finished else None
        for other, spec in zip(product.operands, einsum.sources):
            if other != move:
                return Accumulator(transfer, held[other], spec.dims, einsum.after.dims, multiply, stored)
        return Accumulator(transfer, None, (), einsum.after.dims, multiply, stored)

    def _plain(self, number: int, held: Sequence[jax.Array]) -> Value:
        """Return a product of whole operands.

        If a ring scatters the sum to which this product belongs, each part of the product is computed only when the
        ring needs the part.
        """
        product, einsum = self.routine.products[number], self.routine.products[number].einsum
        if number not in self.scattered:
            return self._whole(number, self.product(number, held))
        operands = [held[move] for move in product.operands]
        if product.passes_through:
            return self._whole(number, self.multiply(number, *operands))
        output = self.output_of(number)
        axes = set(self.overlap.scatters[output].axes)
        cut = {dim for dim, each in ring_scatter(self.routine, output).changed_axes.items() if axes & set(each)}
        sides = [(to_be_cut(x, spec.dims, cut), spec.dims) for x, spec in zip(operands, einsum.sources)]
        return lambda region: self.multiply(number, *(part_of(x, dims, region) for x, dims in sides))

    def _whole(self, number: int, value: jax.Array) -> Value:
        """Return a function that slices regions out of a finished product."""
        return partial(part_of, value, self.routine.products[number].einsum.after.dims)

    # -- einsum, then reduce-scatter -----------------------------------------------------------------------------------

    def _settled(self, number: int, values: dict[int, Value], stripe: Mapping[str, int]) -> jax.Array:
        """Compute an output from the values of its products.

        If `stripe` gives the size of the striped dimension, only a stripe of the output is computed.
        """
        output = self.routine.outputs[number]
        if number in self.overlap.scatters:
            total = self._scattered(number, [values[product] for product in output.products], stripe)
            dims = self.routine.products[output.products[0]].spec.dims
            return self.arrange(total, dims, output.spec).astype(self.outputs[number].dtype)
        whole = {product: values[product]({}) for product in output.products}
        for product in output.products:
            if product in self.in_rings:  # other products are already in the placement in which they are added
                whole[product] = self.send_product(product, whole[product])
        return self.output(number, whole)

    def _scattered(self, number: int, values: Sequence[Value], stripe: Mapping[str, int]) -> jax.Array:
        """Reduce-scatter the sum of products by a ring, and run the steps after the reduce-scatter."""
        span, ring, wire = ring_scatter(self.routine, number), self.overlap.scatters[number], self.outputs[number].wire
        steps, products = settling(self.routine, number), self.routine.outputs[number].products
        own = len(products) == 1 and self.routine.products[products[0]].steps
        first = (self.chains.products[products[0]] if own else self.chains.outputs[number]).first
        shard = {**local_shape(span.shard, self.sizes, self.mesh), **stripe}
        transfer = RingTransfer(span, ring, self.mesh, shard, first, wire)
        pieces = []
        for part, start, size in ring_parts(ring, shard[ring.split] if ring.split else 1):

            def summand(offset, zero, start=start, size=size) -> jax.Array:
                region = transfer.divided(transfer.block(offset, zero), start, size)
                return _added([value(region) for value in values])

            # With stripes, the transfer of a sum overlaps with products of other stripes, so no product is split for
            # it.
            alone = None if stripe else SCHEDULES[ring.schedule]
            chunk = reduce_back(transfer, transfer.hops(part), summand, wire, alone)
            pieces.append(spread(transfer, part, chunk.astype(wire)))
        at = span.shard.dims.index(ring.split) if ring.split else 0
        total = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, at)
        done = len(span.steps)
        return self.send(Chain(steps[done:], first + done), total, wire)


def _added(values: Sequence[jax.Array]) -> jax.Array:
    first, *rest = values
    return sum(rest, first)
