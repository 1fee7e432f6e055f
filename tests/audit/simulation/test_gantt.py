"""The picture of a timeline: what stands where."""

from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from gspmd.audit import gantt, hlo, timeline
from gspmd.audit.simulation.bars import ink_on, pale_of
from gspmd.audit.simulation.machine import Span
from gspmd.display.theme import TERMINAL
from gspmd.hardware.chips import CHIPS
from tests.audit.simulation.drawn import drawn


@pytest.fixture(scope="module")
def axes():
    return gantt.figure(drawn()).axes[0]


def bars(axes, color):
    """(row, start, end) in µs of all bars of one color."""
    found = []
    for collection in axes.collections:
        for path, face in zip(collection.get_paths(), collection.get_facecolors()):
            left, right, middle = *path.get_extents().intervalx, path.get_extents().intervaly.mean()
            if to_hex(face) == color and right > left:
                found.append((round(middle, 2), round(left, 3), round(right, 3)))
    return found


def pale(color):
    return to_hex(pale_of(color))


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_row_for_computing_each_mesh_axis_and_memory(axes):
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "axis x", "axis y", "memory"]


def test_the_title_and_the_table_say_over_how_many_nodes():
    wide = replace(drawn(), chip=CHIPS["h100"], mesh={"x": 4, "y": 8})
    title = gantt.figure(wide).axes[0].get_title(loc="left")
    assert title == "jit_ring on one of 32 h100 · 4 nodes of 8, x=4 y=8"
    assert "one of 32 h100 · 4 nodes of 8, x=4 y=8" in str(wide)


def test_the_title_has_the_figures_of_the_whole_step(axes):
    assert axes.get_title(loc="left") == "jit_ring on one of 8 tpu-v4, x=4 y=2"
    # 118 times 5 µs, of which 1 is computed; 630 kB over 3 links, as y is no ring: 4.7 µs, and 3 hops
    assert "step 598 µs    computing 118 µs    exposed 480 µs    hidden 118 µs    MFU 0.0%" in texts(axes)


def test_a_collective_stands_on_the_rows_of_its_axes(axes):
    gathered = bars(axes, gantt.PALETTE["all-gather"])
    assert [row for row, _, _ in gathered] == [1, 2]
    assert gathered[0][1:] == gathered[1][1:]


def test_the_part_of_a_collective_that_is_not_waited_for_is_pale(axes):
    # two at once on one row, 1 µs beside computing, then 4 µs of waiting for the first; both end together
    begun = bars(axes, gantt.PALETTE["other"])[0][1]
    hidden = bars(axes, pale(gantt.PALETTE["collective-permute"]))
    assert [row for row, _, _ in hidden] == [0.84, 1.16]
    assert hidden[0][1:] == (begun, pytest.approx(begun + 1, abs=2e-3))


def test_a_loop_is_drawn_once_and_says_how_often_it_runs(axes):
    assert "× 118" in texts(axes)
    assert axes.get_xlabel() == "µs, each loop drawn once"
    assert axes.get_xlim()[1] < 20


def test_bars_are_named_where_the_name_fits(axes):
    assert "all-gather xy" in texts(axes)
    assert "BLE_x -> BLE" in texts(axes)
    assert "copy-start" not in texts(axes)  # 0.08 µs


def test_the_legend_names_what_is_drawn_and_no_more(axes):
    (legend,) = axes.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "other computing",
        "all-gather",
        "collective-permute",
        "memory copies",
        "pale: not waited for",
    ]


def test_every_kind_of_collective_has_a_color_of_its_own():
    assert len(set(gantt.PALETTE.values())) == len(gantt.PALETTE)
    assert set(TERMINAL) - {"slice"} <= set(gantt.PALETTE)


