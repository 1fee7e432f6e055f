"""Whatever text is given, it is read or refused by a SpecError whose carets lie inside it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspmd import Spec, SpecError
from gspmd.annotate import Equation, parse_equation, parse_via
from tests.references.random_texts import PIECES, faults, texts
from tests.references.volume import scaled

TEXT = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
RIGHT = [
    "BLE_xyz, E_xF_yz -> BLF_yzx", "BLE_xyz -> B_xyzLE", "BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)",
    "BLF_yz, F_yzE_x + BLH_yzD, H_yzDE_x -> BLE_xyz", "A, (partialsum-x, B) -> (A, AB)", "B_x L E_{data,model} -> BLE",
]  # fmt: skip
PARSERS = [Spec.parse, parse_equation, parse_via]


@pytest.mark.parametrize("parse", PARSERS)
@settings(deadline=None, max_examples=400)
@given(text=TEXT)
def test_any_text_is_read_or_refused(parse, text):
    _read_or_refused(parse, text)


@pytest.mark.slow
@pytest.mark.parametrize("parse", PARSERS)
def test_twenty_thousand_texts_are_read_or_refused(parse):
    """Half of them of pieces, the others right but for a few characters, and some of them long."""
    read = []
    found = faults(lambda text: read.append(_read_or_refused(parse, text)), texts(0, scaled(20_000), RIGHT), SpecError)
    assert not found, "\n".join(found[:20])
    assert sum(read) > 0.005 * len(read)  # not all is refused


@pytest.mark.parametrize("parse", PARSERS)
def test_long_texts_are_read_or_refused(parse):
    """Text of thousands of characters is refused in time and in a few lines."""
    found = faults(lambda text: _read_or_refused(parse, text), texts(1, 300, RIGHT), SpecError)
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize("piece", ["x=4,", "B_xLE, ", "=", "(", "B_{", "partialsum-", "é", "\n"])
@pytest.mark.parametrize("parse", PARSERS)
def test_the_time_to_refuse_grows_with_the_text_alone(parse, piece):
    """It was quadratic: each '=' had the whole text searched for an arrow."""
    assert not faults(lambda text: _read_or_refused(parse, text), iter([piece * 4_000]), SpecError)


def _read_or_refused(parse, text: str) -> bool:
    try:
        read = parse(text)
    except SpecError as error:
        _refused(error, text)
        return False
    canonical = " + ".join(map(str, read)) if isinstance(read, tuple) else str(read)
    assert parse(canonical) == read
    if isinstance(read, Equation):
        assert len(read.spans) == sum(len(o.specs) for o in read.operands) + len(read.outputs)
    return True


def _refused(error: SpecError, text: str) -> None:
    assert error.faults
    for fault in error.faults:
        assert fault.text == text
        assert 0 <= fault.start <= fault.end <= len(text) + 1
        assert fault.fact.endswith(".")
