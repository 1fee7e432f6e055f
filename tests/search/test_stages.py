"""Layers to stages: the dynamic program against all splits, and its prices against the step of a real pipeline."""

import io
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import gspmd
from gspmd.annotate import PlanError
from gspmd.audit import topology
from gspmd.hardware.chips import CHIPS
from gspmd.layouts import Layout
from gspmd.layouts.variants import data_axes
from gspmd.moe import MoEConfig
from gspmd.pipeline import Schedule
from gspmd.planner.unknown import unknowns_in
from gspmd.search import Problem, Search
from gspmd.search.finding import NORM
from gspmd.search.held import HeldArray
from gspmd.search.stages import LayerRange, NoSplit, split
from gspmd.training import OptimizerConfig
from gspmd_models import ModelConfig, abstract, abstract_batch, abstract_key, step
from gspmd_models.finetuning.config import LoraConfig
from gspmd_models.search import stages as stages_module
from gspmd_models.search.pipeline import StageProblem
from gspmd_models.search.stages import sheet, table
from gspmd_models.search.workload import Workload
from tests.references.models import WIDE
from tests.search.layouts import drawn, layout_of


def every_split(layers: int, submeshes: int):
    """All of them, whatever they cost and whatever devices they use."""
    for cuts in product((False, True), repeat=layers - 1):
        ends = [*(at for at, cut in enumerate(cuts) if cut), layers - 1]
        firsts = [0, *(end + 1 for end in ends[:-1])]
        for chosen in product(range(submeshes), repeat=len(ends)):
            yield [LayerRange(*each) for each in zip(firsts, ends, chosen)]


def cheapest(table, sizes, devices, microbatches, fits):
    best = math.inf
    for stages in every_split(len(table), len(sizes)):
        if sum(sizes[each.submesh] for each in stages) != devices:
            continue
        if not all(fits(each, len(stages) - 1 - at) for at, each in enumerate(stages)):
            continue
        paces = [table[each.first][each.last][each.submesh] for each in stages]
        if max(paces) < math.inf:
            best = min(best, sum(paces) + (microbatches - 1) * max(paces))
    return best


def case_of(rng: random.Random):
    """A small case: few distinct seconds, some infinite; what a stage holds grows with the stages behind it."""
    layers, sizes = rng.randint(2, 6), tuple(rng.choices((1, 2, 3, 4), k=rng.randint(1, 3)))
    count = rng.randint(1, layers)
    devices = sum(rng.choices(sizes, k=count)) if rng.random() < 0.5 else rng.choice(sizes) * count
    scale = rng.choice([0, 10])
    table = np.array(
        [
            [
                [
                    math.inf if rng.random() < 0.1 else rng.randint(0, 4) + scale * (last - first + 1) / size
                    for size in sizes
                ]
                for last in range(layers)
            ]
            for first in range(layers)
        ]
    )
    held, kept, limit = rng.randint(0, 2), rng.randint(0, 2), rng.choice([2, 4, 6, 10**9])

    def fits(stage: LayerRange, behind: int) -> bool:
        count = stage.last - stage.first + 1
        ends = held * (stage.first == 0)
        return (ends + count * (held + kept * min(behind + 1, microbatches))) / sizes[stage.submesh] <= limit

    microbatches = rng.choice([1, 2, 4, 16])
    return table, sizes, devices, microbatches, fits


def test_a_split_is_the_cheapest_of_all():
    found = {"some": 0, "none": 0, "memory": 0}
    for seed in range(200):
        case = case_of(random.Random(seed))
        wanted = cheapest(*case)
        if wanted == math.inf:
            found["none"] += 1
            with pytest.raises(NoSplit):
                split(*case)
            continue
        answer = split(*case)
        table, sizes, devices, microbatches, fits = case
        paces = [table[each.first, each.last, each.submesh] for each in answer.stages]
        assert answer.seconds == pytest.approx(wanted, rel=1e-12)
        assert answer.seconds == pytest.approx(sum(paces) + (microbatches - 1) * max(paces), rel=1e-12)
        assert [layer for each in answer.stages for layer in range(each.first, each.last + 1)] == [*range(len(table))]
        assert sum(sizes[each.submesh] for each in answer.stages) == devices
        assert all(fits(each, len(answer.stages) - 1 - at) for at, each in enumerate(answer.stages))
        found["some"] += 1
        found["memory"] += wanted > cheapest(*case[:4], lambda *_: True)
    assert min(found.values()) >= 8, found


FLAT = np.ones((4, 4, 1))


