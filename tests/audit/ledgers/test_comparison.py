"""Plans beside ledgers: every verdict, on plans and ledgers made up."""

import pytest

import gspmd
from gspmd.audit import Comparison, Entry, Ledger, compare
from gspmd.audit.ledgers.verdicts import VERDICTS, ComparedStep
from gspmd.planner.steps import Step
from gspmd.tracing.program_plan import PlannedStep, ProgramPlan

MESH = {"x": 4, "y": 2}


def planned(kind: str, axes: str, sent: int, *, of: str = "A", number: int = 0, trips=1, way="BE_x -> BE", **more):
    before, after = (gspmd.Spec.parse(spec) for spec in way.split(" -> "))
    return PlannedStep(Step(kind, tuple(axes), sent, 0.0, before, after), trips, of, number, **more)


def sent(kind: str, axes: str, each: int, *, of: str = "A", step: str = "", count: int = 1, dtype="f32", arrays=1):
    source = "/me/model.py:7"
    return Entry(kind, tuple(axes), count, each * count, dtype, source, of, step, arrays=arrays)


def compared(steps, entries, shared=(), **plan) -> Comparison:
    return compare(Ledger(tuple(entries), 0, MESH), ProgramPlan(tuple(steps), tuple(shared), **plan))


def only(found: Comparison) -> ComparedStep:
    (row,) = found.rows
    return row


GATHER, SCATTER = "step0.all-gather.x", "step1.reduce-scatter.x"


def test_as_planned():
    found = compared([planned("all-gather", "x", 96, trips=3)], [sent("all-gather", "x", 96, step=GATHER, count=3)])
    want = ComparedStep("as planned", "", "all-gather", ("x",), "A", GATHER, (3, 288), (3, 288), "/me/model.py:7")
    assert (only(found), found.agrees) == (want, True)
    assert found.totals == {("all-gather", ("x",)): (288, 288)}


def test_all_reduces_behind_a_loop_have_lost_their_scopes():
    """Two steps share one collective: the part of the first has a name, and the rest has none."""
    steps = [planned("all-reduce", "x", 96, is_behind_loop=True), planned("all-reduce", "x", 32, number=1)]
    steps += [planned("all-reduce", "x", 8, number=2, is_behind_loop=True)]
    named = [sent("all-reduce", "x", 32, step="step1.all-reduce.x")]
    moved = sent("all-reduce", "x", 104, of="", arrays=2)
    found = compared(steps, [*named, moved])
    assert (found.agrees, [row.verdict for row in found.rows]) == (True, ["as planned"] * 3)
    assert [row.compiled[1] for row in found.rows] == [32, 96, 8]
    # If no part is named, the collective looks like one array, of the step whose reduction it took.
    whole = sent("all-reduce", "x", 104, step="step2.all-reduce.x")
    assert [row.verdict for row in compared([steps[0], steps[2]], [whole]).rows] == ["as planned"] * 2
    # Without a step behind a loop, and with other bytes, nobody has asked for it.
    apart = [planned("all-reduce", "x", 96), *steps[1:2]]
    assert {row.verdict for row in compared(apart, [*named, moved]).rows} == {"as planned", "gone", "not planned"}
    more = sent("all-reduce", "x", 112, of="", arrays=2)
    assert "not planned" in {row.verdict for row in compared(steps, [*named, more]).rows}


def test_one_of_several_runs_sends_another_dtype():
    steps = [planned("all-gather", "x", 96, dtype=dtype) for dtype in ("s32", "f32")]
    runs = [sent("all-gather", "x", each, step=GATHER, dtype=dtype) for each, dtype in ((96, "s32"), (24, "pred"))]
    row = only(compared(steps, runs))
    assert (row.verdict, row.how) == ("rewritten", "pred on the wire")
    assert (row.planned, row.compiled) == ((2, 192), (2, 120))


def test_the_same_step_in_two_places_is_one_row():
    # a layer that is called twice, and compiled twice
    step = planned("all-gather", "x", 96)
    found = compared([step, step], [sent("all-gather", "x", 96, step=GATHER)] * 2)
    assert (only(found).verdict, only(found).planned, only(found).compiled) == ("as planned", (2, 192), (2, 192))


