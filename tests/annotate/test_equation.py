"""Equations: their meaning, and the exact wording of their errors."""

import copy
import pickle

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gspmd import Spec, SpecError
from gspmd.annotate import parse_equation, parse_via


def test_a_product():
    equation = parse_equation("BLE_xyz, E_xF_yz -> BLF_yzx")
    assert [str(o) for o in equation.operands] == ["BLE_xyz", "E_xF_yz"]
    assert equation.outputs == (Spec.parse("BLF_yzx"),)
    assert not equation.group
    assert not equation.is_move
    assert equation.text == "BLE_xyz, E_xF_yz -> BLF_yzx"


def test_a_move():
    assert parse_equation("BLE_xyz -> B_xyzLE").is_move
    assert parse_equation("B_xLE->E partialsum-x").is_move
    assert parse_equation("->").is_move


def test_a_group():
    equation = parse_equation("BLE_xyz, (E_xF_yz, E_xF_zy) -> (BLF_yzx, BLF_zyx)")
    assert equation.group
    assert [o.group for o in equation.operands] == [False, True]
    assert equation.operands[1].specs == (Spec.parse("E_xF_yz"), Spec.parse("E_xF_zy"))
    assert equation.outputs == (Spec.parse("BLF_yzx"), Spec.parse("BLF_zyx"))
    assert parse_equation("(EF, EF), BE -> (BF, BF)").operands[0].group


def test_a_sum():
    equation = parse_equation("BLF_yz, F_yzE_x + BLH_yzD, H_yzDE_x + BLE -> BLE_xyz")
    assert [len(term.operands) for term in equation.terms] == [2, 2, 1]
    assert [str(o) for o in equation.operands] == ["BLF_yz", "F_yzE_x", "BLH_yzD", "H_yzDE_x", "BLE"]
    assert not equation.is_move


@pytest.mark.parametrize(
    ("text", "operands", "canonical"),
    [
        ("A_x (partialsum-y), B -> A_xB partialsum-y", 2, "A_x partialsum-y, B -> A_xB partialsum-y"),
        ("C, (A_x (partialsum-y), B) -> (CA_x, CB)", 2, "C, (A_x partialsum-y, B) -> (CA_x, CB)"),
        ("A, (partialsum-x) -> A", 2, "A, partialsum-x -> A"),
        ("A, (partialsum-x, B) -> (A, AB)", 2, "A, (partialsum-x, B) -> (A, AB)"),
        ("A, ((partialsum-x), B) -> (A, AB)", 2, "A, (partialsum-x, B) -> (A, AB)"),
        ("A, ((partialsum-x)) -> (A)", 2, "A, ((partialsum-x)) -> (A)"),
        ("A, (B) -> (AB)", 2, "A, (B) -> (AB)"),
        (", A -> A", 2, ", A -> A"),
        ("A, -> A", 2, "A,  -> A"),
        ("A ->", 1, "A ->"),
        ("(partialsum-x)->", 1, "partialsum-x ->"),
        ("  A\n,B\t->  B A ", 2, "A, B -> BA"),
    ],
)
def test_parentheses_scalars_and_white_space(text, operands, canonical):
    equation = parse_equation(text)
    assert len(equation.operands) == operands
    assert str(equation) == canonical
    assert parse_equation(canonical) == equation
    assert hash(parse_equation(canonical)) == hash(equation)


def test_text_is_no_part_of_equality():
    assert parse_equation("A_{x},B->AB") == parse_equation("A_x, B -> AB")


def test_an_equation_that_is_read_stays_as_it_is():
    equation = parse_equation("A -> A_x")
    assert parse_equation(equation) is equation


SPEC = st.lists(st.sampled_from(["B", "L_x", "E_{y}", "F_z"]), unique=True).map("".join)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_canonical_text_parses_back(data):
    shared, others = data.draw(SPEC), data.draw(st.lists(SPEC, min_size=1, max_size=3))
    if data.draw(st.booleans()):
        results = [data.draw(st.sampled_from([shared, other])) for other in others]
        text = f"{shared}, ({', '.join(others)}) -> ({', '.join(results)})"
    else:
        text = " + ".join(f"{shared}, {other}" for other in others) + f" -> {shared}"
    assume("()" not in text)  # a group of one scalar is refused
    assert parse_equation(str(parse_equation(text))) == parse_equation(text)


