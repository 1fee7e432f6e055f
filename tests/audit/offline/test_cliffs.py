"""A decoding step with few rows takes no longer than one with many, and copies no stack of layers in its loop.

XLA for GPUs copies each layer's weights out of their stack before it multiplies them (docs/decoding.md), so for GPUs
the second half holds for blocks with weights of their own, which half of the drawn models have.
"""

import random
from dataclasses import replace
from importlib import util
from itertools import combinations

import pytest

import gspmd
from gspmd.audit import topology
from gspmd.commands import compile as offline
from gspmd.layouts import presets
from gspmd.training import ShardingConfig
from tests.audit.offline.plugins import HAS_CUDA_PLUGIN, needs_cuda_plugin
from tests.references.models import TINY
from tests.references.volume import SEED

# The shapes of PaLM 62B at a half of its width, and a few of its layers: a copy of all layers in each of them counts
# once for each layer, too.
MODEL = replace(
    TINY, vocabulary=32_000, embed=4096, layers=4, heads=16, kv_heads=1, head_size=256, feed_forward=16384,
    block="parallel", activation="swiglu",
)  # fmt: skip
SLICES = ("tpu-v4:2x2x4", "tpu-v5e:4x4", "tpu-v6e:4x4", "h100:2x8")
ROWS = (1, 8, 64, 256, 1024)
SERVING = [name for name in presets() if name != "pipeline"]


def need_compiler(slices):
    if "h100" in slices and not HAS_CUDA_PLUGIN:
        pytest.skip("JAX's plugin for CUDA, the compiler for GPUs, is not installed")
    if "tpu" in slices and util.find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU compiler, is not installed")


def seconds(slices, layout, weights, rows, model=MODEL):
    """The seconds of a step, or None if this layout has no such step there."""
    settings = offline.CompileSettings(
        topology=slices, phase="decode", batch=rows, length=2048, dtype="bfloat16", weights=weights, model=model,
        sharding=ShardingConfig(layout=layout),
    )  # fmt: skip
    try:
        report = offline.compiled(settings, topology(slices))
    except gspmd.LayoutError:  # its axes do not divide so few rows
        return None
    assert report.timeline is not None, report.reason
    assert report.timeline.warnings == () or ("h100" in slices and model.stacked)
    return report.timeline.step_seconds


@needs_cuda_plugin
def test_on_a_gpu_layers_of_their_own_are_not_copied():
    """Without stacks neither weights nor keys are copied, and a loop writes no keys row by row."""
    target, reports = topology("h200:1"), {}
    model = replace(TINY, vocabulary=4096, embed=2048, layers=3, heads=16, kv_heads=8, head_size=128, feed_forward=4096)
    for stacked in (True, False):
        settings = offline.CompileSettings(
            topology="h200:1", phase="decode", batch=64, length=2048, dtype="bfloat16",
            model=replace(model, stacked=stacked), sharding=ShardingConfig(layout="weight-stationary-1d"),
        )  # fmt: skip
        reports[stacked] = offline.compiled(settings, target)
    seconds = {stacked: report.timeline.step_seconds for stacked, report in reports.items()}
    assert "out of a stack" in reports[True].timeline.warnings[0]
    assert not reports[False].timeline.warnings
    assert " while(" not in reports[False].hlo
    assert seconds[False] < 0.5 * seconds[True]


@pytest.mark.slow
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("weights", ["int8", "dtype"])
@pytest.mark.parametrize("layout", SERVING)
def test_fewer_rows_take_no_longer(layout, weights, slices):
    need_compiler(slices)
    check([(rows, seconds(slices, layout, weights, rows)) for rows in ROWS])


@pytest.mark.slow
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("number", range(2))
def test_fewer_rows_of_a_drawn_model_take_no_longer(number, slices):
    """Models with other blocks and heads, with one row, 1,024 rows, and two numbers between them."""
    need_compiler(slices)
    draw = random.Random(f"{SEED} {slices} {number}")
    model = replace(
        MODEL, layers=2, kv_heads=draw.choice((1, 4, 16)), block=draw.choice(("serial", "parallel")),
        activation=draw.choice(("swiglu", "gelu")), tied=draw.random() < 0.5, stacked=number == 0,
    )  # fmt: skip
    layout, weights = draw.choice(SERVING), draw.choice(("int8", "dtype"))
    counts = (1, *sorted(draw.sample((2, 4, 16, 32, 128, 512), 2)), 1024)
    check([(rows, seconds(slices, layout, weights, rows, model)) for rows in counts], f"{layout}, {weights}, {model}")


def check(steps, of=""):
    taken = [(rows, each) for rows, each in steps if each is not None]
    assert taken, of
    for (fewer, less), (more, longer) in combinations(taken, 2):
        assert less < 1.2 * longer, f"{fewer} rows take {less:.2e} s, and {more} take {longer:.2e} s {of}"