@pytest.mark.parametrize(
    ("kind", "axes", "entries", "how"),
    [
        ("reduce-scatter", "x", [sent("all-reduce", "x", 192, step=SCATTER)], "reduce-scatter made an all-reduce"),
        ("all-gather", "x", [sent("all-gather", "x", 192, step="step1.all-gather.x")], "padded"),
        ("all-gather", "x", [sent("all-gather", "x", 99, step="step1.all-gather.x")], "padded"),
        (
            "reduce-scatter",
            "x",
            [sent("all-reduce", "x", 192, step=SCATTER), sent("collective-permute", "x", 8, step=SCATTER)],
            "reduce-scatter made an all-reduce and a collective-permute",
        ),
        ("all-reduce", "xy", [sent("all-reduce", "x", 96, step="step1.all-reduce.x.y")], "over x"),
        (
            "all-reduce",
            "x",
            [sent("all-reduce", "x", 104, step="step1.all-reduce.x", arrays=2)],
            "2 arrays in one collective",
        ),
        ("all-gather", "x", [sent("all-gather", "x", 96, step="step1.all-gather.x", count=2)], "sent more often"),
    ],
)
def test_rewritten(kind, axes, entries, how):
    row = only(compared([planned(kind, axes, 96, number=1)], entries))
    assert (row.verdict, row.how, row.planned) == ("rewritten", how, (1, 96))
    assert row.compiled == (sum(e.count for e in entries), sum(e.wire_bytes for e in entries))


def test_in_parts_is_as_planned():
    # 63/64 of 4096 over three axes: first 15/16 of 4096 over two of them, and 3/4 of 256 over the third
    step = planned("reduce-scatter", "xyz", 4032, number=1)
    name = "step1.reduce-scatter.x.y.z"
    parts = [sent("reduce-scatter", "xy", 3840, step=name), sent("reduce-scatter", "z", 192, step=name)]
    found = compared([step], parts)
    assert (only(found).verdict, only(found).compiled, found.agrees) == ("as planned", (2, 4032), True)
    assert found.totals == {("reduce-scatter", ("x", "y", "z")): (4032, 4032)}


def test_a_part_alone_is_a_rewriting():
    part = sent("reduce-scatter", "xy", 3840, step="step1.reduce-scatter.x.y.z")
    found = compared([planned("reduce-scatter", "xyz", 4032, number=1)], [part])
    assert (only(found).verdict, only(found).how, found.agrees) == ("rewritten", "over xy", False)


def test_groups_without_a_name_that_send_what_was_planned():
    # a part of two axes, say, in groups that no mesh axes make
    step, name = planned("all-gather", "xy", 96, number=1), "step1.all-gather.x.y"
    assert compared([step], [sent("all-gather", "?", 96, step=name)]).agrees
    found = compared([step], [sent("all-gather", "?", 90, step=name)])
    assert (only(found).verdict, only(found).how, found.agrees) == ("rewritten", "over ?", False)


def test_a_permute_may_leave_an_axis_alone():
    # E_xyz -> E_zyx: no device changes its place along y
    step = planned("collective-permute", "xyz", 64, way="E_xyz -> E_zyx")
    found = compared([step], [sent("collective-permute", "xz", 64, step="step0.collective-permute.x.y.z")])
    assert (only(found).verdict, found.agrees) == ("as planned", True)


def test_several_steps_in_one_collective():
    steps = [planned("all-reduce", "x", 96, of="A"), planned("all-reduce", "x", 8, of="B", number=2)]
    found = compared(steps, [sent("all-reduce", "x", 104, of="A", step="step0.all-reduce.x", arrays=2)])
    assert found.agrees
    assert [(row.verdict, row.how, row.compiled) for row in found.rows] == [
        ("as planned", "2 arrays in one collective", (1, 96)),
        ("as planned", "in one collective with step 0 of A", (1, 8)),
    ]


