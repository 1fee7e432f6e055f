"""The bytes that one device sends in a collective, and the seconds that the collective takes on a chip's links.

Bytes are counted for ring algorithms. Seconds follow the roofline of the *scaling book* (jax-ml, parts 1 to 3, and 12
for GPUs). They are the bytes, divided by the bandwidth of all rings that are used together, plus the latency of a start
and of each hop. Between nodes, bytes go over the network. GPUs use the links and the network at the same time, and TPU
slices use one after the other. Bandwidth and latency of GPUs are those of NCCL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations as choose
from math import ceil, gcd, isqrt, log2, prod
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from gspmd.hardware.chips import Chip
from gspmd.hardware.nccl import ways
from gspmd.hardware.torus import lay


def wire_bytes(kind: str, group: int, buffer: float) -> int:
    """Return the bytes that one of K devices sends in a collective.

    This is buffer (K-1)/K for an all-gather, a reduce-scatter or an all-to-all, twice as much for an all-reduce, and
    buffer for a collective-permute. A slice and an einsum send nothing.

    Args:
        kind: one of all-gather, reduce-scatter, all-reduce, all-to-all, collective-permute, slice, einsum.
        group: number of devices that communicate with each other.
        buffer: bytes per device of the larger of input and output.

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


class Occupancy(NamedTuple):
    """The times for which a collective keeps links and network busy if no other collective uses them.

    Attributes:
        links: seconds for which the links of a node are busy.
        network: seconds for which the network between nodes is busy, at the same time as the links.
        latency: further seconds, which do not depend on the bytes.
    """

    links: float
    network: float
    latency: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole collective: max(links, network) + latency."""
        return max(self.links, self.network) + self.latency


LARGEST_WHOLE: Mapping[str, int] = MappingProxyType({"all-gather": 16, "reduce-scatter": 4})
"""The number of devices up to which a collective over a whole TPU slice is never split in two (see `stays_whole`)."""


def stays_whole(kind: str, group: int, buffer: float, chip: Chip) -> bool:
    """Return whether `blocking` emits a gather or reduce-scatter over all devices of a TPU slice as one collective.

    The compiler replaces many such collectives by an all-reduce with twice the bytes. In these cases lowering
    `blocking` emits two collectives instead. On the 2D torus of v5e and v6e, a collective that the compiler keeps is up
    to twice as fast as two collectives, because it goes round a ring through all devices, with the links of both axes.
    For few bytes, two collectives are faster, because they take fewer hops. As compiled by libtpu 0.0.42 and 0.0.50,
    these collectives stay single on slices from 2x2 to 16x16:

    - a gather over 32 devices or fewer;
    - a gather of more than 16 MiB over more than 32 devices, unless both axes have wrap-around links, as in 16x16 (with
      such links, two collectives are as fast);
    - a reduce-scatter over a slice that is not square, such as 2x4 and 4x8, but not 4x4 and 8x8.

    Args:
        kind: `"all-gather"` or `"reduce-scatter"`.
        group: number of devices of the slice.
        buffer: bytes per device of the larger of input and output.
        chip: the hardware. If its `slice_shape` is unknown, a square or two adjacent squares are assumed.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> [stays_whole("reduce-scatter", group, 1e6, chip("tpu-v5e")) for group in (4, 8, 16, 32)]
        [True, True, False, True]
    """
    if group <= LARGEST_WHOLE[kind] or not chip.keeps_whole_slices:
        return group <= LARGEST_WHOLE[kind]
    sides = _sides(group, chip)
    hops = sum(size // 2 if chip.wraps(size) else size - 1 for size in sides)  # of two collectives, one over each axis
    # A ring sends over two links, an axis without wrap-around links over one. So the ring halves the transfer time; for
    # few bytes, this saves less than its additional hops cost.
    if buffer < 2 * (group // 2 - hops) * chip.hop_seconds * chip.link_bandwidth:
        return False
    if kind == "reduce-scatter":
        return len({*sides}) > 1
    return group <= 32 or (buffer > 2**24 and not all(chip.wraps(size) for size in sides))


def _sides(group: int, chip: Chip) -> tuple[int, ...]:
    """Return the sizes of the torus axes of a slice of `group` devices.

    If the shape of the slice is unknown, return two sizes that are as equal as possible.
    """
    if prod(chip.slice_shape) == group:
        return chip.slice_shape
    side = max(size for size in range(1, isqrt(group) + 1) if group % size == 0)
    return side, group // side


ROUND_EACH_AXIS = 2**26
"""The smallest number of gathered bytes for which `gathers_round_each_axis` returns True.

