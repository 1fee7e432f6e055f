"""The price of a training step in a search, against `gspmd.trace` of the step that the model runs."""

import math
import random
from dataclasses import replace

import jax
import pytest

import gspmd
from gspmd.annotate import PlanError
from gspmd.audit import topology
from gspmd.hardware.chips import CHIPS
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.search import Search
from gspmd.search.answers import Candidate, Space, find
from gspmd.search.answers.presets import picks_of
from gspmd.search.finding import NORM
from gspmd.training import OptimizerConfig
from gspmd_models import ModelConfig, abstract, abstract_batch, abstract_key, step
from gspmd_models.config import REMATS
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
T5 = replace(WIDE, kv_heads=16, tied=True, positions="relative", attention_scale=1.0)
QWEN = replace(WIDE, qkv_bias=True, qk_norm=True)
PARALLEL = replace(WIDE, block="parallel")
MULTIHEAD = replace(PARALLEL, kv_heads=16, activation="gelu", norm="layer", norm_bias=True)
BATCH, LENGTH = 64, 512
CHIP = CHIPS["tpu-v5p"]
MESH = {"x": 2, "y": 2, "z": 2}


def problem_of(config: ModelConfig, microbatches: int = 1, mesh=MESH) -> TrainingProblem:
    return TrainingProblem(Workload(config, CHIP, BATCH, LENGTH, microbatches=microbatches), mesh)


def planned(found: TrainingProblem, picks) -> float:
    """The seconds of planned steps, as the search adds them up."""
    at = [picks[option.name] for option in found.question.prices.choices]
    seconds = sum(float(table[tuple(at[number] for number in of)]) for of, table in found.question.planned)
    return seconds + found.problem().seconds_of(picks)[NORM]


def state_of(config: ModelConfig, layout: Layout, mesh):
    resolved = layout.resolved(config.sizes(BATCH, LENGTH), dict(mesh.shape))
    model = abstract(config, resolved, mesh, "bfloat16", stored="float32")
    return resolved, model, step.abstract_state(model, OptimizerConfig(), 10, mesh)


def traced(config: ModelConfig, layout: Layout, mesh, microbatches: int) -> float:
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        resolved, model, state = state_of(config, layout, mesh)
        update = step.training_step(model, OptimizerConfig(), 10, microbatches)
        return gspmd.trace(update, state, abstract_batch(resolved, mesh, BATCH, LENGTH), abstract_key(mesh)).seconds


def local_bytes(tree) -> int:
    """Return the bytes of one device's shards."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


CASES = [
    (WIDE, "full", 1), (WIDE, "none", 2), (WIDE, "dots", 1), (WIDE, "dots", 2), (WIDE, "selective", 1),
    (WIDE, "dots-except-hidden", 4),
    (ROUTED, "full", 2), (ROUTED, "dots-except-hidden", 1), (replace(WIDE, norm="layer", norm_bias=True), "full", 1),
    (SHARED, "full", 1), (EVERYWHERE, "dots", 4),
    (ROWS, "dots", 2), (UNEVEN, "full", 1), (DEEPSEEK, "selective", 1),
    (PARALLEL, "dots-except-hidden", 1), (replace(PARALLEL, out_bias=True, ffn_bias=True), "full", 2),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            (GPT2, "full", 1), (GPT2, "none", 2), (GPT2, "selective", 1), (QWEN, "full", 1),
            (QWEN, "none", 2), (QWEN, "dots-except-hidden", 2), (QWEN, "selective", 1),
            (replace(ROUTED, qk_norm=True), "full", 2), (replace(ROUTED, tied=False), "full", 2),
            (WIDE, "none", 4), (WIDE, "full", 4), (WIDE, "dots", 4), (WIDE, "selective", 4),
            *((SHARED, remat, count) for remat in REMATS for count in (1, 2, 4) if (remat, count) != ("full", 1)),
            *((EVERYWHERE, remat, 1) for remat in REMATS),
            *((config, remat, count) for config in (replace(PARALLEL, kv_heads=1), MULTIHEAD)
              for remat in REMATS for count in (1, 2)),
            (DEEPSEEK, "full", 2), (DEEPSEEK, "dots", 1), (DEEPSEEK, "none", 4),
            *((ROWS, remat, count) for remat in REMATS for count in (1, 2, 4) if (remat, count) != ("dots", 2)),
            (replace(ROWS, ffn_bias=True), "dots", 2),
            (replace(SHARED, ffn_bias=True), "full", 2), (replace(EVERYWHERE, ffn_bias=True), "none", 1),
            (UNEVEN, "none", 1), (UNEVEN, "dots", 4), (UNEVEN, "dots-except-hidden", 2), (UNEVEN, "selective", 1),
        ]
    ),
]  # fmt: skip


BEHIND_SLICES = {(replace(SHARED, remat="none"), 1, 0): 2 * 53.151437e-6}
"""Seconds of the cases in which two moves begin with the same slice and then an all-to-all, which is priced once.

