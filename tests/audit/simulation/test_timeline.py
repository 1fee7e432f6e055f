"""The timeline of hand-written programs, against times worked out by hand.

TPU v4: 1050 cycles are 1 µs; a link takes 45 000 bytes per µs one way, main memory 1 200 000; a hop is 1 µs.
"""

import json
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest

import gspmd
from gspmd.annotate.errors import PlanError
from gspmd.audit import gantt, hlo, perfetto, timeline
from gspmd.audit.simulation.machine import Machine
from gspmd.hardware.chips import CHIPS
from gspmd.hardware.links import collective_seconds
from gspmd.hardware.matmul import EFFICIENCIES, Traffic, product_seconds
from gspmd.hardware.nccl import SIMPLE

MESH = {"x": 4, "y": 4}
RING = {
    "+x": "{{0,4},{4,8},{8,12},{12,0},{1,5},{5,9},{9,13},{13,1}}",
    "-x": "{{4,0},{8,4},{12,8},{0,12}}",
    "+y": "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}",
    "+y open": "{{0,1},{1,2},{2,3}}",
    "half way round x": "{{0,8},{4,12},{8,0},{12,4}}",
}


def lasting(microseconds: float) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{round(1050 * microseconds)}"}}}}'


def step(name: str, microseconds: float, operand: str = "p") -> str:
    """Something that computes for so long."""
    return f"%{name} = u8[90000]{{0}} negate(%{operand}), {lasting(microseconds)}"


def start(name: str, way: str, size: int = 90_000, operand: str = "p") -> str:
    """A permute begins, of as many bytes."""
    kind = f"(u8[{size}]{{0}}, u8[{size}]{{0}}, u32[], u32[]) collective-permute-start(%{operand})"
    return f"%{name} = {kind}, channel_id=1, source_target_pairs={RING[way]}"


def done(name: str, started: str, size: int = 90_000) -> str:
    return f"%{name} = u8[{size}]{{0}} collective-permute-done(%{started})"


def function(name: str, line: str) -> str:
    return f"%{name} (q: u8[90000]) -> u8[90000] {{\n  %q = u8[90000]{{0}} parameter(0)\n  {line}\n}}\n"


def program(*lines: str, computations: str = "", signature: str = "(p: u8[90000]) -> u8[90000]") -> hlo.Module:
    body = "\n".join(f"  {line}" for line in ("%p = u8[90000]{0} parameter(0)", *lines))
    return hlo.parse(f"HloModule m, is_scheduled=true\n\n{computations}\nENTRY %main {signature} {{\n{body}\n}}\n")


def run(*lines: str, mesh=MESH, chip="tpu-v4", **more):
    return timeline(program(*lines, **more), chip, mesh)


def micro(*seconds: float) -> tuple[float, ...]:
    return tuple(round(each * 1e6, 6) for each in seconds)


def times(found) -> tuple[float, ...]:
    """Step, compute, hidden and exposed microseconds."""
    return micro(found.step_seconds, found.compute_seconds, found.hidden_seconds, found.exposed_seconds)


def test_without_collectives_it_is_the_sum_of_the_cycles():
    module = program(step("a", 1), step("b", 2, "a"), "%t = (u8[90000]{0}) tuple(%b)", step("c", 0.5, "b"))
    found = timeline(module, "tpu-v4", MESH)
    cycles = sum(each.cycles for each in module.entry.instructions)
    assert found.step_seconds == pytest.approx(cycles / 1.05e9, rel=1e-12)
    assert times(found) == (3.5, 3.5, 0, 0)


def test_an_estimate_that_overflowed_is_none():
    # libtpu 0.0.42.1 writes 2^63 - 1 for thin int8 products of weights that are on the chip: 195 years
    product = (
        "%d = bf16[8,256]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        f'backend_config={{"window_config":{{"estimated_cycles":"{2**63 - 1}"}}}}'
    )
    module = program("%l = bf16[8,512]{1,0} parameter(1)", "%r = bf16[512,256]{1,0} parameter(2)", product)
    found = timeline(module, "tpu-v4", MESH)
    assert found.step_seconds == product_seconds(8, 512, 256, chip=CHIPS["tpu-v4"])
    assert any("overflowed" in note for note in found.notes)
    assert timeline(program(step("a", 1)), "tpu-v4", MESH).notes == ()
    # Anything else takes its bytes over main memory, 1,200,000 per µs: those of `a`, read and written.
    other = timeline(program(step("a", 1).replace('"1050"', f'"{2**63 - 1}"')), "tpu-v4", MESH)
    assert micro(other.step_seconds) == (0.15,)
    assert other.notes == found.notes


def test_the_two_devices_of_a_chip_count_as_a_ring_of_their_own():
    exchange = "%g = u8[90000]{0} all-to-all(%p), replica_groups=[1,8]<=[8], dimensions={0}"
    mesh = {"x": 4, "core": 2}
    found = timeline(program(exchange), "tpu7x", mesh, torus={"core": ()})
    assert found.step_seconds == collective_seconds("all-to-all", tuple(mesh), mesh, 90_000, found.chip)


def test_a_blocking_all_gather_takes_the_link_model():
    gather = "%g = u8[360000]{0} all-gather(%a), replica_groups=[4,4]<=[16], dimensions={0}"
    found = run(step("a", 1), gather, step("b", 2, "a"))
    # 270 000 bytes leave each device over two links, 90 000 per µs together: 3 µs, and 2 hops
    assert times(found) == (8, 3, 0, 5)
    assert found.exposed_seconds == collective_seconds("all-gather", ("y",), MESH, 360_000, found.chip)
    assert [(span.rows, *micro(span.start, span.seconds)) for span in found.spans] == [
        (("compute",), 0, 1),
        (("y",), 1, 5),
        (("compute",), 6, 2),
    ]


def test_an_axis_over_two_torus_axes_is_two_rings():
    gather = "%g = u8[1440000]{0} all-gather(%p), replica_groups=[1,16]<=[16], dimensions={0}"
    module = program(gather)
    # 1 350 000 bytes over two links, 90 000 per µs: 15 µs and 8 hops round one ring of 16
    assert micro(timeline(module, "tpu-v4", {"x": 16}).step_seconds) == (23,)
    # over four links 7.5 µs, and 2 hops along each of two rings of 4
    assert micro(timeline(module, "tpu-v4", {"x": 16}, torus={"x": (4, 4)}).step_seconds) == (11.5,)


@pytest.mark.parametrize(
    ("algorithm", "seconds"),
    [
        ('"emitter":"1DAllGatherNonMajorDim"', 23),  # one ring of 16, as in the test before
        ('"emitter":"Any","debug":"\\nStrategyRing{colors:1 phases:1 cores:{16} nophase0:0}"', 23),
        ('"emitter":"Any","debug":"\\nUniDirectionNDRingStrategy{colors:4 phases:2 cores:{4 4},{4 4}}"', 11.5),
        ('"emitter":"2DAllGather"', 11.5),
        ('"emitter":"Any","debug":"cores:{8}"', 11.5),  # not of this group
    ],
)
def test_the_rings_are_those_of_the_algorithm_that_the_compiler_names(algorithm, seconds):
    config = f'backend_config={{"collective_algorithm_config":{{{algorithm}}}}}'
    gather = f"%g = u8[1440000]{{0}} all-gather(%p), replica_groups=[1,16]<=[16], dimensions={{0}}, {config}"
    assert micro(timeline(program(gather), "tpu-v4", {"x": 16}, torus={"x": (4, 4)}).step_seconds) == (seconds,)


def test_a_gather_over_two_axes_is_planned_as_the_compilers_one_ring():
    # Of latency the plan counts two hops along each axis, and the timeline eight round the ring.
    sizes, mesh = {"B": 512, "L": 1, "E": 18432, "F": 73728}, {"x": 4, "y": 4, "z": 4}
    gathered = gspmd.plan("BLE_xyz, E_xF_yz -> BLF_yzx", sizes, mesh).steps[0]
    config = 'backend_config={"collective_algorithm_config":{"emitter":"1DAllGather"}}'
    gather = f"%g = bf16[512,4608]{{1,0}} all-gather(%p), replica_groups=[4,16]<=[64], dimensions={{1}}, {config}"
    found = timeline(program(gather), "tpu-v4", mesh)
    assert (gathered.kind, gathered.axes, *micro(gathered.seconds)) == ("all-gather", ("y", "z"), 53.152)
    assert micro(found.step_seconds) == (57.152,)


