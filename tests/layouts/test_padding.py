"""The [padding] of a layout: sizes, refusals, and the line that an error proposes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspmd.annotate import LayoutError
from gspmd.layouts import Layout
from gspmd.layouts.rules.sizes import padded, paddings

MESH = {"x": 2, "y": 4, "z": 1}


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 16), st.integers(1, 16), st.integers(1, 99), st.integers(1, 64)
)
def test_heads_stay_with_their_key_value_head(kv_heads, group, of_heads, of_kv_heads, rows, of_rows):
    sizes = {"H": kv_heads * group, "K": kv_heads, "V": rows}
    wide = padded(sizes, {"H": of_heads, "K": of_kv_heads, "V": of_rows})
    assert wide["V"] == next(n for n in range(rows, rows + of_rows) if n % of_rows == 0)
    assert wide["K"] == next(n for n in range(kv_heads, kv_heads + of_kv_heads) if n % of_kv_heads == 0)
    smallest = next(n for n in range(group * wide["K"], 10**6) if n % of_heads == 0 and n % wide["K"] == 0)
    assert wide["H"] == smallest
    for dim, places in paddings(sizes, wide).items():
        assert np.array_equal(places.origins[places.origins >= 0], np.arange(sizes[dim]))
        assert (len(places.origins), places.size, places.real) == (wide[dim], wide[dim], sizes[dim])
    if "H" in paddings(sizes, wide):
        origins = paddings(sizes, wide)["H"].origins
        for place in np.flatnonzero(origins >= 0):
            assert place // (wide["H"] // wide["K"]) == origins[place] // group


def test_nothing_is_padded_that_divides_or_that_is_not_asked_for():
    layout = Layout.load("megatron-1d").override({"padding.F": 8})
    assert layout.padded({"F": 64, "H": 7, "K": 7}) == {"F": 64, "H": 7, "K": 7}
    assert not paddings({"F": 64}, {"F": 64})


def test_an_error_proposes_the_line_that_pads():
    sizes = {"B": 8, "H": 6, "K": 6, "F": 64, "E": 63}
    with pytest.raises(LayoutError) as error:
        Layout.load("megatron-1d").override({"ffn.w_in": "E_xF_yz"}).check(sizes, MESH)
    text = str(error.value)
    assert "or leave H unsharded: 'EHD'. Or pad it: H = 4 in [padding]." in text
    assert "E = 2" not in text
    with pytest.raises(LayoutError) as error:
        Layout.load("megatron-1d").check({"V": 250}, MESH)
    remedy = "Or pad it: V = 4 in [padding], or vocabulary_multiple = 4 in [model] (--model.vocabulary-multiple)."
    assert remedy in str(error.value)
    with pytest.raises(LayoutError) as error:
        Layout.load("megatron-1d").check(sizes | {"H": 8, "K": 1}, MESH)
    assert "leave K unsharded: 'EKD'." in str(error.value)
    assert "pad it" not in str(error.value)  # to four times as many heads


def test_a_padded_dimension_divides():
    sizes = {"B": 8, "H": 6, "K": 3, "F": 62, "V": 250, "D": 8}
    layout = Layout.load("megatron-1d").override({"padding.K": 4, "padding.F": "4", "padding.V": 4})
    layout.check(sizes, MESH)
    assert layout.mesh_for(8, sizes) == MESH
    assert layout.padded(sizes) == {"B": 8, "H": 8, "K": 4, "F": 64, "V": 252, "D": 8}


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        ({"padding.B": 8}, "dimension B (batch) cannot be padded: the caller chooses the batch; give alternatives"),
        ({"padding.E": 8}, "dimension E (embed) cannot be padded: norms average over it."),
        ({"padding.X": 8}, "dimension X (experts) cannot be padded: a router would choose among experts that are not"),
        ({"padding.heads": 8}, "'heads' is not a dimension that can be padded.\n  It holds H, K, F, V, T."),
        ({"padding.H": 0}, "H is padded to a multiple of 0."),
    ],
)
def test_what_cannot_be_padded_is_refused(padding, message):
    layout = Layout.load("megatron-1d").override(padding)
    for ask in (lambda: layout.check({"B": 8, "H": 8}, MESH), lambda: layout.padded({"H": 8})):
        with pytest.raises(LayoutError) as error:
            ask()
        assert message in str(error.value)


def test_a_multiple_is_a_whole_number(tmp_path):
    with pytest.raises(LayoutError, match=r"cannot override 'padding\.H' with 'many'"):
        Layout.load("megatron-1d").override({"padding.H": "many"})
    path = tmp_path / "mine.toml"
    path.write_text('base = "megatron-1d"\n[padding]\nH = 64\nF = "8"\n')
    with pytest.raises(LayoutError, match="F is padded to a multiple of '8'"):
        Layout.load(path)
    path.write_text('base = "megatron-1d"\n[padding]\nH = 64\n')
    assert "[padding]" in str(Layout.load(path))
