"""Planned is compiled for GPUs that are not there: all presets, in training, prefill and decode, on one node and more.

All-reduces of partial sums that are only added are one (`gspmd.tracing.sums`), and collectives that XLA:GPU combines
are divided among their steps (`gspmd.audit.hlo.origin`).
"""

from dataclasses import replace
from itertools import product

import pytest

import gspmd
from gspmd.audit import topology
from gspmd.commands import compile as offline
from gspmd.layouts import presets
from gspmd.moe import MoEConfig
from gspmd.training import ShardingConfig
from tests.audit.offline.plugins import needs_cuda_plugin
from tests.references.models import TINY

pytestmark = needs_cuda_plugin

UNEXPLAINED = ("rewritten", "gone", "the compiler's choice", "not planned")
NODES = ("h100:8", "h100:4x8")
PHASES = ("train", "prefill", "decode")
DTYPES = ("float32", "bfloat16")
MESHES = {"h100:8": "p=2,x=2,y=2,z=1", "h100:4x8": "p=2,x=4,y=4,z=1"}

# Pipelines, below, have microbatches and stages.
CASES = [*product([name for name in presets() if name != "pipeline"], PHASES, NODES, DTYPES)]


def compiled(name, phase, nodes, dtype, microbatches=1, sharding=None, **changes):
    """The report of a small model's program, as `gspmd compile` makes it.

    Experts are served without slots, and how often each block of an expert's rows is run depends on the tokens. So only
    layouts that are made for experts serve any.
    """
    target, sharding = topology(nodes), sharding or {}
    experts = MoEConfig(experts=8, every=2) if phase == "train" or "expert" in name or name == "gshard" else None
    settings = offline.CompileSettings(
        topology=nodes, phase=phase, batch=2 * target.num_devices, length=32, dtype=dtype,
        microbatches=microbatches,
        model=replace(replace(TINY, layers=2, embed=64, feed_forward=128, moe=experts), **changes),
        sharding=ShardingConfig(layout=name, lowering="blocking", **sharding),
    )  # fmt: skip
    return offline.compiled(settings, target)


def hold(name, phase, nodes, dtype):
    """Hold the compiled bytes to the planned ones by kind and axes, and every step to its plan."""
    try:
        report = compiled(name, phase, nodes, dtype)
    except gspmd.LayoutError as error:
        if "4x8" not in nodes:  # the small model has a size for every layout on eight GPUs, and not on 32
            raise
        pytest.skip(f"{name} has no {phase} on {nodes}: {error}")
    assert_as_planned(report)


def assert_as_planned(report):
    comparison = report.ledger.compare(report.plan)
    assert comparison.agrees, str(comparison)
    assert {verdict: comparison[verdict] for verdict in UNEXPLAINED} == dict.fromkeys(UNEXPLAINED, ()), str(comparison)
    # Attention is in no plan, and cuBLAS gets rows and columns of bfloat16 in multiples of eight. The blocks of experts
    # that are served run as often as tokens ask for, so that the ledger counts them once.
    if not any("depend on computed values" in note for note in report.ledger.notes):
        assert report.flops >= report.plan.flops


@pytest.mark.turns(2)
@pytest.mark.parametrize(("name", "phase", "nodes", "dtype"), [case for case in CASES if case[1] != "train"])
def test_what_is_planned_is_served(name, phase, nodes, dtype):
    hold(name, phase, nodes, dtype)


@pytest.mark.turns(1)
@pytest.mark.parametrize(("name", "phase", "nodes", "dtype"), [case for case in CASES if case[1] == "train"])
def test_what_is_planned_is_trained(name, phase, nodes, dtype):
    hold(name, phase, nodes, dtype)


def test_the_table_of_an_encoder_and_a_decoder_has_one_gradient():
    """It is the sum of three, of the logits and of the look-ups of both stacks. The mask of the loss is gathered as
    booleans, and planned as the float32 that they become."""
    report = compiled("data-parallel", "train", "h100:8", "float32", encoder_layers=1, layers=1, moe=None)
    rows = report.ledger.compare(report.plan).rows
    reductions = [row for row in rows if row.kind == "all-reduce"]
    assert {row.verdict for row in reductions} == {"as planned", "shared"}
    assert all(row.planned == row.compiled for row in reductions if row.verdict == "as planned")
    assert [row.planned[0] for row in reductions if row.verdict == "shared"] == [2]
    assert [row.how for row in rows if row.kind != "all-reduce" and row.verdict != "as planned"] == ["pred on the wire"]


# Experts route tokens in groups of all sequences, so that pipelines do not run side by side along x: the loop over
# ticks adds up gradients of partial sums over x.
@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_a_pipeline_reduces_gradients_behind_its_loop(schedule, nodes):
    parts = {"schedule": schedule, "mesh": MESHES[nodes]}
    report = compiled("pipeline", "train", nodes, "float32", 2 if schedule == "gpipe" else 4, parts, layers=4)
    assert any(step.is_behind_loop for step in report.plan.entries)
    assert_as_planned(report)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_pipelines_side_by_side(schedule, nodes, dtype):
    """In bfloat16, where a tick has a forward and a backward pass, the compiler gathers the embedding once for both."""
    parts = {"schedule": schedule, "mesh": MESHES[nodes]}
    report = compiled("pipeline", "train", nodes, dtype, 4, parts, moe=None)
    if dtype == "float32" or schedule == "gpipe":
        assert_as_planned(report)
        return
    differing = report.ledger.compare(report.plan).differing
    assert {(row.kind, row.verdict) for row in differing} == {("all-gather", "shared"), ("all-gather", "rewritten")}
    assert all(row.equation.startswith("embed ") for row in differing)
    assert [row.how for row in differing if row.verdict == "rewritten"] == ["runs less often"]
