"""A decode step in notation against the same written by hand in plain JAX: the compiler makes as much of both."""

import importlib.util
import sys
from importlib import util
from pathlib import Path

import jax
import pytest

import gspmd
from gspmd.audit import compile_offline, topology
from gspmd.layouts import Layout
from gspmd_models import ModelConfig
from gspmd_models.decoding import serving_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"),
]
SIZES = {"layers": 3, "embed": 2048, "feed_forward": 8192, "heads": 16, "head_size": 128}
BATCH, ROOM, VOCABULARY = 64, 256, 4096


@pytest.fixture(scope="module")
def by_hand():
    """benchmarks/decode_by_hand.py as a module."""
    path = Path(__file__).parents[3] / "benchmarks" / "decode_by_hand.py"
    spec = importlib.util.spec_from_file_location("decode_by_hand", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("int8", [False, True])
def test_notation_costs_nothing(by_hand, int8):
    slice8 = topology("tpu-v4:2x2x2")
    mesh = slice8.mesh({"x": 2, "y": 2, "z": 2})
    config = ModelConfig(
        **SIZES,
        vocabulary=VOCABULARY,
        kv_heads=1,
        block="parallel",
        activation="swiglu",
        tied=True,
        scale_embedding=False,
    )
    program = serving_program(
        config, Layout.load("weight-stationary-2d"), mesh, "decode", batch=BATCH, room=ROOM,
        weights="int8" if int8 else None,
    )  # fmt: skip
    with gspmd.lowering("blocking"):
        ours = compile_offline(program.step, *program.arguments, topology=slice8, donate_argnums=(2,))
    sizes = by_hand.Sizes(**SIZES, vocabulary=VOCABULARY, batch=BATCH, cache=ROOM, int8=int8)
    fn, args, donated = by_hand.program("decode", sizes, mesh)
    with jax.numpy_rank_promotion("allow"):  # plain JAX, as its users write it
        theirs = compile_offline(fn, *args, topology=slice8, donate_argnums=donated)
    assert ours.flops == pytest.approx(theirs.flops, rel=1e-3)
    assert ours.wire_bytes == pytest.approx(theirs.wire_bytes, rel=1e-3)
    assert ours.timeline.step_seconds < 1.05 * theirs.timeline.step_seconds
    # nothing as large as the cache of one layer is made in between
    assert ours.temporary_bytes < 2 * BATCH // 8 * ROOM * 128 * 2 * 3
