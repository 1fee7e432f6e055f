"""Shortest paths between the placements of one tensor: from one placement to all others, or from all to one.

    cost(head) = min over arcs of cost(tail) + price(arc)

The algorithm is a vectorized Bellman-Ford. Each round relaxes, with one addition and one minimum, all arcs out of nodes
that became cheaper in the round before. Paths have few steps, so few rounds are enough. Permutes, which are most of the
arcs, are relaxed only when the other arcs no longer change anything.

Costs are ordered by seconds, then by bytes, then by the number of steps. A cost is a complex number, picoseconds +
i · (bytes · 2⁶ + steps), because numpy compares complex numbers by the real part and then by the imaginary part. The
two parts are whole numbers that floats represent exactly, so ties are exact. A step is left out if a part of its cost
is more than a quarter of 2⁵³, and a tensor that needs such a step is refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from threading import Lock
from typing import Literal

import numpy as np

from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.display.units import amount_of_bytes
from gspmd.hardware.chips import Chip
from gspmd.hardware.links import collective_seconds, wire_bytes
from gspmd.planner.graph.placements import fitting, numbered
from gspmd.planner.graph.transitions import Arcs, graph
from gspmd.planner.steps import Step, picoseconds

STEPS = 1 << 6
"""A number that is larger than the number of steps of any path.

Bytes are multiplied by this number, to leave room for the number of steps.
"""

LARGEST = 2**53 // 4
"""The largest real or imaginary part of a step's price; sums of a few such prices stay exact, below 2⁵³."""

FAR = complex(np.inf, 0)

TOGETHER = 1 << 16
"""Number of arcs up to which several placements are searched together, so that their costs stay in a core's cache.

An arc is counted once for each of these placements.
"""


