"""The equations of the experts' feed-forward layer as stages of one planned program, which runs in chunks of slots.

What is of weights moves once, and its gradient, added up over the chunks, is settled once; what is of tokens moves with
its chunk.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from gspmd.lowerings.blocking.collectives import scope
from gspmd.lowerings.blocking.executor import Execution
from gspmd.moe.dropless.grouped import grouped_back, grouped_matmul, grouped_outer
from gspmd.planner.steps import Routine, Step, Tensor

Arrays = dict[int, jax.Array]


class Script:
    """The steps of a program, numbered as they are added."""

    def __init__(self):
        self.steps: list[Step] = []

    def add(self, steps: Iterable[Step], share: float = 1.0) -> int:
        """Append steps that move this share of what was planned; the number of the first."""
        first = len(self.steps)
        self.steps += [_part(step, share) for step in steps]
        return first


def _part(step: Step, share: float) -> Step:
    amounts = {"wire_bytes": round(step.wire_bytes * share), "flops": round(step.flops * share)}
    return replace(step, seconds=step.seconds * share, **amounts)


@dataclass(frozen=True)
class Equation:
    """A routine with its tensors, and which of them are of weights.

    Attributes:
        routine: what runs.
        inputs, outputs: its tensors.
        weights: the inputs that are moved once.
        sums: the outputs that are added up over the chunks and settled once.
    """

    routine: Routine
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: frozenset[int]
    sums: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Numbers:
    """The number, in the program, of the first step of every move, product and output."""

    moves: Mapping[int, int]
    products: Mapping[int, int]
    outputs: Mapping[int, int]


class Stage:
    """An equation in a program.

    Args:
        equation: what to compute.
        sizes, mesh: of its dimensions and of the mesh axes.
        shares: what of the slots every chunk has.
        script: where its steps are added.
    """

    def __init__(
        self,
        equation: Equation,
        sizes: Mapping[str, int],
        mesh: Mapping[str, int],
        shares: Sequence[float],
        script: Script,
    ):
        self.equation, self.sizes, self.mesh = equation, sizes, mesh
        routine = equation.routine
        self.once = {n: script.add(m.steps) for n, m in enumerate(routine.moves) if m.source in equation.weights}
        self.late = {p for n in equation.sums for p in routine.outputs[n].products}
        self.numbers = [self._numbered(script, share) for share in shares]
        self.last = self._numbered_last(script)

    def _numbered(self, script: Script, share: float) -> _Numbers:
        routine, sums = self.equation.routine, self.equation.sums
        moves = {n: script.add(m.steps, share) for n, m in enumerate(routine.moves) if n not in self.once}
        steps = {n: (p.einsum,) if n in self.late else p.all_steps for n, p in enumerate(routine.products)}
        products = {n: script.add(each, share) for n, each in steps.items()}
        outputs = {n: script.add(o.steps, share) for n, o in enumerate(routine.outputs) if n not in sums}
        return _Numbers(self.once | moves, products, outputs)

    def _numbered_last(self, script: Script) -> _Numbers:
        routine = self.equation.routine
        products = {p: script.add(routine.products[p].steps) - 1 for p in sorted(self.late)}
        return _Numbers({}, products, {n: script.add(routine.outputs[n].steps) for n in sorted(self.equation.sums)})

    def _execution(self, numbers: _Numbers, rows: jax.Array | None = None) -> "_Execution":
        return _Execution(self.equation, self.sizes, self.mesh, numbers, rows)

    def weights(self, pieces: Arrays) -> Arrays:
        """The weights among the inputs, moved: by the number of the move."""
        execution = self._execution(_Numbers(self.once, {}, {}))
        return {n: execution.move(n, pieces) for n in self.once}

    def chunk(
        self, number: int, pieces: Arrays, weights: Arrays, rows: jax.Array | None = None
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Run the equation on a chunk.

        Args:
            number: of the chunk.
            pieces: the other inputs.
            weights: what `weights` returned.
            rows: [X] int32, how many rows each expert has, where slots are rows sorted by expert.

        Returns:
            The chunk's outputs by number, the products of outputs that are sums, and everything moved.
        """
        execution, routine = self._execution(self.numbers[number], rows), self.equation.routine
        moved = {n: weights[n] if n in weights else execution.move(n, pieces) for n in range(len(routine.moves))}
        operands = {n: [moved[m] for m in (p.left, p.right) if m is not None] for n, p in enumerate(routine.products)}
        made = {n: execution.multiply(n, *each) for n, each in operands.items()}
        settled = {n: execution.behind(n, value) for n, value in made.items() if n not in self.late}
        outputs = {n: execution.output(n, settled) for n in self.numbers[number].outputs}
        return outputs, {n: made[n] for n in self.late}, moved

    def settle(self, products: Arrays) -> Arrays:
        """The outputs that are sums, from their products added up over the chunks."""
        execution = self._execution(self.last)
        values = {n: execution.behind(n, value) for n, value in products.items()}
        return {n: execution.output(n, values) for n in self.equation.sums}


class _Execution(Execution):
    """Runs steps by the numbers that they have in the program; sorted rows it multiplies by their own expert's."""

    def __init__(self, equation: Equation, sizes, mesh, numbers: _Numbers, rows: jax.Array | None):
        super().__init__(equation.routine, equation.inputs, equation.outputs, sizes, mesh)
        self.first, self.rows = numbers, rows

    def multiply(self, number: int, *operands: jax.Array) -> jax.Array:
        """The local product of two operands, or of sorted rows and weights."""
        if self.rows is None:
            return super().multiply(number, *operands)
        einsum = self.routine.products[number].einsum
        with jax.named_scope(scope(self.first.products[number], einsum)):
            return grouped_product(*operands, einsum.before.dims, einsum.other.dims, einsum.after.dims, sizes=self.rows)


def grouped_product(left, right, left_dims, right_dims, dims, *, sizes: jax.Array) -> jax.Array:
    """An einsum over sorted rows [G, X, C, ·], whose X is of the shard that they are on, and weights [X, ·, ·].

    Args:
        left, right: rows and weights in either order, or twice rows, whose product is weights.
        left_dims, right_dims, dims: the dimensions of both, and of the result.
        sizes: [X] int32, how many rows each expert has.
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
    found = (grouped_matmul if first in dims else grouped_back)(flat, weights, sizes)
    feature = second if first in dims else first
    held = ("G", "X", "C", feature)
    shaped = found.reshape(*(rows.shape[dims.index(dim)] for dim in held[:3]), -1)
    return shaped.transpose([held.index(dim) for dim in wanted])


def _flat(rows: jax.Array, dims: Sequence[str]) -> jax.Array:
    """[G, X, C, ·] as rows, one after the other."""
    feature = next(dim for dim in dims if dim not in "GXC")
    ordered = rows.transpose([dims.index(dim) for dim in ("G", "X", "C", feature)])
    return ordered.reshape(-1, ordered.shape[-1])
