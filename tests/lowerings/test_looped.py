"""The looped collective einsum: the numbers of blocking, nothing gathered whole, and the bytes of the gather."""

import re
from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.annotate import parse_equation
from gspmd.audit import hlo
from gspmd.audit.hlo.loops import trips
from gspmd.audit.hlo.replica_groups import pairs
from gspmd.lowerings.looped.rings import shard_parts, walk
from gspmd.planner.overlap import SCHEDULES
from tests.references.random_equations import Case, check

pytestmark = pytest.mark.usefixtures("every_schedule")

LOOPED = [f"looped:{schedule}" for schedule in SCHEDULES]
GATHERS = {  # by what the gathered dimension is to the product
    "free": ("B_xE, EF_x -> BF_x", "BE, EF_x"),
    "contracted": ("BE_x, EF_x -> BF_x", "BE, EF_x"),
    "shared": ("F_xB, F_xEB -> FE_xB", "FB, FE_xB"),
    "weights": ("B_xE, E_xF -> B_xF", "B_xE, EF"),
}
SCATTERS = {"free": ("BF_x, F_xE -> B_xE", None), "last": ("BF_x, F_xE -> BE_x", None)}
SIZES = [2, 3, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 6, 7, 8))]
BOTH = "BLE_xy, E_xF_y -> BLF_yx"


def case(equation, size, lowering, via=None, mesh=None):
    mesh = mesh or {"x": size}
    dims = dict.fromkeys(c for c in equation if c.isupper())
    sizes = tuple((dim, 2 * prod(mesh.values())) for dim in dims)
    return Case(equation, sizes, tuple(mesh.items()), "explicit", lowering, via)


# A ring walk whose chunk index is right for an axis of 2 only; a reduce-scatter that always takes chunk 0; code for
# both ways that takes an even axis for granted; an index past the end that clamping hides: published mistakes, all of
# which integers on axes of every size, 3, 5 and 7 among them, show.
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lowering", LOOPED)
@pytest.mark.parametrize("form", ["free", "contracted"])
def test_a_gathered_operand(form, lowering, size):
    equation, via = GATHERS[form]
    check(case(equation, size, lowering, via))


@pytest.mark.turns(4)
@pytest.mark.parametrize("size", [3, 6])
@pytest.mark.parametrize("lowering", LOOPED)
@pytest.mark.parametrize("form", ["shared", "weights"])
def test_other_gathered_operands(form, lowering, size):
    equation, via = GATHERS[form]
    check(case(equation, size, lowering, via))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lowering", LOOPED)
def test_a_scattered_result(lowering, size):
    check(case(SCATTERS["free"][0], size, lowering))


@pytest.mark.turns(6)
@pytest.mark.parametrize("lowering", LOOPED)
@pytest.mark.parametrize(
    ("equation", "via", "mesh"),
    [
        (BOTH, None, {"x": 4, "y": 2}),
        (BOTH, None, {"x": 2, "y": 3}),
        ("BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)", None, {"x": 2, "y": 2, "z": 2}),
        ("BF_y, F_yE_x + BH_y, H_yE_x -> BE_xy", None, {"x": 2, "y": 3}),
        ("B_xyzE, E_xF_yz -> B_xyzF", "B_xyzE, EF", {"x": 4, "y": 2, "z": 1}),
        ("B_xyzE, E_xF_yz -> B_xyzF", "B_xyzE, EF", {"x": 2, "y": 2, "z": 2}),
    ],
)
def test_several_axes_groups_and_sums(equation, via, mesh, lowering):
    check(case(equation, 0, lowering, via, mesh))


def test_shards_of_one_element_cannot_be_halved():
    check(Case("B_xE, EF -> BF", (("B", 5), ("E", 1), ("F", 1)), (("x", 5),), "explicit", "looped:halves", "BE, EF"))


# -- what the compiled program holds and sends ------------------------------------------------------------------------


