"""The figures of a search: a bar for every mesh, and seconds against bytes."""

import pytest

from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.hardware.chips import CHIPS
from gspmd.search import Answer
from gspmd.search.answers import Candidate, SearchResult
from gspmd.search.answers.finding import BestFirstSearch
from gspmd.search.answers.frontier import Point
from gspmd.search.answers.staircase import frontier_figure
from gspmd_models.config import ModelConfig
from gspmd_models.search.phases import problem_of
from gspmd_models.search.workload import Workload
from tests.figures.svg import SVG, bars_of, check_places, having, root, words


def test_a_search():
    config = ModelConfig(layers=2, embed=256, feed_forward=1024, heads=8, head_size=32, remat="full")
    workload = Workload(config, CHIPS["tpu-v5p"], 64, 512)
    every = [Candidate(problem_of(workload, mesh), 1e11) for mesh in ({"x": 4}, {"x": 2, "y": 2})]
    for each in every:
        each.solve()
    best = min(every, key=lambda each: each.answer.seconds)
    found = SearchResult(best, best.answer, tuple(every), best.answer.bound)
    rows = bars_of(found.figure())
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
    rows = bars_of(found.figure())
    assert rows[f"{worse.named} remat full"][0] == f"not better, at least {amount_of_seconds(worse.free.seconds)}"
    assert rows[f"{full.named} remat full"] == ("nothing fits", [])
    assert rows[f"{left.named} remat full"][0] == f"not solved, at least {amount_of_seconds(left.free.seconds)}"
    table = str(found)
    assert all(sum(word in line for line in table.splitlines()) == 1 for word in ("not better", "nothing fits"))


def _answer(held: float, took: float) -> Answer:
    return Answer({}, took, held, took, True)


def _middle(point) -> tuple[float, float]:
    (dot,) = point.iter(f"{SVG}rect")
    x, y, wide, high = (float(dot.get(name)) for name in ("x", "y", "width", "height"))
    return x + wide / 2, y + high / 2


def test_points_are_where_their_bytes_and_seconds_are():
    costs = [(1e9, 1.4), (2e9, 1.2), (4e9, 1.0)]
    beside = [("found", _answer(2e9, 1.2)), ("shown", _answer(3e9, 1.3))]
    figure = frontier_figure([Point(_answer(*cost), 5e9) for cost in costs], beside, 3.5e9, "x=4")
    points = having(root(figure), bytes=None)
    assert [(float(p.get("data-bytes")), float(p.get("data-seconds")), p.get("data-name")) for p in points] == [
        *((*cost, "") for cost in costs), (2e9, 1.2, "found"), (3e9, 1.3, "shown"),
    ]  # fmt: skip
    (x1, y1), (x2, y2), (x4, y4), found, (x3, y13) = map(_middle, points)
    assert found == (x2, y2)
    assert (x2 - x1, x3 - x1) == pytest.approx(((x4 - x1) / 3, 2 * (x4 - x1) / 3), abs=0.02)
    assert (y2 - y1, y13 - y1) == pytest.approx(((y4 - y1) / 2, (y4 - y1) / 4), abs=0.02)
    assert x4 > x1
    assert y4 > y1  # Fewer seconds are lower.
    stairs = next(each for each in root(figure).iter(f"{SVG}polyline") if each.get("class") == "line")
    corners = [tuple(map(float, corner.split(","))) for corner in stairs.get("points").split()]
    assert corners[:5] == [(x1, y1), (x2, y1), (x2, y2), (x4, y2), (x4, y4)]
    assert f"may be used: {amount_of_bytes(3.5e9)}" in words(root(figure))
    assert str(figure).splitlines() == [
        "1 GB: 1.4 s",
        "2 GB: 1.2 s",
        "4 GB: 1 s",
        "found, 2 GB: 1.2 s",
        "shown, 3 GB: 1.3 s",
    ]
    check_places(figure)


def test_a_wide_range_of_seconds_is_logarithmic_and_what_is_far_away_is_left_out():
    costs = [(1e9, 4.0), (2e9, 2.0), (3e9, 4 / 3), (4e9, 2 / 3)]
    figure = frontier_figure([Point(_answer(*cost), 5e9) for cost in costs], [], 1.2e9, "x=4")
    points = having(root(figure), bytes=None)
    assert [float(each.get("data-seconds")) for each in points] == [2.0, 4 / 3]
    assert len(str(figure).splitlines()) == 4
