"""The figure of a plan: every number in it is the plan's, nothing overlaps, and any equation has one."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

import gspmd
from gspmd.display.units import amount_of_bytes, amount_of_flops, amount_of_seconds
from gspmd.planner.figures.lowerings import lowerings_figure
from gspmd.planner.figures.roofline import roofline_figure
from gspmd.planner.roofline import roofline
from gspmd.planner.timetable import bars
from tests.figures.svg import SVG, check_places, having, root, words, written
from tests.references.random_equations import Case, cases

SIZES = {"B": 512, "L": 4, "E": 18432, "F": 73728, "H": 256, "D": 128}
MESH = {"x": 4, "y": 4, "z": 4}
EQUATIONS = (
    "BLE_xyz, E_xF_yz -> BLF_yzx",
    "BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)",
    "BLF_yz, F_yzE_x + BLH_yzD, H_yzDE_x -> BLE_xyz",
    "BLE_xyz -> B_xyzLE",
    "BLE_x -> B_xL",
    "BLE -> BLE",
)


def _plan(equation: str, lowering: str = "blocking") -> gspmd.Plan:
    return gspmd.plan(equation, SIZES, MESH, lowering=lowering)


def _check(document: ElementTree.Element, plan: gspmd.Plan) -> None:
    """Compare every number of a drawn plan with the plan."""
    steps = having(document, step=None)
    assert sorted(int(step.get("data-step")) for step in steps) == [*range(len(plan.steps))]
    for drawn in steps:
        step = plan.steps[int(drawn.get("data-step"))]
        assert drawn.get("data-kind") == step.kind
        said = words(drawn)
        assert said[0] == step.name
        assert f"{step.amount} · {amount_of_seconds(step.seconds)}" in said
        if step.kind != "einsum":
            assert drawn.get("data-operand") == step.operand
            assert [gspmd.Spec.parse(box.get("data-spec")) for box in having(drawn, spec=None)] == [step.after]
    held = f"about {amount_of_bytes(plan.peak_bytes)} held"
    sent, work = f"per device: {amount_of_bytes(plan.wire_bytes)} sent", amount_of_flops(plan.flops)
    assert f"{sent}, {work}, {amount_of_seconds(plan.seconds)}, {held}" in "".join(words(document))


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("lowering", ["blocking", "looped"])
def test_every_number_is_that_of_the_plan(equation, lowering):
    plan = _plan(equation, lowering)
    figure = plan.figure(gradients=True)
    document = root(figure)
    parts = having(document, gradient=None)
    assert len(parts) == len(plan.gradients)
    for part, gradient in zip(parts, plan.gradients):
        _check(part, gradient)
    _check(root(plan.figure()), plan)
    check_places(figure)


def test_a_group_is_one_node_that_its_shared_operand_enters_once():
    document = root(_plan(EQUATIONS[1]).figure())
    assert len([each for each in document.iter() if each.get("class") == "node"]) == 1
    assert words(document).count("einsum") == 2
    assert words(document).count("all-gather yz") == 1


def test_loops_are_named_as_the_text_names_them():
    plan = _plan(EQUATIONS[0], "looped")
    document = root(plan.figure(gradients=True))
    gradients = having(document, gradient=None)
    for each, drawn in zip((plan, *plan.gradients), (root(plan.figure()), *gradients), strict=True):
        lines = [line.strip() for line in str(each).splitlines() if line.strip().startswith("looped")]
        assert lines
        assert all(line in "".join(words(drawn)) for line in lines)


@settings(max_examples=40)
@given(cases())
def test_any_equation_has_a_figure(case: Case):
    lowering = case.lowering.partition(":")[0]
    plan = gspmd.plan(case.equation, dict(case.sizes), dict(case.mesh), lowering=lowering, via=case.via)
    figure = plan.figure(gradients=True)
    _check(root(plan.figure()), plan)
    check_places(figure)
    check_places(plan.steps_figure())


def test_names_of_mesh_axes_are_escaped_and_whole():
    mesh = {"data": 2, "model": 2}
    plan = gspmd.plan("BE_{data,model}, EF -> BF", {"B": 4, "E": 8, "F": 8}, mesh)
    assert "BEdata,model" in words(root(plan.figure()))
    assert 'data-spec="BE_{data,model}"' in plan.figure().svg


def test_the_figure_of_a_paper_is_no_wider_than_its_column():
    assert max(_plan(each).figure().width for each in EQUATIONS[:1] + EQUATIONS[2:]) < 400


def test_steps_are_drawn_on_the_mesh():
    plan = _plan(EQUATIONS[0])
    for step, drawn in zip(plan.steps, having(root(plan.steps_figure()), step=None)):
        tensors = {each.get("data-tensor"): each.get("data-spec") for each in having(drawn, tensor=None)}
        sides = {"before": step.before, "after": step.after} | ({"other": step.other} if step.other else {})
        assert {role: gspmd.Spec.parse(spec) for role, spec in tensors.items()} == sides
        assert len(having(drawn, device=None)) == 64 * len(tensors)
        assert f"{step.amount} · {amount_of_seconds(step.seconds)}" in words(drawn)[1]


def test_devices_that_are_left_out_are_counted():
    plan = gspmd.plan("BE_xyz -> BE", {"B": 8, "E": 4096}, {"x": 16, "y": 16, "z": 4})
    document = root(plan.steps_figure())
    drawn = len(having(having(document, tensor="before")[0], device=None))
    assert f"{drawn} of 1,024 devices are drawn" in words(document)
    assert "devices are drawn" not in "".join(words(root(_plan(EQUATIONS[0]).steps_figure())))
    check_places(plan.steps_figure())


def test_lowerings_are_drawn_to_one_scale():
    plans = {name: _plan(EQUATIONS[0], name) for name in ("blocking", "looped", "xla")}
    figure = lowerings_figure(plans)
    check_places(figure)
    longest = max(plan.seconds for plan in plans.values())
    for name, plan in plans.items():
        (drawn,) = having(root(figure), lowering=name)
        panel = next(drawn.iter(f"{SVG}rect"))
        left, wide = float(panel.get("x")), float(panel.get("width"))
        places = {}
        for bar in having(drawn, step=None):
            (rect,) = bar.iter(f"{SVG}rect")
            places[int(bar.get("data-step"))] = float(rect.get("x")), float(rect.get("width"))
            assert bar.get("data-kind") == plan.steps[int(bar.get("data-step"))].kind
        expected = {bar.number: (left + bar.start * wide / longest, max(1.0, bar.seconds * wide / longest))
                    for bar in bars(plan) if bar.seconds}  # fmt: skip
        assert {number: pytest.approx(place, abs=0.011) for number, place in expected.items()} == places


@pytest.mark.parametrize(
    ("equations", "told"), [((), "of no plans"), (EQUATIONS[:2], f"of the equations .*{re.escape(EQUATIONS[1])}")]
)
def test_lowerings_of_one_equation_are_compared(equations, told):
    with pytest.raises(ValueError, match=f"cannot compare the lowerings {told}"):
        lowerings_figure({equation: _plan(equation) for equation in equations})


def test_a_name_is_written_in_a_bar_that_holds_it():
    figure = lowerings_figure({name: _plan(EQUATIONS[1], name) for name in ("blocking", "looped")})
    wide = {each.text: each.right - each.left for each in written(figure)}
    named = []
    for bar in having(root(figure), step=None):
        (rect,) = bar.iter(f"{SVG}rect")
        assert all(wide[text] <= float(rect.get("width")) for text in words(bar))
        named.append(bool(words(bar)))
    assert {*named} == {False, True}


def test_a_roofline_has_a_bar_for_each_resource():
    plan = _plan(EQUATIONS[0])
    figure = roofline_figure(plan)
    bounds = roofline(plan)
    bars_ = {each.get("data-resource"): each for each in having(root(figure), resource=None)}
    assert {name: float(each.get("data-seconds")) for name, each in bars_.items()} == bounds._asdict()
    longest = max(plan.seconds, *bounds)
    panel = next(each for each in root(figure).iter(f"{SVG}rect") if each.get("class") == "panel")
    wide = float(panel.get("width"))
    for name, each in bars_.items():
        assert float(each.get("width")) == pytest.approx(wide * getattr(bounds, name) / longest, abs=0.011)
    check_places(figure)


def test_the_text_is_the_printed_plan():
    plan = _plan(EQUATIONS[3])
    assert str(plan.figure()) == str(plan)
    assert all(str(gradient.equation) in str(plan.figure(gradients=True)) for gradient in plan.gradients)
