"""The printed plan, letter for letter."""

from io import StringIO

import pytest
from rich.console import Console

import gspmd
from gspmd.collectives import figure

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
        "  BLE_xyz              ── all-gather yz ─▶     BLE_x                   4.42 MB  28.6 µs",
        "  BLE_x · E_xF_yz      ── einsum ─▶            BLF_yz partialsum-x  21.7 GFLOP  79.1 µs",
        "  BLF_yz partialsum-x  ── reduce-scatter x ─▶  BLF_yzx                 3.54 MB  41.3 µs",
        "  per device: 7.96 MB sent, 21.7 GFLOP, 149 µs, 53.4 MB held",
    ]


def test_nothing_to_do():
    assert "(nothing to do)" in str(_plan("B_xE -> B_xE"))


def test_long_axis_names_are_set_apart():
    text = str(_plan("BE_{data,model} -> BE", {"data": 4, "model": 2}))
    assert "── all-gather data,model ─▶" in text


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
    ("amount", "text"), [(0, "0 B"), (999, "999 B"), (4423680, "4.42 MB"), (12e9, "12 GB"), (5e15, "5e+03 TB")]
)
def test_amounts(amount, text):
    assert figure.amount_of_bytes(amount) == text
