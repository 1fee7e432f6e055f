"""Every number of an answer is that of `gspmd.plan`; faults say in which field they stand."""

import json
import re
import shlex

import pytest

import gspmd
from gspmd.commands import explain
from gspmd.display.units import amount_of_bytes, amount_of_flops, amount_of_seconds
from gspmd.page import limits
from gspmd.page.tasks import Tasks
from gspmd.planner.roofline import roofline
from gspmd.planner.timetable import bars

SIZES, CUBE = {"B": 512, "L": 1, "E": 18432, "F": 73728, "H": 64, "D": 256}, {"x": 4, "y": 4, "z": 4}
CASES = [
    {"equation": "BLE_xyz, E_xF_yz -> BLF_yzx"},
    {"equation": "BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)", "lowering": "looped"},
    {"equation": "BLF_yz, F_yzE_x + BLH_yzD, H_yzDE_x -> BLE_xyz", "chip": "tpu-v5p"},
    {"equation": "B_xyzLE -> BLE_xyz", "dtype": "float32"},
    {"equation": "BLE_xyz, E_xF_yz -> BLF_yzx", "via": "BLE, EF_xyz", "chip": "h100", "lowering": "blocking"},
]


def _text(sizes) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def _asked(case) -> dict[str, str]:
    return {"sizes": _text(SIZES), "mesh": _text(CUBE), **case}


def _plan(case) -> gspmd.Plan:
    given = {name: text for name, text in case.items() if name != "equation"}
    return gspmd.plan(case["equation"], SIZES, CUBE, **given)


def _run(task: str, case) -> dict:
    status, answer = Tasks().run(task, case)
    assert status == 200, answer
    return json.loads(json.dumps(answer))  # as a browser reads it


def _said(plan: gspmd.Plan) -> dict[str, str]:
    return {
        "said_seconds": amount_of_seconds(plan.seconds),
        "said_bytes": amount_of_bytes(plan.wire_bytes),
        "said_flops": amount_of_flops(plan.flops),
        "said_held": amount_of_bytes(plan.peak_bytes),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["equation"])
def test_the_numbers_are_those_of_the_plan(case):
    plan, answer = _plan(case), _run("plan", _asked(case))
    assert answer["plan"] == json.loads(plan.to_json(gradients=False))
    assert answer["said"] == _said(plan)
    bounds = roofline(plan)
    assert answer["roofline"] == bounds._asdict() | {"bound": bounds.bound}
    for step in plan.steps:
        label = f"{step.amount} · {amount_of_seconds(step.seconds)}"
        assert label in answer["figures"]["plan"]
        assert label in answer["figures"]["steps"]
    drawn = {name: float(n) for name, n in _attributes(answer["figures"]["roofline"], "resource", "seconds")}
    assert drawn == {name: seconds for name, seconds in bounds._asdict().items() if seconds}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["equation"])
def test_the_numbers_beside_it_are_those_of_plans(case):
    plan, answer = _plan(case), _run("compare", _asked(case))
    for part, each in zip(answer["gradients"], plan.gradients, strict=True):
        assert part.pop("figure").count("data-step=") == len(each.steps)
        assert part == json.loads(each.to_json(gradients=False)) | _said(each)
    for name, said in answer["lowerings"].items():
        lowered = _plan(case | {"lowering": name})
        assert said == _said(lowered) | {"seconds": lowered.seconds}
        assert f'data-lowering="{name}" data-seconds="{lowered.seconds!r}"' in answer["figure"]
        ends = [bar.start + bar.seconds for bar in bars(lowered)]
        assert max(ends) == pytest.approx(lowered.seconds)
    ranked = plan.alternatives(limits.ALTERNATIVES + 1)
    assert [each["seconds"] for each in answer["alternatives"]] == [each.seconds for each in ranked]
    for record, each in zip(answer["alternatives"], ranked, strict=True):
        assert record["via"] == each.via
        assert record["wire_bytes"] == each.wire_bytes
        assert record["steps"] == [step.name for step in each.steps]
        assert record["chosen"] == (each.routine == plan.routine)
        if record["pinnable"]:
            assert _plan(case | {"via": record["via"]}).seconds == record["seconds"]