def compiled(make_mesh, mesh, equation, sizes, lowering, via=None, gradient=False):
    """The program of an equation, or of its gradients; and the shapes of its operands' whole pieces."""
    equation, mesh = parse_equation(equation), make_mesh(mesh)
    specs = [spec for operand in equation.operands for spec in operand.specs]
    grouped = [len(operand.specs) if operand.group else 0 for operand in equation.operands]

    def arrays(some):
        return [
            jax.ShapeDtypeStruct(
                [sizes[dim] for dim in spec.dims], jnp.float32, sharding=jax.NamedSharding(mesh, spec.partition_spec())
            )
            for spec in some
        ]

    def value(*flat):
        held = iter(flat)
        nested = [tuple(next(held) for _ in range(count)) if count else next(held) for count in grouped]
        return gspmd.einsum(equation, *nested, lowering=lowering, via=via)

    def gradients(cotangent, *flat):
        return jax.vjp(value, *flat)[1](cotangent)

    with jax.set_mesh(mesh):
        if not gradient:
            return jax.jit(value).lower(*arrays(specs)).compile()
        return jax.jit(gradients).lower(*arrays(equation.outputs), *arrays(specs)).compile()


def permuted(program, mesh):
    """Bytes that one device sends by permutes along x: ahead, and back."""
    module, sent = hlo.parse(program.as_text()), Counter()

    def walk(computation, times):
        for instruction in computation.instructions:
            if instruction.opcode == "collective-permute":
                source, target = pairs(instruction)[0]
                sent[1 if (target - source) % mesh["x"] == 1 else -1] += times * instruction.bytes
            elif instruction.opcode == "while":
                body = module.computations[instruction.attribute("body").lstrip("%")]
                walk(body, times * trips(module, computation, instruction))
            elif instruction.opcode == "call":
                walk(module.computations[instruction.attribute("to_apply").lstrip("%")], times)

    walk(module.entry, 1)
    assert sum(sent.values()) == gspmd.ledger(program).wire_bytes
    return sent


@pytest.mark.parametrize("size", [4, 5, 8])
@pytest.mark.parametrize("lowering", LOOPED)
def test_a_ring_sends_what_the_gather_would(make_mesh, lowering, size):
    sizes = {"B": 10 * size, "E": 12, "F": 3 * size}
    mesh, (equation, via) = {"x": size}, GATHERS["free"]
    sent = permuted(compiled(make_mesh, mesh, equation, sizes, lowering, via), mesh)
    shard = 10 * 12 * 4
    parts = shard_parts("x", lowering.partition(":")[2])
    hops = [hop.by for part in parts for hop in walk("x", mesh, part.schedule, part.sign)]
    assert (sent[1], sent[-1]) == tuple(hops.count(sign) * shard / len(parts) for sign in (1, -1))
    assert sum(sent.values()) == sizes["B"] * sizes["E"] * 4 * (size - 1) // size


def test_a_group_shares_one_ring(make_mesh):
    mesh, sizes = {"x": 4}, {"B": 16, "E": 12, "F": 8}
    group = "B_xE, (EF_x, EF_x) -> (BF_x, BF_x)"
    via = "BE, (EF_x, EF_x)"
    sent = permuted(compiled(make_mesh, mesh, group, sizes, "looped:one-way", via), mesh)
    assert sent[1] == 3 * 4 * 12 * 4


def test_a_sum_shares_one_travelling_sum(make_mesh):
    mesh, sizes = {"x": 4}, {"B": 16, "E": 12, "F": 8, "H": 8}
    program = compiled(
        make_mesh, mesh, "BF_x, F_xE + BH_x, H_xE -> B_xE", sizes, "looped:one-way", "BF_x, F_xE + BH_x, H_xE"
    )
    assert sum(permuted(program, mesh).values()) == 3 * 4 * 12 * 4


def biggest(program) -> set[tuple[int, ...]]:
    """The shapes of everything that the program makes."""
    return {tuple(map(int, shape.split(","))) for shape in re.findall(r"= f32\[([\d,]+)\]", program.as_text())}


WIDE = {"B": 640, "E": 960, "F": 1280}