def test_loops_in_loops_are_marked_above_one_another():
    loop = """%{0}_body ({0}: (u8[90000])) -> (u8[90000]) {{
  %{0} = (u8[90000]{{0}}) parameter(0)
  {1}
}}

%{0}_condition (c: (u8[90000])) -> pred[] {{
  %c = (u8[90000]{{0}}) parameter(0)
  ROOT %true = pred[] constant(true)
}}

"""
    repeat = (
        "ROOT %{0}_loop = (u8[90000]{{0}}) while(%{1}), condition=%{0}_condition, body=%{0}_body, "
        'backend_config={{"known_trip_count":{{"n":"{2}"}}}}'
    )
    work = '%n = u8[90000]{0} negate(%p), backend_config={"window_config":{"estimated_cycles":"1050"}}'
    inner = loop.format("a", "%p = u8[90000]{0} get-tuple-element(%a), index=0\n  " + work)
    outer = loop.format("b", repeat.format("a", "b", 3))
    entry = "ENTRY %main (p: (u8[90000])) -> (u8[90000]) {\n  %q = (u8[90000]{0}) parameter(0)\n  "
    text = "HloModule m, is_scheduled=true\n\n" + inner + outer + entry + repeat.format("b", "q", 5) + "\n}\n"
    axes = gantt.figure(timeline(hlo.parse(text), "tpu-v4", {"x": 4})).axes[0]
    marks = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert marks["× 5"] < marks["× 3"] < 0  # the axis points down


def test_the_picture_is_written(tmp_path):
    gantt.draw(drawn(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    gantt.draw(drawn(), tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_a_program_that_does_nothing_is_an_empty_picture():
    text = "HloModule m\n\nENTRY %main (p: f32[4]) -> f32[4] {\n  ROOT %p = f32[4]{0} parameter(0)\n}\n"
    axes = gantt.figure(timeline(hlo.parse(text), "tpu-v4", {"x": 4})).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "axis x"]


def crowded():
    """A step of many layers: bars thinner than a pixel, lanes over lanes, short loops side by side."""
    spans = [Span(f"fusion.{n}", ("compute",), n * 1e-6, 0.4e-6, "other") for n in range(1000)]
    spans += [Span("all-to-all", ("x",), n * 20e-6, 1e-6, "all-to-all", exposed=1e-6) for n in range(25)]
    spans += [Span("all-to-all", ("x",), n * 100e-6, 9e-6, "all-to-all", exposed=9e-6) for n in range(6, 10)]
    spans += [Span("copy-start", ("memory",), n * 1e-6, 300e-6, "copy") for n in range(400, 412)]
    spans += [Span("step1.all-gather.y", ("y",), n * 60e-6, 200e-6, "all-gather", exposed=1e-6) for n in range(10)]
    spans += [Span(f"while.{n}", ("compute",), n * 10e-6, 2e-6, "loop", trips=9) for n in range(20, 26)]
    return replace(drawn(), spans=tuple(spans))


def test_no_label_lies_over_another_and_none_leaves_its_place():
    made = gantt.figure(crowded())
    FigureCanvasAgg(made).draw()
    axes = made.axes[0]
    written = [text for text in axes.texts if text.get_text()]
    boxes = [text.get_window_extent() for text in written]
    met = [(a.get_text(), b.get_text()) for (a, x), (b, y) in combinations(zip(written, boxes), 2) if x.overlaps(y)]
    assert not met
    assert sum(text.get_text() == "× 9" for text in written) == 6
    assert "all-to-all x" in texts(axes)  # beside a bar that is too thin for it


def test_thin_bars_are_no_white_edges():
    axes = gantt.figure(crowded()).axes[0]
    edges = {}
    for collection in axes.collections:
        for path, face in zip(collection.get_paths(), collection.get_facecolors()):
            edges.setdefault((to_hex(face), path.get_extents().width > 5), set()).add(collection.get_linewidth()[0])
    assert edges[gantt.PALETTE["other"], False] == {0}
    assert edges[gantt.PALETTE["all-to-all"], True] == {0.5}


def test_labels_are_legible_on_every_color():
    for color in gantt.PALETTE.values():
        light = [_luminance(each) for each in (color, ink_on(color))]
        assert (max(light) + 0.05) / (min(light) + 0.05) > 3, color


def _luminance(color):
    """Relative luminance, by WCAG 2."""
    parts = [int(to_hex(color)[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