def test_several_steps_in_one_collective_with_something_else():
    steps = [planned("all-reduce", "x", 96, of="A"), planned("all-reduce", "x", 8, of="B", number=2)]
    found = compared(steps, [sent("all-reduce", "x", 200, of="A", step="step0.all-reduce.x", arrays=3)])
    assert [(row.verdict, row.how) for row in found.rows] == [
        ("rewritten", "3 arrays in one collective"),
        ("rewritten", "in one collective with step 0 of A"),
    ]
    assert not found.agrees


def test_steps_of_one_equation_in_one_collective_of_another_kind():
    steps = [planned("reduce-scatter", "x", 96, number=n) for n in (1, 2)]
    found = compared(steps, [sent("all-reduce", "x", 384, step="step2.reduce-scatter.x", arrays=2)])
    assert [(row.verdict, row.how) for row in found.rows] == [
        ("rewritten", "reduce-scatter made an all-reduce, 2 arrays in one collective"),
        ("rewritten", "in one collective with step 2"),
    ]
    assert not found.agrees


def test_steps_that_one_collective_carries_share_a_row():
    """The printed table names their collective once; `steps_table` alone has a row for each of them."""
    steps = [planned("all-reduce", "x", 96 - 8 * n, of=name) for n, name in enumerate("ABCD")]
    steps.append(planned("all-gather", "x", 4, of="E"))
    found = compared(steps, [sent("all-reduce", "x", 500, of="A", step="step0.all-reduce.x", arrays=4)])
    cells = lambda sheet: [row for row, _ in sheet.rows]  # noqa: E731
    assert len(cells(found.steps_table())) == 5
    carrier, carried, gone = cells(found.steps_table(together=True))
    assert (carrier[0], gone[0]) == ("rewritten: 4 arrays in one collective", "gone")
    assert carried[0] == "rewritten: in one collective with step 0 of A"
    assert carried[3:] == ("3 × 80 B", "none", "3 steps")
    assert str(found).count("in one collective with") == 1
    # A step alone in another's collective keeps its own name.
    alone = compared(steps[:2], [sent("all-reduce", "x", 500, of="A", step="step0.all-reduce.x", arrays=2)])
    assert cells(alone.steps_table(together=True)) == cells(alone.steps_table())


def test_a_gather_does_not_travel_in_an_all_reduce():
    steps = [planned("all-reduce", "x", 96), planned("all-gather", "x", 8, number=1)]
    found = compared(steps, [sent("all-reduce", "x", 104, step="step0.all-reduce.x", arrays=2)])
    assert [row.verdict for row in found.rows] == ["rewritten", "gone"]


@pytest.mark.parametrize(
    ("planned_dtype", "dtype", "bytes_sent", "how"),
    [
        ("bf16", "f32", 192, "f32 on the wire"),
        ("f32", "bf16", 48, "bf16 on the wire"),
        ("pred", "s32", 384, "s32 on the wire"),
        ("s32", "s8", 24, "s8 on the wire"),
        ("f32", "f32", 192, "padded"),
        ("bf16", "bf16", 192, "padded"),
        ("f32", "f32", 48, "sends less"),
        ("f32", "f32", 96, ""),
        ("f32", "u32", 96, ""),
    ],
)
def test_what_is_on_the_wire(planned_dtype, dtype, bytes_sent, how):
    step = planned("all-gather", "x", 96, dtype=planned_dtype)
    row = only(compared([step], [sent("all-gather", "x", bytes_sent, step=GATHER, dtype=dtype)]))
    assert (row.verdict, row.how) == ("rewritten" if how else "as planned", how)


def test_one_equation_in_two_dtypes():
    steps = [planned("all-gather", "x", 48, dtype="bf16"), planned("all-gather", "x", 96, dtype="f32")]
    entries = [sent("all-gather", "x", 48, step=GATHER, dtype="bf16"), sent("all-gather", "x", 96, step=GATHER)]
    assert only(compared(steps, entries)).verdict == "as planned"


@pytest.mark.parametrize("kept", "AB")
def test_shared(kept):
    # the second equation moves what the first has moved; a compiler may keep the scopes of either
    steps, shared = [planned("all-gather", "x", 96)], [planned("all-gather", "x", 96, of="B", first=("A", 0))]
    found = compared(steps, [sent("all-gather", "x", 96, of=kept, step=GATHER)], shared)
    assert [(row.verdict, row.how, row.equation, row.planned, row.compiled) for row in found.rows] == [
        ("as planned", "", "A", (1, 96), (1, 96)),
        ("shared", "with step 0 of A", "B", (1, 96), (0, 0)),
    ]
    assert found.agrees


