"""Looking rows up: every way a table and tokens can lie, and the cheapest way to bring them together."""

from contextlib import suppress
from functools import cache, partial
from itertools import combinations_with_replacement, pairwise, permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.ops._embedding import embed
from tests.references.own_process import faults

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 24, size=(4, 6)).astype(np.int32)
TABLE = RNG.normal(size=(24, 16)).astype(np.float32)

CUBE, FLAT, ODD = {"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2}, {"x": 3, "y": 2, "z": 1}
CASES = [
    (CUBE, "BL, VE -> BLE"),
    (CUBE, "B_xL, VE_y -> B_xLE_y"),
    (CUBE, "B_xL, V_yE -> B_xLE_y"),
    (CUBE, "B_xL, V_xE -> B_xLE"),
    (CUBE, "BL, V_xyzE -> BLE_xyz"),
    (CUBE, "BL, VE_xyz -> BLE_xyz"),
    (CUBE, "B_xL, V_xE_yz -> B_xLE_yz"),
    (FLAT, "B_xL_y, V_yxE -> B_xL_yE"),
    (FLAT, "B_xL, VE_yx -> B_xLE_y"),
    (FLAT, "BL, V_yE -> B_xLE"),
    (ODD, "B_yL_x, V_xE_z -> B_yL_xE"),
    (ODD, "B_yL, V_xE -> B_yLE_z"),
]


def _specs(equation):
    operands, rows = equation.split(" -> ")
    return operands.split(", "), rows


@pytest.mark.turns(3)
@pytest.mark.parametrize(("mesh", "equation"), CASES)
def test_value_gradient_and_collectives(mesh, equation, axis_type, check_form):
    specs, rows = _specs(equation)
    check_form(
        lambda ids, table: embed(ids, table, equation), lambda ids, table: table[ids], (IDS, TABLE), specs, rows,
        mesh=mesh, axis_type=axis_type, wrt=(1,),
    )  # fmt: skip


@pytest.mark.parametrize(("mesh", "equation"), [CASES[2], CASES[7], CASES[10]])
def test_compiler_chooses(mesh, equation, axis_type, check_form):
    specs, rows = _specs(equation)
    check_form(
        lambda ids, table: embed(ids, table, equation), lambda ids, table: table[ids], (IDS, TABLE), specs, rows,
        mesh=mesh, axis_type=axis_type, lowering="xla", wrt=(1,),
    )  # fmt: skip


def _planned(make_mesh, mesh, equation, tokens, vocabulary, embed_size, gradient=False):
    """The planned collectives of a lookup as (what moves, kind, axes)."""
    mesh = make_mesh(mesh, "auto")
    ids = jax.ShapeDtypeStruct((8, tokens // 8), jnp.int32)
    table = jax.ShapeDtypeStruct((vocabulary, embed_size), jnp.bfloat16)
    value = lambda ids, table: embed(ids, table, equation)  # noqa: E731
    slope = lambda ids, table: jax.grad(lambda t: value(ids, t).astype(jnp.float32).sum())(table)  # noqa: E731
    with jax.set_mesh(mesh):
        steps = gspmd.trace(slope if gradient else value, ids, table).steps
    return [(step.operand, step.kind, step.axes) for step in steps if step.is_collective]


def test_few_tokens_send_rows_and_never_the_table(make_mesh):
    planned = _planned(make_mesh, {"x": 4, "y": 2}, "B_xL, V_xE -> B_xLE", 64, 2**18, 512)
    assert planned == [("ids", "all-gather", ("x",)), ("result", "reduce-scatter", ("x",))]


def test_many_tokens_gather_the_table(make_mesh):
    planned = _planned(make_mesh, {"x": 4, "y": 2}, "B_xL, V_xE -> B_xLE", 2**20, 256, 512)
    assert planned == [("table", "all-gather", ("x",))]


def test_the_gradient_chooses_for_itself(make_mesh):
    few = _planned(make_mesh, {"x": 4, "y": 2}, "B_xL, V_xE -> B_xLE", 64, 2**18, 512, gradient=True)
    assert few == [("ids", "all-gather", ("x",)), ("cotangent", "all-gather", ("x",))]
    many = _planned(make_mesh, {"x": 4, "y": 2}, "B_xL, V_xE -> B_xLE", 2**20, 256, 512, gradient=True)
    assert many == [("gradient of table", "reduce-scatter", ("x",))]


@pytest.mark.parametrize(
    ("equation", "sizes"),
    [
        ("B_xyL, VE_yzx -> B_xyLE_z", {"B": 16, "L": 256, "V": 2048, "E": 1024}),  # best with the order E_zxy
        ("B_yzxL, VE_y -> BLE_xz", {"B": 8, "L": 256, "V": 2048, "E": 1024}),  # best with the order B_xz
        ("B_xL, V_xE_yz -> B_xLE_yz", {"B": 8, "L": 256, "V": 2048, "E": 64}),
    ],
)
def test_no_placement_of_the_lookup_is_cheaper(make_mesh, equation, sizes):
    """Against brute force: every order of the mesh axes on every dimension, each move planned by `gspmd.plan`."""
    specs, rows = _specs(equation)
    given = [gspmd.Spec.parse(each) for each in (*specs, rows)]
    homes = {axis: {dim for spec in given for dim in spec.dims if axis in spec.axes_of(dim)} for axis in CUBE}

    @cache
    def seconds(move, dtype):
        return gspmd.plan(move, sizes, CUBE, dtype).seconds

    costs = []
    for axes in permutations(CUBE):
        for cuts in combinations_with_replacement(range(len(axes) + 1), 4):  # the axes left over shard nothing
            held = dict(zip("BLVE", (axes[start:end] for start, end in pairwise((0, *cuts)))))
            if any(dim not in homes[axis] for dim in held for axis in held[dim]):
                continue
            b, length, v, e = (f"{dim}_{''.join(held[dim])}" if held[dim] else dim for dim in "BLVE")
            found = b + length + e + (f" partialsum-{''.join(held['V'])}" if held["V"] else "")
            moves = (
                (f"{specs[0]} -> {b}{length}", "int32"),
                (f"{specs[1]} -> {v}{e}", "bfloat16"),
                (f"{found} -> {rows}", "bfloat16"),
            )
            with suppress(gspmd.PlanError):  # the axes do not divide a size
                costs.append(sum(seconds(*each) for each in moves))
    ids = jax.ShapeDtypeStruct((sizes["B"], sizes["L"]), jnp.int32)
    table = jax.ShapeDtypeStruct((sizes["V"], sizes["E"]), jnp.bfloat16)
    with jax.set_mesh(make_mesh(CUBE, "auto")):
        planned = gspmd.trace(lambda ids, table: embed(ids, table, equation), ids, table)
    assert planned.seconds == pytest.approx(min(costs), rel=1e-9)


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_ids_outside_the_table_read_zeros(make_mesh, place, lowering):
    mesh, ids = make_mesh({"x": 4}), np.array([[-1, 24], [23, 0]], np.int32)
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        look = lambda t: embed(jnp.asarray(ids), t, "BL, V_xE -> BLE")  # noqa: E731
        rows, transpose = jax.vjp(look, place(mesh, TABLE, "V_xE"))
        (gradient,) = transpose(jnp.ones_like(rows))
    np.testing.assert_array_equal(rows, np.stack([np.zeros((2, 16)), TABLE[[23, 0]]]))
    np.testing.assert_array_equal(gradient[:, 0], np.eye(24)[[0, 23]].sum(0))


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_ids_may_be_narrower_than_the_size_of_the_table(dtype, lowering, make_mesh, place):
    mesh = make_mesh({"x": 4})
    table, ids = np.arange(600, dtype=np.float32).reshape(300, 2), np.array([[0, 127, -56, 44]]).astype(dtype)
    read = ids.astype(int) >= 0
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        y, transpose = jax.vjp(lambda t: embed(ids, t, "BL, V_xE -> BLE"), place(mesh, table, "V_xE"))
        (gradient,) = transpose(jnp.ones_like(y))
    np.testing.assert_array_equal(y, np.where(read[..., None], table[ids], 0))
    np.testing.assert_array_equal(np.flatnonzero(gradient[:, 0]), np.sort(ids[read]))


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_mesh_axes_of_size_1_place_nothing(make_mesh, lowering):
    """Ids that nobody placed are placed on one device, whatever axes the spec names: other axes shard nothing there."""
    with jax.set_mesh(make_mesh({"x": 1, "y": 1}, "explicit")), gspmd.lowering(lowering):
        found = embed(jnp.array([[0, 2]]), jnp.arange(6.0).reshape(3, 2), "B_xL, V_yE -> B_xLE")
        assert str(jax.typeof(found)) == "float32[1@x,2,2]"
    np.testing.assert_array_equal(found, [[[0, 1], [4, 5]]])


def test_repeated_ids_add_up_in_float32(make_mesh):
    table, ids = jnp.zeros((2, 4), jnp.bfloat16), jnp.zeros((1, 1024), jnp.int32)
    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        slope = jax.jit(jax.grad(lambda t: embed(ids, t, "BL_x, VE -> BL_xE").astype(jnp.float32).sum()))
        np.testing.assert_array_equal(slope(table)[0], 1024.0)  # bfloat16 would stop at 256


@pytest.mark.parametrize(
    ("equation", "fact"),
    [
        ("BL -> LB", "a lookup has two operands, the ids and the table, and one result."),
        ("BL, VE -> BEL", "the result needs the dimensions of the ids, and then the second dimension of the table."),
    ],
)
def test_refuses_what_is_no_lookup(make_mesh, equation, fact):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(gspmd.SpecError) as error:
        embed(jnp.asarray(IDS), jnp.asarray(TABLE), equation)
    assert fact in str(error.value)
    assert str(error.value).startswith(f"cannot look up '{equation}'")


@pytest.mark.parametrize(("mesh", "equation"), [CASES[3], CASES[4], CASES[6]])
@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_rows_of_an_int8_table_are_scaled_where_they_are_found(make_mesh, place, check_form, mesh, equation, lowering):
    specs, rows = _specs(equation)
    scales = np.linspace(0.5, 2.0, 24, dtype=np.float32)
    vocabulary = str(gspmd.Spec.parse(specs[1]).without("E"))
    check_form(
        lambda ids, table, scales: embed(ids, table, equation, scales=scales, dtype=jnp.float32),
        lambda ids, table, scales: table[ids] * scales[ids][..., None],
        (IDS, (40 * TABLE).astype(np.int8), scales), [*specs, vocabulary], rows, mesh=mesh, lowering=lowering, wrt=(),
        axis_type="explicit",
    )  # fmt: skip


@pytest.mark.parametrize("ids", [np.int32(5), np.array([[23]], np.int32), np.array([-1], np.int32)], ids=str)
def test_one_row_of_an_int8_table_is_found_with_a_second_on_a_tpu(make_mesh, monkeypatch, ids):
    """For which the compiler does not copy the table, and which is dropped again."""
    monkeypatch.setattr("gspmd.lowerings.in_force.is_tpu", lambda: True)
    table, scales = (40 * TABLE).astype(np.int8), np.linspace(0.5, 2.0, 24, dtype=np.float32)
    equation = ["", "L", "BL"][ids.ndim] + ", V_xE -> " + ["E", "LE", "BLE"][ids.ndim]
    with jax.set_mesh(make_mesh({"x": 2})):
        given = ids, gspmd.annotate(table, "V_xE"), gspmd.annotate(scales, "V_x")
        look = lambda ids, table, scales: embed(ids, table, equation, scales=scales, dtype=jnp.float32)  # noqa: E731
        program, found = str(jax.make_jaxpr(look)(*given)), look(*given)
    np.testing.assert_array_equal(found, np.where(ids[..., None] < 0, 0, (table * scales[:, None])[ids]))
    assert "i8[2," in program


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("shape", [(12,), (48,), (24, 1)])
def test_scales_are_one_a_row(make_mesh, lowering, shape):
    """A lookup among fewer would take the last one for every row that lacks one."""
    table = jnp.ones((24, 16), jnp.int8)
    with jax.set_mesh(make_mesh({"x": 2}, "auto")), gspmd.lowering(lowering):
        with pytest.raises(gspmd.SpecError, match=r"scales must have shape .*, one number per row"):
            embed(jnp.asarray(IDS), table, "BL, V_xE -> BLE", scales=jnp.ones(shape), dtype=jnp.float32)
        halves = jnp.full(24, 0.5, jnp.bfloat16)  # float32 crosses the wire, as planned
        found = jax.jit(partial(embed, equation="BL, V_xE -> BLE", dtype=jnp.float32))(IDS, table, scales=halves)
        np.testing.assert_array_equal(found, np.full((4, 6, 16), 0.5))


def test_scales_come_with_the_dtype_of_what_is_scaled(make_mesh):
    mesh, table = make_mesh({"x": 1}), jnp.ones((24, 16), jnp.int8)
    with jax.set_mesh(mesh):
        with pytest.raises(TypeError, match="scales and dtype belong together"):
            embed(jnp.asarray(IDS), table, "BL, VE -> BLE", scales=jnp.ones(24))
        look = lambda scales: embed(jnp.asarray(IDS), table, "BL, VE -> BLE", scales=scales, dtype=jnp.float32)  # noqa: E731
        with pytest.raises(gspmd.PlanError, match="rows of an int8 table have no gradient"):
            jax.grad(lambda scales: look(scales).sum())(jnp.ones(24))


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_lookups_of_stages_are_planned_under_xla_too(kind):
    """Run in a process of its own, because XLA aborts on this gather: docs/compiler.md."""
    assert faults([("random_operations:check_lookup_in_stages", [kind])]) == []
