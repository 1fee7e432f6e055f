"""Steps as they run inside a shard_map body: one public JAX collective each, under a scope that names the step."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.annotate.spec import Spec
from gspmd.collectives import tpu
from gspmd.collectives.batched import batched
from gspmd.collectives.plan import Routine, Step


def emit(
    steps: Sequence[Step], x: jax.Array, mesh: Mapping[str, int], *, reduce: str = "sum", first: int = 0
) -> jax.Array:
    """Run steps on a device's piece of a tensor, inside a shard_map over the whole mesh.

    Args:
        steps: a chain, as `moves.move` returns it.
        x: the local piece, its dimensions in the order of the first step's `before`.
        mesh: mesh axis sizes.
        reduce: what an all-reduce computes, `"sum"` or `"max"`.
        first: number of the first step in its plan; scopes are numbered from it.
    """
    for number, step in enumerate(steps, first):
        with jax.named_scope(scope(number, step)):
            # XLA:CPU ends the process, or hangs, in a collective of no elements.
            x = _EMIT[step.kind](step, x, mesh, reduce) if x.size else _nothing(step, x, mesh)
    return x


def _nothing(step: Step, x: jax.Array, mesh: Mapping[str, int]) -> jax.Array:
    """What a step makes of a piece without elements."""
    parts = [
        (prod(mesh[axis] for axis in old), prod(mesh[axis] for axis in new))
        for old, new in zip(step.before.axes, step.after.axes)
    ]
    return jnp.zeros([size * before // after for size, (before, after) in zip(x.shape, parts)], x.dtype)


def scope(number: int, step: Step) -> str:
    """The named scope of a plan's step: its number and what it does."""
    return f"step{number}.{step.kind}.{'.'.join(step.axes)}".rstrip(".")


def _changed_dimension(step: Step) -> int:
    return next(d for d, (old, new) in enumerate(zip(step.before.axes, step.after.axes)) if old != new)


def _all_gather(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str) -> jax.Array:
    if tpu.is_target():
        return tpu.all_gather(x, step.axes, _changed_dimension(step), mesh)
    return lax.all_gather(x, step.axes, axis=_changed_dimension(step), tiled=True)


def _reduce_scatter(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str) -> jax.Array:
    if tpu.is_target():
        return tpu.reduce_scatter(x, step.axes, _changed_dimension(step), mesh)
    return lax.psum_scatter(x, step.axes, scatter_dimension=_changed_dimension(step), tiled=True)


def _all_reduce(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str) -> jax.Array:
    # A maximum is taken for numerical safety only, and drops out of every result: it has no derivative.
    return lax.pmax(lax.stop_gradient(x), step.axes) if reduce == "max" else lax.psum(x, step.axes)


def _slice(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str) -> jax.Array:
    d = _changed_dimension(step)
    size = x.shape[d] // prod(mesh[axis] for axis in step.axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(step.axes) * size, size, axis=d)


def _all_to_all(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str) -> jax.Array:
    grown = [len(new) > len(old) for old, new in zip(step.before.axes, step.after.axes)]
    shrunk = [len(new) < len(old) for old, new in zip(step.before.axes, step.after.axes)]
    return lax.all_to_all(x, step.axes, split_axis=grown.index(True), concat_axis=shrunk.index(True), tiled=True)


def _permute(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str) -> jax.Array:
    axes = tuple(axis for axis in mesh if mesh[axis] > 1)
    return lax.ppermute(x, axes, permutation(step.before, step.after, {axis: mesh[axis] for axis in axes}))


_EMIT = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "slice": _slice,
    "collective-permute": _permute,
}


def permutation(before: Spec, after: Spec, mesh: Mapping[str, int]) -> list[tuple[int, int]]:
    """Who sends to whom when every piece changes place: (source, target) pairs, each device once on either side.

    A device that already holds its piece keeps it; summands of a partial sum stay with their coordinates. Nothing moves
    along a mesh axis that keeps its dimension and stride, or stands on none before and after.

    Example:
        >>> permutation(Spec.parse("E_xy"), Spec.parse("E_yx"), {"x": 2, "y": 2})
        [(0, 0), (2, 1), (1, 2), (3, 3)]
    """
    devices = [dict(zip(mesh, place)) for place in product(*(range(size) for size in mesh.values()))]
    still = [axis for axis in mesh if _stride(before, axis, mesh) == _stride(after, axis, mesh)]
    holders: dict[tuple, list[int]] = {}
    for number, device in enumerate(devices):
        holders.setdefault(_piece(before, device, mesh, still), []).append(number)
    wanted = [_piece(after, device, mesh, still) for device in devices]
    source: dict[int, int] = {}
    for number, piece in enumerate(wanted):
        if number in holders[piece]:
            holders[piece].remove(number)
            source[number] = number
    for number, piece in enumerate(wanted):
        if number not in source:
            source[number] = holders[piece].pop(0)
    return [(source[number], number) for number in range(len(devices))]