@pytest.mark.parametrize(
    ("chip", "rings", "link_seconds", "hops"),
    [
        (
            "tpu-v5e",
            (2, 4),
            1,
            4,
        ),  # there along four rows of two, and back: a cycle of neighbours, two links of each chip
        ("tpu-v5e", (8,), 2, 7),  # a line: one link, to the far end
        ("tpu-v5e", (3, 3), 2, 8),  # no cycle through nine places
        ("tpu-v4", (2, 3), 1, 3),
    ],
)
def test_one_ring_over_several_torus_axes_closes_where_a_side_is_even(chip, rings, link_seconds, hops):
    count = prod(rings)
    config = 'backend_config={"collective_algorithm_config":{"emitter":"1DAllGather"}}'
    gather = (
        f"%g = u8[{count}00000]{{0}} all-gather(%p), replica_groups=[1,{count}]<=[{count}], dimensions={{0}}, {config}"
    )
    found = timeline(program(gather), chip, {"x": count}, torus={"x": rings})
    link = (count - 1) * 100_000 / 2 / found.chip.link_bandwidth  # over two links
    assert found.step_seconds == pytest.approx(
        link_seconds * link + found.chip.start_seconds + hops * found.chip.hop_seconds
    )


@pytest.mark.parametrize(("each", "step_time", "hidden", "exposed"), [(5, 21, 9, 0), (2, 12, 6, 3)])
def test_an_overlapped_ring_takes_the_longer_of_the_two_after_its_prologue(each, step_time, hidden, exposed):
    # 90 000 bytes: 2 µs on one link and one hop: 3 µs, three times, beside products of 5 µs or of 2 µs;
    # before them 1 µs, after them one product more: 1 + 3·max(3, 5) + 5 = 21, or 1 + 3·max(3, 2) + 2 = 12
    lines = [step("prologue", 1)]
    for n, before in enumerate(["prologue", "d0", "d1"]):
        lines += [start(f"s{n}", "+x", operand=before), step(f"m{n}", each, before), done(f"d{n}", f"s{n}")]
    found = run(*lines, step("last", each, "d2"))
    assert times(found) == (step_time, 1 + 4 * each, hidden, exposed)


@pytest.mark.parametrize(
    ("first", "second", "exposed"),
    [
        ("+x", "+x", 5),  # 4 µs on the shared link, then the hop
        ("+x", "-x", 3),  # either has its own direction: 2 µs and the hop
        ("+x", "+y", 3),
        ("+x", "half way round x", 5),  # fills both directions for 2 µs, so shares one of them; then two hops
    ],
)
def test_concurrent_permutes_share_a_link_only_on_one_axis_in_one_direction(first, second, exposed):
    last = 1 if second == "half way round x" else 0
    found = run(start("a", first), start("b", second), done("c", "a"), done("d", "b"))
    assert times(found) == (exposed + last, 0, 0, exposed + last)


def test_a_short_transfer_leaves_the_link_to_the_long_one():
    # 45 000 and 90 000 bytes: until 2 µs both send 45 000, then the long one has 1 µs left alone, and its hop
    found = run(start("a", "+x", 45_000), start("b", "+x"), done("c", "a", 45_000), done("d", "b"))
    assert times(found)[0] == 4
    assert [micro(span.seconds)[0] for span in found.spans] == [3, 4]


def test_a_blocking_collective_shares_with_what_is_under_way():
    # the gather over x alone: 3 µs and 2 hops; the permute takes half of one of its directions for 2·2 = 4 µs, in which
    # the gather gets 2 of its 3 µs done; 1 µs more, and the hops
    gather = "%g = u8[360000]{0} all-gather(%p), replica_groups=[4,4]<=[4,4]T(1,0), dimensions={0}"
    assert times(run(start("a", "+x"), gather, done("b", "a")))[0] == 7


def test_without_wrap_around_a_ring_closes_through_the_other_direction():
    # on v5e, 4 chips are a line: 2 µs on the links, three hops back; both directions are taken, so two rings share
    mesh = {"x": 4, "y": 4}
    assert times(run(start("a", "+x"), done("b", "a"), mesh=mesh, chip="tpu-v5e"))[0] == 5
    two = run(start("a", "+x"), start("b", "-x"), done("c", "a"), done("d", "b"), mesh=mesh, chip="tpu-v5e")
    assert times(two)[0] == 7
    assert times(run(start("a", "+y open"), done("b", "a"), mesh=mesh, chip="tpu-v5e"))[0] == 3


def test_under_a_switch_everything_shares_what_a_chip_sends():
    # 721 800 bytes per µs leave a GB200: 100 µs each
    size = 72_180_000
    alone = run(start("a", "+x", size), done("c", "a", size), chip="gb200").step_seconds
    found = run(start("a", "+x", size), start("b", "+y", size), done("c", "a"), done("d", "b"), chip="gb200")
    assert found.step_seconds == pytest.approx(alone + 100e-6)
    assert alone == pytest.approx(
        CHIPS["gb200"].launch_seconds + collective_seconds("collective-permute", "x", MESH, size, CHIPS["gb200"])
    )


@pytest.mark.parametrize(("chip", "rate", "latency"), [("tpu-v5p", 86_300, 4.55), ("tpu-v6e", 86_800, 2.29)])
def test_a_permute_to_a_neighbour_takes_what_was_measured(chip, rate, latency):
    # marin-community/marin issue 6736
    found = run(start("a", "+y open", 10 * rate), done("b", "a"), chip=chip)
    assert found.step_seconds == pytest.approx((10 + latency) * 1e-6)


def test_what_leaves_a_node_shares_the_network_and_nothing_else():
    # two nodes of 8: rings along x go from one to the other, 47 000 bytes per µs; rings along y stay, 370 800 per µs
    size = 4_700_000
    out, back, near = start("a", "+x", size), start("b", "-x", size), start("n", "+y", size)
    chip = CHIPS["h100"]
    alone = run(out, done("c", "a"), chip="h100").step_seconds
    planned = collective_seconds("collective-permute", "x", MESH, size, chip)
    hop = chip.hop_seconds + SIMPLE.hop  # counted in a plan, because some neighbours share a node
    assert alone == pytest.approx(chip.launch_seconds + planned - hop)
    assert run(out, near, done("c", "a"), done("m", "n"), chip="h100").step_seconds == pytest.approx(alone)
    assert run(out, back, done("c", "a"), done("d", "b"), chip="h100").step_seconds == pytest.approx(alone + 100e-6)


ACROSS = "[4,4]<=[4,4]T(1,0)"


@pytest.mark.parametrize(("axes", "groups"), [("x", ACROSS), ("y", "[4,4]<=[16]"), ("xy", "[1,16]<=[16]")])
def test_a_collective_takes_what_was_planned_for_it(axes, groups):
    for name in ("h100", "mi300x", "gb200"):
        gather = f"%g = u8[1600000]{{0}} all-gather(%p), replica_groups={groups}, dimensions={{0}}"
        planned = collective_seconds("all-gather", axes, MESH, 1_600_000, CHIPS[name])
        assert run(gather, chip=name).step_seconds == pytest.approx(CHIPS[name].launch_seconds + planned)


def test_groups_that_are_no_axes_are_a_ring_of_their_own_on_the_axes_they_cross():
    gather = "%g = u8[180000]{0} all-gather(%p), replica_groups={{0,5},{1,4},{2,7},{3,6},{8,13},{9,12},{10,15},{11,14}}"
    found = run(gather + ", dimensions={0}")
    # 90 000 bytes over two links is 1 µs; a ring of 2 has no wrap-around: twice that, and one hop
    assert times(found) == (3, 0, 0, 3)
    assert [span.rows for span in found.spans] == [("x", "y")]