def test_via():
    terms = parse_via("BLE_x, (E_xF, E_xF)")
    assert [str(o) for o in terms[0].operands] == ["BLE_x", "(E_xF, E_xF)"]
    assert len(parse_via("A, B + C, D")) == 2


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes():
    group = parse_equation("AB, (BC, BD) -> (AC, AD)")
    assert group.sizes([(2, 3), ((3, 4), (3, 5))]) == {"A": 2, "B": 3, "C": 4, "D": 5}
    assert parse_equation("AB, B + AC, C -> A").sizes([(2, 3), (3,), (2, 4), (4,)]) == {"A": 2, "B": 3, "C": 4}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            [(2, 3), (4, 4)],
            """\
cannot apply 'AB,BC->AC' to arrays of shapes (2, 3), (4, 4)
    AB,BC->AC
       ^^
  dimension B has size 4 here, and size 3 before.
  Arrays that share a dimension must agree on its size.""",
        ),
        (
            [(2, 3, 1), (4,)],
            """\
cannot apply 'AB,BC->AC' to arrays of shapes (2, 3, 1), (4,): 2 faults
    AB,BC->AC
    ^^
  the spec has 2 dimensions, and the array 3: (2, 3, 1).
  Write one capital letter for each dimension of the array.
    AB,BC->AC
       ^^
  the spec has 2 dimensions, and the array 1: (4,).
  Write one capital letter for each dimension of the array.""",
        ),
        (
            [(2, 3)],
            """\
cannot apply 'AB,BC->AC' to 1 operand
  Pass an array and an array.""",
        ),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(SpecError) as error:
        parse_equation("AB,BC->AC").sizes(shapes)
    assert str(error.value) == message


def test_a_group_takes_a_tuple():
    with pytest.raises(SpecError) as error:
        parse_equation("A, (A, A) -> (A, A)").sizes([(2,), ((2,),)])
    assert str(error.value) == (
        "cannot apply 'A, (A, A) -> (A, A)' to 2 operands\n  Pass an array and a tuple of 2 arrays."
    )


def test_check_points_into_the_equation():
    with pytest.raises(SpecError) as error:
        parse_equation("AB_x, B C -> AC_{data}").check({"A": 3, "B": 3, "C": 3}, {"x": 2, "dat": 2})
    assert (
        str(error.value)
        == """\
cannot shard 'AB_x, B C -> AC_{data}' for the sizes A=3, B=3, C=3: 2 faults
    AB_x, B C -> AC_{data}
     ^^^
  dimension B has size 3, which mesh axis x (size 2) does not divide.
  Use a size that is a multiple of 2 (2 or 4), or leave B unsharded: 'AB'.
    AB_x, B C -> AC_{data}
                  ^^^^^^^^
  the mesh has no axis data.
  Did you mean 'dat'? The mesh has x and dat."""
    )


# -- errors -----------------------------------------------------------------------------------------------------------

