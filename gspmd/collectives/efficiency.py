"""What a local product of matrices costs on a chip, the loss in thin ones included.

A peak is reached by large products only. Cut into chunks, a product starts anew for each of them, the other operand
is read once per chunk, and a chunk of the contracted dimension reads and writes the sum so far. The constants behind
these figures are fitted to what the TPU compiler estimates (efficiency.toml, benchmarks/thin.py).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType

from gspmd.collectives.chips import Chip
from gspmd.collectives.cost import einsum_seconds, itemsize

#: Seconds by which a product on a chip without a row in efficiency.toml exceeds its roofline: assumed, not measured.
FALLBACK_OVERHEAD = 2e-6


@dataclass(frozen=True)
class Efficiency:
    """A row of efficiency.toml, which says what each figure means."""

    overhead_seconds: float
    matrix_efficiency: float
    memory_efficiency: float
    load_rate: float
    drain_rate: float
    overlap: float
    rows: int
    lanes: int
    depth: int

    def seconds(self, sizes: tuple[int, int, int, int], moved: float, dtype: str, chip: Chip) -> float:
        """Seconds of `batch` products [left, contracted] x [contracted, right] that move so many bytes in all."""
        batch, left, contracted, right = sizes
        flops = 2 * batch * self._padded(left, right) * _up(contracted, self.depth)
        matrix = flops / (chip.flops(dtype) * self.matrix_efficiency)
        load = batch * contracted * (left + right) / self.load_rate
        drain = batch * left * right / self.drain_rate
        memory = moved / (chip.hbm_bandwidth * self.memory_efficiency)
        together = sum(each**self.overlap for each in (matrix + load, drain, memory)) ** (1 / self.overlap)
        return self.overhead_seconds + together

    def _padded(self, left: int, right: int) -> int:
        """Elements of the result in whole tiles; the compiler lays either of its dimensions along the lanes."""
        rows, lanes = self.rows, self.lanes
        return min(_up(left, rows) * _up(right, lanes), _up(left, lanes) * _up(right, rows))


def _up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _load() -> dict[str, Efficiency]:
    table = tomllib.loads(files(__package__).joinpath("efficiency.toml").read_text())
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
    memory_bytes: float | None = None,
) -> float:
    """Seconds of one local product [batch, left, contracted] x [batch, contracted, right] on a chip.

    Of a chip in efficiency.toml this is `overhead + ((flops / peak + load)^p + drain^p + memory^p)^(1/p)`: the matrix
    unit with every dimension in whole tiles and with the time to load both operands, the time to take the result out,
    and the time of main memory, each at its calibrated rate. Symmetric in left and right.

    Of any other chip (GPUs, a chip of one's own) it is the roofline, `gspmd.collectives.cost.einsum_seconds`, plus
    `FALLBACK_OVERHEAD`: thin products then cost what they move, and their number, and nothing more.

    Args:
        left, contracted, right: sizes on one device.
        batch: products of these sizes, done as one.
        dtype: of the operands and of the result.
        chip: that runs it.
        accumulate: the result is added to a float32 accumulator [batch, left, right], which is read and written.
        memory_bytes: what is moved between main memory and the chip; by default both operands, and the result or the
            accumulator twice. Less where something stays on the chip, as weights do that fit there in a loop.

    Example:
        >>> from gspmd.collectives.chips import chip
        >>> v4 = chip("tpu-v4")
        >>> whole = product_seconds(2048, 1152, 4608, chip=v4)
        >>> chunks = 32 * product_seconds(64, 1152, 4608, chip=v4)
        >>> chunks > 2 * whole
        True

    Source: cycles that the TPU compiler estimates for products compiled offline; benchmarks/thin.py regenerates them.
    Leaves out: what runs before and after it and may hide its reads; how the compiler picks its windows, from which
    single shapes differ by a third and more; that an array may lie on the chip, unless `memory_bytes` says so.
    """
    sizes = (batch, left, contracted, right)
    moved = operand_bytes(*sizes, dtype, accumulate) if memory_bytes is None else memory_bytes
    if row := EFFICIENCIES.get(chip.name):
        return row.seconds(sizes, moved, dtype, chip)
    flops = 2 * batch * left * contracted * right
    return einsum_seconds(flops, moved, dtype, chip) + FALLBACK_OVERHEAD


def operand_bytes(batch: int, left: int, contracted: int, right: int, dtype: str, accumulate: bool) -> int:
    """Bytes of both operands and of the result; with an accumulator, of that in float32, once in and once out."""
    result = left * right * (2 * itemsize("float32") if accumulate else itemsize(dtype))
    return batch * (contracted * (left + right) * itemsize(dtype) + result)
