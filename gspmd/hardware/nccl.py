"""NCCL, the library of collectives on GPUs: the ways to run a collective, with latency and fraction of bandwidth.

NCCL has three protocols. The protocol for small messages has the least latency, but spends bandwidth on flags. As in
NCCL, the fastest protocol is chosen for each collective, by the figures of NCCL's own table. AMD's RCCL is derived from
NCCL, and is assumed to do the same.
"""

from collections.abc import Iterator
from math import log2
from typing import NamedTuple

from gspmd.hardware.chips import Chip


class Protocol(NamedTuple):
    """A protocol of NCCL: its latency in addition to the latency of protocol LL, and its share of the bandwidth.

    The latency of protocol LL is in chips.toml.

    Attributes:
        start: additional seconds for the start of a collective.
        hop: additional seconds per step within a node.
        network: additional seconds per step of a ring between nodes.
        tree: additional seconds per step of a tree between nodes.
        share: fraction of the bandwidth that the protocol reaches.

    Source: NVIDIA NCCL, src/graph/tuning.cc: `baseLatencies`, `hwLatencies`; `llMaxBws` divided by the links'
    bandwidth, which is 0.37 to 0.39 from Ampere to Blackwell.
    """

    start: float
    hop: float
    network: float
    tree: float
    share: float


LL = Protocol(0.0, 0.0, 0.0, 2.3e-6, 0.38)
LL128 = Protocol(7.4e-6, 1.3e-6, 1.3e-6, 5.8e-6, 0.92)
SIMPLE = Protocol(1.8e-6, 2.8e-6, 11.3e-6, 11.3e-6, 1.0)

TREE_SHARE = 0.92
"""The bandwidth of a tree as a fraction of a ring's bandwidth (tuning.cc)."""

SWITCH_SECONDS = 25e-6
"""Latency of an all-reduce that the switch computes by NVLink SHARP (tuning.cc, `hwLatencies` of NVLS)."""


class Way(NamedTuple):
    """A way to run a collective: an algorithm with a protocol.

    Attributes:
        latency: seconds that do not depend on the bytes.
        share: fraction of the bandwidth of links and network that is used.
        bandwidth: bus bandwidth within the node in bytes/s; 0 if it is the bandwidth of the links.
    """

    latency: float
    share: float
    bandwidth: float = 0.0


def ways(kind: str, group: int, near: int, chip: Chip) -> Iterator[Way]:
    """Yield the ways to run a collective.

    A ring of K devices takes K - 1 steps; for an all-reduce, it takes twice as many. An all-reduce between nodes can
    also go up and down a tree. The switch can compute an all-reduce within one or two nodes if more than two devices
    per node take part. In an all-to-all and in a permute, all devices send at the same time.

    Args:
        kind: a kind of `gspmd.hardware.links.wire_bytes` other than slice and einsum.
        group: number of devices that communicate with each other.
        near: the smallest number of these devices on any node.
        chip: the hardware.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> [f"{1e6 * way.latency:.1f}" for way in ways("all-gather", 8, 8, chip("h100"))]
        ['10.8', '27.3', '32.2']

    Leaves out: the chunks into which NCCL cuts messages; protocol LL128 between nodes, which some networks cannot use.

    Source: NVIDIA NCCL, src/graph/tuning.cc, `ncclTopoTuneModel`.
    """
    nodes, passes = -(-group // near), 2 if kind == "all-reduce" else 1
    if kind in ("all-to-all", "collective-permute"):
        inside, across = int(near > 1), int(nodes > 1)
    else:
        across = passes * (nodes - 1)
        inside = passes * (group - 1) - across
    for protocol in (LL, LL128, SIMPLE):
        start, hop = chip.start_seconds + protocol.start, chip.hop_seconds + protocol.hop
        yield Way(start + inside * hop + across * (chip.network_seconds + protocol.network), protocol.share)
        if kind == "all-reduce" and nodes > 1:
            up = (near - 1) * hop + log2(nodes) * (chip.network_seconds + protocol.tree)
            yield Way(start + 2 * up, TREE_SHARE * protocol.share)
    if kind == "all-reduce" and chip.reduce_bandwidth and near > 2 and nodes <= 2:
        yield Way(SWITCH_SECONDS + across * (chip.network_seconds + SIMPLE.network), 1.0, chip.reduce_bandwidth)