def test_groups_that_are_a_part_of_an_axis_use_some_of_its_rings():
    gather = "%g = u8[1440000]{0} all-gather(%p), replica_groups=[4,16]<=[64], dimensions={0}"
    module = program(gather)
    # places 0 to 15 of an axis of 64 over a torus of 4x4x4: two of its rings; 7.5 µs and 2 · 2 hops
    assert micro(timeline(module, "tpu-v4", {"x": 64}, torus={"x": (4, 4, 4)}).step_seconds) == (11.5,)
    assert micro(timeline(module, "tpu-v4", {"x": 64}).step_seconds) == (23,)  # one ring of 16


LOOP = """
%body (b: (s32[], u8[90000])) -> (s32[], u8[90000]) {
  %b = (s32[], u8[90000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %v = u8[90000]{0} get-tuple-element(%b), index=1
  STEP
  ROOT %r = (s32[], u8[90000]{0}) tuple(%i, %w)
}

%condition (c: (s32[], u8[90000])) -> pred[] {
  %c = (s32[], u8[90000]{0}) parameter(0)
  ROOT %t = pred[] constant(true)
}
"""
WHILE = (
    "%w = (s32[], u8[90000]{0}) while(%t), condition=%condition, body=%body, "
    'backend_config={"known_trip_count":{"n":"10"}}'
)
ENTER = ("%z = s32[] constant(0)", "%t = (s32[], u8[90000]{0}) tuple(%z, %p)")


def test_loops_multiply_and_are_drawn_once():
    gather = "%g = u8[360000]{0} all-gather(%w), replica_groups=[4,4]<=[16], dimensions={0}"
    computations = LOOP.replace("STEP", f"{step('w', 2, 'v')}\n  {gather}")
    found = run(step("a", 1), *ENTER, WHILE, step("e", 1), computations=computations)
    assert times(found) == (72, 22, 0, 50)  # 1 + 10·(2 + 5) + 1
    assert [(span.category, span.times, *micro(span.start, span.seconds)) for span in found.spans] == [
        ("other", 1, 0, 1),
        ("other", 10, 1, 2),
        ("all-gather", 10, 3, 5),
        ("loop", 10, 1, 7),
        ("other", 1, 8, 1),
    ]
    assert [(part.category, part.count, *micro(part.seconds, part.exposed)) for part in found.parts] == [
        ("all-gather", 10, 50, 50),
        ("other", 12, 22, 0),
    ]


def test_a_loop_in_a_loop():
    inner = LOOP.replace("STEP", step("w", 1, "v")).replace("%body", "%inner").replace("%condition", "%inner_condition")
    call = WHILE.replace("%w = ", "%u = ").replace("%t)", "%b)").replace("=%body", "=%inner")
    call = call.replace("=%condition", "=%inner_condition").replace('"10"', '"3"')
    outer = LOOP.replace("STEP", f"{call}\n  %w = u8[90000]{{0}} get-tuple-element(%u), index=1")
    found = run(*ENTER, WHILE, computations=inner + outer)
    assert times(found) == (30, 30, 0, 0)
    loops = [(span.name, span.times, span.trips) for span in found.spans if span.category == "loop"]
    assert loops == [("u", 30, 3), ("w", 10, 10)]


def test_a_copy_of_what_no_iteration_changes_is_named():
    """XLA puts a whole stack of weights into another order, again for each layer that takes one of them."""
    copied = step("k", 3, "v").replace("negate", "copy")
    kept = LOOP.replace("STEP", copied).replace("tuple(%i, %w)", "tuple(%i, %v)")
    assert run(*ENTER, WHILE, computations=kept).warnings == (
        "k copies the whole u8[90000] in each of 10 iterations, though none changes it: 30 µs of 30 µs. If "
        "lowering looped cuts it, lowering blocking makes no such copy",
    )
    changed = LOOP.replace("STEP", f"{copied}\n  {step('w', 3, 'k')}")
    assert run(*ENTER, WHILE, computations=changed).warnings == ()
    sliced = kept.replace("copy(%v)", "negate(%v)")
    assert run(*ENTER, WHILE, computations=sliced).warnings == ()
    assert run(step("a", 2000), *ENTER, WHILE, computations=kept).warnings == ()  # too short for a word


def test_slices_that_a_loop_copies_out_of_a_stack_are_named():
    """Ragged products of experts read an array of their own: the weights of a layer are copied out of their stack."""
    cut = step("k", 3, "v").replace("u8[90000]", "u8[9000]")
    cut = cut.replace("negate(%v)", "dynamic-slice(%v, %i), dynamic_slice_sizes={9000}")
    kept = LOOP.replace("STEP", cut).replace("tuple(%i, %w)", "tuple(%i, %v)")
    assert run(*ENTER, WHILE, computations=kept).warnings == (
        "k copies u8[9000] out of a stack in each of 10 iterations: 30 µs of 30 µs. If lowering looped or auto cuts "
        "this weight into pieces, try lowering blocking. In serving, blocks with weights of their own need no copy: "
        "--model.no-stacked, or gspmd generate --unstacked",
    )
    two = kept.replace(cut, f"{cut}\n  {cut.replace('%k', '%l')}")
    assert "and 1 more do so: 60 µs of 60 µs" in run(*ENTER, WHILE, computations=two).warnings[0]
    for other in (
        cut.replace("9000]{0}", "9000]{0:S(1)}"),  # It is loaded onto the chip, ahead of its use.
        cut.replace("u8[9000]", "s32[1]"),  # It is the place of a row in a cache.
        step("k", 3, "v"),
    ):
        assert run(*ENTER, WHILE, computations=kept.replace(cut, other)).warnings == ()
    shown = '%c = () custom-call(%v), custom_call_target="print"'  # without a result
    assert run(*ENTER, WHILE, computations=kept.replace(cut, f"{cut}\n  {shown}")).warnings
    changed = LOOP.replace("STEP", f"{cut}\n  {step('w', 3, 'k')}")
    assert run(*ENTER, WHILE, computations=changed).warnings == ()
    assert run(step("a", 300), *ENTER, WHILE, computations=kept).warnings == ()  # too short for a word


@pytest.mark.parametrize(("from_stack", "warned"), [(True, True), (False, False)])
def test_a_fusion_that_only_slices_is_such_a_copy_of_what_it_slices(from_stack, warned):
    """The other operand is as large, and changes: it is no stack."""
    fused = """
%fused (a: u8[90000], b: u8[90000], n: s32[]) -> u8[9000] {
  %a = u8[90000]{0} parameter(0)
  %b = u8[90000]{0} parameter(1)
  %n = s32[] parameter(2)
  %one = s32[] constant(1)
  %at = s32[] add(%n, %one)
  %view = u8[90000]{0} bitcast(%READ)
  %cut = u8[9000]{0} dynamic-slice(%view, %at), dynamic_slice_sizes={9000}
  ROOT %out = u8[9000]{0} bitcast(%cut)
}
""".replace("%READ", "%a" if from_stack else "%b")
    other = step("o", 1, "v")
    cut = (
        step("k", 3, "v")
        .replace("u8[90000]", "u8[9000]")
        .replace("negate(%v)", "fusion(%v, %o, %i), kind=kLoop, calls=%fused")
    )
    body = LOOP.replace("STEP", f"{other}\n  {cut}").replace("tuple(%i, %w)", "tuple(%i, %v)")
    assert bool(run(*ENTER, WHILE, computations=fused + body).warnings) is warned


def test_a_loop_whose_trips_are_not_known_counts_once_and_is_named():
    found = run(*ENTER, WHILE.partition(", backend")[0], computations=LOOP.replace("STEP", step("w", 1, "v")))
    assert times(found)[0] == 1
    assert found.notes == ("the trips of loop w depend on computed values; it is counted once",)
    assert "note: the trips of loop w" in str(found)