@pytest.mark.parametrize("lowering", LOOPED)
@pytest.mark.parametrize("form", ["free", "contracted", "weights"])
def test_nothing_is_gathered_whole(make_mesh, form, lowering):
    """Temporaries: blocking's, less the gathered operand, and two chunks for each direction.

    And the product of a chunk, since XLA:CPU cannot multiply into a part of the result.
    """
    mesh, (equation, via) = {"x": 8}, GATHERS[form]
    looped, blocking = (compiled(make_mesh, mesh, equation, WIDE, name, via) for name in (lowering, "blocking"))
    operand = {"free": (640, 960), "contracted": (640, 960), "weights": (960, 1280)}[form]
    assert operand in biggest(blocking)
    assert operand not in biggest(looped)
    whole, chunk = prod(operand) * 4, prod(operand) * 4 // 8
    directions = 1 if lowering == "looped:one-way" else 2
    result = WIDE["B"] * WIDE["F"] * 4 // 8
    allowed = 2 * chunk * directions + (result // 8 if form == "free" else 2 * result) + 1024  # and its counters
    temporary = [program.memory_analysis().temp_size_in_bytes for program in (looped, blocking)]
    assert temporary[0] <= temporary[1] - whole + allowed


@pytest.mark.parametrize("lowering", LOOPED)
@pytest.mark.parametrize("form", ["free", "weights"])
def test_neither_pass_gathers_anything_whole(make_mesh, form, lowering):
    equation, via = GATHERS[form]
    program = compiled(make_mesh, {"x": 8}, equation, WIDE, lowering, via, gradient=True)
    text = program.as_text()
    assert not re.search(r"all-gather\(|reduce-scatter\(", text)
    assert {"free": (640, 960), "weights": (960, 1280)}[form] not in biggest(program)


def test_two_operands_that_travel_are_cut_into_stripes(make_mesh):
    """The gradient of two-dimensional weights: x is gathered along y, its cotangent along x, before they meet."""
    sizes = {"B": 64, "L": 1, "E": 96, "F": 64}
    program = compiled(make_mesh, {"x": 4, "y": 2}, BOTH, sizes, "looped", gradient=True)
    assert not re.search(r"all-gather\(", program.as_text())
    assert not {(64, 1, 24), (64, 1, 32)} & biggest(program)


def test_under_remat_and_scan(make_mesh, place):
    """Stacked weights, recomputed layer by layer: blocking's numbers."""
    mesh = make_mesh({"x": 4})
    rng = np.random.default_rng(0)
    x = place(mesh, rng.integers(-2, 3, (8, 12)).astype("float32"), "B_xE")
    w_in, w_out = (
        jax.device_put(rng.integers(-1, 2, shape).astype("float32"), jax.NamedSharding(mesh, jax.P(None, *partitions)))
        for shape, partitions in (((3, 12, 8), (None, "x")), ((3, 8, 12), ("x", None)))
    )

    def loss(lowering, x, w_in, w_out):
        @jax.checkpoint
        def layer(x, weights):
            hidden = gspmd.einsum("B_xE, EF_x -> BF_x", x, weights[0], lowering=lowering, via="BE, EF_x")
            return gspmd.einsum("BF_x, F_xE -> B_xE", hidden, weights[1], lowering=lowering), None

        return jnp.sum(jax.lax.scan(layer, x, (w_in, w_out))[0] % 7)

    with jax.set_mesh(mesh):
        each = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)), static_argnums=0)
        got, want = (jax.tree.leaves(each(name, x, w_in, w_out)) for name in ("looped", "blocking"))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_terms_that_shard_a_summed_dimension_differently_are_not_cut_along_it():
    equation = "B_xF_yH, F_yHE_x + B_xFH_y, FH_yE_x -> BE"
    sizes = (("B", 4), ("F", 8), ("H", 4), ("E", 4))
    via = "BF_yH, F_yHE + BFH_y, FH_yE"
    check(Case(equation, sizes, (("x", 2), ("y", 2)), "explicit", "looped", via))


def test_gradients_of_a_looped_plan_have_plans_of_their_own():
    sizes = {"B": 4096, "E": 4096, "F": 16384}
    via = "BE, (EF_x, EF_x)"
    plan = gspmd.plan("B_xE, (EF_x, EF_x) -> (BF_x, BF_x)", sizes, {"x": 8}, lowering="looped", via=via)
    assert [len(gradient.kept) for gradient in plan.gradients] == [4, 2, 2]