class ShortestPaths:
    """The placements of one tensor on one mesh, the costs of the steps between them, and the shortest paths.

    Args:
        shape: the shape of the unsharded tensor.
        mesh: mesh axis sizes, all above 1.
        itemsize: bytes per element on the wire.
        partial: the mesh axes over which the tensor may be a partial sum.
        scatters: whether a partial sum may be reduce-scattered.
    """

    def __init__(
        self,
        shape: Sequence[int],
        mesh: tuple[tuple[str, int], ...],
        itemsize: int,
        chip: Chip,
        partial: frozenset[str],
        scatters: bool = True,
    ):
        self.shape, self.mesh, self.chip = tuple(shape), dict(mesh), chip
        self.axes, sizes = tuple(self.mesh), tuple(self.mesh.values())
        self._whole = prod(shape) * itemsize
        self.graph = graph(sizes, tuple(fitting(size, sizes) for size in shape), self.mask(partial))
        self.nodes = self.graph.nodes
        self.left_out = False  # whether some step is too large to be counted exactly
        prices = [FAR] * self.graph.size
        for code, kind, mask, parts in self.graph.codes:
            if scatters or kind != "reduce-scatter":
                seconds, sent = self._figures(kind, mask, parts)
                price = complex(picoseconds(seconds), sent * STEPS + 1)
                if max(price.real, price.imag) <= LARGEST:
                    prices[code] = price
                else:
                    self.left_out = True
        self._prices = np.array(prices)
        self._kept: dict[tuple[str, int], np.ndarray] = {}

    # -- placements as specs -------------------------------------------------------------------------------------------

    def mask(self, axes: Iterable[str]) -> int:
        """Return a set of mesh axes as a bit mask."""
        return sum(1 << self.axes.index(axis) for axis in axes)

    def number(self, spec: Spec) -> int:
        """Return the index of a placement, or -1 if the placement's mesh axes do not divide the sizes."""
        return self.nodes.number(
            [tuple(map(self.axes.index, a)) for a in spec.axes], map(self.axes.index, spec.partial)
        )

    def spec(self, dims: tuple[str, ...], number: int) -> Spec:
        """Return the spec of a placement."""
        axes, partial = self.nodes.placement(number)
        names = lambda held: tuple(self.axes[axis] for axis in held)  # noqa: E731
        return Spec(dims, tuple(map(names, axes)), names(partial))

    @property
    def kinds(self) -> np.ndarray:
        """A number for each placement; placements that differ only in the order of axes have the same number."""
        nodes = self.nodes
        return numbered([np.zeros(len(nodes), int), *nodes.sequences.mask[nodes.rows].T, nodes.partial])

    # -- costs ---------------------------------------------------------------------------------------------------------

    def costs_from(self, number: int) -> np.ndarray:
        """Return the costs from one placement to all placements, as a cached, read-only array."""
        return self.costs("from", [number])[0]

    def costs_to(self, number: int) -> np.ndarray:
        """Return the costs from all placements to one placement, as a cached, read-only array."""
        return self.costs("to", [number])[0]

    def costs(self, side: Literal["from", "to"], numbers: Iterable[int]) -> list[np.ndarray]:
        """Return the costs from, or to, each of several placements, as `costs_from` and `costs_to` do.

        The placements are searched together, which takes much less time than one after the other.
        """
        asked = [(side, number) for number in numbers]
        new = [key for key in dict.fromkeys(asked) if key not in self._kept]
        arcs = self.graph.coming if side == "from" else self.graph.going
        count = max(1, TOGETHER // (len(arcs.tail) + 1))
        for some in (new[start : start + count] for start in range(0, len(new), count)):
            costs = np.full((len(some), len(self.nodes)), FAR)
            costs[np.arange(len(some)), [number for _, number in some]] = 0
            self._relaxed(costs, arcs)
            costs.setflags(write=False)
            self._kept.update(zip(some, costs))
        return [self._kept[key] for key in asked]

    def onward(self, costs: np.ndarray) -> np.ndarray:
        """Lower the costs in place, for placements that are reached more cheaply by steps from other placements."""
        self._relaxed(costs[None], self.graph.coming)
        return costs

    def _relaxed(self, costs: np.ndarray, arcs: Arcs) -> None:
        """Lower each row of costs in place until no arc lowers it further."""
        fresh = np.isfinite(costs)
        while fresh.any():
            front = fresh
            while front.any():
                front = arcs.relax(costs, self._prices, front)
                fresh = fresh | front
            fresh = self.graph.permutes.relax(costs, self._prices, fresh)

    # -- paths ---------------------------------------------------------------------------------------------------------

    def path(self, rest: np.ndarray, number: int) -> Iterator[tuple[int, int, int]]:
        """Yield the arcs (code, tail, head) of a shortest path from a placement.

        If several paths have the least cost, the first step is one that sends the fewest bytes, and so is each later
        step. Further ties are decided by the order of KINDS, of the tensor's dimensions and of the mesh axes.

        Args:
            rest: the cost from each placement to the end of the path.
            number: the placement at which the path starts.
        """
        rows = self.nodes.rows
        while rest[number] != 0:
            code, there = self._arcs(self.graph.going, number)
            good = self._prices[code] + rest[there] == rest[number]
            code, there = code[good], there[good]
            changed = (rows[there] != rows[number]) @ (1 << np.arange(rows.shape[1]))
            at = np.lexsort((there, code, changed & -changed, self.graph.kinds(code), self._prices[code].imag))[0]
            yield int(code[at]), number, int(there[at])
            number = int(there[at])

    def path_between(self, start: int, number: int) -> Iterator[tuple[int, int, int]]:
        """Yield the arcs of a shortest path between two placements, as `path` does."""
        costs = self.costs_from(start)
        rest, unseen = np.full(len(self.nodes), FAR), [number]
        while unseen:
            there = unseen.pop()
            if rest[there] == FAR:
                rest[there] = costs[number] - costs[there]
                code, here = self._arcs(self.graph.coming, there)
                unseen += here[costs[here] + self._prices[code] == costs[there]].tolist()
        return self.path(rest, start)

    def _arcs(self, arcs: Arcs, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes of the arcs at one placement, and the placements at the other ends of these arcs."""
        some, permutes = arcs.of(number), self.graph.permutes.of(number)
        code = np.concatenate([arcs.code[some], self.graph.permutes.code[permutes]])
        return code, np.concatenate([arcs.tail[some], self.graph.permutes.tail[permutes]])

    def steps(self, path: Iterable[tuple[int, int, int]], dims: tuple[str, ...], operand: str) -> tuple[Step, ...]:
        """Return the steps of a plan that follow a path."""
        steps = []
        for code, *ends in path:
            kind, mask, parts = self.graph.meaning(code)
            before, after = (self.spec(dims, end) for end in ends)
            axes = self._named(mask)
            if kind != "collective-permute":  # axes in the order that they have in the dimension they leave or join
                held = next((held for held in (*after.axes, *before.axes) if set(axes) <= set(held)), axes)
                axes = tuple(axis for axis in held if axis in axes)
            seconds, sent = self._figures(kind, mask, parts)
            steps.append(Step(kind, axes, sent, seconds, before, after, operand))
        return tuple(steps)

    def _named(self, mask: int) -> tuple[str, ...]:
        return tuple(axis for number, axis in enumerate(self.axes) if mask >> number & 1)

    def _figures(self, kind: str, mask: int, parts: int) -> tuple[float, int]:
        """Return the seconds of a step, and the bytes that one device sends in this step."""
        buffer = self._whole // parts
        seconds = collective_seconds(kind, self._named(mask), self.mesh, buffer, self.chip, self._whole)
        return seconds, wire_bytes(kind, int(self.nodes.parts[mask]), buffer)

    def refuse_left_out(self, name: str) -> None:
        """Raise an error if steps were left out because they cost too much.

        This is called for a tensor without a path, which might have a path with these steps.
        """
        if self.left_out:
            lengths, most = "x".join(map(str, self.shape)), amount_of_bytes(LARGEST // STEPS)
            raise PlanError(
                f"cannot plan {name or 'a tensor'} of {lengths}, {amount_of_bytes(self._whole)}: on every path a"
                f" device\n  sends more than {most} in one step, or for more than {LARGEST / 1e12:.0f} s. Check the"
                " sizes, or use larger mesh axes."
            )


#: The latest entry is last. A plain dict, because an OrderedDict can raise KeyError if a hash is interrupted.
_kept: dict[tuple, ShortestPaths] = {}
_MOST_KEPT, _MOST_ARCS = 256, 1 << 25
_lock = Lock()


def shortest_paths(
    shape: tuple[int, ...], mesh, itemsize: int, chip: Chip, partial: frozenset[str], scatters: bool = True
) -> ShortestPaths:
    """Return the `ShortestPaths` of these arguments; the latest results are cached."""
    key = shape, mesh, itemsize, chip, partial, scatters
    with _lock:
        made = _kept.pop(key, None)
        if made is None:
            made = ShortestPaths(*key)
        _kept[key] = made
        # Tensors that differ only in size share a graph, so arcs are counted once for each graph.
        arcs = lambda: sum({id(each.graph): each.graph.arcs for each in _kept.values()}.values())  # noqa: E731
        while len(_kept) > 1 and (len(_kept) > _MOST_KEPT or arcs() > _MOST_ARCS):
            del _kept[next(iter(_kept))]
        return made


def forget() -> None:
    """Empty the cache of `shortest_paths`, for benchmarks."""
    _kept.clear()
