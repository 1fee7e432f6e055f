"""The compiler's schedule of a kernel: what every trip of its loop takes, and what only some take."""

import pytest

from gspmd.audit import hlo, timeline
from gspmd.audit.hlo.bundles import KernelSchedule, least_seconds
from gspmd.hardware.chips import chip
from gspmd.ops.interface.kernels import KernelWork, kernel_work

WORK = KernelWork(flops=10**9, bytes=10**6, steps=64, blocks=40, rows=8)


def _dump(products: int = 30, exit_test: str = "/* loop exit test */") -> str:
    """A loop of 12 bundles around two regions that branches skip, one with products; 3 bundles stand before it."""
    lines = ["LH: loop header", "LB: loop body"]
    address = 0

    def bundle(text: str, mark: str = "") -> None:
        nonlocal address
        lines.append(f"{address:#6x} {mark}: > {{ {text} }}")
        address += 1

    bundle("%4 = sbr.rel (%p0) target = $region2")  # before the loop, to a place that is not named
    for _ in range(2):
        bundle("%s1 = smov 0")
    bundle("%s2 = sphi %s1 /* Start region 9\nstrides: (64, 1) */", "LB")
    bundle("%5 = sbr.rel (%p1) target = $region4")
    for _ in range(4):
        bundle("")
    for _ in range(products):
        bundle("%v1 = vmatmul.bf16.gmra.mxu0 %v0")
    bundle("%s3 = sld [smem:[#a]] } /* Start/End empty region 4 :: Start region 5 */", "PF")
    bundle("%6 = sbr.rel (!%p2) target = $region6")
    for _ in range(4 + 7):
        bundle("")
    bundle(f"%p3 = scmp.ge.s32.totalorder %s2, 34 {exit_test} }} /* Start region 6 */", "PF")
    bundle("%7 = sbr.rel (!%p3) target = $region9")
    for _ in range(4):
        bundle("")
    bundle("%8 = vsyncpa [#a], 1")
    return "\n".join(lines)


def test_a_schedule_is_read():
    # 1 + 5 + 6 + 1 + 5: the first bundle, both branches and what is executed behind them, the test, the way back
    assert KernelSchedule.read(_dump()) == KernelSchedule(trips=34, step=18, block=30, row=7, outside=4)


def test_a_schedule_that_is_no_single_loop_is_left_alone():
    assert KernelSchedule.read(_dump(exit_test="")) is None
    assert KernelSchedule.read("") is None


def test_seconds_of_a_schedule():
    v5p = chip("tpu-v5p")
    found = KernelSchedule(trips=34, step=18, block=30, row=7, outside=4)
    two_cores = (64 * 18 + 8 * 7) / 2 + 4
    # products at the peak take longer than their bundles, and the other way round
    assert found.seconds(WORK, v5p) == pytest.approx(10**9 / v5p.bf16_flops + two_cores / v5p.clock)
    slow = KernelSchedule(trips=66, step=18, block=3000, row=7, outside=4)
    assert slow.seconds(WORK, v5p) == pytest.approx((64 * 18 + 8 * 7 + 40 * 3000 + 4) / v5p.clock)
    assert least_seconds(WORK, v5p) == 10**9 / v5p.bf16_flops


KERNEL = """HloModule m, is_scheduled=true

ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  ROOT %k.1 = bf16[8,128]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/SCOPE/pallas_call" stack_frame_id=5}, backend_config={"custom_call_config":{"body":"TUzv"}}
}
"""  # noqa: E501


def test_a_kernel_whose_work_is_known():
    with_work = "kernel[flops=1000000000 bytes=1000000 steps=64 blocks=40 rows=8]"
    module = hlo.parse(KERNEL.replace("SCOPE", with_work))
    assert module.entry.root.kernel_work == WORK == kernel_work(with_work)
    found = timeline(module, "tpu-v5p", {"x": 1})
    assert found.flops == 10**9
    assert found.step_seconds == least_seconds(WORK, chip("tpu-v5p"))
    assert found.notes == ("kernel k.1 has no schedule; its seconds are a lower bound",)


def test_a_kernel_of_which_nothing_is_known():
    module = hlo.parse(KERNEL)
    assert "is not known" in timeline(module, "tpu-v5p", {"x": 1}).notes[0]