def test_a_transfer_across_the_border_of_iterations():
    """Each iteration waits for what the one before began, begins the next, and computes beside it."""
    begun = "(u8[90000]{0}, u8[90000]{0}, u32[], u32[])"
    state = f"(s32[], {begun})"
    computations = LOOP.replace("(s32[], u8[90000]{0})", state).replace("%v = u8[90000]{0}", f"%v = {begun}")
    lines = [done("d", "v"), start("w", "+x", operand="d"), step("m", 2, "d")]
    computations = computations.replace("STEP", "\n  ".join(lines))
    loop = WHILE.replace("(s32[], u8[90000]{0})", state)
    entry = ["%z = s32[] constant(0)", start("first", "+x"), f"%t = {state} tuple(%z, %first)", loop]
    entry += [f"%o = {begun} get-tuple-element(%w), index=1", done("end", "o")]
    found = run(*entry, computations=computations)
    # a permute is 3 µs. The first iteration waits for all 3 and computes 2; the nine others wait for the last µs of
    # what the one before began, and compute 2; the last permute has 1 µs left: 5 + 9·3 + 1
    assert times(found) == (33, 20, 20, 13)
    assert [(part.category, part.count) for part in found.parts] == [("collective-permute", 11), ("other", 10)]
    assert [(span.trips, *micro(span.start, span.seconds)) for span in found.spans if span.category == "loop"] == [
        (1, 0, 5),
        (9, 5, 3),
    ]


def test_a_loop_under_a_long_transfer_hides_it_in_as_many_iterations_as_it_takes():
    # 450 000 bytes: 10 µs and a hop, beside ten iterations of 2 µs
    computations = LOOP.replace("STEP", step("w", 2, "v"))
    found = run(start("a", "+x", 450_000), *ENTER, WHILE, done("b", "a", 450_000), computations=computations)
    assert times(found) == (20, 20, 11, 0)


def test_a_conditional_takes_its_longest_branch():
    computations = function("short", step("s", 1, "q")) + function("long", step("l", 4, "q"))
    choice = "%c = u8[90000]{0} conditional(%f, %p, %p), true_computation=%long, false_computation=%short"
    lines = ("%f = pred[] constant(true)", start("a", "+x"), choice, done("b", "a"), step("e", 1))
    found = run(*lines, computations=computations)
    assert times(found) == (5, 5, 3, 0)
    assert [span.instruction for span in found.spans] == ["l", "a", "e"]


def test_a_called_computation_runs_where_it_is_called():
    found = run("%c = u8[90000]{0} call(%p), to_apply=%f", computations=function("f", step("s", 2, "q")))
    assert times(found) == (2, 2, 0, 0)


def test_copies_between_memories_run_beside_and_waiting_for_them_is_computing():
    # 12 MB at 1.2 MB per µs: 10 µs, of which 4 are computed beside, and 3 a permute is waited for
    copy = "%k = (u8[12000000]{0:S(3)}, u8[12000000]{0}, u32[]) copy-start(%p)"
    end = "%l = u8[12000000]{0:S(3)} copy-done(%k)"
    found = run(copy, start("a", "+x"), done("b", "a"), step("m", 4), end)
    assert times(found) == (10, 7, 0, 3)
    assert micro(found.memory_seconds) == (7,)  # 3 µs of waiting, and what only touches bytes: all of m
    assert found.rows == ("compute", "x", "y", "memory")


BLOCKS = "u8[8,150000]{1,0:S(5)}"
"""A stack of eight blocks in host memory, whose link takes 15 000 bytes per µs in each direction."""
PUSH = (
    f"%u = (({BLOCKS}, u8[1,150000]{{1,0}}, s32[], s32[]), {BLOCKS}, u32[]) "
    "dynamic-update-slice-start(%stack, %block, %zero, %zero)"
)
PUSHED = f"%v = {BLOCKS} dynamic-update-slice-done(%u)"
PULL = (
    f"%r = (({BLOCKS}, s32[], s32[]), u8[1,150000]{{1,0}}, u32[]) dynamic-slice-start(%stack, %zero, %zero), "
    "dynamic_slice_sizes={1,150000}"
)
PULLED = "%s = u8[1,150000]{1,0} dynamic-slice-done(%r)"
HELD = (
    f'%stack = {BLOCKS} custom-call(), custom_call_target="AllocateBuffer"',
    "%block = u8[1,150000]{1,0} bitcast(%p)",
    "%zero = s32[] constant(0)",
)


def test_copies_to_the_host_take_the_time_of_its_link():
    # 150 000 bytes: 10 µs, of which 4 are computed beside
    pushed, pulled = (run(*HELD, start, step("m", 4), end) for start, end in ((PUSH, PUSHED), (PULL, PULLED)))
    for found in (pushed, pulled):
        assert times(found) == (10, 10, 0, 0)
        assert micro(found.host_seconds, found.memory_seconds) == (6, 4)  # m only touches bytes
        assert "60% waiting for host memory" in found.summary
        assert found.rows == ("compute", "x", "y", "host memory")
        assert [(part.axes, micro(part.seconds)) for part in found.parts if part.category == "copy"] == [
            (("host memory",), (10,))
        ]


def test_pictures_and_traces_have_a_row_for_the_host(tmp_path):
    found = run(*HELD, PUSH, step("m", 4), PUSHED)
    drawn = found.figure()._repr_html_()
    assert "copy host memory" in drawn
    assert "of it exposed" not in drawn  # Waiting for a copy counts as computing.
    perfetto.write(found, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert "host memory" in {event["args"].get("name") for event in trace["traceEvents"]}
    assert trace["otherData"]["host_seconds"] == pytest.approx(6e-6)
    gantt.draw(found, tmp_path / "gantt.svg")
    assert "<!-- host memory -->" in (tmp_path / "gantt.svg").read_text()


def test_a_mesh_axis_may_be_called_host():
    """Its links are not the link to the host."""
    gather = "%a = u8[360000]{0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}"
    alone, beside = (run(*lines, mesh={"host": 4}) for lines in ((gather,), (*HELD, PUSH, gather, PUSHED)))
    gathered = micro(alone.exposed_seconds)[0]
    assert times(beside) == (10, 10 - gathered, 0, gathered)


def test_copies_to_the_host_and_from_it_do_not_share_the_link():
    assert times(run(*HELD, PUSH, PULL, PUSHED, PULLED)) == (10, 10, 0, 0)
    again = [line.replace("%u ", "%u2 ").replace("%v ", "%v2 ").replace("(%u)", "(%u2)") for line in (PUSH, PUSHED)]
    assert times(run(*HELD, PUSH, again[0], PUSHED, again[1])) == (20, 20, 0, 0)


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("(u8[150000]{0:S(5)}, u8[150000]{0}, u32[]) copy-start(%p)", "u8[150000]{0:S(5)} copy-done(%k)"),
        ("(u8[150000]{0}, u8[150000]{0:S(5)}, u32[]) copy-start(%there)", "u8[150000]{0} copy-done(%k)"),
        ("((u8[150000]{0:S(5)}), u8[150000]{0}, u32[]) async-start(%there), calls=%f", "u8[150000]{0} async-done(%k)"),
        (
            f"(({BLOCKS}), {BLOCKS}, u32[]) fusion-start(%blocks, %part), kind=kCustom, calls=%g",
            f"{BLOCKS} fusion-done(%k)",
        ),
    ],
)
def test_every_kind_of_copy_uses_the_link_to_the_host(line, end):
    allocated = 'custom-call(), custom_call_target="AllocateBuffer"'
    there = (f"%there = u8[150000]{{0:S(5)}} {allocated}", f"%blocks = {BLOCKS} {allocated}")
    inner = (
        "%f (q: u8[150000]) -> u8[150000] {\n  %q = u8[150000]{0:S(5)} parameter(0)\n"
        "  ROOT %w = u8[150000]{0} copy(%q)\n}\n"
        f"%g (c: u8[8,150000], d: u8[1,150000]) -> u8[8,150000] {{\n  %c = {BLOCKS} parameter(0)\n"
        "  %d = u8[1,150000]{1,0} parameter(1)\n  %z = s32[] constant(0)\n"
        f"  ROOT %y = {BLOCKS} dynamic-update-slice(%c, %d, %z, %z)\n}}\n"
    )
    found = run(*there, "%part = u8[1,150000]{1,0} bitcast(%p)", f"%k = {line}", f"%l = {end}", computations=inner)
    assert times(found) == (10, 10, 0, 0)


