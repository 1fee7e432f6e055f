"""Training steps of dropless experts: the layouts that are found, their files, and what they train to."""

import itertools
import random
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from gspmd.annotate import Spec
from gspmd.annotate.equation import Via
from gspmd.layouts import Layout
from gspmd.lowerings.program import Context
from gspmd.moe import MoEConfig
from gspmd.moe.dropless.rows import most_rows
from gspmd.moe.experts.work import Buffers, ExpertWork, products
from gspmd.search import NothingFits, Search
from gspmd.search.answers.document import remarks
from gspmd.search.answers.presets import placed_presets
from gspmd_models.search.training import TrainingProblem
from gspmd_models.search.workload import Workload
from tests.references.models import WIDE
from tests.search.layouts import drawn
from tests.search.test_answers import BATCH, CHIP, GATED, LENGTH, candidate, loaded, losses, some_answers, written
from tests.search.test_serving import ROUTED, problem_of

SMALL = replace(GATED, moe=MoEConfig(experts=4, every=2, router="top-k", dispatch="dropless"))
MESH = (("x", 2), ("y", 2))
ROWS = replace(WIDE, activation="relu", moe=MoEConfig(experts=8, every=1, router="top-k", dispatch="dropless"))
FREE = ("moe.groups", "moe.expert_input", "moe.hidden", "moe.in_via", "moe.out_via")
"""Choices of rows, which are tried in every combination."""


@pytest.mark.turns(1)
@pytest.mark.parametrize("phase", ["train", "decode"])
def test_rows_do_not_leave_their_device_between_their_arrival_and_their_answers(phase):
    found = candidate(SMALL, MESH).phase if phase == "train" else problem_of(ROUTED, phase)
    problem, rng = found.problem(), random.Random(0)
    for _ in range(20):
        chosen = {line.key: line.text for line in found.lines(drawn(problem, rng)) if not line.section}
        there = Spec.parse(chosen["moe.expert_input"])
        met = [Spec.parse(chosen[f"moe.{via}"].split(", ")[0]) for via in ("in_via", "out_via")]
        for spec in (*met, Spec.parse(chosen["moe.hidden"])):
            assert [spec.axes_of(dim) for dim in "GXC"] == [there.axes_of("G"), there.axes_of("X"), ()]


@pytest.mark.slow
def test_no_step_of_rows_cuts_what_their_buffers_do_not_have():
    """X of a buffer is the shards of the experts, whatever is multiplied with it; so every step of the plan can run.

    Few groups cannot be cut in place of X, and rows are many enough that moving them takes its time.
    """
    batch, length, mesh = 4, 512, {"x": 2, "y": 2, "z": 2}
    workload, rng = Workload(ROWS, CHIP, batch, length), random.Random(1)
    found, context = TrainingProblem(workload, mesh), Context(tuple(mesh.items()), CHIP, True, "blocking")
    sizes = {"G": batch, "L": length, "X": 8, "E": ROWS.embed, "F": ROWS.feed_forward}
    problem = found.problem()
    for _ in range(12):
        chosen = {line.key: line.text for line in found.lines(drawn(problem, rng)) if not line.section}
        there, hidden, dispatched, w_in, w_out = (
            Spec.parse(chosen[f"moe.{name}"]) for name in ("expert_input", "hidden", "dispatched", "w_in", "w_out")
        )
        vias = [Via.of(*map(Spec.parse, chosen[f"moe.{name}"].split(", "))) for name in ("in_via", "out_via")]
        shards = prod(mesh[axis] for axis in there.axes_of("X"))
        buffers = {**sizes, "X": shards, "C": most_rows(length, 2, 8, shards)}
        work = ExpertWork(
            dispatched, there, hidden, (w_in,), w_out, *vias, "relu", tuple({**sizes, "C": buffers["C"]}.items()),
            "bfloat16", "bfloat16", rows=Buffers(shards, 2),
        )  # fmt: skip
        for each in products(work, context):
            for step in (*each.forward.routine.steps, *each.backward.routine.steps):
                for spec in (step.before, step.after):
                    if "C" in spec.dims and step.kind != "einsum":
                        assert not spec.faults({dim: buffers[dim] for dim in spec.dims}, mesh)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_is_the_best_of_every_placement_of_rows(seed):
    """Around weights and a residual that are drawn; all combinations are priced one by one."""
    found = candidate(SMALL, (("x", 2),)).phase
    problem, picks = found.problem(), {}
    while not picks:
        some = drawn(problem, random.Random(seed))
        picks = {name: number for name, number in some.items() if name not in FREE}
    every = itertools.product(*(range(len(found.choices[name])) for name in FREE))
    cheapest = min(problem.cost(picks | dict(zip(FREE, each))) for each in every)
    best = Search(problem).best(fixed=picks)
    assert best.complete
    assert best.seconds == pytest.approx(cheapest, rel=1e-12)


