"""Cheapest ways between the placements of one tensor: all of them from one placement, or all to one, at once.

The cost of a way is a complex number, picoseconds + i · (bytes · 2⁶ + steps): numpy compares complex numbers by their
real part, ties by their imaginary part, and both are whole numbers that a float holds exactly: a step that costs more
than a quarter of what a float can count by ones is left out, and a tensor that cannot do without one is refused. So one
array addition and one minimum per round rank seconds, then bytes, then steps.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from threading import Lock

import numpy as np

from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.display.units import amount_of_bytes
from gspmd.hardware.chips import Chip
from gspmd.hardware.links import collective_seconds, wire_bytes
from gspmd.planner.placements import Axes, parts_of
from gspmd.planner.steps import Step, picoseconds
from gspmd.planner.transitions import Arcs, graph

_STEPS = 1 << 6
_LARGEST = 2**53 // 4
FAR = complex(np.inf, 0)

Cost = tuple[int, int, int]


def packed(cost: Cost) -> complex:
    """Picoseconds, bytes and steps as one number."""
    return complex(cost[0], cost[1] * _STEPS + cost[2])


class ShortestPaths:
    """The placements of one tensor on one mesh, and what the steps between them cost.

    Args:
        shape: of the whole tensor.
        mesh: mesh axis sizes, all above 1.
        itemsize: bytes per element on the wire.
        owed: the mesh axes over which the tensor may owe a partial sum on its way.
        scatters: whether what is owed may be reduce-scattered.
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
        self.axes = tuple(self.mesh)
        self._number = {axis: number for number, axis in enumerate(self.axes)}
        self._whole = prod(shape) * itemsize
        sizes = tuple(self.mesh.values())
        self.graph = graph(sizes, tuple(fitting(size, sizes) for size in shape), self.mask(partial))
        self.nodes = self.graph.nodes
        self.left_out = False
        self._prices = self._priced(scatters)
        self._from: dict[int, np.ndarray] = {}
        self._to: dict[int, np.ndarray] = {}

    def costs_from(self, number: int) -> np.ndarray:
        """What every placement costs from one; kept, and not to be written to."""
        if number not in self._from:
            self._from[number] = _unchangeable(self.onward(self.start(number)))
        return self._from[number]

    def costs_to(self, number: int) -> np.ndarray:
        """What one placement costs from every other; kept, and not to be written to."""
        if number not in self._to:
            self._to[number] = _unchangeable(self.back(self.start(number)))
        return self._to[number]

    def refuse_left_out(self, name: str) -> None:
        """Refuse what no chain does, if one with steps too large to be counted might."""
        if self.left_out:
            shape, size = "x".join(map(str, self.shape)), amount_of_bytes(self._whole)
            most = f"{amount_of_bytes(_LARGEST // _STEPS)} at once, or for more than {_LARGEST / 1e12:.0f} s"
            raise PlanError(
                f"cannot plan {name or 'a tensor'} of {shape}, {size}: on every way there a device\n"
                f"  sends more than {most}. Check the sizes, or use larger mesh axes."
            )

    def mask(self, axes) -> int:
        """A set of mesh axes as a mask."""
        return sum(1 << self._number[axis] for axis in axes)

    def number(self, spec: Spec) -> int:
        """The number of a placement; -1 where it does not divide."""
        axes = [[self._number[axis] for axis in held] for held in spec.axes]
        return self.nodes.number(list(map(tuple, axes)), [self._number[axis] for axis in spec.partial])

    def spec(self, dims: tuple[str, ...], number: int) -> Spec:
        """The spec of a placement."""
        axes, partial = self.nodes.placement(number)
        return Spec(dims, tuple(map(self._names, axes)), self._names(partial))

    def _names(self, axes: Axes) -> tuple[str, ...]:
        return tuple(self.axes[axis] for axis in axes)

    def _named(self, mask: int) -> tuple[str, ...]:
        return tuple(axis for number, axis in enumerate(self.axes) if mask >> number & 1)

    def _priced(self, scatters: bool) -> np.ndarray:
        prices = [FAR] * self.graph.size
        named = [self._named(mask) for mask in range(1 << len(self.axes))]
        for code, kind, mask, parts in self.graph.codes:
            if scatters or kind != "reduce-scatter":
                buffer = self._whole // parts
                seconds = collective_seconds(kind, named[mask], self.mesh, buffer, self.chip)
                sent = wire_bytes(kind, int(self.nodes.parts[mask]), buffer)
                price = packed((picoseconds(seconds), sent, 1))
                if max(price.real, price.imag) <= _LARGEST:
                    prices[code] = price
                else:
                    self.left_out = True
        return np.array(prices)

    def start(self, *numbers: int) -> np.ndarray:
        """Costs before the first step: nothing at these placements, infinite elsewhere."""
        costs = np.full(len(self.nodes), FAR)
        costs[list(numbers)] = 0
        return costs

    def onward(self, costs: np.ndarray) -> np.ndarray:
        """What every placement costs at least, given what each costs without a step."""
        return self._settled(costs, self.graph.coming)

    def back(self, costs: np.ndarray) -> np.ndarray:
        """What the rest of the way costs at least from every placement, given what it costs without a step."""
        return self._settled(costs, self.graph.going)

    def _settled(self, costs: np.ndarray, arcs: Arcs) -> np.ndarray:
        """Carry on what has changed until nothing does; permutes, which are most of the steps, only in between."""
        fresh = np.isfinite(costs)
        while fresh.any():
            front = fresh
            while front.any():
                front = arcs.relax(costs, self._prices, front)
                fresh = fresh | front
            fresh = self.graph.permutes.relax(costs, self._prices, fresh)
        return costs

    def steps(self, chain: Iterable[tuple[int, int, int]], dims: tuple[str, ...], operand: str) -> tuple[Step, ...]:
        """A chain as the steps of a plan."""
        return tuple(self._step(code, *ends, dims, operand) for code, *ends in chain)

    def _step(self, code: int, here: int, there: int, dims: tuple[str, ...], operand: str) -> Step:
        kind, mask, parts = self.graph.meaning(code)
        before, after = self.spec(dims, here), self.spec(dims, there)
        axes = self._named(mask) if kind == "collective-permute" else self._ordered(mask, before, after)
        buffer = self._whole // parts
        seconds = collective_seconds(kind, self._named(mask), self.mesh, buffer, self.chip)
        sent = wire_bytes(kind, prod([self.mesh[axis] for axis in axes]), buffer)
        return Step(kind, axes, sent, seconds, before, after, operand)

    def _ordered(self, mask: int, before: Spec, after: Spec) -> tuple[str, ...]:
        """The axes of a step in the order of the dimension that they leave or come to; else in the mesh's order."""
        axes = set(self._named(mask))
        for held in (*after.axes, *before.axes):
            if axes <= set(held):
                return tuple(axis for axis in held if axis in axes)
        return self._named(mask)

    def chain(self, rest: np.ndarray, number: int) -> Iterator[tuple[int, int, int]]:
        """The cheapest way from a placement, given what the rest costs from each: code, from where, to where.

        Where several cost the same, steps that send nothing come first, then those that send less, in the order of
        KINDS, of the tensor's dimensions and of the mesh's axes.
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

    def chain_to(self, costs: np.ndarray, start: int, number: int) -> Iterator[tuple[int, int, int]]:
        """The same way to a placement, given what each costs from the start."""
        rest, open_ = np.full(len(self.nodes), FAR), [number]
        while open_:
            there = open_.pop()
            if rest[there] == FAR:
                rest[there] = costs[number] - costs[there]
                code, here = self._arcs(self.graph.coming, there)
                open_ += here[costs[here] + self._prices[code] == costs[there]].tolist()
        return self.chain(rest, start)

    def _arcs(self, arcs: Arcs, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The steps of one placement: their codes, and the placements at their other ends."""
        plain, permutes = arcs.of(number), self.graph.permutes.of(number)
        code = np.concatenate([arcs.code[plain], self.graph.permutes.code[permutes]])
        return code, np.concatenate([arcs.here[plain], self.graph.permutes.here[permutes]])