def _attributes(svg: str, first: str, second: str) -> list[tuple[str, str]]:
    return re.findall(rf'data-{first}="([^"]*)" data-{second}="([^"]*)"', svg)


def test_why_an_alternative_lost():
    answer = _run("compare", _asked(CASES[0]))
    best, second = answer["alternatives"][:2]
    plans = _plan(CASES[0]), _plan(CASES[0] | {"via": second["via"]})
    links = [sum(step.seconds for step in plan.steps if step.is_collective) for plan in plans]
    assert best["why"] == "The cheapest."
    assert second["why"].startswith(f"{amount_of_seconds(links[1] - links[0])} more on the links (42.5 MB more sent)")


def test_why_an_alternative_lost_says_what_its_loops_hide():
    via = "BLE_xyz, E_xyzF"
    row = next(row for row in _run("compare", _asked(CASES[0]))["alternatives"] if row["via"] == via)
    hidden = _plan(CASES[0] | {"via": via}).hidden_seconds
    assert hidden > 1e-5
    assert f"; loops hide {amount_of_seconds(hidden)} more" in row["why"]


def test_the_command_prints_the_same_plan(capsys):
    for case in CASES:
        answer = _run("plan", _asked(case))
        words = shlex.split(answer["command"])
        assert words[:2] == ["gspmd", "explain"]
        assert explain.run([*words[2:], "--json", "--no-gradients"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed | {"gradients": []} == answer["plan"]


@pytest.mark.parametrize(
    ("changed", "field", "span", "fact"),
    [
        ({"equation": "BLE_xyw, E_xF_yz -> BLF_yzx"}, "equation", "E_xyw", "the mesh has no axis w."),
        ({"equation": "BLE_xyz, E_xF_yz - BLF_yzx"}, "equation", "-", "'-' is not an arrow."),
        ({"sizes": "B=512, L"}, "sizes", "L", "'L' is not a name and a size."),
        ({"sizes": "B=512,L=-1"}, "sizes", "L=-1", "'-1' is not a positive whole number of at most 18 digits."),
        ({"sizes": "B=0,L=1"}, "sizes", "B=0", "'0' is not a positive whole number of at most 18 digits."),
        ({"sizes": "b=8"}, "sizes", "b=8", "a dimension is one capital letter, not 'b'."),
        (
            {"mesh": "X=4"},
            "mesh",
            "X=4",
            "mesh axes are named by a lowercase letter and then letters, digits or _, not 'X'.",
        ),
        ({"mesh": "x=4,x=8"}, "mesh", "x=8", "x has a size already."),
        ({"via": "BLE_x, E_xF_"}, "via", "F_", None),
    ],
)
def test_a_fault_stands_in_its_field(changed, field, span, fact):
    asked = _asked(CASES[0]) | changed
    fault = _run("plan", asked)["fault"]["faults"][0]
    assert fault["field"] == field
    assert fault["text"] == asked[field]
    assert asked[field][fault["start"] : fault["end"]] == span
    assert fact in (None, fault["fact"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chip": "tpu-v9"}, "no chip is called 'tpu-v9'"),
        ({"lowering": "loopd"}, "loopd"),
        ({"mesh": ",".join(f"{axis}=2" for axis in "abcdefg")}, "the mesh has 7 axes"),
        ({"mesh": "x=1000000"}, "the mesh has 1,000,000 devices"),
        ({"sizes": ""}, "has no size"),
        ({"equation": ""}, "cannot read the equation"),
    ],
)
def test_what_cannot_be_planned_has_one_message(changed, message):
    assert message in _run("plan", _asked(CASES[0]) | changed)["fault"]["message"]


def test_a_comma_at_the_end_waits_for_what_is_typed_next():
    asked = _asked(CASES[0])
    later = asked | {"mesh": asked["mesh"] + ", ", "sizes": asked["sizes"] + ","}
    assert _run("plan", later) == _run("plan", asked)
