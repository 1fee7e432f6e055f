"""Lowering `looped`: gathers and reduce-scatters run inside the einsum, chunk by chunk, by permutes between neighbours.

All-gather, then einsum: while the chunk in hand is multiplied, permutes bring the next ones. What a chunk is of decides
what its product is: of a free dimension, a part of the result; of a summed one, a summand; of a shared one, a part of
the result from a part of the other operand. Einsum, then reduce-scatter: the sum travels, and each device adds the
product for the device that it is for. Several products of one travelling operand share its ring, and several products
of one sum share its travelling sum.

Source: Wang et al. 2023, *Overlap Communication with Dependent Computation via Decomposition* (ASPLOS), §5; Pope et al.
2022 (arXiv 2211.05102), §3.5.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.collectives.chunks import Journey, Region, collect, part_of, put, reduce_back, spread
from gspmd.collectives.loops import Loops, gather_of, local_shape, scatter_of, settling
from gspmd.collectives.lower import Execution
from gspmd.collectives.plan import Routine
from gspmd.collectives.walk import Part


class LoopedExecution(Execution):
    """Runs a routine with the rings of `loops`; what has no ring runs as in lowering `blocking`."""

    def __init__(self, routine: Routine, inputs, outputs, sizes, mesh, precision, loops: Loops):
        super().__init__(routine, inputs, outputs, sizes, mesh, precision)
        self.loops = loops
        self.travels = {number: gather_of(routine.moves[number]) for number in loops.gathers}
        self.scattered = {product for number in loops.scatters for product in routine.outputs[number].products}

    def __call__(self, *pieces: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """The outputs' pieces, and those of the operands as they are kept: a travelling one as it was before."""
        moves = range(len(self.routine.moves))
        shards = [self.move(number, pieces, self._stop(number)) for number in moves]
        whole = {number: self._gathered(number, shards[number]) for number in moves if self._waits(number)}
        shards_of = lambda some: [whole.get(number, x) for number, x in enumerate(some)]  # noqa: E731
        if self.loops.stripes is None:
            values = self._values(shards_of(shards))
            return [self._settled(number, values) for number in range(len(self.routine.outputs))], shards
        return self._by_stripes(shards_of(shards)), shards

    def _values(self, shards: Sequence[jax.Array]) -> "dict[int, _Value]":
        """Every product of what the operands have arrived as, or of a stripe of it."""
        held = list(shards)
        values: dict[int, _Value] = {}
        for number, ring in self.loops.gathers.items():
            if not ring.axes and not self._waits(number):
                held[number] = self._gathered(number, shards[number])
        for number, ring in self.loops.gathers.items():
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
        stripes, start, done = self.loops.stripes, 0, []
        for size in stripes.sizes:
            region = {stripes.dim: (start, size)}
            stripe = [part_of(x, self._dims_of(number), region) for number, x in enumerate(shards)]
            if len(done) > 1 and not self.loops.scatters:
                stripe = [self._held(number, x, done[-2]) for number, x in enumerate(stripe)]
            done.append(self._stripe(self._values(stripe), size))
            start += size
        return [self._joined(number, parts) for number, parts in enumerate(zip(*done))]

    def _held(self, number: int, x: jax.Array, before: Sequence) -> jax.Array:
        """An operand's stripe, to be sent once what is before it is there."""
        if number not in self.loops.gathers or self._waits(number):
            return x
        return lax.optimization_barrier((x, jax.tree.leaves(before)))[0]

    def _stripe(self, values: "dict[int, _Value]", size: int) -> "list[jax.Array | dict[int, jax.Array]]":
        """Every output's stripe, or its products where it does not have the dimension."""
        return [
            self._settled(number, values, size)
            if self.loops.stripes.dim in output.spec.dims
            else {product: values[product].block({}) for product in output.products}
            for number, output in enumerate(self.routine.outputs)
        ]

    def _joined(self, number: int, parts: Sequence) -> jax.Array:
        spec, dim = self.routine.outputs[number].spec, self.loops.stripes.dim
        if dim in spec.dims:
            return jnp.concatenate(parts, spec.dims.index(dim))
        return self._settled(number, {p: _Whole(self, p, _added([each[p] for each in parts])) for p in parts[0]})

    def _dims_of(self, move: int) -> tuple[str, ...]:
        return self.routine.moves[move].spec.dims

    def _stop(self, number: int) -> int | None:
        """Where a move's ring begins among its steps."""
        if number not in self.loops.gathers:
            return None
        return len(self.routine.moves[number].steps) - len(self.travels[number].steps)

    def _waits(self, number: int) -> bool:
        """Whether a travelling operand is gathered once, before everything else: it is needed whole."""
        ring, stripes = self.loops.gathers.get(number), self.loops.stripes
        return ring is not None and not ring.axes and (stripes is None or stripes.dim not in self._dims_of(number))

    # -- all-gather, then einsum ---------------------------------------------------------------------------------------

    def _journey(self, number: int, shard: jax.Array) -> Journey:
        """The journey of a move's operand; a shard may be a part of what a device holds."""
        travel, move = self.travels[number], self.routine.moves[number]
        first = self.first.moves[number] + self._stop(number)
        sizes = dict(zip(travel.shard.dims, shard.shape))
        return Journey(travel, self.loops.gathers[number], self.mesh, sizes, first, self.inputs[move.source].wire)

    def _gathered(self, number: int, shard: jax.Array) -> jax.Array:
        return _Gather(self, number, shard).run({}, keep=True)[1]

    def _looped(self, number: int, shard: jax.Array, held: Sequence[jax.Array]) -> "dict[int, _Value]":
        """The products of an operand that travels while it is multiplied."""
        others = {product: self._other(product, number, held) for product in self._products_of(number)}
        values, _ = _Gather(self, number, shard).run(others)
        return {product: _Whole(self, product, value) for product, value in values.items()}

    def _products_of(self, move: int) -> list[int]:
        return [number for number, product in enumerate(self.routine.products) if move in (product.left, product.right)]

    def _other(self, product: int, move: int, held: Sequence[jax.Array]) -> jax.Array | None:
        """What a travelling operand is multiplied with."""
        found = self.routine.products[product]
        other = found.right if found.left == move else found.left
        return None if other is None else held[other]

    def _in_order(self, product: int, move: int, x: jax.Array, other: jax.Array | None) -> tuple[jax.Array, ...]:
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
        if number in self.loops.scatters:
            total = self._scattered(number, [values[product] for product in output.products], stripe)
            return self.arrange(total, self._dims(number), output.spec).astype(tensor.dtype)
        whole = {}
        for product in output.products:
            whole[product] = values[product].block({})
            if product in self._looped_products():  # what `product` does behind the einsum
                steps = self.routine.products[product].steps
                first = self.first.products[product] + 1
                whole[product] = self.send(steps, whole[product], tensor.wire, first)
        return self.output(number, whole)

    def _looped_products(self) -> set[int]:
        return {p for number, ring in self.loops.gathers.items() if ring.axes for p in self._products_of(number)}

    def _dims(self, output: int) -> tuple[str, ...]:
        return self.routine.products[self.routine.outputs[output].products[0]].spec.dims

    def _scattered(self, number: int, values: "Sequence[_Value]", stripe: int | None) -> jax.Array:
        """The sum of products over devices, each device its shard, and the steps behind that."""
        travel, tensor = scatter_of(self.routine, number), self.outputs[number]
        chain, ring = settling(self.routine, number), self.loops.scatters[number]
        first = self._first_settling(number)
        shard = local_shape(travel.shard, self.sizes, self.mesh)
        shard |= {} if stripe is None else {self.loops.stripes.dim: stripe}
        journey = Journey(travel, ring, self.mesh, shard, first, tensor.wire)
        pieces = []
        for part, start, size in ring.parts(shard[ring.split] if ring.split else 1):
            summand = lambda offset: self._summand(journey, values, offset, start, size)  # noqa: B023, E731
            # Stripes have other products to hide a sum's way behind, and need none to be made apart.
            alone = ring.schedule if stripe is None else ""
            chunk = reduce_back(journey, journey.hops(part), summand, tensor.wire, alone)
            pieces.append(spread(journey, part, chunk.astype(tensor.wire)))
        at = travel.shard.dims.index(ring.split) if ring.split else 0
        total = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, at)
        behind = chain[len(travel.steps) :]
        return self.send(behind, total, tensor.wire, first + len(travel.steps))

    def _summand(self, journey: Journey, values, offset, start: int, size: int) -> jax.Array:
        region = journey.divided(journey.block(offset), start, size)
        first, *rest = (value.block(region) for value in values)
        return sum(rest, first)

    def _first_settling(self, number: int) -> int:
        output = self.routine.outputs[number]
        product = self.routine.products[output.products[0]]
        if len(output.products) == 1 and product.steps:
            return self.first.products[output.products[0]] + (not product.passes_through)
        return self.first.outputs[number]


