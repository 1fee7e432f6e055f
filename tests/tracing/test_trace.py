"""Trace counts what is compiled: collectives by kind and in bytes, under gradients, loops and recomputation."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import pytest

import gspmd
from gspmd.hardware.chips import chip
from tests.references import compiled

pytestmark = pytest.mark.usefixtures("every_schedule")

MESH = {"x": 2, "y": 2, "z": 2}
SHAPES = {"x": ("BLE_xyz", (8, 4, 64)), "w": ("E_xF_yz", (64, 128)), "v": ("F_yzE_x", (128, 64))}


LOOPED = ("looped", "looped:one-way", "looped:halves", "looped:paired", "auto")


@pytest.fixture(autouse=True)
def blocking():
    """Plan without loops unless a test asks for them: a step is then one collective."""
    with gspmd.lowering("blocking"):
        yield


@pytest.fixture
def arguments(make_mesh, axis_type):
    """The mesh, and abstract arguments on it."""
    mesh = make_mesh(MESH, axis_type)
    return mesh, [
        jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=jax.NamedSharding(mesh, gspmd.Spec.parse(spec).partition_spec())
        )
        for spec, shape in SHAPES.values()
    ]


def _layer(x, w, v):
    h = gspmd.einsum("BLE_xyz, E_xF_yz -> BLF_yzx", x, w, via="BLE_x, E_xF_yz")
    return gspmd.einsum("BLF_yzx, F_yzE_x -> BLE_xyz", h, v, via="BLF_yz, F_yzE_x")


def _value_and_gradients(layer):
    def both(x, w, v):
        y, transpose = jax.vjp(layer, x, w, v)
        return y, transpose(jnp.cos(x))  # not x itself, whose gather the compiler would share

    return both


def _scanned(x, w, v):
    return jax.lax.scan(lambda x, _: (_layer(x, w, v), None), x, None, length=5)[0]


def _nested(x, w, v):
    return jax.lax.scan(lambda x, _: (_scanned(x, w, v), None), x, None, length=2)[0]


def _rematerialized(x, w, v):
    layer = jax.checkpoint(_layer)
    return jax.lax.scan(lambda x, _: (layer(x, w, v), None), x, None, length=3)[0]


PROGRAMS = {
    "forward": _layer,
    "gradient": _value_and_gradients(_layer),
    "scan": _scanned,
    "nested scans": _nested,
    "gradient of a scan": _value_and_gradients(_scanned),
    "gradient with recomputation": _value_and_gradients(_rematerialized),
    "moves": lambda x, w, v: gspmd.reshard(gspmd.reshard(x, "BLE_xyz -> B_xyzLE"), "B_xyzLE -> BLE"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_planned_is_compiled(arguments, name):
    mesh, abstract = arguments
    with jax.set_mesh(mesh):
        plan = gspmd.trace(PROGRAMS[name], *abstract)
        text = jax.jit(PROGRAMS[name]).lower(*abstract).compile().as_text()
    counts = {}
    for step in plan.steps:
        if step.is_collective:
            counts[step.kind] = counts.get(step.kind, 0) + 1
    assert counts == dict(compiled.collectives(text))
    assert plan.wire_bytes == compiled.bytes_sent(text)
    assert plan.flops == compiled.dot_flops(text)


IN_TURN = {(name, LOOPED[at % len(LOOPED)]) for at, name in enumerate(PROGRAMS)}
OTHERS = {*product(PROGRAMS, LOOPED)} - IN_TURN


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("name", "lowering"), [*sorted(IN_TURN), *(pytest.param(*each, marks=pytest.mark.slow) for each in sorted(OTHERS))]
)
def test_what_is_looped_is_planned_as_the_permutes_that_are_compiled(arguments, name, lowering):
    mesh, abstract = arguments
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        plan = gspmd.trace(PROGRAMS[name], *abstract)
        text = jax.jit(PROGRAMS[name]).lower(*abstract).compile().as_text()
    sent = {kind for (kind, _), (_, amount) in plan.by_kind_and_axes().items() if amount}
    assert sent == set(compiled.collectives(text))
    assert plan.wire_bytes == compiled.bytes_sent(text)
    assert plan.flops == compiled.dot_flops(text)


def test_a_looped_step_counts_once_and_sends_what_it_would_in_one_piece(arguments):
    mesh, abstract = arguments
    with jax.set_mesh(mesh):
        whole = gspmd.trace(_scanned, *abstract)
    with jax.set_mesh(mesh), gspmd.lowering("looped"):
        plan = gspmd.trace(_scanned, *abstract)
    assert plan.wire_bytes == whole.wire_bytes
    assert {key: count for key, (count, _) in plan.by_kind_and_axes().items()} == {
        ("collective-permute", ("x",)): 10,
        ("collective-permute", ("y", "z")): 10,
    }
    assert len(plan.entries) == len(whole.entries)


def test_kinds_and_axes_add_up(arguments):
    mesh, abstract = arguments
    with jax.set_mesh(mesh):
        plan = gspmd.trace(_scanned, *abstract)
    found = plan.by_kind_and_axes()
    assert {key: count for key, (count, _) in found.items()} == {
        ("all-gather", ("x",)): 5,
        ("all-gather", ("y", "z")): 5,
        ("reduce-scatter", ("x",)): 5,
        ("reduce-scatter", ("y", "z")): 5,
    }
    assert sum(sent for _, sent in found.values()) == plan.wire_bytes
    assert plan.seconds > 0


def test_a_step_knows_its_equation_and_trips(arguments):
    mesh, abstract = arguments
    with jax.set_mesh(mesh):
        plan = gspmd.trace(_scanned, *abstract)
    assert {entry.trips for entry in plan.entries} == {5}
    assert {entry.equation for entry in plan.entries} == {
        "BLE_xyz, E_xF_yz -> BLF_yzx",
        "BLF_yzx, F_yzE_x -> BLE_xyz",
    }
    first = plan.entries[0]
    assert first.wire_bytes == 5 * first.step.wire_bytes


def test_what_nobody_uses_is_not_counted(arguments):
    mesh, abstract = arguments
    with jax.set_mesh(mesh):
        plan = gspmd.trace(lambda x, w, v: (_layer(x, w, v), x + 1)[1], *abstract)
    assert plan.steps == ()


@jax.custom_vjp
def _sine(x, w):
    return jnp.sin(x)


_sine.defvjp(lambda x, w: (jnp.sin(x), x), lambda x, cotangent: (cotangent * jnp.cos(x), None))


@jax.custom_jvp
def _cosine(x, w):
    return jnp.cos(x)


_cosine.defjvp(lambda operands, tangents: (jnp.cos(operands[0]), -jnp.sin(operands[0]) * tangents[0]))


@pytest.mark.parametrize("first", [_sine, _cosine])
def test_what_a_function_with_a_rule_of_its_own_ignores_is_not_counted(arguments, first):
    def run(x, w, v):
        return first(x, gspmd.reshard(w, "E_xF_yz -> EF"))

    mesh, abstract = arguments
    with jax.set_mesh(mesh):
        assert gspmd.trace(run, *abstract).steps == ()
        assert not compiled.collectives(jax.jit(run).lower(*abstract).compile().as_text())


def test_a_conditional_counts_its_largest_branch(arguments):
    mesh, abstract = arguments
    with jax.set_mesh(mesh):
        both = lambda x, w, v: jax.lax.cond(True, lambda: _layer(x, w, v), lambda: x)  # noqa: E731
        assert gspmd.trace(both, *abstract).wire_bytes == gspmd.trace(_layer, *abstract).wire_bytes


DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32", "uint8": "u8", "bool": "pred"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_knows_what_it_sends(make_mesh, dtype):
    with jax.set_mesh(make_mesh(MESH, "auto")):
        plan = gspmd.trace(lambda x: gspmd.reshard(x, "B_xE -> BE"), jax.ShapeDtypeStruct((8, 4), dtype))
    assert [entry.dtype for entry in plan.entries] == [DTYPES[dtype]]


def _until_ten(x, w, v):
    return jax.lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 1, _layer(c[1], w, v)), (0, x))[1]


def test_a_while_loop_counts_once_and_a_note_says_so(arguments):
    mesh, abstract = arguments
    with jax.set_mesh(mesh):
        plan, layer = gspmd.trace(_until_ten, *abstract), gspmd.trace(_layer, *abstract)
    assert plan.wire_bytes == layer.wire_bytes
    (note,) = plan.notes
    inside = "it has: BLE_xyz, E_xF_yz -> BLF_yzx; BLF_yzx, F_yzE_x -> BLE_xyz"
    assert note == f"a while loop counts as one trip, since its trip count is unknown; {inside}"
    assert f"note: {note}" in " ".join(str(plan).split())
    assert not layer.notes


def test_a_while_loop_without_steps_needs_no_note(arguments):
    mesh, abstract = arguments
    with jax.set_mesh(mesh):
        plan = gspmd.trace(lambda x, w, v: jax.lax.while_loop(lambda n: n < 10, lambda n: n + 1, 0), *abstract)
    assert plan.notes == ()


def test_the_plan_knows_which_equations_the_compiler_lowers(arguments):
    mesh, abstract = arguments
    with jax.set_mesh(mesh):
        with gspmd.lowering("xla"):
            forecast = gspmd.trace(_layer, *abstract)
        planned = gspmd.trace(_layer, *abstract)
    assert forecast.lowered == {"BLE_xyz, E_xF_yz -> BLF_yzx", "BLF_yzx, F_yzE_x -> BLE_xyz"}
    assert planned.lowered == frozenset()


def test_under_xla_the_plan_is_a_forecast(arguments):
    mesh, abstract = arguments
    with jax.set_mesh(mesh), gspmd.lowering("xla"):
        forecast = gspmd.trace(_value_and_gradients(_layer), *abstract)
    with jax.set_mesh(mesh):
        planned = gspmd.trace(_value_and_gradients(_layer), *abstract)
    assert forecast.by_kind_and_axes() == planned.by_kind_and_axes()


def test_it_prints_a_table(arguments):
    mesh, abstract = arguments
    with jax.set_mesh(mesh):
        text = str(gspmd.trace(_layer, *abstract))
    assert "planned collectives, per device" in text
    assert "all-gather" in text


def test_a_function_may_be_named_as_ours_are(arguments):
    def gspmd_square(x):
        return x * x

    mesh, (x, *_) = arguments
    with jax.set_mesh(mesh):
        assert gspmd.trace(lambda x: jax.jit(gspmd_square)(x), x).wire_bytes == 0


@pytest.mark.parametrize("fn", [None, "a function", 7, gspmd.Spec.parse("B_x")], ids=lambda fn: type(fn).__name__)
def test_what_is_no_function_is_named(fn):
    with pytest.raises(gspmd.PlanError, match=rf"cannot trace an? {type(fn).__name__}: it is not a function"):
        gspmd.trace(fn, 1.0)


@pytest.mark.parametrize(
    "wrong", ["BLE_xyz", gspmd.Spec.parse("B_x"), "float32", object()], ids=["notation", "spec", "dtype", "object"]
)
def test_an_argument_that_is_no_array_is_named(wrong):
    with pytest.raises(gspmd.PlanError, match=r"argument \[1\]\['w'\] is ") as told:
        gspmd.trace(lambda x, tree: x, 1.0, {"v": None, "w": wrong})
    assert "Give arrays, jax.ShapeDtypeStruct or numbers" in str(told.value)


def test_a_function_hides_what_its_plans_hide():
    """Under auto, on a slice: in loops and gradients, under vmap, in the branch that counts, of what is sent once."""
    pytest.importorskip("libtpu")
    equation, sizes, via = "BL_xE, EF_x -> BLF_x", {"B": 8, "L": 2048, "E": 8192, "F": 32768}, "BLE, EF_x"
    placed = replace(chip("tpu-v4"), slice_shape=(2, 2, 2))
    plan = gspmd.plan(equation, sizes, {"x": 8}, chip=placed, via=via)
    assert min(plan.hidden_seconds, plan.backward_overlap[1]) > 0

    def layer(x, w):
        return (gspmd.einsum(equation, x, w, via=via).astype("float32") ** 2).sum()

    def layers(x, w):
        return jax.lax.scan(lambda x, _: (2 * x, layer(x, w)), x, None, length=3)[1].sum()

    def gathers(x, w):
        whole = gspmd.reshard(gspmd.reshard(w, "EF_x -> EF") * 2, "EF -> EF_x")
        return gspmd.reshard(whole * 3, "EF_x -> EF").astype("float32").sum() + x.astype("float32").sum()

    mesh = gspmd.audit.topology("tpu-v4:2x2x2").mesh({"x": 8})
    with jax.set_mesh(mesh), gspmd.lowering("auto"):
        x, w, many = (
            jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.NamedSharding(mesh, jax.P(*placed)))
            for shape, placed in (
                ((8, 2048, 8192), (None, "x", None)),
                ((8192, 32768), (None, "x")),
                ((4, 8, 2048, 8192), (None, None, "x", None)),
            )
        )

        def hidden(fn, *arguments):
            traced = gspmd.trace(fn, *arguments)
            sent = sum(entry.step.seconds * entry.trips for entry in traced.entries if entry.step.is_collective)
            assert 0 <= traced.hidden_seconds <= sent * (1 + 1e-9)
            return traced.hidden_seconds / plan.hidden_seconds

        assert hidden(layer, x, w) == pytest.approx(1)
        assert hidden(layers, x, w) == pytest.approx(3)
        assert hidden(jax.vmap(layer, (0, None)), many, w) == pytest.approx(4)
        backward = plan.backward_overlap[1] / plan.hidden_seconds
        # what both passes send is counted once
        assert 1 < hidden(jax.value_and_grad(layer, argnums=(0, 1)), x, w) <= 1 + backward
        # what two products have from the same permutes hides behind one of them
        assert 1 < hidden(lambda x, w: layer(x, w) + layer(x, 2 * w), x, w) < 2
        assert hidden(lambda p, x, w: jax.lax.cond(p, layer, gathers, x, w), True, x, w) == hidden(gathers, x, w) == 0
        with gspmd.lowering("blocking"):
            assert hidden(layers, x, w) == 0
