"""Every joint placement of two operands in which they can be multiplied, and what each costs, as numpy arrays.

Each mesh axis stands on a dimension of either operand, nowhere, or in the partial sum of one of them (a product is
linear in one factor at a time). The operands agree on the dimensions that both have. The result follows: its partial
sum is over the operands' own and over the axes on contracted dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from gspmd.annotate.spec import Spec
from gspmd.hardware.dtypes import itemsize
from gspmd.hardware.links import einsum_seconds
from gspmd.planner.graph.paths import FAR, shortest_paths
from gspmd.planner.graph.placements import fitting, numbered, parts_of, placements, sequences
from gspmd.planner.steps import Contraction, Environment, Step, Tensor, picoseconds

joint = lru_cache(maxsize=16)(placements)


@dataclass(frozen=True)
class ContractionChoice:
    """One way to run a contraction: where its right operand is brought, the local einsum, the result, how it
    settles."""

    right: Spec | None
    right_steps: tuple[Step, ...]
    einsum: Step
    result: Spec
    settle_steps: tuple[Step, ...]


class ContractionTable:
    """The joint placements of the left operand and one contraction: a row for each.

    Args:
        added: whether the result is to be added to others, which may be partial sums where it is not.

    Attributes:
        dims: of the result, in the target's order, but for those that no operand has.
        left_paths, right_paths, result_paths: of the three tensors; no right ones where the left operand is alone.
        left_nodes, right_nodes, result_nodes: the numbers of the three tensors' placements, by row.
    """

    def __init__(self, environment: Environment, left: Tensor, contraction: Contraction, added: bool = False):
        self.environment, self.left, self.right = environment, left, contraction.right
        self.target, self.pinned, self.sizes = contraction.target, contraction.pinned, dict(environment.sizes)
        self._operands = [tensor for tensor in (left, self.right) if tensor is not None]
        self._union = tuple(dict.fromkeys(dim for tensor in self._operands for dim in tensor.spec.dims))
        self.dims = tuple(dim for dim in self.target.spec.dims if dim in self._union)
        self._summed = len(self.dims) < len(self._union)
        tensors = [(tensor.spec.dims, tensor.dtype) for tensor in self._operands] + [(self.dims, self.target.dtype)]
        self._touched = [(dims, itemsize(dtype)) for dims, dtype in tensors]  # what a local einsum reads and writes
        self._dtype = max((tensor.dtype for tensor in self._operands), key=itemsize)  # whose speed a product has
        axes, sizes = zip(*environment.mesh) if environment.mesh else ((), ())
        masks = tuple(sum(1 << axes.index(axis) for axis in tensor.spec.partial) for tensor in self._operands)
        allowed = tuple(fitting(self.sizes[dim], sizes) for dim in self._union)
        self._rows, _, partials = joint(len(sizes), allowed, masks)
        self._masks = sequences(len(sizes)).mask[self._rows]  # the axes on each dimension, by row
        self.left_paths, self.left_nodes = self._placed(left.spec.dims, left, left.spec.partial, partials[:, 0])
        self.right_paths = self.right_nodes = None
        if self.right is not None:
            spec = self.right.spec
            self.right_paths, self.right_nodes = self._placed(spec.dims, self.right, spec.partial, partials[:, 1])
        contracted = [d for d, dim in enumerate(self._union) if dim not in self.dims]
        made = np.bitwise_or.reduce(np.hstack([partials, self._masks[:, contracted]]), axis=1)
        over = axes if self._summed or added else (axis for tensor in self._operands for axis in tensor.spec.partial)
        self.result_paths, self.result_nodes = self._placed(self.dims, self.target, over, made)

    def _placed(self, dims: tuple[str, ...], tensor: Tensor, over, partial: np.ndarray):
        """The paths of a tensor that may be a partial sum over some axes, and its placement by row."""
        shape, (mesh, chip) = tuple(self.sizes[dim] for dim in dims), (self.environment.mesh, self.environment.chip)
        paths = shortest_paths(shape, mesh, tensor.itemsize, chip, frozenset(over))
        rows = [self._rows[:, self._union.index(dim)] for dim in dims]
        return paths, paths.nodes.find(paths.nodes.key(rows, partial))

    @cached_property
    def costs(self) -> np.ndarray:
        """Cost of the right operand's path and the local einsum, by row; infinite for what a pin rules out."""
        parts = np.array(parts_of([size for _, size in self.environment.mesh]))
        levels = np.unique(parts, return_inverse=True)[1][self._masks]
        shapes = numbered([np.zeros(len(levels), int), *levels.T])
        _, some, kind = np.unique(shapes, return_index=True, return_inverse=True)
        local = np.array([self.sizes[dim] for dim in self._union]) // parts[self._masks[some]]
        seconds = [self._figures(dict(zip(self._union, row)))[1] for row in local.tolist()]
        costs = np.array(list(map(picoseconds, seconds)))[kind].astype(complex)
        if self.right is not None:
            costs += self.right_paths.costs_from(self.right_paths.number(self.right.spec))[self.right_nodes]
            if self.pinned is not None:
                costs[self.right_nodes != self.right_paths.number(self.pinned)] = FAR
        return costs

    @cached_property
    def totals(self) -> np.ndarray:
        """Cost of all but the left operand's path, by row: `costs`, and the result's path to its target."""
        number = self._target_number
        return self.costs + (self.result_paths.costs_to(number)[self.result_nodes] if number >= 0 else FAR)

    @property
    def _target_number(self) -> int:
        """The placement that the result is brought to; dimensions that no operand has are broadcast behind it."""
        spec = self.target.spec
        return self.result_paths.number(Spec(self.dims, tuple(map(spec.axes_of, self.dims)), spec.partial))

    def choice(self, held: Spec, rows: Sequence[int]) -> ContractionChoice:
        """Return the choice with the left operand at `held`: of rows that cost the same, the first in the order of
        specs."""
        spec, steps, row = None, (), rows[0]
        if self.right is not None:
            paths, dims = self.right_paths, self.right.spec.dims
            specs = {row: paths.spec(dims, int(self.right_nodes[row])) for row in rows}
            row = min(rows, key=lambda row: str(specs[row]))
            path = paths.path_between(paths.number(self.right.spec), int(self.right_nodes[row]))
            spec, steps = specs[row], paths.steps(path, dims, self.right.name)
        paths, made = self.result_paths, int(self.result_nodes[row])
        result = paths.spec(self.dims, made)
        settle = paths.steps(paths.path(paths.costs_to(self._target_number), made), self.dims, self.target.name)
        local, mesh = {}, dict(self.environment.mesh)
        for each in (held, spec) if spec else (held,):
            local |= {dim: self.sizes[dim] // prod(mesh[axis] for axis in each.axes_of(dim)) for dim in each.dims}
        flops, seconds = self._figures(local)
        einsum = Step("einsum", (), 0, seconds, held, result, self.target.name, flops, spec)
        return ContractionChoice(spec, steps, einsum, result, settle)

    def _figures(self, local: dict[str, int]) -> tuple[int, float]:
        """Operations and seconds of the local einsum of pieces of these sizes."""
        if self.right is None and not self._summed:
            return 0, 0.0
        flops = 0 if self.right is None else prod(local.values()) * (2 if self._summed else 1)
        touched = sum(width * prod([local[dim] for dim in dims]) for dims, width in self._touched)
        return flops, einsum_seconds(flops, touched, self._dtype, self.environment.chip)
