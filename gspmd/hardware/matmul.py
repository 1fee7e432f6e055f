"""Seconds of a local matrix product, including the lower efficiency of thin ones.

Only large products reach a chip's peak. A product cut into chunks pays a start for each chunk, reads its other operand
once per chunk, and, if the contracted dimension is cut, reads and writes the accumulator once per chunk. The constants
are fitted to the cycles that the TPU compiler estimates (matmul.toml, benchmarks/thin.py).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import hypot, prod, sqrt
from types import MappingProxyType

from gspmd.hardware.chips import Chip
from gspmd.hardware.dtypes import itemsize
from gspmd.hardware.links import einsum_seconds

#: Seconds added to the roofline of a product if matmul.toml has no row for the chip: assumed, not measured.
FALLBACK_OVERHEAD = 2e-6


@dataclass(frozen=True)
class Traffic:
    """Bytes that a product moves through main memory: operands, result, and accumulator (in and out)."""

    read: float
    written: float
    accumulated: float = 0

    @property
    def bytes(self) -> float:
        """Total bytes."""
        return self.read + self.written + self.accumulated


@dataclass(frozen=True)
class Efficiency:
    """The fitted constants of one chip; matmul.toml explains each."""

    overhead_seconds: float
    latency_seconds: float
    window_seconds: float
    matrix_efficiency: float
    read_efficiency: float
    write_efficiency: float
    load_rate: float
    drain_rate: float
    accumulate_rate: float
    rows: int
    lanes: int
    depth: int

    def seconds(
        self, sizes: tuple[int, int, int, int], moved: Traffic, dtype: str, chip: Chip, accumulate: bool
    ) -> float:
        """Seconds of one product [batch, left, contracted] x [batch, contracted, right]; see `product_seconds`."""
        batch, left, contracted, right = sizes
        flops = 2 * batch * self._padded(left, right) * _round_up(contracted, self.depth)
        matrix = flops / (chip.flops(dtype) * self.matrix_efficiency)
        load = batch * contracted * (left + right) / self.load_rate
        drain = batch * left * right / (self.accumulate_rate if accumulate else self.drain_rate)
        streamed = (moved.read + moved.accumulated) / self.read_efficiency
        memory = (streamed + moved.written / self.write_efficiency) / chip.hbm_bandwidth
        together = hypot(matrix, load, drain, memory)
        # The compiler pipelines a product over n windows. The first read and the last write, together / n, overlap with
        # nothing, and each window costs its start: together / n + n * start, which is 2 sqrt(together * start) at best.
        alone = self.overhead_seconds + (self.latency_seconds if moved.read else 0)
        return alone + together + 2 * sqrt(together * self.window_seconds)

    def _padded(self, left: int, right: int) -> int:
        """Elements of the result padded to whole tiles; the compiler chooses which dimension lies along the lanes."""
        rows, lanes = self.rows, self.lanes
        return min(_round_up(left, rows) * _round_up(right, lanes), _round_up(left, lanes) * _round_up(right, rows))


def _round_up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _load() -> dict[str, Efficiency]:
    table = tomllib.loads(files(__package__).joinpath("matmul.toml").read_text())
    for row in table.values():
        row.pop("fit")  # how well the model fits, for readers of the table
    return {name: Efficiency(**row) for name, row in table.items()}


EFFICIENCIES: Mapping[str, Efficiency] = MappingProxyType(_load())


@lru_cache(maxsize=65536)
def product_seconds(
    left: int,
    contracted: int,
    right: int,
    *,
    batch: int = 1,
    dtype: str = "bfloat16",
    chip: Chip,
    accumulate: bool = False,
    read_bytes: float | None = None,
    accumulator_bytes: float | None = None,
) -> float:
    """Seconds of one local product [batch, left, contracted] x [batch, contracted, right] on a chip.

        overhead + t + 2 sqrt(t * window),  t = sqrt(matrix^2 + load^2 + drain^2 + memory^2)

    on a chip in matmul.toml, each at its fitted rate: `matrix` multiplies, every dimension padded to whole tiles;
    `load` feeds both operands to the matrix unit; `drain` takes the result out; `memory` is main memory. They overlap
    in part, so `t` lies between the longest and the sum. The rest is the start, and filling and draining the pipeline.
    Symmetric in left and right.

    On any other chip: the roofline, `gspmd.hardware.links.einsum_seconds`, plus `FALLBACK_OVERHEAD`.

    Args:
        left, contracted, right: sizes on one device.
        batch: size of all batch dimensions.
        dtype: the dtype of operands and result.
        chip: the hardware.
        accumulate: whether the result is added to a float32 accumulator [batch, left, right], read and written.
        read_bytes: operand bytes read from main memory; by default both operands once. Fewer if one stays on the chip,
            as small weights may in a loop.
        accumulator_bytes: accumulator bytes to and from main memory; by default once in and once out. 0 if it stays on
            the chip, as a loop's carry does while it fits.

    Raises:
        PlanError: `dtype` is unknown.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> v4 = chip("tpu-v4")
        >>> whole = product_seconds(2048, 1152, 4608, chip=v4)
        >>> chunks = 32 * product_seconds(64, 1152, 4608, chip=v4)
        >>> chunks > 2 * whole
        True

    Source: cycles that the TPU compiler estimates for products compiled offline; benchmarks/thin.py regenerates them.
    Over some 280 products per chip the error is 5 to 7% in the median, and 15 to 25% at the 90th percentile.

    Leaves out: overlap with what runs before and after; the compiler's choice of windows, by which single shapes differ
    by a third and more; repeated reads of operands in large products; results that stay on the chip.
    """
    sizes = (batch, left, contracted, right)
    moved = traffic(sizes, dtype, accumulate, read_bytes, accumulator_bytes)
    if row := EFFICIENCIES.get(chip.name):
        return row.seconds(sizes, moved, dtype, chip, accumulate)
    return einsum_seconds(2 * prod(sizes), moved.bytes, dtype, chip) + FALLBACK_OVERHEAD


def traffic(
    sizes: tuple[int, int, int, int],
    dtype: str,
    accumulate: bool = False,
    read_bytes: float | None = None,
    accumulator_bytes: float | None = None,
) -> Traffic:
    """Bytes that a product moves; by default operands, and result or float32 accumulator, lie in main memory."""
    batch, left, contracted, right = sizes
    result = batch * left * right
    read = batch * contracted * (left + right) * itemsize(dtype) if read_bytes is None else read_bytes
    if not accumulate:
        return Traffic(read, result * itemsize(dtype))
    return Traffic(read, 0, 2 * result * itemsize("float32") if accumulator_bytes is None else accumulator_bytes)
