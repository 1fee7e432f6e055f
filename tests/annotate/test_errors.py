"""The exact wording of every error about a single spec."""

import numpy as np
import pytest

import gspmd
from gspmd import LayoutError, PlanError, Spec, SpecError
from gspmd.annotate import Fault, report
from gspmd.annotate.errors import shown

UNREADABLE = {
    "B_xLE_q!": [
        ("       ^", "'!' has no meaning in a spec.", "A spec is written as 'B_xLE_yz'."),
    ],
    "ble_x": [
        (
            "^^^^^",
            "'ble_x' is neither a dimension nor the mesh axes of one.",
            "Dimensions are capital letters: write 'BLE_x'.",
        ),
    ],
    "BLEx": [
        ("   ^", "'x' is neither a dimension nor the mesh axes of one.", "To shard dimension E, write 'E_x'."),
    ],
    "BLEdata": [
        (
            "   ^^^^",
            "'data' is neither a dimension nor the mesh axes of one.",
            "To shard dimension E, write 'E_{data}'.",
        ),
    ],
    "BLE_x y": [
        (
            "      ^",
            "'y' is neither a dimension nor the mesh axes of one.",
            "Write the mesh axes of dimension E together: 'E_xy'.",
        ),
    ],
    "BLE_x_y": [
        ("     ^^", "dimension E has a second '_'.", "Write the mesh axes of dimension E together: 'E_xy'."),
    ],
    "BLE _x": [
        ("    ^^", "a space separates dimension E from '_x'.", "Write 'E_x'."),
    ],
    "_": [
        ("^", "'_' follows no dimension.", "Write the dimension first: 'E_x'."),
    ],
    "BLE_": [
        ("  ^^", "'E_' names no mesh axis.", "Write 'E_x', or 'E' alone where it is unsharded."),
    ],
    "B_LE": [
        ("^^", "'B_' names no mesh axis.", "Write 'B_x', or 'B' alone where it is unsharded."),
    ],
    "BLB_x": [
        ("  ^^^", "dimension B appears twice in one spec.", "Every dimension has a letter of its own."),
    ],
    "B_xLE_yx": [
        (
            "       ^",
            "mesh axis x shards dimension B and dimension E as well.",
            "A mesh axis shards one dimension of a tensor: drop it from one of them.",
        ),
    ],
    "B_xLE partialsum-yx": [
        (
            "                  ^",
            "mesh axis x shards dimension B and belongs to the partial sum as well.",
            "Each mesh axis appears once in a spec: drop it from one of the two.",
        ),
    ],
    "BLE_data": [
        (
            "    ^^^^",
            "mesh axis a appears twice in 'E_data'.",
            "If 'data' is the name of one mesh axis, write 'E_{data}'.",
        ),
    ],
    "BLE_xyxy": [
        (
            "    ^^^^",
            "mesh axes x and y appear twice in 'E_xyxy'.",
            "If 'xyxy' is the name of one mesh axis, write 'E_{xyxy}'.",
        ),
    ],
    "BLE_{data,data}": [
        ("    ^^^^^^^^^^^", "mesh axis data appears twice in 'E_{data,data}'.", "Name each mesh axis once."),
    ],
    "BLE partialsum-data": [
        (
            "               ^^^^",
            "mesh axis a appears twice in 'partialsum-data'.",
            "If 'data' is the name of one mesh axis, write 'partialsum-{data}'.",
        ),
    ],
    "BLE_x1": [
        (
            "    ^^",
            "'x1' has a digit, and without braces every mesh axis is one letter.",
            "If it is one name, write 'E_{x1}'.",
        ),
    ],
    "BLE_{}": [
        (
            "    ^^",
            "the braces after 'E_' hold an empty name.",
            "Name the mesh axes of dimension E, as in 'E_{data,model}'.",
        ),
    ],
    "BLE_{data,}": [
        (
            "    ^^^^^^^",
            "the braces after 'E_' hold an empty name.",
            "Name the mesh axes of dimension E, as in 'E_{data,model}'.",
        ),
    ],
    "BLE_{data": [
        ("    ^^^^^", "the brace after 'E_' is not closed.", "Write 'E_{data,model}'."),
    ],
    "BLE_{data}x": [
        (
            "    ^^^^^^^",
            "dimension E has mesh axes inside braces and outside.",
            "Write them all in one pair of braces: 'E_{data,x}'.",
        ),
    ],
    "BLE_{Data}": [
        (
            "     ^^^^",
            "'Data' is not the name of a mesh axis.",
            "A name is a lower-case letter, then lower-case letters, digits and '_'.",
        ),
    ],
    "BLE_x?": [
        (
            "    ^^",
            "'?' leaves all of dimension E to the compiler, so no mesh axis goes with it.",
            "Write 'E_?' or 'E_x'.",
        ),
    ],
    "BLE_{?,data}": [
        (
            "    ^^^^^^^^",
            "'?' leaves all of dimension E to the compiler, so no mesh axis goes with it.",
            "Write 'E_?' or 'E_{data}'.",
        ),
    ],
    "BLE ?": [
        ("    ^", "'?' has no meaning in a spec.", "Write 'E_?' to leave dimension E to the compiler."),
    ],
    "BLE partialsum-?": [
        ("               ^", "a partial sum names its mesh axes: it cannot be left open.", "Write 'partialsum-x'."),
    ],
    "BLE partialsum-": [
        ("    ^^^^^^^^^^^", "'partialsum-' names no mesh axis.", "Write 'partialsum-x'."),
    ],
    "BLE partial-x": [
        (
            "    ^^^^^^^^^",
            "'partial-x' is neither a dimension nor the mesh axes of one.",
            "A partial sum is written 'partialsum-x'.",
        ),
    ],
    "BLE partialsum_x": [
        (
            "    ^^^^^^^^^^^^",
            "'partialsum_x' is neither a dimension nor the mesh axes of one.",
            "A partial sum is written 'partialsum-x'.",
        ),
    ],
    "BLE (partialsum-x": [
        (
            "    ^^^^^^^^^^^^^",
            "the parenthesis of this partial sum is not closed.",
            "Write it 'partialsum-x' or '(partialsum-x)'.",
        ),
    ],
    "BLE partialsum-x partialsum-y": [
        (
            "                 ^^^^^^^^^^^^",
            "a spec has one partial sum, and this is a second.",
            "Write the mesh axes of both together: 'partialsum-xy'.",
        ),
    ],
    "BLE partialsum-x reduced-y": [
        (
            "                 ^^^^^^^^^",
            "a spec ends in 'partialsum-' or in 'reduced-', but this spec has both.",
            "Leave one of them out.",
        ),
    ],
    "B_xE reduced-x": [
        (
            "             ^",
            "mesh axis x shards dimension B and belongs to 'reduced-' as well.",
            "Each mesh axis appears once in a spec: drop it from one of the two.",
        ),
    ],
    "BL partialsum-x E": [
        (
            "                ^",
            "dimension E appears after the partial sum.",
            "Write every dimension first: the partial sum ends a spec.",
        ),
    ],
    "BL, LE": [
        ("  ^", "',' belongs to an equation, but a spec is one tensor.", "Write one spec, as in 'B_xLE_yz'."),
    ],
    "BL -> B": [
        ("   ^^", "'->' belongs to an equation, but a spec is one tensor.", "Write one spec, as in 'B_xLE_yz'."),
    ],
    "B...E": [
        (" ^^^", "'...' has no meaning in a spec.", "Write out every dimension."),
    ],
    "É_x": [
        ("^", "'É' has no meaning in a spec.", "A spec is written as 'B_xLE_yz'."),
        (" ^^", "'_x' follows no dimension.", "Write the dimension first: 'E_x'."),
    ],
    "\u0392LE_\u0445": [  # a Greek B and a Cyrillic x
        ("^", "'\u0392' is GREEK CAPITAL LETTER BETA, not the letter B.", "Type 'B'."),
        ("    ^", "'\u0445' is CYRILLIC SMALL LETTER HA, not the letter x.", "Type 'x'."),
    ],
    "b L_xx M_{ N_x": [
        ("^", "'b' is neither a dimension nor the mesh axes of one.", "Dimensions are capital letters: write 'B'."),
        ("    ^^", "mesh axis x appears twice in 'L_xx'.", "If 'xx' is the name of one mesh axis, write 'L_{xx}'."),
        ("         ^^^^^", "the brace after 'M_' is not closed.", "Write 'M_{data,model}'."),
    ],
}


