"""Bars and timelines: their numbers are those of program plans, ledgers, comparisons, timelines and searches."""

import re
from types import SimpleNamespace

import pytest

import gspmd
from gspmd.audit import timeline
from gspmd.audit.hlo import parse
from gspmd.display.units import amount_of_bytes, amount_of_seconds, axes_text
from gspmd.figures.bars import Bar, bars_figure
from gspmd.figures.timeline import timeline_figure
from gspmd.hardware.chips import CHIPS
from gspmd.search.answers import Candidate, SearchResult
from gspmd.search.answers.finding import BestFirstSearch
from gspmd.tracing.program_plan import of_equation
from gspmd_models.config import ModelConfig
from gspmd_models.search.phases import problem_of
from gspmd_models.search.workload import Workload
from tests.figures.svg import SVG, check_places, having, root, words, written

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
    whole, half = (lengths for _, lengths in _rows(figure).values())
    assert whole[0] == pytest.approx(2 * half[0], abs=0.02)


def test_nothing_is_drawn_for_nothing():
    bars = [Bar("a", "all-gather", (0.0, 8.0), "0 → 8"), Bar("b", "other", (), "none"), Bar("c", "other", (0.0,), "0")]
    rows = _rows(bars_figure("a title", bars))
    assert [lengths for _, lengths in rows.values()] == [[340.0], [], []]


def test_only_a_bar_that_does_not_count_is_pale():
    bars = [Bar("a", "all-gather", (1.0, 2.0), ""), Bar("b", "other", (1.0,), "", pale=True)]
    drawn = root(bars_figure("a title", bars)).iter(f"{SVG}rect")
    assert [each.get("class") for each in drawn][1:] == ["all-gather pale", "all-gather", "other pale"]


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
        expected = [max(1.0, 340 * sent / longest) for sent in (planned, compiled) if sent]
        assert lengths == pytest.approx(expected, abs=0.01)


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
    for row in having(document, row=None):
        panel = next(row.iter(f"{SVG}rect"))
        left, wide, top, high = (float(panel.get(name)) for name in ("x", "width", "y", "height"))
        end = max(span.start + span.seconds for span in line.spans)
        spans = [span for span, _ in line.lanes(row.get("data-row"))]
        assert spans
        expected = [left + wide * at / end for span in spans for at in (span.start, span.start + span.seconds)]
        paths = [_extent(path.get("d")) for path in row.iter(f"{SVG}path")]
        assert min(path[0] for path in paths) == pytest.approx(min(expected), abs=0.51)
        assert max(path[1] for path in paths) == pytest.approx(max(expected), abs=0.51)
        assert all(top <= path[2] < path[3] <= top + high for path in paths)
        drawn = sum(stop - start for path in row.iter(f"{SVG}path") for start, stop in _pieces(path.get("d")))
        assert drawn == pytest.approx(wide * sum(span.seconds for span in spans) / end, abs=0.51 * len(spans))


def _pieces(path: str) -> list[tuple[float, float]]:
    """Left and right of every bar of a path."""
    return [(float(x), float(x) + float(wide)) for x, wide in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", path)]


def _extent(path: str) -> tuple[float, float, float, float]:
    """Left, right, top and bottom of a path."""
    sides = [each for pair in _pieces(path) for each in pair]
    y, high = re.search(r"M[\d.]+ ([\d.]+)h[\d.]+v([\d.]+)", path).groups()
    return min(sides), max(sides), float(y), float(y) + float(high)


def _part(category: str, *axes: str) -> SimpleNamespace:
    return SimpleNamespace(category=category, axes=axes, seconds=0.0123, exposed=0.001)


def test_a_timeline_has_room_for_long_names():
    span = SimpleNamespace(start=0.0, seconds=1.0, exposed=1.0, category="all-gather", rows=("model",), trips=1)
    parts = [_part("all-gather", f"axis_{n}") for n in range(8)]
    parts.insert(0, _part("collective-permute", "data", "fsdp", "model"))
    line = SimpleNamespace(
        name="a program", mesh={}, spans=[span], parts=parts, rows=("compute", "expert_parallel"), summary="a summary",
        lanes=lambda row: [(span, 0)],
    )  # fmt: skip
    figure = timeline_figure(line)
    check_places(figure)
    document = root(figure)
    names = {each.text: each for each in written(figure)}
    for row in having(document, row=None):
        assert names[row.get("data-row")].right < float(next(row.iter(f"{SVG}rect")).get("x"))
    assert "… and 1 more" in words(document)
    assert sum(text.startswith("12.3 ms") for text in words(document)) == 8


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
    assert best.outcome == "solved"
    assert amount_of_seconds(best.answer.seconds) in str(found)
    assert "<table>" in found._repr_html_()
    assert "\n" not in repr(found)


def test_every_mesh_says_how_its_search_ended():
    """Four meshes: the best one, one that cannot be cheaper, one on which nothing fits, and one that was not tried."""
    config = ModelConfig(layers=2, embed=256, feed_forward=1024, heads=8, head_size=32, remat="full")
    workload = Workload(config, CHIPS["tpu-v5p"], 64, 512)
    search = BestFirstSearch(1e11, lambda text: None)
    best, worse, full, left = every = [
        Candidate(problem_of(workload, mesh), limit)
        for mesh, limit in (({"x": 8}, 1e11), ({"x": 1}, 1e11), ({"x": 2, "y": 4}, 1.0), ({"x": 4}, 1e11))
    ]
    search.candidates = every
    search._try(full)
    search._try(best)
    search._try(worse)
    assert [each.outcome for each in every] == ["solved", "not better", "nothing fits", "not solved"]
    found = search.so_far()
    assert found.best is best
    rows = _rows(found.figure())
    assert rows[f"{worse.named} remat full"][0] == f"not better, at least {amount_of_seconds(worse.free.seconds)}"
    assert rows[f"{full.named} remat full"] == ("nothing fits", [])
    assert rows[f"{left.named} remat full"][0] == f"not solved, at least {amount_of_seconds(left.free.seconds)}"
    table = str(found)
    assert all(sum(word in line for line in table.splitlines()) == 1 for word in ("not better", "nothing fits"))
