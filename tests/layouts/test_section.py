"""A section computes by the names of its lines: equations, where their operands meet, and what is no name."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import gspmd
from gspmd.layouts import Layout
from gspmd.layouts.rules.keys import KEYS
from gspmd.layouts.rules.own import METHODS
from gspmd.layouts.section import Section


@pytest.mark.parametrize(
    ("via", "key_via", "key", "wanted"),
    [
        (None, None, "BLK_yD", None),
        ("B_xLE, EH_yD", None, "B_xLK_yD", "B_xLE, (EH_yD, EK_yD, EK_yD)"),
        ("BLE_x, E_xH_yzD", None, "BLKD", "BLE_x, (E_xH_yzD, E_xKD, E_xKD)"),
        ("B_xLE, EH_yD", None, "B_yLKD", "B_xLE, (EH_yD, EKD, EKD)"),
        ("BLE_x, E_xH_yzD", "BLE_x, E_xKD_yz", "B_xyzLKD", "BLE_x, (E_xH_yzD, E_xKD_yz, E_xKD_yz)"),
    ],
)
def test_keys_and_values_meet_the_residual_where_the_layout_says(via, key_via, key, wanted):
    lines = {"attention.in_via": via, "attention.key_via": key_via, "attention.key": key}
    bare = Layout.load("replicated")
    table = {key: text for key, text in bare.table.items() if key not in lines} | {"attention.key": key}
    at = replace(bare, table=table).override({name: text for name, text in lines.items() if text}).attention
    assert _text(at.via("residual, (w_q, w_k, w_v) -> (query, key, key)")) == wanted


def _text(via):
    return None if via is None else str(via)


def test_an_equation_of_names_is_that_of_its_specs():
    layout = Layout.load("weight-stationary-2d")
    named = layout.ffn.equation("hidden, w_out + attention.query, attention.w_o -> residual")
    at, ffn = layout.attention, layout.ffn
    assert str(named) == f"{ffn.hidden}, {ffn.w_out} + {at.query}, {at.w_o} -> {ffn.residual}"
    assert str(layout.ffn.via("hidden, w_out + attention.query, attention.w_o -> residual")) == (
        f"{ffn.out_via} + {at.out_via}"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("residual, w_inn -> hidden", "no layout has a key 'ffn.w_inn'.\n  Did you mean 'ffn.w_in'?"),
        ("residual, in_via -> hidden", "cannot read 'residual, in_via -> hidden': ffn.in_via is not a tensor of the"),
        ("residual; w_in -> hidden", "an equation of a section consists of the names of lines.\n  Write it as"),
        (None, "cannot read None: an equation of a section consists of the names of lines."),
        ("residual, w_in", "  These are the specs of the lines 'residual, w_in'."),
    ],
)
def test_what_is_no_equation_of_lines(text, message):
    with pytest.raises((gspmd.LayoutError, gspmd.SpecError)) as error:
        Layout.load("weight-stationary-2d").ffn.equation(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("in_via", "ffn.in_via is a via of two specs, not a spec.\n  Read it as layout['ffn.in_via']."),
        (None, "no line of a layout is called None.\n  A name is a string, such as 'w_in'."),
        ("pipeline.layers", "the layout does not write pipeline.layers, which is optional."),
    ],
)
def test_what_is_no_spec(name, message):
    with pytest.raises(gspmd.LayoutError) as error:
        Layout.load("weight-stationary-2d").ffn.spec(name)
    assert str(error.value) == message


def test_calls_that_say_too_few_lines_or_no_move():
    ffn = Layout.load("replicated").ffn
    with pytest.raises(gspmd.LayoutError) as error:
        ffn.rms_norm("residual", None, None)
    assert str(error.value) == "cannot read 'residual'.\n  Name 2 lines, as in 'residual, norm'."
    with pytest.raises(gspmd.LayoutError) as error:
        ffn.move("residual, w_in -> hidden", None)
    assert str(error.value).startswith("cannot move an array by 'residual, w_in -> hidden'.\n  Write it as")


def test_a_section_of_ones_own_computes_as_its_letters_do(make_mesh, place):
    lines = {"mix.input": "B_xSE", "mix.w": "EF_y", "mix.bias": "F_y", "mix.output": "B_xSF_y", "mix.there": "B_xSF"}
    mix = Layout("mine", ("x", "y"), table=lines | {"mix.in_via": "B_xSE, EF_y"}).mix
    rng, mesh = np.random.default_rng(0), make_mesh({"x": 2, "y": 2})
    x, w, b = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 3, 8), (8, 6), (6,)))

    def mixed(x, w, b):
        y = mix.einsum("input, w -> output", x, w, via="in_via")
        y = mix.move("output -> there", mix.add_bias("output, bias", y, b))
        return mix.move("there -> there", y)

    with jax.set_mesh(mesh):
        placed = [place(mesh, array, lines[f"mix.{name}"]) for array, name in ((x, "input"), (w, "w"), (b, "bias"))]
        found = jax.jit(mixed)(*placed)
        plan = gspmd.trace(mixed, *placed)
    np.testing.assert_allclose(found, np.einsum("bse,ef->bsf", x, w) + b, rtol=1e-5, atol=1e-5)
    assert {kind for kind, _ in plan.by_kind_and_axes()} == {"all-gather"}


def test_no_line_is_called_as_what_a_section_computes():
    computes = {name for name in vars(Section) if not name.startswith("_")}
    assert computes == {*METHODS}
    assert not computes & {key.partition(".")[2] for key in KEYS}
    with pytest.raises(gspmd.LayoutError) as error:
        Layout("mine", table={"mix.move": "BLE"}).check()
    assert "`move` is a method of sections" in str(error.value)
