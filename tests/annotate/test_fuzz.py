"""Whatever text is given, it is read or refused by a SpecError whose carets lie inside it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspmd import Spec, SpecError
from gspmd.annotate import Equation, parse_equation, parse_via

PIECES = [
    "A", "B", "E_x", "E_xy", "E_{data,model}", "E_?", "_", "x", "data", "{", "}", "(", ")", "()", ",", "+", "->", "-",
    ">", "=>", "→", " ", "\n", "\x1c", "partialsum-", "reduced-", "partialsum-x", "(partialsum-{x,y})", "?", "1", "é",
    "ª", "-->", "<-", "=", ":", "⟶", "\\to", "*", ";", "·", ", ", ",)", "F_z", "BLE_xyz", "E_xF_yz", "\ufe0f", "\0",
]  # fmt: skip
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
    """Half of them of pieces, the others right but for a few characters."""
    draw = random.Random(0)
    read = sum(_read_or_refused(parse, text) for _ in range(10_000) for text in (_of_pieces(draw), _nearly_right(draw)))
    assert read > 100  # not all is refused


def _of_pieces(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.randrange(15)))


def _nearly_right(draw: random.Random) -> str:
    text = list(draw.choice(RIGHT))
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(text))
        text[at : at + draw.randrange(3)] = draw.choice(["", draw.choice(PIECES), chr(draw.randrange(0x3000))])
        text = text or [" "]
    return "".join(text)


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
