"""Whatever text is given, it is read or refused by a SpecError whose carets lie inside it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspmd import Spec, SpecError
from gspmd.annotate import Equation, parse_equation, parse_via

PIECES = [
    "A", "B", "E_x", "E_xy", "E_{data,model}", "E_?", "_", "x", "data", "{", "}", "(", ")", "()", ",", "+", "->", "-",
    ">", "=>", "→", " ", "\n", "\x1c", "partialsum-", "partialsum-x", "(partialsum-{x,y})", "?", "1", "é", "ª",
]
TEXT = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))


@pytest.mark.parametrize("parse", [Spec.parse, parse_equation, parse_via])
@settings(deadline=None, max_examples=400)
@given(text=TEXT)
def test_any_text_is_read_or_refused(parse, text):
    try:
        read = parse(text)
    except SpecError as error:
        return _refused(error, text)
    canonical = " + ".join(map(str, read)) if isinstance(read, tuple) else str(read)
    assert parse(canonical) == read
    if isinstance(read, Equation):
        assert len(read.spans) == sum(len(o.specs) for o in read.operands) + len(read.outputs)


def _refused(error: SpecError, text: str) -> None:
    assert error.faults
    for fault in error.faults:
        assert fault.text == text
        assert 0 <= fault.start <= fault.end <= len(text) + 1
        assert fault.fact.endswith(".")