def test_shared_within_one_equation():
    steps, shared = [planned("all-gather", "x", 96)], [planned("all-gather", "x", 96, first=("A", 0))]
    found = compared(steps, [sent("all-gather", "x", 96, step=GATHER)], shared)
    assert [(row.verdict, row.how) for row in found.rows] == [("as planned", ""), ("shared", "with step 0")]


def test_shared_with_a_step_that_also_moves_a_value_of_its_own():
    steps = [planned("all-gather", "x", 96, of="A"), planned("all-gather", "x", 96, of="B")]
    shared = [planned("all-gather", "x", 96, of="B", first=("A", 0))]
    found = compared(steps, [sent("all-gather", "x", 96, of="B", step=GATHER)] * 2, shared)
    assert [row.verdict for row in found.rows] == ["as planned", "as planned", "shared"]


def test_planned_as_shared_and_sent_again():
    steps, shared = [planned("all-gather", "x", 96)], [planned("all-gather", "x", 96, of="B", first=("A", 0))]
    found = compared(steps, [sent("all-gather", "x", 96, of=equation, step=GATHER) for equation in "AB"], shared)
    assert [(row.verdict, row.how) for row in found["rewritten"]] == [("rewritten", "sent again, though shared")]
    assert not found.agrees


def test_a_gather_of_another_value_is_gone_and_not_shared():
    steps = [planned("all-gather", "x", 96, of=equation) for equation in "AB"]
    found = compared(steps, [sent("all-gather", "x", 96, of="A", step=GATHER)])
    assert [(row.verdict, row.equation) for row in found.rows] == [("as planned", "A"), ("gone", "B")]


def test_it_runs_less_often():
    row = only(compared([planned("all-gather", "x", 96, trips=3)], [sent("all-gather", "x", 96, step=GATHER)]))
    assert (row.verdict, row.how) == ("rewritten", "runs less often")
    assert (row.planned, row.compiled) == ((3, 288), (1, 96))


def test_notes_of_both_sides_are_shown():
    plan = ProgramPlan((), notes=("a while loop [sic]",))
    found = compare(Ledger((), 0, MESH, notes=("the trips of loop w",)), plan)
    assert found.notes == ("a while loop [sic]", "the trips of loop w")
    assert "note: a while loop [sic]" in str(found)


def test_gone():
    found = compared([planned("all-gather", "x", 96)], [])
    assert (only(found).verdict, only(found).compiled, found.agrees) == ("gone", (0, 0), False)
    assert found.totals == {("all-gather", ("x",)): (96, 0)}


def test_what_sends_nothing_is_left_out():
    found = compared([planned("slice", "x", 0), planned("all-gather", "x", 0)], [sent("all-reduce", "x", 0)])
    assert (found.rows, found.totals, found.agrees) == ((), {}, True)


def test_not_planned():
    found = compared([], [sent("all-reduce", "y", 8, of="")])
    assert (only(found).verdict, only(found).source) == ("not planned", "/me/model.py:7")
    assert not found.agrees


def test_what_a_compiler_adds_within_a_step_and_within_an_equation():
    entries = [sent("collective-permute", "y", 8, step="step5.all-gather.x"), sent("all-to-all", "y", 8)]
    found = compared([], entries, lowered=frozenset("A"))
    assert {(row.verdict, row.how) for row in found.rows} == {
        ("rewritten", "besides the step itself"),
        ("the compiler's choice", ""),
    }


def test_what_a_compiler_adds_to_an_equation_that_it_does_not_lower_is_not_planned():
    row = only(compared([], [sent("all-to-all", "y", 8)], lowered=frozenset("B")))
    assert (row.verdict, row.equation) == ("not planned", "A")


