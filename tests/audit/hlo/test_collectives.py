"""Collectives in every form that compilers give them; K devices send S(K-1)/K, all-reducing twice that, permuting S."""

import pytest

from gspmd.audit import hlo
from gspmd.audit.hlo.collectives import Collective, collective

ROWS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
PAIRS = "source_target_pairs="
ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


def found(*lines: str, computations: str = "", devices: int = 8) -> list[Collective]:
    """The collectives of an entry computation, in order."""
    body = "\n".join(f"  {line}" for line in ("%p = f32[64]{0} parameter(0)", *lines))
    main = f"ENTRY %main (p: f32[64]) -> f32[] {{\n{body}\n}}\n"
    module = hlo.parse(f"HloModule m, is_scheduled=true\n\n{ADD}\n{computations}\n{main}")
    every = (collective(module, module.entry, each, devices) for each in module.entry.instructions)
    return [each for each in every if each]


def told(each: Collective) -> tuple:
    return each.kind, each.phase, each.dtype, each.group, each.wire_bytes


@pytest.mark.parametrize(
    ("line", "want"),
    [
        # 4 devices gather 256 floats: 1024 * 3 / 4
        ("f32[256]{0} all-gather(%p), dimensions={0}, " + ROWS, ("all-gather", "f32", 4, 768)),
        # 4 devices scatter 64 floats, of which 16 come out: 256 * 3 / 4
        ("f32[16]{0} reduce-scatter(%p), dimensions={0}, " + ROWS, ("reduce-scatter", "f32", 4, 192)),
        # twice 256 * 3 / 4
        ("f32[64]{0} all-reduce(%p), to_apply=%add, " + ROWS, ("all-reduce", "f32", 4, 384)),
        # without groups all eight take part: 2 * 256 * 7 / 8
        ("f32[64]{0} all-reduce(%p), to_apply=%add, replica_groups={}", ("all-reduce", "f32", 8, 448)),
        ("f32[64]{0} all-reduce(%p), to_apply=%add", ("all-reduce", "f32", 8, 448)),
        # an array cut and put together again: 256 * 3 / 4
        ("f32[64]{0} all-to-all(%p), dimensions={0}, " + ROWS, ("all-to-all", "f32", 4, 192)),
        ("f32[64]{0} collective-permute(%p), " + PAIRS + "{{0,1},{1,2}}", ("collective-permute", "f32", 2, 256)),
        ("f32[64]{0} collective-permute(%p), " + PAIRS + "{{0,0},{1,2}}", ("collective-permute", "f32", 2, 256)),
        ("f32[64]{0} collective-permute(%p), " + PAIRS + "{{0,0},{1,1}}", ("collective-permute", "f32", 1, 0)),
        ("f32[64]{0} collective-permute(%p), " + PAIRS + "{}", ("collective-permute", "f32", 1, 0)),
        # one device each: nothing is sent
        ("f32[64]{0} all-reduce(%p), to_apply=%add, replica_groups={{0},{1}}", ("all-reduce", "f32", 1, 0)),
        # groups of three and of one: the three send 2 * 256 * 2 / 3
        ("f32[64]{0} all-reduce(%p), replica_groups={{3},{0,1,2}}", ("all-reduce", "f32", 3, 341)),
        # half a byte each: 128 * 3 / 4
        ("s4[256]{0:E(4)} all-gather(%p), dimensions={0}, " + ROWS, ("all-gather", "s4", 4, 96)),
        ("f8e4m3fn[256]{0} all-gather(%p), dimensions={0}, " + ROWS, ("all-gather", "f8e4m3fn", 4, 192)),
        ("pred[64]{0} all-reduce(%p), to_apply=%add, " + ROWS, ("all-reduce", "pred", 4, 96)),
        ("f32[0,4]{1,0} all-gather(%p), dimensions={0}, " + ROWS, ("all-gather", "f32", 4, 0)),
        ("f32[<=256]{0} all-gather(%p), dimensions={0}, " + ROWS, ("all-gather", "f32", 4, 768)),
        ("f32[64]{0} collective-broadcast(%p), " + ROWS, ("collective-permute", "f32", 4, 256)),
        ("f32[64]{0} ragged-all-to-all(%p, %q), " + ROWS, ("all-to-all", "f32", 4, 192)),
    ],
)
def test_one_instruction(line, want):
    (each,) = found(f"%c = {line}")
    assert (each.kind, each.dtype, each.group, each.wire_bytes) == want
    assert each.phase == "sync"


