"""What a step costs: bytes one device sends, and seconds on a chip's links.

The byte counts are those of ring algorithms; the times follow the roofline of the public *scaling book* (jax-ml, parts
1 to 3, and 12 for GPUs): bandwidth over the rings that the step can use at once, plus a start and one hop of latency
per neighbour passed. What leaves a node goes over the network between nodes.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations as choose
from math import prod
from typing import NamedTuple

import numpy as np

from gspmd.hardware.chips import Chip


def wire_bytes(kind: str, group: int, buffer: float) -> int:
    """Bytes that one device sends in a collective.

    Args:
        kind: one of all-gather, reduce-scatter, all-reduce, all-to-all, collective-permute, slice, einsum.
        group: number of devices that take part together.
        buffer: bytes per device of the larger of the step's input and output.

    Example:
        >>> wire_bytes("all-gather", 4, 1024), wire_bytes("all-reduce", 4, 1024)
        (768, 1536)

    Source: Chan et al. 2007, *Collective communication: theory, practice, and experience*, §3-4.
    """
    if kind in ("slice", "einsum") or group == 1:
        return 0
    if kind == "collective-permute":
        return int(buffer)
    passes = 2 if kind == "all-reduce" else 1
    return int(passes * buffer * (group - 1) // group)


class Wait(NamedTuple):
    """What a collective takes, when it has all links for itself.

    Attributes:
        links: seconds for which it fills the links of its node.
        network: seconds for which it fills the network between nodes, at the same time.
        latency: seconds beside those, which do not depend on the bytes.
    """

    links: float
    network: float
    latency: float

    @property
    def seconds(self) -> float:
        """All of them: links and network work side by side."""
        return max(self.links, self.network) + self.latency


WHOLE_GATHER = 16
"""Devices of a TPU slice up to which a gather over all of them stays one collective; a larger one runs in two parts,
since the compiler would make an all-reduce of it, with twice the bytes (`gspmd.lowerings.blocking.tpu`)."""


def collective_seconds(kind: str, axes: Sequence[str], mesh: Mapping[str, int], buffer: float, chip: Chip) -> float:
    """Seconds of one collective over `axes`, each mesh axis being one torus axis of the chip (or all of a switch).

    Devices are numbered as they stand in the mesh, the last axis fastest, and fill the chip's nodes in that order.

    Args:
        kind: as for `wire_bytes`.
        axes: mesh axes over which it runs.
        mesh: sizes of all mesh axes, in their order.
        buffer: bytes per device of the larger of the step's input and output.
        chip: that runs it.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> mesh = {"data": 32, "model": 8}
        >>> [round(1e6 * collective_seconds("all-gather", axis, mesh, 4e8, chip("h100"))) for axis in zip(mesh)]
        [7759, 785]
    """
    axes = tuple(axis for axis in axes if mesh[axis] > 1)
    if kind in ("slice", "einsum") or not axes:
        return 0.0
    group = near = prod(mesh[axis] for axis in axes)
    sizes = [mesh[axis] for axis in axes]
    whole = group == prod(mesh.values()) and not chip.is_switch and chip.nodes(mesh) == 1
    if kind == "all-gather" and whole and group > WHOLE_GATHER and len(axes) > 1:
        return min(_in_parts(first, axes, mesh, buffer, chip) for n in range(1, len(axes)) for first in choose(axes, n))
    if chip.nodes(mesh) > 1:
        all_axes = tuple(mesh.items())
        near = sharing_node(axes, all_axes, chip.node_devices)
        sizes = [sharing_node((axis,), all_axes, chip.node_devices) for axis in axes]
    return wait(kind, sizes, group, near, buffer, chip).seconds


def _in_parts(first: Sequence[str], axes: Sequence[str], mesh: Mapping[str, int], buffer: float, chip: Chip) -> float:
    """Seconds of a gather over some axes, and then over the others, which bring the rest of the buffer."""
    rest = [axis for axis in axes if axis not in first]
    small = buffer / prod(mesh[axis] for axis in rest)
    return collective_seconds("all-gather", first, mesh, small, chip) + collective_seconds(
        "all-gather", rest, mesh, buffer, chip
    )


def wait(kind: str, sizes: Sequence[int], group: int, near: int, buffer: float, chip: Chip) -> Wait:
    """What a collective over more than one device takes.

    Within a node, a ring per torus axis, or the switch. Of a group that is spread over nodes, the members on one node
    share among them what comes from the others, and all devices use their way into the network at once:

        all-gather, reduce-scatter:  max(S (K-1)/K / links, S (1/m - 1/K) / network)
        all-to-all:                  max(the node's, S (1 - m/K) / network)
        permute:                     S / network

    with S the buffer, K the group and m its members on a node; an all-reduce is the first twice.

    Args:
        kind: of collective, no slice and no einsum.
        sizes: of the rings that it has on one node's torus; a switch has none.
        group: devices that take part together.
        near: the fewest of them that share a node; `group` where it leaves none.
        buffer: bytes per device of the larger side.
        chip: that runs it.

    Source: jax-ml scaling book, part 12, 'Cross-node collectives'; its W_node egress is m times a device's here.
    """
    links = hop = network = away = 0.0
    passes = 2 if kind == "all-reduce" else 1
    if near > 1:
        inside = _peers if chip.is_switch else _torus
        links, hop = inside(kind, sizes, group, near, buffer, chip)
    if near < group:
        network = passes * buffer * _outside(kind, group, near) / chip.network_bandwidth
        away = chip.network_seconds
    return Wait(links, network, chip.start_seconds + passes * (hop + away))


def _peers(kind: str, sizes: Sequence[int], group: int, near: int, buffer: float, chip: Chip) -> tuple[float, float]:
    """Of a switch all links lead to every peer; of a full mesh one to each, and only those to members are used."""
    peers = 1 if kind == "collective-permute" else near - 1
    used = min(peers, chip.links) if chip.full_mesh else chip.links
    return wire_bytes(kind, group, buffer) / (used * chip.link_bandwidth), chip.hop_seconds


def _torus(kind: str, sizes: Sequence[int], group: int, near: int, buffer: float, chip: Chip) -> tuple[float, float]:
    """A ring that closes sends both ways at once, one that does not half as much; rings are used side by side."""
    sizes = [size for size in sizes if size > 1]
    if not sizes:  # nodes cut the axes so that members share one, but none along an axis: one link, one hop
        return wire_bytes(kind, group, buffer) / chip.link_bandwidth, chip.hop_seconds
    latency = chip.hop_seconds * sum([hops(size, chip) for size in sizes])
    if kind in ("all-to-all", "collective-permute"):
        shared = [size / 8 if chip.wraps(size) else size / 4 for size in sizes]
        if kind == "collective-permute":  # one path per piece; a long ring is shared like in an all-to-all
            shared += [1.0 if chip.wraps(size) else 2.0 for size in sizes]
        return buffer * max(shared) / chip.link_bandwidth, latency
    closed = min(len([size for size in sizes if chip.wraps(size)]), chip.torus)
    links = closed + min(len(sizes), chip.torus)  # two of a ring that closes, one of others, and these come last
    return wire_bytes(kind, group, buffer) / (links * chip.link_bandwidth), latency


def neighbour(axis: str, mesh: Mapping[str, int], chip: Chip) -> tuple[float, float]:
    """Of a step along a ring over one mesh axis: bytes/s to the next device, and the seconds besides.

    A step is over when its slowest pair is done, so one pair of different nodes puts all of it on the network.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> [neighbour(axis, {"x": 4, "y": 8}, chip("h100"))[0] / 1e9 for axis in ("x", "y")]
        [50.0, 450.0]
    """
    size, latency = mesh[axis], chip.start_seconds + chip.hop_seconds
    if chip.nodes(mesh) > 1 and sharing_node((axis,), tuple(mesh.items()), chip.node_devices) < size:
        return chip.network_bandwidth, latency + chip.network_seconds
    return chip.egress_bandwidth if chip.is_switch and not chip.full_mesh else chip.link_bandwidth, latency


def _outside(kind: str, group: int, near: int) -> float:
    """The part of its buffer that one device brings to its node over the network, or sends from there."""
    if kind == "collective-permute":
        return 1.0
    away = 1 - near / group
    return away if kind == "all-to-all" else away / near


@lru_cache(maxsize=4096)
def sharing_node(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], node: int) -> int:
    """The fewest members of a group over these axes that share a node of so many devices.

    Where axes and nodes do not nest, they are counted; in a mesh of over a million devices, it is 1 then, the dearest.

    Example:
        >>> mesh = (("data", 4), ("model", 4))
        >>> [sharing_node(axes, mesh, 8) for axes in (("data",), ("model",), ("data", "model"))]
        [2, 4, 8]
    """
    inside, stride = 1, 1
    for axis, size in reversed(mesh):
        room = max(1, node // stride)  # how many steps along this axis stay on a node
        nests = node % stride == 0 or stride % node == 0
        if not nests or (size % room and room % size):
            return _fewest(axes, mesh, node)
        inside *= min(size, room) if axis in axes else 1
        stride *= size
    return inside


def _fewest(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], node: int) -> int:
    shape = [size for _, size in mesh]
    if prod(shape) > 2**20:
        return 1
    order = sorted(range(len(mesh)), key=lambda place: mesh[place][0] in axes)
    group = prod(size for axis, size in mesh if axis in axes)
    return fewest_together(np.arange(prod(shape)).reshape(shape).transpose(order).reshape(-1, group), node)


def fewest_together(groups: Sequence[Sequence[int]], node: int) -> int:
    """The fewest members of any group that share a node of so many devices; `groups` hold numbers of devices.

    >>> fewest_together([(0, 1, 2), (8, 9, 15)], 8), fewest_together([(0, 1, 8)], 8)
    (3, 1)
    """
    where = np.sort(np.asarray(groups) // node, axis=1)
    starts = np.flatnonzero(np.diff(where, axis=1, prepend=-1).reshape(-1))  # a group's first member starts one, too
    return int(np.diff(starts, append=where.size).min())


def hops(size: int, chip: Chip) -> int:
    """Hops to the farthest neighbour on a mesh axis: half the ring where it closes, its length where it does not."""
    return size // 2 if chip.wraps(size) else size - 1


def einsum_seconds(flops: float, memory_bytes: float, dtype: str, chip: Chip) -> float:
    """Seconds of a local einsum: the slower of the matrix unit and the memory (roofline)."""
    return max(flops / chip.flops(dtype), memory_bytes / chip.hbm_bandwidth)