def test_what_computes_on_host_memory_is_noted():
    held = f"%w = {BLOCKS} dynamic-update-slice(%stack, %block, %zero, %zero)"
    assert "w reads or writes host memory itself" in run(*HELD, held).notes[0]
    assert not run(*HELD, PUSH, PUSHED).notes


def test_a_host_whose_link_is_unknown_is_noted():
    alone = replace(CHIPS["tpu-v4"], host_bandwidth=0.0)
    found = run(*HELD, PUSH, PUSHED, chip=alone)
    assert micro(found.step_seconds) == (0.125,)
    assert "the bandwidth between tpu-v4 and its host is not known" in found.notes[0]


def test_products_that_the_compiler_computes_again_are_named_with_a_remedy():
    """A copy that takes the place of its original costs nothing more, and neither do other instructions."""

    def product(name, microseconds):
        return (
            f"%{name} = bf16[8,256]{{1,0}} dot(%l, %r), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, "
            f"{lasting(microseconds)}"
        )

    given = ("%l = bf16[8,512]{1,0} parameter(1)", "%r = bf16[512,256]{1,0} parameter(2)")
    every = (product("d.1", 10), product("d.1.remat", 10), product("d.1.remat.2.remat3", 10), product("e.remat2", 7))
    (said,) = run(*given, *every, step("a.remat", 3), step("a.remat2", 3)).warnings
    assert "20 µs of 43 µs, most of it for d.1." in said
    assert "--compiler-options xla_tpu_rematerialization_min_size_in_bytes=1000000000000" in said
    assert "xla_tpu" not in run(*given, *every, chip="h100").warnings[0]
    assert run(*given, *every[:1], *every[3:]).warnings == ()
    assert run(*given, *every, step("a", 1000)).warnings == ()  # too short for a word


def test_without_an_estimate_the_roofline():
    signature = "(p: u8[90000], a: bf16[1024,2048], b: bf16[2048,1024], c: f32[12,100000]) -> bf16[1024,1024]"
    lines = (
        "%a = bf16[1024,2048]{1,0} parameter(1)",
        "%b = bf16[2048,1024]{1,0} parameter(2)",
        "%c = f32[12,100000]{1,0} parameter(3)",
        "%d = bf16[1024,1024]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "%s = f32[1,100000]{1,0} slice(%c), slice={[0:1], [0:100000]}",
        "%v = f32[1,100000]{1,0:S(3)} copy(%s)",
        "%i = s32[] constant(7)",
        "%j = s32[] add(%i, %i)",
    )
    found = run(*lines, signature=signature)
    # 2·1024·2048·1024 operations at 275 TFLOP/s, longer than 10 MiB of memory traffic; then 400 kB are read and
    # written, and read into a memory of the chip; scalars are free
    product, memory = 2 * 1024 * 2048 * 1024 / 275e12, (800_000 + 400_000) / 1.2e12
    assert found.compute_seconds == pytest.approx(product + memory)
    assert found.memory_seconds == pytest.approx(memory)
    assert found.flops == 2 * 1024 * 2048 * 1024
    assert found.mfu == pytest.approx(product / (product + memory))
    assert [span.category for span in found.spans] == ["einsum", "other", "other"]


def test_of_what_is_scattered_into_in_place_only_the_updates_are_written():
    computations = """%fused (q: u8[4,1200000], n: s32[1,1], u: u8[1,1200000]) -> u8[4,1200000] {
  %q = u8[4,1200000]{1,0} parameter(0)
  %n = s32[1,1]{1,0} parameter(1)
  %u = u8[1,1200000]{1,0} parameter(2)
  ROOT %out = u8[4,1200000]{1,0} scatter(%q, %n, %u), update_window_dims={1}
}
"""
    lines = (
        "%q = u8[4,1200000]{1,0} parameter(1)",
        "%n = s32[1,1]{1,0:S(1)} parameter(2)",
        "%u = u8[1,1200000]{1,0} parameter(3)",
        "%f = u8[4,1200000]{1,0} fusion(%q, %n, %u), kind=kCustom, calls=%fused",
    )
    signature = "(p: u8[90000], q: u8[4,1200000], n: s32[1,1], u: u8[1,1200000]) -> u8[4,1200000]"
    found = run(*lines, signature=signature, computations=computations)
    assert micro(found.step_seconds)[0] == pytest.approx(2, abs=1e-4)  # 1.2 MB read, 1.2 MB written


def test_a_scatter_into_several_arrays_writes_the_updates_of_each():
    lines = (
        *(f"%{name} = u8[4,1200000]{{1,0}} parameter({number})" for number, name in enumerate("qr", 1)),
        "%n = s32[1,1]{1,0:S(1)} parameter(3)",
        "%u = u8[1,1200000]{1,0} parameter(4)",
        "%v = u8[2,1200000]{1,0} parameter(5)",
        "%s = (u8[4,1200000]{1,0}, u8[4,1200000]{1,0}) scatter(%q, %r, %n, %u, %v), update_window_dims={1}",
    )
    found = run(*lines)
    assert micro(found.step_seconds)[0] == pytest.approx(6, abs=1e-4)  # 3.6 MB of updates read, and written


@pytest.mark.parametrize(("aliased", "read"), [(0, 1.2), (1, 4.8)])
def test_of_what_a_call_renames_only_the_operand_that_it_names_is_not_read(aliased, read):
    # 4.8 MB get another name, under which 1.2 MB are read; or all are read, and what lies on the chip gets that name
    computations = f"""%fused (q: u8[4,1200000], o: u8[4,1200000]) -> u8[1,1200000] {{
  %q = u8[4,1200000]{{1,0}} parameter(0)
  %o = u8[4,1200000]{{1,0:S(1)}} parameter(1)
  %c = u8[4,1200000]{{1,0}} custom-call(%q, %o), output_to_operand_aliasing={{{{}}: ({aliased}, {{}})}}
  ROOT %out = u8[1,1200000]{{1,0}} slice(%c), slice={{[0:1], [0:1200000]}}
}}
"""
    lines = (
        "%q = u8[4,1200000]{1,0} parameter(1)",
        "%o = u8[4,1200000]{1,0:S(1)} parameter(2)",
        "%f = u8[1,1200000]{1,0} fusion(%q, %o), kind=kLoop, calls=%fused",
    )
    found = run(*lines, computations=computations)
    assert micro(found.step_seconds)[0] == pytest.approx((read + 1.2) / 1.2, abs=1e-4)  # and 1.2 MB written


def test_of_a_stack_that_a_fusion_slices_only_the_slice_is_read():
    computations = """%fused (q: u8[10,1200000], n: s32[]) -> u8[1,1200000] {
  %q = u8[10,1200000]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = u8[1,1200000]{1,0} dynamic-slice(%q, %n, %zero), dynamic_slice_sizes={1,1200000}
  ROOT %out = u8[1,1200000]{1,0} negate(%cut)
}
"""
    lines = (
        "%q = u8[10,1200000]{1,0} parameter(1)",
        "%n = s32[] parameter(2)",
        "%f = u8[1,1200000]{1,0} fusion(%q, %n), kind=kLoop, calls=%fused",
    )
    signature = "(p: u8[90000], q: u8[10,1200000], n: s32[]) -> u8[1,1200000]"
    found = run(*lines, signature=signature, computations=computations)
    assert micro(found.step_seconds)[0] == pytest.approx(2, abs=1e-4)  # 1.2 MB read, 1.2 MB written
    assert found.memory_share == 1


