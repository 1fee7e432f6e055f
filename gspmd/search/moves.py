"""Costs of moving a tensor between all pairs of many placements, as tables.

A plan needs one shortest path, but a search needs all of them. `MoveCosts` runs the planner's shortest-path search once
for each placement of interest, and keeps the seconds as a row of a table.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, takewhile

import numpy as np

from gspmd.annotate.spec import Spec
from gspmd.planner.graph.paths import ShortestPaths, shortest_paths
from gspmd.planner.steps import Environment, Step

Arc = tuple[int, int, int]
PICOSECOND = 1e-12
"""The unit in which the planner's paths count costs (`gspmd.planner.graph.paths`), in seconds."""
HOISTED = ("all-to-all", "collective-permute")
"""Steps that compilers move out of a loop if their operand is invariant, because the steps do not enlarge it."""


class MoveCosts:
    """Seconds of all moves between placements of one tensor, which may be a partial sum before its move.

    Args:
        environment: mesh, chip, and the sizes of all dimensions.
        dims: the tensor's dimensions.
        width: bytes per element when sent.
        reduce: how a partial sum is reduced, as in `gspmd.planner.graph.resharding.move`.
    """

    def __init__(self, environment: Environment, dims: Sequence[str], width: int, reduce: str = "sum"):
        self.environment, self.dims, self.width, self.reduce = environment, tuple(dims), width, reduce
        sizes = dict(environment.sizes)
        self.shape = tuple(sizes[dim] for dim in self.dims)
        self._axes = tuple(axis for axis, _ in environment.mesh)
        self._steps: dict[Arc, tuple[Step, ...]] = {}

    @cached_property
    def paths(self) -> ShortestPaths:
        """The shortest paths in the planner's graph of placements of this tensor."""
        axes, sums = frozenset(self._axes), self.reduce == "sum"
        return shortest_paths(self.shape, self.environment.mesh, self.width, self.environment.chip, axes, sums)

    def numbers(self, specs: Iterable[Spec]) -> np.ndarray:
        """Return the graph's node number of each spec, or -1 if the spec's mesh axes do not divide the sizes."""
        mesh = dict(self.environment.mesh)
        return np.array([self.paths.number(spec.without_trivial(mesh)) for spec in specs], int)

    def nodes(self, rows: Sequence[np.ndarray], partial: np.ndarray | int = 0) -> np.ndarray:
        """Return the node numbers of placements, given the mesh axes on each dimension and those of a partial sum."""
        return self.paths.nodes.find(self.paths.nodes.key(rows, partial))

    def between(self, sources: np.ndarray, targets: np.ndarray, *, by: str = "") -> np.ndarray:
        """Return the seconds of the cheapest moves as an array [sources, targets]; infinite if there is no move.

        Args:
            sources, targets: node numbers of placements; -1 for a placement that is impossible.
            by: `"sources"` or `"targets"`, the end of the moves from which shortest paths are searched, with one search
                for each distinct placement there; by default the end with fewer placements.
        """
        by = by or ("sources" if len(sources) <= len(targets) else "targets")
        few, many = (sources, targets) if by == "sources" else (targets, sources)
        names, index = np.unique(few, return_inverse=True)
        table = np.full((len(names), len(many)), np.inf)
        possible = np.flatnonzero(names >= 0)
        costs = self.paths.costs("from" if by == "sources" else "to", names[possible].tolist())
        for row, each in zip(possible, costs):
            table[row] = np.where(many < 0, np.inf, each.real[many] * PICOSECOND)
        table = table[index]
        return table if by == "sources" else table.T

    def steps_between(
        self, sources: np.ndarray, targets: np.ndarray, *, searched: bool = False
    ) -> list[list[tuple[Step, ...]]]:
        """Return the steps of the cheapest moves, indexed by source and then target; empty if there is no move.

        Args:
            sources, targets: node numbers of placements; -1 for a placement that is impossible.
            searched: whether the moves are planned as equations, like the gradient of a move. Of several cheapest
                paths, an equation takes the one through the placement whose text comes first.
        """
        table: list[list[tuple[Step, ...]]] = [[()] * len(targets) for _ in sources]
        for row, column, _, path in self._paths_between(sources, targets, searched):
            for arc in path:
                if arc not in self._steps:
                    self._steps[arc] = self.paths.steps([arc], self.dims, "")
                table[row][column] += self._steps[arc]
        return table

    def _paths_between(
        self, sources: np.ndarray, targets: np.ndarray, searched: bool = False
    ) -> Iterator[tuple[int, int, np.ndarray, Iterable[Arc]]]:
        """Yield, for each possible move, its row and column, the costs from all nodes to the target, and its arcs."""
        ends = targets.tolist()
        self.paths.costs("to", [end for end in ends if end >= 0])  # together, which is faster
        middles = self._middles(sources, targets) if searched else None
        if middles is not None:
            self.paths.costs("to", np.unique(middles).tolist())
        for column, end in enumerate(ends):
            rest = self.paths.costs_to(end) if end >= 0 else None
            for row, name in enumerate(sources.tolist()):
                if rest is None or name < 0 or not np.isfinite(rest[name].real):
                    continue
                if middles is None:
                    yield row, column, rest, self.paths.path(rest, name)
                else:
                    middle = int(middles[row, column])
                    first = self.paths.path(self.paths.costs_to(middle), name)
                    yield row, column, rest, chain(first, self.paths.path(rest, middle))

    def hoisted(self, sources: np.ndarray, targets: np.ndarray, *, searched: bool = False) -> np.ndarray:
        """Return an array [sources, targets] of the seconds of those first steps that are hoisted out of a loop.

        The tensor does not change in the loop. The first step that enlarges the tensor, and all later steps, stay in
        the loop. A slice and all later steps stay too, because compilers count the device's position among the operands
        of a slice. Each pair is planned, even if it occurs several times; `at_every` removes such repetitions.

        Args:
            sources, targets, searched: as for `steps_between`.
        """
        meaning, table = self.paths.graph.meaning, np.zeros((len(sources), len(targets)))
        for row, column, rest, path in self._paths_between(sources, targets, searched):
            first = takewhile(lambda arc: meaning(arc[0])[0] in HOISTED, path)
            table[row, column] = sum((rest[here] - rest[there]).real for _, here, there in first) * PICOSECOND
        return table

    def shared(
        self,
        sources: np.ndarray,
        ends: np.ndarray,
        others: np.ndarray,
        *,
        searched: tuple[bool, bool] = (False, False),
        transposed: tuple[bool, bool] = (False, False),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return arrays [sources, ends, others] of the seconds of the first steps that two moves of a tensor share.

        One move goes to a placement in `ends` and the other to a placement in `others`. A program that moves one tensor
        to two placements runs their common steps once.

        Args:
            sources, ends, others: node numbers of placements.
            searched: for each of the two moves, whether it is planned as an equation, as for `steps_between`.
            transposed: for each of the two moves, whether it transposes the tensor. A move that is planned as an
                equation transposes it at the placement on the way, and shares no step after that.

        Returns:
            The seconds of the common steps, and the seconds of those among them that are hoisted out of a loop in which
            the tensor does not change.
        """
        # Arrays [sources, ends, others]. Each move aims at a placement on the way first, if it is planned as an
        # equation, and at its end from there on.
        here = sources[:, None, None]
        lasts = [ends[None, :, None], others[None, None, :]]
        aims = [*lasts]
        for move, targets in enumerate((ends, others)):
            if searched[move]:
                aims[move] = np.expand_dims(self._middles(sources, targets), 2 - move)
                lasts[move] = aims[move] if transposed[move] else lasts[move]
        starts: dict[int, set[int]] = {}
        for aim, last in zip(aims, lasts):
            for befores, afters in ((here, aim), (aim, last)):
                both = np.broadcast_arrays(befores, afters)
                for before, after in {*zip(*(each.ravel().tolist() for each in both))}:
                    starts.setdefault(after, set()).add(before)
        places = np.array(sorted(starts))
        column = np.full(len(self.paths.nodes), -1)
        column[places] = np.arange(len(places))
        onward, took, leaves = self._first_steps(places, [sorted(starts[place]) for place in places.tolist()])
        shape = len(sources), len(ends), len(others)
        seconds, leaving = np.zeros(shape), np.zeros(shape)
        same = np.ones(shape, bool)
        outside = same
        while same.any():
            aims = [
                np.where(here == aim, last, aim) if is_searched else aim
                for aim, last, is_searched in zip(aims, lasts, searched)
            ]
            at = column[aims[0]]
            there = onward[here, at]
            same = same & (there >= 0) & (there == onward[here, column[aims[1]]])
            outside = outside & same & leaves[here, at]
            seconds += np.where(same, took[here, at], 0.0)
            leaving += np.where(outside, took[here, at], 0.0)
            here = np.where(same, there, here)
        return seconds, leaving

    @cached_property
    def _by_text(self) -> np.ndarray:
        """The rank of each node's spec among the texts of all specs."""
        texts = [str(self.paths.spec(self.dims, number)) for number in range(len(self.paths.nodes))]
        return np.argsort(np.argsort(texts))

    def _middles(self, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the placements on the way of moves that are planned as equations, as node numbers [sources, targets].

        The gradient of a move is planned in this way. Its path costs as much as that of a direct move. If there are
        several such paths, an equation takes the one through the placement whose text comes first
        (`gspmd.planner.graph.search`).
        """
        rests = np.array(self.paths.costs("to", np.maximum(targets, 0).tolist()))
        found = np.zeros((len(sources), len(targets)), int)
        for row, costs in enumerate(self.paths.costs("from", np.maximum(sources, 0).tolist())):
            total = costs + rests
            tied = total == total.min(axis=1, keepdims=True)
            found[row] = np.where(tied, self._by_text, len(self._by_text)).argmin(axis=1)
        return found

    def _first_steps(
        self, places: np.ndarray, starts: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the first step of each move, as three arrays [placement, target].

        They are the node after the step, or -1 if there is no step; the seconds of the step; and whether it may be
        hoisted.

        Args:
            places: the targets, as node numbers.
            starts: for each target, the placements from which moves to it start. Their first steps are in the arrays,
                and so are those of all placements on their paths.
        """
        onward = np.full((len(self.paths.nodes), len(places)), -1)
        took, leaves = np.zeros(onward.shape), np.zeros(onward.shape, bool)
        meaning = self.paths.graph.meaning
        for column, rest in enumerate(self.paths.costs("to", places.tolist())):
            for source in starts[column]:
                if not np.isfinite(rest[source].real):
                    continue
                for code, here, there in self.paths.path(rest, source):
                    if onward[here, column] >= 0:  # From here on the path is known.
                        break
                    onward[here, column], took[here, column] = there, (rest[here] - rest[there]).real * PICOSECOND
                    leaves[here, column] = meaning(code)[0] in HOISTED
        return onward, took, leaves


def at_every(made: Callable[..., np.ndarray], *places: np.ndarray) -> np.ndarray:
    """Evaluate a table at arrays of placements that broadcast together.

    The table is computed once, for the distinct placements in each array.

    Args:
        made: a function that computes the table from arrays of distinct placements; the table has an axis for each
            array.
        places: arrays of node numbers of placements.

    Example:
        >>> def made(sources, targets):
        ...     print("made of", sources, targets)
        ...     return 10 * sources[:, None] + targets
        >>> at_every(made, np.array([[7], [4], [7]]), np.array([[2, 2]]))
        made of [4 7] [2]
        array([[72, 72],
               [42, 42],
               [72, 72]])
    """
    numbers, at = different(*places)
    return made(*numbers)[at]


def different(*places: np.ndarray) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]]:
    """Return the distinct numbers in each array, and for each entry of the array its position among these numbers.

    >>> different(np.array([7, 4, 7]))
    ([array([4, 7])], (array([1, 0, 1]),))
    """
    found = [np.unique(each, return_inverse=True) for each in places]
    return [numbers for numbers, _ in found], tuple(at.reshape(each.shape) for (_, at), each in zip(found, places))