@pytest.mark.parametrize("line", ["f32[64]{0} copy(%p)", "token[] after-all()", "f32[64]{0} all-gatherer(%p)"])
def test_anything_else(line):
    assert found(f"%c = {line}") == []


def test_several_arrays_in_one():
    # 2 * 3 / 4 of 256 and of 32 bytes; the dtype is that of the larger
    (each,) = found("%c = (f32[64]{0}, bf16[16]{0}) all-reduce(%p, %q), to_apply=%add, " + ROWS)
    assert told(each) == ("all-reduce", "sync", "f32", 4, 384 + 48)
    assert len(each.arrays) == 2
    # two gathers: 3 / 4 of 1024 and of 128
    (each,) = found("%c = (f32[256]{0}, bf16[64]{0}) all-gather(%p, %q), dimensions={0}, " + ROWS)
    assert (each.wire_bytes, len(each.arrays)) == (768 + 96, 2)
    # two scatters: 3 / 4 of 4 * 64 and of 4 * 8
    (each,) = found("%c = (f32[16]{0}, bf16[4]{0}) reduce-scatter(%p, %q), dimensions={0}, to_apply=%add, " + ROWS)
    assert (each.wire_bytes, len(each.arrays)) == (192 + 24, 2)


def test_an_all_to_all_of_a_tuple_is_the_parts_of_one_array():
    parts = ", ".join(["f32[4,4]{1,0}"] * 4)
    (each,) = found(f"%c = ({parts}) all-to-all(%a, %b, %c, %d), {ROWS}")
    assert told(each) == ("all-to-all", "sync", "f32", 4, 192)  # 4 * 64 bytes, 3 / 4 of them
    assert len(each.arrays) == 1


def test_started_and_waited_for():
    lines = [
        # what starts a gather carries operands and results, a permute flags besides
        "%g = (f32[64]{0}, f32[256]{0}) all-gather-start(%p), dimensions={0}, " + ROWS,
        "%gd = f32[256]{0} all-gather-done(%g)",
        "%h = ((f32[64]{0}, bf16[16]{0}), (f32[256]{0}, bf16[64]{0})) all-gather-start(%p, %q), " + ROWS,
        "%hd = (f32[256]{0}, bf16[64]{0}) all-gather-done(%h)",
        "%r = f32[64]{0} all-reduce-start(%p), to_apply=%add, " + ROWS,
        "%rd = f32[64]{0} all-reduce-done(%r)",
        "%s = (f32[64]{0}, bf16[16]{0}) all-reduce-start(%p, %q), to_apply=%add, " + ROWS,
        "%sd = (f32[64]{0}, bf16[16]{0}) all-reduce-done(%s)",
        "%c = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}",
        "%cd = f32[64]{0} collective-permute-done(%c)",
        "%e = ((f32[64]{0}, f32[8]{0}), (f32[64]{0}, f32[8]{0}), u32[], u32[]) collective-permute-start(%p, %q), "
        "source_target_pairs={{0,1}}",
        "%ed = (f32[64]{0}, f32[8]{0}) collective-permute-done(%e)",
    ]
    each = found(*lines)
    assert [one.phase for one in each] == ["start", "done"] * 6
    assert [(one.kind, one.wire_bytes) for one in each if one.phase == "start"] == [
        ("all-gather", 768),
        ("all-gather", 768 + 96),
        ("all-reduce", 384),
        ("all-reduce", 384 + 48),
        ("collective-permute", 256),
        ("collective-permute", 256 + 32),
    ]


WRAPPED = f"""%wrapped (w: f32[64]) -> f32[16] {{
  %w = f32[64]{{0}} parameter(0)
  ROOT %rs = f32[16]{{0}} reduce-scatter(%w), channel_id=1, {ROWS}, dimensions={{0}}, to_apply=%add
}}
"""


