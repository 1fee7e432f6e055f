"""Which gathers and reduce-scatters of a routine run inside its einsums, and by which schedule: the cheapest by cost.

Every ring has its candidates: which of the tensor's mesh axes the loop goes over and which make one chunk together (so
that chunks are not too thin for the matrix unit), the schedule, and whether parts of the shards take the axes in turns
(so that the links of all axes are busy). A ring is worth it where

    what is gathered before the loop + max(chunked products, permutes) + the first chunk's way
        < the whole product + the collective.

Source: Wang et al. 2023 (ASPLOS), §5.5, whose gate this is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as combinations
from math import prod

from gspmd.collectives.chips import Chip
from gspmd.collectives.cost import itemsize
from gspmd.collectives.efficiency import product_seconds
from gspmd.collectives.loops import Loops, Ring, Travel, gather_of, local_shape, scatter_of, settling
from gspmd.collectives.plan import Product, Routine
from gspmd.collectives.problem import Setting, Tensor
from gspmd.collectives.walk import SCHEDULES, Part, cut, parts, walk


@dataclass(frozen=True)
class Estimate:
    """Seconds of one travelling tensor and of the products that it travels in.

    Attributes:
        whole: blocking: the collectives, then the products.
        seconds: looped.
        exposed: of `seconds`, what is not the products'.
    """

    ring: Ring
    whole: float
    seconds: float
    exposed: float


def plan_loops(
    routine: Routine, inputs: Sequence[Tensor], outputs: Sequence[Tensor], setting: Setting, lowering: str
) -> tuple[Loops, float]:
    """Choose the rings of a routine.

    Args:
        routine: what runs.
        inputs, outputs: its tensors.
        setting: sizes, mesh, chip.
        lowering: `"looped"`: whatever can be looped is, each by its cheapest schedule; `"looped:<schedule>"`: by that;
            `"auto"`: only what is cheaper so.

    Returns:
        The rings, and how many seconds less than blocking the routine takes with them.
    """
    chosen = _Chooser(routine, inputs, outputs, setting, lowering)
    return Loops(chosen.gathers, chosen.scatters), chosen.gained


class _Chooser:
    def __init__(self, routine: Routine, inputs, outputs, setting: Setting, lowering: str):
        self.routine, self.inputs, self.outputs = routine, inputs, outputs
        self.sizes, self.mesh, self.chip = dict(setting.sizes), dict(setting.mesh), setting.chip
        self.forced = lowering != "auto"
        _, _, schedule = lowering.partition(":")
        self.schedules = (schedule,) if schedule else SCHEDULES
        self.gained = 0.0
        self.gathers: dict[int, Ring] = {}
        self.scatters: dict[int, Ring] = {}
        self._choose_gathers()
        self._choose_scatters()

    def _choose_gathers(self) -> None:
        """The most bytes first: of two operands of one product, only one can travel while it is multiplied."""
        travels = {n: found for n, move in enumerate(self.routine.moves) if (found := gather_of(move))}
        for number in sorted(travels, key=lambda n: -sum(step.wire_bytes for step in travels[n].steps)):
            products = [p for p in self._products_of(number) if not p.passes_through]
            if not products:
                continue
            partners = {move for p in products for move in (p.left, p.right) if move not in (number, None)}
            if any(self.gathers.get(move, Ring(())).axes for move in partners):
                if self.forced:  # one of the two is needed whole, and kept as it was all the same
                    self.gathers[number] = self._whole(number, travels[number])
                continue
            self._take(self.gathers, number, self._gather_estimates(number, travels[number], products))

    def _choose_scatters(self) -> None:
        for number, output in enumerate(self.routine.outputs):
            travel = scatter_of(self.routine, number)
            products = [self.routine.products[p] for p in output.products]
            if travel is None or all(p.passes_through for p in products):
                continue
            before = len(self.scatters)
            self._take(self.scatters, number, self._scatter_estimates(number, travel, products))
            if len(self.scatters) > before:
                self._make_late(products, travel)

    def _take(self, rings: dict[int, Ring], number: int, estimates: Iterator[Estimate]) -> None:
        best = min(estimates, key=lambda each: each.seconds, default=None)
        if best is not None and (self.forced or best.seconds < best.whole):
            rings[number] = best.ring
            self.gained += best.whole - best.seconds

    def _products_of(self, move: int) -> list[Product]:
        return [p for p in self.routine.products if move in (p.left, p.right)]

    def _whole(self, number: int, travel: Travel) -> Ring:
        dims = local_shape(travel.shard, self.sizes, self.mesh)
        return Ring((), travel.group, self.schedules[0], 1, _split(dims, travel, travel.group, ()))

    def _make_late(self, products: Sequence[Product], travel: Travel) -> None:
        """Half of what a scattered product gathers is gathered first and multiplied last, while the result travels."""
        for found in products:
            for move in (found.left, found.right):
                if move in self.gathers and self.gathers[move].axes and not self.gathers[move].late:
                    ring = self.gathers[move]
                    self.gathers[move] = Ring(
                        ring.axes, ring.within, ring.schedule, ring.turns, ring.split, self._rows(move, found, travel)
                    )

    def _rows(self, move: int, found: Product, travel: Travel) -> str | None:
        """A dimension that only this operand has, and that does not change on either way: the largest."""
        before, gathered = gather_of(self.routine.moves[move]), {}
        other = found.einsum.other if found.left == move else found.einsum.before
        sizes = local_shape(before.shard, self.sizes, self.mesh)
        for dim, size in sizes.items():
            own = other is None or dim not in other.dims
            if own and dim in found.einsum.after.dims and dim not in before.spans and dim not in travel.spans:
                gathered[dim] = size
        return max(gathered, key=gathered.get, default=None)

    # -- what the candidates cost --------------------------------------------------------------------------------------

    def _gather_estimates(self, number: int, travel: Travel, products: Sequence[Product]) -> Iterator[Estimate]:
        tensor = self.inputs[self.routine.moves[number].source]
        shard = local_shape(travel.shard, self.sizes, self.mesh)
        free = set.intersection(*(set(p.einsum.after.dims) for p in products))
        blocking = sum(step.seconds for step in travel.steps) + sum(self._product_seconds(p, {}) for p in products)
        for ring in self._rings(travel, shard, free):
            chunk = self._chunk(travel, ring, shard)
            compute = self._chunked(products, chunk, ring, travel)
            yield self._estimate(ring, blocking, compute, shard, tensor)

    def _scatter_estimates(self, number: int, travel: Travel, products: Sequence[Product]) -> Iterator[Estimate]:
        tensor, products = self.outputs[number], [p for p in products if not p.passes_through]
        shard = local_shape(travel.shard, self.sizes, self.mesh)
        blocking = sum(step.seconds for step in travel.steps) + sum(self._product_seconds(p, {}) for p in products)
        for ring in self._rings(travel, shard, set(travel.shard.dims)):
            chunk = self._chunk(travel, ring, shard)
            compute = self._chunked(products, chunk, ring, travel)
            yield self._estimate(ring, blocking, compute, shard, tensor)

    def _rings(self, travel: Travel, shard: Mapping[str, int], free: set[str]) -> Iterator[Ring]:
        """Every choice of axes to loop over (the major ones of each dimension), schedule and turns."""
        spans = {dim: [axis for axis in axes if self.mesh.get(axis, 1) > 1] for dim, axes in travel.spans.items()}
        for counts in combinations(*(range(len(axes) + 1) for axes in spans.values())):
            looped = tuple(axis for axes, count in zip(spans.values(), counts) for axis in axes[:count])
            within = tuple(axis for axes, count in zip(spans.values(), counts) for axis in axes[count:])
            if not looped:
                continue
            for schedule, turns in combinations(self.schedules, sorted({1, len(looped)})):
                split = None
                if schedule == "halves" or turns > 1:
                    split = _split(shard, travel, within, free)
                yield Ring(looped, within, schedule, turns, split)

    def _chunk(self, travel: Travel, ring: Ring, shard: Mapping[str, int]) -> dict[str, int]:
        """The local sizes of a chunk, or of one of its parts, in the dimensions that are cut."""
        spans = travel.spans
        chunk = {
            dim: shard[dim] * prod(self.mesh.get(axis, 1) for axis in spans[dim] if axis in ring.within)
            for dim in spans
            if any(axis in ring.axes for axis in spans[dim])
        }
        if ring.split:
            size = chunk.get(ring.split, shard[ring.split])
            chunk[ring.split] = max(1, size // len(parts(ring.axes, ring.schedule, ring.turns)))
        return chunk

    def _chunked(self, products: Sequence[Product], chunk: Mapping[str, int], ring: Ring, travel: Travel) -> float:
        count = prod(self.mesh[axis] for axis in ring.axes)
        if ring.split:
            count *= len(parts(ring.axes, ring.schedule, ring.turns))
        return count * sum(self._product_seconds(found, chunk) for found in products)

    def _product_seconds(self, found: Product, chunk: Mapping[str, int]) -> float:
        """Of a product whose dimensions are cut to the sizes of a chunk."""
        left, right, after = found.einsum.before, found.einsum.other, found.einsum.after
        sizes = local_shape(left, self.sizes, self.mesh)
        sizes |= {} if right is None else local_shape(right, self.sizes, self.mesh)
        adds = any(dim not in after.dims and size < sizes[dim] for dim, size in chunk.items() if dim in sizes)
        sizes |= {dim: size for dim, size in chunk.items() if dim in sizes}
        both = set(left.dims) & set(right.dims if right is not None else ())
        amount = lambda dims: prod(sizes[dim] for dim in dims)  # noqa: E731
        return product_seconds(
            amount(set(left.dims) & set(after.dims) - both),
            amount(set(sizes) - set(after.dims)),
            amount(set(after.dims) - set(left.dims)),
            batch=amount(both & set(after.dims)),
            dtype=self.inputs[0].dtype,
            chip=self.chip,
            accumulate=adds,
        )

    def _estimate(
        self, ring: Ring, blocking: float, compute: float, shard: Mapping[str, int], tensor: Tensor
    ) -> Estimate:
        whole = prod(shard.values()) * itemsize(tensor.wire)
        ways = parts(ring.axes, ring.schedule, ring.turns)
        each = whole / len(ways)
        first = _links_seconds(
            [(each, walk(ring.within, self.mesh, way.schedule, way.sign)) for way in ways], self.mesh, self.chip
        )
        fat = each * prod(self.mesh[axis] for axis in ring.within)
        loop = _links_seconds(
            [(fat, walk(way.axes, self.mesh, way.schedule, way.sign)) for way in ways], self.mesh, self.chip
        )
        steps = max(1, prod(self.mesh[axis] for axis in ring.axes) // (2 if ring.schedule == "paired" else 1))
        fill = loop / steps if loop > compute else compute / steps * min(1.0, loop / compute) if compute else 0.0
        seconds = first + max(compute, loop) + (fill if loop > compute else 0.0)
        return Estimate(ring, blocking, seconds, seconds - compute)


def _links_seconds(walks: Sequence[tuple[float, tuple]], mesh: Mapping[str, int], chip: Chip) -> float:
    """Seconds of walks that go on side by side: the busiest link's, and its hops' latency."""
    busy: dict[tuple[str, int], float] = {}
    hops: dict[tuple[str, int], int] = {}
    for amount, steps in walks:
        for hop in steps:
            back = 1 if chip.is_switch or chip.wraps(mesh[hop.axis]) else 2  # what closes the ring comes back through it
            for sign in {hop.by, -hop.by} if back == 2 else {hop.by}:
                busy[hop.axis, sign] = busy.get((hop.axis, sign), 0.0) + amount
                hops[hop.axis, sign] = hops.get((hop.axis, sign), 0) + 1
    if not busy:
        return 0.0
    if chip.is_switch:
        sent = sum(amount * len(steps) for amount, steps in walks)
        return sent / chip.egress_bandwidth + chip.hop_seconds * max(len(steps) for _, steps in walks)
    return max(busy[link] / chip.link_bandwidth + hops[link] * chip.hop_seconds for link in busy)


def _split(shard: Mapping[str, int], travel: Travel, within: Sequence[str], free: set[str] | tuple) -> str | None:
    """The dimension along which shards are cut into parts: a free one that stays as it is, if there is one."""

    def rank(dim: str) -> tuple:
        inside = any(axis in within for axis in travel.spans.get(dim, ()))
        return (inside, shard[dim] < 2, dim in travel.spans, dim not in free, -shard[dim])

    allowed = [dim for dim in shard if not any(axis in within for axis in travel.spans.get(dim, ()))]
    return min(allowed, key=rank, default=None)
