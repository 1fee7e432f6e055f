"""The parser and the diagnosis agree: what one accepts has no fault for the other, and what fits has none either."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspmd import Spec, SpecError
from gspmd.annotate import parse_equation, parse_via
from gspmd.annotate.diagnosis import refusals, sizes
from gspmd.annotate.diagnosis.operands import EquationReader
from gspmd.annotate.diagnosis.reader import Reader
from tests.annotate.test_fuzz import PIECES, TEXT

READ = {
    "spec": (Spec.parse, refusals.spec_faults),
    "equation": (parse_equation, refusals.equation_faults),
    "via": (parse_via, refusals.via_faults),
}
SUFFIXES = ["", "", "_x", "_yz", "_{x}", "_{ data , w }", "_?"]
PARTIALS = [
    "",
    "",
    "",
    " partialsum-x",
    "partialsum-{data}",
    " (partialsum-zy)",
    "( partialsum- { w } )",
    " reduced-x",
    "(reduced-yz)",
]


@st.composite
def _nearly_specs(draw) -> str:
    """A spec, but for a dimension or a mesh axis that may appear twice."""
    dims = draw(st.lists(st.sampled_from("ABCDE"), max_size=3))
    return "".join(d + draw(st.sampled_from(SUFFIXES)) for d in dims) + draw(st.sampled_from(PARTIALS))


@st.composite
def _nearly_equations(draw) -> str:
    """An equation of any form, whose operands may not go together."""
    spec, space = _nearly_specs(), st.sampled_from(["", " ", "\t"])
    group = st.lists(spec, min_size=1, max_size=3).map(lambda specs: f"({', '.join(specs)})")
    operand = st.one_of(spec, spec, group)
    term = st.lists(operand, min_size=1, max_size=3).map(", ".join)
    terms = draw(st.lists(term, min_size=1, max_size=2).map(" + ".join))
    result = draw(st.one_of(st.just(""), operand))
    return f"{draw(space)}{terms}{draw(st.sampled_from(['', ' -> ', '->']))}{result}{draw(space)}"


@pytest.mark.turns(1)
@pytest.mark.parametrize("what", READ)
@settings(deadline=None, max_examples=400)
@given(text=st.one_of(TEXT, _nearly_specs(), _nearly_equations()))
def test_what_is_refused_has_a_fault_and_what_is_read_has_none(what, text):
    _agree(what, text)


@pytest.mark.parametrize("what", READ)
@pytest.mark.parametrize("text", [
    "()", "( )", "(,)", "(, )", "(A,)", "(A, )", "A, () -> ()", "(A), B -> (AB)", "((partialsum-x)), B -> (B)", "A->()",
    "A, (partialsum-x) -> A", "(partialsum-x, A), B -> (B, AB)", "(partialsum-x) (partialsum-y)", "A (partialsum-x)",
    "E_reduced-x", "E_xreduced-y", "A reduced-x partialsum-y", "(reduced-x), A -> A", "A reduced-xB", "reduced-?",
    "E_partialsum-x", "E_xpartialsum-y", "partialsum- x", "partialsum-\n{x}", "E_{x}y", "E_{x}{y}", "E_{x,}", "E_?x",
    "A_x B_x", "AA", "A\x1cB", "A\u00a0B", "A->B->C", "A-->A", "A->>A", "->", ",->", "A+A->A", "A,B,C->A", "(A)->(A)",
    "(A)+(A)->(A)", "A+->A", "A partialsum-xA", "\ufe0f", "A->A\n", "A->A,", "E_{x\n,y}",
])  # fmt: skip
def test_texts_where_they_might_part(what, text):
    _agree(what, text)


@pytest.mark.slow
def test_twenty_thousand_texts():
    draw = random.Random(1)
    right = ["BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)", "BF_y, F_yE + BD_y, D_yE -> BE (partialsum-y)"]
    for _ in range(20_000):
        text = list(draw.choice([*right, "B_x L E_{data,model} partialsum-yz"]))
        for _ in range(draw.randrange(4)):
            at = draw.randrange(len(text) + 1)
            text[at : at + draw.randrange(3)] = draw.choice(["", *PIECES])
        for what in READ:
            _agree(what, "".join(text))


def _agree(what: str, text: str) -> None:
    parse, faults_of = READ[what]
    faults = faults_of(text)
    if faults:
        with pytest.raises(SpecError) as error:
            parse(text)
        assert list(error.value.faults) == faults
    else:
        assert _fields(parse(text), what) == _located(text, what)


def _fields(read, what: str) -> object:
    if what == "spec":
        return read.dims, read.axes, read.partial, read.reduced
    terms = [[([_fields(spec, "spec") for spec in o.specs], o.group) for o in term.operands]
             for term in (read.terms if what == "equation" else read)]  # fmt: skip
    return (terms, [_fields(spec, "spec") for spec in read.outputs], read.group) if what == "equation" else terms


def _located(text: str, what: str) -> object:
    """Return what the diagnosing reader makes of a text that has no faults."""
    if what == "spec":
        return _located_spec(Reader(text).spec())
    if what == "via":
        return _located_terms(EquationReader(text).terms())
    terms, ((result,),) = EquationReader(text).sides()
    return _located_terms(terms), [_located_spec(spec) for spec in result.specs], result.group


def _located_terms(terms) -> list:
    return [[([_located_spec(spec) for spec in o.specs], o.group) for o in term] for term in terms]


def _located_spec(spec) -> tuple:
    axes = tuple(tuple(axis.name for axis in dim.axes) for dim in spec.dims)
    sums = {spec.partial.name: tuple(sorted(axis.name for axis in spec.partial.axes))} if spec.partial else {}
    return tuple(spec.names), axes, sums.get("partialsum", ()), sums.get("reduced", ())


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_what_does_not_fit_has_a_fault_and_what_fits_has_none(data):
    text = data.draw(
        st.sampled_from(
            ["B_xE_yz", "B_xE partialsum-y", "BE reduced-yq", "BE_{data}", "", "B_?E_x", "partialsum-{data}"]
        )
    )
    spec = Spec.parse(text)
    size = st.sampled_from([0, 1, 2, 3, 4, 8, 12, -4, 2**39, 2**40, True, 2.0, None, "8"])
    mesh = data.draw(st.dictionaries(st.sampled_from(["x", "y", "z", "data"]), st.sampled_from([1, 2, 4])))
    given = data.draw(st.one_of(st.dictionaries(st.sampled_from("BEF"), size), st.lists(size, max_size=3).map(tuple)))
    found = spec.faults(given, mesh)  # what does not fit and has no fault would be an AssertionError
    if not found:
        with pytest.raises(AssertionError, match="no fault is found"):
            sizes.faults_of(spec, given, mesh)
        assert spec.is_open or len(spec.local_shape(given, mesh)) == len(spec.dims)
