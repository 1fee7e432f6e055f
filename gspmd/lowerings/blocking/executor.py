"""Runs a routine on local pieces."""

from collections.abc import Mapping, Sequence
from math import prod

import jax
import jax.numpy as jnp

from gspmd.annotate.spec import Spec
from gspmd.lowerings.blocking.collectives import emit, scope
from gspmd.lowerings.local_einsum import local_einsum
from gspmd.planner.steps import Routine, Step


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
