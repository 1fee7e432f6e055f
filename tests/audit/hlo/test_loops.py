"""Trips of loops: as XLA notes them, and as the TPU compiler leaves them to be worked out."""

from importlib import util

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from gspmd.audit import hlo, topology
from gspmd.audit.hlo.loops import reordered, trips

needs_libtpu = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")

TYPE = "(s32[]{:T(128)}, f32[64]{0}, s32[]{:T(128)})"


def body(name: str, *lines: str, root: str) -> str:
    """A loop's body: counter i, value v, a third element k; the result of `root` is returned."""
    taken = (f"%{each} = s32[] get-tuple-element(%b), index={n}" for each, n in (("i", 0), ("v", 1), ("k", 2)))
    return _computation(name, "b", *taken, *lines, f"ROOT %out = {TYPE} {root}")


def condition(name: str, *lines: str) -> str:
    taken = (f"%{each} = s32[]{{:T(128)}} get-tuple-element(%c), index={n}" for each, n in (("i", 0), ("k", 2)))
    return _computation(name, "c", *taken, *lines)


def _computation(name: str, parameter: str, *lines: str) -> str:
    written = "\n".join(f"  {line}" for line in (f"%{parameter} = {TYPE} parameter(0)", *lines))
    return f"%{name} ({parameter}: (s32[], f32[64], s32[])) -> (s32[], f32[64], s32[]) {{\n{written}\n}}\n"


def compare(direction: str, left: str = "i", right: str = "n") -> str:
    return f"ROOT %lt = pred[]{{:T(512)}} compare(%{left}, %{right}), direction={direction}"


def loop(*computations: str, start: int = 0, third: int = 0, more: str = "", attributes: str = "") -> hlo.Module:
    lines = [
        "%p = f32[64]{0} parameter(0)",
        f"%start = s32[] constant({start})",
        f"%third = s32[] constant({third})",
        f"%in = {TYPE} tuple(%start, %p, %third)",
        f"%loop = {TYPE} while(%in), condition=%cond, body=%body{attributes}",
        "ROOT %r = f32[64]{0} get-tuple-element(%loop), index=1",
    ]
    main = "ENTRY %main (p: f32[64]) -> f32[64] {\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"
    return hlo.parse("HloModule m, is_scheduled=true\n\n" + "\n".join(computations) + more + main)


def runs(module: hlo.Module, name: str = "loop") -> int | None:
    for computation in module.computations.values():
        if name in computation.by_name:
            return trips(module, computation, computation.by_name[name])
    raise KeyError(name)


def adding(step: int, kind: str = "add") -> str:
    return body("body", f"%one = s32[] constant({step})", f"%n = s32[] {kind}(%i, %one)", root="tuple(%n, %v, %k)")


UP = adding(1)


def test_what_the_compiler_notes_comes_first():
    noted = ', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}'
    assert runs(loop(UP, condition("cond", compare("EQ", right="k")), attributes=noted)) == 5


@pytest.mark.parametrize(
    ("start", "step", "direction", "bound", "count"),
    [
        (0, 1, "LT", 118, 118),
        (3, 2, "LT", 17, 7),  # 3 5 7 9 11 13 15
        (3, 2, "LE", 17, 8),  # and 17
        (3, 2, "LT", 18, 8),
        (17, -3, "GT", 0, 6),  # 17 14 11 8 5 2
        (17, -1, "GE", 0, 18),
        (0, 4, "NE", 12, 3),
        (0, 5, "NE", 12, None),  # never there
        (5, 1, "LT", 5, 0),
        (9, 1, "LT", 5, 0),
        (9, -1, "LT", 5, 0),
        (6, 1, "LE", 5, 0),
        (5, 1, "NE", 5, 0),
        # away from the bound: until the counter overflows
        (0, -1, "LT", 5, None),
        (5, -1, "LE", 5, None),
        (5, 1, "GT", 0, None),
        (0, 1, "GE", 0, None),
        (12, 4, "NE", 0, None),
        (0, 0, "LT", 5, None),  # forever
        (0, 1, "EQ", 5, None),
    ],
)
def test_a_counter_its_bound_and_its_step(start, step, direction, bound, count):
    until = condition("cond", f"%n = s32[]{{:T(128)}} constant({bound})", compare(direction))
    assert runs(loop(adding(step), until, start=start)) == count


