"""The ledger against programs counted by hand.

They run on x=4, y=2: device 2x + y. Of the larger buffer S, a device sends S(K-1)/K bytes in a gather,
a reduce-scatter or an all-to-all of K devices, twice that in an all-reduce, and S in a permute.
"""

import io
import json
import re

import jax
import pytest
from rich.console import Console

import gspmd
from gspmd.audit import Entry, HloError

MESH = {"x": 4, "y": 2}
X, Y = "replica_groups={{0,2,4,6},{1,3,5,7}}", "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
GATHER_X = ("all-gather", ("x",))
REDUCE_X, REDUCE_Y = ("all-reduce", ("x",)), ("all-reduce", ("y",))


def function(name: str, *lines: str, taken: str = "f32[64]{0}") -> str:
    body = "\n".join(f"  {line}" for line in (f"%{name}.p = {taken} parameter(0)", *lines))
    return f"%{name} ({name}.p: f32[]) -> f32[] {{\n{body}\n}}\n"


def ledger(*lines: str, computations: str = "", mesh=MESH) -> gspmd.Ledger:
    """Return the ledger of a program whose entry takes f32[64] and has these lines."""
    add = function("add", "%b = f32[] parameter(1)", "ROOT %c = f32[] add(%add.p, %b)", taken="f32[]")
    body = "\n".join(f"  {line}" for line in ("%p = f32[64]{0} parameter(0)", *lines))
    main = f"ENTRY %main (p: f32[64]) -> f32[64] {{\n{body}\n}}\n"
    return gspmd.ledger(f"HloModule jit_f, is_scheduled=true, num_partitions=8\n\n{add}\n{computations}\n{main}", mesh)


def gather(name: str = "g", operand: str = "p") -> str:
    """256 floats from 4 devices: 1024 * 3 / 4 = 768 bytes."""
    return f"%{name} = f32[256]{{0}} all-gather(%{operand}), dimensions={{0}}, {X}"


def reduce(name: str = "r", operand: str = "p", groups: str = X) -> str:
    """64 floats on 4 devices: 2 * 256 * 3 / 4 = 384 bytes; on 2: 2 * 256 / 2 = 256."""
    return f"%{name} = f32[64]{{0}} all-reduce(%{operand}), to_apply=%add, {groups}"


STATE = "(s32[], f32[64]{0}, s32[])"


def body(name: str, *lines: str, step: int = 1) -> str:
    """A loop's body: its counter grows, and its second value v and third value k are handed on."""
    more = [f"%{name}.one = s32[] constant({step})", f"%{name}.n = s32[] add(%{name}.i, %{name}.one)"]
    root = f"ROOT %{name}.out = {STATE} tuple(%{name}.n, %{name}.v, %{name}.k)"
    return function(name, *_parts(name), *more, *lines, root, taken=STATE)


def condition(name: str, *lines: str) -> str:
    return function(name, *_parts(name), *lines, taken=STATE)


def _parts(name: str) -> list[str]:
    parts = {"i": "s32[]", "v": "f32[64]{0}", "k": "s32[]"}
    return [f"%{name}.{v} = {t} get-tuple-element(%{name}.p), index={n}" for n, (v, t) in enumerate(parts.items())]


def until_five(name: str) -> str:
    return condition(name, f"ROOT %{name}.lt = pred[] compare(%{name}.i, %{name}.k), direction=LT")


def loop(name: str, operand: str, which: str, trips: int | None = None, *, prefix: str = "") -> list[str]:
    """A while loop from 0, whose third value is 5."""
    noted = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips is not None else ""
    return [
        f"%{prefix}zero = s32[] constant(0)",
        f"%{prefix}five = s32[] constant(5)",
        f"%{prefix}in = {STATE} tuple(%{prefix}zero, %{operand}, %{prefix}five)",
        f"%{name} = {STATE} while(%{prefix}in), condition=%{which}_cond, body=%{which}{noted}",
    ]


