"""Plans against bytes worked out by hand from the papers' formulas; pins, dtypes, costs, wording of errors."""

import pytest

import gspmd
from gspmd import PlanError, Spec, SpecError
from gspmd.collectives.lowering import LOWERINGS

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
    pytest.param("BE_x, E_xF -> BF partialsum-x", LINE, None, [], id="a sum left owed"),
    pytest.param("BF partialsum-x -> BF_x", LINE, None, [("reduce-scatter", "x", _sent(B * F, 4))], id="a sum settled"),
    pytest.param("BE_x -> B_xE", LINE, None, [("all-to-all", "x", _sent(B * E / 4, 4))], id="another dimension"),
]


@pytest.mark.parametrize(("equation", "mesh", "via", "chain"), BY_HAND)
def test_bytes_by_hand(equation, mesh, via, chain):
    plan = _plan(equation, mesh, via)
    assert _chain(plan) == chain
    assert plan.wire_bytes == sum(sent for *_, sent in chain)


@pytest.mark.parametrize(
    ("layout", "gathered"), [("B_xyLE_z, E_xF_zy -> B_xyLF_z", "EF_z"), ("B_xyzLE, E_xF_yz -> B_xyzLF", "EF")]
)
def test_gathered_weights_arrive_whole(layout, gathered):
    """Whatever the chain, a device receives what it lacks of the weights: all of the gathered, less its own part."""
    activations = layout.split(",")[0].replace("E_z", "E")
    plan = _plan(layout, via=f"{activations}, {gathered}")
    weights = [step for step in plan.steps if step.operand == "operand 2"]
    whole = E * F // (4 if gathered == "EF_z" else 1) * LAST
    assert {step.kind for step in weights} == {"all-gather"}
    assert sum(step.wire_bytes for step in weights) == whole - E * F * LAST // 64
    assert str(weights[-1].after) == gathered


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
        gather.wire_bytes / (4 * 45e9) + 4e-6
    )  # two rings of two links, two hops each
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


def test_via_writes_a_groups_spec_once_or_for_each_member():
    equation = "BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)"
    once, each = (_plan(equation, via=via) for via in ("BLE_x, E_xF_yz", "BLE_x, (E_xF_yz, E_xF_yz)"))
    assert once.steps == each.steps == _plan(equation).steps


def test_via_in_another_order_of_dimensions():
    assert _plan("BE_x, EF -> BF", LINE, "EB, FE").steps == _plan("BE_x, EF -> BF", LINE, "BE, EF").steps


def test_a_plan_is_made_once():
    assert _plan("BLE_xyz, E_xF_yz -> BLF_yzx") is _plan("BLE_xyz, E_xF_yz -> BLF_yzx")


SIZES, SQUARE = {"B": 8, "E": 16, "F": 32}, {"x": 2, "y": 2}
ERRORS = [
    (
        {"dtype": ("float32",)},
        PlanError,
        "cannot plan 'BE_x, EF -> BF': 1 dtypes for 2 operands.\n  Give one dtype, or one each.",
    ),
    ({"dtype": "float33"}, PlanError, "no dtype is called 'float33'.\n  Write 'bfloat16', 'float32', 'int8', ..."),
    (
        {"chip": "tpu-v9"},
        PlanError,
        "no chip is called 'tpu-v9'.\n"
        "  Did you mean 'tpu-v4'? Known chips: tpu-v3, tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e, tpu7x, "
        "a100, a100-40gb, h100, h200, b200, gb200, mi300x.",
    ),
    (
        {"lowering": "loop"},
        PlanError,
        "no lowering is called 'loop'.\n  Did you mean 'looped'? "
        f"Known: {', '.join(LOWERINGS)}.",
    ),
    (
        {"equation": "BE_?, EF -> BF"},
        PlanError,
        "cannot plan 'BE_?, EF -> BF': 'BE_?' leaves a dimension open; what it sends is the compiler's choice.\n"
        "  Name its mesh axes, or run it with lowering='xla' under Auto axes.",
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
        "no plan brings 'BE_x' via 'BE_x' to 'BF'.\n"
        "  A partial sum in the result comes from a mesh axis on a summed dimension, or from an operand that owes it;\n"
        "  via specs must agree on every dimension that the operands share.",
    ),
    (
        {"equation": "BE, BE -> BE partialsum-x"},
        PlanError,
        "no plan brings 'BE' to 'BE partialsum-x'.\n"
        "  A partial sum in the result comes from a mesh axis on a summed dimension, or from an operand that owes it;\n"
        "  via specs must agree on every dimension that the operands share.",
    ),
    ({"mesh": 3}, SpecError, "cannot read a mesh from 3.\n  Write {'x': 4, 'y': 2}, or pass a jax.sharding.Mesh."),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), ERRORS, ids=[next(iter(wrong)) for wrong, *_ in ERRORS])
def test_errors(wrong, kind, message):
    with pytest.raises(kind) as error:
        gspmd.plan(**({"equation": "BE_x, EF -> BF", "sizes": SIZES, "mesh": SQUARE} | wrong))
    assert str(error.value) == message
