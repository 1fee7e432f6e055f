"""The execution of a routine on the shards of one device, step by step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import jax
import jax.numpy as jnp

from gspmd.annotate.spec import Spec
from gspmd.lowerings.blocking.collectives import After, emit
from gspmd.lowerings.local_einsum import local_einsum
from gspmd.lowerings.scopes import step_scope
from gspmd.planner.steps import Chain, NumberedSteps, Routine, RoutineChains, Step

Pieces = Sequence[jax.Array] | Mapping[int, jax.Array]
"""Local arrays, indexed by the number of a tensor, of a move or of a product."""


class Executor:
    """Runs a routine, which is all steps of an equation, on the shards of one device.

    The moves of the operands run first. Then each local einsum runs, with the steps that follow it. Then the products
    of each output are added, and the steps after the sum run. An executor is built once per program, and called while
    the program's shard_map is traced. Local products accumulate in float32 (or wider), and are sent in the wire dtypes
    of their tensors.

    Args:
        routine: the routine to run.
        inputs, outputs: the tensors of the routine.
        sizes: the sizes of the dimensions of the whole tensors.
        mesh: the sizes of the mesh axes.
        chains: the routine's steps with their numbers in the program. None if the program consists of this routine
            alone.
        precision: the precision of the local products.
        multiply: the function for local einsums, (step, *local operands) -> local result; by default `local_einsum`.
    """

    def __init__(
        self,
        routine: Routine,
        inputs: Sequence,
        outputs: Sequence,
        sizes: Mapping[str, int],
        mesh: Mapping[str, int],
        *,
        chains: RoutineChains | None = None,
        precision=None,
        multiply: Callable[..., jax.Array] | None = None,
    ):
        self.routine, self.inputs, self.outputs = routine, inputs, outputs
        self.sizes, self.mesh, self.precision = sizes, mesh, precision
        self.chains = chains or NumberedSteps().add_routine(routine)
        self._multiply = multiply or self._local_einsum

    def __call__(self, *pieces: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the shards of the outputs, and the shards of the operands after their moves."""
        moved = self.move_all(range(len(self.routine.moves)), pieces)
        values = [self.product(number, moved) for number in range(len(self.routine.products))]
        return [self.output(number, values) for number in range(len(self.routine.outputs))], moved

    def move_all(
        self, numbers: Iterable[int], pieces: Pieces, stop: Callable[[int], int | None] = lambda _: None
    ) -> list[jax.Array]:
        """Run the moves with these numbers, and return their results in the order of the numbers.

        Each move stops before step `stop(number)`, or runs to its end if `stop(number)` is None. Moves with a gather
        over several axes run last. A gather that goes round each axis of a torus also waits for all moves before it, as
        `blocking.tpu.all_gather` explains.
        """

        def comes_last(number: int) -> bool:
            steps = self.chains.moves[number].steps[: stop(number)]
            return any(step.kind == "all-gather" and len(step.axes) > 1 for step in steps)

        numbers = list(numbers)
        moved: dict[int, jax.Array] = {}
        for number in sorted(numbers, key=comes_last):
            moved[number] = self.move(number, pieces, stop(number), tuple(moved.values()))
        return [moved[number] for number in numbers]

    def move(self, number: int, pieces: Pieces, stop: int | None = None, after: After = ()) -> jax.Array:
        """Run the steps of a move that come before step `stop`.

        Gathers that go round each axis of a torus wait for the arrays `after`.
        """
        source, chain = self.routine.moves[number].source, self.chains.moves[number]
        return self.send(Chain(chain.steps[:stop], chain.first), pieces[source], self.inputs[source].wire, after)

    def send(self, chain: Chain, x: jax.Array, wire: str, after: After = ()) -> jax.Array:
        """Run a chain of steps on a local array, which collectives send in the dtype `wire`."""
        if any(step.is_collective for step in chain.steps) and x.dtype != wire:
            return emit(chain, x.astype(wire), self.mesh, after=after).astype(x.dtype)
        return emit(chain, x, self.mesh, after=after)

    def product(self, number: int, moved: Pieces) -> jax.Array:
        """Multiply moved operands, and run the steps between the product and the sum of products."""
        product = self.routine.products[number]
        return self.send_product(number, self.multiply(number, *(moved[each] for each in product.operands)))

    def multiply(self, number: int, *operands: jax.Array) -> jax.Array:
        """Run the local einsum of a product on local operands, or on parts of them."""
        product = self.routine.products[number]
        if product.passes_through:
            return _transposed(operands[0], product.einsum.before.dims, product.einsum.after.dims)
        with step_scope(self.chains.einsums[number], product.einsum):
            return self._multiply(product.einsum, *operands)

    def _local_einsum(self, step: Step, *operands: jax.Array) -> jax.Array:
        letters = ",".join("".join(spec.dims) for spec in step.sources) + "->" + "".join(step.after.dims)
        return local_einsum(letters, *operands, precision=self.precision)

    def send_product(self, number: int, value: jax.Array) -> jax.Array:
        """Run the steps between a product's local einsum and the sum of products."""
        return self.send(self.chains.products[number], value, self.outputs[self.output_of(number)].wire)

    def output_of(self, product: int) -> int:
        """Return the index of the output to which a product belongs."""
        return next(number for number, output in enumerate(self.routine.outputs) if product in output.products)

    def output(self, number: int, values: Pieces) -> jax.Array:
        """Add the products of an output, and run the steps after the sum, such as reductions of partial sums."""
        output, tensor = self.routine.outputs[number], self.outputs[number]
        dims = [self.routine.products[product].spec.dims for product in output.products]
        first, *rest = (values[product] for product in output.products)
        if len(set(dims)) > 1:  # in this case no product is a partial sum, and each is broadcast by itself
            first, *rest = (self.arrange(x, held, output.spec) for x, held in zip((first, *rest), dims))
            return sum(rest, first).astype(tensor.dtype)
        total = self.send(self.chains.outputs[number], sum(rest, first), tensor.wire)
        return self.arrange(total, dims[0], output.spec).astype(tensor.dtype)

    def arrange(self, x: jax.Array, dims: tuple[str, ...], spec: Spec) -> jax.Array:
        """Transpose an array to the output's order of dimensions, and broadcast it along dimensions that it lacks."""
        x = _transposed(x, dims, tuple(dim for dim in spec.dims if dim in dims))
        if len(dims) == len(spec.dims):
            return x
        new = [d for d, dim in enumerate(spec.dims) if dim not in dims]
        shape = [self.sizes[dim] // prod(self.mesh[axis] for axis in axes) for dim, axes in zip(spec.dims, spec.axes)]
        return jnp.broadcast_to(jnp.expand_dims(x, new), shape)


def _transposed(x: jax.Array, dims: tuple[str, ...], wanted: tuple[str, ...]) -> jax.Array:
    return x if dims == wanted else x.transpose([dims.index(dim) for dim in wanted])
