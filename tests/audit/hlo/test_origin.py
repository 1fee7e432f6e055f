"""The origin of a collective: its plan's step, and the line that asked for it."""

import pytest

from gspmd.audit import hlo
from gspmd.audit.hlo.collectives import collective
from gspmd.audit.hlo.origin import Origin, _listed, by_origin, origin

OURS = "/lib/gspmd/"
HEADER = """HloModule m

FileNames
1 "/lib/gspmd/collectives/lower.py"
2 "/home/me/model.py"
3 "<frozen runpy>"

FileLocations
1 {file_name_id=1 line=16}
2 {file_name_id=2 line=40}
3 {file_name_id=2 line=50}
4 {file_name_id=3 line=88}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=1}
4 {file_location_id=4 parent_frame_id=1}
5 {file_location_id=1 parent_frame_id=5}

"""
ENTRY = "ENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"


def found(*lines: str, computations: str = "", inner: str = "") -> Origin:
    """The origin of the last instruction, or of `inner` within the computation that it calls."""
    module = hlo.parse(HEADER + computations + ENTRY + "".join(f"  {line}\n" for line in lines) + "}\n")
    scheduled = module.entry.instructions[-1]
    called = module.computations[scheduled.called[0]] if inner else module.entry
    return origin(module, module.entry, scheduled, called.by_name.get(inner, scheduled), OURS)


def metadata(op_name: str, frame: int = 2) -> str:
    return f'metadata={{op_name="{op_name}" stack_frame_id={frame}}}'


def gather(op_name: str, frame: int = 2) -> str:
    return f"%g = f32[8]{{0}} all-gather(%p), {metadata(op_name, frame)}"


@pytest.mark.parametrize(
    ("scopes", "equation", "step"),
    [
        ("gspmd[BLE_x -> BLE]/step0.all-gather.x/all_gather", "BLE_x -> BLE", "step0.all-gather.x"),
        ("gspmd[BLE_xy -> BLE]/step12.all-gather.x.y", "BLE_xy -> BLE", "step12.all-gather.x.y"),
        (
            "gspmd[B_{data}E_{model_2}, EF -> B_{data}F]/step1.reduce-scatter.data.model_2/psum_scatter",
            "B_{data}E_{model_2}, EF -> B_{data}F",
            "step1.reduce-scatter.data.model_2",
        ),
        ("gspmd[gradient of A_x -> A]/step1.all-reduce/psum", "gradient of A_x -> A", "step1.all-reduce"),
        # within what differentiation and loops add
        (
            "while/body/transpose(jvp(gspmd_3))/shard_map/gspmd[A_x -> A]/step0.all-gather.x/all_gather",
            "A_x -> A",
            "step0.all-gather.x",
        ),
        # of two that the compiler merged, the first
        ("gspmd[A_x -> A]/(step12.all-reduce.y/psum:step10.all-reduce.y/psum)", "A_x -> A", "step12.all-reduce.y"),
        # the innermost counts
        ("gspmd[A_x -> A]/step7.einsum/gspmd[B_y -> B]/step0.all-gather.y/f", "B_y -> B", "step0.all-gather.y"),
        # within an equation that the compiler lowers
        ("gspmd[A_x, AB -> B]/dot_general", "A_x, AB -> B", ""),
        # a user's own scopes
        ("step3/all_gather", "", ""),
        ("step1.5/all_gather", "", ""),
        ("step1.attn/all_gather", "", ""),
        ("step1.all-gather.x/all_gather", "", ""),
        ("gspmd[A_x -> A]/step1.attn/all_gather", "A_x -> A", ""),
        ("gspmd[A_x -> A]/mystep1.all-gather.x/all_gather", "A_x -> A", ""),
        ("step1.all-gather.x/gspmd[A_x, AB -> B]/dot_general", "A_x, AB -> B", ""),
        (r"say \"gspmd\"/all_gather", "", ""),
        ("", "", ""),
    ],
)
def test_scopes(scopes, equation, step):
    assert found(gather(f"jit(f)/{scopes}")) == Origin(equation, step, "/home/me/model.py:40")


def test_the_line_is_the_first_that_is_not_ours():
    assert found(gather("f", 2)).source == "/home/me/model.py:40"
    assert found(gather("f", 3)).source == "/home/me/model.py:50"
    assert found(gather("f", 0)).source == ""
    assert found(gather("f", 5)).source == "", "Python's own lines start a command, and ask for nothing"


