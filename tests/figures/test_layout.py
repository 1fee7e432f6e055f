"""The figure of a layout: every line of its table, with the spec that is written there."""

from collections import Counter
from pathlib import Path

import pytest

import gspmd
from tests.figures.svg import check_places, having, root, words

PRESETS = sorted(path.stem for path in (Path(gspmd.__file__).parent / "layouts/presets").glob("*.toml"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_line_is_drawn_once(name):
    layout = gspmd.Layout.load(name)
    figure = layout.figure()
    drawn = having(root(figure), key=None)
    said = {each.get("data-key"): each.get("data-spec") for each in drawn}
    table = {key: " | ".join(text) if isinstance(text, tuple) else text for key, text in layout.table.items()}
    assert {key: spec for key, spec in said.items() if key in table} == table
    assert max(Counter(each.get("data-key") for each in drawn).values()) == 1
    for section, lines in layout.overrides.items():
        assert sum(key.startswith(f"{section}.") and key not in table for key in said) == min(8, len(lines))
    check_places(figure)
    assert figure.width < 560


def test_specs_are_written_with_subscripts():
    (box,) = having(root(gspmd.Layout.load("weight-stationary-2d").figure()), key="ffn.w_in")
    assert words(box) == ["ExFyz", "w_in"]


def test_alternatives_and_text_that_is_no_notation_are_drawn_as_they_stand():
    layout = gspmd.Layout.load("replicated").override({"ffn.w_in": ("E_xF", "EF_x", "EF"), "ffn.w_out": "<F_>"})
    document = root(layout.figure())
    assert words(having(document, key="ffn.w_in")[0])[0] == "ExF or 2 more"
    assert words(having(document, key="ffn.w_out")[0])[0] == "<F_>"


def test_lines_of_other_models_have_their_places():
    lines = {
        "attention.w_q_down": "EU", "attention.w_q_up": "UH_xD", "attention.w_k_down": "EZ", "attention.latent": "BLZ",
        "cross.memory": "BTE", "cross.w_q": "EH_xD", "cross.query": "BLH_xD", "embedding.positions": "PE",
        "moe.shared_in": "EF_x", "moe.shared_hidden": "BLF_x", "moe.router_bias": "X",
    }  # fmt: skip
    layout = gspmd.Layout.load("gshard").override(lines)
    figure = layout.figure()
    said = {each.get("data-key"): each.get("data-spec") for each in having(root(figure), key=None)}
    assert {key: said[key] for key in lines} == lines
    sections = dict.fromkeys(key.partition(".")[0] for key in said)
    assert [*sections] == ["embedding", "attention", "cross", "ffn", "moe", "output"]
    check_places(figure)


def test_sections_of_a_custom_model_are_lists():
    layout = gspmd.Layout.load("replicated").override({"mixer.w_a": "E_xS", "mixer.state": "BS_x"})
    document = root(layout.figure())
    assert words(having(document, key="mixer.w_a")[0]) == ["w_a", "ExS"]
    check_places(layout.figure())