@pytest.mark.slow
def test_a_file_has_a_line_for_every_key_and_is_the_same_again(tmp_path):
    held = candidate(SMALL, MESH)
    texts = {written(held, held.solve(), remarks(held, held.solve())) for _ in range(2)}
    again = type(held)(held.phase, held.limit)
    texts.add(written(again, again.solve(), remarks(again, again.solve())))
    assert len(texts) == 1
    wanted = {key for key in Layout.load("gshard").table if key.startswith("moe.")}
    wanted = {key for key in wanted if "shared" not in key} | {"moe.in_via", "moe.out_via"}
    for answer in (held.solve(), *some_answers(held, 4)):
        layout = loaded(written(held, answer), tmp_path).check(SMALL.sizes(BATCH, LENGTH), dict(MESH))
        assert {key for key in layout.table if key.startswith("moe.")} >= wanted


def test_a_forward_pass_of_experts_reads_their_weights_as_often_in_training_as_in_serving():
    """Products are priced with the weights that are moved to them, so moving them is no separate pass over memory."""
    each = 2 * 8 * ROWS.embed * ROWS.feed_forward  # bytes of one weight of all experts in bfloat16

    def passes(question):
        return sum(times for array, times in question.program.work.passed.items() if array.size == each)

    recomputed, kept = (
        passes(TrainingProblem(Workload(replace(ROWS, remat=remat), CHIP, 4, 64), {"x": 1}).question)
        for remat in ("full", "none")
    )
    assert recomputed - kept == passes(problem_of(ROWS, "prefill").question) == 0


def test_presets_with_experts_are_priced_and_none_is_better():
    held = candidate(SMALL, MESH)
    priced = {each.name: each.answer for each in placed_presets([held]) if each.answer}
    assert {"gshard", "switch-expert-model", "zero-3", "megatron-1d"} <= {*priced}
    assert all(each.seconds >= held.free.seconds * (1 - 1e-12) for each in priced.values())


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_found_layout_trains_as_one_device_does(share, tmp_path):
    config = replace(SMALL, remat="dots")
    held = candidate(config, MESH)
    try:
        answer = held.phase.search(share * held.free.bytes).best()
    except NothingFits:
        answer = held.least
    layout, sizes = loaded(written(held, answer), tmp_path), held.phase.case.mesh
    found = losses(config, layout, sizes, 50)
    wanted = losses(config, Layout.load("replicated"), {"x": 1, "y": 1, "z": 1}, 50)
    assert wanted[-1] < wanted[0] - 0.05
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_layouts_of_the_space_train_as_one_device_does(seed, tmp_path):
    config = replace(SMALL, remat=("none", "full", "dots", "selective", "dots-except-hidden", "full")[seed])
    held = candidate(config, (("x", 2), ("y", 2), ("z", 2)) if seed % 2 else (("x", 4), ("y", 2)))
    picks = drawn(held.unlimited, random.Random(seed))
    answer = held.unlimited_search.best(fixed=picks)
    found = losses(config, loaded(written(held, answer), tmp_path), held.phase.case.mesh, 5)
    wanted = losses(config, Layout.load("replicated"), {"x": 1, "y": 1, "z": 1}, 5)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