def _stride(spec: Spec, axis: str, mesh: Mapping[str, int]) -> tuple[str, int] | None:
    """The dimension that an axis shards, and how many pieces apart its neighbours are there."""
    return next(
        (
            (dim, prod(mesh[minor] for minor in axes[axes.index(axis) + 1 :]))
            for dim, axes in zip(spec.dims, spec.axes)
            if axis in axes
        ),
        None,
    )


def _piece(spec: Spec, device: Mapping[str, int], mesh: Mapping[str, int], still: Sequence[str]) -> tuple[int, ...]:
    """Which piece of the tensor a device holds: its index along every dimension, its summand, and where it stays."""
    index = [device[axis] for axis in still]
    for axes in (*spec.axes, *((axis,) for axis in spec.partial)):
        position = 0
        for axis in axes:
            position = position * mesh[axis] + device[axis]
        index.append(position)
    return tuple(index)


class Execution:
    """Runs a routine on local pieces; built once per program, called while its shard_map is traced.

    Local products accumulate in float32 (or wider) and cross the wire in the tensors' wire dtypes.
    """

    def __init__(
        self,
        routine: Routine,
        inputs: Sequence,
        outputs: Sequence,
        sizes: Mapping[str, int],
        mesh: Mapping[str, int],
        precision=None,
    ):
        self.routine, self.inputs, self.outputs = routine, inputs, outputs
        self.sizes, self.mesh, self.precision = sizes, mesh, precision
        self.first = _Numbers(routine)

    def __call__(self, *pieces: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """The outputs' pieces, and those of the operands as moved."""
        moved = [self.move(number, pieces) for number in range(len(self.routine.moves))]
        values = [self.product(number, moved) for number in range(len(self.routine.products))]
        return [self.output(number, values) for number in range(len(self.routine.outputs))], moved

    def move(self, number: int, pieces: Sequence[jax.Array], stop: int | None = None) -> jax.Array:
        """A move's operand, brought as far as step `stop` of it."""
        move = self.routine.moves[number]
        wire = self.inputs[move.source].wire
        return self.send(move.steps[:stop], pieces[move.source], wire, self.first.moves[number])

    def send(self, steps: Sequence[Step], x: jax.Array, wire: str, first: int) -> jax.Array:
        """Run steps, the first of that number, in the wire dtype."""
        if any(step.is_collective for step in steps) and x.dtype != wire:
            return self.send(steps, x.astype(wire), wire, first).astype(x.dtype)
        return emit(steps, x, self.mesh, first=first)

    def product(self, number: int, moved: Sequence[jax.Array]) -> jax.Array:
        """A product of moved operands, brought to where it is added."""
        product = self.routine.products[number]
        operands = [moved[product.left]] if product.right is None else [moved[product.left], moved[product.right]]
        return self.behind(number, self.multiply(number, *operands))

    def behind(self, number: int, value: jax.Array) -> jax.Array:
        """What a product's local einsum has left, brought to where it is added."""
        return self.send(self.routine.products[number].steps, value, self.wire_of(number), self.first_behind(number))

    def first_behind(self, product: int) -> int:
        """The number of the first step behind a product's local einsum."""
        return self.first.products[product] + (not self.routine.products[product].passes_through)

    def multiply(self, number: int, *operands: jax.Array) -> jax.Array:
        """The local einsum of a product, or of parts of its operands."""
        product = self.routine.products[number]
        if product.passes_through:
            return _transposed(operands[0], product.einsum.before.dims, product.einsum.after.dims)
        specs = [product.einsum.before, product.einsum.other][: len(operands)]
        letters = ",".join("".join(spec.dims) for spec in specs) + "->" + "".join(product.einsum.after.dims)
        with jax.named_scope(scope(self.first.products[number], product.einsum)):
            return local_einsum(letters, *operands, precision=self.precision)

    def wire_of(self, product: int) -> str:
        """The dtype in which a product crosses the wire: that of the output it is a part of."""
        return self.outputs[self.output_of(product)].wire

    def output_of(self, product: int) -> int:
        """The number of the output that a product is a part of."""
        return next(number for number, output in enumerate(self.routine.outputs) if product in output.products)

    def output(self, number: int, values: Sequence[jax.Array]) -> jax.Array:
        """An output: the sum of its products, settled."""
        output, tensor = self.routine.outputs[number], self.outputs[number]
        dims = [self.routine.products[product].spec.dims for product in output.products]
        first, *rest = (values[product] for product in output.products)
        if len(set(dims)) > 1:  # nothing is owed then, and each is broadcast by itself
            first, *rest = (self.arrange(x, held, output.spec) for x, held in zip((first, *rest), dims))
            return sum(rest, first).astype(tensor.dtype)
        total = self.send(output.steps, sum(rest, first), tensor.wire, self.first.outputs[number])
        return self.arrange(total, dims[0], output.spec).astype(tensor.dtype)

    def arrange(self, x: jax.Array, held: tuple[str, ...], spec: Spec) -> jax.Array:
        """Transpose to the output's order and broadcast the dimensions that no operand has."""
        x = _transposed(x, held, tuple(dim for dim in spec.dims if dim in held))
        if len(held) == len(spec.dims):
            return x
        new = [d for d, dim in enumerate(spec.dims) if dim not in held]
        shape = tuple(
            self.sizes[dim] // prod(self.mesh[axis] for axis in axes) for dim, axes in zip(spec.dims, spec.axes)
        )
        return jnp.broadcast_to(jnp.expand_dims(x, new), shape)


class _Numbers:
    """The number, among a routine's steps, of the first step of every move, product and output."""

    def __init__(self, routine: Routine):
        counts = [len(move.steps) for move in routine.moves]
        counts += [len(product.all_steps) for product in routine.products]
        counts += [len(output.steps) for output in routine.outputs]
        starts = [sum(counts[:number]) for number in range(len(counts))]
        behind = len(routine.moves) + len(routine.products)
        self.moves, self.products = starts[: len(routine.moves)], starts[len(routine.moves) : behind]
        self.outputs = starts[behind:]


def _transposed(x: jax.Array, held: tuple[str, ...], wanted: tuple[str, ...]) -> jax.Array:
    return x if held == wanted else x.transpose([held.index(dim) for dim in wanted])


def local_einsum(letters: str, *operands: jax.Array, precision: Any = None, into: Any = None) -> jax.Array:
    """An einsum of what a device holds, accumulated in float32 (or int32) where the operands are narrower.

    Args:
        letters: as in `jnp.einsum`.
        precision: of the product.
        into: the dtype that it leaves the matrix unit in; the accumulator's own if not given. Accelerators accumulate
            in float32 either way, and what the compiler sums over devices has this dtype.
    """
    wide = accumulator(*(x.dtype for x in operands))
    mesh = jax.sharding.get_abstract_mesh()
    on_cpu = mesh.abstract_device is not None and mesh.abstract_device.device_kind == "cpu"
    if len(operands) == 1 or on_cpu or len({x.dtype for x in operands}) > 1:
        # A sum has no accumulator of its own, XLA:CPU has no batched product of narrow operands into a wide one, and
        # two dtypes may have no joint one but the accumulator's.
        operands, into = tuple(x.astype(wide) for x in operands), None if len(operands) == 1 or on_cpu else into
    whole = mesh.size == 1 or mesh.are_all_axes_manual  # so that dimensions can be merged
    if len(operands) == 2 and on_cpu and whole and (in_order := batched(letters)):
        return in_order(*operands, precision)
    return jnp.einsum(letters, *operands, precision=precision, preferred_element_type=into or wide)


def accumulator(*dtypes) -> jnp.dtype:
    """Float32 or int32 for what is narrower, the operands' own joint dtype for what is not."""
    with jax.numpy_dtype_promotion("standard"):  # what is accumulated is cast by hand, whatever a user allows his own
        return jnp.result_type(*map(_widened, dtypes))


def _widened(dtype: jnp.dtype) -> jnp.dtype:
    # Each by itself, before it meets another: the floats of 8 bits and the integers of 4 are promoted to nothing.
    if dtype.itemsize >= 4:
        return dtype
    floating = jnp.issubdtype(dtype, jnp.floating)
    unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
    return jnp.dtype(jnp.float32 if floating else jnp.uint32 if unsigned else jnp.int32)
