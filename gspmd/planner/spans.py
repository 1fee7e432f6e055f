"""Spans, which are consecutive gathers or reduce-scatters of a tensor, taken as one; and the sizes of shards."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product, takewhile
from math import prod

from gspmd.annotate.spec import Spec
from gspmd.planner.steps import Move, Routine, Step


@dataclass(frozen=True)
class CollectiveSpan:
    """Consecutive gathers, or consecutive reduce-scatters, of a tensor.

    Attributes:
        shard: the spec before the gathers, or after the reduce-scatters.
        whole: the spec after the gathers, or before the reduce-scatters.
        steps: the collectives, in the plan's order.
    """

    shard: Spec
    whole: Spec
    steps: tuple[Step, ...]

    @property
    def changed_axes(self) -> dict[str, tuple[str, ...]]:
        """The dimensions whose sharding changes, each with the mesh axes that shard it in `shard` but not in `whole`.

        The mesh axes are listed from major to minor.
        """
        pairs = zip(self.shard.dims, self.shard.axes, self.whole.axes)
        return {dim: held[len(kept) :] for dim, held, kept in pairs if held != kept}

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which the collectives run."""
        return tuple(axis for axes in self.changed_axes.values() for axis in axes)

    def step_number(self, axis: str) -> int:
        """Return the index of the step over a mesh axis."""
        return next(number for number, step in enumerate(self.steps) if axis in step.axes)


LONGEST = 96
"""The largest number of chunks for which a ring is unrolled.

Programs and compile times grow with the number of chunks. With four stripes of 255 hops for each weight, Llama 2 70B
took 50 s to trace, and over 19 min to compile (docs/looped.md).
"""


def loopable(routine: Routine) -> tuple[dict[int, CollectiveSpan], dict[int, CollectiveSpan]]:
    """Find the collectives that can be looped, which are gathers of products' operands and reduce-scatters of products.

    Returns:
        Two mappings: from the number of a move to its gathers, and from the number of an output to its reduce-scatters.
    """
    gathers = {n: found for n, move in enumerate(routine.moves) if (found := gather_of(move))}
    scatters = {n: found for n in range(len(routine.outputs)) if (found := scatter_of(routine, n))}
    used = {m for p in routine.products if not p.passes_through for m in p.operands}
    products = {n: [routine.products[p] for p in routine.outputs[n].products] for n in scatters}
    made = {n for n in scatters if any(not p.passes_through for p in products[n])}
    return {n: gathers[n] for n in gathers if n in used}, {n: scatters[n] for n in scatters if n in made}


def divisions(span: CollectiveSpan, mesh: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield every way to divide a collective's axes into the axes of a ring's loop and the axes within one chunk.

    The loop has at least one axis. Of the axes that shard one dimension, the loop has the major ones.
    """
    spans = [[axis for axis in axes if mesh.get(axis, 1) > 1] for axes in span.changed_axes.values()]
    for counts in product(*(range(len(axes) + 1) for axes in spans)):
        looped = tuple(axis for axes, count in zip(spans, counts) for axis in axes[:count])
        if looped:
            yield looped, tuple(axis for axes, count in zip(spans, counts) for axis in axes[count:])


def is_short(span: CollectiveSpan, looped: Sequence[str], within: Sequence[str], mesh: Mapping[str, int]) -> bool:
    """Return whether every axis is short enough to be unrolled, with at most `LONGEST` devices.

    If a gather is looped along a single axis, this axis may have any length, because the gather becomes a loop in the
    program.
    """
    long = [axis for axis in (*looped, *within) if mesh.get(axis, 1) > LONGEST]
    return not long or (long == [*looped] and span.steps[0].kind == "all-gather")


def gather_of(move: Move) -> CollectiveSpan | None:
    """Return the gathers at the end of a move, or None if the move does not end in gathers."""
    count = _run(reversed(move.steps), "all-gather")
    steps = move.steps[len(move.steps) - count :]
    return CollectiveSpan(steps[0].before, move.spec, steps) if steps else None


def scatter_of(routine: Routine, output: int) -> CollectiveSpan | None:
    """Return the reduce-scatters with which the reduction of an output begins, or None if there are none."""
    steps = settling(routine, output)
    count = _run(steps, "reduce-scatter")
    return CollectiveSpan(steps[count - 1].after, steps[0].before, steps[:count]) if count else None


def ring_gather(move: Move) -> CollectiveSpan:
    """Return the gathers of a move; an `Overlap` must have a ring for this move."""
    span = gather_of(move)
    assert span is not None, "rings are made of what `loopable` lists, so the move ends in gathers"
    return span


def ring_scatter(routine: Routine, output: int) -> CollectiveSpan:
    """Return the reduce-scatters of an output; an `Overlap` must have a ring for this output."""
    span = scatter_of(routine, output)
    assert span is not None, "rings are made of what `loopable` lists, so the output settles by reduce-scatters"
    return span


def settling(routine: Routine, output: int) -> tuple[Step, ...]:
    """Return the steps that run after an output's products are added; none if each product is reduced by itself."""
    products = [routine.products[number] for number in routine.outputs[output].products]
    if len(products) == 1:
        return (*products[0].steps, *routine.outputs[output].steps)
    return () if any(product.steps for product in products) else routine.outputs[output].steps


def _run(steps: Iterable[Step], kind: str) -> int:
    return sum(1 for _ in takewhile(lambda step: step.kind == kind, steps))


def local_shape(spec: Spec, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the size of each dimension of one device's shard."""
    return {dim: sizes[dim] // prod(mesh[axis] for axis in axes) for dim, axes in zip(spec.dims, spec.axes)}


def cut(size: int, number: int) -> list[tuple[int, int]]:
    """Cut a size into `number` parts that are as equal as possible, and return the start and the length of each part.

    Empty parts are left out.

    >>> cut(5, 2), cut(1, 2)
    ([(0, 3), (3, 2)], [(0, 1)])
    """
    ends = [-(-size * place // number) for place in range(number + 1)]
    return [(start, end - start) for start, end in pairwise(ends) if end > start]
