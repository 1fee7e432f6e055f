"""The planner's results by brute force, in plain Python: every placement, every step, every product.

Only the prices of single steps are shared with the planner. A placement is the tuple of every dimension's axes, and the
set of axes of its partial sum.
"""

import heapq
import random
from collections.abc import Iterator, Mapping
from itertools import combinations, permutations, product
from math import inf, prod

from gspmd import Spec
from gspmd.annotate import parse_equation
from gspmd.hardware.chips import Chip
from gspmd.hardware.dtypes import itemsize
from gspmd.hardware.links import collective_seconds, wire_bytes
from gspmd.hardware.matmul import local_einsum_seconds
from gspmd.planner.steps import picoseconds

Placement = tuple[tuple[tuple[str, ...], ...], frozenset[str]]
Cost = tuple[int, int, int]
FAR = (inf, inf, inf)


class Tensor:
    """Every placement of one tensor, and every step from each to the next."""

    def __init__(self, shape, mesh: Mapping[str, int], width: int, chip: Chip, owed):
        self.shape, self.mesh, self.chip = shape, mesh, chip
        self.bytes, self.prices = width * prod(shape), {}
        self.places = list(self._placements(frozenset(owed)))
        self.onward = {here: list(self._steps(here)) for here in self.places}
        self.back = {here: [] for here in self.places}
        for here, ways in self.onward.items():
            for cost, there in ways:
                self.back[there].append((cost, here))

    def _placements(self, owed) -> Iterator[Placement]:
        for stands in product([*range(len(self.shape)), "-", "+"], repeat=len(self.mesh)):
            partial = frozenset(axis for axis, place in zip(self.mesh, stands) if place == "+")
            held = [[axis for axis, place in zip(self.mesh, stands) if place == d] for d in range(len(self.shape))]
            if partial <= owed and all(size % self.parts(axes) == 0 for size, axes in zip(self.shape, held)):
                yield from ((axes, partial) for axes in product(*map(permutations, held)))

    def parts(self, axes) -> int:
        return prod(self.mesh[axis] for axis in axes)

    def held(self, here: Placement) -> int:
        return self.bytes // prod(map(self.parts, here[0]))

    def price(self, kind: str, axes, here: Placement, there: Placement) -> Cost:
        key = kind, frozenset(axes), max(self.held(here), self.held(there))
        if key not in self.prices:
            buffer = key[2]
            named = [a for a in self.mesh if a in axes]
            seconds = collective_seconds(kind, named, self.mesh, buffer, self.chip, self.bytes)
            self.prices[key] = picoseconds(seconds), wire_bytes(kind, self.parts(axes), buffer), 1
        return self.prices[key]

    def _steps(self, here: Placement) -> Iterator[tuple[Cost, Placement]]:
        for kind, axes, there in self._ways(here):
            if all(size % self.parts(held) == 0 for size, held in zip(self.shape, there[0])):
                yield self.price(kind, axes, here, there), there

    def _ways(self, here: Placement) -> Iterator[tuple[str, tuple[str, ...], Placement]]:
        axes, partial = here
        put = lambda d, held, on=axes: (*on[:d], held, *on[d + 1 :])  # noqa: E731
        free = [axis for axis in self.mesh if axis not in partial and not any(axis in held for held in axes)]
        for d, held in enumerate(axes):
            for group in _ordered_subsets(free):
                yield "slice", group, (put(d, held + group), partial)
            for group in _ordered_subsets(partial):
                yield "reduce-scatter", group, (put(d, held + group), partial - set(group))
            for start in range(len(held)):
                group, bare = held[start:], put(d, held[:start])
                yield "all-gather", group, (bare, partial)
                for e in range(len(axes)):
                    if e != d:
                        yield "all-to-all", group, (put(e, axes[e] + group, bare), partial)
        for count in range(1, len(partial) + 1):
            for group in combinations(partial, count):
                yield "all-reduce", group, (axes, partial - set(group))
        counts = list(map(self.parts, axes))
        for there in self.places:
            if there[1] == partial and there != here and list(map(self.parts, there[0])) == counts:
                yield "collective-permute", self._moved(axes, there[0]), there

    def _moved(self, before, after) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh if self._place(before, axis) != self._place(after, axis))

    def _place(self, axes, axis: str):
        """Return the dimension that an axis shards, and the factor of its coordinate there."""
        return next(((d, self.parts(h[h.index(axis) + 1 :])) for d, h in enumerate(axes) if axis in h), None)

    def costs_from(self, start: Placement) -> dict[Placement, Cost]:
        return _dijkstra(self.onward, start)

    def costs_to(self, end: Placement) -> dict[Placement, Cost]:
        return _dijkstra(self.back, end)


