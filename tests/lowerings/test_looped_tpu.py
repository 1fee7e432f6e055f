"""The looped lowering on TPUs: its numbers, and what the compiler makes of its permutes."""

from importlib import util

import jax
import jax.numpy as jnp
import pytest

import gspmd
from gspmd.annotate.equation import parse_equation
from gspmd.audit import hlo, topology
from gspmd.audit.hlo.flops import product_flops
from gspmd.lowerings import in_force
from gspmd.planner.overlap import SCHEDULES
from tests.references.random_equations import Case, check

pytestmark = pytest.mark.usefixtures("every_schedule")

GATHER = ("B_yzL_xE, EF_x -> B_yzLF_x", "B_yzLE, EF_x")
GATHER_LONG = "B_xE, EF_x -> BF_x"
SCATTER = ("B_yzLF_x, F_xE -> B_yzL_xE", None)
SIZES = {"B": 16, "L": 2048, "E": 2048, "F": 8192}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("equation", "via", "mesh"),
    [
        ("B_xE, EF_x -> BF_x", "BE, EF_x", {"x": 5}),  # a free dimension
        ("BE_x, EF_x -> BF_x", "BE, EF_x", {"x": 4}),  # a summed one
        ("BF_x, F_xE -> B_xE", None, {"x": 3}),
        ("B_xyE, E_xF_y -> B_xyF", "B_xyE, EF", {"x": 4, "y": 2}),
    ],
)
def test_wave_by_wave_it_gives_the_same_numbers(monkeypatch, equation, via, mesh, schedule):
    """On TPUs every wave is written out; here on host devices, with sizes that no other test has compiled."""
    monkeypatch.setattr(in_force, "device_kind", lambda: "TPU v4")
    dims = dict.fromkeys(c for c in equation if c.isupper())
    sizes = tuple((dim, 120 if "x" in mesh and mesh["x"] == 5 else 24 * mesh["x"]) for dim in dims)
    check(Case(equation, sizes, tuple(mesh.items()), "explicit", f"looped:{schedule}", via))


def scheduled(equation, via, schedule):
    """The compiled program of an equation for 64 chips."""
    mesh = topology("tpu-v4:4x4x4").mesh({"x": 4, "y": 4, "z": 4})
    specs = [spec for operand in parse_equation(equation).operands for spec in operand.specs]
    arrays = [
        jax.ShapeDtypeStruct(
            [SIZES[dim] for dim in spec.dims], jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec.partition_spec())
        )
        for spec in specs
    ]
    with jax.set_mesh(mesh):
        fn = jax.jit(lambda x, w: gspmd.einsum(equation, x, w, lowering=f"looped:{schedule}", via=via))
        return hlo.parse(fn.lower(*arrays).compile().as_text())


def multiplied_between(module):
    """For every permute, whether a product stands between its start and its done."""
    found = {}
    for computation in module.computations.values():
        started: dict[str, bool] = {}
        for instruction in computation.instructions:
            if instruction.opcode == "collective-permute-start":
                started[instruction.name] = False
            elif instruction.opcode == "collective-permute-done":
                found[instruction.name] = started.pop(instruction.operands[0])
            elif product_flops(module, computation, instruction):
                started = dict.fromkeys(started, True)
    return found


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize(
    ("form", "schedule"),
    [
        (GATHER, "halves"),
        (SCATTER, "one-way"),
        *(pytest.param(GATHER, schedule, marks=pytest.mark.slow) for schedule in ("one-way", "paired")),
        *(pytest.param(SCATTER, schedule, marks=pytest.mark.slow) for schedule in ("halves", "paired")),
    ],
    ids=str,
)
def test_every_permute_starts_before_a_product_and_is_done_after_it(form, schedule):
    found = multiplied_between(scheduled(*form, schedule))
    assert len(found) == {"one-way": 3, "halves": 6, "paired": 3}[schedule]
    assert all(found.values()), found


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
def test_a_ring_that_is_too_long_to_be_written_out_is_a_loop():
    mesh = topology("tpu-v5e:16x16").mesh({"x": 256})
    placed = {"x": ((4096, 8192), jax.P("x")), "w": ((8192, 32768), jax.P(None, "x"))}
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in placed.values()
    ]
    with jax.set_mesh(mesh):
        fn = jax.jit(lambda x, w: gspmd.einsum(GATHER_LONG, x, w, lowering="looped:paired", via="BE, EF_x"))
        module = hlo.parse(fn.lower(*arrays).compile().as_text())
    opcodes = [each.opcode for computation in module.computations.values() for each in computation.instructions]
    assert "while" in opcodes
    assert opcodes.count("collective-permute-start") < 10