According to the compiler's estimates, such gathers are faster from 4 MB (v4) or 32 MB (v5p) on. But the estimates do
not include the time to start some fifty instructions instead of one.
"""

_COPIES: Mapping[int, float] = MappingProxyType({2: 1.0, 3: 1.75})
"""Number of times that a gather over 2 or 3 axes copies its result, if it uses rings along each axis.

The numbers are those of programs compiled for v4 and v5p."""


def gathers_round_each_axis(
    axes: Sequence[str], mesh: Mapping[str, int], buffer: float, chip: Chip, whole: float | None = None
) -> bool:
    """Return whether lowering `blocking` gathers over several axes by rings along each axis (`blocking.torus`).

    `blocking` does so if the compiler's own gather uses the links of only one axis, and all axes have wrap-around
    links. If the mesh has as many axes as the torus, the mesh axes are assumed to be the torus axes, unless the shape
    of the slice shows otherwise. With fewer or more mesh axes, `blocking` does not do so, because neighbors in a ring
    along a mesh axis may not be neighbors in the torus.

    Besides its result, such a gather holds the blocks that have arrived, which have about the size of the result. So
    tensors that need more than an eighth of a device's memory when fully gathered, such as the table of PaLM 540B, are
    left to the compiler. This holds even if only a part is gathered, because further gathers may follow.

    Args:
        axes, mesh, buffer, chip: as in `collective_seconds`.
        whole: bytes of the whole tensor; by default `buffer`.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> [gathers_round_each_axis("yz", {"x": 2, "y": 4, "z": 4}, 1e9, chip(name)) for name in ("tpu-v4", "tpu-v6e")]
        [True, False]
    """
    sizes = [mesh[axis] for axis in axes if mesh[axis] > 1]
    return (
        chip.gathers_on_one_ring
        and len(sizes) in _COPIES
        and len(wide := [size for size in mesh.values() if size > 1]) == chip.torus
        and (prod(chip.slice_shape) != prod(wide) or sorted(wide) == sorted(chip.slice_shape))
        and all(chip.wraps(size) for size in sizes)
        and chip.nodes(mesh) == 1
        and buffer >= ROUND_EACH_AXIS
        and max(buffer, whole or 0) <= chip.hbm_bytes / 8
    )


SMALLEST_PART = 2**16
"""Parts of at most so many bytes are not cut further.

