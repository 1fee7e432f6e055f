"""Sections of one's own: their keys keep the dimensions they were written with, and a misspelt part stays an error."""

import re

import pytest

from gspmd.annotate import LayoutError
from gspmd.layouts import Layout

OWN = """
base = "megatron-1d"
[dimensions]
S = "state"
[ssm]
w_in = "ES_y"
state = "B_xSE"
in_via = "B_xLE, ES_y"
[lowering]
ssm = "xla"
[optimizer]
"ssm.w_in" = "E_xS_y"
[decode]
"ssm.state" = "BSE"
"""
SIZES = {"B": 8, "L": 16, "E": 64, "F": 128, "S": 16}
MESH = {"x": 2, "y": 2}


@pytest.fixture
def load(tmp_path):
    """A function of a file's text that loads it as a layout."""

    def make(text, name="mine"):
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return Layout.load(path)

    return make


def fault(layout, sizes=SIZES) -> str:
    with pytest.raises(LayoutError) as error:
        (layout if isinstance(layout, Layout) else layout()).check(sizes, MESH)
    assert len(error.value.faults) == 1, str(error.value)
    return str(error.value.faults[0])


def test_a_section_of_ones_own_is_one_like_any_other(load):
    layout = load(OWN).check(SIZES, MESH)
    assert (layout["ssm.state"], layout.ssm.w_in, layout.section("ssm").in_via) == ("B_xSE", "ES_y", "B_xLE, ES_y")
    assert (layout.ssm.lowering, layout.optimizer("ssm.w_in"), layout.gradient("ssm.w_in")) == (
        "xla", "E_xS_y", "ES_y",
    )  # fmt: skip
    assert layout.phase("decode").ssm.state == "BSE"
    assert "\n[ssm]\n" in str(layout)
    layout.override({"ssm.state": "BS_yE", "optimizer.ssm.state": "B_xS_yE"}).check(SIZES, MESH)


def test_a_section_encoder_is_a_custom_models_or_overrides(load):
    """Keys with a dot override those of the transformer; others are lines of one's own, unless they are a slip."""
    text = '[mesh]\naxes = ["x"]\nfactor = ["x"]\n[encoder]\nstream = "B_xLE"\nw_q = "EHD"\n'
    custom = load(f'{text}[optimizer]\n"encoder.w_q" = "E_xHD"\n')
    layout = custom.override({"encoder.w_q": "EH_xD"}).check({"B": 8, "L": 16, "E": 64, "H": 8}, {"x": 2})
    assert (layout.encoder.stream, layout["encoder.w_q"]) == ("B_xLE", "EH_xD")
    assert layout.optimizer("encoder.w_q") == "E_xHD"
    assert not layout.overrides.get("encoder")
    met = layout.override({"encoder.q_via": "B_xLE, EHD"})  # a line that the file lacks
    assert (met.encoder.q_via, met.overrides.get("encoder")) == ("B_xLE, EHD", None)
    unknown = fault(load('base = "megatron-1d"\n[encoder]\ntokens = "B_xL"\n"attention.w_q" = "EHD"\n'))
    assert 'Write "embedding.tokens".' in unknown
    message = fault(load('base = "megatron-1d"\n[encoder]\nw_q = "EHD"\n'))
    assert "a key of [encoder] begins with the section of the line that it overrides; 'w_q' does not." in message
    assert 'Write "attention.w_q".' in message


def test_a_letter_is_explained_or_has_a_size(load):
    layout = load(OWN.replace('S = "state"', ""))
    layout.check(SIZES, MESH)
    message = fault(layout, {"B": 8})
    assert "nothing says what dimension S is." in message
    assert 'Write S = "what it is" in [dimensions], or give its size.' in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssm.state": "BES"}, "ssm.state must have dimensions B, S and E, in this order, but here the order is B, E"),
        ({"optimizer.ssm.w_in": "SE"}, "ssm.w_in must have dimensions E and S, in this order"),
        ({"ssm.in_via": "B_xLE, EF_y"}, "ssm.in_via must be two specs, with the dimensions of BLE and ES."),
        ({"ssm.in_via": "B_xLE, E_yS"}, "dimension E is not sharded in 'B_xLE', and sharded over y in 'E_yS'."),
        ({"ssm.stat": "BSE"}, "the layout has no line 'ssm.stat'.\n  Did you mean 'ssm.state'?"),
        ({"smm.state": "BSE"}, "no section of a layout is called 'smm'.\n  Did you mean 'ssm'?"),
        ({"ssm.state": "B_xS_xE"}, "mesh axis x"),
        ({"ssm.state": "B_xSE partialsum-y"}, "ssm.state is a partial sum, which only [gradients] may have."),
        ({"cache.ssm.state": "BS"}, "ssm.state must have dimensions B, S and E, but this has B and S."),
        ({"lowering.smm": "xla"}, "Did you mean 'ssm'?"),
    ],
)
def test_one_fault(load, change, message):
    assert message in fault(lambda: load(OWN).override(change))


