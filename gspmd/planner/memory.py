"""The peak memory of a routine in bytes, from the lifetimes and memory orders of its buffers.

Operands and results are held for the whole run. Every step in between makes a buffer, which lives until the last step
that reads the buffer. Until a result is written, its memory is used for other buffers. Compiled programs hold more
memory where data are needed in a different order of dimensions:

- collectives gather and reduce-scatter along the first dimension in memory, so for any other dimension the tensor is
  transposed before and after the collective;
- an all-to-all cuts its operand into parts, sends the parts, and joins the parts that arrive;
- in each operand of a product, the batch dimensions must stand together, and so must the free dimensions and the
  contracted dimensions. The product's result has the order batch, left, right.

Slices, sums and joined parts are written directly in the order in which they are needed next, at no cost.

Buffers are counted as XLA's buffer assignment places them on host devices, under lowering `blocking`. If a ring gathers
an operand, only the chunks that a device holds at a time are counted, without copies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from gspmd.annotate.spec import Spec
from gspmd.hardware.dtypes import itemsize
from gspmd.planner.overlap import SCHEDULES, Overlap
from gspmd.planner.spans import ring_gather
from gspmd.planner.steps import Move, Product, Routine, RoutineOutput, Step, Tensor


@dataclass(eq=False)
class LiveBuffer:
    """A buffer in memory.

    Attributes:
        size: the size in bytes.
        made: the time of the first use.
        last: the time of the last use.
    """

    size: int
    made: int = 0
    last: int = 0

    def overlaps(self, other: "LiveBuffer") -> bool:
        """Return whether both buffers are in use at the same time."""
        return self.made <= other.last and other.made <= self.last


@dataclass
class Intermediate:
    """A tensor between two steps, and its memory.

    Attributes:
        spec: the spec of the tensor.
        buffers: the memory of the tensor. It is empty for an operand that no step has changed yet, since operands are
            counted separately.
        front: the dimension that comes first in memory; empty if this is the tensor's first dimension.
        read: the tensors from which this tensor is computed.
        fused: whether an XLA fusion makes the tensor. A fusion can write its result in any memory order at no cost. If
            another fusion reads the tensor, that fusion computes the tensor again, and the tensor is never stored as a
            whole.
        level: the length of the longest chain of instructions that ends here. Instructions run level by level.
    """

    spec: Spec
    buffers: tuple[LiveBuffer, ...] = ()
    front: str = ""
    read: "tuple[Intermediate, ...]" = ()
    fused: bool = False
    level: int = 0


class Footprint:
    """The buffers of one routine in the order of execution."""

    def __init__(
        self,
        routine: Routine,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        sizes: Mapping[str, int],
        mesh: Mapping[str, int],
        overlap: Overlap = Overlap(),  # noqa: B008  (it is immutable)
    ):
        self.overlap = overlap
        self.routine, self.inputs, self.outputs, self.sizes, self.mesh = routine, inputs, outputs, sizes, mesh
        self.made: list[Intermediate] = []
        self.output_of = {number: n for n, output in enumerate(routine.outputs) for number in output.products}

    def peak(self) -> int:
        """Return the peak number of bytes of operands, results and intermediate buffers together."""
        routine = self.routine
        moved = [self._ready(number, move) for number, move in enumerate(routine.moves)]
        products = [
            self._chain(product.steps, self._local_einsum(number, product, moved), self._dtype_of(number, product))
            for number, product in enumerate(routine.products)
        ]
        results = [self._result(number, output, products) for number, output in enumerate(routine.outputs)]
        used = [self.inputs[source] for source in sorted({move.source for move in routine.moves})]
        given = sum(self._bytes(tensor.spec, tensor.dtype) for tensor in used)
        return given + sum(buffer.size for buffer in results) + self._between(results)

    def _between(self, results: Sequence[LiveBuffer]) -> int:
        """Return the peak number of bytes of the intermediate buffers that do not fit into the memory of a result.

        A buffer can use the memory of a result while no other buffer uses that memory. Memory is assigned to the
        largest buffers first.
        """
        self._schedule(results)
        tenants = {id(result): [result] for result in results}
        buffers = [buffer for value in self.made for buffer in value.buffers if id(buffer) not in tenants]
        homeless: list[LiveBuffer] = []
        for buffer in sorted(buffers, key=lambda b: -b.size):
            fitting = (tenants[id(r)] for r in results if buffer.size <= r.size)
            place = next((place for place in fitting if not any(map(buffer.overlaps, place))), homeless)
            place.append(buffer)
        times = {buffer.made for buffer in homeless}
        return max((sum(b.size for b in homeless if b.made <= time <= b.last) for time in times), default=0)

    def _schedule(self, results: Sequence[LiveBuffer]) -> None:
        """Set the times of all buffers.

        Instructions run level by level, so the moves of several operands interleave.
        """
        self.made.sort(key=lambda value: value.level)
        for time, value in enumerate(self.made):
            for buffer in value.buffers:
                buffer.made = buffer.last = time
            for buffer in (buffer for source in value.read for buffer in source.buffers):
                buffer.last = time
        for buffer in results:
            buffer.last = len(self.made)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _make(self, spec: Spec, dtype: str, *read: Intermediate, parts: int = 1, front: str = "") -> Intermediate:
        """Add and return the output of an instruction; the tensors `read` are held while the instruction runs."""
        made = tuple(LiveBuffer(self._bytes(spec, dtype) // parts) for _ in range(parts))
        self.made.append(Intermediate(spec, made, front, read, level=1 + max(value.level for value in read)))
        return self.made[-1]

    def _fuse(self, spec: Spec, dtype: str, *read: Intermediate, parts: int = 1, front: str = "") -> Intermediate:
        """Add and return the output of a fusion; if a fusion reads the output of another fusion, the two become one."""
        gone = {id(value) for value in read if value.fused}
        self.made = [value for value in self.made if id(value) not in gone]
        sources = [source for value in read for source in (value.read if value.fused else (value,))]
        value = self._make(spec, dtype, *sources, parts=parts, front=front)
        value.fused = True
        return value

    def _chain(self, steps: Sequence[Step], value: Intermediate, dtype: str) -> Intermediate:
        for step in steps:
            value = self._step(step, value, dtype)
        return value

    def _step(self, step: Step, value: Intermediate, dtype: str) -> Intermediate:
        if step.kind in ("all-gather", "reduce-scatter"):
            changed = next(d for d, old, new in zip(step.before.dims, step.before.axes, step.after.axes) if old != new)
            value = self._with_front(value, changed, dtype)
            return self._make(step.after, dtype, value, front=value.front)
        value = self._in_order(value, dtype)
        if step.kind == "all-to-all":
            return self._all_to_all(step, value, dtype)
        return self._fuse(step.after, dtype, value) if step.kind == "slice" else self._make(step.after, dtype, value)

    def _all_to_all(self, step: Step, value: Intermediate, dtype: str) -> Intermediate:
        parts = prod(self.mesh[axis] for axis in step.axes)
        cut = self._fuse(step.before, dtype, value, parts=parts)
        arrived = self._make(step.before, dtype, cut, parts=parts)
        pairs = zip(step.before.dims, step.before.axes, step.after.axes)
        split = next(dim for dim, old, new in pairs if len(new) > len(old))
        if split == step.before.dims[-1]:  # parts of rows are joined first, and then reordered
            arrived = self._make(step.after, dtype, arrived)
        return self._fuse(step.after, dtype, arrived)

    def _with_front(self, value: Intermediate, dim: str, dtype: str) -> Intermediate:
        """Return a tensor with the dimension `dim` first in memory, before all other dimensions longer than 1."""
        leads = next((d for d in value.spec.dims if self._local(value.spec, d) > 1), dim)
        front = "" if leads == dim else dim
        return value if front == value.front else self._copied(value, dtype, front)

    def _in_order(self, value: Intermediate, dtype: str) -> Intermediate:
        return self._copied(value, dtype) if value.front else value

    def _copied(self, value: Intermediate, dtype: str, front: str = "") -> Intermediate:
        return self._fuse(value.spec, dtype, value, front=front)

    # -- products and results ------------------------------------------------------------------------------------------

    def _local_einsum(self, number: int, product: Product, moved: Sequence[Intermediate]) -> Intermediate:
        """Add and return the result of a local einsum."""
        left, after, dtype = moved[product.left], product.einsum.after, self._dtype_of(number, product)
        if product.passes_through:
            return self._ordered(left, after.dims, dtype)
        if product.right is None:
            return self._make(after, dtype, left)
        made = self._make(after, dtype, left, moved[product.right])
        return made if after.dims in self._order(product).results else self._fuse(after, dtype, made)

    def _ready(self, number: int, move: Move) -> Intermediate:
        """Add and return an operand after its move, in the memory order in which its products read it."""
        dtype, given = self._given(number), Intermediate(move.steps[0].before if move.steps else move.spec)
        if number in self.overlap.gathers:
            span = ring_gather(move)
            shard = self._chain(move.steps[: -len(span.steps)], given, dtype)
            value = self._make(span.whole, dtype, shard)
            value.buffers = tuple(LiveBuffer(int(buffer.size * self._share_held(number))) for buffer in value.buffers)
            return value
        value = self._chain(move.steps, given, dtype)
        wide = {dim for dim in value.spec.dims if self._local(value.spec, dim) > 1}
        scattered = any(
            self._order(product).scattered(side, wide)
            for product in self.routine.products
            for side, used in enumerate(product.operands)
            if used == number and product.right is not None
        )
        return self._copied(value, dtype) if scattered or value.front else value

    def _share_held(self, move: int) -> float:
        """Return the fraction of a gathered operand that a device holds at a time.

        With a loop round a ring, the device holds two chunks, or four if every chunk is sent in both directions.
        Without a loop, it holds two stripes, or the whole operand if the operand is not cut into stripes.
        """
        ring, stripes = self.overlap.gathers[move], self.overlap.stripes
        if not ring.axes:
            if stripes is None or stripes.dim not in self.routine.moves[move].spec.dims:
                return 1.0
            return min(1.0, 2 * max(stripes.sizes) / sum(stripes.sizes))
        both_ways = 2 if SCHEDULES[ring.schedule].both_ways else 1  # under `halves` each direction has half a chunk
        return min(1.0, 2 * both_ways / prod(self.mesh[axis] for axis in ring.axes))

    def _order(self, product: Product) -> "_Order":
        left, right = (self.routine.moves[move].spec.dims for move in product.operands)
        return _Order(left, right, product.einsum.after.dims)

    def _given(self, move: int) -> str:
        return self.inputs[self.routine.moves[move].source].dtype

    def _dtype_of(self, number: int, product: Product) -> str:
        return self._given(product.left) if product.passes_through else self.outputs[self.output_of[number]].dtype

    def _result(self, number: int, output: RoutineOutput, products: Sequence[Intermediate]) -> LiveBuffer:
        dtype, summands = self.outputs[number].dtype, [products[product] for product in output.products]
        value = summands[0]
        if len(summands) > 1:
            value = self._fuse(value.spec, dtype, *summands)
        value = self._in_order(self._chain(output.steps, value, dtype), dtype)
        value = self._ordered(value, tuple(dim for dim in output.spec.dims if dim in value.spec.dims), dtype)
        if len(value.spec.dims) < len(output.spec.dims) or len(value.buffers) != 1:
            value = self._fuse(output.spec, dtype, value)
        return value.buffers[0]

    def _ordered(self, value: Intermediate, dims: tuple[str, ...], dtype: str) -> Intermediate:
        """Return a tensor with its dimensions in the order `dims`, after adding a copy if this order is a new one."""
        if value.spec.dims == dims:
            return value
        spec = Spec(dims, tuple(value.spec.axes_of(dim) for dim in dims), value.spec.partial)
        return self._fuse(spec, dtype, value)

    def _bytes(self, spec: Spec, dtype: str) -> int:
        return prod(self._local(spec, dim) for dim in spec.dims) * itemsize(dtype)

    def _local(self, spec: Spec, dim: str) -> int:
        return self.sizes[dim] // prod(self.mesh[axis] for axis in spec.axes_of(dim))


class _Order:
    """The memory orders in which a product reads its operands and writes its result."""

    def __init__(self, left: Sequence[str], right: Sequence[str], after: Sequence[str]):
        self.sides = left, right
        shared = set(left) & set(right)
        self.batch = [dim for dim in after if dim in shared]
        self.contracted = sorted(shared - set(after))  # in the order of `jnp.einsum`
        free = [[dim for dim in side if dim not in shared] for side in self.sides]
        if self.batch and self.contracted:  # in the order of `batched` in lowerings/local_einsum.py
            self.contracted = [dim for dim in left if dim in shared and dim not in after]
            free = [[dim for dim in after if dim in side] for side in free]
        self.free = free
        self.results = [(*self.batch, *free[0], *free[1])]
        if not (self.batch and self.contracted):
            self.results.append((*self.batch, *free[1], *free[0]))

    def scattered(self, side: int, wide: set[str]) -> bool:
        """Return whether an operand must be copied before it is multiplied.

        `side` is 0 for the left operand and 1 for the right. Dimensions that are not in `wide` have length 1.
        """
        dims = (self.batch, self.contracted, self.free[side])
        batch, contracted, free = ([dim for dim in each if dim in wide] for each in dims)
        orders = [free + contracted, contracted + free]
        if max(len(contracted), len(free)) > 1:  # several dimensions are merged into one, in this order
            orders = orders[side : side + 1]
        return [dim for dim in self.sides[side] if dim in wide] not in [batch + order for order in orders]