def test_wrapped_in_an_asynchronous_computation():
    each = found(
        "%s = ((f32[64]{0}), f32[16]{0}, s32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[64]{0}), f32[16]{0}, s32[]) async-update(%s)",
        "%d = f32[16]{0} async-done(%u), calls=%wrapped",
        computations=WRAPPED,
    )
    assert [(one.kind, one.phase) for one in each] == [("reduce-scatter", "start"), ("reduce-scatter", "done")]
    assert (each[0].wire_bytes, each[0].group, each[0].instruction.name) == (192, 4, "rs")


OFFLOADED = """%called (q: f32[16]) -> f32[64] {
  %q = f32[16]{0} parameter(0)
  ROOT %g = f32[64]{0} all-gather(%q), ROWS, dimensions={0}, backend_config={"collective_offload_config":{\
"all_gather_offload_config":{"use_single_sparse_core":true,"ici_strategy_config":{"color_strategies":[\
{"phase_rings":[{"core_count":"2"},{"core_count":"2"}]},{"phase_rings":[{"core_count":"2"},{"core_count":"2"}]}]}}}}
}, execution_thread="sparsecore"
""".replace("ROWS", ROWS)


def test_a_call_that_a_sparse_core_runs_meanwhile():
    # As libtpu writes a TPU7x's collectives. The end of the call names no computation.
    each = found(
        '%s = ((f32[16]{0}, token[]), f32[64]{0}) call-start(%p, %t), async_execution_thread="sparsecore", '
        "to_apply=%called",
        "%d = f32[64]{0} call-done(%s)",
        computations=OFFLOADED,
    )
    assert [told(one) for one in each] == [("all-gather", "start", "f32", 4, 192)]
    assert each[0].rings == (2, 2)
    # Rings of two chips, both of whose devices are in the group.
    of_chips = OFFLOADED.replace('{"core_count":"2"},', "")
    (one,) = found(
        "%s = ((f32[16]{0}, token[]), f32[64]{0}) call-start(%p, %t), to_apply=%called", computations=of_chips
    )
    assert one.rings == (2, 2)


def test_an_asynchronous_computation_printed_as_one_instruction():
    # so XLA prints what it can: the operands come first, a context last
    parts = ", ".join(["f32[4,4]{1,0}"] * 4)
    each = found(
        f"%s = ((f32[64]{{0}}), f32[16]{{0}}, s32[]) reduce-scatter-start(%p), {ROWS}, dimensions={{0}}, to_apply=%add",
        "%sd = f32[16]{0} reduce-scatter-done(%s)",
        f"%t = (({parts}), ({parts}), s32[]) all-to-all-start(%a, %b, %c, %d), {ROWS}",
        f"%td = ({parts}) all-to-all-done(%t)",
        f"%v = ((f32[64]{{0}}), f32[64]{{0}}, s32[]) all-to-all-start(%p), {ROWS}, dimensions={{0}}",
        "%vd = f32[64]{0} all-to-all-done(%v)",
    )
    assert [told(one) for one in each if one.phase == "start"] == [
        ("reduce-scatter", "start", "f32", 4, 192),
        ("all-to-all", "start", "f32", 4, 192),
        ("all-to-all", "start", "f32", 4, 192),
    ]
    assert [one.phase for one in each] == ["start", "done"] * 3


NEGATED = "%neg (n: f32[64]) -> f32[64] {\n  %n = f32[64]{0} parameter(0)\n  ROOT %m = f32[64]{0} negate(%n)\n}\n"


def test_what_else_runs_asynchronously_is_none():
    each = found(
        "%s = ((f32[64]{0}), f32[16]{0}, s32[]) slice-start(%p), slice={[0:16]}",
        "%sd = f32[16]{0} slice-done(%s)",
        "%c = (f32[64]{0}, f32[64]{0}, u32[]) copy-start(%p)",
        "%cd = f32[64]{0} copy-done(%c)",
        "%a = ((f32[64]{0}), f32[64]{0}, s32[]) async-start(%p), calls=%neg",
        "%ad = f32[64]{0} async-done(%a)",
        computations=NEGATED,
    )
    assert each == []


