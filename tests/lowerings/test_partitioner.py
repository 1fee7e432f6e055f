"""Nothing of ours ends the process, on no mesh; what might is done in another way, or refused. In own processes."""

import subprocess
import sys

import jax
import numpy as np
import pytest

import gspmd
from gspmd import jax_internals, ops
from gspmd.lowerings.partitioner import splits_badly
from tests.references import own_process
from tests.references.own_process import faults
from tests.references.random_operations import planned_steps
from tests.references.volume import scaled

ODD = {"x": 3, "y": 2}
# Each has ended the process under jax 0.12: as a move, in a product, in a gradient.
ABORTING = (
    ("FB_x -> F_xyB", {"F": 6, "B": 6}),
    ("EF, B_xE_y -> F_xyB", {"E": 6, "F": 6, "B": 6}),
    ("EF_yx, BE -> FB_y", {"E": 6, "F": 6, "B": 6}),
)


@pytest.mark.parametrize(
    ("sizes", "badly"),
    [
        ((), False),
        ((1, 1), False),
        ((6,), False),
        ((1, 6), False),
        ((3, 2), True),
        ((2, 1, 3), True),
        ((4, 2), False),
        ((3, 9), False),
        ((2, 2, 2), False),
        ((2, 4, 3), True),
        ((6, 2), True),
    ],
)
def test_sizes_that_are_no_powers_of_one_prime_split_badly(sizes, badly):
    assert splits_badly(dict(zip("xyz", sizes))) is badly


@pytest.mark.turns(1)
@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
def test_what_has_ended_the_process_gives_the_right_values(axis_type):
    checks = [
        ("random_operations:check_equation", [equation, sizes, mesh, axis_type, lowering])
        for equation, sizes in ABORTING
        for mesh in (ODD, {"x": 2, "y": 3})
        for lowering in ("xla", "blocking")
    ]
    assert faults(checks) == []


def test_the_partitioner_knows_every_planned_step():
    """Forwards and backwards: what lowering `xla` asks of it where it cannot be left to find a way."""
    steps = sorted(planned_steps(ODD, "BE"))
    assert len(steps) == 52
    assert faults([("random_operations:check_constraint", [ODD, *step]) for step in steps]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "dims"), [((2, 3), "BE"), ((3, 2), "BEF"), ((2, 3), "BEF"), ((3, 1, 2), "BE")])
def test_the_partitioner_knows_every_planned_step_of_larger_arrays(sizes, dims):
    mesh = dict(zip("xyz", sizes))
    assert faults([("random_operations:check_constraint", [mesh, *step]) for step in planned_steps(mesh, dims)]) == []


def test_random_products_and_moves_end_no_process():
    """Four of which have ended it under jax 0.12, and eight that come first."""
    assert faults([("random_operations:check_seed", [seed]) for seed in (19, 39, 58, 92, *range(8))]) == []


def test_random_operations_end_no_process():
    """Three of which have ended it under jax 0.12, and three that come first."""
    assert faults([("random_operations:check_operation", [seed]) for seed in (20, 40, 46, *range(3))]) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_random_products_and_moves_at_length_end_no_process(part):
    """Ten parts of 20; of 200, 2,000 in all, with DRAWS=10. Left to XLA one in 43 ended the process under jax 0.12."""
    seeds = range(1000 * part, 1000 * part + scaled(20))
    assert faults([("random_operations:check_seed", [seed]) for seed in seeds]) == []


def test_random_operations_of_every_kind_and_lowering_are_those_of_one_device():
    assert faults([("random_operations:check_every_operation", [seed]) for seed in range(6)]) == []


@pytest.mark.slow
def test_random_operations_of_every_kind_and_lowering_at_length_are_those_of_one_device():
    """Sixty, and 30 caches on meshes such as 3 × 2; ten times as many with DRAWS=10."""
    checks = [("random_operations:check_every_operation", [seed]) for seed in range(scaled(60))]
    checks += [("random_operations:check_cache", [seed]) for seed in range(scaled(30))]
    assert faults(checks) == []


@pytest.mark.slow
def test_random_operations_at_length_end_no_process():
    """Sixty; 600 with DRAWS=10. As plain code one in 15 ended the process under jax 0.12."""
    assert faults([("random_operations:check_operation", [seed]) for seed in range(scaled(60))]) == []


def test_the_plan_is_what_is_compiled_where_every_step_is_constrained(make_mesh):
    """Left alone XLA sends 864 bytes for the first, by a permute, and 1440 for the second; planned are 3456, 1152."""
    mesh = make_mesh(ODD, "auto")
    with jax.set_mesh(mesh):
        for move in ("BE_x -> BE_yx", "BE_x -> B_xyE"):
            source = move.partition(" ")[0]
            x = gspmd.annotate(np.ones((36, 36), np.float32), source)
            compiled = jax.jit(lambda x, move=move: gspmd.reshard(x, move, lowering="xla")).lower(x).compile()
            plan = gspmd.plan(move, sizes={"B": 36, "E": 36}, mesh=ODD, dtype="float32")
            assert gspmd.ledger(compiled, mesh=mesh).wire_bytes == plan.wire_bytes


def test_a_dimension_is_not_left_to_the_compiler_where_that_may_end_the_process(make_mesh, monkeypatch):
    monkeypatch.setattr(jax_internals, "PARTITIONER_KEEPS_AXIS_NAMES", True)
    x = np.ones((6, 6), np.float32)
    with jax.set_mesh(make_mesh(ODD, "auto")):
        for call in (
            lambda: gspmd.einsum("BE_x, E_?F -> BF_y", x, x, lowering="xla"),
            lambda: ops.softmax(x, "B_?E", "E"),
        ):
            with gspmd.lowering("xla"), pytest.raises(gspmd.PlanError) as raised:
                call()
            assert "to the compiler, which may end the process on a mesh of x=3, y=2" in str(raised.value)
    with jax.set_mesh(make_mesh({"x": 4, "y": 2}, "auto")):
        gspmd.einsum("BE, E_?F -> BF", x, x, lowering="xla")


def test_a_process_that_dies_is_the_fault_of_one_check_and_the_others_go_on(monkeypatch):
    ending = "import sys; print('\"\"', flush=True); sys.exit(7)"
    real, runs = subprocess.run, []

    def run(command, **options):
        runs.append(command)
        return real([sys.executable, "-c", ending] if len(runs) == 1 else command, **options)

    monkeypatch.setattr(own_process.subprocess, "run", run)
    (fault,) = faults([("random_operations:check_constraint", [{"x": 2}, "B_x", "B"])] * 3)
    assert len(runs) == 2
    assert "the process ended with 7" in fault