def test_the_bound_may_stand_on_the_left():
    # 12 > i, and 0 <= i while i falls
    left = condition("cond", "%n = s32[] constant(12)", compare("GT", "n", "i"))
    assert runs(loop(adding(4), left)) == 3
    down = condition("cond", "%n = s32[] constant(0)", compare("LE", "n", "i"))
    assert runs(loop(adding(1, "subtract"), down, start=17)) == 18


def test_the_constant_may_be_the_first_summand():
    first = body("body", "%one = s32[] constant(2)", "%n = s32[] add(%one, %i)", root="tuple(%n, %v, %k)")
    assert runs(loop(first, condition("cond", "%n = s32[] constant(17)", compare("LT")), start=3)) == 7


def test_the_bound_is_carried_through_the_loop():
    assert runs(loop(UP, condition("cond", compare("LT", right="k")), third=13)) == 13


def test_the_counter_goes_through_a_fusion_and_a_copy():
    fused = """%fused (q: s32[], r: f32[64]) -> (s32[]) {
  %q = s32[] parameter(0)
  %r = f32[64]{0} parameter(1)
  %two = s32[] constant(2)
  ROOT %sum = s32[] add(%q, %two)
}
%fused.1 (q.1: s32[], n.1: s32[]) -> pred[] {
  %q.1 = s32[] parameter(0)
  %n.1 = s32[] constant(17)
  ROOT %lt.1 = pred[] compare(%q.1, %n.1), direction=LT
}
"""
    moving = body(
        "body",
        "%held = s32[] copy(%i)",
        "%f = s32[] fusion(%held, %v), kind=kLoop, calls=%fused",
        root="tuple(%f, %v, %k)",
    )
    until = condition("cond", "ROOT %f.1 = pred[] fusion(%i), kind=kLoop, calls=%fused.1")
    assert runs(loop(fused, moving, until, start=3)) == 7


INNER_COND = condition("inner_cond", compare("LT", right="k").replace("%lt", "%lt.2"))
INNER = UP.replace("%body", "%inner_body")


def outer(bound: str, *lines: str, third: str = "%k") -> str:
    """A body that runs a loop from 0 to `bound`."""
    return body(
        "body",
        "%zero = s32[] constant(0)",
        "%one = s32[] constant(1)",
        "%next = s32[] add(%i, %one)",
        *lines,
        f"%inner_in = {TYPE} tuple(%zero, %v, {bound})",
        f"%inner = {TYPE} while(%inner_in), condition=%inner_cond, body=%inner_body",
        root=f"tuple(%next, %v, {third})",
    )


UNTIL_3 = condition("cond", "%n = s32[] constant(3)", compare("LT"))


def test_a_bound_is_hoisted_out_of_the_loop_around():
    module = loop(INNER, INNER_COND, outer("%k"), UNTIL_3, third=5)
    assert (runs(module), runs(module, "inner")) == (3, 5)


@pytest.mark.parametrize(
    ("lines", "third"),
    [
        (("%m = s32[] add(%k, %one)",), "%m"),  # a triangle
        (("%m = s32[] multiply(%k, %k)",), "%m"),  # nobody reads this one
        (("%m = s32[] custom-call(%v)",), "%m"),
    ],
)
def test_a_bound_that_the_loop_around_changes_is_unknown(lines, third):
    module = loop(INNER, INNER_COND, outer("%k", *lines, third=third), UNTIL_3, third=5)
    assert (runs(module), runs(module, "inner")) == (3, None)


def test_what_is_computed_is_unknown():
    data = condition("cond", "%v = f32[64] get-tuple-element(%c), index=1", "ROOT %any = pred[] custom-call(%v)")
    assert runs(loop(UP, data)) is None
    both = condition("cond", "%n = s32[] constant(3)", compare("LT")[5:], "ROOT %and = pred[] and(%lt, %lt)")
    assert runs(loop(UP, both)) is None
    growing = body("body", "%n = s32[] multiply(%i, %i)", root="tuple(%n, %v, %k)")
    assert runs(loop(growing, UNTIL_3)) is None
    handed_on = body("body", root="tuple(%i, %v, %k)")
    assert runs(loop(handed_on, UNTIL_3)) is None


