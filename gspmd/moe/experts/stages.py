"""The equations of the experts' feed-forward layer as stages of one planned program that runs in chunks of slots.

Weights are moved once; their gradients are added up over the chunks and reduced once. Tokens move with their chunk.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import jax

from gspmd.lowerings.blocking.executor import Executor
from gspmd.lowerings.local_einsum import as_compiled
from gspmd.moe.dropless.grouped import grouped_back, grouped_matmul, grouped_outer
from gspmd.planner.steps import NumberedSteps, Routine, RoutineChains, Step, Tensor

Arrays = dict[int, jax.Array]


@dataclass(frozen=True)
class StageEquation:
    """A routine with its tensors, some of which are shared by all chunks.

    Attributes:
        routine: the moves, products and outputs of the equation.
        inputs, outputs: the tensors of the routine.
        weights: the indices of the inputs that are moved only once, for all chunks.
        sums: the indices of the outputs that are added up over the chunks and then reduced once.
    """

    routine: Routine
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: frozenset[int]
    sums: frozenset[int] = frozenset()


class ChunkedEquation:
    """An equation that a program runs once for every chunk.

    Args:
        equation: the equation to compute.
        sizes, mesh: the sizes of the equation's dimensions, and of the mesh axes.
        shares: the fraction of the slots that is in each chunk.
        program: the program to which the equation's steps are added.
        executor: the executor class that runs the equation.
    """

    def __init__(
        self,
        equation: StageEquation,
        sizes: Mapping[str, int],
        mesh: Mapping[str, int],
        shares: Sequence[float],
        program: NumberedSteps,
        executor: type[Executor] = Executor,
    ):
        self.equation, self.sizes, self.mesh, self._runs = equation, sizes, mesh, executor
        routine = equation.routine
        self.once = {n: program.add(m.steps) for n, m in enumerate(routine.moves) if m.source in equation.weights}
        self.late = {p for n in equation.sums for p in routine.outputs[n].products}
        self.chunks = [self._chunk_chains(program, share) for share in shares]
        self.last = self._last_chains(program)

    def _chunk_chains(self, program: NumberedSteps, share: float) -> RoutineChains:
        """Add the steps of one chunk to the program.

        The moves of weights and the reductions of sums over chunks are left out, because they run once for all chunks.
        """
        routine, sums = self.equation.routine, self.equation.sums
        moves = {n: program.add(m.steps, share) for n, m in enumerate(routine.moves) if n not in self.once}
        einsums, products = {}, {}
        for n, product in enumerate(routine.products):
            einsums[n] = program.add(() if product.passes_through else (product.einsum,), share).first
            products[n] = program.add(() if n in self.late else product.steps, share)
        outputs = {n: program.add(o.steps, share) for n, o in enumerate(routine.outputs) if n not in sums}
        return RoutineChains(self.once | moves, einsums, products, outputs)

    def _last_chains(self, program: NumberedSteps) -> RoutineChains:
        """Add the steps that reduce the sums over chunks to the program."""
        routine = self.equation.routine
        products = {p: program.add(routine.products[p].steps) for p in sorted(self.late)}
        outputs = {n: program.add(routine.outputs[n].steps) for n in sorted(self.equation.sums)}
        return RoutineChains({}, {}, products, outputs)

    def _executor(self, chains: RoutineChains, rows: jax.Array | None = None) -> Executor:
        """Return an executor of the steps in `chains`.

        If `rows` is not None, the executor multiplies each sorted row by the weights of its own expert.
        """
        equation, multiply = self.equation, None if rows is None else partial(_grouped, rows)
        return self._runs(
            equation.routine, equation.inputs, equation.outputs, self.sizes, self.mesh, chains=chains, multiply=multiply
        )

    def weights(self, pieces: Arrays) -> Arrays:
        """Move the inputs that are weights, and return the moved weights by the indices of their moves."""
        executor = self._executor(RoutineChains(self.once, {}, {}, {}))
        return dict(zip(self.once, executor.move_all(self.once, pieces)))

    def chunk(
        self, number: int, pieces: Arrays, weights: Arrays, rows: jax.Array | None = None
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Run the equation on one chunk.

        Args:
            number: the index of the chunk.
            pieces: the inputs that are not weights, by index.
            weights: the moved weights, as the method `weights` returned them.
            rows: [X] int32, the number of rows of each expert if slots are rows sorted by expert; otherwise None.

        Returns:
            Three mappings by index: the chunk's outputs, the products for outputs that are sums over chunks, and all
            moved operands.
        """
        chains, routine = self.chunks[number], self.equation.routine
        executor = self._executor(chains, rows)
        moved = {n: weights[n] if n in weights else executor.move(n, pieces) for n in range(len(routine.moves))}
        operands = {n: [moved[m] for m in (p.left, p.right) if m is not None] for n, p in enumerate(routine.products)}
        # `as_compiled`, because with products that are written as products of matrices, the TPU compiler overlaps less
        # of other chunks' all-to-alls: on 16 v5e 51% instead of 93%.
        with as_compiled() if len(self.chunks) > 1 else nullcontext():
            made = {n: executor.multiply(n, *each) for n, each in operands.items()}
        settled = {n: executor.send_product(n, value) for n, value in made.items() if n not in self.late}
        outputs = {n: executor.output(n, settled) for n in chains.outputs}
        return outputs, {n: made[n] for n in self.late}, moved

    def settle(self, products: Arrays) -> Arrays:
        """Reduce the outputs that are sums over chunks; `products` must already be added up over all chunks."""
        executor = self._executor(self.last)
        values = {n: executor.send_product(n, value) for n, value in products.items()}
        return {n: executor.output(n, values) for n in self.equation.sums}


