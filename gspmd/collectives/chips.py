"""What a chip can do: one row of chips.toml each, with the public source of every figure."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from types import MappingProxyType

from gspmd.annotate.errors import PlanError, suggestion


@dataclass(frozen=True)
class Chip:
    """Peak figures of one chip, in bytes, seconds and FLOPs; of one device, where JAX shows a chip as two.

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
    #: links of one chip: two per torus dimension, or all those into the switch
    links: int
    #: dimensions of the torus, 0 for a switch
    torus: int
    #: a mesh axis has wrap-around links when this divides its size
    wrap_multiple: int
    #: latency of one hop, seconds
    hop_seconds: float
    #: cycles/s of the matrix unit
    clock: float
    #: names that JAX gives the device
    device_kinds: tuple[str, ...] = ()
    source: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_switch(self) -> bool:
        """Whether chips hang on a switch, where every peer is one hop away."""
        return self.torus == 0

    @property
    def egress_bandwidth(self) -> float:
        """Bytes/s that one chip can send over all its links together, in one direction each."""
        return self.links * self.link_bandwidth

    def wraps(self, size: int) -> bool:
        """Whether a mesh axis of `size` chips, laid along one torus axis, closes into a ring."""
        return size % self.wrap_multiple == 0

    def flops(self, dtype: str) -> float:
        """FLOP/s of a matrix product whose operands have this dtype (by name)."""
        return self.float32_flops if dtype in ("float32", "float64") else self.bf16_flops


def _load() -> dict[str, Chip]:
    table = tomllib.loads(files(__package__).joinpath("chips.toml").read_text())
    return {name: _chip(name, dict(row)) for name, row in table.items()}


def _chip(name: str, row: dict) -> Chip:
    source = MappingProxyType(row.pop("source"))
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
    if name not in CHIPS:
        raise PlanError(_unknown(name))
    return CHIPS[name]


def chip_of_device(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind` (`jax.Device.device_kind`), or None where chips.toml has none."""
    return next((row for row in CHIPS.values() if device_kind in row.device_kinds), None)


def _unknown(name: str) -> str:
    near = suggestion(str(name).lower().replace("_", "-").replace(" ", "-"), CHIPS)
    return f"no chip is called {name!r}.\n  {near}Known chips: {', '.join(CHIPS)}."
