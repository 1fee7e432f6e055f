"""The roofline of a plan by hand, and the times at which its steps run."""

from itertools import pairwise

import pytest

import gspmd
from gspmd.hardware.chips import CHIPS
from gspmd.planner.roofline import roofline
from gspmd.planner.timetable import bars

MESH = {"x": 4, "y": 4, "z": 4}
SIZES = {"B": 512, "L": 1024, "E": 18432, "F": 73728, "H": 64, "D": 256}
EQUATIONS = [
    "BLE_xyz, E_xF_yz -> BLF_yzx",
    "BLF_yzx, F_yzE_x -> BLE_xyz",
    "BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)",
    "BLF_yz, F_yzE_x + BLH_yzD, H_yzDE_x -> BLE_xyz",
    "B_xyzLE, E_xF_yz -> B_xyzLF",
    "B_xyzLE -> BLE_xyz",
]


@pytest.mark.parametrize(("chip", "dtype"), [("tpu-v4", "bfloat16"), ("h100", "float32")])
def test_every_resource_by_hand(chip, dtype):
    plan, row = gspmd.plan(EQUATIONS[0], SIZES, MESH, chip=chip, dtype=dtype, via="BLE_x, E_xF_yz"), CHIPS[chip]
    rows, width = 512 * 1024, {"bfloat16": 2, "float32": 4}[dtype]
    rate = {"bfloat16": row.bf16_flops, "float32": row.tf32_flops}[dtype]
    local = rows * 18432 // 4, 18432 // 4 * 73728 // 16, rows * 73728 // 16
    found = roofline(plan)
    assert found.compute == pytest.approx(2 * rows * (18432 // 4) * (73728 // 16) / rate)
    assert found.memory == pytest.approx(width * sum(local) / row.hbm_bandwidth)
    assert found.links == pytest.approx(plan.steps[0].seconds + plan.steps[2].seconds)
    assert found.bound == max(("compute", "memory", "links"), key=lambda name: getattr(found, name))


def test_a_move_keeps_only_the_links_busy():
    plan = gspmd.plan("B_xyzLE -> BLE_xyz", SIZES, MESH)
    assert roofline(plan) == (0.0, 0.0, plan.seconds)


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("lowering", ["blocking", "looped", "looped:halves", "looped:paired"])
def test_the_steps_take_the_seconds_of_the_plan(equation, lowering):
    plan = gspmd.plan(equation, SIZES, MESH, lowering=lowering)
    drawn = bars(plan)
    assert sorted(bar.number for bar in drawn) == list(range(len(plan.steps)))
    assert min(bar.start for bar in drawn) == 0
    assert max(bar.start + bar.seconds for bar in drawn) == pytest.approx(plan.seconds)
    hides = plan.loops.stripes or any(ring.axes for ring in plan.loops.gathers.values()) or plan.loops.scatters
    assert any(bar.looped for bar in drawn) == bool(hides)
    assert all(bar.seconds == bar.step.seconds for bar in drawn if not bar.looped)
    moved = [bar for bar in drawn if bar.step.operand.startswith("operand")]
    worked = [bar for bar in drawn if bar.step.kind == "einsum"]
    for bar in moved:  # What is multiplied has arrived, or arrives in the loop.
        assert all(bar.looped or bar.start + bar.seconds <= each.start + 1e-12 for each in worked)
    for lane in range(2):  # Nothing is in two places at once.
        busy = sorted((bar.start, bar.start + bar.seconds) for bar in drawn if bar.lane == lane and bar.seconds)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(busy))
