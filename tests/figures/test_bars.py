"""Bars: their lengths are their amounts, and their numbers those of program plans, ledgers and comparisons."""

import pytest

import gspmd
from gspmd.display.units import amount_of_bytes, axes_text
from gspmd.figures.bars import Bar, bars_figure
from gspmd.tracing.program_plan import of_equation
from tests.figures.svg import SVG, bars_of, check_places, root, words
from tests.references.hlo import HLO

MESH = {"x": 4}
SIZES = {"B": 64, "L": 128, "E": 1024, "F": 4096}


def _plan():
    return of_equation(gspmd.plan("BLE_x, E_xF -> BLF", SIZES, MESH, lowering="blocking"))


def test_bars_are_as_long_as_their_amounts():
    figure = bars_figure(
        "a title", [Bar("a", "all-gather", (8.0,), "8 B"), Bar("b", "all-reduce", (2.0, 4.0), "2 → 4")]
    )
    rows = bars_of(figure)
    assert rows["a"][1] == [340.0]
    assert rows["b"] == ("2 → 4", [85.0, 170.0])
    check_places(figure)


@pytest.mark.parametrize(
    ("label", "told"),
    [
        ("x=4,y=8,z=8 remat full in 4 microbatches", "not better, at least 5.81 ms"),
        ("collective-permute data,fsdp,model", "1,024 arrays, 123 GB"),
    ],
)
def test_the_texts_of_a_row_do_not_meet(label, told):
    bars = [Bar(label, "collective-permute", (3.0,), told), Bar("x", "other", (1.5,), "1 B")]
    figure = bars_figure("a title", bars)
    check_places(figure)
    whole, half = (lengths for _, lengths in bars_of(figure).values())
    assert whole[0] == pytest.approx(2 * half[0], abs=0.02)


def test_nothing_is_drawn_for_nothing():
    bars = [Bar("a", "all-gather", (0.0, 8.0), "0 → 8"), Bar("b", "other", (), "none"), Bar("c", "other", (0.0,), "0")]
    rows = bars_of(bars_figure("a title", bars))
    assert [lengths for _, lengths in rows.values()] == [[340.0], [], []]


def test_only_a_bar_that_does_not_count_is_pale():
    bars = [Bar("a", "all-gather", (1.0, 2.0), ""), Bar("b", "other", (1.0,), "", pale=True)]
    drawn = root(bars_figure("a title", bars)).iter(f"{SVG}rect")
    assert [each.get("class") for each in drawn][1:] == ["all-gather pale", "all-gather", "other pale"]


def test_long_lists_are_counted():
    figure = bars_figure("a title", [Bar(f"bar {n}", "other", (1.0,), "1 B") for n in range(200)])
    assert len(bars_of(figure)) == 14
    assert "… and 186 more" in words(root(figure))
    check_places(figure)


def test_a_program_plan_a_ledger_and_their_comparison():
    plan, ledger = _plan(), gspmd.ledger(HLO, MESH)
    assert plan.by_kind_and_axes()
    for each, what in ((plan, "run"), (ledger, "array")):
        expected = {
            f"{kind} {axes_text(axes)}": f"{count} {what}{'s' * (count != 1)}, {amount_of_bytes(sent)}"
            for (kind, axes), (count, sent) in each.by_kind_and_axes().items()
        }
        assert {label: told for label, (told, _) in bars_of(each.figure()).items()} == expected
        assert amount_of_bytes(each.wire_bytes) in "".join(words(root(each.figure())))
        check_places(each.figure())
    comparison = ledger.compare(plan)
    rows = bars_of(comparison.figure())
    for (kind, axes), (planned, compiled) in comparison.totals.items():
        told, lengths = rows[f"{kind} {axes_text(axes)}"]
        assert told == f"{amount_of_bytes(planned)} → {amount_of_bytes(compiled)}"
        longest = max(max(both) for both in comparison.totals.values())
        expected = [max(1.0, 340 * sent / longest) for sent in (planned, compiled) if sent]
        assert lengths == pytest.approx(expected, abs=0.01)
