"""Specs: their meaning, reading, equality, the canonical text, editing, and the part that one device holds."""

import copy
import pickle
import string

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspmd import Spec, SpecError

P = jax.P
NAMES = [*string.ascii_lowercase, "data", "model", "fsdp_0", "x1"]


@st.composite
def specs(draw) -> Spec:
    """Any spec: its mesh axes dealt out to the dimensions and to the partial sum."""
    dims = draw(st.lists(st.sampled_from(string.ascii_uppercase), unique=True, max_size=5))
    axes = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6))
    hands = {axis: draw(st.integers(0, len(dims))) for axis in axes}
    placed = [tuple(a for a in axes if hands[a] == at) for at in range(len(dims) + 1)]
    left_open = [draw(st.booleans()) and not placed[at] for at in range(len(dims))]
    return Spec(tuple(dims), tuple(("?",) if o else p for o, p in zip(left_open, placed)), placed[-1])


@settings(deadline=None, max_examples=200)
@given(specs())
def test_canonical_text_parses_back(spec):
    assert Spec.parse(str(spec)) == spec
    assert str(Spec.parse(str(spec))) == str(spec)
    assert hash(Spec.parse(str(spec))) == hash(spec)


@settings(deadline=None, max_examples=100)
@given(specs(), st.lists(st.sampled_from(["", " ", "\t", "  "]), min_size=8, max_size=8))
def test_white_space_between_dims_means_nothing(spec, spaces):
    braced = ["{" + ",".join(axes) + "}" if axes and axes != ("?",) else "?" for axes in spec.axes]
    pieces = [d + ("_" + b if axes else "") for d, axes, b in zip(spec.dims, spec.axes, braced)]
    if spec.partial:
        pieces.append("( partialsum-{" + " , ".join(reversed(spec.partial)) + "} )")
    text = "".join(space + piece for space, piece in zip(spaces, pieces)) + spaces[-1]
    assert Spec.parse(text) == spec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("B_xLE_yz", "B_xLE_yz"),
        (" B_x  L E_yz ", "B_xLE_yz"),
        ("E_{x,y}", "E_xy"),
        ("E_{ data , x }", "E_{data,x}"),
        ("E_{data}", "E_{data}"),
        ("BLE_x(partialsum-zy)", "BLE_x partialsum-yz"),
        ("BLE_x ( partialsum-{y,data} )", "BLE_x partialsum-{data,y}"),
        ("BLEpartialsum-x", "BLE partialsum-x"),
        ("BLE_x(reduced-{zy})", "BLE_x reduced-{zy}"),
        ("reduced-yx", "reduced-xy"),
        ("", ""),
        ("  ", ""),
        ("partialsum-x", "partialsum-x"),
        ("(partialsum-x)", "partialsum-x"),
        ("BLE_?", "BLE_?"),
        ("E_{?}", None),
    ],
)
def test_canonical_text(text, canonical):
    if canonical is None:
        with pytest.raises(SpecError, match="no mesh axis goes with it"):
            Spec.parse(text)
    else:
        assert str(Spec.parse(text)) == canonical


def test_order_of_axes_is_meaning_except_in_a_partial_sum():
    assert Spec.parse("E_xy") != Spec.parse("E_yx")
    assert Spec.parse("E partialsum-xy") == Spec.parse("E partialsum-yx")
    assert Spec.parse("BE") != Spec.parse("EB")


def test_fields():
    spec = Spec.parse("B_xLE_yz partialsum-w")
    assert spec.dims == ("B", "L", "E")
    assert spec.axes == (("x",), (), ("y", "z"))
    assert spec.partial == ("w",)
    assert spec.axes_of("E") == ("y", "z")
    assert spec.used == {"x", "y", "z"}
    assert not spec.is_open
    assert Spec.parse("B_?L").is_open
    assert Spec.parse("B_?L").used == frozenset()
    assert Spec.parse(spec) is spec


def test_editing():
    spec = Spec.parse("B_xLE_yz partialsum-w")
    assert str(spec.with_axes("L", ["q"])) == "B_xL_qE_yz partialsum-w"
    assert str(spec.with_axes("E", ())) == "B_xLE partialsum-w"
    assert str(spec.without_partial()) == "B_xLE_yz"
    assert str(spec.with_partial("vu")) == "B_xLE_yz partialsum-uv"
    assert str(spec.without("E", "B")) == "L partialsum-w"
    assert str(spec.rename({"B": "G", "Z": "A"})) == "G_xLE_yz partialsum-w"
    with pytest.raises(SpecError, match="dimension Q does not appear in 'B_xLE_yz partialsum-w'"):
        spec.axes_of("Q")