def test_what_a_nested_fusion_only_renames_is_read_where_it_is_used():
    """A decode step without stacks has its weights in such fusions."""
    computations = """%renamed (q: u8[4,1200000]) -> u8[4800000] {
  %q = u8[4,1200000]{1,0} parameter(0)
  ROOT %view = u8[4800000]{0} bitcast(%q)
}

%again (q: u8[4,1200000]) -> u8[4800000] {
  %q = u8[4,1200000]{1,0} parameter(0)
  ROOT %inner = u8[4800000]{0} fusion(%q), kind=kLoop, calls=%renamed
}

%fused (q: u8[4,1200000]) -> u8[4800000] {
  %q = u8[4,1200000]{1,0} parameter(0)
  %inner = u8[4800000]{0} fusion(%q), kind=kLoop, calls=%again
  ROOT %out = u8[4800000]{0:S(1)} negate(%inner)
}
"""
    lines = (
        "%q = u8[4,1200000]{1,0} parameter(1)",
        "%f = u8[4800000]{0:S(1)} fusion(%q), kind=kLoop, calls=%fused",
    )
    found = run(*lines, computations=computations)
    assert micro(found.step_seconds)[0] == pytest.approx(4, abs=1e-4)  # 4.8 MB read
    assert found.spans[-1].bytes == 4_800_000


# -- chips whose kernels have been timed -------------------------------------------------------------------------------

V5E, TIMED = CHIPS["tpu-v5e"], EFFICIENCIES["tpu-v5e"]
OPERANDS = (
    *(f"%{name} = f32[1000000]{{0}} parameter({number})" for number, name in enumerate("qr", 1)),
    "%m = f32[1000,1000]{1,0} parameter(3)",
    "%c = f32[1000000]{0:S(1)} parameter(4)",
    "%i = f32[] parameter(5)",
)
COPY = "%k = (f32[1000000]{0:S(1)}, f32[1000000]{0}, u32[]) copy-start(%q)"
COPIED = "%l = f32[1000000]{0:S(1)} copy-done(%k)"


def v5e(*lines: str, **more):
    return timeline(program(*OPERANDS, *lines, **more), "tpu-v5e", MESH)


def cycles(microseconds: float, name: str = "tpu-v5e") -> str:
    return (
        f'backend_config={{"window_config":{{"estimated_cycles":"{round(CHIPS[name].clock * microseconds * 1e-6)}"}}}}'
    )


def in_memory(read: float, written: float) -> float:
    """Seconds in which a v5e reads and writes main memory."""
    return (read / TIMED.read_efficiency + written / TIMED.write_efficiency) / 819e9


def test_kernels_take_the_time_of_their_bytes_where_it_has_been_measured():
    line = "%s = f32[1000000]{0} add(%q, %r)"
    expected = TIMED.overhead_seconds + in_memory(8e6, 4e6)
    assert v5e(f"{line}, {cycles(40)}").step_seconds == pytest.approx(expected)
    assert v5e(line).step_seconds == pytest.approx(expected)  # without an estimate
    other = timeline(program(*OPERANDS, f"{line}, {lasting(40)}"), "tpu-v4", MESH)
    assert other.step_seconds == pytest.approx(40e-6)  # Nobody has timed the kernels of a v4.


@pytest.mark.parametrize(
    ("line", "took"),
    [
        ("%s = f32[1000,1000]{0,1} transpose(%m), dimensions={1,0}", 100),
        ("%s = f32[1000,1000]{0,1} copy(%m)", 100),
        ("%s = f32[1000,1000]{1,0} reshape(%q)", 100),
        ("%s = f32[1000,1128]{1,0} pad(%m, %i), padding=0_0x0_128", 100),
        ("%s = f32[1000,1000]{1,0} ragged-dot(%m, %m, %n)", 100),  # Its FLOPs are not known.
        ("%s = f32[1000000]{0} add(%q, %r)", 5),  # The estimate is below what such a kernel takes.
    ],
)
def test_other_instructions_take_the_compilers_cycles(line, took):
    given = "%n = s32[4]{0} parameter(6)"
    assert v5e(given, f"{line}, {cycles(took)}").step_seconds == pytest.approx(took * 1e-6)


def test_an_estimate_far_above_the_time_of_the_bytes_still_counts():
    """It may be due to computation, such as that of random numbers; no timed kernel was so far below its estimate."""
    found = v5e(f"%s = f32[1000000]{{0}} add(%q, %r), {cycles(1000)}")
    assert found.step_seconds == pytest.approx(TIMED.least_share * 1e-3)


@pytest.mark.parametrize(("estimate", "took"), [(30, 11.4), (9, 11.4), (8, 1.35 * 8)])
def test_on_a_v6e_kernels_may_take_longer_than_the_compilers_cycles(estimate, took):
    """The compiler expects its memory to be faster than it is. An estimate far below says that not all is read."""
    row, line = EFFICIENCIES["tpu-v6e"], "%s = f32[1000000]{0} add(%q, %r)"
    found = timeline(program(*OPERANDS, f"{line}, {cycles(estimate, 'tpu-v6e')}"), "tpu-v6e", MESH)
    assert row.overhead_seconds + row.memory_seconds(Traffic(8e6, 4e6), CHIPS["tpu-v6e"]) == pytest.approx(
        11.4e-6, rel=1e-3
    )
    assert found.step_seconds == pytest.approx(took * 1e-6, rel=1e-3)


def test_a_v5p_has_the_rates_of_a_v5e():
    assert EFFICIENCIES["tpu-v5p"] == TIMED
    line = f"%s = f32[1000000]{{0}} add(%q, %r), {cycles(20, 'tpu-v5p')}"
    found = timeline(program(*OPERANDS, line), "tpu-v5p", MESH)
    expected = TIMED.overhead_seconds + in_memory(8e6, 4e6) * 819 / 2765
    assert found.step_seconds == pytest.approx(expected)


@pytest.mark.parametrize(("rows", "by_cycles"), [(8, False), (1024, True)])
def test_a_small_array_may_be_reordered(rows, by_cycles):
    """A product that reorders its few rows is a product; one that reorders as much as it reads is not timed."""
    computations = f"""%fused (x: bf16[{rows},1024], w: bf16[1024,1024]) -> bf16[{rows},1024] {{
  %x = bf16[{rows},1024]{{1,0}} parameter(0)
  %w = bf16[1024,1024]{{1,0}} parameter(1)
  %r = bf16[{rows},1024]{{0,1}} copy(%x)
  ROOT %d = bf16[{rows},1024]{{1,0}} convolution(%r, %w), dim_labels=bf_io->bf
}}
"""
    lines = (
        f"%x = bf16[{rows},1024]{{1,0}} parameter(6)",
        "%w = bf16[1024,1024]{1,0} parameter(7)",
        f"%f = bf16[{rows},1024]{{1,0}} fusion(%x, %w), kind=kOutput, calls=%fused, {cycles(10)}",
    )
    expected = 1e-5 if by_cycles else product_seconds(rows, 1024, 1024, chip=V5E)
    assert v5e(*lines, computations=computations).step_seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "rows", "estimate"),
    [
        ("tpu-v5e", 8, 65),
        ("tpu-v5e", 2048, 450),
        ("tpu-v5p", 8, 20),
        ("tpu-v5p", 2048, 200),
        ("tpu-v6e", 8, 25),  # The product takes 31 µs.
        ("tpu-v6e", 2048, 120),
    ],
)
def test_products_take_the_time_of_timed_products(name, rows, estimate):
    """libtpu writes a product as a convolution."""
    lines = (
        f"%a = bf16[{rows},4096]{{1,0}} parameter(6)",
        "%b = bf16[4096,4096]{1,0} parameter(7)",
        f"%d = bf16[{rows},4096]{{1,0}} convolution(%a, %b), dim_labels=bf_io->bf, {cycles(estimate, name)}",
    )
    found = timeline(program(*OPERANDS, *lines), name, MESH)
    assert found.flops == 2 * rows * 4096**2
    assert found.step_seconds == pytest.approx(product_seconds(rows, 4096, 4096, chip=CHIPS[name]))


