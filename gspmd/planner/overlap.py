"""Which gathers and reduce-scatters of a routine run inside its einsums, and how: as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from gspmd.annotate.spec import Spec
from gspmd.frozen import FrozenDict
from gspmd.planner.steps import Move, Routine, Step

SCHEDULES = ("one-way", "halves", "paired")
"""One direction; each shard's halves in opposite directions; whole shards both ways, each half-way round."""

PUBLIC_SCHEDULES = SCHEDULES[1:]
"""What may be asked for by name. One direction alone wins no row of docs/looped.md; `looped` still weighs it."""


@dataclass(frozen=True)
class Ring:
    """How the shards of one tensor travel.

    Attributes:
        axes: the mesh axes that the loop goes over, outermost first; none: the tensor is gathered before it is used.
        within: the axes whose shards make one chunk together, gathered before the loop, or scattered after it.
        schedule: one of `SCHEDULES`.
        orders: in how many orders of `axes` parts of a shard travel, so that all their links are busy.
        split: the dimension along which shards are cut into those parts, and into halves.
    """

    axes: tuple[str, ...]
    within: tuple[str, ...] = ()
    schedule: str = "halves"
    orders: int = 1
    split: str | None = None


@dataclass(frozen=True)
class Stripes:
    """A dimension that stays where it is, cut into stripes: while one is multiplied, others travel.

    Attributes:
        dim: the dimension.
        sizes: of the stripes, on one device.
    """

    dim: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Overlap:
    """The rings of a routine: of moves by their number, and of outputs by theirs; and its stripes, if it has any."""

    gathers: Mapping[int, Ring] = field(default_factory=FrozenDict)
    scatters: Mapping[int, Ring] = field(default_factory=FrozenDict)
    stripes: Stripes | None = None

    def __post_init__(self):
        object.__setattr__(self, "gathers", FrozenDict(self.gathers))
        object.__setattr__(self, "scatters", FrozenDict(self.scatters))

    def __bool__(self) -> bool:
        return bool(self.gathers or self.scatters)

    def part(self, moves: Sequence[int], output: int) -> "Overlap":
        """What of this belongs to one output and the moves that it needs, by their new numbers."""
        gathers = {new: self.gathers[old] for new, old in enumerate(moves) if old in self.gathers}
        scatters = {0: self.scatters[output]} if output in self.scatters else {}
        return Overlap(gathers, scatters, self.stripes if gathers or scatters else None)


@dataclass(frozen=True)
class CollectiveSpan:
    """What a run of gathers, or of reduce-scatters, does to a tensor: from shards to the whole, or back.

    Attributes:
        shard: the spec of what a device has before a gather, or after a reduce-scatter.
        whole: the spec at the other end.
        steps: the run, in the plan's order.
    """

    shard: Spec
    whole: Spec
    steps: tuple[Step, ...]

    @property
    def changed_axes(self) -> dict[str, tuple[str, ...]]:
        """The dimensions that change, each with the mesh axes that shard it at one end only, major first."""
        pairs = zip(self.shard.dims, self.shard.axes, self.whole.axes)
        return {dim: held[len(kept) :] for dim, held, kept in pairs if held != kept}

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it goes over."""
        return tuple(axis for axes in self.changed_axes.values() for axis in axes)

    def step_number(self, axis: str) -> int:
        """Which of the run's steps goes over an axis."""
        return next(number for number, step in enumerate(self.steps) if axis in step.axes)


def gather_of(move: Move) -> CollectiveSpan | None:
    """The gathers that a move ends in."""
    count = _run(reversed(move.steps), "all-gather")
    steps = move.steps[len(move.steps) - count :]
    return CollectiveSpan(steps[0].before, move.spec, steps) if steps else None


def scatter_of(routine: Routine, output: int) -> CollectiveSpan | None:
    """The reduce-scatters that an output's products, once added, begin to settle with."""
    steps = settling(routine, output)
    count = _run(steps, "reduce-scatter")
    return CollectiveSpan(steps[count - 1].after, steps[0].before, steps[:count]) if count else None


def settling(routine: Routine, output: int) -> tuple[Step, ...]:
    """The chain behind the sum of an output's products; none where each product has a chain of its own."""
    products = [routine.products[number] for number in routine.outputs[output].products]
    if len(products) == 1:
        return (*products[0].steps, *routine.outputs[output].steps)
    return () if any(product.steps for product in products) else routine.outputs[output].steps


def _run(steps, kind: str) -> int:
    count = 0
    for step in steps:
        if step.kind != kind:
            break
        count += 1
    return count


def kept(routine: Routine, overlap: Overlap) -> tuple[Spec, ...]:
    """The spec in which each moved operand is kept for the gradient: a travelling one as it was before."""
    return tuple(
        gather_of(move).shard if number in overlap.gathers else move.spec for number, move in enumerate(routine.moves)
    )


def share_held(routine: Routine, overlap: Overlap, move: int, mesh: Mapping[str, int]) -> float:
    """What of a moved operand a device holds at once: two chunks for each direction, or two stripes."""
    ring, stripes = overlap.gathers.get(move), overlap.stripes
    if ring is None:
        return 1.0
    if not ring.axes:
        striped = stripes is not None and stripes.dim in routine.moves[move].spec.dims
        return min(1.0, 2 * max(stripes.sizes) / sum(stripes.sizes)) if striped else 1.0
    both_ways = 2 if ring.schedule == "paired" else 1  # of halves, one direction has half a chunk
    return min(1.0, 2 * both_ways / prod(mesh[axis] for axis in ring.axes))


def local_shape(spec: Spec, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> dict[str, int]:
    """The size of each dimension of a device's piece."""
    return {dim: sizes[dim] // prod(mesh[axis] for axis in axes) for dim, axes in zip(spec.dims, spec.axes)}


def cut(size: int, number: int) -> list[tuple[int, int]]:
    """Where each of `number` parts of a size begins and how long it is, as equal as may be; empty ones left out.

    >>> cut(5, 2), cut(1, 2)
    ([(0, 3), (3, 2)], [(0, 1)])
    """
    ends = [-(-size * place // number) for place in range(number + 1)]
    return [(start, end - start) for start, end in pairwise(ends) if end > start]