@pytest.mark.parametrize(
    ("dims", "axes", "partial"),
    [
        ("BB", [(), ()], ()),
        ("BL", [("x",), ("x",)], ()),
        ("B", [("x",)], ("x",)),
        ("b", [()], ()),
        ("B", [("data,x",)], ()),
        ("B", [], ()),
        ("B", [("?", "x")], ()),
    ],
)
def test_no_spec_is_made_that_no_text_means(dims, axes, partial):
    with pytest.raises(SpecError, match="cannot make a Spec of dims="):
        Spec(tuple(dims), tuple(axes), partial)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B_xLE_yz", P("x", None, ("y", "z"))),
        ("E_{data}", P("data")),
        ("", P()),
        ("BE_?", P(None, P.UNCONSTRAINED)),
        ("B_xE partialsum-yz", P("x", None, unreduced={"y", "z"})),
    ],
)
def test_partition_spec(text, expected):
    assert Spec.parse(text).partition_spec() == expected


def test_partition_spec_of_a_cotangent():
    assert Spec.parse("B_xE partialsum-y").cotangent.partition_spec() == P("x", None, reduced={"y"})
    assert Spec.parse("B_xE reduced-y").cotangent == Spec.parse("B_xE partialsum-y")


@pytest.mark.parametrize("text", ["BLE", "B_xLE_yz", "BL_zE_xy", "B_zyxLE", "BLE partialsum-xz", "BLE reduced-xz"])
def test_local_shape_is_what_jax_holds(text):
    spec, shape, sizes = Spec.parse(text), (8, 16, 24), {"x": 2, "y": 2, "z": 2}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))
    expected = jax.NamedSharding(mesh, spec.without_partial().partition_spec()).shard_shape(shape)
    assert spec.local_shape(shape, sizes) == spec.local_shape(shape, mesh) == expected
    assert spec.local_shape(dict(zip("BLE", shape)), mesh) == expected


def test_a_size_of_zero_and_an_axis_of_size_one_fit():
    assert Spec.parse("B_xE_y").local_shape((0, 3), {"x": 4, "y": 1}) == (0, 3)


@pytest.mark.parametrize(
    ("size", "parts", "named"),
    [
        (1, 2, [2]),
        (3, 2, [2, 4]),
        (7, 4, [4, 8]),
        (9, 4, [8, 12]),
        (6, 5, [5, 10]),
    ],
)
def test_the_sizes_that_an_error_names_would_fit(size, parts, named):
    with pytest.raises(SpecError) as error:
        Spec.parse("B_x").check((size,), {"x": parts})
    assert f"({' or '.join(map(str, named))})" in error.value.faults[0].remedy
    assert [Spec.parse("B_x").local_shape((n,), {"x": parts}) for n in named] == [(n // parts,) for n in named]


@pytest.mark.parametrize("text", ["B_xLE_yz partialsum-w", "", "E_{data,model}", "B_xE_?"])
def test_a_spec_can_be_kept(text):
    spec = Spec.parse(text)
    assert isinstance(spec.used, frozenset)  # which is worked out once, and kept
    for copied in (pickle.loads(pickle.dumps(spec)), copy.copy(spec), copy.deepcopy(spec)):
        assert copied == spec
        assert hash(copied) == hash(spec)
        assert str(copied) == str(spec)


SPEC = Spec.parse("B_xE")
WRONG = {
    "no sizes": lambda: SPEC.local_shape(None, {"x": 2}),
    "a size alone": lambda: SPEC.check(8, {"x": 2}),
    "sizes as text": lambda: SPEC.check("BE", {"x": 2}),
    "sizes of numbers": lambda: SPEC.check({1: 8, 2: 8}, {"x": 2}),
    "a size in a list": lambda: SPEC.check({"B": [8], "E": 8}, {"x": 2}),
    "no mesh": lambda: SPEC.local_shape((8, 8), None),
    "a mesh of numbers": lambda: SPEC.local_shape((8, 8), {0: 2}),
    "another dimension": lambda: SPEC.axes_of("Z"),
    "no dimension": lambda: SPEC.axes_of(None),
    "a list of dimensions": lambda: SPEC.axes_of(["B"]),
    "no axes": lambda: SPEC.with_axes("E", None),
    "an axis that is a number": lambda: SPEC.with_axes("E", (5,)),
    "no partial sum": lambda: SPEC.with_partial(None),
    "no such dimension to drop": lambda: SPEC.without("Z"),
    "no names": lambda: SPEC.rename(None),
    "a name that is none": lambda: SPEC.rename({"B": 3}),
    "made of nothing": lambda: Spec(None, None),
    "made of numbers": lambda: Spec((1, 2), ((), ())),
    "made of lists": lambda: Spec((["B"],), ((),)),
    "partial sums of two types": lambda: Spec(("B",), ((),), (1, "x")),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_another_type_is_refused(call):
    with pytest.raises(SpecError) as error:
        call()
    assert error.value.__cause__ is None
    assert str(error.value).count("\n") >= 1  # the fact, and below it what to write


def test_sizes_of_numpy_are_whole_numbers():
    assert SPEC.local_shape((np.int32(2**31 - 2), np.int32(4)), {"x": np.int32(2)}) == (2**30 - 1, 4)
    assert all(type(size) is int for size in SPEC.local_shape((np.int32(8), np.int64(4)), {"x": np.int32(2)}))
