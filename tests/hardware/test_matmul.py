"""Thin products: what the calibrated model says of them, and that its constants are there."""

import dataclasses
import json
import math
import statistics
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path

import pytest

from gspmd.hardware.chips import CHIPS, chip
from gspmd.hardware.links import einsum_seconds
from gspmd.hardware.matmul import (
    EFFICIENCIES,
    FALLBACK_OVERHEAD,
    kernel_seconds,
    local_einsum_seconds,
    product_seconds,
)

TPUS = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e")
GPUS = ("a100", "a100-40gb", "h100", "h200", "b200", "gb200")
MEASURED = (*TPUS, *GPUS)
CARD = Path(__file__).parents[2] / "benchmarks" / "results" / "device-h200.json"
KERNELS = {f"tpu-{name}": json.loads((CARD.parent / f"kernels-{name}.json").read_text()) for name in ("v5e", "v6e")}
OF_THE_TIMELINE = ("timed", "excess_seconds", "least_seconds", "least_share", "most_share")
SHAPES = [(64, 1152, 4608), (512, 4608, 1152), (2048, 18432, 256), (8, 128, 128)]


@pytest.mark.parametrize("name", MEASURED)
def test_every_measured_chip_has_its_constants(name):
    row = EFFICIENCIES[name]
    # GPUs and chips whose kernels have been timed are explained without some of the terms.
    constants = {figure: value for figure, value in dataclasses.asdict(row).items() if figure not in OF_THE_TIMELINE}
    assert all(value > 0 for value in constants.values() if value or (name in TPUS and not row.timed))
    assert row.matrix_efficiency <= 1
    assert row.read_efficiency <= 1
    assert row.write_efficiency <= 1
    assert row.overhead_seconds < 1e-5