def test_one_after_the_other():
    found = ledger(gather(), reduce(), reduce("s", groups=Y), gather("h"))
    assert found.by_kind_and_axes() == {GATHER_X: (2, 1536), REDUCE_X: (1, 384), REDUCE_Y: (1, 256)}
    assert found.wire_bytes == 2 * 768 + 384 + 256
    assert [entry.name for entry in found.entries] == ["g", "r", "s", "h"]
    assert (found.flops, found.notes, found.name, dict(found.mesh)) == (0, (), "jit_f", MESH)


def test_nested_loops_whose_trips_are_noted():
    # 7 times: a reduction, and 5 times a gather
    inner = body("inner", gather(operand="inner.v")) + until_five("inner_cond")
    outer = body("outer", *loop("w", "outer.v", "inner", 5, prefix="o"), reduce(operand="outer.v"))
    found = ledger(*loop("l", "p", "outer", 7), computations=inner + outer + until_five("outer_cond"))
    assert found.by_kind_and_axes() == {GATHER_X: (35, 35 * 768), REDUCE_X: (7, 7 * 384)}


def test_nested_loops_of_the_tpu_compiler():
    # it notes nothing: the inner loop runs until the 5 that comes through both tuples, the outer until 3, in steps of 2
    inner = body("inner", gather(operand="inner.v")) + until_five("inner_cond")
    lines = [line for line in loop("w", "outer.v", "inner", prefix="o") if "five" not in line.partition(" =")[0]]
    lines = [line.replace("%ofive", "%outer.k") for line in lines]
    outer = body("outer", *lines, reduce(operand="outer.v"), step=2)
    three = (
        "%outer_cond.three = s32[] constant(3)",
        ("ROOT %outer_cond.le = pred[] compare(%outer_cond.i, %outer_cond.three), direction=LE"),
    )
    found = ledger(*loop("l", "p", "outer"), computations=inner + outer + condition("outer_cond", *three))
    assert found.by_kind_and_axes() == {GATHER_X: (2 * 5, 10 * 768), REDUCE_X: (2, 2 * 384)}  # 0 and 2


def test_a_loop_of_unknown_trips_counts_once_and_says_so():
    unknown = condition("outer_cond", "ROOT %any = pred[] custom-call(%outer_cond.v)")
    found = ledger(*loop("l.3", "p", "outer"), computations=body("outer", gather(operand="outer.v")) + unknown)
    assert found.by_kind_and_axes() == {GATHER_X: (1, 768)}
    assert found.notes == ("the trips of loop l.3 depend on computed values; it is counted once",)
    assert f"note: {found.notes[0]}" in str(found)


def test_a_loop_that_never_runs_sends_nothing():
    none = condition("outer_cond", "ROOT %lt = pred[] compare(%outer_cond.i, %outer_cond.i), direction=LT")
    found = ledger(*loop("l", "p", "outer", 0), computations=body("outer", gather(operand="outer.v")) + none)
    assert found.entries == ()


def test_the_condition_of_a_loop_runs_once_more_than_its_body():
    asking = condition("outer_cond", reduce("ask", "outer_cond.v"), "ROOT %any = pred[] custom-call(%ask)")
    computations = body("outer", gather(operand="outer.v")) + asking
    assert ledger(*loop("l", "p", "outer", 4), computations=computations).by_kind_and_axes() == {
        GATHER_X: (4, 4 * 768),
        REDUCE_X: (5, 5 * 384),
    }
    assert ledger(*loop("l", "p", "outer"), computations=computations).by_kind_and_axes() == {
        GATHER_X: (1, 768),
        REDUCE_X: (1, 384),
    }


def test_several_arrays_in_one_all_reduce():
    # 384 bytes of 64 floats, and 2 * 4 * 3 / 4 of one
    line = f"%r = (f32[64]{{0}}, f32[]) all-reduce(%p, %q), to_apply=%add, {X}"
    found = ledger(line)
    assert found.by_kind_and_axes() == {REDUCE_X: (2, 390)}  # two arrays
    (entry,) = found.entries
    assert (entry.count, entry.arrays, entry.group, entry.asynchronous) == (1, 2, 4, False)