Below, no collective is sent differently if it has fewer bytes: the smallest threshold of `stays_whole` above 0 is two
hops times the bandwidth of a link, 90 kB on v5e.
"""


def collective_seconds(
    kind: str, axes: Sequence[str], mesh: Mapping[str, int], buffer: float, chip: Chip, whole: float | None = None
) -> float:
    """Return the predicted seconds of one collective.

    A mesh axis is assumed to be one torus axis, or part of a switch. If the chip knows the shape of its slice, a mesh
    axis over several torus axes has the links of all these torus axes. Devices are numbered in row-major order of the
    mesh (last axis fastest), and fill nodes in this order.

    Args:
        kind: see `wire_bytes`.
        axes: mesh axes over which the collective runs.
        mesh: sizes of all mesh axes, in their order.
        buffer: bytes per device of the larger of input and output.
        chip: the hardware. With `prices_in_parts`, the seconds are those of the cheapest way to cut the tensor into 1,
            2, 4, ... equal parts and to send the parts one after the other. Usually that is one part.
        whole: bytes of the whole tensor, if only a part of it is gathered (see `gathers_round_each_axis`).

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> mesh = {"data": 32, "model": 8}
        >>> [round(1e6 * collective_seconds("all-gather", axis, mesh, 4e8, chip("h100"))) for axis in zip(mesh)]
        [8687, 976]
    """
    axes = tuple(axis for axis in axes if mesh[axis] > 1)
    if kind in ("slice", "einsum") or not axes:
        return 0.0
    if chip.prices_in_parts:
        plain = replace(chip, prices_in_parts=False)
        cuts = ceil(log2(max(buffer, SMALLEST_PART) / SMALLEST_PART))
        return min(
            2**cut * collective_seconds(kind, axes, mesh, buffer / 2**cut, plain, whole and whole / 2**cut)
            for cut in range(cuts + 1)
        )
    if not chip.is_switch and chip.nodes(mesh) > 1:
        return _over_slices(kind, axes, mesh, buffer, chip)
    if kind == "all-gather" and gathers_round_each_axis(axes, mesh, buffer, chip, whole):
        return _round_each_axis([mesh[axis] for axis in axes], buffer, chip)
    return _by_the_compiler(kind, axes, mesh, buffer, chip)


def _by_the_compiler(kind: str, axes: Sequence[str], mesh: Mapping[str, int], buffer: float, chip: Chip) -> float:
    """Return the seconds of a collective as the compiler implements it, within a slice or over nodes of GPUs."""
    axes = tuple(axis for axis in axes if mesh[axis] > 1)
    if not axes:
        return 0.0
    group = prod(mesh[axis] for axis in axes)
    if kind not in LARGEST_WHOLE or chip.is_switch or len(rings(axes, mesh, chip)) == 1:
        seconds = _together(kind, axes, mesh, buffer, chip).seconds
    elif len(axes) > 1 and group == prod(mesh.values()) and not stays_whole(kind, group, buffer, chip):
        splits = (first for number in range(1, len(axes)) for first in choose(axes, number))
        seconds = min(_in_parts(kind, first, axes, mesh, buffer, chip) for first in splits)
    else:
        takes = _together(kind, axes, mesh, buffer, chip)
        whole_slice = chip.keeps_whole_slices and group == prod(mesh.values()) and group > LARGEST_WHOLE[kind]
        if chip.gathers_on_one_ring or whole_slice:
            # The transfer time is that of one ring, but the latency is that of rings along each axis, by which the
            # lowering sends few bytes. With the latency of the one ring, a hop for every second device, plans would cut
            # every such gather in two, and reorder the parts.
            takes = takes._replace(links=max(takes.links, _on_one_ring(kind, axes, mesh, buffer, chip)))
        if whole_slice:  # `stays_whole` has weighed the hops.
            takes = takes._replace(latency=chip.start_seconds + group // 2 * chip.hop_seconds)
        seconds = takes.seconds
    if kind == "reduce-scatter" and not chip.is_switch:
        # An all-reduce uses the links of all axes. Over three axes it is faster than a reduce-scatter, even though it
        # sends twice as many bytes. A reduce-scatter is counted as no slower than an all-reduce, so that plans still
        # choose it, as papers and layouts do.
        seconds = min(seconds, _together("all-reduce", axes, mesh, buffer, chip).seconds)
    return seconds


def _over_slices(kind: str, axes: Sequence[str], mesh: Mapping[str, int], buffer: float, chip: Chip) -> float:
    """Return the seconds of a collective over several TPU slices, which uses the links of slices and the network.

    libtpu gathers over the network first and then within the slices, and scatters in the opposite order, so that the
    network carries each byte once. An all-reduce is a reduce-scatter within a slice, an all-reduce over the network,
    and a gather within a slice. The seconds within a slice and on the network are added up. All bytes of an all-to-all
    go over the network, and so do the parts of a permute that leave a slice. For an all-to-all and for a permute, the
    seconds are not added up, but the longer time counts.
    """
    sizes, node = tuple(mesh.items()), chip.node_devices
    group, near = prod(mesh[axis] for axis in axes), sharing_node(tuple(axes), sizes, node)
    inside, one = {axis: sharing_node((axis,), sizes, node) for axis in mesh}, replace(chip, node_devices=0)
    if near == group:
        return _by_the_compiler(kind, axes, inside, buffer, one)
    if kind in ("all-to-all", "collective-permute"):
        return max(network_seconds(kind, group, buffer, chip), _by_the_compiler(kind, axes, inside, buffer, one))
    within = 0.0
    for part in ("reduce-scatter", "all-gather") if kind == "all-reduce" else (kind,):
        left = buffer
        for names in _runs(axes, mesh, inside):
            within += _by_the_compiler(part, names, inside, left, one)
            left /= prod(inside[axis] for axis in names)
    return within + network_seconds(kind, group // near, buffer / near, chip)


def _runs(axes: Sequence[str], mesh: Mapping[str, int], inside: Mapping[str, int]) -> list[Sequence[str]]:
    """Split mesh axes into runs, from major to minor; within a slice, each run is a collective of its own.

    JAX cannot name a part of a mesh axis together with other axes. So an axis that lies partly over slices and partly
    within slices is a run of its own.
    """
    mixed = next((place for place, axis in enumerate(axes) if 1 < inside[axis] < mesh[axis]), None)
    if mixed is None:
        return [axes]
    return [names for names in (axes[:mixed], axes[mixed : mixed + 1], axes[mixed + 1 :]) if names]


def over_slices(sizes: Sequence[int], slices: int) -> tuple[int, ...] | None:
    """Return the number of slices along each mesh axis, if slices fill the mesh one after another.

    The result is None if the slices do not divide evenly over the first axes.

    Example:
        >>> over_slices((4, 8, 8), 4), over_slices((8, 8), 4), over_slices((2, 4, 8), 4), over_slices((3, 4), 4)
        ((4, 1, 1), (4, 1), (2, 2, 1), None)
    """
    parts, left = [], slices
    for size in sizes:
        part = gcd(size, left)
        if part not in (size, left):
            return None
        parts.append(part)
        left //= part
    return tuple(parts) if left == 1 else None


def network_seconds(kind: str, group: int, buffer: float, chip: Chip) -> float:
    """Return the seconds of a collective over TPU slices on the data-center network.

    Args:
        kind: see `wire_bytes`.
        group: number of devices that communicate with each other.
        buffer: bytes per device of the larger of input and output.
        chip: the hardware.
    """
    passes = 2 if kind == "all-reduce" else 1
    share = 1.0 if kind == "collective-permute" else 1 - 1 / group
    sent = passes * buffer * share / (chip.network_bandwidth * chip.network_efficiency)
    return sent + chip.start_seconds + passes * chip.network_seconds


def network_bytes(kind: str, group: int, near: int, sent: int, chip: Chip) -> int:
    """Return how many of the bytes that a device sends cross the network between nodes or slices.

    Args:
        kind: see `wire_bytes`.
        group: number of devices that communicate with each other.
        near: the smallest number of these devices on a node; equal to `group` if all are on one node.
        sent: bytes that one device sends, from `wire_bytes`.
        chip: the hardware.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> sent = wire_bytes("all-gather", 16, 1 << 20)
        >>> sent, network_bytes("all-gather", 16, 8, sent, chip("h100"))
        (983040, 65536)
    """
    if near == group:
        return 0
    if kind == "collective-permute" or (kind == "all-to-all" and not chip.is_switch):
        return sent
    divided = 1 if kind == "all-to-all" else near
    return sent * (group - near) // (divided * (group - 1))


def _together(kind: str, axes: Sequence[str], mesh: Mapping[str, int], buffer: float, chip: Chip) -> Occupancy:
    """Return the times for which a collective keeps links and network busy if it uses all its axes at the same time."""
    group = near = prod(mesh[axis] for axis in axes)
    if chip.nodes(mesh) > 1:
        near = sharing_node(tuple(axes), tuple(mesh.items()), chip.node_devices)
    return occupancy(kind, rings(axes, mesh, chip), group, near, buffer, chip)


def rings(axes: Sequence[str], mesh: Mapping[str, int], chip: Chip) -> list[int]:
    """Return the sizes of the rings that a collective over mesh axes can use at the same time.

    Each mesh axis of more than one device is one ring. If the chip knows the shape of its slice, a mesh axis over
    several torus axes has a ring along each of them, as in `gspmd.audit.Topology.rings`.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> mesh, v4 = {"x": 4, "y": 16}, chip("tpu-v4")
        >>> rings("xy", mesh, v4), rings("xy", mesh, replace(v4, slice_shape=(4, 4, 4)))
        ([4, 16], [4, 4, 4])
    """
    wide = [axis for axis in axes if mesh[axis] > 1]
    if prod(chip.slice_shape) != prod(mesh.values()):  # Unknown, or a pipeline's stage on part of a slice.
        return [mesh[axis] for axis in wide]
    laid = _laid(tuple(mesh.items()), chip.slice_shape)
    return [size for axis in wide for size in laid[axis]]


@lru_cache(maxsize=4096)
def _laid(mesh: tuple[tuple[str, int], ...], shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
    """Return, for each mesh axis, the sizes of the torus axes (or parts of torus axes) that the mesh axis covers."""
    rows = lay(shape, tuple(size for _, size in mesh))
    return {axis: tuple(row[n] for row in rows if row[n] > 1) for n, (axis, _) in enumerate(mesh)}


def _on_one_ring(kind: str, axes: Sequence[str], mesh: Mapping[str, int], buffer: float, chip: Chip) -> float:
    """Return the link time in seconds of a gather or a reduce-scatter round one ring through all devices.

    If some side of the grid is even or has wrap-around links, there is a closed ring of neighbors, and both directions
    of the ring are used.
    """
    sizes = rings(axes, mesh, chip)
    if len(sizes) < 2:
        return 0.0
    links = 2 if any(size % 2 == 0 or chip.wraps(size) for size in sizes) else 1
    return wire_bytes(kind, prod(mesh[axis] for axis in axes), buffer) / (links * chip.link_bandwidth)


def _round_each_axis(sizes: Sequence[int], buffer: float, chip: Chip) -> float:
    """Return the seconds of a gather by rings along each axis, with the copies of blocks to their final positions.

    Copies are counted in full, because the compiler puts most of them after the last permute. A gather over three axes
    counts as no faster than a gather over two of them. Otherwise a plan would slice a tensor over an axis along which
    the tensor is replicated, only to gather it over this axis too. The gain would be small, and such shards seldom
    consist of whole tiles.
    """
    links = 2 * len(sizes) * chip.link_bandwidth
    hops = sum(size - 1 for size in sizes) * (chip.start_seconds + chip.hop_seconds)
    copies = 2 * _COPIES[len(sizes)] * buffer / chip.hbm_bandwidth
    seconds = wire_bytes("all-gather", prod(sizes), buffer) / links + copies + hops
    return seconds if len(sizes) == 2 else max(seconds, _round_each_axis(sorted(sizes)[1:], buffer, chip))


def _in_parts(
    kind: str, first: Sequence[str], axes: Sequence[str], mesh: Mapping[str, int], buffer: float, chip: Chip
) -> float:
    """Return the seconds of two gathers or reduce-scatters, one over the axes `first` and one over the other axes."""
    rest = [axis for axis in axes if axis not in first]
    small = buffer / prod(mesh[axis] for axis in rest)
    return _by_the_compiler(kind, first, mesh, small, chip) + _by_the_compiler(kind, rest, mesh, buffer, chip)


def occupancy(kind: str, sizes: Sequence[int], group: int, near: int, buffer: float, chip: Chip) -> Occupancy:
    """Return the times for which a collective keeps links and network busy.

    With a buffer of S bytes, a group of K devices, m of them on each node, and bandwidths W:

        all-gather, reduce-scatter:  max(S (K-1)/K / W_links, S (1/m - 1/K) / W_network)
        all-reduce:                  twice the time of an all-gather
        all-to-all:                  max(seconds in the node, S (1 - m/K) / W_network)
        permute:                     S / W_network

    In a node, the links form a ring for each torus axis, or they lead to a switch. The m devices on a node divide the
    data from other nodes among themselves, and all of them use the network at the same time. On GPUs the bandwidths are
    those that NCCL reaches with its fastest algorithm (`gspmd.hardware.nccl`). A torus counts as one node here. Over
    several slices, links and network are used one after the other, as in `collective_seconds`.

    Args:
        kind: see `wire_bytes`; neither slice nor einsum.
        sizes: sizes of the rings on a torus; ignored for a switch.
        group: K, more than 1.
        near: m, the smallest number of these devices on a node; K if the group is on one node, as on a torus.
        buffer: S, bytes per device of the larger of input and output.
        chip: the hardware.

    Source: jax-ml scaling book, part 12, 'Cross-node collectives'; the book's W_node egress is m · W_network here.
    """
    network = 0.0
    passes = 2 if kind == "all-reduce" else 1
    if not chip.is_switch:
        links, hop = _on_torus(kind, sizes, group, buffer, chip)
        return Occupancy(links, 0.0, chip.start_seconds + passes * hop)
    if near < group:
        rate = chip.network_bandwidth * chip.network_efficiency
        network = passes * buffer * _network_share(kind, group, near) / rate
    sent, rate = wire_bytes(kind, group, buffer) if near > 1 else 0, _switch_bandwidth(kind, near, chip)
    found = (
        Occupancy(sent / (way.bandwidth or rate * way.share), network / way.share, way.latency)
        for way in ways(kind, group, near, chip)
    )
    return min(found, key=lambda each: each.seconds)


def _switch_bandwidth(kind: str, near: int, chip: Chip) -> float:
    """Return the bytes/s that a device sends over all its links to a switch or, in a full mesh, to its group."""
    peers = max(1, 1 if kind == "collective-permute" else near - 1)
    used = min(peers, chip.links) if chip.full_mesh else chip.links
    return used * chip.link_bandwidth * chip.link_efficiency


def _on_torus(kind: str, sizes: Sequence[int], group: int, buffer: float, chip: Chip) -> tuple[float, float]:
    """Return the transfer seconds and the latency of a collective over several axes of a torus.

    The collective uses all axes at the same time, and both directions of the axes that have wrap-around links.
    """
    sizes = [size for size in sizes if size > 1]
    if not sizes:  # some devices of the group share a node, but no two along one axis: one link, one hop
        return wire_bytes(kind, group, buffer) / chip.link_bandwidth, chip.hop_seconds
    # The farthest device is half a ring away, or a whole line.
    latency = chip.hop_seconds * sum([size // 2 if chip.wraps(size) else size - 1 for size in sizes])
    if kind in ("all-to-all", "collective-permute"):
        load = [size / 8 if chip.wraps(size) else size / 4 for size in sizes]  # buffers that cross the busiest link
        if kind == "collective-permute":  # one path per shard, but on a long ring a link is as busy as in an all-to-all
            load += [1.0 if chip.wraps(size) else 2.0 for size in sizes]
        return buffer * max(load) / chip.link_bandwidth, latency
    closed = min(len([size for size in sizes if chip.wraps(size)]), chip.torus)
    links = closed + min(len(sizes), chip.torus)  # two links for a ring with wrap-around links, one for any other ring
    return wire_bytes(kind, group, buffer) / (links * chip.link_bandwidth), latency


def _network_share(kind: str, group: int, near: int) -> float:
    """Return the fraction of the buffer that one device exchanges with other nodes."""
    if kind == "collective-permute":
        return 1.0
    away = 1 - near / group
    return away if kind == "all-to-all" else away / near


@lru_cache(maxsize=4096)
def sharing_node(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], node: int) -> int:
    """Return the smallest number of devices that a group over `axes` has on one node, for nodes of `node` devices.

    If axes and nodes do not nest, devices are counted one by one. More than 2^20 devices are not counted; the result is
    then 1, which is the slowest case.

    Example:
        >>> mesh = (("data", 4), ("model", 4))
        >>> [sharing_node(axes, mesh, 8) for axes in (("data",), ("model",), ("data", "model"))]
        [2, 4, 8]
    """
    inside, stride = 1, 1
    for axis, size in reversed(mesh):
        room = max(1, node // stride)  # the number of neighbors along this axis on one node
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


def fewest_together(groups: Sequence[Sequence[int]] | np.ndarray, node: int) -> int:
    """Return the smallest number of devices that a group has on one of its nodes, of `node` devices each.

    Each group is a row of device numbers.

    >>> fewest_together([(0, 1, 2), (8, 9, 15)], 8), fewest_together([(0, 1, 8)], 8)
    (3, 1)
    """
    where = np.sort(np.asarray(groups) // node, axis=1)
    starts = np.flatnonzero(np.diff(where, axis=1, prepend=-1).reshape(-1))  # where another node begins
    return int(np.diff(starts, append=where.size).min())


def einsum_seconds(flops: float, memory_bytes: float, dtype: str, chip: Chip) -> float:
    """Return the seconds of a local einsum by the roofline: max(flops / peak, bytes / memory bandwidth).

    Plans use this function for einsums without a sum. `gspmd.hardware.matmul` uses it for products on chips without
    fitted constants.
    """
    return max(flops / chip.flops(dtype), memory_bytes / chip.hbm_bandwidth)


def neighbour(axis: str, mesh: Mapping[str, int], chip: Chip) -> tuple[float, float]:
    """Return the bandwidth (bytes/s) and the latency (seconds) of one step of a ring over a mesh axis.

    All devices take a step together, so the network sets the pace if any two neighbors are on different nodes.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> [neighbour(axis, {"x": 4, "y": 8}, chip("h100"))[0] / 1e9 for axis in ("x", "y")]
        [47.0, 370.8]
    """
    size, latency = mesh[axis], chip.start_seconds + chip.hop_seconds
    if chip.nodes(mesh) > 1 and sharing_node((axis,), tuple(mesh.items()), chip.node_devices) < size:
        return chip.network_bandwidth * chip.network_efficiency, latency + chip.network_seconds
    return _switch_bandwidth("collective-permute", size, chip) if chip.is_switch else chip.link_bandwidth, latency