def test_without_a_line_that_of_what_it_moves_is_taken():
    dot = f"%d = f32[8]{{0}} dot(%p, %p), {metadata('jit(f)/dot', 3)}"
    chain = ["%a = f32[8]{0} copy(%d)", "%b = f32[8]{0} bitcast(%a)", "%r = f32[8]{0} all-reduce(%b), to_apply=%add"]
    assert found(dot, *chain) == Origin("", "", "/home/me/model.py:50")
    far = [f"%c{n} = f32[8]{{0}} copy(%{'d' if n == 0 else f'c{n - 1}'})" for n in range(9)]
    assert found(dot, *far, "%r = f32[8]{0} all-reduce(%c8), to_apply=%add").source == ""


def test_what_it_moves_says_nothing_of_its_plan():
    # an all-reduce that nobody planned, of what a planned step has made
    before = f"%g = f32[8]{{0}} all-gather(%p), {metadata('gspmd[A_x -> A]/step0.all-gather.x/all_gather')}"
    assert found(before, "%r = f32[8]{0} all-reduce(%g), to_apply=%add") == Origin("", "", "/home/me/model.py:40")


def reducer(op_name: str) -> str:
    root = f"ROOT %c = f32[] add(%a, %b), {metadata(op_name, 0)}"
    lines = ["%a = f32[] parameter(0)", "%b = f32[] parameter(1)", root]
    return "%add (a: f32[], b: f32[]) -> f32[] {\n" + "".join(f"  {line}\n" for line in lines) + "}\n\n"


STEP = "jit(f)/gspmd[A_x -> A]/step2.reduce-scatter.x/add"


def test_a_reduction_that_lost_its_scopes_has_those_of_what_it_computes():
    made = f"%d = f32[8]{{0}} dot(%p, %p), {metadata('jit(f)/dot', 3)}"
    line = "%r = f32[8]{0} all-reduce(%d), to_apply=%add"
    want = Origin("A_x -> A", "step2.reduce-scatter.x", "/home/me/model.py:50")
    assert found(made, line, computations=reducer(STEP)) == want


def test_a_function_that_reductions_share_says_nothing_where_they_speak_themselves():
    line = f"%r = f32[8]{{0}} all-reduce(%p), to_apply=%add, {metadata('jit(f)/psum', 3)}"
    assert found(line, computations=reducer(STEP)) == Origin("", "", "/home/me/model.py:50")


def test_a_wrapped_collective_speaks_for_the_line_in_the_schedule():
    wrapped = f"""%wrapped (w: f32[8]) -> f32[8] {{
  %w = f32[8]{{0}} parameter(0)
  ROOT %g = f32[8]{{0}} all-gather(%w), {metadata("gspmd[A_x -> A]/step0.all-gather.x/all_gather")}
}}

"""
    line = "%s = f32[8]{0} async-start(%p), calls=%wrapped"
    want = Origin("A_x -> A", "step0.all-gather.x", "/home/me/model.py:40")
    assert found(line, computations=wrapped, inner="g") == want


def test_the_line_in_the_schedule_speaks_for_a_fused_one():
    fused = "%fused (w: f32[8]) -> f32[8] {\n  %w = f32[8]{0} parameter(0)\n  ROOT %g = f32[8]{0} all-gather(%w)\n}\n\n"
    scopes = metadata("gspmd[A_x -> A]/step0.all-gather.x/f")
    line = f"%s = f32[8]{{0}} fusion(%p), kind=kCustom, calls=%fused, {scopes}"
    assert found(line, computations=fused, inner="g").step == "step0.all-gather.x"


# -- combined collectives ----------------------------------------------------------------------------------------------

SLICED = """
%cut (q: f32[8]) -> f32[3] {
  %q = f32[8]{0} parameter(0)
  ROOT %s = f32[3]{0} slice(%q), slice={[0:3]}
}

%used (r: f32[8], t: f32[5]) -> f32[5] {
  %r = f32[8]{0} parameter(0)
  %t = f32[5]{0} parameter(1)
  %u = f32[5]{0} slice(%r), slice={[SECOND]}, METADATA
  ROOT %v = f32[5]{0} add(%u, %t)
}

"""


def parts(*lines: str, computations: str = "", started: str = "c") -> list[tuple[str, str, tuple]]:
    """The equation, the step and the shapes of each part of a collective."""
    module = hlo.parse(HEADER + computations + ENTRY + "".join(f"  {line}\n" for line in lines) + "}\n")
    scheduled = module.entry.by_name[started]
    sent = collective(module, module.entry, scheduled, 4)
    split = by_origin(module, module.entry, scheduled, sent)
    return [(of.equation, of.step, tuple(array.shape for array in part.arrays)) for of, part in split]


