"""Plans against bytes worked out by hand from the papers' formulas; pins, dtypes, costs, wording of errors."""

import copy
import json
import pickle
import warnings

import numpy as np
import pytest

import gspmd
from gspmd import PlanError, Spec, SpecError
from gspmd.annotate import parse_equation
from gspmd.hardware.chips import CHIPS
from gspmd.lowerings.names import LOWERINGS

B, E, F, H, D = 512, 18432, 73728, 64, 256
PALM = {"B": B, "L": 1, "E": E, "F": F, "H": H, "D": D}
CUBE = {"x": 4, "y": 4, "z": 4}
LINE = {"x": 4}
LAST = 2  # bytes of a bfloat16


def _plan(equation: str, mesh=CUBE, via=None, **options) -> gspmd.Plan:
    letters = {c for c in equation if c.isupper()}
    return gspmd.plan(equation, {d: n for d, n in PALM.items() if d in letters}, mesh, via=via, **options)


def _chain(plan: gspmd.Plan) -> list[tuple[str, str, int]]:
    return [(step.kind, "".join(step.axes), step.wire_bytes) for step in plan.steps if step.is_collective]


def _sent(elements: float, group: int, passes: int = 1) -> int:
    """Bytes of a collective whose larger buffer has so many elements."""
    return int(LAST * passes * elements * (group - 1) // group)


BY_HAND = [
    pytest.param(
        "BLE_xyz, E_xF_yz -> BLF_yzx",
        CUBE,
        None,
        [("all-gather", "yz", _sent(B * E / 4, 16)), ("reduce-scatter", "x", _sent(B * F / 16, 4))],
        id="weight-stationary 2D, in",
    ),
    pytest.param(
        "BLF_yzx, F_yzE_x -> BLE_xyz",
        CUBE,
        None,
        [("all-gather", "x", _sent(B * F / 16, 4)), ("reduce-scatter", "yz", _sent(B * E / 4, 16))],
        id="weight-stationary 2D, out",
    ),
    pytest.param(
        "BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)",
        CUBE,
        None,
        [("all-gather", "yz", _sent(B * E / 4, 16))] + 2 * [("reduce-scatter", "x", _sent(B * F / 16, 4))],
        id="weight-stationary 2D, gated: the input is gathered once",
    ),
    pytest.param(
        "BLF_yz, F_yzE_x + BLH_yzD, H_yzDE_x -> BLE_xyz",
        CUBE,
        None,
        [("reduce-scatter", "yz", _sent(B * E / 4, 16))],
        id="parallel block: two products settle once",
    ),
    pytest.param(
        "BLE_xyz, EF_xyz -> BLF_xyz",
        CUBE,
        None,
        [("all-gather", "xyz", _sent(B * E, 64))],
        id="weight-stationary 1D, in",
    ),
    pytest.param("BLF_xyz, F_xyzE -> BLE_xyz", CUBE, None, [("reduce-scatter", "xyz", _sent(B * E, 64))], id="1D, out"),
    pytest.param(
        "B_xLE_yz, E_xF_yz -> B_xLF_yz",
        CUBE,
        "B_xLE, EF_yz",
        [("all-gather", "yz", _sent(B * E / 4, 16)), ("all-gather", "x", _sent(E * F / 16, 4))],
        id="weight-gathered X",
    ),
    # Scaling book, chapter 3: the four cases of a sharded matrix product.
    pytest.param("B_xE, EF -> B_xF", LINE, "B_xE, EF", [], id="no contracting dimension sharded"),
    pytest.param("BE_x, EF -> BF", LINE, "BE, EF", [("all-gather", "x", _sent(B * E, 4))], id="one of them sharded"),
    pytest.param("BE_x, E_xF -> BF", LINE, "BE_x, E_xF", [("all-reduce", "x", _sent(B * F, 4, 2))], id="both sharded"),
    pytest.param("BE_x, E_xF -> BF_x", LINE, None, [("reduce-scatter", "x", _sent(B * F, 4))], id="both, scattered"),
    pytest.param("B_xE, EF_x -> B_xF", LINE, "B_xE, EF", [("all-gather", "x", _sent(E * F, 4))], id="one axis twice"),
    pytest.param("BE_x, E_xF -> BF partialsum-x", LINE, None, [], id="a sum left partial"),
    pytest.param("BF partialsum-x -> BF_x", LINE, None, [("reduce-scatter", "x", _sent(B * F, 4))], id="a sum settled"),
    pytest.param("BE_x -> B_xE", LINE, None, [("all-to-all", "x", _sent(B * E / 4, 4))], id="another dimension"),
]


@pytest.mark.parametrize(("equation", "mesh", "via", "chain"), BY_HAND)
def test_bytes_by_hand(equation, mesh, via, chain):
    plan = _plan(equation, mesh, via)
    assert _chain(plan) == chain
    assert plan.wire_bytes == sum(sent for *_, sent in chain)


@pytest.mark.parametrize("chip", ["tpu-v4", "tpu7x"])
def test_weights_sharded_on_two_dimensions_are_brought_to_one_where_a_gather_uses_both_axes(chip):
    """An all-to-all of the shard puts all that is gathered on one dimension: so one gather runs over both rings."""
    sizes = {"E": E, "F": F}
    steps = gspmd.plan("E_xF_zy -> EF_z", sizes, CUBE, chip=chip).steps
    assert [step.kind for step in steps] == ["all-to-all", "all-gather"]
    assert steps[0].wire_bytes == _sent(E * F / 64, 4)
    assert steps[1].wire_bytes == E * F // 4 * LAST - E * F * LAST // 64


def test_weights_sharded_on_two_dimensions_are_gathered_in_turn_where_a_gather_uses_one_axis():
    """A v4 gathers few bytes over two axes round one ring."""
    sizes = {"E": 1024, "F": 4096}
    for after, parts in (("EF_z", 4), ("EF", 1)):
        steps = gspmd.plan(f"E_xF_zy -> {after}", sizes, CUBE, chip="tpu-v4").steps
        assert [step.kind for step in steps] == ["all-gather", "all-gather"]
        assert sum(step.wire_bytes for step in steps) == 1024 * 4096 // parts * LAST - 1024 * 4096 * LAST // 64


def test_gradients_of_weight_stationary_2d_by_hand():
    """The cotangent is gathered over x, the input's gradient scattered over yz; the weights' gradient is free."""
    x, w = _plan("BLE_xyz, E_xF_yz -> BLF_yzx").gradients
    assert _chain(x) == [("all-gather", "x", _sent(B * F / 16, 4)), ("reduce-scatter", "yz", _sent(B * E / 4, 16))]
    assert _chain(w) == []
    assert (str(x.equation), str(w.equation)) == ("BLF_yzx, E_xF_yz -> BLE_xyz", "BLF_yzx, BLE_x -> E_xF_yz")


def test_what_crosses_the_wire_has_its_operands_dtype():
    narrow, wide = (_plan("BLE_xyz, E_xF_yz -> BLF_yzx", dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert wide.wire_bytes == 2 * narrow.wire_bytes
    mixed = _plan("BE_x, EF -> BF", LINE, via="BE, EF", dtype=("int8", "bfloat16"))
    assert mixed.wire_bytes == B * E * 3 // 4


def test_figures_of_cost():
    plan = _plan("BLE_xyz, E_xF_yz -> BLF_yzx")
    assert plan.flops == 2 * B * E * F // 64
    assert plan.seconds == pytest.approx(sum(step.seconds for step in plan.steps))
    gather, _, scatter = plan.steps
    assert gather.seconds == pytest.approx(
        gather.wire_bytes / (2 * 45e9) + 4e-6
    )  # one ring through both axes, and two hops along each of them
    assert scatter.seconds == pytest.approx(scatter.wire_bytes / (2 * 45e9) + 2e-6)
    operands = B * E // 64 + E * F // 64
    assert plan.peak_bytes == LAST * (operands + B * E // 4 + B * F // 16 + B * F // 64)


def test_axes_of_size_one_send_nothing():
    plan = _plan("BLE_xyz, E_xF_yz -> BLF_yzx", {"x": 1, "y": 1, "z": 1})
    assert [step.kind for step in plan.steps] == ["einsum"]
    some = _plan("BLE_xyz, E_xF_yz -> BLF_yzx", {"x": 1, "y": 4, "z": 1})
    assert [(step.kind, step.axes) for step in some.steps] == [("all-gather", ("y",)), ("einsum", ())]


def test_steps_form_a_chain():
    plan = _plan("BLE_xyz, E_xF_yz -> BLF_yzx")
    gather, einsum, scatter = plan.steps
    assert (gather.before, gather.after) == (Spec.parse("BLE_xyz"), Spec.parse("BLE_x"))
    assert (einsum.before, einsum.other) == (gather.after, Spec.parse("E_xF_yz"))
    assert (scatter.before, scatter.after) == (Spec.parse("BLF_yz partialsum-x"), Spec.parse("BLF_yzx"))
    assert [step.operand for step in plan.steps] == ["operand 1", "result", "result"]


def test_chips_change_plans_by_their_links():
    torus, switch = (_plan("BLE_xyz, E_xF_yz -> BLF_yzx", chip=chip) for chip in ("tpu-v4", "h100"))
    assert torus.seconds != switch.seconds
    assert switch.chip.name == "h100"


def test_a_plan_shows_its_via_as_it_was_written():
    for text in ("BE, EF", "B E,EF"):
        assert _plan("BE_x, EF_x -> BF_x", LINE, text).via == text


def test_via_writes_a_groups_spec_once_or_for_each_member():
    equation = "BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)"
    once, each = (_plan(equation, via=via) for via in ("BLE_x, E_xF_yz", "BLE_x, (E_xF_yz, E_xF_yz)"))
    assert once.steps == each.steps == _plan(equation).steps


def test_via_in_another_order_of_dimensions():
    assert _plan("BE_x, EF -> BF", LINE, "EB, FE").steps == _plan("BE_x, EF -> BF", LINE, "BE, EF").steps


def test_a_plan_is_made_once():
    assert _plan("BLE_xyz, E_xF_yz -> BLF_yzx") is _plan("BLE_xyz, E_xF_yz -> BLF_yzx")


@pytest.mark.parametrize("name", ["sizes", "mesh"])
def test_what_a_cached_plan_says_cannot_be_changed(name):
    held = _plan("BLE_xyz, E_xF_yz -> BLF_yzx", lowering="looped")
    for figures in (getattr(held, name), held.gradients[0].sizes, held.loops.gathers, held.chip.source):
        for change in (
            lambda figures=figures: figures.update(B=1),
            lambda figures=figures: figures.clear(),
            lambda figures=figures: figures.__setitem__("B", 1),
            lambda figures=figures: figures.setdefault("Z", 1),
            lambda figures=figures: figures.popitem(),
        ):
            with pytest.raises(TypeError, match="cannot be changed"):
                change()
    before = dict(getattr(held, name))
    assert held.sizes | {"B": 1} == {**held.sizes, "B": 1}
    assert {"Z": 1, "B": 1} | held.sizes == {"Z": 1, **held.sizes}
    assert getattr(_plan("BLE_xyz, E_xF_yz -> BLF_yzx", lowering="looped"), name) == before


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.uint16, np.int64, np.array])
def test_numbers_of_numpy_do_not_overflow(kind):
    wide = (
        {"B": 1 << 16, "E": 1 << 16, "F": 64} if kind in (np.int32, np.int64, np.array) else {"B": 64, "E": 64, "F": 64}
    )
    own = gspmd.plan("BE_x, EF -> BF", wide, {"x": 4})
    theirs = gspmd.plan("BE_x, EF -> BF", {dim: kind(size) for dim, size in wide.items()}, {"x": kind(4)})
    assert theirs.to_json() == own.to_json()
    assert (theirs.peak_bytes, theirs.wire_bytes, theirs.flops) == (own.peak_bytes, own.wire_bytes, own.flops)
    figures = (*theirs.sizes.values(), *theirs.mesh.values(), theirs.wire_bytes, theirs.flops, theirs.peak_bytes)
    assert {type(figure) for figure in figures} == {int}


def test_a_result_has_its_operands_dtype_with_and_without_64_bits():
    with warnings.catch_warnings(action="error"):
        wide = gspmd.plan("BE_x, E_xF -> BF_x", {"B": 4, "E": 8, "F": 12}, {"x": 2}, dtype="float64")
    assert wide.wire_bytes == 8 * 4 * 12 // 2


def test_dimensions_that_the_equation_lacks_are_not_read():
    assert _plan("BE_x -> BE") is gspmd.plan("BE_x -> BE", {"B": B, "E": E, "note": ["not", "read"]}, CUBE)


def test_an_empty_dimension_is_planned():
    empty = gspmd.plan("B_xE, EF -> BF", {"B": 0, "E": 16, "F": 32}, {"x": 4})
    assert (empty.wire_bytes, empty.flops) == (0, 0)


@pytest.mark.parametrize(
    ("equation", "options"),
    [
        ("BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)", {"lowering": "looped"}),
        ("BLF_yz, F_yzE_x + BLH_yzD, H_yzDE_x -> BLE_xyz", {"dtype": "float32", "chip": "h100"}),
        ("BLE_xyz -> B_xyzLE", {}),
    ],
)
@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
def test_a_plan_can_be_pickled_and_copied(equation, options, again):
    plan = _plan(equation, **options)
    same = again(plan)
    assert (same.to_json(), str(same), same.routine) == (plan.to_json(), str(plan), plan.routine)
    assert (same.backward, same.backward_loops, same.kept) == (plan.backward, plan.backward_loops, plan.kept)
    with pytest.raises(TypeError):
        same.sizes["B"] = 1


PUBLIC = [
    Spec.parse("B_xLE_yz partialsum-w"),
    parse_equation("BLE_x, (E_xF, E_xF) -> (BLF, BLF)"),
    CHIPS["tpu-v4"],
    gspmd.Layout.load("switch-expert-model"),
    gspmd.Layout.load("switch-expert-model").section("ffn"),
    gspmd.moe.MoEConfig(),
]


@pytest.mark.parametrize("thing", PUBLIC, ids=[type(thing).__name__ for thing in PUBLIC])
def test_what_plans_are_made_of_can_be_pickled_and_copied(thing):
    for same in (pickle.loads(pickle.dumps(thing)), copy.copy(thing), copy.deepcopy(thing)):
        assert same == thing
        assert str(same) == str(thing)


def test_reprs_are_short():
    plan = _plan("BLE_xyz, E_xF_yz -> BLF_yzx")
    assert repr(plan) == "<Plan 'BLE_xyz, E_xF_yz -> BLF_yzx' 7.96 MB sent, 203 µs>"
    assert repr(plan.steps[0]) == "<Step all-gather yz: BLE_xyz -> BLE_x, 4.42 MB, 53.2 µs>"
    einsum = "<Step einsum: BLE_x · E_xF_yz -> BLF_yz partialsum-x, 21.7 GFLOP, 109 µs>"
    assert repr(plan.steps[1]) == einsum
    assert repr(plan.routine) == "<Routine all-gather yz, einsum, reduce-scatter x>"


def test_plain_data_has_every_figure():
    plan = _plan("BLE_xyz, E_xF_yz -> BLF_yzx", lowering="looped", via="BLE_x, E_xF_yz")
    data = json.loads(plan.to_json())
    asked = {"mesh": CUBE, "sizes": dict(plan.sizes), "chip": "tpu-v4", "via": "BLE_x, E_xF_yz"}
    totals = (
        "equation",
        "lowering",
        "dtypes",
        "wire_bytes",
        "flops",
        "seconds",
        "hidden_seconds",
        "peak_bytes",
        "steps",
    )
    assert set(data) == {*totals, *asked, "gradients"}
    assert {key: data[key] for key in asked} == asked
    for each, of in ((data, plan), *zip(data["gradients"], plan.gradients, strict=True)):
        assert all(each[key] == getattr(of, key) for key in totals if key not in ("equation", "dtypes", "steps"))
        assert each["equation"] == str(of.equation)
        for step, planned in zip(each["steps"], of.steps, strict=True):
            assert all(
                step[key] == getattr(planned, key) for key in ("kind", "operand", "wire_bytes", "flops", "seconds")
            )
            assert (step["before"], step["after"], tuple(step["axes"])) == (
                str(planned.before),
                str(planned.after),
                planned.axes,
            )
    assert [step["other"] for step in data["steps"]] == [None, "E_xF_yz", None]
    assert json.loads(plan.to_json(gradients=False)) == {**data, "gradients": []}


SIZES, SQUARE = {"B": 8, "E": 16, "F": 32}, {"x": 2, "y": 2}
ERRORS = [
    (
        {"dtype": ("float32",)},
        PlanError,
        "cannot plan 'BE_x, EF -> BF': 1 dtypes for 2 operands.\n  Give one dtype, or one for each operand.",
    ),
    ({"dtype": "float33"}, PlanError, "no dtype is called 'float33'.\n  Write 'bfloat16', 'float32', 'int8', ..."),
    (
        {"chip": "tpu-v9"},
        PlanError,
        f"no chip is called 'tpu-v9'.\n  Did you mean 'tpu-v4'? Known chips: {', '.join(CHIPS)}.",
    ),
    (
        {"lowering": "loop"},
        PlanError,
        f"no lowering is called 'loop'.\n  Did you mean 'looped'? Known: {', '.join(LOWERINGS)}.",
    ),
    (
        {"equation": "BE_?, EF -> BF"},
        PlanError,
        "cannot plan 'BE_?, EF -> BF': 'BE_?' leaves a dimension open, so the compiler chooses what is sent.\n"
        "  Name the mesh axes of that dimension, or run the equation with lowering='xla' under Auto axes.",
    ),
    (
        {"sizes": {"B": 8, "E": 15, "F": 2}},
        SpecError,
        "cannot shard 'BE_x, EF -> BF' for the sizes B=8, E=15, F=2\n    BE_x, EF -> BF\n     ^^^\n"
        "  dimension E has size 15, which mesh axis x (size 2) does not divide.\n"
        "  Use a size that is a multiple of 2 (14 or 16), or leave E unsharded: 'BE'.",
    ),
    (
        {"via": "BE"},
        SpecError,
        "cannot plan 'BE_x, EF -> BF' via 'BE': the specs do not have the operands' dimensions.\n"
        "  Write one spec per operand, in their order: 'BE, EF'.",
    ),
    (
        {"via": "BE_x, E_yF"},
        PlanError,
        "cannot plan: no steps bring 'BE_x' via 'BE_x' to 'BF'.\n"
        "  The specs of via must shard every dimension that the operands share over the same mesh axes.",
    ),
    (
        {"equation": "BE, BE -> BE partialsum-x"},
        PlanError,
        "cannot plan: no steps bring 'BE' to 'BE partialsum-x'.\n"
        "  A partial sum in the result needs a mesh axis on a summed dimension, or an operand with that partial sum.",
    ),
    *(
        ({"dtype": wrong}, PlanError, f"no dtype is called {shown!r}.\n  Write 'bfloat16', 'float32', 'int8', ...")
        for wrong, shown in (
            (None, None),
            ((None, "float32"), None),
            ("object", "object"),
            ("i4,i4", "i4,i4"),
            ({}, {}),
            (5, 5),
            ("finfo", "finfo"),
        )
    ),
    *(
        (
            {"sizes": wrong},
            SpecError,
            f"cannot shard 'BE_x, EF -> BF' for the sizes {wrong!r}.\n"
            "  Write the size of every dimension of the whole tensors, such as {'B': 8, 'E': 16}.",
        )
        for wrong in (None, 3, (8, 16, 32), "B=8")
    ),
    *(
        (
            {"sizes": SIZES | {"E": wrong}},
            SpecError,
            f"cannot shard 'BE_x, EF -> BF' for the sizes B=8, E={wrong!r}, F=32\n"
            "    BE_x, EF -> BF\n     ^^^\n"
            f"  dimension E has size {wrong!r}.\n  A size is a whole number of at least 0.\n"
            "  The same in 1 more place: 'E'.",
        )
        for wrong in ([16], None, "16", 16.0, True, np.True_, -2, np.float32(16), np.array(16.0))
    ),
    (
        {"sizes": SIZES | {"B": 2**40}},
        SpecError,
        f"cannot shard 'BE_x, EF -> BF' for the sizes B={2**40}, E=16, F=32\n"
        "    BE_x, EF -> BF\n    ^\n"
        f"  dimension B has size {2**40}.\n  No array has a dimension of 2^40 or more.\n"
        "  The same in 1 more place: 'B'.",
    ),
    (
        {"mesh": {"x": 2**20, "y": 2**20}},
        SpecError,
        f"the mesh x={2**20}, y={2**20} is too large.\n  A mesh has fewer than 2^40 devices.",
    ),
    (
        {"sizes": {"B": 8, "F": 2}},
        SpecError,
        "cannot shard 'BE_x, EF -> BF' for the sizes B=8, F=2\n"
        "    BE_x, EF -> BF\n     ^^^\n  dimension E has no size.\n  Sizes are given for B and F.\n"
        "  The same in 1 more place: 'E'.",
    ),
    *(
        (
            {"mesh": SQUARE | {"x": wrong}},
            SpecError,
            f"mesh axis x has size {wrong!r}.\n  The size of a mesh axis is a whole number, 1 or more.",
        )
        for wrong in (0, -1, "4", 2.0, True, None, [2])
    ),
    *(
        (
            {"mesh": wrong},
            SpecError,
            f"cannot read a mesh from {wrong!r}.\n  Write {{'x': 4, 'y': 2}}, or pass a jax.sharding.Mesh.",
        )
        for wrong in (None, "x=4", {3: 4}, [("x", 4)])
    ),
    *(
        (
            {"via": wrong},
            SpecError,
            f"cannot read the specs of via= from {wrong!r}: it is not a string ({type(wrong).__name__}).\n"
            "  Write a string such as 'BLE_x, E_xF_yz'.",
        )
        for wrong in (5, ["BE_x", "EF"])
    ),
    *(
        (
            {"equation": wrong},
            SpecError,
            f"cannot read an equation from {wrong!r}: it is not a string ({type(wrong).__name__}).\n"
            "  Write a string such as 'A_x, B -> A_xB'.",
        )
        for wrong in (None, 5, ["BE_x"])
    ),
    *(
        ({"lowering": wrong}, PlanError, f"no lowering is called {wrong!r}.\n  Known: {', '.join(LOWERINGS)}.")
        for wrong in (5, ["a"], {})
    ),
    *(
        ({"chip": wrong}, PlanError, f"no chip is called {wrong!r}.\n  Known chips: {', '.join(CHIPS)}.")
        for wrong in (None, 5, ["a"])
    ),
    ({"mesh": 3}, SpecError, "cannot read a mesh from 3.\n  Write {'x': 4, 'y': 2}, or pass a jax.sharding.Mesh."),
]


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    ERRORS,
    ids=[f"{key}={value!r}" for wrong, *_ in ERRORS for key, value in wrong.items()],
)
def test_errors(wrong, kind, message):
    with pytest.raises(kind) as error:
        gspmd.plan(**({"equation": "BE_x, EF -> BF", "sizes": SIZES, "mesh": SQUARE} | wrong))
    assert str(error.value) == message


@pytest.mark.parametrize("dtypes", [("float8_e4m3fn", "bfloat16"), ("int4", "int8"), ("uint4", "int4")])
def test_dtypes_without_a_joint_one_are_refused_as_einsum_refuses_them(dtypes):
    with pytest.raises(gspmd.PlanError, match=f"{dtypes[0]}, {dtypes[1]} have no joint dtype.\n  Cast the operands"):
        gspmd.plan("BE_x, E_xF -> BF", {"B": 8, "E": 8, "F": 8}, {"x": 2}, dtypes)


def test_a_plan_of_64_bits_is_one_whether_or_not_jax_has_them():
    sizes, mesh = {"B": 8, "E": 8, "F": 8}, {"x": 2}
    mixed = gspmd.plan("BE_x, E_xF -> BF", sizes, mesh, ("float64", "float32"), lowering="blocking", via="BE_x, E_xF")
    assert [step.wire_bytes for step in mixed.steps if step.is_collective] == [8 * 8 * 8]


def test_made_again_the_figures_of_a_plan_stay_as_they_are():
    plan = gspmd.plan("BE_x -> BE", {"B": 8, "E": 8}, {"x": 2})
    plan.sizes.__init__({"B": 4})
    assert plan.sizes == {"B": 8, "E": 8}


def test_a_size_that_is_an_array_is_told_by_its_kind():
    with pytest.raises(gspmd.SpecError) as caught:
        gspmd.plan("BE_x, EF -> BF", {"B": 8, "E": np.array([16]), "F": 32}, {"x": 2})
    assert "  dimension E has size an array of int64, of shape (1,).\n  A size is a whole number" in str(caught.value)