class _Gather:
    """One travelling operand: its chunks as they arrive, multiplied, or put together."""

    def __init__(self, execution: LoopedExecution, number: int, shard: jax.Array):
        self.execution, self.number = execution, number
        self.dtype = shard.dtype
        self.journey = execution._journey(number, shard)
        self.shard = shard.astype(self.journey.wire)

    def run(self, others: dict[int, jax.Array | None], keep: bool = False):
        """The products with `others`, by number, and, to keep, the whole of the operand."""
        landings = {product: self._landing(product, other) for product, other in others.items()}
        sizes = tuple(self.journey.whole(dim) for dim in self.journey.dims)
        whole = lax.empty(sizes, self.dtype) if keep else None  # every place of it is written
        for regions, chunks in self._arrivals(lambda: [landing.latest for landing in landings.values() if landing.latest is not None]):
            for product, landing in landings.items():
                landing.add(regions, chunks, others[product])
            if keep:
                for region, chunk in zip(regions, chunks):
                    whole = put(whole, self.journey.dims, region, chunk)
        return {product: landing.value() for product, landing in landings.items()}, whole

    def _landing(self, product: int, other: jax.Array | None) -> "_Landing":
        return _Landing(self.execution, product, self.number, self.journey, other)

    def _arrivals(self, latest: Callable[[], list]) -> Iterator[tuple[list[Region], list[jax.Array]]]:
        """The chunks as they arrive, wave by wave, from all parts in turn: where they belong, and what they are.

        The permutes of the next wave but one wait for the products of this one (`latest`): left to itself a compiler
        has been seen to send everything first, and to multiply then.
        """
        ways = [_Way(self.journey, self.shard, *part) for part in self._parts()]
        before: list = []
        for wave in range(max(len(way.waves) for way in ways)):
            for way in ways:
                way.send(wave + 1, before)
            before = latest()
            for way in ways:
                if wave < len(way.waves):
                    regions, chunks = way.arrived_in(wave)
                    yield regions, [chunk.astype(self.dtype) for chunk in chunks]

    def _parts(self) -> list[tuple[Part, int, int]]:
        ring = self.journey.ring
        return ring.parts(self.journey.shard[ring.split] if ring.split else 1)