def _message(doing: str, text: str, faults: list[tuple[str, str, str]]) -> str:
    head = doing if len(faults) == 1 else f"{doing}: {len(faults)} faults"
    return "\n".join([head, *(f"    {text}\n    {caret}\n  {fact}\n  {remedy}" for caret, fact, remedy in faults)])


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_spec_that_cannot_be_read(text):
    with pytest.raises(SpecError) as error:
        Spec.parse(text)
    assert str(error.value) == _message(f"cannot read the spec {text!r}", text, UNREADABLE[text])
    assert error.value.__cause__ is None


@pytest.mark.parametrize(("value", "name"), [(None, "NoneType"), (3, "int"), (b"BLE", "bytes"), (["B"], "list")])
def test_what_is_no_text(value, name):
    with pytest.raises(SpecError) as error:
        Spec.parse(value)
    assert str(error.value) == (
        f"cannot read a spec from {value!r}: it is not a string ({name}).\n  Write a string such as 'B_xLE_yz'."
    )


def test_sizes_that_do_not_divide():
    with pytest.raises(SpecError) as error:
        Spec.parse("B_xLE").check((6, 128, 512), {"x": 4})
    assert (
        str(error.value)
        == """\
cannot shard 'B_xLE' for an array of shape (6, 128, 512)
    B_xLE
    ^^^
  dimension B has size 6, which mesh axis x (size 4) does not divide.
  Use a size that is a multiple of 4 (4 or 8), or leave B unsharded: 'BLE'."""
    )