def test_sizes_divide_ones_own_too(load):
    message = fault(load(OWN), {**SIZES, "S": 15})
    assert "dimension S has size 15, which mesh axis y (size 2) does not divide." in message
    assert "The same in 2 more: ssm.in_via and [optimizer] ssm.w_in." in message


def test_a_file_keeps_the_dimensions_of_its_base(load):
    load(OWN)
    layout = load('base = "mine.toml"\n[ssm]\nstate = "BES"\nmore = "BS"\n', "above")
    assert layout.ssm.more == "BS"
    assert "ssm.state must have dimensions B, S and E" in fault(layout)


@pytest.mark.parametrize(
    ("section", "key", "near"),
    [("fnn", "w_in", "ffn"), ("atention", "w_q", "attention"), ("optimiser", '"ffn.w_in"', "optimizer"),
     ("decod", '"ffn.w_in"', "decode"), ("dimension", "S", "dimensions"), ("outputs", "logit", "output")],
)  # fmt: skip
def test_a_known_section_misspelt_is_none_of_ones_own(load, section, key, near):
    layout = load(f'base = "megatron-1d"\n[{section}]\n{key} = "EF"\n')
    message = fault(layout)
    assert f"no section of a layout is called {section!r}.\n  Did you mean {near!r}?" in message


def test_a_name_that_is_merely_like_a_known_one_is_ones_own(load):
    load('base = "megatron-1d"\n[decoder]\ncross = "BLE"\n[attn]\nmemory = "BE"\n').check(SIZES, MESH)


def test_a_layout_of_no_transformer_has_sections_of_any_name(load):
    layout = load('[mesh]\naxes = ["x"]\nfactor = ["x"]\n[mem]\nw_in = "EF"\nhidden = "BLF"\n[fnn]\nw_in = "EF_x"\n')
    layout.check({"B": 4, "L": 8, "E": 16, "F": 32}, {"x": 2})
    assert layout.own == {"mem.w_in": "EF", "mem.hidden": "BLF", "fnn.w_in": "EF"}
    load('base = "megatron-1d"\n[mem]\nw_in = "EF"\n').check(SIZES, MESH)  # which is not `moe`, either


@pytest.mark.parametrize(
    ("line", "message"),
    [('state = "S"', "'state' is not a dimension.\n  A dimension is one capital letter."),
     ('E = "energy"', "dimension E is embed in every layout.\n  Take another letter."),
     ("S = 3", "the meaning of S must be a string, but it is 3.\n  Write it in quotes.")],
)  # fmt: skip
def test_lines_of_the_dimensions_are_checked(load, line, message):
    assert message in fault(lambda: load(f'base = "megatron-1d"\n[dimensions]\n{line}\n'))


def test_the_example_of_the_page_is_a_layout(load, pytestconfig):
    page = (pytestconfig.rootpath / "docs" / "layouts.md").read_text()
    (text,) = re.findall(r"```toml\n(base = .*?)```", page, flags=re.DOTALL)
    layout = load(text).check(SIZES, MESH)
    assert (layout.ssm.state, layout.dimensions) == ("B_xS_yzE", {"S": "state"})


ALONE = """
[mesh]
axes = ["x", "y"]
factor = ["x"]
[embedding]
tokens = "B_xL"
[ssm]
state = "B_xLE_y"
"""


def test_a_file_with_a_section_of_ones_own_has_only_the_lines_of_its_model(load):
    layout = load(ALONE).check(SIZES, MESH)
    assert layout.mesh_for(4, SIZES) == {"x": 4, "y": 1}
    with pytest.raises(LayoutError, match=r"the layout does not write attention\.w_q, which has no default\."):
        layout.spec("attention.w_q")
    with pytest.raises(LayoutError, match=r"embedding\.table is missing"):
        load(ALONE.partition("[ssm]")[0]).check(SIZES, MESH)