def _dijkstra(graph, start: Placement) -> dict[Placement, Cost]:
    queue, number, done = [((0, 0, 0), 0, start)], 0, {}
    while queue:
        cost, _, here = heapq.heappop(queue)
        if here in done:
            continue
        done[here] = cost
        for price, there in graph[here]:
            if there not in done:
                number += 1
                heapq.heappush(queue, (plus(cost, price), number, there))
    return done


def _ordered_subsets(axes) -> list[tuple[str, ...]]:
    return [order for count in range(1, len(axes) + 1) for order in permutations(axes, count)]


def plus(*costs: Cost) -> Cost:
    return tuple(map(sum, zip(*costs)))


def placement(spec: Spec, dims=None) -> Placement:
    return tuple(spec.axes_of(dim) for dim in dims or spec.dims), frozenset(spec.partial)


def tensor(dims, sizes, mesh, dtype: str, chip: Chip, owed) -> Tensor:
    return Tensor([sizes[dim] for dim in dims], mesh, itemsize(dtype), chip, owed)


def cheapest_move(src: Spec, dst: Spec, sizes, mesh, dtype: str, chip: Chip) -> Cost:
    """Return the cost of the cheapest chain."""
    whole = tensor(src.dims, sizes, mesh, dtype, chip, src.partial)
    return whole.costs_from(placement(src)).get(placement(dst, src.dims), FAR)


# -- products ----------------------------------------------------------------------------------------------------------


def cheapest_product(equation: str, sizes, mesh, dtype: str, chip: Chip) -> Cost:
    """Return the cost of a product or a group.

    Every placement of the shared operand is tried with every placement of each partner. If no single placement of it
    makes all results of a group, it is moved once for each member.
    """
    parsed = parse_equation(equation)
    shared = parsed.operands[0].specs[0]
    left = tensor(shared.dims, sizes, mesh, dtype, chip, shared.partial).costs_from(placement(shared))
    tables = [_Table(shared, *pair, sizes, mesh, dtype, chip) for pair in zip(parsed.operands[1].specs, parsed.outputs)]
    rows = [[plus(cost, table.best(here)) for table in tables] for here, cost in left.items()]
    once = min(plus(*row, tuple(-(len(row) - 1) * part for part in cost)) for row, cost in zip(rows, left.values()))
    return once if once < FAR else plus(*map(min, zip(*rows)))


