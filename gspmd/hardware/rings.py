"""The cost of a step of a looped collective einsum: every device sends to its neighbour along one mesh axis."""

from collections.abc import Mapping

from gspmd.hardware.chips import Chip
from gspmd.hardware.links import sharing_node


def neighbour(axis: str, mesh: Mapping[str, int], chip: Chip) -> tuple[float, float]:
    """Bandwidth (bytes/s) and latency (seconds) of one step of a ring over a mesh axis.

    All devices step together, so the network sets the pace if any two neighbours lie on different nodes.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> [neighbour(axis, {"x": 4, "y": 8}, chip("h100"))[0] / 1e9 for axis in ("x", "y")]
        [50.0, 450.0]
    """
    size, latency = mesh[axis], chip.start_seconds + chip.hop_seconds
    if chip.nodes(mesh) > 1 and sharing_node((axis,), tuple(mesh.items()), chip.node_devices) < size:
        return chip.network_bandwidth, latency + chip.network_seconds
    return chip.egress_bandwidth if chip.is_switch and not chip.full_mesh else chip.link_bandwidth, latency
