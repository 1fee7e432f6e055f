"""A decoding step with few rows takes no longer than one with many, and copies no stack of layers in its loop."""

from dataclasses import replace
from importlib import util
from itertools import combinations

import pytest

import gspmd
from gspmd.audit import topology
from gspmd.commands import compile as offline
from gspmd.layouts import presets
from gspmd.training import ShardingConfig
from tests.audit.offline.plugins import HAS_CUDA_PLUGIN
from tests.references.models import TINY

# The shapes of PaLM 62B at a half of its width, and a few of its layers: a copy of all layers in each of them counts
# once for each layer, too.
MODEL = replace(
    TINY, vocabulary=32_000, embed=4096, layers=4, heads=16, kv_heads=1, head_size=256, feed_forward=16384,
    block="parallel", activation="swiglu",
)  # fmt: skip
SLICES = ("tpu-v4:2x2x4", "tpu-v5e:4x4", "tpu-v6e:4x4", "h100:2x8")
ROWS = (1, 8, 64, 256)
SERVING = [name for name in presets() if name != "pipeline"]


def seconds(slices, layout, weights, rows):
    """The seconds of a step, or None if this layout has no such step there."""
    settings = offline.CompileSettings(
        topology=slices, phase="decode", batch=rows, length=2048, dtype="bfloat16", weights=weights, model=MODEL,
        sharding=ShardingConfig(layout=layout),
    )  # fmt: skip
    try:
        report = offline.compiled(settings, topology(slices))
    except gspmd.LayoutError:  # its axes do not divide so few rows
        return None
    assert report.timeline is not None, report.reason
    assert report.timeline.warnings == ()
    return report.timeline.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("weights", ["int8", "dtype"])
@pytest.mark.parametrize("layout", SERVING)
def test_fewer_rows_take_no_longer(layout, weights, slices):
    if "h100" in slices and not HAS_CUDA_PLUGIN:
        pytest.skip("JAX's plugin for CUDA, the compiler for GPUs, is not installed")
    if "tpu" in slices and util.find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU compiler, is not installed")
    steps = [(rows, seconds(slices, layout, weights, rows)) for rows in ROWS]
    taken = [(rows, each) for rows, each in steps if each is not None]
    assert taken
    for (fewer, less), (more, longer) in combinations(taken, 2):
        assert less < 1.2 * longer, f"{fewer} rows take {less:.2e} s, and {more} take {longer:.2e} s"