@pytest.mark.parametrize(("estimate", "took"), [(100, 99.23), (1.22, 0.45), (0.5, 0.09), (0.05, 0.05)])
def test_instructions_in_on_chip_memory_take_less_than_the_compilers_cycles(estimate, took):
    line = "%s = f32[1000000]{0:S(1)} negate(%c)"
    assert v5e(f"{line}, {cycles(estimate)}").step_seconds == pytest.approx(took * 1e-6, rel=1e-3)


@pytest.mark.parametrize("result", ["f32[8]{0}", "f32[8]{0:S(1)}"])
def test_a_few_bytes_in_main_memory_do_not_make_a_kernel_one_of_main_memory(result):
    """A product of weights in on-chip memory may write its small result to main memory."""
    assert v5e(f"%s = {result} reduce(%c, %i), {cycles(40)}").step_seconds == pytest.approx(40e-6 - 7.7e-7, rel=1e-6)


def test_a_product_in_on_chip_memory_takes_no_less_than_at_the_peak():
    lines = (
        "%a = bf16[2048,4096]{1,0:S(1)} parameter(6)",
        "%b = bf16[4096,4096]{1,0:S(1)} parameter(7)",
        f"%d = bf16[2048,4096]{{1,0:S(1)}} convolution(%a, %b), dim_labels=bf_io->bf, {cycles(350)}",
    )
    assert v5e(*lines).step_seconds == pytest.approx(2 * 2048 * 4096**2 / (197e12 * TIMED.matrix_efficiency))


def test_copies_have_only_the_memory_that_kernels_leave():
    alone = in_memory(4e6, 0)
    # The kernel needs the memory all the time, except while it starts.
    bound = v5e(COPY, f"%s = f32[1000000]{{0}} add(%q, %r), {cycles(40)}", COPIED)
    assert bound.step_seconds == pytest.approx(in_memory(8e6, 4e6) + alone)
    # A kernel that only computes leaves all of it.
    free = v5e(COPY, f"%s = f32[1000000]{{0:S(1)}} negate(%c), {cycles(100)}", COPIED)
    assert free.step_seconds == pytest.approx(100e-6 - TIMED.excess_seconds)
    # A kernel that reorders 8 MB in 40 µs needs a part of it.
    share = in_memory(4e6, 4e6) / 40e-6
    part = v5e(COPY, f"%s = f32[1000,1000]{{0,1}} transpose(%m), dimensions={{1,0}}, {cycles(40)}", COPIED)
    assert 0.2 < share < 0.5
    assert part.step_seconds == pytest.approx(40e-6)
    (copied,) = [span for span in part.spans if span.category == "copy"]
    assert copied.seconds == pytest.approx(alone / (1 - share))


def test_copies_to_main_memory_take_the_time_of_writing():
    out = "%k = (f32[1000000]{0}, f32[1000000]{0:S(1)}, u32[]) copy-start(%c)"
    assert v5e(COPY, COPIED).step_seconds == pytest.approx(in_memory(4e6, 0))
    assert v5e(out, "%l = f32[1000000]{0} copy-done(%k)").step_seconds == pytest.approx(in_memory(0, 4e6))


def test_an_asynchronous_gather_is_hidden_behind_what_stands_between():
    gather = "(u8[90000]{0}, u8[360000]{0}) all-gather-start(%p), replica_groups=[4,4]<=[16], dimensions={0}"
    end = "%h = u8[360000]{0} all-gather-done(%g)"
    assert times(run(f"%g = {gather}", step("m", 4), end)) == (5, 4, 4, 1)  # the gather takes 5 µs


def test_a_collective_that_is_wrapped_runs_beside_too():
    wrapped = """%wrapped (q: u8[360000]) -> u8[90000] {
  %q = u8[360000]{0} parameter(0)
  ROOT %r = u8[90000]{0} reduce-scatter(%q), replica_groups=[4,4]<=[16], dimensions={0}, to_apply=%add
}
"""
    begin = "%s = ((u8[360000]{0}), u8[90000]{0}) async-start(%q), calls=%wrapped"
    lines = ("%q = u8[360000]{0} parameter(1)", begin, step("m", 4), "%d = u8[90000]{0} async-done(%s)")
    found = run(*lines, computations=wrapped, signature="(p: u8[90000], q: u8[360000]) -> u8[90000]")
    assert times(found) == (5, 4, 4, 1)  # as the gather of as much
    assert [part.category for part in found.parts] == ["reduce-scatter", "other"]


def test_a_slice_that_runs_beside_is_a_copy():
    # 1.2 MB of 12 leave main memory: 1 µs, hidden
    begin = "%s = ((u8[12000000]{0}), u8[1200000]{0:S(3)}, u32[]) slice-start(%q), slice={[0:1200000]}"
    lines = ("%q = u8[12000000]{0} parameter(1)", begin, step("m", 4), "%d = u8[1200000]{0:S(3)} slice-done(%s)")
    found = run(*lines, signature="(p: u8[90000], q: u8[12000000]) -> u8[1200000]")
    assert times(found) == (4, 4, 0, 0)
    assert [(part.category, *micro(part.seconds)) for part in found.parts] == [("other", 4), ("copy", 1)]


def test_spans_are_named_by_the_step_of_the_plan():
    def named(name: str, *scopes: str) -> str:
        return step(name, 1) + f', metadata={{op_name="jit(f)/{"/".join(scopes)}"}}'

    planned = "gspmd[BLE_x -> BLE]/shard_map"
    lines = (
        named("a", planned, "step0.einsum", "dot_general"),
        named("b", planned, "step1.all-to-all.x", "all_to_all"),
        named("c", "add"),
    )
    spans = run(*lines).spans
    assert [span.name for span in spans] == ["step0.einsum", "negate for step1.all-to-all.x", "negate"]
    assert [span.equation for span in spans] == ["BLE_x -> BLE", "BLE_x -> BLE", ""]


def test_a_collective_among_one_device_is_free():
    gather = "%g = u8[90000]{0} all-gather(%p), replica_groups=[16,1]<=[16], dimensions={0}"
    assert run(gather).step_seconds == 0
    assert run(gather).mfu == 0


def test_what_nobody_waits_for_is_over_before_the_program_is():
    assert times(run(start("a", "+x"), step("m", 1))) == (3, 1, 1, 2)


def test_mfu_of_given_operations():
    found = timeline(program(step("a", 1)), "tpu-v4", MESH, flops=137.5e6)
    assert found.mfu == pytest.approx(0.5)  # 275e12 in a second, 275e6 in a µs