def test_every_fault_of_the_fit_is_listed():
    with pytest.raises(SpecError) as error:
        Spec.parse("B_xL_{modle}E_yz partialsum-q").local_shape({"B": -6, "E": 6}, {"x": 4, "y": 2, "z": 2, "model": 2})
    assert (
        str(error.value)
        == """\
cannot shard 'B_xL_{modle}E_yz partialsum-q' for the sizes B=-6, E=6: 5 faults
    B_xL_{modle}E_yz partialsum-q
       ^^^^^^^^^
  the mesh has no axis modle.
  Did you mean 'model'? The mesh has x, y, z and model.
    B_xL_{modle}E_yz partialsum-q
                     ^^^^^^^^^^^^
  the mesh has no axis q.
  The mesh has x, y, z and model.
    B_xL_{modle}E_yz partialsum-q
    ^^^
  dimension B has size -6.
  A size is a whole number of at least 0.
    B_xL_{modle}E_yz partialsum-q
       ^^^^^^^^^
  dimension L has no size.
  Sizes are given for B and E.
    B_xL_{modle}E_yz partialsum-q
                ^^^^
  dimension E has size 6, which mesh axes y and z (size 2·2 = 4) do not divide.
  Use a size that is a multiple of 4 (4 or 8), or leave E unsharded: 'B_xL_{modle}E partialsum-q'."""
    )


def test_another_number_of_dimensions():
    with pytest.raises(SpecError) as error:
        Spec.parse("B_xLE").check((8, 128), {"x": 4})
    assert (
        str(error.value)
        == """\
cannot shard 'B_xLE' for an array of shape (8, 128)
    B_xLE
    ^^^^^
  the spec has 3 dimensions, and the array 2: (8, 128).
  Write one capital letter for each dimension of the array."""
    )


