"""Planned is compiled for training steps with chunks, rows, shared experts and expert dropout."""

from dataclasses import replace

import pytest

from gspmd.moe import MoEConfig
from tests.audit import steps
from tests.audit.test_presets import UNEXPLAINED

SLOTS = MoEConfig(experts=8, router="top-k", shared=2, dropout=0.1)
ROWS = MoEConfig(experts=8, router="gshard", dispatch="dropless", shared=1, dropout=0.1)
CASES = [
    ("switch-expert-model", {"x": 2, "y": 2, "z": 2}, "blocking"),
    ("switch-expert-model", {"x": 2, "y": 2, "z": 2}, "looped"),
    ("gshard", {"x": 4, "y": 2, "z": 1}, "looped"),
]


@pytest.mark.slow
@pytest.mark.parametrize("moe", [SLOTS, ROWS], ids=["slots", "rows"])
@pytest.mark.parametrize(("name", "mesh", "lowering"), CASES)
def test_what_is_planned_is_compiled(name, mesh, lowering, moe):
    step = steps.training(name, replace(steps.SMALL, moe=moe), mesh=mesh, lowering=lowering)
    comparison = step.ledger.compare(step.plan)
    assert comparison.agrees
    assert {verdict: comparison[verdict] for verdict in UNEXPLAINED} == dict.fromkeys(UNEXPLAINED, ())
    # The loops of grouped products end when the rows do; nothing is sent in them.
    assert all(" depend on computed values" in note for note in step.ledger.notes)
    assert not step.plan.notes