def test_memory_is_asked_for_with_the_stages_behind():
    answer = split(FLAT, (2,), 8, 2, lambda stage, behind: behind == 3 - stage.first)
    assert len(answer.stages) == 4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((FLAT, (3,), 8, 2), "submeshes of 3 devices do not add up to 8 in any number"),
        ((FLAT, (2,), 8, 2, lambda stage, behind: behind < 3), "no split fits in memory"),
        ((FLAT * math.inf, (2,), 8, 2), "a stage of infinite seconds"),
    ],
)
def test_what_cannot_be_split_is_said_with_a_remedy(arguments, told):
    with pytest.raises(NoSplit, match=told) as fault:
        split(*arguments)
    assert str(fault.value).splitlines()[1].startswith("  ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((FLAT[0], (1,), 4, 2), r"seconds has shape \(4, 1\)"),
        ((FLAT * math.nan, (1,), 4, 2), "negative or not a number"),
        ((FLAT, (0,), 4, 2), "Give 1 or more of each"),
    ],
)
def test_what_is_no_table_is_refused(arguments, told):
    with pytest.raises(ValueError, match=told):
        split(*arguments)


# -- what a pipeline costs -------------------------------------------------------------------------------------------

BATCH, LENGTH = 64, 512
DENSE = replace(WIDE, vocabulary=1024, embed=512, layers=4, heads=8, feed_forward=1024)
ROUTED = replace(DENSE, kv_heads=8, tied=True, activation="relu", moe=MoEConfig(experts=8, every=2, router="gshard"))
ROWS = replace(ROUTED, tied=False, activation="swiglu", moe=MoEConfig(experts=8, router="top-k", dispatch="dropless"))
CHIP = CHIPS["tpu-v5p"]
INSIDE = {"x": 2, "y": 2}


def problem_of(
    config: ModelConfig,
    microbatches: int = 1,
    side: tuple[str, ...] = (),
    stages: int = 2,
    inside: Mapping[str, int] = INSIDE,
    slice_shape: tuple[int, ...] = (),
) -> StageProblem:
    chip = replace(CHIP, slice_shape=slice_shape)
    return StageProblem(Workload(config, chip, BATCH, LENGTH, microbatches=microbatches), stages, inside, side)


def step_of(found: StageProblem, layout: Layout):
    """A step in stages, with its mesh, a compiler's topology, and its arguments."""
    case = found.case
    shape = case.chip.slice_shape or (case.stages, 2, 2)
    mesh = topology(f"tpu-v5p:{'x'.join(map(str, shape))}").mesh({"p": case.stages, **case.mesh})
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        model = abstract(case.config, layout, mesh, "bfloat16")
        state = step.abstract_state(model, OptimizerConfig(), 10, mesh)
        update = step.training_step(model, OptimizerConfig(), 10, case.microbatches)
        return mesh, update, (state, abstract_batch(layout, mesh, BATCH, LENGTH), abstract_key(mesh))


def traced(found: StageProblem, layout: Layout):
    mesh, update, arguments = step_of(found, layout)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        return gspmd.trace(update, *arguments)


def planned(found: StageProblem, problem: Problem, picks: dict[str, int]) -> float:
    """Seconds of planned steps: tables by place, and the norm of all gradients."""
    question = found.question
    at = [picks[option.name] for option in question.prices.choices]
    tables = sum(float(table[tuple(at[number] for number in of)]) for of, table in question.planned)
    return tables + float(problem.seconds_of(picks).get(NORM, 0.0))


def check_traced(found: StageProblem, folder: Path) -> None:
    """Compare the best picks and three drawn ones with the traced steps of their layouts."""
    case, problem, rng = found.case, found.problem(), random.Random(0)
    config, microbatches, stages = case.config, case.microbatches, case.stages
    for number in range(4):
        picks = drawn(problem, rng) if number else Search(problem).best().picks
        layout = layout_of(found.lines(picks), folder, ("p", *case.mesh))
        layout.check(config.sizes(BATCH, LENGTH), {"p": stages, **case.mesh})
        if not config.moe:
            assert data_axes(layout)[: len(case.side)] == case.side
        if config.moe or data_axes(layout) == case.side:
            plan = traced(found, layout)
            # a picosecond for each step is rounded up
            assert planned(found, problem, picks) == pytest.approx(plan.seconds, rel=2e-6)
    # Two stages have one slot less to send back in: after the last, nobody takes it; nor the only one's last result.
    sends = 2 * (microbatches + stages - 1) - (stages == 2) - (microbatches == 1)
    sent = sum(each.wire_bytes for each in plan.steps if (each.kind, each.axes) == ("collective-permute", ("p",)))
    held = layout.spec("ffn.residual").local_shape((BATCH // microbatches, LENGTH, config.embed), case.mesh)
    assert sent == sends * math.prod(held) * 2


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("config", "remat", "microbatches", "side", "stages"),
    [
        (DENSE, "full", 4, (), 2),
        (DENSE, "none", 2, ("y",), 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (DENSE, "none", 4, ("x", "y"), 2), (DENSE, "dots", 4, ("x",), 4),
                (replace(DENSE, block="parallel", qkv_bias=True), "none", 4, ("x",), 2),
                (replace(DENSE, ffn_bias=True, tied=True), "full", 8, (), 4),
                (ROUTED, "none", 4, (), 2), (ROUTED, "full", 2, (), 2),
                (replace(ROUTED, tied=False, moe=replace(ROUTED.moe, shared=2)), "dots", 4, (), 2),
                (ROWS, "dots", 4, (), 2), (ROWS, "none", 2, (), 2),
            ]
        ),
        # With one microbatch some ticks compute the same, which compilers and the trace do once: up to 1.2%.
        pytest.param(
            DENSE, "selective", 1, ("y",), 2,
            marks=[pytest.mark.slow, pytest.mark.xfail(strict=True, reason="ticks that are alike are priced apart")],
        ),
    ],
)  # fmt: skip
def test_a_pipeline_costs_what_its_training_step_is_traced_to(config, remat, microbatches, side, stages, tmp_path):
    pytest.importorskip("libtpu")
    check_traced(problem_of(replace(config, remat=remat), microbatches, side, stages), tmp_path)