def test_it_prints_as_a_table():
    text = str(run(step("a", 1), start("s", "+x"), step("b", 2), done("d", "s")))
    assert "timeline of m: one of 16 tpu-v4, x=4 y=4" in text
    assert "4 µs = 3 µs computing (100% bound by memory) + 1 µs waiting for collectives" in text
    assert "2 µs of collectives hidden; MFU 0.0%" in text
    row = next(line for line in text.splitlines() if "collective-permute" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["collective-permute", "x", "1", "3 µs", "3 µs", "1 µs"]


def test_an_unknown_chip():
    with pytest.raises(PlanError, match="no chip is called 'tpu-v40'"):
        run(step("a", 1), chip="tpu-v40")


def test_a_permute_taken_apart_lasts_from_the_send_to_its_done():
    attributes = f"channel_id=1, frontend_attributes={{_xla_send_recv_source_target_pairs={RING['+x']}}}"
    kind = "(u8[90000]{0}, u32[], token[])"
    found = run(
        "%t = token[] after-all()",
        f"%r = {kind} recv(%t), {attributes}",
        f"%s = {kind} send(%p, %t), {attributes}",
        step("m", 1),
        f"%rd = (u8[90000]{{0}}, token[]) recv-done(%r), {attributes}",
        f"%sd = token[] send-done(%s), {attributes}",
    )
    # 90 000 bytes on one link are 2 µs, the hop 1 µs, of which one is computed beside
    assert times(found) == (3, 1, 1, 2)


def test_memory_of_the_host_is_not_free():
    # read there and written to main memory, 2 400 000 bytes in all: 2 µs; a memory of the chip (the second) is free
    lines = ("%q = u8[1200000]{0:S(5)} parameter(1)", "%c = u8[1200000]{0} copy(%q)")
    assert times(run(*lines)) == (2, 2, 0, 0)
    assert times(run(*(line.replace("S(5)", "S(3)") for line in lines))) == (1, 1, 0, 0)


# -- GPUs --------------------------------------------------------------------------------------------------------------


def kernels(count: int, operand: str = "p") -> list[str]:
    """So many kernels that have hardly any bytes, each on the result of the one before."""
    names = [operand, *(f"k{number}" for number in range(count))]
    return [f"%{made} = u8[8]{{0}} negate(%{given})" for given, made in pairwise(names)]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_host_launches_small_kernels_one_by_one(count):
    found, chip = run(*kernels(count), chip="h200"), CHIPS["h200"]
    assert found.step_seconds == pytest.approx(count * chip.launch_seconds + chip.kernel_seconds, rel=0.01)
    assert found.launch_seconds > 0.7 * found.step_seconds
    assert "% by launches" in found.summary
    assert "waiting for the host to launch" in str(found)


def test_five_kernels_in_a_row_are_one_launch():
    found, chip = run(*kernels(5), chip="h200"), CHIPS["h200"]
    assert found.step_seconds == pytest.approx(chip.launch_seconds + 5 * chip.kernel_seconds, rel=0.01)
    # A collective parts them: two and three.
    gather = "%g = u8[32]{0} all-gather(%k1), replica_groups=[4,4]<=[16], dimensions={0}"
    parted = run(*kernels(2), gather, *kernels(3, "g"), chip="h200")
    assert parted.launch_seconds > 3 * chip.launch_seconds


def looping(body: str, trips: int, known: bool = True, before: str = "") -> hlo.Module:
    """A loop on a counter and an array, as XLA:GPU writes it."""
    carried = "(s32[], u8[90000])"
    counts = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if known else ""
    computations = f"""
%body (q: {carried}) -> {carried} {{
  %q = {carried} parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %a = u8[90000]{{0}} get-tuple-element(%q), index=1
  %next = s32[] negate(%i)
  {body}
  ROOT %out = {carried} tuple(%next, %b)
}}

%condition (c: {carried}) -> pred[] {{
  %c = {carried} parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  ROOT %go = pred[] is-finite(%j)
}}
"""
    loop = f"%w = {carried} while(%t), condition=%condition, body=%body{counts}"
    lines = (before, "%z = s32[] constant(0)", f"%t = {carried} tuple(%z, %p)", loop)
    return program(*lines, computations=computations)


def test_a_loop_of_two_small_kernels_takes_what_was_measured():
    # docs/gpus.md: 8.5 to 9.3 µs a trip up to 4 MiB; the counter is a kernel, and the condition is not run
    found = timeline(looping("%b = u8[90000]{0} negate(%a)", 1000), "h200", {"x": 1})
    assert found.step_seconds / 1000 == pytest.approx(9.2e-6, rel=0.01)
    assert [span.trips for span in found.spans if span.category == "loop"] == [1, 999]


def test_the_host_runs_ahead_of_a_busy_device_until_that_is_used_up():
    chip = CHIPS["h200"]
    busy = "%l = u8[1073741824]{0} broadcast(%p)"
    first = run(busy, chip="h200").step_seconds - chip.launch_seconds  # some 290 µs
    for trips in (10, 100):  # launched within 92 and 920 µs
        loop = looping("%b = u8[90000]{0} negate(%a)", trips, before=busy)
        found, host = timeline(loop, "h200", {"x": 1}), (1 + 2 * trips) * chip.launch_seconds
        device = first + 2 * trips * chip.kernel_seconds
        assert found.step_seconds == pytest.approx(max(device + chip.launch_seconds, host), rel=0.01)
        assert len([span for span in found.spans if span.category == "loop"]) <= 4


def test_what_a_loop_in_a_loop_costs_the_host_is_the_same_if_every_iteration_is_simulated(monkeypatch):
    # A large kernel, and then nine times three small ones and one of some 11 µs, twelve times over: the host falls
    # back more than it gets ahead, and waits only in the last of the twelve.
    small = "%k = u8[8]{0} negate(%i)\n  %l = u8[8]{0} negate(%i)\n  %n = u8[8]{0} negate(%i)"
    inner = LOOP.replace("STEP", f"{small}\n  %m = u8[40000000]{{0}} broadcast(%v)\n  %w = u8[90000]{{0}} bitcast(%v)")
    inner = inner.replace("%body", "%inner").replace("%condition", "%inner_condition")
    call = WHILE.replace("%w = ", "%u = ").replace("%t)", "%b)").replace("=%body", "=%inner").replace('"10"', '"9"')
    call = call.replace("=%condition", "=%inner_condition")
    large = "%m = u8[100000000]{0} broadcast(%v)"
    outer = LOOP.replace("STEP", f"{large}\n  {call}\n  %w = u8[90000]{{0}} get-tuple-element(%u), index=1")
    enter = ("%f = u8[400000000]{0} broadcast(%p)", *ENTER, WHILE.replace('"10"', '"12"'))
    found = run(*enter, chip="h200", computations=inner + outer)
    monkeypatch.setattr(Machine, "alike", lambda *_: 0)
    every = run(*enter, chip="h200", computations=inner + outer)
    assert len(every.spans) > 2 * len(found.spans)
    assert found.launch_seconds > 0
    assert found.launch_seconds == pytest.approx(every.launch_seconds)
    assert found.step_seconds == pytest.approx(every.step_seconds)


def test_a_loop_of_unknown_length_waits_for_its_host():
    known, unknown = (
        timeline(looping("%b = u8[90000]{0} negate(%a)", 1, known), "h200", {"x": 1}) for known in (True, False)
    )
    assert unknown.step_seconds > known.step_seconds + CHIPS["h200"].launch_seconds
    assert any("depend on computed values" in note for note in unknown.notes)


def test_an_asynchronous_gather_is_hidden_behind_kernels():
    large = "%{0} = u8[1073741824]{{0}} broadcast(%{1})"
    begun = "%s = (u8[90000]{0}, u8[360000]{0}) all-gather-start(%p), replica_groups=[4,4]<=[16], dimensions={0}"
    ended = "%d = u8[360000]{0} all-gather-done(%s)"
    hidden = run(begun, large.format("l", "p"), ended, chip="h100")
    exposed = run(begun, ended, large.format("l", "p"), chip="h100")
    assert hidden.exposed_seconds == 0 < hidden.hidden_seconds
    assert exposed.exposed_seconds > 0
    assert hidden.step_seconds < exposed.step_seconds


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.is_switch])
@pytest.mark.parametrize(("asked", "dtype"), [("DEFAULT", "tensorfloat32"), ("HIGHEST", "float32"), ("", "bfloat16")])
def test_a_product_by_cublas(name, asked, dtype):
    kind = "f32" if asked else "bf16"
    config = f"""backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],
      "rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}},"precision_config":{{"operand_precision":
      ["{asked}","{asked}"],"algorithm":"ALG_UNSET"}}}}}}""".replace("\n", "")
    call = f'{kind}[512,256]{{1,0}} custom-call(%l, %r), custom_call_target="__cublas$lt$matmul", {config}'
    arrays = [f"%l = {kind}[512,1024]{{1,0}} parameter(1)", f"%r = {kind}[1024,256]{{1,0}} parameter(2)"]
    found, chip = run(*arrays, f"ROOT %m = {call}", chip=name, mesh={"x": 1}), CHIPS[name]
    width = 4 if asked else 2
    least = max(2 * 512 * 1024 * 256 / chip.flops(dtype), width * (512 * 1024 + 1024 * 256) / chip.hbm_bandwidth)
    took = found.step_seconds - chip.launch_seconds
    assert took > least
    if dtype == "bfloat16":
        assert took == pytest.approx(product_seconds(512, 1024, 256, chip=chip))
    assert found.flops == 2 * 512 * 1024 * 256
