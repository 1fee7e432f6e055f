"""What is planned is what is compiled where gathers and reduce-scatters run inside the einsums, by every schedule."""

from itertools import product

import pytest

from gspmd.layouts import presets
from tests.audit import steps
from tests.audit.test_presets import UNEXPLAINED

LOWERINGS = ("looped", "looped:one-way", "looped:halves", "looped:paired", "auto")
FAST = {"weight-stationary-2d": "looped:halves", "weight-gathered-xyz": "looped", "zero-3": "looped:paired"}


def hold(step):
    """As in blocking, but that permutes go over one axis at a time, and are counted under all axes of their step."""
    comparison = step.ledger.compare(step.plan)
    planned = {key: sent for key, (_, sent) in step.plan.by_kind_and_axes().items() if sent}
    assert {key: compiled for key, (_, compiled) in comparison.totals.items()} == planned
    assert comparison.agrees
    assert {verdict: comparison[verdict] for verdict in UNEXPLAINED} == dict.fromkeys(UNEXPLAINED, ())
    assert not step.ledger.notes
    assert step.ledger.wire_bytes == step.plan.wire_bytes


def permuted(plan):
    """Bytes that the plan sends in permutes."""
    return sum(sent for (kind, _), (_, sent) in plan.by_kind_and_axes().items() if kind == "collective-permute")


@pytest.mark.parametrize(("name", "lowering"), FAST.items())
def test_what_is_planned_is_compiled(name, lowering):
    step = steps.training(name, lowering=lowering)
    hold(step)
    assert permuted(step.plan) > step.plan.wire_bytes / 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lowering"), sorted({*product(presets(), LOWERINGS)} - {*FAST.items()}))
def test_what_is_planned_is_compiled_by_every_schedule(name, lowering):
    hold(steps.training(name, lowering=lowering))