def _grouped(rows: jax.Array, einsum: Step, left: jax.Array, right: jax.Array) -> jax.Array:
    assert einsum.other is not None  # the equation has two operands
    return grouped_product(left, right, einsum.before.dims, einsum.other.dims, einsum.after.dims, sizes=rows)


def grouped_product(left, right, left_dims, right_dims, dims, *, sizes: jax.Array) -> jax.Array:
    """Compute an einsum of sorted rows [G, X, C, ·], where X stands for shards, with weights [X, ·, ·].

    Args:
        left, right: rows and weights, in any order. For a gradient of weights, two arrays of rows.
        left_dims, right_dims, dims: the dimensions of the operands and of the result.
        sizes: [X] int32, the number of rows of each expert.
    """
    if "C" not in left_dims:
        left, right, left_dims, right_dims = right, left, right_dims, left_dims
    if "C" not in right_dims:
        return _times(left, right, left_dims, right_dims, dims, sizes)
    if dims[1] not in left_dims:
        left, right, left_dims, right_dims = right, left, right_dims, left_dims
    return grouped_outer(_flat(left, left_dims), _flat(right, right_dims), sizes)


def _times(rows, weights, dims, weight_dims, wanted, sizes: jax.Array) -> jax.Array:
    flat, (_, first, second) = _flat(rows, dims), weight_dims
    weights = weights.astype(rows.dtype)  # weights may be int8
    found = (grouped_matmul if first in dims else grouped_back)(flat, weights, sizes)
    feature = second if first in dims else first
    held = ("G", "X", "C", feature)
    shaped = found.reshape(*(rows.shape[dims.index(dim)] for dim in held[:3]), -1)
    return shaped.transpose([held.index(dim) for dim in wanted])


def _flat(rows: jax.Array, dims: Sequence[str]) -> jax.Array:
    """Flatten [G, X, C, ·] to a list of rows."""
    feature = next(dim for dim in dims if dim not in "GXC")
    ordered = rows.transpose([dims.index(dim) for dim in ("G", "X", "C", feature)])
    return ordered.reshape(-1, ordered.shape[-1])