class _Way:
    """One part of a travelling operand on its way round."""

    def __init__(self, journey: Journey, shard: jax.Array, part: Part, start: int, size: int):
        self.journey, self.start, self.size = journey, start, size
        self.hops = journey.hops(part)
        self.arrived = {0: collect(journey, part, part_of(shard, journey.dims, journey.divided({}, start, size)))}
        self.waves = [[0], *([n for n, _ in some] for _, some in groupby(enumerate(self.hops, 1), lambda n: n[1].wave))]

    def send(self, wave: int, before: Sequence[jax.Array]) -> None:
        """Bring the chunks of a wave, once everything in `before` is there."""
        for number in self.waves[wave] if wave < len(self.waves) else ():
            hop = self.hops[number - 1]
            chunk = self.arrived[hop.source]
            chunk = lax.optimization_barrier((chunk, *before))[0] if before else chunk
            self.arrived[number] = self.journey.send(chunk, hop)

    def arrived_in(self, wave: int) -> tuple[list[Region], list[jax.Array]]:
        """The chunks of a wave, and where they belong."""
        numbers = self.waves[wave]
        offsets = [self.hops[number - 1].offset if number else {} for number in numbers]
        regions = [self.journey.divided(self.journey.block(offset), self.start, self.size) for offset in offsets]
        return regions, [self.arrived[number] for number in numbers]


