"""Where the operands of the models' equations meet, from what a layout says."""

import pytest

from gspmd.annotate.equation import parse_via
from gspmd.layouts import Layout
from gspmd.layouts.section import SectionSpecs
from gspmd.layouts.vias import heads_in, whole_length


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
    at = Layout("mine").override({name: text for name, text in lines.items() if text}).section("attention")
    assert _text(heads_in(SectionSpecs(at))) == wanted


def test_a_position_alone_has_its_length_whole():
    assert _text(whole_length(parse_via("B_xL_yzE, VE"))) == "B_xLE, VE"
    assert _text(whole_length(parse_via("BLE_x, V_yE_x"))) == "BLE_x, V_yE_x"
    assert whole_length(None) is None


def _text(via):
    return None if via is None else str(via)
