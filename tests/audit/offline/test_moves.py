"""Moves between shardings, compiled for TPUs that are not there: they send and take what was planned."""

from importlib import util
from math import prod
from statistics import median

import jax
import pytest

import gspmd
from gspmd.audit import compile_offline, topology

pytestmark = [
    pytest.mark.usefixtures("benchmarks"),
    pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"),
]

PLAIN = ("tpu-v4:4x4x4", "tpu-v4:2x2x4", "tpu-v5p:4x4x4", "tpu-v5p:4x4x8", "tpu-v5e:4x4", "tpu-v5e:8x8", "tpu-v6e:4x4")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_moves_wait_as_long_as_planned(seed):
    # 8 of benchmarks/moves.py at a time: the timeline's rings against the plan's
    from moves import moves

    found = list(moves(8, PLAIN, seed))
    assert [each for each in found if not 0.6 < each.ratio < 1.05] == []  # Few bytes have more hops on one ring.
    assert [each for each in found if 2 * prod(each.sizes) >= 2**28 and each.ratio < 0.95] == []
    assert median(abs(each.ratio - 1) for each in found) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_moves_on_chips_of_two_devices(seed):
    # Permutes that also change devices within a chip are planned up to twice too slow.
    from moves import moves

    found = list(moves(8, ("tpu7x:2x2x4", "tpu7x:2x4x4"), seed))
    assert [each for each in found if not 0.6 < each.ratio < (2.2 if "permute" in each.steps else 1.1)] == []


@pytest.mark.parametrize("equation", ["EF_xy -> EF", "E_yF_x -> E_yxF", "EF_x, F_xG -> EG"])
def test_what_a_tpu7x_sends_is_counted(equation):
    """Its collectives run on SparseCores, as asynchronous calls."""
    slices = topology("tpu7x:2x2x1")
    mesh = slices.mesh({"x": 2, "y": 2, "w": 2})
    specs = [gspmd.Spec.parse(operand) for operand in equation.split(" -> ")[0].split(", ")]
    given = [
        jax.ShapeDtypeStruct((1024, 1024), "bfloat16", sharding=jax.NamedSharding(mesh, spec.partition_spec()))
        for spec in specs
    ]
    with gspmd.lowering("blocking"):
        report = compile_offline(lambda *given: gspmd.einsum(equation, *given), *given, topology=slices)
    assert report.ledger.wire_bytes == report.plan.wire_bytes > 0
    assert report.timeline.exposed_seconds > 0
