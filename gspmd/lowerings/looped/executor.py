"""Lowering `looped`: gathers and reduce-scatters run inside the einsum, chunk by chunk, by permutes between neighbours.

All-gather, then einsum: while the chunk in hand is multiplied, permutes bring the next ones. What a chunk is of decides
what its product is: of a free dimension, a part of the result; of a summed one, a summand; of a shared one, a part of
the result from a part of the other operand. Einsum, then reduce-scatter: the sum travels, and each device adds the
product for the device that it is for. Several products of one travelling operand share its ring, and several products
of one sum share its travelling sum.

Source: Wang et al. 2023, *Overlap Communication with Dependent Computation via Decomposition* (ASPLOS), §5; Pope et al.
2022 (arXiv 2211.05102), §3.5.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.lowerings import target
from gspmd.lowerings.blocking.executor import Executor
from gspmd.lowerings.looped.accumulator import Accumulator
from gspmd.lowerings.looped.chunks import Region, RingTransfer, blank, part_of, put, reduce_back, spread
from gspmd.lowerings.looped.ring_loop import RingLoop
from gspmd.lowerings.looped.rings import LONGEST, ring_parts
from gspmd.lowerings.looped.stream import ChunkStream
from gspmd.planner.overlap import Overlap, gather_of, local_shape, scatter_of, settling
from gspmd.planner.steps import Chain, Routine


class LoopedExecution(Executor):
    """Runs a routine with the rings of `loops`; what has no ring runs as in lowering `blocking`."""

    def __init__(self, routine: Routine, inputs, outputs, sizes, mesh, precision, overlap: Overlap):
        super().__init__(routine, inputs, outputs, sizes, mesh, precision=precision)
        self.overlap = overlap
        self.spans = {number: gather_of(routine.moves[number]) for number in overlap.gathers}
        self.scattered = {product for number in overlap.scatters for product in routine.outputs[number].products}

    def __call__(self, *pieces: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """The outputs' pieces, and those of the operands as they are kept: a travelling one as it was before."""
        moves = range(len(self.routine.moves))
        shards = [self.move(number, pieces, self._stop(number)) for number in moves]
        whole = {number: self._gathered(number, shards[number]) for number in moves if self._waits(number)}
        shards_of = lambda some: [whole.get(number, x) for number, x in enumerate(some)]  # noqa: E731
        if self.overlap.stripes is None:
            values = self._values(shards_of(shards))
            return [self._settled(number, values) for number in range(len(self.routine.outputs))], shards
        return self._by_stripes(shards_of(shards)), shards

    def _values(self, shards: Sequence[jax.Array]) -> "dict[int, _Value]":
        """Every product of what the operands have arrived as, or of a stripe of it."""
        held = list(shards)
        values: dict[int, _Value] = {}
        for number, ring in self.overlap.gathers.items():
            if not ring.axes and not self._waits(number):
                held[number] = self._gathered(number, shards[number])
        for number, ring in self.overlap.gathers.items():
            if ring.axes:
                values |= self._looped(number, shards[number], held)
        for number in range(len(self.routine.products)):
            if number not in values:
                values[number] = self._plain(number, held)
        return values

    # -- stripes -------------------------------------------------------------------------------------------------------

    def _by_stripes(self, shards: Sequence[jax.Array]) -> list[jax.Array]:
        """The outputs: settled stripe by stripe and put side by side, or added up and then settled.

        Where nothing is scattered, a stripe is sent for when the one before the last is done: a compiler left to itself
        sends for all at once. What is scattered keeps its own order.
        """
        stripes, start, done = self.overlap.stripes, 0, []
        for size in stripes.sizes:
            region = {stripes.dim: (start, size)}
            stripe = [part_of(x, self._dims_of(number), region) for number, x in enumerate(shards)]
            if len(done) > 1 and not self.overlap.scatters:
                stripe = [self._held(number, x, done[-2]) for number, x in enumerate(stripe)]
            done.append(self._stripe(self._values(stripe), size))
            start += size
        return [self._joined(number, parts) for number, parts in enumerate(zip(*done))]

    def _held(self, number: int, x: jax.Array, before: Sequence) -> jax.Array:
        """An operand's stripe, to be sent once what is before it is there."""
        if number not in self.overlap.gathers or self._waits(number):
            return x
        return lax.optimization_barrier((x, jax.tree.leaves(before)))[0]

    def _stripe(self, values: "dict[int, _Value]", size: int) -> "list[jax.Array | dict[int, jax.Array]]":
        """Every output's stripe, or its products where it does not have the dimension."""
        return [
            self._settled(number, values, size)
            if self.overlap.stripes.dim in output.spec.dims
            else {product: values[product].block({}) for product in output.products}
            for number, output in enumerate(self.routine.outputs)
        ]

    def _joined(self, number: int, parts: Sequence) -> jax.Array:
        spec, dim = self.routine.outputs[number].spec, self.overlap.stripes.dim
        if dim in spec.dims:
            return jnp.concatenate(parts, spec.dims.index(dim))
        return self._settled(number, {p: _Whole(self, p, _added([each[p] for each in parts])) for p in parts[0]})

    def _dims_of(self, move: int) -> tuple[str, ...]:
        return self.routine.moves[move].spec.dims

    def _stop(self, number: int) -> int | None:
        """Where a move's ring begins among its steps."""
        if number not in self.overlap.gathers:
            return None
        return len(self.routine.moves[number].steps) - len(self.spans[number].steps)

    def _waits(self, number: int) -> bool:
        """Whether a travelling operand is gathered once, before everything else: it is needed whole."""
        ring, stripes = self.overlap.gathers.get(number), self.overlap.stripes
        return ring is not None and not ring.axes and (stripes is None or stripes.dim not in self._dims_of(number))

    # -- all-gather, then einsum ---------------------------------------------------------------------------------------

    def _transfer(self, number: int, shard: jax.Array) -> RingTransfer:
        """The journey of a move's operand; a shard may be a part of what a device holds."""
        span, move = self.spans[number], self.routine.moves[number]
        first = self.chains.moves[number].first + self._stop(number)
        sizes = dict(zip(span.shard.dims, shard.shape))
        return RingTransfer(span, self.overlap.gathers[number], self.mesh, sizes, first, self.inputs[move.source].wire)

    def _gathered(self, number: int, shard: jax.Array) -> jax.Array:
        transfer = self._transfer(number, shard)
        streams = self._streams(transfer, shard)
        whole = blank([transfer.whole(dim) for dim in transfer.dims], shard.dtype)  # every place is written
        for stream in streams:
            regions, chunks = stream.wave(0, [])
            whole = put(whole, transfer.dims, regions[0], chunks[0])
        return whole

    def _streams(self, transfer: RingTransfer, shard: jax.Array) -> list[ChunkStream]:
        ring = transfer.ring
        parts = ring_parts(ring, transfer.shard[ring.split] if ring.split else 1)
        return [ChunkStream(transfer, shard.astype(transfer.wire), shard.dtype, *part) for part in parts]

    def _looped(self, number: int, shard: jax.Array, held: Sequence[jax.Array]) -> "dict[int, _Value]":
        """The products of an operand that travels while it is multiplied."""
        transfer, products = self._transfer(number, shard), self._products_of(number)
        others = [self._other(product, number, held) for product in products]
        accumulators = [Accumulator(self, product, number, transfer, other) for product, other in zip(products, others)]
        streams = self._streams(transfer, shard)
        # The TPU compiler keeps the order that it is given and hides more where it sees every step; others hold fewer
        # chunks at once in a loop, which can be had where the same wave comes again and again.
        axes = transfer.ring.axes
        if len(axes) == 1 and (not target.is_tpu() or self.mesh[axes[0]] > LONGEST):
            RingLoop(streams, accumulators, others).run()
        else:
            self._wave_by_wave(streams, accumulators, others)
        return {
            product: _Whole(self, product, accumulator.value()) for product, accumulator in zip(products, accumulators)
        }

    def _wave_by_wave(
        self, streams: Sequence[ChunkStream], accumulators: Sequence[Accumulator], others: Sequence
    ) -> None:
        """Multiply chunks as they arrive, from all parts in turn.

        The permutes of the next wave wait for the products of the one before: left to itself a compiler has been seen
        to send everything first, and to multiply then.
        """
        for wave in range(max(len(stream.waves) for stream in streams)):
            before = [accumulator.latest for accumulator in accumulators if accumulator.latest is not None]
            for stream in streams:
                stream.send(wave + 1, before)
            for stream in streams:
                regions, chunks = stream.wave(wave, before)
                for accumulator, other in zip(accumulators, others) if chunks else ():
                    accumulator.add(regions, chunks, other)

    def _products_of(self, move: int) -> list[int]:
        return [number for number, product in enumerate(self.routine.products) if move in (product.left, product.right)]

    def _other(self, product: int, move: int, held: Sequence[jax.Array]) -> jax.Array | None:
        """What a travelling operand is multiplied with."""
        found = self.routine.products[product]
        other = found.right if found.left == move else found.left
        return None if other is None else held[other]

    def in_order(self, product: int, move: int, x: jax.Array, other: jax.Array | None) -> tuple[jax.Array, ...]:
        pair = (x, other) if self.routine.products[product].left == move else (other, x)
        return tuple(each for each in pair if each is not None)

    def _plain(self, number: int, held: Sequence[jax.Array]) -> "_Value":
        """A product without a travelling operand."""
        if number not in self.scattered:
            return _Whole(self, number, self.product(number, held))
        product = self.routine.products[number]
        operands = [held[move] for move in (product.left, product.right) if move is not None]
        if product.passes_through:
            return _Whole(self, number, self.multiply(number, *operands))
        return _Product(self, number, tuple(operands))

    # -- einsum, then reduce-scatter -----------------------------------------------------------------------------------

    def _settled(self, number: int, values: "dict[int, _Value]", stripe: int | None = None) -> jax.Array:
        output, tensor = self.routine.outputs[number], self.outputs[number]
        if number in self.overlap.scatters:
            total = self._scattered(number, [values[product] for product in output.products], stripe)
            return self.arrange(total, self._dims(number), output.spec).astype(tensor.dtype)
        whole = {}
        for product in output.products:
            whole[product] = values[product].block({})
            if product in self._looped_products():  # those without a ring are there already
                whole[product] = self.send_product(product, whole[product])
        return self.output(number, whole)

    def _looped_products(self) -> set[int]:
        return {p for number, ring in self.overlap.gathers.items() if ring.axes for p in self._products_of(number)}

    def _dims(self, output: int) -> tuple[str, ...]:
        return self.routine.products[self.routine.outputs[output].products[0]].spec.dims

    def _scattered(self, number: int, values: "Sequence[_Value]", stripe: int | None) -> jax.Array:
        """The sum of products over devices, each device its shard, and the steps behind that."""
        span, tensor = scatter_of(self.routine, number), self.outputs[number]
        chain, ring = settling(self.routine, number), self.overlap.scatters[number]
        first = self._first_settling(number)
        shard = local_shape(span.shard, self.sizes, self.mesh)
        shard |= {} if stripe is None else {self.overlap.stripes.dim: stripe}
        transfer = RingTransfer(span, ring, self.mesh, shard, first, tensor.wire)
        pieces = []
        for part, start, size in ring_parts(ring, shard[ring.split] if ring.split else 1):
            summand = lambda *where: self._summand(transfer, values, *where, start, size)  # noqa: B023, E731
            # Stripes have other products to hide a sum's way behind, and need none to be made apart.
            alone = ring.schedule if stripe is None else ""
            chunk = reduce_back(transfer, transfer.hops(part), summand, tensor.wire, alone)
            pieces.append(spread(transfer, part, chunk.astype(tensor.wire)))
        at = span.shard.dims.index(ring.split) if ring.split else 0
        total = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, at)
        behind = chain[len(span.steps) :]
        return self.send(Chain(behind, first + len(span.steps)), total, tensor.wire)

    def _summand(self, transfer: RingTransfer, values, offset, zero, start: int, size: int) -> jax.Array:
        region = transfer.divided(transfer.block(offset, zero), start, size)
        first, *rest = (value.block(region) for value in values)
        return sum(rest, first)

    def _first_settling(self, number: int) -> int:
        output = self.routine.outputs[number]
        product = self.routine.products[output.products[0]]
        if len(output.products) == 1 and product.steps:
            return self.chains.products[output.products[0]].first
        return self.chains.outputs[number].first


@dataclass(frozen=True)
class _Whole:
    """A product that is there already."""

    execution: LoopedExecution
    number: int
    value: jax.Array

    def block(self, region: Region) -> jax.Array:
        """A part of it."""
        return part_of(self.value, self.execution.routine.products[self.number].einsum.after.dims, region)


@dataclass(frozen=True)
class _Product:
    """A product that is worked out part by part."""

    execution: LoopedExecution
    number: int
    operands: tuple[jax.Array, ...]

    def block(self, region: Region) -> jax.Array:
        """A part of it."""
        einsum = self.execution.routine.products[self.number].einsum
        specs = [einsum.before, einsum.other]
        parts = [part_of(x, spec.dims, region) for x, spec in zip(self.operands, specs)]
        return self.execution.multiply(self.number, *parts)


def _added(values: Sequence[jax.Array]) -> jax.Array:
    first, *rest = values
    return sum(rest, first)


_Value = _Whole | _Product