It runs twice, since JAX moves the computation of only one of the two positions out of the loop that it differentiates
(docs/search-figures.md).
"""


@pytest.mark.slow
@pytest.mark.parametrize("draw", [0, 1])
@pytest.mark.parametrize(("config", "remat", "microbatches"), CASES)
def test_a_layout_costs_what_its_training_step_is_traced_to(config, remat, microbatches, draw, tmp_path):
    pytest.importorskip("libtpu")  # what is merged and hoisted is the compiler's
    config, mesh = replace(config, remat=remat), topology("tpu-v5p:2x2x2").mesh(MESH)
    found = problem_of(config, microbatches)
    problem, rng = found.problem(), random.Random(f"{remat} {microbatches}")
    picks = [drawn(problem, rng) for _ in range(draw + 1)][draw]
    layout = layout_of(found.lines(picks), tmp_path)
    layout.check(config.sizes(BATCH, LENGTH), MESH)
    # The norm of all gradients is priced over all mesh axes of three.
    told, slack = planned(found, picks), found.overestimate
    wanted = traced(config, layout, mesh, microbatches)
    missing = BEHIND_SLICES.get((config, microbatches, draw), 0.0)
    assert wanted * (1 - 1e-6) <= told + missing <= wanted * (1 + 1e-6) + slack


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("config", "axes", "microbatches"),
    [(WIDE, (), 1), (GPT2, ("y",), 2), (replace(ROUTED, tied=False), ("x",), 1), (PARALLEL, ("y",), 1),
     (WIDE, ("x", "y"), 1)],
)  # fmt: skip
def test_the_norm_is_summed_over_the_axes_that_shard_weights_alone(config, axes, microbatches, tmp_path):
    pytest.importorskip("libtpu")
    sizes = {"x": 4, "y": 2}
    mesh, found = topology("tpu-v5p:2x2x2").mesh(sizes), problem_of(config, microbatches, sizes)
    problem = found.problem()
    picks = drawn(problem, random.Random(1), found.choices[NORM].index(axes))
    assert found.choices[NORM][picks[NORM]] == axes
    assert found.overestimate == 0.0
    layout = layout_of(found.lines(picks), tmp_path, ("x", "y"))
    assert planned(found, picks) == pytest.approx(traced(config, layout, mesh, microbatches), rel=1e-6)


@pytest.mark.slow
def test_where_the_norm_is_priced_over_all_axes_less_is_proved():
    """On three axes: what its price may be too much is no part of the bound."""
    phase = problem_of(WIDE)
    assert phase.choices[NORM] == (tuple(MESH),)
    finding = find([Space(lambda: phase)], 1e15)
    assert phase.overestimate > 0
    assert finding.bound == pytest.approx(Search(phase.problem()).best().seconds - phase.overestimate)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_may_stay_partial_sums_and_the_stream_lie_over_the_batch_in_any_number_of_microbatches(microbatches):
    """A stored partial sum has a dimension of one element for its parts, which is no size that axes must divide."""
    found = problem_of(WIDE, microbatches)
    gradients = {texts.get(("gradients", "attention.w_q"), "") for texts in found.texts("attention.w_q")}
    assert "EHD partialsum-xyz" in gradients
    assert "B_xyzLE" in {texts["", "attention.residual"] for texts in found.texts("attention.residual")}


@pytest.mark.turns(1)
@pytest.mark.parametrize(("config", "microbatches"), [(GPT2, 1), (replace(SHARED, tied=True), 2)])
def test_arguments_are_the_state_and_the_batch_to_the_byte(config, microbatches, tmp_path):
    pytest.importorskip("libtpu")
    mesh, found = topology("tpu-v5p:2x2x2").mesh(MESH), problem_of(config, microbatches)
    rng = random.Random(0)
    for _ in range(5):
        picks = drawn(found.problem(), rng)
        resolved, _, state = state_of(config, layout_of(found.lines(picks), tmp_path), mesh)
        at = [picks[option.name] for option in found.question.prices.choices]
        told = sum(float(table[tuple(at[n] for n in of)]) for of, table in found.question.spread(found.question.stored))
        batch = abstract_batch(resolved, mesh, BATCH, LENGTH)
        assert told == pytest.approx(local_bytes(state) + local_bytes(batch), abs=64)  # the random key, and the step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "name", "microbatches"),
    [
        (WIDE, "weight-stationary-2d", 1), (WIDE, "megatron-1d", 2), (SHARED, "gshard", 1), (ROWS, "gshard", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (WIDE, "weight-gathered-x", 1), (WIDE, "weight-gathered-xy", 1), (WIDE, "weight-stationary-2d", 2),
                (ROWS, "switch-expert-model", 2), (SHARED, "switch-expert-model", 2),
                (SHARED, "megatron-1d", 1), (SHARED, "weight-stationary-2d", 2),
            ]
        ),
    ],
)  # fmt: skip
def test_a_preset_costs_what_it_is_traced_to(config, name, microbatches):
    """Keys that are made split along their size; and gradients that are partial sums because there are microbatches."""
    pytest.importorskip("libtpu")
    mesh, layout = topology("tpu-v5p:2x2x2").mesh(MESH), Layout.load(name)
    found = problem_of(config, microbatches)
    candidate = Candidate(found, math.inf)
    answer = picks_of(candidate, candidate.search, layout.resolved(config.sizes(BATCH, LENGTH), MESH))
    told, wanted = planned(found, answer.picks), traced(config, layout, mesh, microbatches)
    # With the vias that are best, where the preset leaves them to the planner, which takes each step by itself.
    assert told <= wanted * (1 + 1e-6) + found.overestimate
    assert told >= wanted * 0.95


@pytest.mark.parametrize("config", [WIDE, SHARED, PARALLEL], ids=["dense", "shared experts", "parallel"])
def test_the_best_is_the_cheapest_of_many(config):
    problem = problem_of(config, mesh={"x": 2, "y": 4}).problem()
    best, rng = Search(problem).best(), random.Random(0)
    assert best.complete
    assert best.seconds == pytest.approx(problem.cost(best.picks))
    assert all(problem.cost(drawn(problem, rng)) >= best.seconds * (1 - 1e-12) for _ in range(200))


def test_the_table_of_relative_positions_is_sharded_as_its_queries_and_its_state_is_searched():
    found = problem_of(T5, mesh={"x": 2})
    assert {"attention.relative", "optimizer.attention.relative"} <= {*found.question.lines.table()}
    assert "optimizer.attention.relative" in found.choices
    assert "attention.relative" not in found.choices
    lines = found.written(Search(found.problem()).best().picks)
    assert Layout.load("replicated").override(lines)["attention.relative"] in ("RH", "RH_x")


def test_renamed_axes_cost_the_same():
    one, other = (
        Search(problem_of(WIDE, mesh=mesh).problem()).best().seconds for mesh in ({"x": 2, "y": 4}, {"y": 2, "x": 4})
    )
    assert one == pytest.approx(other, rel=1e-12)


def test_activations_in_host_memory_have_no_price():
    with pytest.raises(PlanError, match="copies of its activations to host memory have no price"):
        problem_of(replace(WIDE, offload=True))


def test_microbatches_have_to_divide_the_batch():
    with pytest.raises(PlanError, match="cannot cut a batch of 64 into 3 microbatches"):
        problem_of(WIDE, microbatches=3)
