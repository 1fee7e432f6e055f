"""What a local product of matrices costs on a chip, the loss in thin ones included.

A peak is reached by large products only. Cut into chunks, a product starts anew for each of them, the other operand
is read once per chunk, and a chunk of the contracted dimension reads and writes the sum so far. The constants behind
these figures are fitted to what the TPU compiler estimates (matmul.toml, benchmarks/thin.py).
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

#: Seconds by which a product on a chip without a row in matmul.toml exceeds its roofline: assumed, not measured.
FALLBACK_OVERHEAD = 2e-6


@dataclass(frozen=True)
class Traffic:
    """Bytes that a product moves between main memory and the chip: operands, its result, the accumulator in and out."""

    read: float
    written: float
    accumulated: float = 0

    @property
    def bytes(self) -> float:
        """All of them."""
        return self.read + self.written + self.accumulated


@dataclass(frozen=True)
class Efficiency:
    """A row of matmul.toml, which says what each figure means."""

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
        """Seconds of `batch` products [left, contracted] x [contracted, right], done as one."""
        batch, left, contracted, right = sizes
        flops = 2 * batch * self._padded(left, right) * _up(contracted, self.depth)
        matrix = flops / (chip.flops(dtype) * self.matrix_efficiency)
        load = batch * contracted * (left + right) / self.load_rate
        drain = batch * left * right / (self.accumulate_rate if accumulate else self.drain_rate)
        streamed = (moved.read + moved.accumulated) / self.read_efficiency
        memory = (streamed + moved.written / self.write_efficiency) / chip.hbm_bandwidth
        together = hypot(matrix, load, drain, memory)
        # In n windows the first read and the last write, together/n, hide behind nothing, and every window costs its
        # start: at the best n that is 2 sqrt(together * start).
        alone = self.overhead_seconds + (self.latency_seconds if moved.read else 0)
        return alone + together + 2 * sqrt(together * self.window_seconds)

    def _padded(self, left: int, right: int) -> int:
        """Elements of the result in whole tiles; the compiler lays either of its dimensions along the lanes."""
        rows, lanes = self.rows, self.lanes
        return min(_up(left, rows) * _up(right, lanes), _up(left, lanes) * _up(right, rows))


def _up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _load() -> dict[str, Efficiency]:
    table = tomllib.loads(files(__package__).joinpath("matmul.toml").read_text())
    return {name: _row(**figures) for name, figures in table.items()}


def _row(fit: Mapping[str, float], **figures: float) -> Efficiency:
    return Efficiency(**figures)  # how well they fit is for the reader of the table


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

    Of a chip in matmul.toml this is `overhead + t + 2 sqrt(t * window)` with `t` the root of the summed squares of
    four times: multiplying, every dimension in whole tiles; feeding both operands to the matrix unit; taking the
    result out; main memory; each at its calibrated rate. They overlap, but not wholly: `t` lies between the slowest
    and the sum. The rest is what it costs to start, and to fill and empty the pipeline. Symmetric in left and right.

    Of any other chip (GPUs, a chip of one's own) it is the roofline, `gspmd.hardware.links.einsum_seconds`, plus
    `FALLBACK_OVERHEAD`: thin products then cost what they move, and their number, and nothing more.

    Args:
        left, contracted, right: sizes on one device.
        batch: products of these sizes, done as one.
        dtype: of the operands and of the result.
        chip: that runs it.
        accumulate: the result is added to a float32 accumulator [batch, left, right], which is read and written.
        read_bytes: of the operands, from main memory; by default both, once. Less where one stays on the chip, as
            weights may that fit there in a loop.
        accumulator_bytes: of the accumulator, from and to main memory; by default once in and once out. 0 where it
            stays on the chip: what a loop carries does that, as long as it fits beside everything else.

    Raises:
        PlanError: there is no such dtype.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> v4 = chip("tpu-v4")
        >>> whole = product_seconds(2048, 1152, 4608, chip=v4)
        >>> chunks = 32 * product_seconds(64, 1152, 4608, chip=v4)
        >>> chunks > 2 * whole
        True

    Source: cycles that the TPU compiler estimates for products compiled offline; benchmarks/thin.py regenerates them.
    Over some 280 of them per chip the model is 5 to 7% off in the median, and 15 to 25% at the 90th percentile.

    Leaves out: what runs before and after it and may hide its reads; how the compiler picks its windows, from which
    single shapes differ by a third and more; that large products read operands more than once; that a result may stay
    on the chip.
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
    """What a product moves whose operands, and result or float32 accumulator, lie in main memory, unless told."""
    batch, left, contracted, right = sizes
    result = batch * left * right
    read = batch * contracted * (left + right) * itemsize(dtype) if read_bytes is None else read_bytes
    if not accumulate:
        return Traffic(read, result * itemsize(dtype))
    return Traffic(read, 0, 2 * result * itemsize("float32") if accumulator_bytes is None else accumulator_bytes)