def fitting(size: int, mesh_sizes: Axes) -> frozenset[int]:
    """The sets of mesh axes, as masks, into whose number of parts a dimension divides."""
    return frozenset(mask for mask, count in enumerate(parts_of(mesh_sizes)) if size % count == 0)


_kept: OrderedDict[tuple, ShortestPaths] = OrderedDict()
_MOST_KEPT, _MOST_ARCS = 256, 1 << 25


def shortest_paths(
    shape: tuple[int, ...],
    mesh: tuple[tuple[str, int], ...],
    itemsize: int,
    chip: Chip,
    partial: frozenset[str],
    scatters: bool = True,
) -> ShortestPaths:
    """The routes of a tensor, of which the latest are kept; `mesh` has no axis of size 1."""
    key = shape, mesh, itemsize, chip, partial, scatters
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
        made = _kept[key] = ShortestPaths(*key)
        while len(_kept) > 1 and (len(_kept) > _MOST_KEPT or _arcs_kept() > _MOST_ARCS):
            _kept.popitem(last=False)
        return made


def _arcs_kept() -> int:
    """The steps of all graphs that are kept; tensors that differ in size alone share one."""
    return sum({id(each.graph): each.graph.arcs for each in _kept.values()}.values())


_lock = Lock()


def forget() -> None:
    """Drop what is kept, for benchmarks."""
    _kept.clear()


def _unchangeable(costs: np.ndarray) -> np.ndarray:
    costs.setflags(write=False)
    return costs