class _Table:
    def __init__(self, shared: Spec, partner: Spec, output: Spec, sizes, mesh, dtype: str, chip: Chip):
        self.shared, self.partner, self.output = shared, partner, output
        self.sizes, self.mesh, self.dtype, self.chip = sizes, mesh, dtype, chip
        right = tensor(partner.dims, sizes, mesh, dtype, chip, partner.partial)
        self.right = right.costs_from(placement(partner))
        self.union = tuple(dict.fromkeys(shared.dims + partner.dims))
        self.dims = tuple(dim for dim in output.dims if dim in self.union)
        made = tensor(self.dims, sizes, mesh, dtype, chip, mesh)
        self.rest = made.costs_to(placement(output, self.dims))

    def best(self, here: Placement) -> Cost:
        return min((self._cost(here, there, cost) for there, cost in self.right.items()), default=FAR)

    def _cost(self, here: Placement, there: Placement, cost: Cost) -> Cost:
        on = dict(zip(self.shared.dims, here[0]))
        other = dict(zip(self.partner.dims, there[0]))
        if any(on[dim] != other[dim] for dim in on if dim in other):
            return FAR
        on |= other
        roles = [axis for axes in on.values() for axis in axes] + [*here[1], *there[1]]
        if len(roles) != len(set(roles)):
            return FAR
        owed = here[1] | there[1] | {axis for dim, axes in on.items() if dim not in self.dims for axis in axes}
        rest = self.rest.get((tuple(on[dim] for dim in self.dims), owed), FAR)
        return rest if rest is FAR else plus(cost, (self._einsum(on), 0, 0), rest)

    def _einsum(self, on) -> int:
        local = {dim: self.sizes[dim] // prod(self.mesh[axis] for axis in axes) for dim, axes in on.items()}
        arrays = [(dims, itemsize(self.dtype)) for dims in (self.shared.dims, self.partner.dims, self.dims)]
        return picoseconds(local_einsum_seconds(local, arrays, self.dtype, self.chip))


# -- random cases ------------------------------------------------------------------------------------------------------


def random_spec(rng: random.Random, dims, mesh, owed) -> Spec:
    """Return a spec of these dimensions; at most the axes `owed` have a partial sum."""
    held, partial = {dim: [] for dim in dims}, []
    for axis in rng.sample(list(mesh), len(mesh)):
        place = rng.choice([*dims, *dims, "", *("+" if axis in owed else "")])
        if place == "+":
            partial.append(axis)
        elif place:
            held[place].append(axis)
    return Spec(tuple(dims), tuple(map(tuple, held.values())), tuple(partial))


def divides(spec: Spec, sizes, mesh) -> bool:
    return all(sizes[dim] % prod(mesh[axis] for axis in axes) == 0 for dim, axes in zip(spec.dims, spec.axes))


def random_sizes(rng: random.Random, dims, mesh) -> dict[str, int]:
    """Return sizes that all, some or none of the mesh axes divide."""
    some = [prod(axes) for count in range(len(mesh) + 1) for axes in combinations(mesh.values(), count)]
    return {dim: rng.choice([prod(mesh.values()), rng.choice(some)]) * rng.choice([1, 5, 1 << 10]) for dim in dims}


def random_move(rng: random.Random, mesh) -> tuple[Spec, Spec, dict[str, int]]:
    """Return a move that some chain makes."""
    while True:
        dims = "ABCD"[: rng.randint(1, 4 if len(mesh) < 3 else 3)]
        sizes = random_sizes(rng, dims, mesh)
        src = random_spec(rng, dims, mesh, mesh)
        dst = random_spec(rng, dims, mesh, src.partial)
        countable = prod(sizes.values()) < 2**43  # larger tensors are refused if a whole one is sent at once
        if src != dst and countable and divides(src, sizes, mesh) and divides(dst, sizes, mesh):
            return src, dst, sizes


def random_product(rng: random.Random, mesh, members: int = 1) -> tuple[str, dict[str, int]]:
    """Return a product, or a group of several members, and sizes that the mesh divides."""
    while True:
        sizes = random_sizes(rng, "ABCD", mesh)
        shared = random_spec(rng, rng.sample("ABC", rng.randint(1, 2)), mesh, mesh)
        partners, outputs = [], []
        for _ in range(members):
            partner = random_spec(rng, rng.sample("BCD", rng.randint(1, 2)), mesh, mesh)
            union = list(dict.fromkeys(shared.dims + partner.dims))
            dims = rng.sample(union, rng.randint(0, len(union)))
            made = [a for a in mesh if a in {*shared.partial, *partner.partial} or len(dims) < len(union)]
            partners.append(partner)
            outputs.append(random_spec(rng, dims, mesh, made))
        if all(divides(spec, sizes, mesh) for spec in (shared, *partners, *outputs)):
            right, out = (", ".join(map(str, specs)) for specs in (partners, outputs))
            grouped = f"{shared}, ({right}) -> ({out})"
            return grouped if members > 1 else f"{shared}, {right} -> {out}", sizes
