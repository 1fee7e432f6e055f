"""The cost of a training step in a search, against `gspmd.trace` of the step that the model runs."""

import math
import random
from dataclasses import replace
from functools import partial

import jax
import pytest

import gspmd
from gspmd.annotate import PlanError, Spec
from gspmd.audit import topology
from gspmd.hardware.chips import CHIPS
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.search import Search
from gspmd.training import OptimizerConfig
from gspmd_models import ModelConfig, abstract, abstract_batch, abstract_key, step
from gspmd_models.config import REMATS
from gspmd_models.search.answers import Candidate, Space, find
from gspmd_models.search.answers.presets import picks_of
from gspmd_models.search.parts.global_norm import NORM
from gspmd_models.search.training import TrainingProblem
from gspmd_models.search.workload import Workload
from tests.references.models import WIDE
from tests.search.layouts import drawn, layout_of

ROUTED = replace(
    WIDE, layers=4, kv_heads=16, tied=True, activation="relu", moe=MoEConfig(experts=8, every=2, router="gshard")
)
SHARED = replace(WIDE, layers=4, moe=MoEConfig(experts=8, every=2, router="gshard", shared=2))
EVERYWHERE = replace(WIDE, kv_heads=16, moe=MoEConfig(experts=8, every=1, router="top-k", shared=1))
ROWS = replace(ROUTED, tied=False, activation="swiglu", moe=MoEConfig(experts=8, router="top-k", dispatch="dropless"))
UNEVEN = replace(ROWS, layers=2, activation="relu", moe=replace(ROWS.moe, experts=12, every=1, k=5))
"""Whose experts are all layers, and whose rows are no whole number for each expert."""
DEEPSEEK = replace(ROWS, moe=replace(ROWS.moe, shared=2))
BIASED = {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "output_bias": True}
GPT2 = replace(WIDE, kv_heads=16, activation="gelu", norm="layer", norm_bias=True, **BIASED)
QWEN = replace(WIDE, qkv_bias=True, qk_norm=True)
BATCH, LENGTH = 64, 512
CHIP = CHIPS["tpu-v5p"]
MESH = {"x": 2, "y": 2, "z": 2}


def problem_of(config: ModelConfig, microbatches: int = 1, mesh=MESH) -> TrainingProblem:
    return TrainingProblem(Workload(config, CHIP, BATCH, LENGTH, microbatches=microbatches), mesh)


def state_of(config: ModelConfig, layout: Layout, mesh):
    resolved = layout.resolved(config.sizes(BATCH, LENGTH), dict(mesh.shape))
    model = abstract(config, resolved, mesh, "bfloat16")
    return resolved, model, step.abstract_state(model, OptimizerConfig(), 10, mesh)


def traced(config: ModelConfig, layout: Layout, mesh, microbatches: int) -> float:
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        resolved, model, state = state_of(config, layout, mesh)
        update = step.training_step(model, OptimizerConfig(), 10, microbatches)
        return gspmd.trace(update, state, abstract_batch(resolved, mesh, BATCH, LENGTH), abstract_key(mesh)).seconds