class _Landing:
    """A product of a travelling operand, as its chunks arrive."""

    def __init__(self, execution: LoopedExecution, product: int, move: int, journey: Journey, other):
        self.execution, self.number, self.move, self.journey = execution, product, move, journey
        found = execution.routine.products[product]
        self.dims = found.einsum.after.dims
        self.other_dims = () if found.right is None else self._spec_of_other(found).dims
        sizes = dict(zip(self.other_dims, () if other is None else other.shape))
        sizes |= {dim: journey.whole(dim) for dim in journey.dims}
        self.shape = tuple(sizes[dim] for dim in self.dims)
        looped = set(journey.block({}))
        self.cut = looped | ({journey.ring.split} if journey.ring.split else set())
        self.adds = any(dim not in self.dims for dim in self.cut)
        self.placed = any(dim in self.dims for dim in looped)
        self.latest: jax.Array | None = None
        self.result: jax.Array | None = None
        self.parts: dict[tuple, jax.Array] = {}

    def _spec_of_other(self, found):
        return found.einsum.other if found.left == self.move else found.einsum.before

    def add(self, regions: Sequence[Region], chunks: Sequence[jax.Array], other: jax.Array | None) -> None:
        """Multiply what has arrived together; as one product where they need the same of the other operand."""
        shared = not any(dim in self.other_dims for dim in self.cut)
        along = next((dim for dim in self.journey.block({}) if dim in self.dims), None)
        if len(chunks) > 1 and shared and along:
            at = self.journey.dims.index(along)
            together = self._multiply(jnp.concatenate(chunks, at), other)
            values = jnp.split(together, len(chunks), self.dims.index(along))
        else:
            values = [self._multiply(x, self._part(other, region)) for x, region in zip(chunks, regions)]
        for region, value in zip(regions, values):
            self._land(region, value)

    def _part(self, other: jax.Array | None, region: Region) -> jax.Array | None:
        return None if other is None else part_of(other, self.other_dims, region)

    def _multiply(self, chunk: jax.Array, other: jax.Array | None) -> jax.Array:
        return self.execution.multiply(self.number, *self.execution._in_order(self.number, self.move, chunk, other))

    def _land(self, region: Region, value: jax.Array) -> None:
        if not self.placed:  # nothing but static parts, each with its own sum
            key = tuple((dim, region[dim][0]) for dim in self.dims if dim in region)
            self.parts[key] = self.latest = self.parts[key] + value if key in self.parts else value
            return
        if self.result is None:
            start = jnp.zeros if self.adds else lax.empty  # every place is written, but only added to where sums are
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

    def value(self) -> jax.Array:
        """The product with the whole operand."""
        if self.placed:
            return self.result
        if len(self.parts) == 1:
            return next(iter(self.parts.values()))
        return jnp.concatenate(list(self.parts.values()), self.dims.index(self.journey.ring.split))


# -- what a travelling sum takes its summands from -----------------------------------------------------------------------


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