@pytest.mark.parametrize(
    ("lines", "passed_on", "names"),
    [
        (("%r = f32[64]{0} copy(%v)",), "v", ["r"]),
        (("%r = f32[64]{0} copy(%v)",), "r", []),  # the next iteration gets another one
        (("%s = f32[8,8]{1,0} bitcast(%v)", "%r = f32[8,8]{0,1} transpose(%s), dimensions={1,0}"), "v", ["r"]),
        (("%r = f32[64]{0} fusion(%v), kind=kLoop, calls=%ordered",), "v", ["r"]),
        (("%r = f32[64]{0} fusion(%v), kind=kLoop, calls=%computed",), "v", []),
    ],
)
def test_a_whole_array_that_no_iteration_changes_is_copied_in_each(lines, passed_on, names):
    fused = "".join(
        f"%{name} (q: f32[64]) -> f32[64] {{\n  %q = f32[64]{{0}} parameter(0)\n"
        f"  ROOT %f = f32[64]{{0}} {opcode}(%q)\n}}\n"
        for name, opcode in (("ordered", "copy"), ("computed", "negate"))
    )
    module = loop(fused, _with(lines, passed_on), UNTIL_3)
    assert [each.name for each in reordered(module, module.computations["body"])] == names


def _with(lines, passed_on):
    one = "%one = s32[] constant(1)"
    return body("body", *lines, one, "%n = s32[] add(%i, %one)", root=f"tuple(%n, %{passed_on}, %k)")


def _step(x):
    return jnp.tanh(x @ x)


def _counting(start, until, by):
    return lambda x: lax.while_loop(lambda s: until(s[0]), lambda s: (s[0] + by, _step(s[1])), (start, x))


def _nested(x):
    inner = lambda c: lax.scan(lambda d, _: (_step(d), None), c, None, length=5)[0]  # noqa: E731
    return lax.scan(lambda c, _: (inner(c), None), x, None, length=7)[0]


def _triangle(x):
    return lax.fori_loop(0, 3, lambda i, c: lax.fori_loop(0, i, lambda j, d: _step(d), c), x)


def _widening(x):  # how often the inner loop runs doubles each time
    def outer(state):
        i, n, c = state
        return i + 1, n * 2, lax.fori_loop(0, n, lambda j, d: _step(d), c)

    return lax.while_loop(lambda s: s[0] < 3, outer, (0, 1, x))


PROGRAMS = {
    "scan": (lambda x: lax.scan(lambda c, _: (_step(c), None), x, None, length=7)[0], {7}),
    "backwards": (lambda x: lax.scan(lambda c, r: (_step(c) * r, None), x, x[0, :9], reverse=True)[0], {9}),
    "step 2": (_counting(3, lambda i: i < 17, 2), {7}),
    "at most": (_counting(3, lambda i: i <= 17, 2), {8}),
    "down": (_counting(17, lambda i: i > 0, -3), {6}),
    "bound on the left": (_counting(0, lambda i: lax.gt(12, i), 4), {3}),
    "nested": (_nested, {5, 7}),
    "triangle": (_triangle, {3, None}),
    "widening": (_widening, {3, None}),
    "data": (lambda x: lax.while_loop(lambda c: c.sum() < 5, _step, x), {None}),
}


@needs_libtpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_tpu_compiler_makes_of_loops(name):
    program, want = PROGRAMS[name]
    mesh = topology("tpu-v4:2x2x1").mesh({"x": 4}, "auto")
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=jax.NamedSharding(mesh, jax.P()))
    module = hlo.parse(jax.jit(program).lower(x).compile().as_text())
    loops = [(c, i) for c in module.computations.values() for i in c.instructions if i.opcode == "while"]
    assert {trips(module, *each) for each in loops} == want
    assert len(loops) == len(want)