def local_bytes(tree) -> int:
    """Of one device's shards."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


CASES = [
    (WIDE, "full", 1), (WIDE, "none", 2), (WIDE, "dots", 1), (WIDE, "dots", 2), (WIDE, "selective", 1),
    (WIDE, "dots-except-hidden", 4),
    (ROUTED, "full", 2), (ROUTED, "dots-except-hidden", 1), (replace(WIDE, norm="layer", norm_bias=True), "full", 1),
    (SHARED, "full", 1), (EVERYWHERE, "dots", 4),
    (ROWS, "dots", 2), (UNEVEN, "full", 1), (DEEPSEEK, "selective", 1),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            (GPT2, "full", 1), (GPT2, "none", 2), (GPT2, "selective", 1), (QWEN, "full", 1),
            (QWEN, "none", 2), (QWEN, "dots-except-hidden", 2), (QWEN, "selective", 1),
            (replace(ROUTED, qk_norm=True), "full", 2), (replace(ROUTED, tied=False), "full", 2),
            (WIDE, "none", 4), (WIDE, "full", 4), (WIDE, "dots", 4), (WIDE, "selective", 4),
            *((SHARED, remat, count) for remat in REMATS for count in (1, 2, 4) if (remat, count) != ("full", 1)),
            *((EVERYWHERE, remat, 1) for remat in REMATS),
            (DEEPSEEK, "full", 2), (DEEPSEEK, "dots", 1), (DEEPSEEK, "none", 4),
            *((ROWS, remat, count) for remat in REMATS for count in (1, 2, 4) if (remat, count) != ("dots", 2)),
            (UNEVEN, "none", 1), (UNEVEN, "dots", 4), (UNEVEN, "dots-except-hidden", 2), (UNEVEN, "selective", 1),
        ]
    ),
]  # fmt: skip


@pytest.mark.turns(5)
@pytest.mark.parametrize("draw", [0, 1])
@pytest.mark.parametrize(("config", "remat", "microbatches"), CASES)
def test_a_layout_costs_what_its_training_step_is_traced_to(config, remat, microbatches, draw, only_planned, tmp_path):
    pytest.importorskip("libtpu")  # what is merged and hoisted is the compiler's
    config, mesh = replace(config, remat=remat), topology("tpu-v5p:2x2x2").mesh(MESH)
    found = problem_of(config, microbatches)
    problem, rng = found.problem(), random.Random(f"{remat} {microbatches}")
    picks = [drawn(problem, rng) for _ in range(draw + 1)][draw]
    layout = layout_of(found.lines(picks), tmp_path)
    layout.check(config.sizes(BATCH, LENGTH), MESH)
    told, wanted = problem.cost(picks), traced(config, layout, mesh, microbatches)
    # Of a tied table a compiler may share what lookup and logits move.
    assert told == pytest.approx(wanted, rel=3e-3 if config.tied else 1e-6)


@pytest.mark.parametrize(
    ("config", "axes", "microbatches"),
    [
        (WIDE, (), 1),
        (GPT2, ("y",), 2),
        (replace(ROUTED, tied=False), ("x",), 1),
        (replace(WIDE, block="parallel"), ("y",), 1),
        (WIDE, ("x", "y"), 1),
    ],
)
def test_the_norm_is_summed_over_the_axes_that_shard_weights_alone(config, axes, microbatches, only_planned, tmp_path):
    pytest.importorskip("libtpu")
    sizes = {"x": 4, "y": 2}
    mesh, found = topology("tpu-v5p:2x2x2").mesh(sizes), problem_of(config, microbatches, sizes)
    problem = found.problem()
    picks = drawn(problem, random.Random(1), found.choices[NORM].index(axes))
    assert found.choices[NORM][picks[NORM]] == axes
    assert found.too_dear == 0.0
    layout = layout_of(found.lines(picks), tmp_path, ("x", "y"))
    assert problem.cost(picks) == pytest.approx(traced(config, layout, mesh, microbatches), rel=1e-6)


@pytest.mark.parametrize(("mesh", "size"), [({"x": 2, "y": 2, "z": 2}, "small"), ({"x": 4, "y": 2}, "large")])
def test_where_the_norm_is_priced_over_all_axes_less_is_proved(mesh, size):
    """On many axes, and of steps to which it is nothing: what its price may be too much is no part of the bound."""
    config = WIDE if size == "small" else replace(WIDE, embed=8192, feed_forward=32768, layers=64)
    space = Space(partial(problem_of, config, 1, mesh))
    phase = space.phase()
    assert phase.choices[NORM] == (tuple(mesh),)
    finding = find([space], 1e15)
    norm = phase.costs.settled(Spec((), ()), tuple(mesh))
    assert phase.too_dear == pytest.approx(norm)
    assert finding.bound == pytest.approx(Search(phase.problem()).best().seconds - norm)


@pytest.mark.turns(5)
@pytest.mark.parametrize(
    ("remat", "microbatches"),
    [("full", 1), *(pytest.param(remat, count, marks=pytest.mark.slow) for remat in REMATS for count in (2, 4))],
)
def test_what_moves_to_groups_and_to_shared_experts_moves_once(remat, microbatches, only_planned, tmp_path):
    """Of the normed input and of the sum's cotangent: layouts in which both moves begin with the same steps."""
    pytest.importorskip("libtpu")
    config, mesh = replace(SHARED, remat=remat), topology("tpu-v5p:2x2x2").mesh(MESH)
    found = problem_of(config, microbatches)
    problem, rng = found.problem(), random.Random(remat)
    shared = [f"moe.shared_{name}: moved already, to groups" for name in ("in_via", "out_via")]
    while True:
        picks = drawn(problem, rng)
        seconds = problem.seconds_of(picks)
        if all(seconds[name] < -1e-5 for name in shared):
            break
    layout = layout_of(found.lines(picks), tmp_path)
    assert problem.cost(picks) == pytest.approx(traced(config, layout, mesh, microbatches), rel=1e-6)


