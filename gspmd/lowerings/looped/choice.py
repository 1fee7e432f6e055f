"""The choice of the gathers and reduce-scatters that run inside a routine's einsums, and of their schedules.

A gather is worth running as a ring if

    inner gather + max(chunked products, permutes) + first chunk  <  whole product + collective

Rings differ in three choices. The first is the mesh axes over which the loop goes; shards along the tensor's other axes
together form one chunk, so that chunks are not too thin for the matrix unit. The second is the schedule. The third is
whether parts of the shards are sent round the axes in different orders, so that the links of all axes are busy.

Instead of using rings, one can cut a dimension that no collective changes, such as the batch, into stripes. While one
stripe is multiplied, the next stripe is gathered and the previous one is reduce-scattered. Products then keep their
whole contracted dimension, and both operands and results can be sent during products.

Source: Wang et al. 2023 (ASPLOS), §5.5, for the condition.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as combinations
from math import prod

from gspmd.hardware.links import LARGEST_WHOLE, collective_seconds
from gspmd.lowerings.looped.cost import Costs
from gspmd.lowerings.looped.stripes import stripe_dim, stripes
from gspmd.planner.overlap import SCHEDULES, Overlap, Ring, Stripes
from gspmd.planner.spans import LONGEST, CollectiveSpan, divisions, is_short, local_shape, loopable
from gspmd.planner.steps import Environment, Product, Routine, Tensor

MARGIN = 0.04
"""The median relative error of the model of products; loops and stripes are not chosen for a smaller gain.

For example, the model predicts that stripes gain 1.9% for the feed-forward layer of Llama 2 70B under zero-3 on 256 TPU
v5p. In the compiled program, the stripes cost 18% of a step.
"""

SUMMED_MARGIN = 0.12
"""The smallest gain for which a ring is chosen if its chunks are cut along a contracted dimension.

