"""Planned gradients send no more than the best that plain transposition makes of the same forward pass."""

import jax
import jax.numpy as jnp
import pytest

import gspmd
from gspmd.annotate import parse_equation
from tests.references import compiled
from tests.references.transposition import VARIANTS, program

EIGHT, CUBE, FLAT = {"x": 8}, {"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2}
SIZES = {"B": 64, "L": 128, "E": 1024, "F": 4096, "H": 16, "D": 64, "G": 64, "X": 16, "C": 32}
EQUATIONS = [
    pytest.param("BLE_xyz, E_xF_yz -> BLF_yzx", CUBE, id="weight-stationary 2D, in"),
    pytest.param("BLF_yzx, F_yzE_x -> BLE_xyz", CUBE, id="weight-stationary 2D, out"),
    pytest.param("BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)", CUBE, id="weight-stationary 2D, gated"),
    pytest.param("BLF_yz, F_yzE_x + BLH_yzD, H_yzDE_x -> BLE_xyz", CUBE, id="parallel block"),
    pytest.param("BLE, EF_x -> BLF_x", EIGHT, id="megatron, in"),
    pytest.param("BLF_x, F_xE -> BLE", EIGHT, id="megatron, out"),
    pytest.param("BL_xE, EF_x -> BLF_x", EIGHT, id="sequence parallel, in"),
    pytest.param("BLF_x, F_xE -> BL_xE", EIGHT, id="sequence parallel, out"),
    pytest.param("B_xLE, EF -> B_xLF", EIGHT, id="data parallel"),
    pytest.param("B_xLE, E_xF -> B_xLF", EIGHT, id="zero-3"),
    pytest.param("B_xLE_yz, E_xF_yz -> B_xLF_yz", CUBE, id="weight-gathered X"),
    pytest.param("B_xyzLE, E_xF_yz -> B_xyzLF", CUBE, id="weight-gathered XYZ"),
    pytest.param("B_xE_y, E_yF -> B_xF_y", FLAT, id="few tokens"),
    pytest.param("G_xXCE -> GX_xCE", EIGHT, id="to the experts"),
]


@pytest.mark.turns(5)
@pytest.mark.parametrize(("equation", "mesh"), EQUATIONS)
def test_no_more_bytes_than_plain_transposition(equation, mesh, make_mesh):
    plan = _plan(equation, mesh, SIZES)
    planned = sum(gradient.wire_bytes for gradient in plan.gradients)
    with jax.set_mesh(make_mesh(mesh)):
        assert compiled.bytes_sent(_compiled(_planned(equation), plan)) == plan.wire_bytes + planned
        plain = _transposed(plan)
    assert planned <= min(plain.values()) - plan.wire_bytes, plain


def test_fewer_bytes_than_any_transposition(make_mesh):
    """Transposition sums a whole weight gradient, or what the cotangent does not need yet."""
    plan = _plan("BE_xy, EF_z -> BF_z", CUBE, {"B": 4, "E": 32, "F": 64})
    with jax.set_mesh(make_mesh(CUBE)):
        planned = compiled.bytes_sent(_compiled(_planned("BE_xy, EF_z -> BF_z"), plan))
        plain = _transposed(plan)
    assert planned == 512 == plan.wire_bytes + sum(gradient.wire_bytes for gradient in plan.gradients)
    assert plain == {"check_vma=False": 7040, "all_gather(to='invarying')": 896}


def test_contributions_to_one_gradient_settle_once():
    twice = _plan("BLE_x, (E_yF_x, E_yF_x) -> (BLF_x, BLF_x)", FLAT, SIZES).gradients[0]
    assert [step.kind for step in twice.steps].count("einsum") == 2
    assert [(step.kind, step.axes) for step in twice.steps].count(("reduce-scatter", ("x",))) == 1
    assert twice.wire_bytes == _plan("BLE_x, E_yF_x -> BLF_x", FLAT, SIZES).gradients[0].wire_bytes


def test_a_step_that_several_gradients_need_stands_in_the_first():
    """The figure of weight-stationary 2D, backward: the cotangent is gathered once."""
    first, second = _plan("BLE_xyz, E_xF_yz -> BLF_yzx", CUBE, SIZES, via="BLE_x, E_xF_yz").gradients
    steps = [[(step.kind, "".join(step.axes)) for step in gradient.steps] for gradient in (first, second)]
    assert steps == [[("all-gather", "x"), ("einsum", ""), ("reduce-scatter", "yz")], [("einsum", "")]]


def _plan(equation: str, mesh, sizes, via=None) -> gspmd.Plan:
    letters = {c for c in equation if c.isupper()}
    sizes = {d: n for d, n in sizes.items() if d in letters}
    return gspmd.plan(equation, sizes, mesh, dtype="float32", via=via, lowering="blocking")


def _planned(equation: str):
    parsed = parse_equation(equation)

    def both(operands, cotangents):
        def compute(*flat):
            held = iter(flat)
            nested = [tuple(next(held) for _ in o.specs) if o.group else next(held) for o in parsed.operands]
            results = gspmd.einsum(parsed, *nested)
            return results if parsed.group else (results,)

        results, transpose = jax.vjp(compute, *operands)
        return results, transpose(cotangents)

    return both


def _transposed(plan: gspmd.Plan) -> dict[str, int]:
    """Bytes of value and gradients together, for every variant that JAX accepts."""
    sent = {}
    for variant in VARIANTS:
        try:
            sent[variant] = compiled.bytes_sent(_compiled(program(plan, variant), plan))
        except ValueError:  # its types forbid a result that is alike on all devices without saying so
            continue
    return sent


def _compiled(both, plan: gspmd.Plan) -> str:
    specs = [spec for operand in plan.equation.operands for spec in operand.specs]
    operands, cotangents = (tuple(_abstract(s, plan) for s in some) for some in (specs, plan.equation.outputs))
    return jax.jit(both).lower(operands, cotangents).compile().as_text()


def _abstract(spec: gspmd.Spec, plan: gspmd.Plan) -> jax.ShapeDtypeStruct:
    sharding = jax.NamedSharding(jax.sharding.get_mesh(), spec.partition_spec())
    return jax.ShapeDtypeStruct([plan.sizes[d] for d in spec.dims], jnp.float32, sharding=sharding)