@pytest.mark.parametrize(
    ("text", "name", "written"),
    [
        ("BE_model", "model", "E_{model}"),
        ("B partialsum-mp", "mp", "partialsum-{mp}"),
        ("B partialsum-pm", "mp", "partialsum-{mp}"),
    ],
)
def test_letters_that_spell_the_name_of_a_mesh_axis(text, name, written):
    with pytest.raises(SpecError) as error:
        Spec.parse(text).check(dict.fromkeys("BE", 8), {name: 2, "x": 2})
    assert len(error.value.faults) == 1
    assert error.value.faults[0].remedy == f"The name of one mesh axis is written in braces: '{written}'."


def test_a_dimension_left_open_has_no_local_size():
    with pytest.raises(SpecError) as error:
        Spec.parse("B_xE_?").local_shape((8, 8), {"x": 2})
    assert (
        str(error.value)
        == """\
cannot tell the local shape of 'B_xE_?'
    B_xE_?
       ^^^
  dimension E is left open, so its local size is not known."""
    )


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("x=4", "cannot read a mesh from 'x=4'.\n  Write {'x': 4, 'y': 2}, or pass a jax.sharding.Mesh."),
        ({"x": 0}, "mesh axis x has size 0.\n  The size of a mesh axis is a whole number, 1 or more."),
        ({"x": 2.0}, "mesh axis x has size 2.0.\n  The size of a mesh axis is a whole number, 1 or more."),
    ],
)
def test_what_is_no_mesh(mesh, message):
    with pytest.raises(SpecError) as error:
        Spec.parse("B_x").check((8,), mesh)
    assert str(error.value) == message


@pytest.mark.parametrize("kind", [SpecError, PlanError, LayoutError])
def test_every_kind_is_a_value_error_with_its_faults(kind):
    error = report(kind, "cannot", [Fault("B\tL", 2, 3, "fact.")])
    assert isinstance(error, ValueError)
    assert str(error) == "cannot\n    B L\n      ^\n  fact."
    assert error.faults[0].fact == "fact."


def test_many_faults_are_counted_and_a_long_text_is_cut_around_the_caret():
    with pytest.raises(SpecError) as error:
        Spec.parse("A" * 3000)
    message = str(error.value)
    assert len(message) < 8000
    assert len(error.value.faults) == 2999
    assert message.splitlines()[-1] == "  … and 2,987 more."
    late = str(Fault("A" * 1000 + "!" + "B" * 1000, 1000, 1001, "fact."))
    notation, caret, _ = late.splitlines()
    assert len(notation) < 180
    assert notation[caret.index("^")] == "!"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"x": 4}, "{'x': 4}"),
        (object(), "an object"),
        ("A" * 200, repr("A" * 99 + "…")),
        ("a\nb", r"'a\nb'"),
        (np.ones((2, 3)), "an array of float64, of shape (2, 3)"),
        (list(range(100)), "a list"),
        (10**24, str(10**24)),
    ],
)
def test_what_is_given_is_shown_on_one_short_line(value, said):
    assert shown(value) == said


def test_numbers_that_python_itself_does_not_write_are_shown_too():
    assert shown(-(10**5000)) == "about -10^5000"
    assert shown({"x": 10**5000}) == "a dict"
    sizes, mesh = {"B": 10**5000, "E": 8}, {"x": 2}
    for call in (
        lambda: gspmd.plan("B_xE -> BE", sizes=sizes, mesh=mesh),
        lambda: gspmd.plan("B_xE -> BE", sizes={"B": 8, "E": 8}, mesh={"x": 10**5000}),
        lambda: Spec.parse("B_x").local_shape((10**5000,), mesh),
        lambda: gspmd.Layout.load("megatron-1d").check(sizes, {"x": 2, "y": 4}),
    ):
        with pytest.raises(ValueError, match=r"about 10\^5000") as error:
            call()
        assert isinstance(error.value, (SpecError, LayoutError))