def test_a_collective_without_its_scopes_is_known_by_what_it_sends():
    # under `xla` the compiler's collectives have the equation, and no step
    found = compared([planned("all-reduce", "x", 96, number=3)], [sent("all-reduce", "x", 96, dtype="bf16")])
    assert (only(found).verdict, only(found).step) == ("as planned", "step3.all-reduce.x")


def test_its_own_equation_stands_in_before_another():
    entries = [sent("all-reduce", "x", 96, of=""), sent("all-reduce", "x", 96, of="A")]
    found = compared([planned("all-reduce", "x", 96, number=3)], entries)
    assert [row.verdict for row in found.rows] == ["as planned", "not planned"]


def test_axes_in_another_order_are_the_same():
    step = planned("all-gather", "yx", 96)
    found = compared([step], [sent("all-gather", "xy", 96, step="step0.all-gather.y.x")])
    assert (only(found).verdict, found.agrees) == ("as planned", True)
    assert found.totals == {("all-gather", ("x", "y")): (96, 96)}


def test_rows_of_a_verdict():
    found = compared([planned("all-gather", "x", 96)], [sent("all-reduce", "y", 8, of="")])
    assert [len(found[verdict]) for verdict in VERDICTS] == [0, 0, 0, 1, 0, 1]
    with pytest.raises(KeyError, match="no verdict is called 'lost'; there are as planned, shared"):
        found["lost"]


def test_it_is_readable():
    steps = planned("all-gather", "x", 960), planned("reduce-scatter", "x", 96, number=1), planned("all-reduce", "y", 1)
    entries = [sent("all-gather", "x", 960, step=GATHER), sent("all-reduce", "x", 192, step=SCATTER)]
    text = str(compared(steps, entries))
    assert max(map(len, text.splitlines())) <= 140
    assert "steps: 1 as planned, 1 rewritten, 1 gone" in text
    for part in ("not planned", "gone", "=", "× 1.09"):
        assert part in text
    (row,) = [line for line in text.splitlines() if "made an all-reduce" in line]
    for part in ("rewritten: reduce-scatter made an all-reduce", "1 × 96 B", "1 × 192 B", "A step 1  me/model.py:7"):
        assert part in row


def test_nothing_at_all_is_readable():
    assert "steps: none" in str(compared([], []))


WRONG = [None, "a plan", 7, gspmd.Spec.parse("B_x"), [planned("all-gather", "x", 96)]]


@pytest.mark.parametrize("plan", WRONG, ids=lambda plan: type(plan).__name__)
def test_what_is_no_plan_is_named(plan):
    with pytest.raises(gspmd.PlanError, match=f"cannot compare a Ledger with an? {type(plan).__name__}") as told:
        Ledger((), 0, {}).compare(plan)
    assert "gspmd.trace(fn, *args)" in str(told.value)


@pytest.mark.parametrize("other", WRONG, ids=lambda other: type(other).__name__)
def test_what_is_no_ledger_is_named(other):
    with pytest.raises(gspmd.PlanError, match="cannot compare a ledger with"):
        Ledger((), 0, {}).diff(other)
    with pytest.raises(gspmd.PlanError, match="cannot compare"):
        compare(other, ProgramPlan(()))


def test_reprs_are_one_line():
    steps = [planned("all-gather", "x", 96)]
    entries = [sent("all-gather", "x", 96, of="A", step="step0.all-gather.x")]
    found = compared(steps, entries)
    for each in (found, steps[0], entries[0], ProgramPlan(tuple(steps)), Ledger(tuple(entries), 0, {"x": 4}, "jit_f")):
        assert "\n" not in repr(each)
        assert len(repr(each)) < 160
    assert "96 B planned, 96 B compiled; steps: 1 as planned" in repr(found)
    assert "1 × all-gather x f32: 96 B, A step 0" in repr(entries[0])
    assert '<td class="right">96 B</td><td class="right">96 B</td>' in found._repr_html_()


def test_steps_that_differ_in_nothing_but_figures_stand_in_one_row():
    own = [sent("all-reduce", "x", 4, of="", step="") for _ in range(5)]
    found = compared([], own)
    assert len(found["not planned"]) == 5
    assert "5 × 4 B" in str(found)
    assert str(found).count("not planned │ all-reduce") == 1