@pytest.mark.parametrize(
    ("plain", "vectors", "remat", "microbatches"),
    [
        (replace(WIDE, tied=True, activation="gelu", norm="layer"), {**BIASED, "norm_bias": True}, "full", 1),
        (replace(WIDE, norm="layer"), {**BIASED, "norm_bias": True, "qk_norm": True}, "none", 2),
        (replace(ROUTED, tied=False), {"qkv_bias": True, "qk_norm": True, "output_bias": True}, "selective", 1),
    ],
)
def test_biases_and_norms_of_heads_cost_what_they_add_to_the_trace(
    plain, vectors, remat, microbatches, only_planned, tmp_path
):
    """Of the same layout, which has no lines for them, beside the model without them: to the picosecond."""
    pytest.importorskip("libtpu")
    mesh, told, wanted, held, kept = topology("tpu-v5p:2x2x2").mesh(MESH), [], [], [], []
    rng, picks = random.Random(str(vectors)), None
    for config in (replace(plain, remat=remat), replace(plain, remat=remat, **vectors)):
        found = problem_of(config, microbatches)
        problem = found.problem()
        picks = picks or drawn(problem, rng)
        layout = layout_of(found.lines(picks), tmp_path)
        layout.check(config.sizes(BATCH, LENGTH), MESH)
        told.append(problem.cost(picks))
        wanted.append(traced(config, layout, mesh, microbatches))
        state = state_of(config, layout, mesh)[-1]
        kept.append(local_bytes(state) + local_bytes(state.params))  # gradients are as large as what is trained
        held.append(problem.bytes_of(picks))
    assert held[1] - held[0] == pytest.approx(kept[1] - kept[0], rel=1e-9)
    assert told[1] - told[0] == pytest.approx(wanted[1] - wanted[0], rel=1e-6)
    assert wanted[1] > wanted[0]


@pytest.mark.parametrize(
    ("config", "name", "microbatches"),
    [
        (WIDE, "weight-stationary-2d", 1), (WIDE, "megatron-1d", 2), (SHARED, "gshard", 1), (ROWS, "gshard", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (WIDE, "weight-gathered-x", 1), (WIDE, "weight-gathered-xy", 1), (WIDE, "weight-stationary-2d", 2),
                (WIDE, "context-parallel", 2), (ROWS, "switch-expert-model", 2), (SHARED, "switch-expert-model", 2),
                (SHARED, "megatron-1d", 1), (SHARED, "weight-stationary-2d", 2),
            ]
        ),
    ],
)  # fmt: skip
def test_a_preset_costs_what_it_is_traced_to(config, name, microbatches, only_planned):
    """Keys that are made split along their size; and gradients that are partial sums because there are microbatches."""
    pytest.importorskip("libtpu")
    mesh, layout = topology("tpu-v5p:2x2x2").mesh(MESH), Layout.load(name)
    found = problem_of(config, microbatches)
    candidate = Candidate(found, math.inf)
    answer = picks_of(candidate, candidate.search, layout.resolved(config.sizes(BATCH, LENGTH), MESH))
    norm = 1e-5  # that of all gradients is priced over all mesh axes, some of which a preset shards no weight over
    assert answer.seconds == pytest.approx(traced(config, layout, mesh, microbatches), rel=1e-6, abs=norm)


@pytest.mark.parametrize("config", [WIDE, SHARED], ids=["dense", "shared experts"])
def test_the_best_is_the_cheapest_of_many(config, only_planned):
    problem = problem_of(config, mesh={"x": 2, "y": 4}).problem()
    best, rng = Search(problem).best(), random.Random(0)
    assert best.complete
    assert best.seconds == pytest.approx(problem.cost(best.picks))
    assert all(problem.cost(drawn(problem, rng)) >= best.seconds * (1 - 1e-12) for _ in range(200))


def test_renamed_axes_cost_the_same():
    one, other = (
        Search(problem_of(WIDE, mesh=mesh).problem()).best().seconds for mesh in ({"x": 2, "y": 4}, {"y": 2, "x": 4})
    )
    assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"block": "parallel", "moe": MoEConfig(experts=8)},
        {"moe": MoEConfig(experts=8, router="noisy-top-k", k=2)},
    ],
)
def test_what_is_not_searched_is_refused(changes):
    with pytest.raises(PlanError, match="cannot search layouts to train this model"):
        problem_of(replace(WIDE, **changes))


def test_microbatches_have_to_divide_the_batch():
    with pytest.raises(PlanError, match="cannot cut a batch of 64 into 3 microbatches"):
        problem_of(WIDE, microbatches=3)
