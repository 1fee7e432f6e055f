"""The gathers and reduce-scatters of a routine that run inside its einsums, and by which schedule: as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gspmd.annotate.spec import Spec
from gspmd.frozen import FrozenDict
from gspmd.planner.spans import ring_gather
from gspmd.planner.steps import Routine


@dataclass(frozen=True)
class RingSchedule:
    """A way for the shards of a tensor to go round a ring. All that is known of a schedule is here.

    Attributes:
        signs: a shard is cut into so many parts, and each goes round in its direction, +1 or -1.
        both_ways: every part is sent both ways, and each copy half-way round.
        is_public: whether users may ask for it by name, as lowering `looped:<name>`.
    """

    signs: tuple[int, ...] = (1,)
    both_ways: bool = False
    is_public: bool = True

    @property
    def is_cut(self) -> bool:
        """Whether shards are cut into parts."""
        return len(self.signs) > 1

    @property
    def is_single(self) -> bool:
        """Whether only one chunk is on its way at a time."""
        return not self.is_cut and not self.both_ways


SCHEDULES = {
    "one-way": RingSchedule(is_public=False),
    "halves": RingSchedule(signs=(1, -1)),
    "paired": RingSchedule(both_ways=True),
}
"""By name. Of two that cost the same the first is taken; what is not overlapped with an einsum goes by the last."""


@dataclass(frozen=True)
class Ring:
    """A ring of permutes that gathers, or reduce-scatters, the shards of one tensor.

    Attributes:
        axes: the mesh axes that the loop goes over, outermost first; none: the tensor is gathered before it is used.
        within: the axes whose shards make one chunk together, gathered before the loop, or scattered after it.
        schedule: one of `SCHEDULES`.
        orders: in how many orders of `axes` parts of a shard are sent, so that all their links are busy.
        split: the dimension along which shards are cut into those parts, and into halves.
    """

    axes: tuple[str, ...]
    within: tuple[str, ...] = ()
    schedule: str = "halves"
    orders: int = 1
    split: str | None = None


@dataclass(frozen=True)
class Stripes:
    """A dimension that nothing gathers or scatters, cut into stripes: while one is multiplied, others are sent.

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
        """Return the part of this that belongs to one output and the moves that it needs, by their new numbers."""
        gathers = {new: self.gathers[old] for new, old in enumerate(moves) if old in self.gathers}
        scatters = {0: self.scatters[output]} if output in self.scatters else {}
        return Overlap(gathers, scatters, self.stripes if gathers or scatters else None)


def kept(routine: Routine, overlap: Overlap) -> tuple[Spec, ...]:
    """Return the spec in which each moved operand is kept for the gradient: one that a ring gathers, as its shard."""
    specs = [move.spec for move in routine.moves]
    for number in overlap.gathers:
        specs[number] = ring_gather(routine.moves[number]).shard
    return tuple(specs)
