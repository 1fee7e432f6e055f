"""The figure of a layout: every line of its table, with the spec that is written there."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import gspmd
from tests.figures.svg import SVG, check_places, having, root, words, written

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
    layout = gspmd.Layout.load("replicated").override({"ffn.w_in": ("E_xF", "EF_x", "EF")})
    layout = replace(layout, table={**layout.table, "ffn.w_out": "<F_>"})
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


def _named_axes() -> gspmd.Layout:
    """A layout whose mesh axes, keys and sections have long names."""
    lines = {
        "attention.residual": "B_{data,fsdp}L_{sequence}E_{expert_parallel}",
        "attention.query": "B_{data,fsdp}L_{sequence}H_{expert_parallel}D",
        "attention.w_q": "E_{data,fsdp,sequence}H_{expert_parallel}D",
        "attention.a_line_with_quite_a_long_name": "E_{data,fsdp}F_{sequence,expert_parallel}",
        "ffn.in_via": "B_{data,fsdp}L_{sequence}E, E_{data,fsdp,sequence}F_{expert_parallel}",
        "output.logits": "B_{data,fsdp}L_{sequence}V_{expert_parallel}",
    }
    return replace(
        gspmd.Layout.load("replicated").override(lines),
        axes=("data", "fsdp", "sequence", "expert_parallel"),
        overrides={"decode": {"attention.a_line_with_quite_a_long_name": "E_{data,fsdp}F_{sequence,expert_parallel}"}},
        lowerings={"attention": "looped:axes"},
    )


def test_long_names_have_room():
    layout = _named_axes()
    figure = layout.figure()
    check_places(figure)
    panels = [_edges(each) for each in root(figure).iter(f"{SVG}rect") if each.get("class") == "panel"]
    boxes = [_edges(each) for each in root(figure).iter(f"{SVG}rect") if each.get("class") in ("box", "node")]
    for text in written(figure)[2:]:  # below the title and the axes
        assert any(left <= text.left and text.right <= right for left, right, *_ in panels)
        inside = [box for box in boxes if box[2] <= text.bottom and text.top <= box[3]]
        assert all(text.right <= left or text.left >= right or left <= text.left <= text.right <= right
                   for left, right, *_ in inside), text  # fmt: skip


def _edges(rect) -> tuple[float, float, float, float]:
    x, y, wide, high = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
    return x, x + wide, y, y + high


def test_the_text_has_what_the_picture_has():
    layout = _named_axes()
    text, said = str(layout.figure()), words(root(layout.figure()))
    assert text == str(layout)
    assert "lowering looped:axes" in said
    for word in ("looped:axes", "[decode]", "a_line_with_quite_a_long_name"):
        assert word in text
