"""The collectives of a routine that run inside its einsums, and the schedules of their rings, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gspmd.annotate.spec import Spec
from gspmd.frozen import FrozenDict
from gspmd.planner.spans import ring_gather
from gspmd.planner.steps import Routine


@dataclass(frozen=True)
class RingSchedule:
    """A schedule by which the shards of a tensor are sent round a ring; its attributes define it completely.

    Attributes:
        signs: the direction, +1 or -1, in which each part of a shard is sent round the ring.
        both_ways: whether every part is sent in both directions, each time halfway round the ring.
        is_public: whether users may choose the schedule by name, as lowering `looped:<name>`.
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
        """Whether only one chunk is being sent at a time."""
        return not self.is_cut and not self.both_ways


SCHEDULES = {
    "one-way": RingSchedule(is_public=False),
    "halves": RingSchedule(signs=(1, -1)),
    "paired": RingSchedule(both_ways=True),
}
"""The schedules by name.

Among schedules of equal cost, the first is used. A tensor that is gathered outside of the einsum uses the last
schedule.
"""


@dataclass(frozen=True)
class Ring:
    """A ring of permutes that gathers, or reduce-scatters, the shards of one tensor.

    Attributes:
        axes: the mesh axes over which the loop goes, from the outermost to the innermost. If there are none, the tensor
            is gathered before the einsum, or scattered after the einsum, without a loop.
        within: the mesh axes whose shards together form one chunk. These shards are gathered before the loop, or
            scattered after the loop.
        schedule: one of `SCHEDULES`.
        orders: the number of parts into which a shard is cut. Each part is sent through `axes` in a different order, so
            that the links of all axes are busy.
        split: the dimension along which shards are cut into the parts that `orders` counts, and into halves.
    """

    axes: tuple[str, ...]
    within: tuple[str, ...] = ()
    schedule: str = "halves"
    orders: int = 1
    split: str | None = None


@dataclass(frozen=True)
class Stripes:
    """A dimension that no collective changes, cut into stripes; one stripe is multiplied while others are being sent.

    Attributes:
        dim: the dimension.
        sizes: the sizes of the stripes on one device.
    """

    dim: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Overlap:
    """The collectives of a routine that overlap with its einsums.

    Attributes:
        gathers: a mapping from the number of a move to the ring that gathers its operand.
        scatters: a mapping from the number of an output to the ring that reduce-scatters it.
        stripes: the stripes in which the routine is computed, or None.
    """

    gathers: Mapping[int, Ring] = field(default_factory=FrozenDict)
    scatters: Mapping[int, Ring] = field(default_factory=FrozenDict)
    stripes: Stripes | None = None

    def __post_init__(self):
        object.__setattr__(self, "gathers", FrozenDict(self.gathers))
        object.__setattr__(self, "scatters", FrozenDict(self.scatters))

    def __bool__(self) -> bool:
        return bool(self.gathers or self.scatters)

    def part(self, moves: Sequence[int], output: int) -> "Overlap":
        """Return the rings and stripes of one output and of the moves that this output needs, renumbered from 0."""
        gathers = {new: self.gathers[old] for new, old in enumerate(moves) if old in self.gathers}
        scatters = {0: self.scatters[output]} if output in self.scatters else {}
        return Overlap(gathers, scatters, self.stripes if gathers or scatters else None)


def kept(routine: Routine, overlap: Overlap) -> tuple[Spec, ...]:
    """Return the spec in which each moved operand is kept for the gradient.

    If a ring gathers the operand, the operand's shard is kept.
    """
    specs = [move.spec for move in routine.moves]
    for number in overlap.gathers:
        specs[number] = ring_gather(routine.moves[number]).shard
    return tuple(specs)
