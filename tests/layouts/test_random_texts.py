"""Whatever stands in a layout's lines, the table is read, or refused by a LayoutError that can be read itself."""

import json

import pytest

from gspmd import LayoutError, Spec
from gspmd.layouts import Layout
from tests.references.random_texts import faults, texts
from tests.references.volume import scaled

SPECS = ["E_xF_y", "E_xyF", "EF partialsum-x", "EF", "E_{x}F_z", "BLE_x, E_xF", "E_xF_y | EF"]
KEYS = ["ffn.w_in", "ffn.in_via", "gradients.ffn.w_in", "optimizer.ffn.w_in", "serving.ffn.w_in", "padding.H"]
KEYS += ["lowering.ffn", "own.tensor", "dimensions.S", "pipeline.layers", "cache.attention.key"]
SIZES = {"B": 8, "L": 8, "E": 8, "F": 8, "H": 8, "K": 8, "D": 8, "V": 8}


def _value(text: str) -> None:
    """The text as the value of every kind of line."""
    base = Layout.load("megatron-1d")
    for key in ("ffn.w_in", "ffn.in_via", "gradients.ffn.w_in", "padding.H", "lowering.ffn"):
        try:
            layout = base.override({key: text}).check(SIZES, {"x": 2, "y": 2, "z": 1})
        except LayoutError:
            continue
        if key == "ffn.w_in" and "|" not in text:
            assert Spec.parse(str(Spec.parse(layout[key]))) == Spec.parse(layout[key])
    base.override({"ffn.w_in": text}).check(SIZES, {"x": 2, "y": 2, "z": 1})


def _key(text: str) -> None:
    Layout.load("megatron-1d").override({text: "EF"}).check()


def _file(folder):
    """A reader of layout files whose values are the text, quoted, or the text itself."""
    path = folder / "mine.toml"

    def read(text: str) -> None:
        line = json.dumps(text) if len(text) % 3 else text
        path.write_text(f'base = "zero-3"\n[ffn]\nw_in = {line}\n', encoding="utf-8", errors="replace")
        Layout.load(path).check()

    return read


@pytest.mark.parametrize("count", [60, pytest.param(scaled(1500), marks=pytest.mark.slow)])
def test_any_line_is_read_or_refused(count, tmp_path):
    for seed, read in enumerate((_value, _key, _file(tmp_path))):
        right = KEYS if read is _key else SPECS
        found = faults(read, texts(seed, count, right), LayoutError)
        assert not found, "\n".join(found[:20])


@pytest.mark.parametrize("count", [60, pytest.param(scaled(2000), marks=pytest.mark.slow)])
def test_any_name_of_a_layout_is_loaded_or_refused(count):
    found = faults(Layout.load, texts(3, count, ["zero-3", "mine/table.toml", "gshard", "a.toml"]), LayoutError)
    assert not found, "\n".join(found[:20])