def test_what_is_started_and_waited_for_counts_once():
    found = ledger(
        f"%g = (f32[64]{{0}}, f32[256]{{0}}) all-gather-start(%p), dimensions={{0}}, {X}",
        "%gd = f32[256]{0} all-gather-done(%g)",
        "%c = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,2},{2,4}}",
        "%cd = f32[64]{0} collective-permute-done(%c)",
        f"%s = ((f32[64]{{0}}), f32[16]{{0}}, s32[]) reduce-scatter-start(%p), dimensions={{0}}, to_apply=%add, {X}",
        "%sd = f32[16]{0} reduce-scatter-done(%s)",
    )
    assert found.by_kind_and_axes() == {
        GATHER_X: (1, 768),
        ("collective-permute", ("x",)): (1, 256),
        ("reduce-scatter", ("x",)): (1, 192),  # 256 * 3 / 4
    }
    assert all(entry.asynchronous for entry in found.entries)


def test_an_asynchronous_computation_is_counted_where_it_starts():
    scatter = f"ROOT %rs = f32[16]{{0}} reduce-scatter(%wrapped.p), dimensions={{0}}, to_apply=%add, {X}"
    found = ledger(
        "%s = ((f32[64]{0}), f32[16]{0}, s32[]) async-start(%p), calls=%wrapped",
        "%d = f32[16]{0} async-done(%s), calls=%wrapped",
        computations=function("wrapped", scatter),
    )
    assert found.by_kind_and_axes() == {("reduce-scatter", ("x",)): (1, 192)}


def test_a_fused_all_reduce_of_which_a_part_is_kept():
    fused = function(
        "all-reduce-scatter",
        f"%sum = f32[64]{{0}} all-reduce(%all-reduce-scatter.p), to_apply=%add, {X}",
        "%id = u32[] partition-id()",
        "ROOT %cut = f32[16]{0} dynamic-slice(%sum, %id), dynamic_slice_sizes={16}",
    )
    found = ledger("%f = f32[16]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter", computations=fused)
    assert found.by_kind_and_axes() == {("reduce-scatter", ("x",)): (1, 192)}


def test_all_to_all_in_both_forms():
    parts = ", ".join(["f32[16]{0}"] * 4)
    found = ledger(f"%a = ({parts}) all-to-all(%p, %p, %p, %p), {X}", f"%f = f32[64]{{0}} all-to-all(%p), {X}")
    assert found.by_kind_and_axes() == {("all-to-all", ("x",)): (2, 384)}  # either 256 * 3 / 4


def test_half_an_axis_has_no_name():
    found = ledger(reduce(groups="replica_groups={{0,2},{1,3},{4,6},{5,7}}"))
    assert found.by_kind_and_axes() == {("all-reduce", ("?",)): (1, 256)}
    assert "│ ?" in str(found)


def test_groups_in_every_form():
    forms = [X, "replica_groups=[2,4]<=[4,2]T(1,0)", "replica_groups=mesh['data'=4,'model'=2] {'data'}"]
    for groups in forms:
        assert ledger(reduce(groups=groups)).by_kind_and_axes() == {REDUCE_X: (1, 384)}
    # without any, all eight devices: 2 * 256 * 7 / 8
    assert ledger(reduce(groups="replica_groups={}")).by_kind_and_axes() == {("all-reduce", ("x", "y")): (1, 448)}


def test_groups_of_one_device_are_no_collectives():
    alone = "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
    stay = "%c = f32[64]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}"
    assert ledger(reduce(groups=alone), stay).entries == ()