def concatenated(second="3:8", names=("gspmd[A]/step2.all-reduce.x/psum", "gspmd[B]/step1.all-reduce.x/psum"), own=""):
    """An all-reduce of two arrays that were concatenated: one slice is reshaped, the other part of a fusion."""
    inside = SLICED.replace("SECOND", second).replace("METADATA", metadata(names[1]))
    lines = (
        f"%c = f32[8]{{0}} all-reduce-start(%p), replica_groups={{{{0,1,2,3}}}}, {metadata(own)}",
        "%d = f32[8]{0} all-reduce-done(%c)",
        "%f = f32[3]{0} fusion(%d), kind=kLoop, calls=%cut",
        f"%b = f32[3,1]{{1,0}} bitcast(%f), {metadata(names[0], 1)}",
        "%o = f32[5]{0} fusion(%d, %p), kind=kLoop, calls=%used",
    )
    return parts(*lines, computations=inside)


def test_a_concatenated_all_reduce_is_divided_among_its_slices():
    assert concatenated() == [("A", "step2.all-reduce.x", ((3,),)), ("B", "step1.all-reduce.x", ((5,),))]


def test_slices_of_an_equation_that_the_compiler_lowers_are_its_own():
    assert concatenated(names=("gspmd[A]/dot", "gspmd[B]/dot")) == [("A", "", ((3,),)), ("B", "", ((5,),))]


@pytest.mark.parametrize("first", ["jit(f)/reshape", "gspmd[C]/step1.einsum/reshape", "gspmd[C]/step0.all-gather.x/f"])
def test_an_all_reduce_that_its_user_slices_is_one_step(first):
    cut = concatenated(names=(first, "jit(f)/slice"), own="gspmd[A]/step2.all-reduce.x/psum")
    assert cut == [("A", "step2.all-reduce.x", ((8,),))]


@pytest.mark.parametrize("second", ["2:7", "4:8"])
def test_a_result_whose_slices_overlap_or_leave_gaps_is_one(second):
    assert [shapes for _, _, shapes in concatenated(second)] == [((8,),)]


GATHER = "%c = ((f32[2]{0}, f32[1]{0}), (f32[8]{0}, f32[4]{0})) all-gather-start(%p, %p), replica_groups={{0,1,2,3}}"
NAMES = "jit(f)/while/(a/gspmd[B, (E, F) -> B]/step0.all-gather.x/gather:gspmd[A]/step3.all-gather.x/gather)"


def test_arrays_of_a_combined_gather_are_named_by_what_reshapes_them_or_by_the_list_of_the_gather():
    done = f"%d = (f32[8]{{0}}, f32[4]{{0}}) all-gather-done(%c), {metadata(NAMES)}"
    first, second = "%a = f32[8]{0} get-tuple-element(%d), index=0", "%b = f32[4]{0} get-tuple-element(%d), index=1"
    reshaped = f"%e = f32[2,2]{{1,0}} bitcast(%b), {metadata('gspmd[C]/step1.all-gather.x/gather')}"
    listed = ("B, (E, F) -> B", "step0.all-gather.x", ((8,),))
    assert parts(GATHER, done, first, second) == [listed, ("A", "step3.all-gather.x", ((4,),))]
    assert parts(GATHER, done, first, second, reshaped) == [listed, ("C", "step1.all-gather.x", ((4,),))]


def test_a_reduction_of_another_kind_than_planned_keeps_its_step_and_the_step_that_uses_it_is_passed_over():
    line = "%c = (f32[8]{0}, f32[4]{0}) all-reduce(%p, %p), replica_groups={{0,1,2,3}}"
    first = f"%a = f32[8]{{0}} get-tuple-element(%c), index=0, {metadata('gspmd[A]/step1.reduce-scatter.x/psum')}"
    second = f"%b = f32[4]{{0}} get-tuple-element(%c), index=1, {metadata('jit(f)/psum')}"
    used = f"%e = f32[2,2]{{1,0}} bitcast(%b), {metadata('gspmd[C]/step1.einsum/dot')}"
    assert parts(line, first, second, used) == [("A", "step1.reduce-scatter.x", ((8,),)), ("", "", ((4,),))]


def test_a_list_of_names_is_split_only_between_them():
    assert _listed("f/(a/(b:c):gspmd[A (partialsum-x) -> B]/d)") == ["a/(b:c)", "gspmd[A (partialsum-x) -> B]/d"]
    assert _listed("jit(f)/gspmd[(A, B) -> C]/psum") == []
