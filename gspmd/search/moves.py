"""Costs of moving one tensor between many placements at once, as tables.

A plan asks for one shortest path; a search asks for all of them. `MoveCosts` runs the planner's shortest paths once for
each placement of interest and keeps the seconds as the rows of a table.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile

import numpy as np

from gspmd.annotate.spec import Spec
from gspmd.hardware.dtypes import itemsize, wire_of
from gspmd.planner.graph.paths import ShortestPaths, shortest_paths
from gspmd.planner.graph.placements import placements as all_placements
from gspmd.planner.graph.placements import sequences
from gspmd.planner.steps import Environment, Step

Sizes = Mapping[str, int]
PICOSECOND = 1e-12
"""The unit in which the planner's paths count costs (`gspmd.planner.graph.paths`), in seconds."""
HOISTED = ("all-to-all", "collective-permute")
"""Steps that compilers move out of a loop in which their operand is invariant: they do not enlarge it."""


class MoveCosts:
    """Seconds between the placements of one tensor, which may be a partial sum where a path begins.

    Args:
        environment: mesh, chip, and the sizes of all dimensions.
        dims: the tensor's dimensions.
        dtype: the dtype in which it is held and sent.
        width: bytes of an element on the wire; by default the bytes of the dtype.
        reduce: how a partial sum is reduced, as in `gspmd.planner.graph.resharding.move`.
    """

    def __init__(
        self, environment: Environment, dims: Sequence[str], dtype: str, width: int | None = None, reduce: str = "sum"
    ):
        self.environment, self.dims, self.dtype, self.reduce = environment, tuple(dims), dtype, reduce
        self.width = itemsize(wire_of(dtype, summed=True)) if width is None else width
        sizes = dict(environment.sizes)
        self.shape = tuple(sizes[dim] for dim in self.dims)
        self._axes = tuple(axis for axis, _ in environment.mesh)
        self._steps: dict[tuple[int, int, int], tuple[Step, ...]] = {}

    @cached_property
    def paths(self) -> ShortestPaths:
        """The planner's graph of this tensor."""
        axes, sums = frozenset(self._axes), self.reduce == "sum"
        return shortest_paths(self.shape, self.environment.mesh, self.width, self.environment.chip, axes, sums)

    def numbers(self, specs: Iterable[Spec]) -> np.ndarray:
        """Return the graph's numbers of placements; -1 for a placement that does not divide the sizes."""
        mesh = dict(self.environment.mesh)
        return np.array([self.paths.number(spec.without_trivial(mesh)) for spec in specs], int)

    def nodes(self, rows: Sequence[np.ndarray], partial: np.ndarray | int = 0) -> np.ndarray:
        """Return the numbers of placements, from the mesh axes on each dimension and the axes of a partial sum."""
        return self.paths.nodes.find(self.paths.nodes.key(rows, partial))

    def between(self, sources: np.ndarray, targets: np.ndarray, *, by: str) -> np.ndarray:
        """Return [sources, targets] the seconds of the cheapest chains of steps; infinite if there is none.

        Args:
            sources, targets: numbers of placements; -1 for a tensor that does not exist.
            by: `"sources"` or `"targets"`, whichever are fewer: each needs one run of shortest paths.
        """
        few, many = (sources, targets) if by == "sources" else (targets, sources)
        names, index = np.unique(few, return_inverse=True)
        table = np.stack([self._seconds(by, int(name), many) for name in names])
        table[:, many < 0] = np.inf
        table = table[index]
        return table if by == "sources" else table.T

    def steps_between(self, sources: np.ndarray, targets: np.ndarray) -> list[list[tuple[Step, ...]]]:
        """Return [source][target] the chains of steps; no steps if there is no chain."""
        table: list[list[tuple[Step, ...]]] = [[()] * len(targets) for _ in sources]
        for column, end in enumerate(targets.tolist()):
            rest = self.paths.costs_to(end) if end >= 0 else None
            for row, name in enumerate(sources.tolist()):
                if rest is not None and name >= 0 and np.isfinite(rest[name].real):
                    path = self.paths.path(rest, name)
                    table[row][column] = tuple(step for arc in path for step in self._step(arc))
        return table

    def _step(self, arc: tuple[int, int, int]) -> tuple[Step, ...]:
        if arc not in self._steps:
            self._steps[arc] = self.paths.steps([arc], self.dims, "")
        return self._steps[arc]

    def hoisted(self, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return [sources, targets] the seconds of the first steps, which leave a loop if the tensor is invariant.

        From the first step on that enlarges the tensor, a chain stays in the loop. So does everything after a slice,
        because compilers count the device's position among its operands.
        """
        (names, rows), (ends, columns) = (np.unique(each, return_inverse=True) for each in (sources, targets))
        table = np.zeros((len(names), len(ends)))
        for column, end in enumerate(ends.tolist()):
            rest = self.paths.costs_to(end) if end >= 0 else None
            for row, name in enumerate(names.tolist()):
                if rest is not None and name >= 0 and np.isfinite(rest[name].real):
                    table[row, column] = self._first(rest, name)
        return table[np.ix_(rows, columns)]

    def _first(self, rest: np.ndarray, number: int) -> float:
        """Return the seconds of the first steps of a shortest path, given the remaining cost from each placement."""
        meaning = self.paths.graph.meaning
        first = takewhile(lambda arc: meaning(arc[0])[0] in HOISTED, self.paths.path(rest, number))
        return sum((rest[here] - rest[there]).real for _, here, there in first) * PICOSECOND

    def shared(self, sources: np.ndarray, ends: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return [sources, ends, others] the seconds of the first steps that the moves to two placements share.

        A program in which one tensor goes to both has these steps once.

        Returns:
            The seconds, and the seconds of the first of these steps, which leave a loop in which the tensor is
            invariant.
        """
        places, index = np.unique(np.concatenate([ends, others]), return_inverse=True)
        onward, took, leaves = self._first_steps(np.unique(sources), places)
        one, other = index[: len(ends), None], index[len(ends) :]
        seconds = np.zeros((len(sources), len(ends), len(others)))
        leaving = np.zeros(seconds.shape)
        here, same = np.broadcast_to(sources[:, None, None], seconds.shape), np.ones(seconds.shape, bool)
        outside = same
        while same.any():
            there = onward[here, one]
            same = same & (there >= 0) & (there == onward[here, other])
            outside = outside & same & leaves[here, one]
            seconds += np.where(same, took[here, one], 0.0)
            leaving += np.where(outside, took[here, one], 0.0)
            here = np.where(same, there, here)
        return seconds, leaving

    def _first_steps(self, sources: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return [placement, place] arrays: the first step's target, or -1; its seconds; if it may leave a loop."""
        onward = np.full((len(self.paths.nodes), len(places)), -1)
        took, leaves = np.zeros(onward.shape), np.zeros(onward.shape, bool)
        meaning = self.paths.graph.meaning
        for column, place in enumerate(places.tolist()):
            rest = self.paths.costs_to(place)
            for source in sources[np.isfinite(rest[sources].real)].tolist():
                for code, here, there in self.paths.path(rest, source):
                    if onward[here, column] >= 0:  # From here on the path is known.
                        break
                    onward[here, column], took[here, column] = there, (rest[here] - rest[there]).real * PICOSECOND
                    leaves[here, column] = meaning(code)[0] in HOISTED
        return onward, took, leaves

    def _seconds(self, by: str, number: int, others: np.ndarray) -> np.ndarray:
        if number < 0:
            return np.full(len(others), np.inf)
        costs = self.paths.costs_from(number) if by == "sources" else self.paths.costs_to(number)
        return costs[others].real * PICOSECOND


def placements(dims: Sequence[str], sizes: Sizes, mesh: Sizes, whole: Iterable[str] = ()) -> tuple[Spec, ...]:
    """List every placement of a tensor on a mesh: each mesh axis on one dimension, or on none, in every order.

    Args:
        dims: the tensor's dimensions.
        sizes: sizes of the dimensions; placements whose axes do not divide them are left out.
        mesh: sizes of the mesh axes; those of size 1 shard nothing.
        whole: dimensions that no axis may shard.

    Returns:
        Specs, those that use fewer axes first.

    Example:
        >>> [str(spec) for spec in placements("EF", {"E": 4, "F": 6}, {"x": 2, "y": 4})]
        ['EF', 'E_xF', 'E_yF', 'EF_x', 'E_yF_x']
    """
    axes = tuple(axis for axis, size in mesh.items() if size > 1)
    counts = tuple(mesh[axis] for axis in axes)
    rows, _, _ = all_placements(len(axes), allowed(dims, sizes, counts, whole), [])
    order = sequences(len(axes)).axes
    specs = [Spec(tuple(dims), tuple(tuple(axes[a] for a in order[n]) for n in row)) for row in rows.tolist()]
    return tuple(sorted(specs, key=lambda spec: (len(spec.used), [[-len(held) for held in spec.axes], spec.axes])))


def allowed(
    dims: Sequence[str], sizes: Sizes, counts: Sequence[int], whole: Iterable[str] = ()
) -> tuple[frozenset[int], ...]:
    """Return for each dimension the sets of mesh axes, as masks, that divide it; no axes for unsharded dimensions."""
    from gspmd.planner.graph.placements import fitting

    kept = set(whole)
    return tuple(frozenset({0}) if dim in kept else fitting(sizes[dim], tuple(counts)) for dim in dims)
