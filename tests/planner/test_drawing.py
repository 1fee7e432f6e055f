"""The printed plan, letter for letter."""

import sys
from collections import Counter
from io import BytesIO, StringIO, TextIOWrapper

import pytest
from rich.console import Console

import gspmd
from gspmd.display import console as printing
from gspmd.display import units as amounts
from gspmd.planner import drawing as figure

SIZES = {"B": 512, "L": 1, "E": 18432, "F": 73728}


def _plan(equation="BLE_xyz, E_xF_yz -> BLF_yzx", mesh=None, **options):
    letters = {c for c in equation if c.isupper()}
    mesh = mesh or {"x": 4, "y": 4, "z": 4}
    return gspmd.plan(equation, {d: n for d, n in SIZES.items() if d in letters}, mesh, **options)


def test_the_papers_figure():
    lines = [line.rstrip() for line in str(_plan()).rstrip().splitlines()]
    assert lines == [
        "BLE_xyz, E_xF_yz -> BLF_yzx",
        "B=512 L=1 E=18432 F=73728   mesh x=4 y=4 z=4   bfloat16   tpu-v4   blocking",
        "  BLE_xyz              ── all-gather yz ────▶  BLE_x                   4.42 MB  53.2 µs",
        "  BLE_x · E_xF_yz      ── einsum ───────────▶  BLF_yz partialsum-x  21.7 GFLOP   109 µs",
        "  BLF_yz partialsum-x  ── reduce-scatter x ─▶  BLF_yzx                 3.54 MB  41.3 µs",
        "  per device: 7.96 MB sent, 21.7 GFLOP, 203 µs, about 53.4 MB held",
    ]


def test_nothing_to_do():
    assert "(nothing to do)" in str(_plan("B_xE -> B_xE"))


def test_the_heading_says_over_how_many_nodes_devices_are_spread():
    text = str(_plan("B_{data}E, EF_{model} -> B_{data}F_{model}", {"data": 32, "model": 8}, chip="h100"))
    assert "   mesh data=32 model=8   bfloat16   h100 · 32 nodes of 8   blocking\n" in text


def test_long_axis_names_are_set_apart():
    text = str(_plan("BE_{data,model} -> BE", {"data": 4, "model": 2}))
    assert "── all-gather data,model ─▶" in text


def test_the_heads_of_the_arrows_stand_in_one_column():
    plan = _plan("BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)")
    for each in (plan, *plan.gradients):
        heads = {line.index("▶") for line in str(each).splitlines() if "▶" in line}
        assert len(heads) == 1


@pytest.mark.parametrize("width", [120, 80, 60, 40])
@pytest.mark.parametrize(
    ("equation", "mesh"),
    [
        ("BLE_xyz, E_xF_yz -> BLF_yzx", None),
        ("BE_{data,model}, E_{model}F -> BF_{data,model}", {"data": 4, "model": 4}),
    ],
)
def test_narrow_terminals_break_lines_and_lose_nothing(equation, mesh, width):
    plan = _plan(equation, mesh)
    wide, narrow = (figure.figure(plan, gradients=True, width=columns).plain for columns in (None, width))
    said = [line for line in narrow.splitlines() if "->" not in line and "per device" not in line]
    assert max(map(len, said)) <= width
    assert Counter(narrow.replace("─", "").split()) == Counter(wide.replace("─", "").split())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_a_plan_prints_where_there_is_no_unicode(encoding, monkeypatch):
    out = TextIOWrapper(BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    print(_plan())
    print([_plan()], _plan().steps[1])
    figure.show(_plan(), printing.console())
    out.flush()
    arrow = "── all-gather yz ────▶" if encoding == "utf-8" else "-- all-gather yz ---->"
    assert out.buffer.getvalue().decode(encoding).count(arrow) == 2


def test_a_notebook_shows_the_figure():
    html = _plan()._repr_html_()
    assert '<td><span class="magenta">reduce-scatter x</span></td><td>BLF<sub>yzx</sub></td>' in html
    assert "BLE_xyz, E_xF_yz -&gt; BLF_yzx" in html
    assert html.count("<svg") == 1


def test_gradients_follow():
    text = figure.figure(_plan(), gradients=True).plain
    assert text.startswith(str(_plan()).rstrip())
    assert "gradient of operand 1: BLF_yzx, E_xF_yz -> BLE_xyz\n" in text


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "einsum"])
def test_kinds_have_colors(kind):
    out = StringIO()
    figure.show(_plan(), Console(file=out, force_terminal=True, color_system="standard", width=200))
    assert f"\x1b[{ {'all-gather': 36, 'reduce-scatter': 35, 'einsum': 37}[kind] }m── {kind}" in out.getvalue()


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0 B"), (999, "999 B"), (4423680, "4.42 MB"), (12e9, "12 GB"), (5e15, "5 PB")]
)
def test_amounts(amount, text):
    assert amounts.amount_of_bytes(amount) == text
