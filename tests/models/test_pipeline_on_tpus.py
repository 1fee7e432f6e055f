"""A model in a pipeline as the compiler for TPUs makes it; nothing runs."""

from importlib.util import find_spec

import pytest

import gspmd
import gspmd_models as models
from gspmd.audit import compile_offline, topology
from gspmd.layouts import Layout
from gspmd.training import OptimizerConfig
from gspmd_models import step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"),
]
SIZES = {"vocabulary": 256, "embed": 128, "heads": 2, "kv_heads": 2, "head_size": 64, "feed_forward": 256}


@pytest.mark.parametrize(
    ("name", "schedule", "rounds", "kind", "remat", "sizes"),
    [
        ("pipeline", "1f1b", 2, "explicit", "full", {"x": 2, "y": 1}),
        ("pipeline", "gpipe", 1, "auto", "none", {"x": 1, "y": 2}),
        ("data-parallel", "1f1b", 1, "explicit", "full", {"x": 2, "y": 1}),  # stages plan on no axis
    ],
)
def test_a_training_step_compiles_and_sends_what_is_planned(name, schedule, rounds, kind, remat, sizes):
    """A tick in a loop and one apart call the same programs, which the compiler does not take in one function."""
    target, layout = topology("tpu-v5p:2x2x1"), Layout.load(name).override({"pipeline.layers": "N_p"})
    mesh = target.mesh({"p": 2, **sizes, "z": 1}, kind)
    model = models.abstract(models.ModelConfig(**SIZES, layers=4, remat=remat), layout, mesh, "bfloat16")
    arguments = (
        step.abstract_state(model, OptimizerConfig(), 10, mesh), models.abstract_batch(layout, mesh, 4, 64),
        models.abstract_key(mesh),
    )  # fmt: skip
    with gspmd.lowering("blocking"):
        update = step.training_step(model, OptimizerConfig(), 10, 2, schedule, rounds)
        report = compile_offline(update, *arguments, topology=target, mesh=mesh, donate_argnums=(0,))
    comparison = report.ledger.compare(report.plan)
    planned, sent = comparison.totals["collective-permute", ("p",)]
    assert planned == sent > 0
    # What gathers a stage's loss, a few bytes, the compiler makes an all-reduce; all else is as planned.
    gone = {row.equation for row in comparison.differing if row.planned[1]}
    assert gone <= {"S_px ->", "S_pxyz ->"}, str(comparison)
    assert all(abs(sent - planned) <= 24 for planned, sent in comparison.totals.values()), str(comparison)
