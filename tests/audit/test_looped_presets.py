"""Planned is compiled where gathers and reduce-scatters run inside the einsums, by every schedule."""

from itertools import product

import pytest

from gspmd.layouts import presets
from tests.audit import steps
from tests.audit.ledgers.test_comparison import compared, planned, sent
from tests.audit.test_presets import UNEXPLAINED

pytestmark = pytest.mark.usefixtures("every_schedule")

SCHEDULES = ("one-way", "halves", "paired")
# What the plan chooses per equation, for every preset; the schedules take turns. On host devices `auto` is `blocking`,
# as in test_presets.py, so that a few presets show it.
CHOSEN = {*product(presets(), ("looped",)), *product(presets()[::6], ("auto",))}
CASES = CHOSEN | {(name, f"looped:{SCHEDULES[at % 3]}") for at, name in enumerate(presets())}


def hold(step):
    """Expect the bytes of blocking, but a permute goes over one axis at a time and counts for all axes of its step."""
    comparison = step.ledger.compare(step.plan)
    wanted = {key: amount for key, (_, amount) in step.plan.by_kind_and_axes().items() if amount}
    assert {key: compiled for key, (_, compiled) in comparison.totals.items()} == wanted
    assert comparison.agrees
    assert {verdict: comparison[verdict] for verdict in UNEXPLAINED} == dict.fromkeys(UNEXPLAINED, ())
    assert not step.ledger.notes
    assert step.ledger.wire_bytes == step.plan.wire_bytes


def permuted(plan):
    """Bytes that the plan sends in permutes."""
    return sum(amount for (kind, _), (_, amount) in plan.by_kind_and_axes().items() if kind == "collective-permute")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lowering"), sorted(CASES))
def test_what_is_planned_is_compiled_for_every_preset(name, lowering):
    step = steps.training(name, lowering=lowering)
    hold(step)
    if (name, lowering) == ("weight-gathered-xyz", "looped"):
        assert permuted(step.plan) > step.plan.wire_bytes / 2


def test_permutes_that_two_rings_share_may_be_compiled_under_the_name_of_either():
    """The second ring shares three of four permutes; the compiler keeps one of those, and its own, as the second's."""
    step = "step0.collective-permute.x"
    steps_of = lambda equation, sent, **more: planned("collective-permute", "x", sent, of=equation, **more)  # noqa: E731
    plan = [steps_of("A", 400), steps_of("B", 100)]
    entries = [
        sent("collective-permute", "x", 100, of="A", step=step, count=3),
        sent("collective-permute", "x", 100, of="B", step=step, count=2),
    ]
    found = compared(plan, entries, shared=[steps_of("B", 300, first=("A", 0))])
    assert found.agrees
    assert [row.verdict for row in found.rows] == ["as planned", "as planned", "shared"]
    assert [row.compiled[1] for row in found["as planned"]] == [400, 100]
    assert not compared(plan, entries[:1], shared=[steps_of("B", 300, first=("A", 0))]).agrees