def test_outside_the_slots_a_mesh_axis_has_the_links_of_every_torus_axis(tmp_path):
    pytest.importorskip("libtpu")
    check_traced(problem_of(DENSE, 4, ("x",), 2, {"x": 16}, (2, 4, 4)), tmp_path)


MEDIUM = replace(DENSE, vocabulary=8192, embed=1024, feed_forward=4096)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "remat", "microbatches", "side", "stages"),
    [(MEDIUM, "none", 4, ("x",), 2), (ROUTED, "full", 4, (), 2)],
)
def test_a_pipeline_holds_what_the_compiler_says(config, remat, microbatches, side, stages, tmp_path):
    pytest.importorskip("libtpu")
    found = problem_of(replace(config, remat=remat), microbatches, side, stages)
    answer = Search(found.problem()).best()
    layout = layout_of(found.lines(answer.picks), tmp_path, ("p", *INSIDE))
    mesh, update, arguments = step_of(found, layout)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        compiled = jax.jit(update, donate_argnums=0).lower(*arguments).compile()
    assert answer.bytes == pytest.approx(compiled.memory_analysis().peak_memory_in_bytes, rel=0.16)


def test_where_pipelines_run_side_by_side_nothing_but_the_optimizer_lies(tmp_path):
    found = problem_of(DENSE, 4, ("y",))
    problem, rng = found.problem(), random.Random(0)
    shards = 0
    for _ in range(20):
        layout = layout_of(found.lines(drawn(problem, rng)), tmp_path, ("p", *INSIDE))
        assert data_axes(layout)[:1] == ("y",)
        shards += "y" in layout.optimizer("ffn.w_in")
    assert shards


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_a_stage_holds_the_inputs_that_its_schedule_says(microbatches):
    found = problem_of(DENSE, microbatches)
    waiting = Schedule.of("1f1b", 2, microbatches).in_flight
    stream = BATCH // microbatches * LENGTH * DENSE.embed * 2
    over = unknowns_in(found.question.lines.spec("ffn.residual", "BLE"))
    assert HeldArray(waiting * stream, tuple(sorted(over))) in found.question.others


@pytest.fixture(scope="module")
def pipelines():
    return table(Workload(DENSE, CHIP, BATCH, LENGTH), (8,), 95e9, microbatches=(4, 8, 48))


@pytest.mark.slow
def test_a_row_is_its_slots_and_what_comes_once(pipelines):
    assert [(row.stages, row.microbatches) for row in pipelines.rows] == [(2, 4), (2, 8), (4, 4), (4, 8)]
    for row in pipelines.rows:
        slots = row.problem.apart(row.answer.picks)
        assert slots.once > 0
        assert min(slots.first, slots.last, slots.sent, slots.layers) >= 0
        assert row.slotted + slots.once == pytest.approx(row.answer.seconds, rel=1e-9)
        assert row.bubble == pytest.approx(Schedule.of("1f1b", row.stages, row.microbatches).bubble)
        assert math.prod(row.mesh.values()) == 8
    assert pipelines.best.answer.seconds == min(row.answer.seconds for row in pipelines.rows)


@pytest.mark.slow
def test_no_stages_that_are_alike_are_faster_than_any_split(pipelines):
    for row in pipelines.rows:
        assert pipelines.free[row.microbatches].seconds <= row.slotted
        layers = DENSE.layers
        alone = split(row.prices.apart(layers), (1,), row.stages, row.microbatches).seconds
        assert pipelines.free[row.microbatches].seconds <= alone <= row.slotted


