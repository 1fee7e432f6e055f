"""The moves of weights that a training step on GPUs hides beside its products, against the trace of each layout."""

import random
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import gspmd
from gspmd.hardware.chips import CHIPS
from gspmd.lowerings.in_force import lowering, planned_for
from gspmd.planner.unknown import UnknownProduct, UnknownReduction, dims_in
from gspmd.search.answers import Candidate
from gspmd.search.answers.presets import picks_of
from gspmd.search.finding import HIDES, laid
from gspmd.search.program import on_mesh
from gspmd_models.search.phases import problem_of
from gspmd_models.search.pipeline import StageProblem
from gspmd_models.search.workload import Workload
from tests.references.models import TINY
from tests.search.layouts import drawn

H100, MESH, LAYERS, LENGTH = CHIPS["h100"], {"x": 2, "y": 4}, 3, 64
ROWS = 2**24  # their products take longer than all moves of weights
CONFIG = replace(TINY, heads=8, kv_heads=4, feed_forward=256, layers=LAYERS, tied=False, remat="full")
WEIGHTS = [*map(set, ("EHD", "EKD", "HDE", "EF", "FE"))]


def training(batch, chip=H100, **of):
    return problem_of(Workload(replace(CONFIG, **of), chip, batch, LENGTH), MESH)


def hidden(phase, picks):
    """The seconds that the search subtracts for a layout."""
    question = phase.question
    at = [picks[option.name] for option in question.prices.choices]
    return -sum(float(table[tuple(at[number] for number in of)]) for of, table in question.hidden)


def moved(phase, picks):
    """The seconds of the moves of blocks' weights and of their gradients, by the trace of the layout."""
    question = phase.question
    known = question.prices.known([picks[option.name] for option in question.prices.choices])
    layout = laid(question.lines.layout, question.lines.written(known), MESH)
    mesh = AbstractMesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Explicit,) * len(MESH))
    with on_mesh(mesh), lowering("blocking"), planned_for(phase.case.chip):
        function, *arguments = question.build(layout, mesh)
        entries = gspmd.trace(function, *arguments).entries
    of_weights = [entry for entry in entries if entry.trips >= LAYERS and {*entry.step.before.dims} in WEIGHTS]
    return sum(entry.trips * entry.step.seconds for entry in of_weights if entry.step.kind != "einsum")


def products(batch):
    """The seconds of all products but attention's, spread over all devices, at the peak.

    Under full remat there are four passes over a block, and three over the output. The product with w_out ends a block,
    and the backward pass does not compute it again.
    """
    c = CONFIG
    of_block = c.embed * c.head_size * 2 * (c.heads + c.kv_heads) + 3 * c.embed * c.feed_forward
    multiplied = LAYERS * (4 * of_block - c.embed * c.feed_forward) + 3 * c.embed * c.vocabulary
    return 2 * batch * LENGTH * multiplied / prod(MESH.values()) / H100.bf16_flops


def test_half_of_what_weights_move_is_hidden_where_products_take_longer():
    phase, rng, found = training(ROWS), random.Random(1), set()
    for _ in range(3):
        picks = drawn(phase.problem(), rng)
        seconds = moved(phase, picks)
        assert seconds < 0.05 * products(ROWS)
        assert hidden(phase, picks) == pytest.approx(HIDES * seconds, rel=1e-6, abs=1e-12)
        found.add(seconds)
    assert len(found - {0.0}) == 3  # the layouts differ, and move weights


def test_no_more_is_hidden_than_half_of_the_products():
    """In ZeRO-3 every weight and every gradient is moved; each move takes longer than the products of eight rows."""
    phase, rng = training(8), random.Random(2)
    most = HIDES * products(8)
    assert all(0 <= hidden(phase, drawn(phase.problem(), rng)) <= most * (1 + 1e-9) for _ in range(20))
    candidate = Candidate(phase, H100.hbm_bytes)
    layout = gspmd.Layout.load("zero-3").resolved(candidate.sizes, MESH)
    answer = picks_of(candidate, candidate.unlimited_search, layout)
    assert hidden(phase, answer.picks) == pytest.approx(most, rel=1e-9)


def test_a_cost_is_that_of_steps_and_passes_less_what_is_hidden():
    phase, rng = training(64), random.Random(3)
    question, problem = phase.question, phase.problem()
    for _ in range(4):
        picks = drawn(problem, rng)
        at = [picks[option.name] for option in question.prices.choices]
        tables = [*question.planned, *question.beside]
        taken = sum(float(table[tuple(at[number] for number in of)]) for of, table in tables)
        norm = sum(seconds for name, seconds in problem.seconds_of(picks).items() if name.startswith("norm"))
        assert problem.cost(picks) == pytest.approx(taken + norm - hidden(phase, picks), rel=1e-9)
        assert np.isfinite(taken)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_in_microbatches_no_more_is_hidden_than_half_of_what_is_moved(microbatches, tied):
    """Of a gradient that the compiler reduces behind the loop over microbatches, only that reduction is moved."""
    workload = Workload(replace(CONFIG, tied=tied), H100, ROWS, LENGTH, microbatches=microbatches)
    phase, rng = problem_of(workload, MESH), random.Random(4)
    question = phase.question
    uses = [use for use in question.uses if dims_in(use.what) in (*WEIGHTS, {*"VE"})]
    behind = {use.what.chain for use in uses if isinstance(use.what, UnknownReduction)}
    removed = [use for use in uses if use.what in behind]
    assert question.hidden_of(removed) == []
    found = 0.0
    for _ in range(8):
        picks = drawn(phase.problem(), rng)
        at = [picks[option.name] for option in question.prices.choices]
        net, most = (
            sum(float(table[tuple(at[number] for number in of)]) for of, table in question.tables(some))
            for some in (uses, removed)
        )
        assert 0 <= hidden(phase, picks) <= HIDES * net * (1 + 1e-9)
        found += most
    assert tied or found > 0  # some of these layouts have such reductions


def test_the_products_of_a_stage_run_on_its_own_devices():
    """All products of a pipeline are inside of its slots: each stage has the devices of the mesh, not half of them."""
    workload = Workload(replace(CONFIG, layers=4), H100, 2**10, LENGTH, microbatches=4)
    question = StageProblem(workload, 2, MESH).question
    uses = [(use, use.what) for use in question.program.uses]
    flops = sum(use.times * what.flops for use, what in uses if isinstance(what, UnknownProduct))
    moved = [(use, what) for use, what in uses if question.is_hidden(use)]
    total = sum(use.times * prod(what.shape) * what.itemsize for use, what in moved)
    assert question._seconds_beside * total == pytest.approx(flops / prod(MESH.values()) / H100.bf16_flops)


def test_nothing_is_hidden_on_a_tpu():
    assert training(64, chip=CHIPS["tpu-v4"]).question.hidden == []
