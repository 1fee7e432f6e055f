"""The time of a local matrix product, including the lower efficiency of thin products.

Only large products come close to a chip's peak. A product that is cut into chunks has a start-up time for each chunk,
and for each chunk it reads the whole operand that is not cut. If the contracted dimension is cut, it also reads and
writes the accumulator for each chunk. The constants are fitted: for TPU v5e and v6e to kernels that others timed on the
chip (benchmarks/tpu.py), for TPU v4 to the cycles that the TPU compiler estimates (benchmarks/thin.py), and for GPUs to
products of cuBLAS that were timed on a GPU (benchmarks/gpu.py). TPU v5p has the constants of the v5e.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import prod, sqrt
from types import MappingProxyType

from gspmd.hardware.chips import Chip
from gspmd.hardware.dtypes import itemsize
from gspmd.hardware.links import einsum_seconds

#: Seconds added to the roofline of a product if matmul.toml has no row for the chip: assumed, not measured.
FALLBACK_OVERHEAD = 2e-6


@dataclass(frozen=True)
class Traffic:
    """The bytes that a product moves through main memory.

    Attributes:
        read: bytes of operands that are read.
        written: bytes of the result that are written.
        accumulated: bytes of the accumulator that are read and written.
    """

    read: float
    written: float
    accumulated: float = 0

    @property
    def bytes(self) -> float:
        """Total number of bytes."""
        return self.read + self.written + self.accumulated


@dataclass(frozen=True)
class Efficiency:
    """The fitted constants of one chip; matmul.toml explains each constant."""

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
    power: float = 2.0
    timed: bool = False
    excess_seconds: float = 0.0
    least_seconds: float = 0.0
    least_share: float = 0.0
    most_share: float = 1.0

    def memory_seconds(self, moved: Traffic, chip: Chip) -> float:
        """Return the seconds in which main memory reads and writes the given bytes, at the rates that kernels reach."""
        streamed = (moved.read + moved.accumulated) / self.read_efficiency
        return (streamed + moved.written / self.write_efficiency) / chip.hbm_bandwidth

    def together(self, *parts: float) -> float:
        """Return the seconds of parts of a kernel that overlap for most of the time."""
        longest = max(parts)
        return longest * sum((part / longest) ** self.power for part in parts) ** (1 / self.power) if longest else 0.0

    def seconds(
        self, sizes: tuple[int, int, int, int], moved: Traffic, arithmetic: str, chip: Chip, accumulate: bool
    ) -> float:
        """Return the predicted seconds of one product [batch, left, contracted] x [batch, contracted, right].

        `product_seconds` explains the formula.
        """
        batch, left, contracted, right = sizes
        flops = 2 * batch * self._padded(left, right) * _round_up(contracted, self.depth)
        matrix = flops / (chip.flops(arithmetic) * self.matrix_efficiency)
        load = batch * contracted * (left + right) / self.load_rate
        drain = batch * left * right / (self.accumulate_rate if accumulate else self.drain_rate)
        together = self.together(matrix, load, drain, self.memory_seconds(moved, chip))
        # The compiler pipelines a product over n windows. The first read and the last write overlap with nothing, and
        # take `together` / n; the start of each window takes additional time. The best n makes the sum, together / n +
        # n * start, equal to 2 sqrt(together * start).
        alone = self.overhead_seconds + (self.latency_seconds if moved.read else 0)
        return alone + together + 2 * sqrt(together * self.window_seconds)

    def _padded(self, left: int, right: int) -> int:
        """Return the number of elements of the result after it is padded to whole tiles.

        Tiles can lie in two orientations; the orientation that needs fewer elements is used.
        """
        rows, lanes = self.rows, self.lanes
        return min(_round_up(left, rows) * _round_up(right, lanes), _round_up(left, lanes) * _round_up(right, rows))


def _round_up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _load() -> dict[str, Efficiency]:
    table = tomllib.loads(files(__package__).joinpath("matmul.toml").read_text())
    for row in table.values():
        row.pop("fit")  # for readers of the table: the data of the fit, and its errors
    return {name: Efficiency(**row) for name, row in table.items()}


EFFICIENCIES: Mapping[str, Efficiency] = MappingProxyType(_load())


def timed_kernels(chip: Chip) -> Efficiency | None:
    """Return the constants of a TPU whose timelines use timed kernels, of its own or assumed; None for other chips."""
    row = EFFICIENCIES.get(chip.name)
    return row if row and row.timed else None


@lru_cache(maxsize=65536)
def product_seconds(
    left: int,
    contracted: int,
    right: int,
    *,
    batch: int = 1,
    dtype: str = "bfloat16",
    chip: Chip,
    precision: str = "default",
    accumulate: bool = False,
    read_bytes: float | None = None,
    accumulator_bytes: float | None = None,
) -> float:
    """Return the predicted seconds of a local product [batch, left, contracted] x [batch, contracted, right].

    On a chip in matmul.toml:

        overhead + t + 2 sqrt(t * window),  t = (matrix^p + load^p + drain^p + memory^p)^(1/p)

    The terms of t are seconds at fitted rates: `matrix` to multiply, with every dimension padded to whole tiles; `load`
    to feed both operands to the matrix unit; `drain` to take the result out; `memory` to read and write main memory.
    These times overlap in part, so t lies between the longest time and the sum of all four; p is 2, except where timed
    products show that they overlap more. `overhead` is the time to start the product, which is longer if the product
    reads main memory. The last term is the time to fill and drain the product's pipeline. The formula is symmetric in
    left and right.

    On any other chip, the prediction is the roofline, `gspmd.hardware.links.einsum_seconds`, plus `FALLBACK_OVERHEAD`.

    Args:
        left, contracted, right: sizes on one device.
        batch: product of the sizes of all batch dimensions.
        dtype: the dtype of operands and result.
        chip: the hardware.
        precision: the precision of a product of float32, which `Chip.arithmetic` explains.
        accumulate: whether the result is added to a float32 accumulator [batch, left, right], which is read and
            written.
        read_bytes: bytes of operands that are read from main memory. By default each operand is read once. Give fewer
            bytes if an operand stays in on-chip memory, as small weights may in a loop.
        accumulator_bytes: bytes of the accumulator that are read from and written to main memory. By default the
            accumulator is read and written once. Give 0 if it stays in on-chip memory, as the carry of a loop does if
            there is room.

    Raises:
        PlanError: `dtype` is unknown.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> v4 = chip("tpu-v4")
        >>> whole = product_seconds(2048, 1152, 4608, chip=v4)
        >>> chunks = 32 * product_seconds(64, 1152, 4608, chip=v4)
        >>> chunks > 2 * whole
        True

    Source: for TPU v5e and v6e, kernels that others timed (benchmarks/tpu.py fits them). The median error of kernels
    left out of the fit is 2 and 3%, and the 90th percentile 7 and 9%. For TPU v4, cycles that the compiler estimates
    for products compiled offline (benchmarks/thin.py computes them again). For 279 products the median error is 6%, and
    the 90th percentile 15%. For GPUs, 51 products timed on an H200 (benchmarks/gpu.py fits them), with a median error
    of 5% and a 90th percentile of 12%. matmul.toml states the assumptions for the TPU v5p and for other GPUs.

    Leaves out: overlap with instructions before and after; the compiler's choice of windows, which changes the seconds
    of some shapes by a third or more; repeated reads of operands in large products; results that stay on the chip.
    """
    sizes = (batch, left, contracted, right)
    moved = traffic(sizes, dtype, accumulate, read_bytes, accumulator_bytes)
    return seconds_with_traffic(sizes, moved, chip.arithmetic(dtype, precision), chip, accumulate)


def seconds_with_traffic(
    sizes: tuple[int, int, int, int], moved: Traffic, arithmetic: str, chip: Chip, accumulate: bool = False
) -> float:
    """Return the predicted seconds of a product with sizes (batch, left, contracted, right), given its traffic `moved`.

    `arithmetic` is a dtype or a result of `Chip.arithmetic`. `product_seconds` explains the prediction.
    """
    if row := EFFICIENCIES.get(chip.name):
        return row.seconds(sizes, moved, arithmetic, chip, accumulate)
    return einsum_seconds(2 * prod(sizes), moved.bytes, arithmetic, chip) + FALLBACK_OVERHEAD


def kernel_seconds(flops: float, moved: float, chip: Chip) -> float:
    """Return the predicted seconds of a GPU kernel with little computation.

    This is the time of the kernel's bytes or of its FLOPs, whichever is longer, plus the time to start the kernel.

    Args:
        flops: FLOPs of the kernel, done at the chip's peak rate.
        moved: bytes that the kernel reads from and writes to main memory.
        chip: the GPU.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> f"{1e6 * kernel_seconds(0, 2 * 2**28, chip('h200')):.0f} µs"  # as measured (docs/gpus.md)
        '146 µs'
    """
    return max(flops / chip.bf16_flops, moved / chip.stream_bandwidth) + chip.kernel_seconds


def local_einsum_seconds(
    sizes: Mapping[str, int],
    operands: Sequence[tuple[Sequence[str], int]],
    dtype: str,
    chip: Chip,
    precision: str = "default",
) -> float:
    """Return the predicted seconds of a local einsum.

    A product is predicted by the fit for products, and any other kernel by its bytes and FLOPs.

    Args:
        sizes: the size of each dimension on one device.
        operands: a pair (dimensions, bytes per element) for each of the one or two operands and, last, for the result.
        dtype: the dtype that decides the speed of the product.
        chip: the hardware. For a chip without a row in matmul.toml, the time of a product is the roofline plus
            `FALLBACK_OVERHEAD`.
        precision: the precision of a product of float32, which `Chip.arithmetic` explains.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> arrays = [("BE", 2), ("EF", 2), ("BF", 2)]
        >>> for size in (8, 8192):
        ...     sizes = {"B": size, "E": 8192, "F": 8192}
        ...     seconds = [local_einsum_seconds(sizes, arrays, "bfloat16", chip(name)) for name in ("h200", "tpu-v5e")]
        ...     print(", ".join(f"{1e6 * each:.0f} µs" for each in seconds))
        35 µs, 178 µs
        1510 µs, 5947 µs
    """
    *given, made = (set(dims) for dims, _ in operands)
    *read, written = (width * prod(sizes[dim] for dim in dims) for dims, width in operands)
    summed = set().union(*given) - made
    flops = prod(sizes.values()) * (2 if summed else 1) if len(given) == 2 else 0
    if len(given) == 1 or not summed:
        if chip.is_switch:
            return kernel_seconds(flops, sum(read) + written, chip)
        return einsum_seconds(flops, sum(read) + written, dtype, chip)
    parts = given[0] & given[1] & made, (given[0] - given[1]) & made, summed, (given[1] - given[0]) & made
    batch, left, contracted, right = (prod(sizes[dim] for dim in part) for part in parts)
    arithmetic = chip.arithmetic(dtype, precision)
    return seconds_with_traffic((batch, left, contracted, right), Traffic(sum(read), written), arithmetic, chip)


def traffic(
    sizes: tuple[int, int, int, int],
    dtype: str,
    accumulate: bool = False,
    read_bytes: float | None = None,
    accumulator_bytes: float | None = None,
) -> Traffic:
    """Return the bytes that a product moves through main memory.

    By default, the operands and the result are in main memory; if `accumulate` is True, the accumulator is in main
    memory instead of the result. `product_seconds` explains the arguments.
    """
    batch, left, contracted, right = sizes
    result = batch * left * right
    read = batch * contracted * (left + right) * itemsize(dtype) if read_bytes is None else read_bytes
    if not accumulate:
        return Traffic(read, result * itemsize(dtype))
    return Traffic(read, 0, 2 * result * itemsize("float32") if accumulator_bytes is None else accumulator_bytes)
