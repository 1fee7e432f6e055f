"""Ring schedules: the hops between neighbors that bring every shard to every device.

A walk is a tree of hops, whose root is a device's own shard. A hop sends the data of one node to the next neighbor
along one mesh axis. Run forwards, the walk gathers: after a hop, a device holds the shard of the device at distance
`offset` behind it. Run backwards, it reduce-scatters: at each node, a device adds its summand for the device at
distance `offset` behind it, and sends the sum on toward the root.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gspmd.frozen import FrozenDict
from gspmd.planner.overlap import SCHEDULES, Ring
from gspmd.planner.spans import cut

Link = tuple[str, int]
"""A mesh axis, and a direction along it."""

Offset = Mapping[str, int]
"""The distance from this device to a device behind it: the number of devices along each mesh axis.

Each number is taken modulo the size of its axis. A mesh axis that is missing has the number 0.
"""


@dataclass(frozen=True)
class Hop:
    """One permute, which sends a shard on to the next device along one mesh axis.

    Attributes:
        source: the number of the hop by which the shard arrived, counted from 1, or 0 if the shard is the device's own.
        axis: the mesh axis along which the hop goes.
        by: the direction, +1 or -1.
        places: the distance to the device from which the shard comes, as pairs (mesh axis, number of devices behind
            this one).
        wave: the number of the wave to which the hop belongs. Hops of one wave arrive together, from both sides.
    """

    source: int
    axis: str
    by: int
    places: tuple[tuple[str, int], ...]
    wave: int

    @property
    def offset(self) -> dict[str, int]:
        """The distance from this device back to the shard's origin, a mapping from mesh axis to number of devices."""
        return dict(self.places)


def walk(axes: Sequence[str], mesh: Mapping[str, int], schedule: str = "one-way", sign: int = 1) -> tuple[Hop, ...]:
    """List the hops that bring every shard of a group of devices to each device of the group, without a detour.

    Args:
        axes: the group's mesh axes, from the outermost to the innermost. Shards that arrive along an axis are sent
            round all later axes.
        mesh: mesh axis sizes.
        schedule: one of `SCHEDULES`. With `"halves"`, these are the hops of one half, which is sent in one direction.
        sign: the direction, +1 or -1, if a schedule sends in only one direction.

    Returns:
        The hops in order; there is one hop fewer than devices in the group.

    Example:
        >>> [(hop.source, hop.by, hop.offset["x"]) for hop in walk("x", {"x": 4}, "paired")]
        [(0, 1, 1), (0, -1, -1), (1, 1, 2)]

    Source: Wang et al. 2023, *Overlap Communication with Dependent Computation via Decomposition* (ASPLOS), §5.
    Differs: the paper has one axis and an even number of devices; here axes can be nested, and sizes are arbitrary.
    """
    return tuple(_Tree(tuple(axes), mesh, schedule, sign).hops)


def hops_by_link(axes: Sequence[str], mesh: Mapping[str, int], schedule: str, sign: int) -> Mapping[Link, int]:
    """Count the hops of a `walk` in each direction of each mesh axis; the time of a walk depends only on these counts.

    Example:
        >>> hops_by_link("x", {"x": 4}, "paired", 1)[("x", 1)]
        2
    """
    return _hops_by_link(tuple(axes), tuple((axis, mesh[axis]) for axis in axes), schedule, sign)


@lru_cache(maxsize=4096)
def _hops_by_link(
    axes: tuple[str, ...], sizes: tuple[tuple[str, int], ...], schedule: str, sign: int
) -> Mapping[Link, int]:
    return FrozenDict(Counter((hop.axis, hop.by) for hop in walk(axes, dict(sizes), schedule, sign)))


class _Tree:
    """Builds a walk, axis by axis: every shard that arrives along one axis is sent round all later axes."""

    def __init__(self, axes: tuple[str, ...], mesh: Mapping[str, int], schedule: str, sign: int):
        self.axes, self.mesh, self.schedule, self.sign = axes, mesh, schedule, sign
        self.hops: list[Hop] = []
        self.waves = 0
        self._within(0, 0, {})

    def _within(self, depth: int, node: int, places: dict[str, int]) -> None:
        if depth == len(self.axes):
            return
        self._within(depth + 1, node, places)
        axis, arrived = self.axes[depth], {0: node}
        for wave in _waves(self.mesh[axis], self.schedule, self.sign):
            self.waves += 1
            for here in wave:
                by = 1 if here > 0 else -1
                now = {**places, axis: here}
                self.hops.append(Hop(arrived[here - by], axis, by, tuple(now.items()), self.waves))
                arrived[here] = len(self.hops)
            for here in wave:
                self._within(depth + 1, arrived[here], {**places, axis: here})


def _waves(size: int, schedule: str, sign: int) -> Iterator[tuple[int, ...]]:
    """Yield the distances from which shards arrive in each wave of a ring, as in `RingLoop`.

    A distance is a number of devices behind this one.
    """
    if not SCHEDULES[schedule].both_ways:
        yield from ((sign * place,) for place in range(1, size))
        return
    ahead, behind = size // 2, (size - 1) // 2
    yield from ((place, -place) if place <= behind else (place,) for place in range(1, ahead + 1))


@dataclass(frozen=True)
class ShardPart:
    """One of the parts into which every shard is cut.

    Attributes:
        axes: the mesh axes round which the part is sent, in this order.
        schedule: one of `SCHEDULES`.
        sign: the direction, +1 or -1, in which the part is sent.
    """

    axes: tuple[str, ...]
    schedule: str
    sign: int


def shard_parts(axes: Sequence[str], schedule: str, orders: int = 1) -> tuple[ShardPart, ...]:
    """List the parts into which shards are cut.

    Args:
        axes: the group's mesh axes, from the outermost to the innermost.
        schedule: one of `SCHEDULES`; `"halves"` cuts each part in two.
        orders: the number of different orders of the axes. Several orders keep the links of all axes equally busy.

    Example:
        >>> [(part.axes, part.sign) for part in shard_parts("yz", "halves", 2)]
        [(('y', 'z'), 1), (('y', 'z'), -1), (('z', 'y'), 1), (('z', 'y'), -1)]
    """
    axes = tuple(axes)
    orders = [axes[order:] + axes[:order] for order in range(orders)]
    return tuple(ShardPart(order, schedule, sign) for order in orders for sign in SCHEDULES[schedule].signs)


def ring_parts(ring: Ring, size: int) -> list[tuple[ShardPart, int, int]]:
    """Return the parts of a shard, each with its start and its length.

    `size` is the length of the shard along the dimension `ring.split`, along which the shard is cut.
    """
    parts = shard_parts(ring.axes, ring.schedule, ring.orders)
    return [(part, *place) for part, place in zip(parts, cut(size, len(parts)))]