Nothing makes the permutes wait for the sums of such chunks, so the TPU compiler may send every chunk before it
multiplies the first. For the second product of PaLM with 512 tokens, the predicted gain is 10%, and the compiled
program gains nothing.
"""


@dataclass(frozen=True)
class OverlapChoice:
    """A choice of collectives that overlap, with the predicted seconds of the whole routine."""

    overlap: Overlap
    seconds: float

    @property
    def rank(self) -> float:
        """The seconds by which choices are compared.

        The seconds of a choice with schedule `halves`, which has twice as many products, include a margin.
        """
        rings = (*self.overlap.gathers.values(), *self.overlap.scatters.values())
        return self.seconds * (1 + 2 * MARGIN * any(SCHEDULES[ring.schedule].is_cut for ring in rings))


def plan_overlap(
    routine: Routine, inputs: Sequence[Tensor], outputs: Sequence[Tensor], environment: Environment, lowering: str
) -> tuple[Overlap, float]:
    """Choose the rings and stripes of a routine.

    Args:
        routine: the routine to run.
        inputs, outputs: the tensors of the routine.
        environment: the sizes of the dimensions, the mesh and the chip.
        lowering: `"looped"` loops every collective that can be looped, each by its cheapest schedule.
            `"looped:<schedule>"` uses this schedule for all loops. `"auto"` uses loops only where they are cheaper.

    Returns:
        The rings and stripes, and the seconds that they save over `blocking`.
    """
    chooser = _Chooser(routine, environment, Costs(routine, inputs, outputs, environment), lowering)
    if not chooser.gathers and not chooser.scatters:
        return Overlap(), 0.0
    blocking = chooser.blocking()
    choices = list(chooser.choices())
    best = min(choices, key=lambda choice: choice.rank)
    if lowering == "auto" and best.seconds >= chooser.to_beat(best.overlap) * (1 - chooser.margin(best.overlap)):
        return Overlap(), 0.0
    return best.overlap, blocking - best.seconds


class _Chooser:
    def __init__(self, routine: Routine, environment: Environment, costs: Costs, lowering: str):
        self.routine, self.costs = routine, costs
        self.sizes, self.mesh = dict(environment.sizes), dict(environment.mesh)
        self.forced = lowering != "auto"
        _, _, schedule = lowering.partition(":")
        self.schedules = (schedule,) if schedule else tuple(SCHEDULES)
        self.gathers, self.scatters = loopable(routine)

    def _made(self, output: int) -> list[Product]:
        return [self.routine.products[p] for p in self.routine.outputs[output].products]

    def _products_of(self, move: int) -> list[Product]:
        return [p for p in self.routine.products if move in p.operands]

    def blocking(self) -> float:
        """Return the seconds of all products and of all collectives that can be looped, if none of them is looped."""
        spans = (*self.gathers.values(), *self.scatters.values())
        sent = sum(step.seconds for span in spans for step in span.steps)
        return sent + sum(self.costs.product(p, {}) for p in self.routine.products)

    def to_beat(self, overlap: Overlap) -> float:
        """Return the seconds that a loop has to beat, which may be less than the seconds of `blocking`.

        This is the time that `blocking` would take if the collectives that become loops in `overlap` used the links of
        all their axes. On v4 and v5p a gather over several axes uses the links of only one axis. Permutes could use the
        links of all axes, and the cost model of a loop assumes that they do, but in compiled programs they seldom do.
        For 14 products with gathered weights on these chips (8,192 x 28,672, 4,096 to 4,194,304 rows) the model
        predicts gains of 9 to 29% of the time of `blocking`. In compiled programs four of these products gain 5 to 15%,
        and the others lose 3 to 85%.
        """
        chip = replace(self.costs.chip, gathers_on_one_ring=False)
        looped = [self.gathers[number] for number in overlap.gathers] + [self.scatters[n] for n in overlap.scatters]
        seconds = self.blocking()
        for step in (step for span in looped for step in span.steps):
            group = prod(self.mesh[axis] for axis in step.axes)
            if step.kind in LARGEST_WHOLE and group > 1:
                whole = step.wire_bytes * group / (group - 1)
                seconds -= max(0.0, step.seconds - collective_seconds(step.kind, step.axes, self.mesh, whole, chip))
        return seconds

    def margin(self, overlap: Overlap) -> float:
        """Return the fraction of the time of `blocking` that a loop must save to be chosen."""
        summed = any(
            dim not in product.einsum.after.dims
            for number, ring in overlap.gathers.items()
            for product in self._products_of(number)
            for dim, axes in self.gathers[number].changed_axes.items()
            if set(axes) & set(ring.axes)
        )
        return SUMMED_MARGIN if summed else MARGIN

    def choices(self) -> Iterator[OverlapChoice]:
        """Yield the choice with the best rings, and a choice for every number of stripes and every schedule.

        Under `looped` no operand may be gathered completely before its product. But a ring can loop over only one
        operand of a product. So if both operands of a product are gathered, stripes are used, even thin stripes.
        """
        rings, dim = self._by_rings(), stripe_dim(self.routine, self.gathers, self.scatters, self.costs.local)
        spans = (*self.gathers.values(), *self.scatters.values())
        apart = any(not ring.axes for ring in rings.overlap.gathers.values())
        size = self.costs.local(dim) if dim else 1
        if not apart or size < 2:
            yield rings
        if self.forced and not apart and not self._both():  # rings need less memory than stripes
            return
        if dim is None or (not self.forced and not all(is_short(span, (), span.axes, self.mesh) for span in spans)):
            return
        for sizes in stripes(size, thin=apart):
            yield from self._by_stripes(Stripes(dim, sizes))

    def _both(self) -> bool:
        """Return whether some product has a gathered operand and a scattered result."""
        made = [p for number in self.scatters for p in self._made(number)]
        return any(p.left in self.gathers or p.right in self.gathers for p in made)

    # -- rings ---------------------------------------------------------------------------------------------------------

    def _by_rings(self) -> OverlapChoice:
        gathers: dict[int, Ring] = {}
        scatters: dict[int, Ring] = {}
        done: list[Product] = []
        seconds = 0.0
        # Tensors that send the most bytes come first, because only one operand of a product can arrive in a ring.
        for number in sorted(self.gathers, key=lambda n: -sum(step.wire_bytes for step in self.gathers[n].steps)):
            span, products = self.gathers[number], self._products_of(number)
            others = {move for p in products for move in p.operands if move != number}
            blocked = any(move in gathers and gathers[move].axes for move in others)
            if blocked:
                gathers |= {number: self._first(span)} if self.forced else {}
                seconds += sum(step.seconds for step in span.steps)
                continue
            ring, taken = self._cheapest(span, products, self.costs.gather)
            gathers |= {number: ring} if ring else {}
            seconds, done = seconds + taken, done + products
        for number, span in self.scatters.items():
            products = [p for p in self._made(number) if p not in done]
            ring, taken = self._cheapest(span, products, self.costs.scatter)
            scatters |= {number: ring} if ring else {}
            seconds, done = seconds + taken, done + products
        seconds += sum(self.costs.product(p, {}) for p in self.routine.products if p not in done)
        return OverlapChoice(Overlap(gathers, scatters), seconds)

    def _cheapest(self, span: CollectiveSpan, products: Sequence[Product], cost) -> tuple[Ring | None, float]:
        """Return the best ring for a tensor, and the seconds of its collectives and products with this ring.

        The ring is None if no ring is faster than the collectives and the lowering does not require one.
        """
        blocking = sum(step.seconds for step in span.steps) + sum(self.costs.product(p, {}) for p in products)
        rings = [(cost(span, ring, products), ring) for ring in self._rings(span, products)]
        seconds, ring = min(rings, key=lambda pair: pair[0], default=(blocking, None))
        return (ring, seconds) if self.forced or seconds < blocking else (None, blocking)

    def _rings(self, span: CollectiveSpan, products: Sequence[Product]) -> Iterator[Ring]:
        """Yield a ring for every choice of looped axes, schedule and number of axis orders.

        Under `auto`, rings that are too long are left out (`is_short`). A ring over several axes is always left out if
        it cuts a product into more than `LONGEST` products.
        """
        shard = local_shape(span.shard, self.sizes, self.mesh)
        free = set.intersection(set(span.shard.dims), *(set(p.einsum.after.dims) for p in products))
        for looped, within in divisions(span, self.mesh):
            if not (self.forced or is_short(span, looped, within, self.mesh)):
                continue
            for schedule, orders in combinations(self.schedules, sorted({1, len(looped)})):
                parted = SCHEDULES[schedule].is_cut or orders > 1
                ring = Ring(looped, within, schedule, orders, _split(shard, span, within, free) if parted else None)
                if len(looped) == 1 or self.costs.steps(ring) <= LONGEST:
                    yield ring

    def _first(self, span: CollectiveSpan, schedule: str | None = None) -> Ring:
        """Return a ring that gathers a tensor by permutes before its products, or scatters it after its products.

        By default, the schedule is the one that the lowering names, or else the last of `SCHEDULES`.
        """
        shard = local_shape(span.shard, self.sizes, self.mesh)
        schedule = schedule or self.schedules[-1]
        split = _split(shard, span, span.axes, set(shard)) if SCHEDULES[schedule].is_cut else None
        return Ring((), span.axes, schedule, 1, split)

    # -- stripes -------------------------------------------------------------------------------------------------------

    def _by_stripes(self, stripes: Stripes) -> Iterator[OverlapChoice]:
        for schedule in self.schedules:
            gathers = {n: self._first(span, schedule) for n, span in self.gathers.items()}
            scatters = {n: self._scattered(stripes, n, span, schedule) for n, span in self.scatters.items()}
            gathered = [(span, gathers[n], ()) for n, span in self.gathers.items()]
            settled = [(span, scatters[n], self._made(n)) for n, span in self.scatters.items()]
            seconds = self.costs.striped(stripes, gathered, settled)
            yield OverlapChoice(Overlap(gathers, scatters, stripes), seconds)

    def _scattered(self, stripes: Stripes, number: int, span: CollectiveSpan, schedule: str) -> Ring:
        """Return the ring that scatters the result of a stripe.

        The ring runs inside the stripe's products, unless the products would become too thin.
        """
        products, chunk = self._made(number), {stripes.dim: max(stripes.sizes)}
        rings = [ring for ring in self._rings(span, products) if (ring.schedule, ring.orders) == (schedule, 1)]
        rings.append(self._first(span, schedule))
        return min(rings, key=lambda ring: self.costs.in_stripe(chunk, span, ring, products))


def _split(shard: Mapping[str, int], span: CollectiveSpan, within: Sequence[str], free: set[str]) -> str | None:
    """Return the dimension along which shards are cut into parts, or None if there is none.

    If possible, this is one of the dimensions in `free`, and one whose sharding no collective changes.
    """

    def rank(dim: str) -> tuple:
        return shard[dim] < 2, dim not in free, dim in span.changed_axes, -shard[dim]

    allowed = [dim for dim in shard if not any(axis in within for axis in span.changed_axes.get(dim, ()))]
    return min(allowed, key=rank, default=None)
