"""Ledgers of several TPU slices beside plans, made up: steps in parts, without names, matched by their bytes."""

import pytest

import gspmd
from gspmd.audit import Entry, Ledger, compare
from gspmd.audit.ledgers.slices import whole_permutes
from gspmd.hardware.links import wire_bytes
from gspmd.planner.steps import Step
from gspmd.tracing.program_plan import PlannedStep, ProgramPlan

MESH = {"s": 2, "x": 4, "y": 4}
S = 2**20


def planned(kind: str, axes: str, buffer: int = S, *, of="A", number=0, trips=1, mesh=MESH):
    group = 1
    for axis in axes:
        group *= mesh[axis]
    spec = gspmd.Spec.parse("BE")
    return PlannedStep(Step(kind, tuple(axes), wire_bytes(kind, group, buffer), 0.0, spec, spec), trips, of, number)


def sent(kind: str, axes: str, group: int, buffer: int, *, count=1, step="", of="", away=False):
    each = wire_bytes(kind, group, buffer)
    name = {"step": step, "equation": of}
    return Entry(kind, tuple(axes), count, each * count, "bf16", **name, network_bytes=each * count * away)


def compared(steps, entries, mesh=MESH, slices=2):
    return compare(Ledger(tuple(entries), 0, mesh, slices=slices), ProgramPlan(tuple(steps)))


def test_a_gather_over_the_network_and_within():
    parts = [sent("all-gather", "s", 2, S // 16, away=True), sent("all-gather", "xy", 16, S)]
    found = compared([planned("all-gather", "sxy")], parts)
    assert found.agrees
    assert [row.verdict for row in found.rows] == ["as planned"]
    assert not compared([planned("all-gather", "sxy")], parts[:1]).agrees
    # On one slice there are no such parts.
    assert not compared([planned("all-gather", "sxy")], parts, slices=1).agrees


def test_within_a_slice_it_may_run_in_two_parts():
    for major, minor in ("xy", "yx"):
        parts = [
            sent("all-gather", "s", 2, S // 16, away=True),
            sent("all-gather", minor, 4, S // 4),
            sent("all-gather", major, 4, S),
        ]
        assert compared([planned("all-gather", "sxy")], parts).agrees
    wrong = [sent("all-gather", "s", 2, S // 16), sent("all-gather", "x", 4, S), sent("all-gather", "y", 4, S)]
    assert not compared([planned("all-gather", "sxy")], wrong).agrees


def test_an_all_reduce_is_three_collectives():
    parts = [
        sent("reduce-scatter", "x", 4, S),
        sent("all-reduce", "s", 2, S // 4, away=True),
        sent("all-gather", "x", 4, S),
    ]
    found = compared([planned("all-reduce", "sx")], parts)
    assert found.agrees
    assert found.totals == {("all-reduce", ("s", "x")): (2 * S * 7 // 8,) * 2}


@pytest.mark.parametrize("odd", [1, 3, 32769])
def test_bytes_that_do_not_divide(odd):
    """`wire_bytes` rounds down: a buffer of 32 odd numbers of bytes over 64 devices."""
    mesh, buffer = {"s": 4, "x": 16}, 32 * odd
    parts = [
        sent("reduce-scatter", "x", 16, buffer),
        sent("all-reduce", "s", 4, buffer // 16, away=True),
        sent("all-gather", "x", 16, buffer),
    ]
    assert compared([planned("all-reduce", "sx", buffer, mesh=mesh)], parts, mesh, 4).agrees


def test_an_axis_over_slices_and_within_has_no_name():
    mesh = {"x": 8, "y": 4}
    parts = [
        sent("all-gather", "?", 2, S // 16, away=True),
        sent("all-gather", "y", 4, S // 4),
        sent("all-gather", "?", 4, S),
    ]
    assert compared([planned("all-gather", "xy", mesh=mesh)], parts, mesh).agrees
    over = [sent("reduce-scatter", "?", 4, S), sent("reduce-scatter", "?", 2, S // 4, away=True)]
    assert compared([planned("reduce-scatter", "x", mesh=mesh)], over, mesh).agrees


def test_executions_are_divided_among_steps():
    """Two steps that send as much, one of them twice: three executions in two instructions."""
    steps = [planned("all-gather", "x", of="A"), planned("all-gather", "x", of="B", trips=2)]
    runs = [sent("all-gather", "x", 4, S, count=2), sent("all-gather", "x", 4, S)]
    found = compared(steps, runs)
    assert [row.verdict for row in found.rows] == ["as planned"] * 2
    found = compared(steps, [*runs, sent("all-gather", "x", 4, S)])
    assert [row.verdict for row in found.rows] == ["as planned", "as planned", "not planned"]
    found = compared(steps, runs[:1])
    assert sorted(row.verdict for row in found.rows) == ["as planned", "gone", "not planned"]


def test_names_come_first():
    """A collective with the name of a step is not given to another step that sends as much."""
    steps = [planned("all-gather", "x", of="A"), planned("all-gather", "x", of="B")]
    runs = [sent("all-gather", "x", 4, S, of="B", step="step0.all-gather.x"), sent("all-gather", "x", 4, S)]
    found = compared(steps, runs)
    assert [(row.equation, row.verdict) for row in found.rows] == [("A", "as planned"), ("B", "as planned")]
    (gone,) = compared(steps, runs[:1])["gone"]
    assert gone.equation == "A"


def test_a_permute_over_slices_is_also_one_within():
    """A device sends its piece one way or the other: the nearest permute of as many bytes is the rest of it."""
    crossing, rest = (sent("collective-permute", axes, 2, S, away=axes == "sx") for axes in ("sx", "x"))
    other, smaller = sent("collective-permute", "y", 2, S), sent("collective-permute", "x", 2, S // 2)
    assert whole_permutes([smaller, crossing, rest, other]) == [smaller, crossing, other]
    assert whole_permutes([rest, crossing, smaller, rest]) == [crossing, smaller, rest]
    assert whole_permutes([rest, rest]) == [rest, rest]
    assert compared([planned("collective-permute", "sx")], whole_permutes([crossing, rest])).agrees


def test_hops_of_a_loop_are_one_step():
    step = planned("collective-permute", "x", 7 * S, trips=2)
    hops = [sent("collective-permute", "x", 2, S, count=2) for _ in range(7)]
    assert compared([step], hops).agrees
    assert not compared([step], hops[1:]).agrees
