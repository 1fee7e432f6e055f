"""The speed of a run: tokens per second, and the model FLOPs utilization (MFU)."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from gspmd import host
from gspmd.display.units import amount_of_flops
from gspmd.hardware.chips import chip_of_device


@dataclass(frozen=True)
class Speed:
    """The work of one step, and the peak rate of the devices.

        tokens per second = tokens / seconds
        MFU               = flops / (seconds · peak)

    Attributes:
        tokens: number of tokens of one step, over all devices.
        flops: FLOPs that forward and backward pass need for these tokens. A token needs 6 FLOPs for each parameter
            of a matrix product, and 12 · layers · heads · head size · length for attention. Recomputation to save
            memory does not count.
        peak: FLOP/s of all devices together; None if the rate is unknown, and then there is no MFU.

    Source: Chowdhery et al. 2022, PaLM (arXiv 2204.02311), section 4.1 and appendix B.
    """

    tokens: int
    flops: float = 0.0
    peak: float | None = None

    def figures(self, seconds: float) -> dict[str, float]:
        """Return the metrics of a step that took `seconds` seconds.

        >>> Speed(tokens=1000, flops=3e12, peak=2e13).figures(0.5)
        {'tokens_per_second': 2000.0, 'mfu': 0.3}
        """
        rate = {"tokens_per_second": self.tokens / seconds}
        return rate | ({"mfu": self.flops / (seconds * self.peak)} if self.peak else {})


def peak_flops(devices: Sequence[jax.Device], dtype: str) -> float | None:
    """Return the total peak FLOP/s of devices for dense matrix products.

    Args:
        devices: devices of one kind.
        dtype: the dtype of the operands.

    Returns:
        The peak rate. None for fake devices, because they share the cores of one host, and for chips that chips.toml
        lacks.
    """
    chip = chip_of_device(devices[0].device_kind)
    return None if chip is None else len(devices) * chip.flops(dtype)


def describe_peak(devices: Sequence[jax.Device], dtype: str) -> str:
    """Return a line that states the peak rate to which MFU refers, or the reason why there is no MFU."""
    chip = chip_of_device(devices[0].device_kind)
    if chip is not None:
        return f"{amount_of_flops(chip.flops(dtype))}/s per device in {dtype} ({chip.name})"
    if host.is_fake(devices):
        return "none, and so no MFU: fake devices share the cores of one host"
    return f"unknown, and so is the MFU: chips.toml has no {devices[0].device_kind!r}"
