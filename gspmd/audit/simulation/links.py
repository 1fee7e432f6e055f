"""The links that a compiled collective uses, and the time that it takes if it does not share them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from gspmd.audit.hlo.collectives import Collective
from gspmd.audit.hlo.replica_groups import UNNAMED, pairs, shared_node, touched_by
from gspmd.hardware.chips import Chip
from gspmd.hardware.links import network_seconds, occupancy

Link = tuple[str, int]
"""A mesh axis and a direction along it, +1 or -1; it stands for this link of every chip, since all chips use it alike.
"""

SWITCH: Link = ("switch", 0)
NETWORK: Link = ("network", 0)
MEMORY: Link = ("memory", 0)


@dataclass(frozen=True)
class Transfer:
    """The links that a collective or a copy uses, and the time for which it uses them.

    Attributes:
        busy: seconds for which the transfer fills its links if it does not share them.
        latency: further seconds until the last bytes arrive, while the links are already free.
        links: the links that the transfer fills.
    """

    busy: float
    latency: float
    links: frozenset[Link]


Torus = Mapping[str, tuple[int, ...]]
"""Mesh axis -> sizes of its torus rings; an axis that is missing is one ring."""


def transfer(sent: Collective, mesh: Mapping[str, int], chip: Chip, torus: Torus) -> Transfer:
    """Return the links and seconds of a collective.

    - A permute that moves data by the same number of positions along one mesh axis (a step of a ring) uses one
      direction of that axis. Without wrap-around links, the transfer that closes the ring goes back in the other
      direction.
    - Any other collective takes the seconds of `gspmd.hardware.links.occupancy` in both directions of its axes, along
      the rings that the compiler names for its algorithm. libtpu gathers and scatters over several torus axes round one
      ring through all devices, with the bandwidth of one axis. If one axis has an even size, this ring joins only
      neighbors, whether or not the torus has wrap-around links. If the compiler names no rings, all torus rings are
      used; groups that cover part of an axis use some of its rings, or count as one ring of their own.
    - On a switch all collectives share the bandwidth of a chip; between nodes they share the network, and transfers
      between TPU slices share it too.

    Args:
        sent: the collective.
        mesh: sizes of the mesh axes.
        chip: the chip that has the links.
        torus: the torus rings of those mesh axes that are not one torus axis each.
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
    """Return the sizes of the torus rings of these mesh axes, under arbitrary distinct names.

    The two devices of a chip are not on any torus ring; they count as a separate ring, as in a plan.
    """
    found = {}
    for axis in axes:
        rings = torus.get(axis, (sizes[axis],))
        for number, size in enumerate((*rings, sizes[axis] // prod(rings))):
            found[f"{axis}{number}"] = size
    return found


def _part(rings: list[int], group: int) -> dict[str, int]:
    """Return the rings of a group that covers part of an axis: consecutive rings of that size, or else one ring."""
    runs = (rings[a:b] for a in range(len(rings)) for b in range(a + 1, len(rings) + 1))
    covered = next((run for run in runs if prod(run) == group), [group])
    return {str(number): size for number, size in enumerate(covered)}


def _shift(sent: tuple[tuple[int, int], ...], mesh: tuple[tuple[str, int], ...]) -> tuple[str, int, bool] | None:
    """Return (axis, distance, whether data wraps around) for a permute that shifts all data equally far, or None.

    The distance is in positions along the axis in the shorter direction, and negative if that is backward.
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
    """Return the transfer of a shift: a link carries the buffers of `by` chips; the longest path sets the latency."""
    both = closes and not chip.wraps(mesh[axis])
    hops = mesh[axis] - abs(by) if both else abs(by)
    links = {(axis, 1), (axis, -1)} if both else {(axis, 1 if by > 0 else -1)}
    latency = chip.start_seconds + hops * chip.hop_seconds
    return Transfer(abs(by) * buffer / chip.link_bandwidth, latency, frozenset(links))