def test_stages_and_their_meshes_are_the_slice(monkeypatch):
    """Stages take a part of one torus axis, and a stage has every mesh of at most two axes of the rest."""
    tried = []

    def record(along, problem, *_):
        mesh, side = problem.case.mesh, problem.case.side
        assert problem.stages * math.prod(mesh.values()) == 32
        tried.append((along, problem.stages, tuple(sorted(mesh.values())), tuple(sorted(mesh[axis] for axis in side))))

    monkeypatch.setattr(stages_module, "_solved", record)
    assert not table(Workload(DENSE, CHIP, BATCH, LENGTH), (2, 4, 4), 95e9, (4,)).rows
    # Every mesh comes once, with every choice of axes along which pipelines run side by side.
    assert sorted(tried) == sorted([
        (2, 2, (16,), ()), (2, 2, (16,), (16,)),
        *((2, 2, (4, 4), side) for side in [(), (4,), (4,), (4, 4)]),
        *((4, 2, (2, 8), side) for side in [(), (2,), (8,), (2, 8)]),
        (4, 4, (8,), ()), (4, 4, (8,), (8,)),
        *((4, 4, (2, 4), side) for side in [(), (2,), (4,), (2, 4)]),
    ])  # fmt: skip


def test_stages_of_gpus_are_of_every_size(monkeypatch):
    """GPUs have no torus: stages divide their number, and a stage has every mesh, nodes first."""
    tried = []
    record = lambda along, problem, *_: tried.append((problem.stages, problem.case.mesh, problem.case.side))  # noqa: E731
    monkeypatch.setattr(stages_module, "_solved", record)
    for nodes, devices in ((1, 8), (4, 8)):
        tried.clear()
        layers = replace(DENSE, layers=16)
        found = table(Workload(layers, CHIPS["h100"], 256, LENGTH), (nodes, devices)[nodes == 1 :], 80e9, (4,))
        assert not found.rows
        meshes = {(stages, tuple(mesh.values())) for stages, mesh, _ in tried}
        wanted = set()
        for stages in (2, 4, 8, 16):
            size = nodes * devices // stages
            pairs = [(first, size // first) for first in range(2, size) if size % first == 0]
            wanted |= {(stages, pair) for pair in pairs if size > 8 or pair[0] <= pair[1]}
            wanted |= {(stages, (size,))} if size else set()
        assert meshes == wanted
        # Where a stage lies in several nodes, a pipeline beside others is devices next to each other.
        assert all("y" not in side or "x" in side for _, mesh, side in tried if math.prod(mesh.values()) > 8)
        assert any(side == ("y",) for _, _, side in tried)


@pytest.mark.slow
def test_the_found_pipeline_is_a_layout(pipelines, tmp_path):
    best = pipelines.best
    layout = layout_of(best.lines, tmp_path, tuple(best.mesh))
    layout.check(DENSE.sizes(BATCH, LENGTH), best.mesh)
    assert str(layout.spec("pipeline.layers")) == "N_p"


@pytest.mark.slow
def test_the_table_says_what_fits(pipelines):
    least = min(row.answer.bytes for row in pipelines.rows)
    tight = table(Workload(DENSE, CHIP, BATCH, LENGTH), (8,), 0.2 * least, microbatches=(4,))
    assert tight.best is None
    assert not tight.free
    assert all(row.least > 0.2 * least and not row.lines for row in tight.rows)
    console = Console(width=120, record=True, file=io.StringIO())
    for found in (pipelines, tight):
        console.print(sheet(found))
    text = console.export_text()
    assert all(name in text for name in ("microbatches", "bubble", "20%", "yes", "no"))


GEMMA_3 = (*["sliding"] * 5, "full")


@pytest.mark.parametrize(
    ("config", "stages", "side", "told"),
    [
        (DENSE, 3, (), "cannot split 4 stacked layers into 3 stages"),
        (ROUTED, 2, ("x",), "cannot search stages of this model: it has experts and pipelines side by side"),
        (replace(ROUTED, moe=replace(ROUTED.moe, groups=4)), 2, (), "model: it has experts and 4 groups of tokens"),
        (
            replace(DENSE, layers=14, layer_kinds=(*GEMMA_3, *GEMMA_3, "sliding", "sliding"), sliding_window=4),
            2,
            (),
            "model: its first layers are not among those that repeat",
        ),
        (replace(DENSE, lora=LoraConfig(4)), 2, (), "model: some of its parameters are frozen"),
        (replace(DENSE, offload=True), 2, (), "model: copies of its activations to host memory have no price"),
    ],
)
def test_what_makes_no_stages_is_refused(config, stages, side, told):
    with pytest.raises(PlanError, match=told):
        problem_of(config, 1, side, stages)