ARROW = "Write '->' and the spec of the result, as in 'A_x, B -> A_xB'."
UNREADABLE = {
    "BL, LE": [("      ^", "an equation has an arrow, but this text has none.", ARROW)],
    "": [("^", "an equation has an arrow, but this text has none.", ARROW)],
    "A -> A -> A": [("       ^^", "an equation has one arrow, and this is a second.", "Write two equations.")],
    "A => A_x": [("  ^^", "'=>' is not an arrow.", "Write the arrow '->'.")],
    "BL, LE -> BF": [
        ("           ^", "dimension F is in the result but in no operand.", "The operands have B, L, E."),
    ],
    "BL, LE + BF -> BE": [
        ("                ^", "dimension E is in the result but not in term 2.", "That term has B, F."),
    ],
    "B, (L, E) -> (BL, BL)": [
        ("                   ^", "dimension L is in the result but in no operand.", "The operands have B, E."),
    ],
    "BL_x, LE_y, EF -> BF_y": [
        (
            "            ^^",
            "a product has two operands, but this product has 3.",
            "Write one equation after the other: 'BL_x, LE_y -> BE_y' and 'BE_y, EF -> BF_y'.",
        ),
    ],
    "B_xL, L_xE_y, EF_y, FV -> B_xV": [
        (
            "              ^^^^^^^^",
            "a product has two operands, but this product has 4.",
            "Write one equation after the other: 'B_xL, L_xE_y -> B_xE_y' and 'B_xE_y, EF_y -> B_xF_y' and "
            "'B_xF_y, FV -> B_xV'.",
        ),
    ],
    "A_{data}, A_x, B -> A_xB": [
        (
            "               ^",
            "a product has two operands, but this product has 3.",
            "Write one equation after the other: 'A_{data}, A_x -> A_{data}' and 'A_{data}, B -> A_xB'.",
        ),
    ],
    "A, B, (C, D) -> (A, A)": [
        (
            "      ^^^^^^",
            "a product has two operands, but this product has 3.",
            "Write products of two operands, one equation after the other.",
        ),
    ],
    "A,, B -> A": [
        (" ^", "an operand is missing next to this comma, so that the product has 3 operands.", "Drop the comma."),
    ],
    "A, (B, C) + A, (B, C) -> (A, A)": [
        (
            "   ^^^^^^",
            "a group cannot be in a sum of products.",
            "Write one sum for each result: 'A, B + A, B -> A' and 'A, C + A, C -> A'.",
        ),
    ],
    "A, (B, C) + A -> (AB, AC)": [
        (
            "   ^^^^^^",
            "a group cannot be in a sum of products.",
            "Write one sum for each result: 'A, B + A -> AB' and 'A, C + A -> AC'.",
        ),
        ("                   ^", "dimension B is in the result but not in term 2.", "That term has A."),
        ("                       ^", "dimension C is in the result but not in term 2.", "That term has A."),
    ],
    "A, (B, C) + A -> A": [
        (
            "   ^^^^^^",
            "a group cannot be in a sum of products.",
            "Write the group as an equation of its own, and the sum as another.",
        ),
    ],
    "A, (A, A) -> A": [
        (
            "             ^",
            "an operand is a group of 2, but the result is one spec.",
            "Write a result for each: '(A, A)'.",
        ),
    ],
    "A, (A, A, A) -> (A, A)": [
        (
            "                ^^^^^^",
            "the result is a group of 2, but the operand is a group of 3.",
            "Write one result for each member of the operand.",
        ),
    ],
    "A, A -> (A, A)": [
        (
            "        ^^^^^^",
            "the result is a group, but no operand is a group.",
            "Write one spec, or a group in one operand.",
        ),
    ],
    "(A, A), (A, A) -> (A, A)": [
        (
            "        ^^^^^^",
            "a product has at most one group, and this is a second.",
            "Write an equation for each pair.",
        ),
    ],
    "(A, A) -> (A_x, A_x)": [
        ("^^^^^^", "a move is of one array, but a group is several arrays.", "Write an equation for each array."),
    ],
    "A, (A, A) -> A, A": [
        (
            "             ^^^^",
            "an equation has one result.",
            "The results of a group are written in parentheses: '(A, A)'.",
        ),
    ],
    "A -> A + A": [
        ("     ^^^^^", "a sum appears to the right of the arrow.", "Write the products to its left, and one result."),
    ],
    "A, ((A, A), A) -> (A, A, A)": [
        ("    ^^^^^^", "a group cannot be inside a group.", "Write all its specs in one pair of parentheses."),
    ],
    "A, () -> ()": [
        ("   ^^", "this group is empty.", "Write a group as '(A, B)'; write nothing for a scalar."),
        ("         ^^", "this group is empty.", "Write a group as '(A, B)'; write nothing for a scalar."),
    ],
    "A, (A, A -> A": [("   ^", "this parenthesis is not closed.", "Write a group as '(A, B)'.")],
    "A), A -> A": [
        (" ^", "this parenthesis closes nothing.", "Add the opening parenthesis, as in '(A, B)', or drop this one.")
    ],
    "A (A, A) -> (A, A)": [(" ^", "a comma is missing between 'A' and '(A, A)'.", "Write 'A, (A, A)'.")],
    "A, (A, A) B -> (A, A)": [
        ("         ^", "a comma is missing between '(A, A)' and 'B'.", "Write '(A, A), B'."),
        (
            "          ^",
            "a product has two operands, but this product has 3.",
            "Write products of two operands, one equation after the other.",
        ),
    ],
    "BLE_xyz E_xF_yz -> BLF": [
        ("       ^", "a comma is missing between 'BLE_xyz' and 'E_xF_yz'.", "Write 'BLE_xyz, E_xF_yz'."),
    ],
    "B_x L E   E F_x -> BLF": [
        ("       ^^^", "a comma is missing between 'B_x L E' and 'E F_x'.", "Write 'B_x L E, E F_x'."),
    ],
    "BL partialsum-x LE -> BE": [
        ("               ^", "a comma is missing between 'BL partialsum-x' and 'LE'.", "Write 'BL partialsum-x, LE'."),
    ],
    "BE, (EF EF) -> (BF BF)": [
        ("       ^", "a comma is missing between 'EF' and 'EF'.", "Write 'EF, EF'."),
        ("                  ^", "a comma is missing between 'BF' and 'BF'.", "Write 'BF, BF'."),
    ],
    "BLE_xyzE_xF_yz -> BLF": [
        (
            "       ^^^",
            "dimension E appears twice in one spec.",
            "Every dimension has a letter of its own; separate two operands with a comma: 'BLE_xyz, E_xF_yz'.",
        ),
    ],
    "BE, EF -> B BF": [
        ("            ^", "dimension B appears twice in one spec.", "Every dimension has a letter of its own."),
    ],
    "(BF,)": [
        ("   ^", "nothing follows this comma.", "Drop it: '(BF)'. A scalar as the last member is a space: '(BF, )'."),
        ("     ^", "an equation has an arrow, but this text has none.", ARROW),
    ],
    "BE, (EF,) -> (BF)": [
        (
            "       ^",
            "nothing follows this comma.",
            "Drop it: '(EF)'. A scalar as the last member is a space: '(EF, )'.",
        ),
    ],
    "BE, EF, -> BF": [
        ("      ^", "an operand is missing next to this comma, so that the product has 3 operands.", "Drop the comma."),
    ],
    ", BE, EF -> BF": [
        ("^", "an operand is missing next to this comma, so that the product has 3 operands.", "Drop the comma."),
    ],
    "BE, EF -> BF,": [
        (
            "            ^",
            "an operand is missing next to this comma, and an equation has one result.",
            "Drop the comma.",
        ),
    ],
    "A * B -> AB": [("  ^", "'*' is not a comma.", "Write a product with a comma, as in 'A, B -> AB'.")],
    "BE; EF -> BF": [("  ^", "';' is not a comma.", "Write a product with a comma, as in 'A, B -> AB'.")],
    "bl, LE_yy -> BE": [
        ("^^", "'bl' is neither a dimension nor the mesh axes of one.", "Dimensions are capital letters: write 'BL'."),
        ("       ^^", "mesh axis y appears twice in 'E_yy'.", "If 'yy' is the name of one mesh axis, write 'E_{yy}'."),
    ],
    "BL_xx, LE -> BG": [
        ("   ^^", "mesh axis x appears twice in 'L_xx'.", "If 'xx' is the name of one mesh axis, write 'L_{xx}'."),
        ("              ^", "dimension G is in the result but in no operand.", "The operands have B, L, E."),
    ],
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_an_equation_that_cannot_be_read(text):
    with pytest.raises(SpecError) as error:
        parse_equation(text)
    faults = UNREADABLE[text]
    head = f"cannot read the equation {text!r}" + (f": {len(faults)} faults" if len(faults) > 1 else "")
    blocks = [f"    {text}\n    {caret}\n  {fact}\n  {remedy}" for caret, fact, remedy in faults]
    assert str(error.value) == "\n".join([head, *blocks]).replace("    \n", "\n")


WRONG_ARROWS = [
    "→", "⟶", "⇒", "↦", "-->", "=>", "==>", "- >", "-→", "−>", "~>", "|->", ">", "<-", "=", "−", "--", ":", "\\to",
]  # fmt: skip


@pytest.mark.parametrize("arrow", WRONG_ARROWS)
def test_an_arrow_of_another_kind_is_all_that_is_wrong(arrow):
    with pytest.raises(SpecError) as error:
        parse_equation(f"BE, EF {arrow} BF")
    (fault,) = error.value.faults
    assert (fault.start, fault.end) == (7, 7 + len(arrow))
    assert (fault.fact, fault.remedy) == (f"{arrow!r} is not an arrow.", "Write the arrow '->'.")


def test_parentheses_without_end_are_read():
    for text in ("(" * 1200, "A, " + "(" * 1200 + ")" * 300 + " -> A"):
        with pytest.raises(SpecError):
            parse_equation(text)


def test_an_equation_can_be_kept():
    equation = parse_equation("BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)")
    for copied in (pickle.loads(pickle.dumps(equation)), copy.copy(equation), copy.deepcopy(equation)):
        assert copied == equation
        assert hash(copied) == hash(equation)
        assert (copied.text, copied.spans) == (equation.text, equation.spans)


@pytest.mark.parametrize("shapes", [None, 5, [5], [None, None], [(2, 3), 4], "ab"])
def test_what_gives_no_shapes(shapes):
    with pytest.raises(SpecError, match="Write a tuple for each operand, and a tuple of tuples for a group"):
        parse_equation("AB, (BC, BD) -> (AC, AD)").sizes(shapes)


@pytest.mark.parametrize("sizes", [None, 5, (2, 3)])
def test_what_gives_no_sizes(sizes):
    with pytest.raises(SpecError, match="cannot shard 'A -> A_x' for the sizes"):
        parse_equation("A -> A_x").check(sizes, {"x": 2})


@pytest.mark.parametrize("text", [t for t in UNREADABLE if "one equation after the other" in UNREADABLE[t][0][2]])
def test_the_equations_that_a_remedy_proposes_can_be_read(text):
    for proposed in UNREADABLE[text][0][2].split("'")[1::2]:
        parse_equation(proposed)


def test_an_arrow_in_via():
    with pytest.raises(SpecError) as error:
        parse_via("A, B -> AB")
    assert (
        str(error.value)
        == """\
cannot read via='A, B -> AB'
    A, B -> AB
         ^^
  via= has only the operands' specs, without an arrow.
  Write the left side of the equation only."""
    )


@pytest.mark.parametrize(
    ("parse", "what", "example"),
    [
        (parse_equation, "an equation", "A_x, B -> A_xB"),
        (parse_via, "the specs of via=", "BLE_x, E_xF_yz"),
    ],
)
def test_what_is_no_text(parse, what, example):
    with pytest.raises(SpecError) as error:
        parse(3)
    assert (
        str(error.value)
        == f"cannot read {what} from 3: it is not a string (int).\n  Write a string such as {example!r}."
    )


@pytest.mark.parametrize("sizes", [{"B": [4], "E": 8, "F": 8}, {"B": 3, "E": 8, "F": 8}, {"E": 8, "F": 8}])
def test_one_wrong_size_is_one_fault_wherever_its_dimension_stands(sizes):
    with pytest.raises(SpecError) as error:
        parse_equation("B_xE, EF -> B_xF").check(sizes, {"x": 2})
    (fault,) = error.value.faults
    assert (fault.start, fault.end) == (0, 3)
    assert fault.remedy.endswith("\n  The same in 1 more place: 'B_x'.")


def test_the_repr_of_an_equation_is_the_equation():
    assert repr(parse_equation("B_xE,EF_y -> B_xF_y")) == "<Equation 'B_xE, EF_y -> B_xF_y'>"
