"""Passes over memory that no plan counts, against the stacks and sums of the program that JAX differentiates."""

import math
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh

import gspmd
from gspmd.audit import topology
from gspmd.training import OptimizerConfig
from gspmd_models import abstract_batch, abstract_key, step
from gspmd_models.config import REMATS
from gspmd_models.remat.prediction import predicted
from gspmd_models.search.relaxed import Relaxed
from gspmd_models.search.workload import Workload
from tests.references.models import WIDE
from tests.search.layouts import drawn, layout_of
from tests.search.test_microbatches import picked
from tests.search.test_training import BATCH, CHIP, GPT2, LENGTH, MESH, QWEN, ROUTED, ROWS, problem_of, state_of

PARALLEL = replace(WIDE, block="parallel")
EVERY = replace(ROWS, layers=2, moe=replace(ROWS.moe, every=1))
PRICED = {"none": (0.45, 1.05), "selective": (0.8, 1.2)}
"""The share that is priced of what blocks keep, as docs/search.md says: operands that were moved are kept besides."""


def bytes_passed(problem, picks, name: str) -> float:
    """Bytes that the terms of this name read and write."""
    seconds = problem.seconds_of(picks)
    return sum(s for term, s in seconds.items() if term.startswith(name)) * CHIP.hbm_bandwidth


@pytest.mark.parametrize(
    ("config", "microbatches"),
    [
        (WIDE, 4),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(PARALLEL, 1), (GPT2, 1), (QWEN, 2), (EVERY, 1)]),
    ],
)
def test_what_blocks_keep_is_written_and_read_once_each(config, microbatches, tmp_path):
    pytest.importorskip("libtpu")
    rng, rows = random.Random(f"{config.block} {microbatches}"), {}
    for remat in REMATS:
        of = replace(config, remat=remat)
        found = problem_of(of, microbatches)
        problem = found.problem()
        if not rows:
            picks = drawn(problem, rng)
            layout, mesh = layout_of(found.lines(picks), tmp_path), topology("tpu-v5p:2x2x2").mesh(MESH)
            part = BATCH // microbatches
            rows = {each.remat: each for each in predicted(of, layout, mesh, part, LENGTH, jnp.bfloat16)}
        least, most = PRICED.get(remat, (0.98, 1.0))  # statistics of norms are left out
        passed = bytes_passed(problem, picks, "kept: ") / (2 * microbatches * rows[remat].bytes)
        assert least <= passed <= most + 1e-9, remat


def test_of_one_repeat_of_blocks_nothing_is_stacked():
    for config in (replace(WIDE, layers=1), replace(ROUTED, layers=2), replace(ROWS, layers=2)):
        problem = problem_of(config).problem()
        assert bytes_passed(problem, drawn(problem, random.Random(0)), "kept: ") == 0


@pytest.mark.parametrize(
    "config",
    [WIDE, *(pytest.param(each, marks=pytest.mark.slow) for each in [PARALLEL, replace(ROUTED, tied=False), ROWS])],
)
def test_gradients_are_added_in_memory_as_large_as_the_loop_carries_them(config, tmp_path):
    pytest.importorskip("libtpu")
    devices = topology("tpu-v5p:2x2x2").mesh(MESH)
    mesh = Mesh(devices.devices, devices.axis_names, axis_types=(AxisType.Explicit,) * 3)
    found = problem_of(config, 4)
    problem = found.problem()
    picks = drawn(problem, random.Random(config.block))
    layout = layout_of(found.lines(picks), tmp_path)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        resolved, model, state = state_of(config, layout, mesh)
        update = step.training_step(model, OptimizerConfig(), 10, 4)
        batch = abstract_batch(resolved, mesh, BATCH, LENGTH)
        program = jax.make_jaxpr(update)(state, batch, abstract_key(mesh))
    loop = next(each for each in program.eqns if each.primitive.name == "scan" and each.params["length"] == 4)
    sums = [var.aval for var in loop.outvars[: loop.params["num_carry"]]]
    assert {aval.dtype.name for aval in sums} == {"float32"}
    carried = sum(math.prod(aval.sharding.shard_shape(aval.shape)) for aval in sums)
    # Each element is read and written in float32, and what is added to it is read in bfloat16.
    assert bytes_passed(problem, picks, "accumulated: ") == pytest.approx(4 * (2 * 4 + 2) * carried, rel=0.01)


def test_the_bound_of_several_microbatches_has_the_same_passes_as_each():
    """And the same moves of the table, of which the first steps are taken once: they do not depend on the batch."""
    mesh = {"x": 2, "y": 4}
    relaxed = Relaxed(Workload(WIDE, CHIP, BATCH, LENGTH), mesh)
    for count in (2, 8):
        found = problem_of(WIDE, count, mesh)
        problem, bound, widest = found.problem(), relaxed.between(count, count), relaxed.between(2, 16)
        draw = random.Random(count)
        picks = drawn(problem, draw)
        while not bytes_passed(problem, picks, "output.in_via: output.table"):
            picks = drawn(problem, draw)
        there = picked(found, relaxed, picks)
        for name in ("kept: ", "accumulated: ", "output.in_via: output.table"):
            passed = bytes_passed(problem, picks, name)
            assert bytes_passed(bound, there, name) == pytest.approx(passed, rel=1e-9)
            assert 0 < bytes_passed(widest, there, name) <= passed * (1 + 1e-9)


def test_one_microbatch_adds_nothing_in_memory():
    problem = problem_of(WIDE).problem()
    assert not [term.name for term in problem.terms if term.name.startswith("accumulated")]
