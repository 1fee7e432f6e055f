"""Equations and vias that are built from specs are those that are read from their text."""

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspmd import Spec, SpecError
from gspmd.annotate import Equation, Via, parse_equation, parse_via
from tests.annotate.test_spec import specs

X, W, H = Spec.parse("BLE_xyz"), Spec.parse("E_xF_yz"), Spec.parse("BLF_yzx")
SCALAR, SUM = Spec.parse(""), Spec.parse("partialsum-x")
OPERANDS = st.one_of(specs(), specs(), st.lists(specs(), max_size=3))


@pytest.mark.parametrize(("built", "text"), [
    (Equation.product(X, W, H), "BLE_xyz, E_xF_yz -> BLF_yzx"),
    (Equation.product(X, (W, W), [H, H]), "BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)"),
    (Equation.move(X, X.without("L")), "BLE_xyz -> BE_xyz"),
    (Equation.move(H, SCALAR), "BLF_yzx -> "),
    (Equation.sum_of([(H, W), (X, SCALAR)], X), "BLF_yzx, E_xF_yz + BLE_xyz,  -> BLE_xyz"),
    (Equation.product(X, (SUM,), (X,)), "BLE_xyz, ((partialsum-x)) -> (BLE_xyz)"),
    (Equation.product(X, (SUM, SCALAR), (X, X)), "BLE_xyz, (partialsum-x, ) -> (BLE_xyz, BLE_xyz)"),
])  # fmt: skip
def test_an_equation_of_specs(built, text):
    read = parse_equation(text)
    assert built == read
    assert (built.text, built.spans, hash(built)) == (text, read.spans, hash(read))


@pytest.mark.parametrize(("built", "text"), [
    (Via.of(X, W), "BLE_xyz, E_xF_yz"),
    (Via.of(X, (W, W)), "BLE_xyz, (E_xF_yz, E_xF_yz)"),
    (Via.of(X), "BLE_xyz"),
    (Via.sum_of([(X, W), (H, W)]), "BLE_xyz, E_xF_yz + BLF_yzx, E_xF_yz"),
])  # fmt: skip
def test_a_via_of_specs(built, text):
    read = parse_via(text)
    assert built == read == tuple(read)
    assert (built.text, str(built), hash(built)) == (text, text, hash(read))
    assert built.specs == tuple(spec for term in read for operand in term.operands for spec in operand.specs)
    assert parse_via(built) is built


def test_a_via_can_be_kept():
    via = parse_via("B_x L, (E, E)")
    for copied in (pickle.loads(pickle.dumps(via)), copy.copy(via), copy.deepcopy(via)):
        assert copied == via
        assert copied.text == "B_x L, (E, E)"
    assert repr(via) == "<Via 'B_xL, (E, E)'>"


@settings(deadline=None, max_examples=300)
@given(st.lists(st.lists(OPERANDS, min_size=1, max_size=3), min_size=1, max_size=2), OPERANDS)
def test_what_is_built_is_what_is_read_or_the_same_error(products, result):
    text = " + ".join(", ".join(map(_text, operands)) for operands in products)
    assert _outcome(Equation.sum_of, products, result) == _outcome(parse_equation, f"{text} -> {_text(result)}")
    assert _outcome(Via.sum_of, products) == _outcome(parse_via, text)


def _text(operand) -> str:
    if isinstance(operand, Spec):
        return str(operand)
    inner = ", ".join(map(str, operand))
    return f"(({inner}))" if len(operand) == 1 and inner.startswith("partialsum") else f"({inner})"


def _outcome(call, *args) -> object:
    try:
        read = call(*args)
    except SpecError as error:
        return str(error), error.faults
    return read, read.text


def test_what_does_not_go_together_is_refused_with_a_caret():
    with pytest.raises(SpecError) as error:
        Equation.product(X, W, H.rename({"L": "T"}))
    assert (
        str(error.value)
        == """\
cannot read the equation 'BLE_xyz, E_xF_yz -> BTF_yzx'
    BLE_xyz, E_xF_yz -> BTF_yzx
                         ^
  dimension T is in the result but in no operand.
  The operands have B, L, E, F."""
    )
    with pytest.raises(SpecError, match="cannot read via='BLE_xyz, BLE_xyz, BLE_xyz'"):
        Via.of(X, X, X)


@pytest.mark.parametrize("specs", [3, None, [3], [X, None]])
def test_what_is_no_spec(specs):
    with pytest.raises(SpecError, match="it is not a string"):
        Equation.product(X, specs, X)