def test_no_constants_without_a_chip():
    assert set(EFFICIENCIES) <= set(CHIPS)


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("chunks", [2, 8, 32])
def test_thin_chunks_cost_more_than_the_whole(name, chunks):
    for left, contracted, right in [(2048, 1152, 4608), (4096, 4608, 4608)]:
        whole = product_seconds(left, contracted, right, chip=chip(name))
        thin = product_seconds(left // chunks, contracted, right, chip=chip(name))
        assert chunks * thin > whole
        deep = product_seconds(left, contracted // chunks, right, chip=chip(name), accumulate=True)
        assert chunks * deep > whole


def test_thirty_two_chunks_of_64_rows_on_tpu_v4():
    """Against one product of 2048 rows, as compiled (benchmarks/thin.py's forms, one shape at a time).

    Weights of 1152 x 4608: 2.0 to 2.6 times the cycles where they stay on the chip, 5.5 to 6.5 times where every chunk
    reads them from main memory. The former is 3.1 for 1152 x 1152, 1.6 for 4608 x 4608 and 1.5 for 18432 x 1152.
    """
    v4, rest = chip("tpu-v4"), (1152, 4608)
    whole = product_seconds(2048, *rest, chip=v4)
    resident = 32 * product_seconds(64, *rest, chip=v4, read_bytes=2 * 64 * 1152)
    read_again = 32 * product_seconds(64, *rest, chip=v4)
    assert 1.9 < resident / whole < 2.7
    assert 4.5 < read_again / whole < 6.5
    for weights, measured in [((1152, 1152), 3.1), ((4608, 4608), 1.6), ((18432, 1152), 1.5)]:
        one = product_seconds(2048, *weights, chip=v4, read_bytes=0)
        ratio = 32 * product_seconds(64, *weights, chip=v4, read_bytes=0) / one
        assert ratio == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_monotone_in_every_size(name, accumulate):
    for shape, place in product(SHAPES, range(3)):
        grown = [[n * (1 + step / 3 if at == place else 1) for at, n in enumerate(shape)] for step in range(12)]
        seconds = [product_seconds(*map(int, s), chip=chip(name), accumulate=accumulate) for s in grown]
        assert all(less <= more for less, more in pairwise(seconds))
        assert seconds[-1] > seconds[0]
        batched = [product_seconds(*shape, batch=n, chip=chip(name), accumulate=accumulate) for n in (1, 2, 7)]
        assert batched == sorted(batched)


@pytest.mark.parametrize("name", CHIPS)
def test_left_and_right_are_alike(name):
    for left, contracted, right in SHAPES:
        there, back = (
            product_seconds(*s, chip=chip(name)) for s in ((left, contracted, right), (right, contracted, left))
        )
        assert there == pytest.approx(back)


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_accumulating_costs_more(name, shape):
    assert product_seconds(*shape, chip=chip(name), accumulate=True) >= product_seconds(*shape, chip=chip(name))
    more_of_it = [product_seconds(2048, 64, 4608, chip=chip(name), accumulate=add) for add in (False, True)]
    assert more_of_it[1] > more_of_it[0]


@pytest.mark.parametrize("name", TPUS)
def test_large_products_come_near_the_peak(name):
    flops = 2 * 8192**3
    seconds = product_seconds(8192, 8192, 8192, chip=chip(name))
    assert 1 < seconds / einsum_seconds(flops, 0, "bfloat16", chip(name)) < 1.3


@pytest.mark.parametrize("name", ["a100", "h100", "h200"])
def test_a_planned_float32_product_is_in_tf32_on_gpus(name):
    size, gpu = 8192, chip(name)
    arrays = [("BE", 4), ("EF", 4), ("BF", 4)]
    planned = local_einsum_seconds(dict.fromkeys("BEF", size), arrays, "float32", gpu)
    # JAX's default precision: slower than the data sheet's peak in TF32, much faster than float32 without it.
    assert 2 * size**3 / gpu.tf32_flops < planned < 0.5 * 2 * size**3 / gpu.float32_flops


@pytest.mark.parametrize("name", TPUS)
def test_a_planned_float32_product_is_in_passes_of_bfloat16_on_tpus(name):
    size, tpu, times = 8192, chip(name), {}
    one_pass = 2 * size**3 / (tpu.bf16_flops * EFFICIENCIES[name].matrix_efficiency)
    for width, dtype in ((2, "bfloat16"), (4, "float32")):
        arrays = [(dims, width) for dims in ("BE", "EF", "BF")]
        for precision in ("default", "high", "highest"):
            planned = local_einsum_seconds(dict.fromkeys("BEF", size), arrays, dtype, tpu, precision)
            times[dtype, precision] = planned / one_pass
    assert len({times["bfloat16", precision] for precision in ("default", "high", "highest")}) == 1
    # One pass, which still reads and writes four bytes per number; then three, then six.
    assert 1 < times["bfloat16", "default"] < times["float32", "default"] < 1.7
    assert 3 < times["float32", "high"] < 3.5
    assert 6 < times["float32", "highest"] < 6.5


def test_float32_on_amd_is_at_full_precision():
    mi300x, arrays = chip("mi300x"), [("BE", 4), ("EF", 4), ("BF", 4)]
    planned = local_einsum_seconds(dict.fromkeys("BEF", 8192), arrays, "float32", mi300x)
    assert planned > 2 * 8192**3 / mi300x.float32_flops


def test_float32_takes_longer():
    slow, middle, fast = (
        product_seconds(2048, 2048, 2048, dtype=dtype, precision=precision, chip=chip("tpu-v4"))
        for dtype, precision in (("float32", "highest"), ("float32", "default"), ("bfloat16", "highest"))
    )
    assert slow > 3 * middle
    assert middle > fast


def test_a_chip_without_constants_has_its_roofline():
    own = dataclasses.replace(chip("tpu-v4"), name="my-chip")
    for one in (chip("mi300x"), own):
        moved = 3 * (64 * 128 + 128 * 256 + 64 * 256) * 2
        expected = einsum_seconds(3 * 2 * 64 * 128 * 256, moved, "bfloat16", one) + FALLBACK_OVERHEAD
        assert product_seconds(64, 128, 256, batch=3, chip=one) == pytest.approx(expected)
    moved = (64 * 128 + 128 * 256) * 2 + 2 * 4 * 64 * 256
    expected = einsum_seconds(2 * 64 * 128 * 256, moved, "bfloat16", own) + FALLBACK_OVERHEAD
    assert product_seconds(64, 128, 256, chip=own, accumulate=True) == pytest.approx(expected)


def test_products_timed_on_a_card():
    """The median error of the products is within 6%, and nine of ten are within 14% (benchmarks/gpu.py)."""
    rows = [row for row in json.loads(CARD.read_text())["rows"] if row["part"] == "products" and row["us"] > 8]
    off = []
    for row in rows:
        seconds = product_seconds(row["m"], row["k"], row["n"], batch=row["groups"], chip=chip("h200"))
        off.append(abs(math.log(seconds / row["us"] * 1e6)))
    assert len(off) == 49
    assert statistics.median(off) < 0.06
    assert statistics.quantiles(off, n=10)[-1] < 0.14


@pytest.mark.parametrize(
    ("name", "part", "count", "half", "most"),
    [
        ("tpu-v5e", "fit", 52, 0.04, 0.11),
        ("tpu-v5e", "check", 37, 0.03, 0.1),
        ("tpu-v6e", "fit", 52, 0.06, 0.2),
        ("tpu-v6e", "check", 37, 0.04, 0.1),
    ],
)
def test_products_timed_on_a_tpu(name, part, count, half, most):
    """The median error of the products, also of those left out of the fit, and of nine in ten (benchmarks/tpu.py)."""
    off, results = [], KERNELS[name]
    idle = results["microseconds of an iteration that moves nothing"]
    for kernel, taken in results[part].items():
        what, *numbers = kernel.split("_")
        if what in ("gemm", "bmm"):
            *batch, rows, columns, depth = map(int, numbers)
            seconds = product_seconds(rows, depth, columns, batch=math.prod(batch), chip=chip(name))
            off.append(abs(math.log((seconds * 1e6 + idle) / taken)))
    assert len(off) == count
    assert statistics.median(off) < half
    assert statistics.quantiles(off, n=10)[-1] < most


@pytest.mark.parametrize("name", KERNELS)
def test_the_constants_of_timed_tpus_are_those_of_the_fit(name, benchmarks):
    tpu, row = import_module("tpu"), EFFICIENCIES[name]
    idle = KERNELS[name]["microseconds of an iteration that moves nothing"] * 1e-6
    fitted = tpu.fit(KERNELS[name]["fit"], idle, chip(name))
    for figure in ("overhead_seconds", "matrix_efficiency", "read_efficiency", "write_efficiency", "power"):
        assert getattr(row, figure) == pytest.approx(getattr(fitted, figure), rel=0.005)
    assert chip(name).stream_efficiency == pytest.approx(
        tpu.stream_efficiency(KERNELS[name]["fit"], idle, chip(name)), rel=1e-3
    )


@pytest.mark.parametrize("name", KERNELS)
def test_passes_over_memory_timed_on_a_tpu(name):
    """Kernels that read and write large arrays, priced as plans price them."""
    for kernel, taken in KERNELS[name]["fit"].items():
        what, amount = kernel.partition("_")[::2]
        if what in ("add", "scale", "silu", "copy") and not amount.endswith(("4096KiB", "16384KiB")):
            size = int(amount[:-3]) * (2**10 if amount.endswith("KiB") else 2**20)
            moved = size * (3 if what == "add" else 2)
            assert moved / chip(name).stream_bandwidth * 1e6 == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize("name", GPUS)
def test_a_product_is_never_faster_than_peak_and_memory(name):
    for left, contracted, right in [*SHAPES, (8192, 8192, 8192), (1, 8192, 8192)]:
        moved = 2 * (left * contracted + contracted * right + left * right)
        least = einsum_seconds(2 * left * contracted * right, moved, "bfloat16", chip(name))
        assert product_seconds(left, contracted, right, chip=chip(name)) > least


def arrays(*dims):
    return [(each, 2) for each in dims]


@pytest.mark.parametrize("name", CHIPS)
def test_a_local_einsum_is_a_product_or_a_pass(name):
    row, sizes = chip(name), {"B": 4, "L": 512, "E": 1024, "F": 2048}
    seconds = local_einsum_seconds(sizes, arrays("BLE", "EF", "BLF"), "bfloat16", row)
    scaled = local_einsum_seconds({"B": 4, "E": 1024}, arrays("BE", "E", "BE"), "bfloat16", row)
    summed = local_einsum_seconds({"B": 4, "E": 1024}, arrays("BE", "B"), "bfloat16", row)
    assert seconds == product_seconds(2048, 1024, 2048, chip=row)
    if row.is_switch:
        assert scaled == kernel_seconds(4096, 2 * (4096 + 1024 + 4096), row)
        assert summed == kernel_seconds(0, 2 * (4096 + 4), row)
    else:  # The roofline.
        assert scaled == einsum_seconds(4096, 2 * (4096 + 1024 + 4096), "bfloat16", row)
        assert summed == einsum_seconds(0, 2 * (4096 + 4), "bfloat16", row)


@pytest.mark.parametrize("batched", ["B", "BL"])
def test_the_dimensions_of_a_product_on_a_gpu(batched):
    row, sizes = chip("h100"), {"B": 4, "L": 64, "E": 1024, "F": 2048}
    found = local_einsum_seconds(sizes, arrays("BLE", f"{batched}EF", "BLF"), "bfloat16", row)
    batch, rows = (4, 64) if batched == "B" else (256, 1)
    assert found == pytest.approx(product_seconds(rows, 1024, 2048, batch=batch, chip=row))


def test_kernels_timed_on_a_card():
    """Passes over arrays that no cache holds, and trips of a loop of two launches, as benchmarks/gpu.py reads them."""
    rows = [row for row in json.loads(CARD.read_text())["rows"] if row["what"].startswith("x * a + b")]
    h200 = chip("h200")
    for row in rows:
        if row["bytes"] >= 2**27:
            assert kernel_seconds(0, row["bytes"], h200) * 1e6 == pytest.approx(row["us"], rel=0.07)
        elif row["bytes"] < 2**24:
            assert 2 * h200.launch_seconds * 1e6 == pytest.approx(row["us"], rel=0.1)
    assert len(rows) == 11
