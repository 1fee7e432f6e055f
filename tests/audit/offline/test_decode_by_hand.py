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

pytestmark = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")

SMALL = {"layers": 12, "embed": 2048, "feed_forward": 8192, "heads": 16, "head_size": 128}
SMALL |= {"vocabulary": 4096, "batch": 64, "cache": 256}
STEPS = {
    "PaLM 540B, 512 rows": ("tpu-v4:4x4x4", {}),
    "bfloat16": ("tpu-v4:2x2x2", SMALL),
    "int8": ("tpu-v4:2x2x2", SMALL | {"int8": True}),
}
"""The slice, and sizes of `decode_by_hand.Sizes`, which are those of PaLM where they are not given."""


@pytest.fixture(scope="module")
def by_hand():
    """benchmarks/decode_by_hand.py as a module."""
    path = Path(__file__).parents[3] / "benchmarks" / "decode_by_hand.py"
    spec = importlib.util.spec_from_file_location("decode_by_hand", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both(by_hand, machine, sizes):
    """A decode step of these sizes in notation and by hand, each with its arguments, and their mesh."""
    mesh = machine.mesh(dict(zip("xyz", machine.shape)))
    config = ModelConfig(
        layers=sizes.layers, embed=sizes.embed, feed_forward=sizes.feed_forward, heads=sizes.heads, kv_heads=1,
        head_size=sizes.head_size, vocabulary=sizes.vocabulary, block="parallel", activation="swiglu", tied=True,
        scale_embedding=False,
    )  # fmt: skip
    program = serving_program(
        config, Layout.load("weight-stationary-2d"), mesh, "decode", batch=sizes.batch, room=sizes.cache,
        weights="int8" if sizes.int8 else None,
    )  # fmt: skip
    plain, args, donated = by_hand.program("decode", sizes, mesh)
    return mesh, (program.step, program.arguments, (program.donated,)), (plain, args, donated)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_notation_costs_nothing(by_hand, name):
    slice_, given = STEPS[name]
    machine, sizes = topology(slice_), by_hand.Sizes(**given)
    mesh, *programs = both(by_hand, machine, sizes)
    with gspmd.lowering("blocking"), jax.numpy_rank_promotion("allow"):  # plain JAX, as its users write it
        ours, theirs = (
            compile_offline(fn, *args, topology=machine, mesh=mesh, donate_argnums=donated, auto_layout_argnums=(0,))
            for fn, args, donated in programs
        )
    assert ours.flops == theirs.flops
    assert ours.wire_bytes <= theirs.wire_bytes  # of its small reduce-scatters the compiler makes all-reduces
    assert ours.timeline.step_seconds <= 1.02 * theirs.timeline.step_seconds
    rows = sizes.batch // mesh.size
    assert ours.temporary_bytes < 2 * sizes.layers * rows * sizes.cache * sizes.head_size * 2  # no copy of the cache


def test_tracing_takes_about_as_many_calls(by_hand):
    """Functions that Python calls to trace and lower a step: they go with the seconds, and are the same every time."""
    mesh, *programs = both(by_hand, topology("tpu-v4:2x2x2"), by_hand.Sizes(**SMALL))
    with jax.set_mesh(mesh), gspmd.lowering("blocking"), jax.numpy_rank_promotion("allow"):
        ours, theirs = (calls_to_trace(fn, args) for fn, args, _ in programs)
    assert ours <= 1.5 * theirs


def calls_to_trace(fn, args) -> int:
    """Calls to trace and lower a function once plans are made and JAX's caches are full."""
    called = 0

    def count(frame, event, _):
        nonlocal called
        called += event == "call"

    def lower():
        jax.jit(lambda *given: fn(*given)).lower(*args)

    lower()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        lower()
    finally:
        sys.setprofile(before)
    return called
