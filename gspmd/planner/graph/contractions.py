"""All joint placements in which two operands can be multiplied, and their costs, as numpy arrays.

In a joint placement each mesh axis has one of three roles. It shards a dimension of the operands, or it belongs to the
partial sum of one operand, or it is unused. Only one operand may be a partial sum over an axis, because a product is
linear in each factor. A dimension that both operands have is sharded in the same way in both. All this determines the
placement of the result. The result is a partial sum over the mesh axes of the operands' partial sums, and over the mesh
axes that shard contracted dimensions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from gspmd.annotate.spec import Spec
from gspmd.hardware.dtypes import itemsize
from gspmd.hardware.matmul import local_einsum_seconds
from gspmd.planner.graph.paths import FAR, ShortestPaths, shortest_paths
from gspmd.planner.graph.placements import check_permutes, fitting, numbered, parts_of, placements, sequences
from gspmd.planner.steps import Contraction, Environment, Step, Tensor, picoseconds

joint = lru_cache(maxsize=16)(placements)


@dataclass(frozen=True)
class ContractionChoice:
    """One way to run a contraction.

    Attributes:
        right: the spec in which the right operand is multiplied, or None without a right operand.
        right_steps: the steps that bring the right operand to this spec.
        einsum: the local einsum.
        result: the spec in which the local einsum leaves the result.
        settle_steps: the steps that bring the result to its target, such as a reduction.
    """

    right: Spec | None
    right_steps: tuple[Step, ...]
    einsum: Step
    result: Spec
    settle_steps: tuple[Step, ...]


@dataclass(frozen=True)
class PlacedTensor:
    """An operand or the result of a contraction, with its placement in each row of a `ContractionTable`.

    Attributes:
        tensor: the operand in its given spec, or the result in its requested spec.
        paths: the shortest paths between the tensor's placements.
        nodes: the index of the tensor's placement in each row of the table.
    """

    tensor: Tensor
    paths: ShortestPaths
    nodes: np.ndarray

    def costs(self) -> np.ndarray:
        """Return the cost of bringing an operand to its placement, for each row."""
        return self.paths.costs_from(self.paths.number(self.tensor.spec))[self.nodes]

    def spec(self, row: int) -> Spec:
        """Return the spec of an operand's placement in a row."""
        return self.paths.spec(self.tensor.spec.dims, int(self.nodes[row]))

    def steps(self, row: int) -> tuple[Step, ...]:
        """Return the steps that bring an operand to its placement in a row."""
        path = self.paths.path_between(self.paths.number(self.tensor.spec), int(self.nodes[row]))
        return self.paths.steps(path, self.tensor.spec.dims, self.tensor.name)


