"""The figure of a timeline: its rows, bars and numbers are those of the timeline."""

import re

import pytest

from gspmd.audit import Timeline, timeline
from gspmd.audit.hlo import parse
from gspmd.audit.simulation.machine import Span
from gspmd.audit.simulation.timeline import CategoryTotal
from gspmd.display.units import amount_of_seconds, axes_text
from gspmd.hardware.chips import CHIPS
from tests.figures.svg import SVG, check_places, having, root, words, written
from tests.references.hlo import HLO

MESH = {"x": 4}


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


def _part(category: str, *axes: str) -> CategoryTotal:
    return CategoryTotal(category, axes, 1, 0.0123, 0.001)


def test_a_timeline_has_room_for_long_names():
    span = Span("a gather", ("expert_parallel",), 0.0, 1.0, "all-gather", exposed=1.0)
    parts = [
        _part("collective-permute", "data", "fsdp", "model"),
        *(_part("all-gather", f"axis_{n}") for n in range(8)),
    ]
    line = Timeline(1.0, 0.0, 1.0, 0.0, 0, 0.0, (span,), tuple(parts), CHIPS["tpu-v4"], {"expert_parallel": 4})
    figure = line.figure()
    check_places(figure)
    document = root(figure)
    names = {each.text: each for each in written(figure)}
    assert [row.get("data-row") for row in having(document, row=None)] == ["compute", "expert_parallel"]
    for row in having(document, row=None):
        assert names[row.get("data-row")].right < float(next(row.iter(f"{SVG}rect")).get("x"))
    assert "… and 1 more" in words(document)
    assert sum(text.startswith("12.3 ms") for text in words(document)) == 8
