"""Every placement in which two operands can be multiplied, and what each costs, as numpy arrays.

For each mesh axis: it stands on a dimension of either operand, nowhere, or one of the operands still owes its sum. Both
have the dimensions that they share alike, and an axis does one thing at a time; a product is linear in one owed sum, so
no axis is owed by both. What stands on a contracted dimension leaves a partial sum.
"""

from functools import cached_property, lru_cache
from math import prod

import numpy as np

from gspmd.annotate.spec import Spec
from gspmd.hardware.dtypes import itemsize
from gspmd.hardware.links import einsum_seconds
from gspmd.planner.paths import FAR, ShortestPaths, fitting, shortest_paths
from gspmd.planner.placements import Axes, Placements
from gspmd.planner.steps import Contraction, Environment, Step, Tensor, picoseconds, wider


class ContractionTable:
    """Of one shared tensor and one member: a row for each placement of both, the result following from it.

    Args:
        added: whether the result is to be added to others, which may owe sums that it does not.

    Attributes:
        shared, partner, result: the routes of the three tensors; no partner for a tensor that is summed alone.
        left, right, made: the numbers of the three tensors' placements, by row.
        dims: of the result, in the target's order, but for those that no operand has.
    """

    def __init__(self, environment: Environment, left: Tensor, contraction: Contraction, added: bool = False):
        self.environment, self.left, self.contraction = environment, left, contraction
        self.sizes, mesh = dict(environment.sizes), dict(environment.mesh)
        right = contraction.right
        held = (left.spec,) if right is None else (left.spec, right.spec)
        union = tuple(dict.fromkeys(dim for spec in held for dim in spec.dims))
        self.dims = tuple(dim for dim in contraction.target.spec.dims if dim in union)
        self.summed = len(self.dims) < len(union)
        self.left_paths = self._paths(left.spec.dims, left.itemsize, frozenset(left.spec.partial))
        partial = frozenset(mesh) if self.summed or added else frozenset(axis for spec in held for axis in spec.partial)
        self.result_paths = self._paths(self.dims, contraction.target.itemsize, partial)
        self.right_paths = None
        if right is not None:
            self.right_paths = self._paths(right.spec.dims, right.itemsize, frozenset(right.spec.partial))
        masks = tuple(self.left_paths.mask(spec.partial) for spec in held)
        allowed = tuple(fitting(self.sizes[dim], tuple(mesh.values())) for dim in union)
        self._union, self._placements = union, joint(tuple(mesh.values()), allowed, masks)
        self.left_nodes = self._numbers(self.left_paths, left.spec.dims, self._placements.partials[:, 0])
        self.right_nodes = None
        if right is not None:
            self.right_nodes = self._numbers(self.right_paths, right.spec.dims, self._placements.partials[:, 1])
        self.result_nodes = self._numbers(self.result_paths, self.dims, self._partial())

    def _paths(self, dims: tuple[str, ...], width: int, partial: frozenset[str]) -> ShortestPaths:
        shape = tuple(self.sizes[dim] for dim in dims)
        return shortest_paths(shape, self.environment.mesh, width, self.environment.chip, partial)

    def _column(self, dim: str) -> np.ndarray:
        return self._placements.rows[:, self._union.index(dim)]

    def _numbers(self, paths: ShortestPaths, dims: tuple[str, ...], partial: np.ndarray) -> np.ndarray:
        nodes = paths.nodes
        return nodes.find(nodes.key([self._column(dim) for dim in dims], partial))

    def _partial(self) -> np.ndarray:
        """What the result owes: the sums of both, and those of the contracted dimensions."""
        partial = np.bitwise_or.reduce(self._placements.partials, axis=1)
        for dim in self._union:
            if dim not in self.dims:
                partial = partial | self._placements.sequences.mask[self._column(dim)]
        return partial

    @cached_property
    def _einsums(self) -> np.ndarray:
        """Picoseconds of the local einsum, by row."""
        masks = self._placements.sequences.mask[self._placements.rows]
        shapes = np.array([self.sizes[dim] for dim in self._union]) // self._placements.parts[masks]
        ranks = np.zeros(len(shapes), int)
        for column in shapes.T:
            values, rank = np.unique(column, return_inverse=True)
            ranks = np.unique(ranks * len(values) + rank, return_inverse=True)[1]
        _, first, kind = np.unique(ranks, return_index=True, return_inverse=True)
        local = [dict(zip(self._union, map(int, shapes[row]))) for row in first]
        return np.array([picoseconds(self._figures(each)[1]) for each in local])[kind]

    @cached_property
    def costs(self) -> np.ndarray:
        """Of the partner's way and the local einsum, by row; infinite for what a pin rules out."""
        costs = self._einsums.astype(complex)
        if self.right_paths is not None:
            costs += self.right_costs[self.right_nodes]
            if self.contraction.pinned is not None:
                costs[self.right_nodes != self.right_paths.number(self.contraction.pinned)] = FAR
        return costs

    @property
    def right_costs(self) -> np.ndarray:
        """What every placement of the partner costs."""
        return self.right_paths.costs_from(self.right_paths.number(self.contraction.right.spec))

    def _figures(self, local: dict[str, int]) -> tuple[int, float]:
        """Operations and seconds of the local einsum of pieces of these sizes."""
        right = self.contraction.right
        if right is None and not self.summed:
            return 0, 0.0
        flops = 0 if right is None else prod(local.values()) * (2 if self.summed else 1)
        touched = sum(width * prod([local[dim] for dim in dims]) for dims, width in self._touched)
        return flops, einsum_seconds(flops, touched, self._dtype, self.environment.chip)

    @cached_property
    def _touched(self) -> list[tuple[tuple[str, ...], int]]:
        """What a local einsum reads and writes: dimensions, and bytes per element."""
        tensors = [self.left, *([] if self.contraction.right is None else [self.contraction.right])]
        found = [(tensor.spec.dims, itemsize(tensor.dtype)) for tensor in tensors]
        return [*found, (self.dims, itemsize(self.contraction.target.dtype))]

    @cached_property
    def _dtype(self) -> str:
        return wider(self.left, self.contraction)

    def einsum(self, left: Spec, right: Spec | None, result: Spec) -> Step:
        """The local einsum as a step."""
        local, mesh = {}, dict(self.environment.mesh)
        for held in (left, right):
            if held is not None:
                local |= {dim: self.sizes[dim] // prod(mesh[axis] for axis in held.axes_of(dim)) for dim in held.dims}
        flops, seconds = self._figures(local)
        return Step("einsum", (), 0, seconds, left, result, self.contraction.target.name, flops, right)


@lru_cache(maxsize=16)
def joint(sizes: Axes, allowed: tuple[frozenset[int], ...], partial: tuple[int, ...]) -> Placements:
    """The placements of all the dimensions of a product, by the sizes of the mesh axes and what may stand where."""
    return Placements(sizes, allowed, partial)


def lowest(costs: np.ndarray, at: np.ndarray, count: int) -> np.ndarray:
    """For each of `count` numbers, the lowest of the costs that stand at it."""
    order = np.argsort(at.astype(np.uint16) if count <= 1 << 16 else at, kind="stable")
    at, found = at[order], np.full(count, FAR)
    starts = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]]))
    found[at[starts]] = np.minimum.reduceat(costs[order], starts)
    return found