# As the TPU compiler writes a reduce-scatter whose pieces it pads, from 64 to 80 rows over 4 devices.
ALL_REDUCE_SCATTER = f"""%all-reduce-scatter (input: bf16[64,32]) -> bf16[20,32] {{
  %input = bf16[64,32]{{1,0:T(8,128)(2,1)}} parameter(0)
  %zero = bf16[] constant(0)
  %pad = bf16[80,32]{{1,0:T(8,128)(2,1)}} pad(%input, %zero), padding=0_16x0_0
  %all-reduce.1 = bf16[80,32]{{1,0:T(8,128)(2,1)}} all-reduce(%pad), channel_id=6, {ROWS}, to_apply=%add
  %id = u32[] partition-id()
  ROOT %cut = bf16[20,32]{{1,0:T(8,128)(2,1)S(1)}} dynamic-slice(%all-reduce.1, %id, %id), dynamic_slice_sizes={{20,32}}
}}
"""


def test_an_all_reduce_of_which_a_part_is_kept_is_a_reduce_scatter():
    (each,) = found(
        "%f = bf16[20,32]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter", computations=ALL_REDUCE_SCATTER
    )
    assert told(each) == ("reduce-scatter", "sync", "bf16", 4, 80 * 32 * 2 * 3 // 4)
    assert (each.fused, each.instruction.name) == (True, "all-reduce.1")


def test_a_fused_all_reduce_that_is_kept_whole_stays_one():
    whole = ALL_REDUCE_SCATTER.replace("dynamic-slice(", "negate(")
    (each,) = found("%f = bf16[20,32]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter", computations=whole)
    assert told(each) == ("all-reduce", "sync", "bf16", 4, 2 * 80 * 32 * 2 * 3 // 4)


# Three fusions of one gather: one that starts it, a product that carries it along, one that waits for it.
CARRIED = "(bf16[16,32]{1,0:S(1)}, bf16[64,32]{1,0:S(1)}, s32[2]{0:S(4)}, u32[]{:S(2)})"


def _carrying(name: str, gather: str, root: str) -> str:
    return f"""%{name} (q: bf16[16,32]) -> bf16[64,32] {{
  %q = bf16[16,32]{{1,0:S(1)}} parameter(0)
  %{gather} = bf16[64,32]{{1,0}} all-gather(%q), channel_id=4, {ROWS}, dimensions={{0}}
  ROOT {root}
}}
"""


ASYNCHRONOUS_FUSIONS = (
    _carrying("begin", "g.1", f'%s.1 = {CARRIED} custom-call(%g.1), custom_call_target="AsyncCollectiveStart"')
    + _carrying("carry", "g.2", f"%t.1 = {CARRIED} tuple(%q, %g.2, %q, %q)")
    + _carrying("end", "g.3", '%d.1 = bf16[64,32]{1,0} custom-call(%q, %g.3), custom_call_target="AsyncCollectiveDone"')
)


def test_a_gather_that_products_carry_along_is_one_gather():
    each = found(
        f"%start = {CARRIED} fusion(%p), kind=kCustom, calls=%begin",
        f"%product = {CARRIED} fusion(%start), kind=kOutput, calls=%carry",
        "%done = bf16[64,32]{1,0} fusion(%product), kind=kCustom, calls=%end",
        computations=ASYNCHRONOUS_FUSIONS,
    )
    assert [(one.kind, one.phase, one.wire_bytes) for one in each] == [
        ("all-gather", "start", 64 * 32 * 2 * 3 // 4),
        ("all-gather", "done", 64 * 32 * 2 * 3 // 4),
    ]


SENT = 'frontend_attributes={_xla_send_recv_pipeline="0",_xla_send_recv_source_target_pairs={{0,1},{1,2}}}'


@pytest.mark.parametrize("attributes", [SENT, SENT.replace("{{0,1},{1,2}}", '"{{0,1},{1,2}}"')])
def test_a_permute_taken_apart_is_the_send(attributes):
    kind = "(f32[64]{0}, u32[], token[])"
    (each,) = found(
        "%t = token[] after-all()",
        f"%r = {kind} recv(%t), channel_id=1, {attributes}",
        f"%s = {kind} send(%p, %t), channel_id=1, {attributes}",
        f"%rd = (f32[64]{{0}}, token[]) recv-done(%r), channel_id=1, {attributes}",
        f"%sd = token[] send-done(%s), channel_id=1, {attributes}",
    )
    assert told(each) == ("collective-permute", "start", "f32", 2, 256)
    assert each.instruction.name == "s"


def test_a_send_to_the_host_is_no_collective():
    assert found("%s = (f32[64]{0}, u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true") == []