class ContractionTable:
    """A table with a row for each joint placement in which a contraction can run.

    Args:
        environment: everything on which costs depend.
        left: the left operand.
        contraction: the right operand and the result.
        added: whether the result will be added to other results. These may be partial sums over other axes.

    Attributes:
        dims: the dimensions of the result in the target's order, except dimensions that no operand has.
        left, right, result: the three tensors and their placements. `right` is None if there is only a left operand.
    """

    def __init__(self, environment: Environment, left: Tensor, contraction: Contraction, added: bool = False):
        self.environment, self.sizes = environment, dict(environment.sizes)
        self.pinned, target = contraction.pinned, contraction.target
        operands = [left] if contraction.right is None else [left, contraction.right]
        self._union = tuple(dict.fromkeys(dim for tensor in operands for dim in tensor.spec.dims))
        self.dims = tuple(dim for dim in target.spec.dims if dim in self._union)
        self._summed = len(self.dims) < len(self._union)
        tensors = [(tensor.spec.dims, tensor.dtype) for tensor in operands] + [(self.dims, target.dtype)]
        self._touched = [(dims, itemsize(dtype)) for dims, dtype in tensors]  # what a local einsum reads or writes
        self._dtype = max((tensor.dtype for tensor in operands), key=itemsize)  # the wider dtype decides the speed
        axes, sizes = zip(*environment.mesh) if environment.mesh else ((), ())
        masks = tuple(sum(1 << axes.index(axis) for axis in tensor.spec.partial) for tensor in operands)
        allowed = tuple(fitting(self.sizes[dim], sizes) for dim in self._union)
        over = axes if self._summed or added else [axis for tensor in operands for axis in tensor.spec.partial]
        summed = sum(1 << axes.index(axis) for axis in {*over})
        for (dims, _), partial in zip(tensors, (*masks, summed), strict=True):
            check_permutes(sizes, tuple(fitting(self.sizes[dim], sizes) for dim in dims), partial)
        self._rows, _, self._partials = joint(len(sizes), allowed, masks)
        self._masks = sequences(len(sizes)).mask[self._rows]  # the axes on each dimension, by row
        placed = [
            self._placed(tensor.spec.dims, tensor, tensor.spec.partial, self._partials[:, number])
            for number, tensor in enumerate(operands)
        ]
        self.left, self.right = placed[0], placed[1] if len(placed) == 2 else None
        contracted = [d for d, dim in enumerate(self._union) if dim not in self.dims]
        made = np.bitwise_or.reduce(np.hstack([self._partials, self._masks[:, contracted]]), axis=1)
        self.result = self._placed(self.dims, target, over, made)

    def _placed(self, dims: tuple[str, ...], tensor: Tensor, over: Iterable[str], partial: np.ndarray) -> PlacedTensor:
        """Return a tensor with its placement in each row.

        `partial` has the mesh axes of the tensor's partial sum in each row, as bit masks; `over` lists the axes that
        may occur in these masks.
        """
        shape, (mesh, chip) = tuple(self.sizes[dim] for dim in dims), (self.environment.mesh, self.environment.chip)
        paths = shortest_paths(shape, mesh, tensor.itemsize, chip, frozenset(over))
        rows = [self._rows[:, self._union.index(dim)] for dim in dims]
        return PlacedTensor(tensor, paths, paths.nodes.find(paths.nodes.key(rows, partial)))

    @property
    def kinds(self) -> np.ndarray:
        """A number for each row; rows that differ only in the order of a dimension's axes have the same number."""
        return numbered([np.zeros(len(self._masks), int), *self._masks.T, *self._partials.T])

    @cached_property
    def costs(self) -> np.ndarray:
        """The cost of moving the right operand and of the local einsum, for each row.

        If the right operand has a pinned spec, the cost is infinite in all rows in which the operand has another spec.
        """
        parts = np.array(parts_of([size for _, size in self.environment.mesh]))
        levels = np.unique(parts, return_inverse=True)[1][self._masks]
        shapes = numbered([np.zeros(len(levels), int), *levels.T])
        _, some, kind = np.unique(shapes, return_index=True, return_inverse=True)
        local = np.array([self.sizes[dim] for dim in self._union]) // parts[self._masks[some]]
        seconds = [self._figures(dict(zip(self._union, row)))[1] for row in local.tolist()]
        costs = np.array(list(map(picoseconds, seconds)))[kind].astype(complex)
        if self.right is not None:
            costs += self.right.costs()
            if self.pinned is not None:
                costs[self.right.nodes != self.right.paths.number(self.pinned)] = FAR
        return costs

    @cached_property
    def totals(self) -> np.ndarray:
        """The cost of everything except moving the left operand, for each row.

        This is `costs`, plus the cost of moving the result to its target.
        """
        number = self._target_number
        return self.costs + (self.result.paths.costs_to(number)[self.result.nodes] if number >= 0 else FAR)

    @property
    def _target_number(self) -> int:
        """The index of the result's target placement, before any dimension is broadcast."""
        spec = self.result.tensor.spec
        return self.result.paths.number(Spec(self.dims, tuple(map(spec.axes_of, self.dims)), spec.partial))

    def choice(self, held: Spec, rows: Sequence[int]) -> ContractionChoice:
        """Return the choice in which the left operand has the spec `held`.

        In all `rows`, the left operand has this spec, and the rows are equally cheap. The chosen row is the one in
        which the text of the right operand's spec comes first.
        """
        spec, steps, row = None, (), rows[0]
        if (right := self.right) is not None:
            row = min(rows, key=lambda row: str(right.spec(row)))  # the rule of `search` for the left operand
            spec, steps = right.spec(row), right.steps(row)
        paths, made, name = self.result.paths, int(self.result.nodes[row]), self.result.tensor.name
        result = paths.spec(self.dims, made)
        settle = paths.steps(paths.path(paths.costs_to(self._target_number), made), self.dims, name)
        local: dict[str, int] = {}
        mesh = dict(self.environment.mesh)
        for each in (held, spec) if spec else (held,):
            local |= {dim: self.sizes[dim] // prod(mesh[axis] for axis in each.axes_of(dim)) for dim in each.dims}
        flops, seconds = self._figures(local)
        einsum = Step("einsum", (), 0, seconds, held, result, name, flops, spec)
        return ContractionChoice(spec, steps, einsum, result, settle)

    def _figures(self, local: dict[str, int]) -> tuple[int, float]:
        """Return the FLOPs and seconds of a local einsum, from the local sizes of the dimensions."""
        if self.right is None and not self._summed:
            return 0, 0.0
        flops = 0 if self.right is None else prod(local.values()) * (2 if self._summed else 1)
        chip, precision = self.environment.chip, self.environment.precision
        return flops, local_einsum_seconds(local, self._touched, self._dtype, chip, precision)