def test_permutes():
    found = ledger(
        "%a = f32[64]{0} collective-permute(%p), source_target_pairs={{0,2},{2,4},{4,6},{6,0}}",
        "%b = bf16[64]{0} collective-permute(%p), source_target_pairs={{0,0},{1,2},{2,1},{3,3}}",  # 0,1 and 1,0 swap
    )
    assert found.by_kind_and_axes() == {
        ("collective-permute", ("x",)): (1, 256),
        ("collective-permute", ("x", "y")): (1, 128),
    }


def test_a_conditional_counts_its_largest_branch():
    small, large = function("small", reduce(operand="small.p")), function("large", gather(operand="large.p"))
    many = function("many", *(reduce(f"m{n}", "many.p", Y) for n in range(2)))
    line = "%c = f32[64]{0} conditional(%i, %p, %p, %p), branch_computations={%small, %large, %many}"
    assert ledger(line, computations=small + large + many).by_kind_and_axes() == {GATHER_X: (1, 768)}
    either = "%c = f32[64]{0} conditional(%i, %p, %p), true_computation=%small, false_computation=%many"
    assert ledger(either, computations=small + many).by_kind_and_axes() == {REDUCE_Y: (2, 512)}


def test_a_conditional_in_a_loop_in_a_conditional():
    small, large = function("small", reduce(operand="small.p")), function("large", gather(operand="large.p"))
    inside = "%c = f32[64]{0} conditional(%i, %p, %p), branch_computations={%small, %large}"
    looped = body("inner", inside) + until_five("inner_cond")
    once = function("once", gather("g1", "once.p"), gather("g2", "once.p"), gather("g3", "once.p"))
    often = function("often", *loop("w", "often.p", "inner", 4))
    line = "%d = f32[64]{0} conditional(%i, %p, %p), branch_computations={%once, %often}"
    found = ledger(line, computations=small + large + looped + once + often)
    assert found.by_kind_and_axes() == {GATHER_X: (4, 4 * 768)}


def test_calls():
    called = function("called", gather(operand="called.p"))
    lines = [f"%c{n} = f32[64]{{0}} call(%p), to_apply=%called" for n in range(3)]
    assert ledger(*lines, computations=called).by_kind_and_axes() == {GATHER_X: (3, 3 * 768)}


def test_products_of_a_gpu_library_in_a_loop():
    # f32[8,8] times f32[8,8], 5 times
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    gemm = [
        "%m = f32[8,8]{1,0} bitcast(%outer.v)",
        '%d = (f32[8,8]{1,0}, s8[4096]{0}) custom-call(%m, %m), custom_call_target="__cublas$gemm", '
        f"backend_config={config}",
    ]
    found = ledger(*loop("l", "p", "outer", 5), computations=body("outer", *gemm) + until_five("outer_cond"))
    assert (found.flops, found.entries) == (5 * 2 * 8 * 8 * 8, ())


def test_totals_agree_in_json():
    found = ledger(gather(), reduce(), *loop("l", "p", "outer", 3), computations=_three_reductions())
    told = json.loads(found.to_json())
    assert (told["name"], told["mesh"], told["flops"], told["notes"]) == ("jit_f", MESH, 0, [])
    assert told["wire_bytes"] == found.wire_bytes == 768 + 384 + 3 * 256
    assert sum(entry["wire_bytes"] for entry in told["entries"]) == told["wire_bytes"]
    assert told["entries"][2] == {
        "kind": "all-reduce",
        "axes": ["y"],
        "count": 3,
        "wire_bytes": 768,
        "dtype": "f32",
        "source": "",
        "equation": "",
        "step": "",
        "name": "r",
        "asynchronous": False,
        "arrays": 1,
        "group": 2,
        "together": 1,
        "network_bytes": 0,
    }


def test_concatenated_all_reduces_are_together():
    meta = 'metadata={op_name="gspmd[A]/step%d.all-reduce.x/psum"}'
    cut = [f"%s{n} = f32[32]{{0}} slice(%r), slice={{[{32 * n}:{32 * n + 32}]}}, {meta % n}" for n in (0, 1)]
    found = ledger(reduce(), *cut)
    assert [(each.wire_bytes, each.arrays, each.together) for each in found.entries] == [(192, 1, 2)] * 2


