"""Chips: the performance figures of one device, read from chips.toml, which cites a public source for each figure."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from math import prod
from types import MappingProxyType
from typing import Any

from gspmd.annotate.errors import PlanError, shown, suggestion
from gspmd.display.printed import Printed
from gspmd.frozen import FrozenDict


@dataclass(frozen=True, repr=False)
class Chip(Printed):
    """The performance figures of one device: its memory, links and FLOP/s.

    A device is a chip, or half a chip if JAX shows a chip as two devices. A node is the set of devices that the links
    connect: 8 GPUs behind an NVLink switch, 72 GPUs in a rack, or the largest slice of a TPU. Devices fill nodes in the
    order of the mesh. Without `node_devices`, all devices are in one node.

    Raises:
        PlanError: `node_devices` is given without `network_bandwidth`.

    Source: chips.toml cites a document for each figure; `Chip.source` holds the same text.
    """

    name: str
    bf16_flops: float  #: FLOP/s of dense bfloat16 matrix products
    float32_flops: float  #: FLOP/s of float32 matrix products at full precision
    hbm_bytes: int  #: capacity of the high-bandwidth memory in bytes
    hbm_bandwidth: float  #: bandwidth of the high-bandwidth memory in bytes/s
    link_bandwidth: float  #: bandwidth of one link in one direction in bytes/s
    links: int  #: links of one chip: two per torus dimension, all links into the switch, or one per peer of a full mesh
    torus: int  #: dimensions of the torus, 0 for a switch or a full mesh
    wrap_multiple: int  #: a mesh axis has wrap-around links if its size is a multiple of this number
    hop_seconds: float  #: latency of one hop in seconds
    clock: float  #: clock of the matrix unit in cycles/s
    device_kinds: tuple[str, ...] = ()  #: values of `jax.Device.device_kind`
    source: Mapping[str, str] = field(default_factory=FrozenDict, compare=False, repr=False)
    gathers_on_one_ring: bool = False  #: whether compiled gathers over several torus axes use only one axis's links
    keeps_whole_slices: bool = False  #: whether compilers often keep a gather or scatter over a whole slice as one
    full_mesh: bool = False  #: whether each link leads to one peer, without a switch
    start_seconds: float = 0.0  #: latency of starting a collective in seconds, without its hops
    node_devices: int = 0  #: number of devices in a node; 0 if all devices are one node
    network_bandwidth: float = 0.0  #: bandwidth of one device into the network between nodes, one way, in bytes/s
    network_seconds: float = 0.0  #: latency of one step over the network between nodes in seconds
    host_bandwidth: float = 0.0  #: bandwidth from and to host memory, in one direction, in bytes/s; 0 if unknown
    tf32_flops: float = 0.0  #: FLOP/s of float32 matrix products in TF32; 0 if the chip lacks TF32
    multiplies_in_tf32: bool = False  #: whether XLA multiplies float32 in TF32 by default
    stream_efficiency: float = 1.0  #: fraction of `hbm_bandwidth` that a kernel with little computation reaches
    attention_efficiency: float = 1.0  #: fraction of `bf16_flops` that fused attention reaches
    kernel_seconds: float = 0.0  #: seconds between the end of one kernel and the start of the next
    launch_seconds: float = 0.0  #: seconds that the host needs to launch a kernel
    link_efficiency: float = 1.0  #: fraction of `link_bandwidth` that a collective reaches
    network_efficiency: float = 1.0  #: fraction of `network_bandwidth` that a collective reaches
    reduce_bandwidth: float = 0.0  #: bus bandwidth in bytes/s of an all-reduce computed by a node's switch, or 0
    slice_shape: tuple[int, ...] = ()  #: chips along each torus axis of the slice, without axes of 1; empty if unknown
    prices_in_parts: bool = False  #: no figure; a search's bounds price collectives in their cheapest number of parts

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", FrozenDict(self.source))
        if self.node_devices and self.network_bandwidth <= 0:
            raise PlanError(
                f"chip {self.name!r} has nodes of {self.node_devices} devices, but no network between them.\n"
                "  Give network_bandwidth, bytes/s of one device, or leave node_devices out: then all are one node."
            )

    @property
    def is_switch(self) -> bool:
        """Whether all devices of a node are one hop apart, through a switch or in a full mesh of links."""
        return self.torus == 0

    @property
    def egress_bandwidth(self) -> float:
        """Bytes/s that one chip sends while all its links are busy, each in one direction."""
        return self.links * self.link_bandwidth

    @property
    def stream_bandwidth(self) -> float:
        """Bytes/s of main memory that a kernel with little computation reaches."""
        return self.hbm_bandwidth * self.stream_efficiency

    def nodes(self, mesh: Mapping[str, int]) -> int:
        """Return the number of nodes (slices, for a TPU) that the devices of a mesh fill.

        >>> CHIPS["h100"].nodes({"data": 32, "model": 8}), CHIPS["tpu-v4"].nodes({"data": 32, "model": 8})
        (32, 1)
        """
        return -(-prod(mesh.values()) // self.node_devices) if self.node_devices else 1

    def describe(self, mesh: Mapping[str, int]) -> str:
        """Return the chip's name, with the number of nodes if the mesh spans several nodes.

        >>> CHIPS["h100"].describe({"data": 32, "model": 8}), CHIPS["h100"].describe({"model": 8})
        ('h100 · 32 nodes of 8', 'h100')
        """
        if (nodes := self.nodes(mesh)) == 1:
            return self.name
        full = "" if prod(mesh.values()) % self.node_devices == 0 else "up to "
        return f"{self.name} · {nodes} {'nodes' if self.is_switch else 'slices'} of {full}{self.node_devices}"

    def wraps(self, size: int) -> bool:
        """Return whether a mesh axis of `size` chips along one torus axis is a ring, with wrap-around links."""
        return size % self.wrap_multiple == 0

    def flops(self, arithmetic: str) -> float:
        """Return the peak FLOP/s of matrix products; `arithmetic` is a dtype, or a result of the method `arithmetic`.

        `float32` means full precision. The method `arithmetic` tells the precision that JAX chooses by default.
        """
        if arithmetic == "tensorfloat32" and self.tf32_flops:
            return self.tf32_flops
        if arithmetic == "bfloat16_3x":
            return self.bf16_flops / 3
        return self.float32_flops if arithmetic in ("float32", "float64", "tensorfloat32") else self.bf16_flops

    def arithmetic(self, dtype: str, precision: str = "default") -> str:
        """Return the arithmetic in which XLA multiplies operands of a dtype, as an argument of `flops`.

        Float32 is the only dtype with a choice. A TPU multiplies float32 in one pass of bfloat16 by default, in three
        passes at precision `high` (`bfloat16_3x`), and at full precision only at `highest`. An NVIDIA GPU multiplies
        float32 in TF32 unless the precision is `highest`. An AMD GPU always multiplies float32 at full precision.

        Args:
            dtype: the name of the wider dtype of the operands.
            precision: `default`, `high` or `highest`, as in `jax.lax.Precision`.

        Example:
            >>> [CHIPS[name].arithmetic("float32") for name in ("tpu-v4", "h100", "mi300x")]
            ['bfloat16', 'tensorfloat32', 'float32']

        Source: JAX documentation, `jax.lax.Precision`; for GPUs openxla/xla, `GetBlasComputationType` of
        `stream_executor/gpu/gpu_blas_lt.cc`, which chooses TF32 on CUDA only (pull request 46177 would choose it on
        ROCm too).
        """
        if dtype != "float32" or precision == "highest":
            return dtype
        if self.is_switch:
            return "tensorfloat32" if self.multiplies_in_tf32 else dtype
        return "bfloat16_3x" if precision == "high" else "bfloat16"

    def _figures(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("name", "source")}

    def __rich__(self) -> Any:
        from gspmd.hardware.printing import table  # imported here, as below: printing needs rich, planning does not

        return table(self.name, self._figures(), self.source)

    def __repr__(self) -> str:
        from gspmd.hardware.printing import line

        return line(self.name, self._figures())


def _load() -> dict[str, Chip]:
    table = tomllib.loads(files(__package__).joinpath("chips.toml").read_text())
    return {name: Chip(name, **row | {"device_kinds": tuple(row["device_kinds"])}) for name, row in table.items()}


CHIPS: Mapping[str, Chip] = MappingProxyType(_load())


def chip(name: "str | Chip") -> Chip:
    """Look up a chip by its name in chips.toml.

    Args:
        name: one of `CHIPS`, such as `tpu-v4`, `tpu7x` or `h200`; a `Chip` is returned as it is.

    Raises:
        PlanError: no chip has this name.

    Example:
        >>> chip("tpu-v4").bf16_flops / 1e12
        275.0
    """
    if isinstance(name, Chip):
        return name
    if not isinstance(name, str) or name not in CHIPS:
        if isinstance(getattr(name, "chip", None), Chip):
            raise PlanError(f"{shown(name)} is not a chip.\n  Give its attribute chip: topology(...).chip.")
        asked = str(name).lower().replace("_", "-").replace(" ", "-")
        near = suggestion(asked, not_another(asked, CHIPS))
        raise PlanError(f"no chip is called {shown(name)}.\n  {near}Known chips: {', '.join(CHIPS)}.")
    return CHIPS[name]


def not_another(asked: str, known: Iterable[str]) -> list[str]:
    """Return the names that `asked` may mean: all in `known`, or none if `asked` names a different chip, such as V100.

    >>> not_another("v100", ["h100", "h200"]), not_another("h10", ["h100"]), not_another("h100", ["h100"])
    ([], ['h100'], ['h100'])
    """
    known = list(known)
    is_other = asked[1:].isdecimal() and asked not in known and any(each[1:] == asked[1:] for each in known)
    return [] if is_other else known


def slice_of(device: Any) -> int:
    """Return the index of the TPU slice to which a device belongs; 0 for all devices except TPUs.

    For GPUs, JAX's slice index is the number of the host, which is ignored here.
    """
    return getattr(device, "slice_index", 0) if getattr(device, "platform", "") == "tpu" else 0


def chip_of_device(device_kind: str) -> Chip | None:
    """Look up a chip by `jax.Device.device_kind`; return None if chips.toml has no such chip."""
    return next((row for row in CHIPS.values() if device_kind in row.device_kinds), None)
