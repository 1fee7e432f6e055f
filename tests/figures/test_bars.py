"""Bars and timelines: their numbers are those of program plans, ledgers, comparisons, timelines and searches."""

import pytest

import gspmd
from gspmd.audit import timeline
from gspmd.audit.hlo import parse
from gspmd.display.units import amount_of_bytes, amount_of_seconds, axes_text
from gspmd.figures.bars import Bar, bars_figure
from gspmd.hardware.chips import CHIPS
from gspmd.search.answers import Candidate, SearchResult
from gspmd.tracing.program_plan import of_equation
from gspmd_models.config import ModelConfig
from gspmd_models.search.phases import problem_of
from gspmd_models.search.workload import Workload
from tests.figures.svg import SVG, check_places, having, root, words

MESH = {"x": 4}
SIZES = {"B": 64, "L": 128, "E": 1024, "F": 4096}
HLO = """HloModule jit_train_step, is_scheduled=true, num_partitions=4

ENTRY %main (p: bf16[8,128]) -> bf16[8,512] {
  %p = bf16[8,128]{1,0} parameter(0)
  %n = bf16[8,128]{1,0} negate(%p), backend_config={"window_config":{"estimated_cycles":"1050"}}
  ROOT %g = bf16[8,512]{1,0} all-gather(%n), replica_groups={{0,1,2,3}}, dimensions={1}, channel_id=1
}"""


def _rows(figure) -> dict[str, tuple[str, list[float]]]:
    """The label of every row, with its text on the right and the lengths of its bars."""
    found = {}
    for row in having(root(figure), bar=None):
        label, told = words(row)
        assert label == row.get("data-bar")
        found[label] = told, [float(each.get("width")) for each in row.iter(f"{SVG}rect")]
    return found


def _plan():
    return of_equation(gspmd.plan("BLE_x, E_xF -> BLF", SIZES, MESH, lowering="blocking"))


def test_bars_are_as_long_as_their_amounts():
    figure = bars_figure(
        "a title", [Bar("a", "all-gather", (8.0,), "8 B"), Bar("b", "all-reduce", (2.0, 4.0), "2 → 4")]
    )
    rows = _rows(figure)
    assert rows["a"][1] == [340.0]
    assert rows["b"] == ("2 → 4", [85.0, 170.0])
    check_places(figure)


def test_long_lists_are_counted():
    figure = bars_figure("a title", [Bar(f"bar {n}", "other", (1.0,), "1 B") for n in range(200)])
    assert len(_rows(figure)) == 14
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
        assert {label: told for label, (told, _) in _rows(each.figure()).items()} == expected
        assert amount_of_bytes(each.wire_bytes) in "".join(words(root(each.figure())))
        check_places(each.figure())
    comparison = ledger.compare(plan)
    rows = _rows(comparison.figure())
    for (kind, axes), (planned, compiled) in comparison.totals.items():
        told, lengths = rows[f"{kind} {axes_text(axes)}"]
        assert told == f"{amount_of_bytes(planned)} → {amount_of_bytes(compiled)}"
        longest = max(max(both) for both in comparison.totals.values())
        assert lengths == pytest.approx([max(1.0, 340 * sent / longest) for sent in (planned, compiled)], abs=0.01)


def test_a_timeline():
    line = timeline(parse(HLO), "tpu-v4", MESH)
    figure = line.figure()
    document = root(figure)
    assert [row.get("data-row") for row in having(document, row=None)] == [*line.rows]
    said = words(document)
    for part in line.parts:
        assert f"{part.category} {axes_text(part.axes)}".strip() in said
        assert any(text.startswith(amount_of_seconds(part.seconds)) for text in said)
    assert line.summary in " ".join("".join(said[-3:]).split())
    check_places(figure)
    assert "<svg" in line._repr_html_()


def test_a_search():
    config = ModelConfig(layers=2, embed=256, feed_forward=1024, heads=8, head_size=32, remat="full")
    workload = Workload(config, CHIPS["tpu-v5p"], 64, 512)
    every = [Candidate(problem_of(workload, mesh), 1e11) for mesh in ({"x": 4}, {"x": 2, "y": 2})]
    for each in every:
        each.solve()
    best = min(every, key=lambda each: each.answer.seconds)
    found = SearchResult(best, best.answer, tuple(every), best.answer.bound)
    rows = _rows(found.figure())
    assert len(rows) == 2
    for each in every:
        told, (length,) = next(row for label, row in rows.items() if label.startswith(each.named))
        assert told == f"{amount_of_seconds(each.answer.seconds)}, {amount_of_bytes(each.answer.bytes)}"
        assert length == pytest.approx(340 * each.answer.seconds / max(e.answer.seconds for e in every), abs=0.01)
    check_places(found.figure())
    assert amount_of_seconds(best.answer.seconds) in str(found)
    assert "<table>" in found._repr_html_()
    assert "\n" not in repr(found)
