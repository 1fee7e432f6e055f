"""The links that a compiled collective uses, and its time if no other transfer uses these links."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from gspmd.audit.hlo.collectives import Collective
from gspmd.audit.hlo.replica_groups import UNNAMED, pairs, shared_node, touched_by
from gspmd.hardware.chips import Chip
from gspmd.hardware.links import network_seconds, occupancy

Link = tuple[str, int]
"""A mesh axis, and a direction along this axis, +1 or -1. All chips use their links in the same way, so a `Link` stands
for the link of every chip in this direction."""

SWITCH: Link = ("switch", 0)
NETWORK: Link = ("network", 0)
MEMORY: Link = ("memory", 0)
TO_HOST: Link = ("to host", 0)
FROM_HOST: Link = ("from host", 0)


@dataclass(frozen=True)
class Transfer:
    """The links that a collective or a copy uses, and the time for which it uses these links.

    Attributes:
        busy: seconds for which the transfer fills its links, if it shares no link with other transfers.
        latency: seconds from the end of `busy` until the last bytes arrive. During this time the links are free.
        links: the links that the transfer fills.
    """

    busy: float
    latency: float
    links: frozenset[Link]


Torus = Mapping[str, tuple[int, ...]]
"""A mapping from a mesh axis to the sizes of its torus rings; a mesh axis that is missing is one ring."""


def transfer(sent: Collective, mesh: Mapping[str, int], chip: Chip, torus: Torus) -> Transfer:
    """Return the links and the time of a collective.

    - A shift is a permute that moves all data by the same number of positions along one mesh axis, such as a step of a
      ring. It uses one direction of that axis. If there are no wrap-around links, the data that closes the ring goes
      back in the other direction.
    - Any other collective takes the time of `gspmd.hardware.links.occupancy`, in both directions of its mesh axes. It
      runs along the rings that the compiler states for the collective's algorithm. To gather or scatter over several
      torus axes, libtpu uses one ring through all devices, which has the bandwidth of one axis. If one of these axes
      has an even size, all steps of this ring are between neighbors, whether or not the torus has wrap-around links.
    - If the compiler states no rings, all torus rings of the mesh axes are used. A group of devices that covers only a
      part of an axis uses some of the axis's rings, or counts as a separate ring.
    - On a switch, all collectives share the bandwidth of a chip. Collectives between nodes, and transfers between TPU
      slices, share the network.

    Args:
        sent: the collective.
        mesh: sizes of the mesh axes.
        chip: the chip that has the links.
        torus: for each mesh axis that is not exactly one torus axis, the sizes of its torus rings.
    """
    axes = touched_by(sent.instruction, mesh)
    near = shared_node(sent.instruction, prod(mesh.values()), chip.node_devices) if chip.nodes(mesh) > 1 else 0
    if near and not chip.is_switch:
        busy = sent.wire_bytes / (chip.network_bandwidth * chip.network_efficiency)
        whole = network_seconds(sent.kind, sent.group, sent.buffer, chip)
        return Transfer(busy, whole - busy, frozenset({NETWORK}))
    shift = None if chip.is_switch or near else _shift(pairs(sent.instruction), tuple(mesh.items()))
    if shift:
        return _along(*shift, sent.buffer, mesh, chip)
    rings = _rings(axes, {**mesh, UNNAMED[0]: sent.group}, torus)
    if prod(rings.values()) != sent.group and not pairs(sent.instruction):
        rings = _part(list(rings.values()), sent.group)
    named = sent.rings if prod(sent.rings) == sent.group else ()
    sizes = [size for size in named or rings.values() if size > 1]
    if not sizes:
        return Transfer(0.0, 0.0, frozenset())
    several = len([size for size in rings.values() if size > 1]) > 1
    closes = (
        len(sizes) == 1 and several and sizes[0] % 2 == 0
    )  # A grid with an even side has a cycle through all places.
    used = replace(chip, wrap_multiple=1) if closes else chip
    takes = occupancy(sent.kind, sizes, prod(sizes), near or prod(sizes), sent.buffer, used)
    if takes.network > takes.links:
        links = {NETWORK}
    else:
        links = {SWITCH} if chip.is_switch else {(axis, sign) for axis in axes for sign in (1, -1)}
    return Transfer(max(takes.links, takes.network), takes.latency, frozenset(links))


def _rings(axes: tuple[str, ...], sizes: Mapping[str, int], torus: Torus) -> dict[str, int]:
    """Return a mapping from arbitrary, distinct names to the sizes of the torus rings of the given mesh axes.

    If a chip has two devices, the connection between them is not on any torus ring. The two devices count as a separate
    ring, as in a plan.
    """
    found = {}
    for axis in axes:
        rings = torus.get(axis, (sizes[axis],))
        for number, size in enumerate((*rings, sizes[axis] // prod(rings))):
            found[f"{axis}{number}"] = size
    return found


def _part(rings: list[int], group: int) -> dict[str, int]:
    """Return a mapping from arbitrary, distinct names to the sizes of a group's rings.

    The group covers only a part of an axis. Its rings are the first consecutive elements of `rings` that together have
    as many devices as the group. If there are no such elements, the group is one ring.
    """
    runs = (rings[a:b] for a in range(len(rings)) for b in range(a + 1, len(rings) + 1))
    covered = next((run for run in runs if prod(run) == group), [group])
    return {str(number): size for number, size in enumerate(covered)}


def _shift(sent: tuple[tuple[int, int], ...], mesh: tuple[tuple[str, int], ...]) -> tuple[str, int, bool] | None:
    """Return (axis, distance, whether data wraps around) for a permute that shifts all data equally far.

    The distance is the number of positions along the axis in the shorter direction, negative if that direction is
    backward. The result is None for any other permute, and if both directions are equally short on an axis of more than
    two devices.
    """
    shape = [size for _, size in mesh]
    if not sent or max(max(pair) for pair in sent) >= np.prod(shape):
        return None
    source, target = (np.array(np.unravel_index(np.array(side), shape)) for side in zip(*sent))
    places = (target - source) % np.array(shape)[:, None]
    moved = np.flatnonzero(places.any(axis=1))
    if len(moved) != 1 or (places[moved[0]] != places[moved[0], 0]).any():
        return None
    (axis, size), by = mesh[moved[0]], int(places[moved[0], 0])
    if 2 * by == size > 2:  # Both directions are equally short.
        return None
    by = by if 2 * by <= size else by - size
    return axis, by, bool((target[moved[0]] - source[moved[0]] != by).any())


def _along(axis: str, by: int, closes: bool, buffer: int, mesh: Mapping[str, int], chip: Chip) -> Transfer:
    """Return the links and the time of a shift by `by` positions along a mesh axis.

    Each link carries the buffers of `abs(by)` chips. The latency is the latency of the longest path.

    Args:
        axis: the mesh axis.
        by: the distance in positions, negative if backward.
        closes: whether data wraps around at the end of the axis.
        buffer: bytes that one device sends.
        mesh: sizes of the mesh axes.
        chip: the chip that has the links.
    """
    both = closes and not chip.wraps(mesh[axis])
    hops = mesh[axis] - abs(by) if both else abs(by)
    links = {(axis, 1), (axis, -1)} if both else {(axis, 1 if by > 0 else -1)}
    latency = chip.start_seconds + hops * chip.hop_seconds
    return Transfer(abs(by) * buffer / chip.link_bandwidth, latency, frozenset(links))
