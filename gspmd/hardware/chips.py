"""What a chip can do: one row of chips.toml each, with the public source of every figure."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from math import prod
from types import MappingProxyType
from typing import Any

from rich.markup import escape

from gspmd.annotate.errors import PlanError, shown, suggestion
from gspmd.display.console import Printed, printable
from gspmd.display.tables import Column, Sheet
from gspmd.display.units import amount_of_bytes, amount_of_flops, amount_of_seconds
from gspmd.frozen import FrozenDict


@dataclass(frozen=True, repr=False)
class Chip(Printed):
    """Figures of one chip, in bytes, seconds and FLOPs; of one device, where JAX shows a chip as two.

    A node is what these links connect: 8 GPUs behind an NVLink switch, 72 in a rack, the largest slice of a TPU.
    Devices fill nodes in the order of the mesh. Without `node_devices` they are one node, however many there are.

    Raises:
        PlanError: a chip that comes in nodes has no network between them.

    Source: chips.toml names the document of each figure; `Chip.source` holds the same text.
    """

    name: str
    #: dense bfloat16 matrix products, FLOP/s
    bf16_flops: float
    #: float32 matrix products at full precision, FLOP/s
    float32_flops: float
    #: capacity of the high-bandwidth memory, bytes
    hbm_bytes: int
    #: between that memory and the chip, bytes/s
    hbm_bandwidth: float
    #: one link in one direction, bytes/s
    link_bandwidth: float
    #: links of one chip: two per torus dimension, all those into the switch, or one for each peer
    links: int
    #: dimensions of the torus, 0 for a switch or a full mesh
    torus: int
    #: a mesh axis has wrap-around links when this divides its size
    wrap_multiple: int
    #: latency of one hop, seconds
    hop_seconds: float
    #: cycles/s of the matrix unit
    clock: float
    #: names that JAX gives the device
    device_kinds: tuple[str, ...] = ()
    source: Mapping[str, str] = field(default_factory=FrozenDict, compare=False, repr=False)
    #: every link leads to one peer of its own, and there is no switch
    full_mesh: bool = False
    #: latency of a collective besides its hops, seconds
    start_seconds: float = 0.0
    #: devices that these links connect; 0 for any number
    node_devices: int = 0
    #: of one device into the network between nodes, in one direction, bytes/s
    network_bandwidth: float = 0.0
    #: latency of a step over that network, seconds
    network_seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", FrozenDict(self.source))
        if self.node_devices and self.network_bandwidth <= 0:
            raise PlanError(
                f"chip {self.name!r} comes in nodes of {self.node_devices}, and nothing connects them.\n"
                "  Give network_bandwidth, bytes/s of one device, or leave node_devices out: then all are one node."
            )

    @property
    def is_switch(self) -> bool:
        """Whether every peer of a node is one hop away: on a switch, or at the end of a link of its own."""
        return self.torus == 0

    @property
    def egress_bandwidth(self) -> float:
        """Bytes/s that one chip can send over all its links together, in one direction each."""
        return self.links * self.link_bandwidth

    def nodes(self, mesh: Mapping[str, int]) -> int:
        """Nodes that the devices of a mesh fill; for a TPU, slices.

        >>> CHIPS["h100"].nodes({"data": 32, "model": 8}), CHIPS["tpu-v4"].nodes({"data": 32, "model": 8})
        (32, 1)
        """
        return -(-prod(mesh.values()) // self.node_devices) if self.node_devices else 1

    def describe(self, mesh: Mapping[str, int]) -> str:
        """The chip's name, and over how many nodes a mesh of it is spread, where it is more than one.

        >>> CHIPS["h100"].describe({"data": 32, "model": 8}), CHIPS["h100"].describe({"model": 8})
        ('h100 · 32 nodes of 8', 'h100')
        """
        if (nodes := self.nodes(mesh)) == 1:
            return self.name
        full = "" if prod(mesh.values()) % self.node_devices == 0 else "up to "
        return f"{self.name} · {nodes} {'nodes' if self.is_switch else 'slices'} of {full}{self.node_devices}"

    def wraps(self, size: int) -> bool:
        """Whether a mesh axis of `size` chips, laid along one torus axis, closes into a ring."""
        return size % self.wrap_multiple == 0

    def flops(self, dtype: str) -> float:
        """FLOP/s of a matrix product whose operands have this dtype (by name)."""
        return self.float32_flops if dtype in ("float32", "float64") else self.bf16_flops

    def __rich__(self) -> Sheet:
        sheet = Sheet(self.name, (Column("figure"), Column("", "right"), Column("source", folds=True)))
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("name", "source") and (value or each.name in self.source):
                sheet.add(each.name, escape(_figure(each.name, value)), escape(self.source.get(each.name, "")))
        return sheet

    def __repr__(self) -> str:
        memory = f"{amount_of_bytes(self.hbm_bytes)} at {_figure('hbm_bandwidth', self.hbm_bandwidth)}"
        links = f"{self.links} links of {_figure('link_bandwidth', self.link_bandwidth)}"
        figures = f"{_figure('bf16_flops', self.bf16_flops)} in bfloat16, {memory}, {links}"
        return printable(f"<Chip {self.name!r}: {figures}; print it for its sources>")


def _figure(name: str, value: Any) -> str:
    """A figure in its unit, which the end of its name says."""
    match name.rpartition("_")[2]:
        case "flops":
            return f"{amount_of_flops(value)}/s"
        case "bytes":
            return amount_of_bytes(value)
        case "bandwidth":
            return f"{amount_of_bytes(value)}/s"
        case "seconds":
            return amount_of_seconds(value)
        case "clock":
            return f"{value / 1e9:.3g} GHz"
        case "kinds":
            return ", ".join(value)
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _load() -> dict[str, Chip]:
    table = tomllib.loads(files(__package__).joinpath("chips.toml").read_text())
    return {name: _chip(name, dict(row)) for name, row in table.items()}


def _chip(name: str, row: dict) -> Chip:
    source = row.pop("source")
    kinds = tuple(row.pop("device_kinds"))
    return Chip(name=name, device_kinds=kinds, source=source, **row)


CHIPS: Mapping[str, Chip] = MappingProxyType(_load())


def chip(name: "str | Chip") -> Chip:
    """The figures of a chip by its name in chips.toml.

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
        raise PlanError(_unknown(name))
    return CHIPS[name]


def chip_of_device(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind` (`jax.Device.device_kind`), or None where chips.toml has none."""
    return next((row for row in CHIPS.values() if device_kind in row.device_kinds), None)


def _unknown(name: str) -> str:
    near = suggestion(str(name).lower().replace("_", "-").replace(" ", "-"), CHIPS)
    return f"no chip is called {shown(name)}.\n  {near}Known chips: {', '.join(CHIPS)}."