def _three_reductions() -> str:
    return body("outer", reduce(operand="outer.v", groups=Y)) + until_five("outer_cond")


def test_like_entries_are_one_row_and_the_largest_comes_first():
    lines = str(ledger(reduce("a"), reduce("b"), reduce("c"), reduce("d"), gather())).splitlines()
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in lines if line.startswith("│")]
    assert rows == [
        ["all-reduce", "x", "f32", "4", "1.54 kB", "the compiler"],
        ["all-gather", "x", "f32", "1", "768 B", "the compiler"],
        ["all", "", "", "5", "2.3 kB", "0 FLOP in matrix products"],
    ]
    assert lines[0].strip() == "ledger of jit_f: what one of 8 devices sends"


def test_brackets_in_a_path_are_printed():
    entry = Entry("all-gather", ("x",), 1, 8, "f32", "/tmp/[red]case/a[1].py:3", "BE_x -> BE")
    assert "BE_x -> BE  [red]case/a[1].py:3" in str(gspmd.Ledger((entry,), 0, MESH))


def test_a_permute_taken_apart_counts_once():
    attributes = "channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs={{0,2},{2,4}}}"
    kind = "(f32[64]{0}, u32[], token[])"
    found = ledger(
        "%t = token[] after-all()",
        f"%r = {kind} recv(%t), {attributes}",
        f"%s = {kind} send(%p, %t), {attributes}",
        f"%rd = (f32[64]{{0}}, token[]) recv-done(%r), {attributes}",
        f"%sd = token[] send-done(%s), {attributes}",
    )
    assert found.by_kind_and_axes() == {("collective-permute", ("x",)): (1, 256)}
    assert found.entries[0].asynchronous
    assert found.notes == ()


def test_a_product_of_a_library_that_cannot_be_counted_is_noted():
    found = ledger('%c = f32[64]{0} custom-call(%p, %p), custom_call_target="__cudnn$convForward"')
    assert found.flops == 0
    assert found.notes == ("the operations of custom call c (__cudnn$convForward) are not counted",)


def test_what_is_not_compiled_and_what_is_no_mesh():
    with pytest.raises(gspmd.PlanError, match=r"it is not compiled.\n  Give jax.jit\(f\).lower\(...\).compile\(\)"):
        gspmd.ledger(jax.jit(lambda x: x))
    with pytest.raises(gspmd.PlanError, match="cannot read what an int sends: it is not compiled"):
        gspmd.ledger(3)
    for mesh in ("x=8", 8, {"x": "8"}, (4, 2)):
        with pytest.raises(gspmd.PlanError, match=r"it is not a mesh\.\n  Give a mesh, or sizes of its axes"):
            gspmd.ledger("HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n", mesh=mesh)


def test_a_text_without_a_program():
    with pytest.raises(HloError, match="ENTRY"):
        gspmd.ledger("no program", MESH)


def test_steps_of_one_equation_share_a_row():
    steps = [("x", 2, 64), ("x", 5, 32), ("y", 3, 8)]
    entries = tuple(
        Entry("all-reduce", (axis,), 1, sent, "f32", "model.py:9", "A, B -> C", f"step{step}.all-reduce.{axis}", "r")
        for axis, step, sent in steps
    )
    made_of = gspmd.Ledger(entries, 0, MESH)
    assert [(count, sent) for _, count, sent in made_of._rows()] == [(1, 64), (1, 32), (1, 8)]
    assert [(count, sent) for _, count, sent in made_of._rows(together=True)] == [(2, 96), (1, 8)]
    text = drawn(made_of.table(together=True))
    assert "step" not in text
    assert text.count("A, B -> C") == 2
    assert drawn(made_of.table()).count("A, B -> C step") == 3


def drawn(sheet) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(sheet)
    return console.export_text()
