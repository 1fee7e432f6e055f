"""The cost of serving in a search, against `gspmd.trace` of the program that serves."""

import random
from dataclasses import replace
from math import prod

import jax
import pytest

import gspmd
from gspmd.annotate import PlanError
from gspmd.annotate.equation import Equation
from gspmd.audit import topology
from gspmd.hardware.chips import CHIPS
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.search import Search
from gspmd_models import ModelConfig, build
from gspmd_models.decoding import Generator, Sampling, serving_program
from gspmd_models.search.answers import Candidate
from gspmd_models.search.answers.presets import picks_of
from gspmd_models.search.serving import ServingProblem
from gspmd_models.search.workload import Phase, Workload
from tests.references.models import TINY, WIDE
from tests.search.layouts import drawn, layout_of

SERIAL = replace(WIDE, feed_forward=4096)
PARALLEL = replace(SERIAL, kv_heads=1, tied=True, block="parallel")
ROUTED = replace(SERIAL, moe=MoEConfig(experts=8, every=2, router="top-k"))
NOISY = replace(
    SERIAL, kv_heads=8, tied=True, activation="relu", moe=MoEConfig(experts=12, every=1, router="noisy-top-k", k=5)
)
SHARED = replace(ROUTED, moe=replace(ROUTED.moe, shared=2))
BATCH, LENGTH = 16, 256
CHIP = CHIPS["tpu-v4"]
MESH = {"x": 2, "y": 2, "z": 2}


def problem_of(config: ModelConfig, phase: Phase) -> ServingProblem:
    return ServingProblem(Workload(config, CHIP, BATCH, LENGTH, phase=phase), MESH)


def traced(config, layout, mesh, phase):
    """The seconds of a program, but for the product that picks a prompt's last position; and the program."""
    with gspmd.lowering("blocking"), jax.set_mesh(mesh):
        program = serving_program(config, layout, mesh, phase, batch=BATCH, length=LENGTH, room=LENGTH)
        plan = gspmd.trace(program.step, *program.arguments)
    residual = program.layout.spec("ffn.residual")
    picked = str(Equation.product(residual, residual.without("E"), residual.without("L")))
    return sum(each.trips * each.step.seconds for each in plan.entries if each.equation != picked), program


@pytest.mark.turns(2)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "config",
    [PARALLEL, SERIAL, ROUTED, NOISY, SHARED],
    ids=["parallel", "serial", "experts", "experts everywhere", "shared experts"],
)
def test_a_layout_costs_what_its_program_is_traced_to(config, phase, only_planned, tmp_path):
    pytest.importorskip("libtpu")  # what is merged and hoisted is the compiler's
    mesh = topology("tpu-v4:2x2x2").mesh(MESH)
    found = problem_of(config, phase)
    problem, rng = found.problem(), random.Random(f"{phase} {config.block} {config.moe and config.moe.router}")
    for _ in range(2):
        picks = drawn(problem, rng)
        if "block.output" in picks:  # where two products are added: no line of a layout, and so the planner's to choose
            count = len(found.choices["block.output"])
            picks = min(({**picks, "block.output": n} for n in range(count)), key=problem.cost)
        layout = layout_of(found.lines(picks), tmp_path).lowered("blocking")
        wanted, _ = traced(config, layout, mesh, phase)
        # The norm of a prompt's last position is priced as one of all positions.
        assert problem.cost(picks) == pytest.approx(wanted, rel=1e-6 if phase == "decode" else 1e-4)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("config", [PARALLEL, SERIAL], ids=["parallel", "serial"])
def test_biases_and_norms_of_heads_send_nothing_and_hold_float32(config, phase, only_planned, tmp_path):
    """Beside the model without them: they lie as what they are added to, without lines of their own."""
    pytest.importorskip("libtpu")
    vectors = {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "output_bias": True, "qk_norm": True}
    mesh, told, wanted, held, kept = topology("tpu-v4:2x2x2").mesh(MESH), [], [], [], []
    rng, picks = random.Random(phase), None
    for each in (replace(config, norm="layer"), replace(config, norm="layer", norm_bias=True, **vectors)):
        found = problem_of(each, phase)
        problem = found.problem()
        picks = picks or drawn(problem, rng)
        layout = layout_of(found.lines(picks), tmp_path).lowered("blocking")
        layout.check(each.sizes(BATCH, LENGTH), MESH)
        with gspmd.lowering("blocking"), jax.set_mesh(mesh):
            program = serving_program(each, layout, mesh, phase, batch=BATCH, length=LENGTH, room=LENGTH)
            wanted.append(gspmd.trace(program.step, *program.arguments).seconds)
        told.append(problem.cost(picks))
        held.append(problem.bytes_of(picks))
        weights = jax.tree.leaves(program.arguments[0])
        kept.append(sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in weights))
    assert told[0] == told[1]
    assert wanted[0] == pytest.approx(wanted[1], rel=1e-12)
    assert held[1] - held[0] == kept[1] - kept[0] > 0


def test_two_dimensional_weight_stationary_layouts_are_cheaper_for_few_tokens():
    """Pope et al., section 3.2.2: from 16 chips on, E and F are both sharded where few tokens are decoded."""
    wide = replace(PARALLEL, embed=18432, heads=48, head_size=256, feed_forward=73728)
    found = ServingProblem(Workload(wide, CHIP, 64, 2048, phase="decode"), {"x": 4, "y": 4, "z": 4})
    best = Search(found.problem(0.9 * CHIP.hbm_bytes)).best()
    w_in = found.choices["ffn.w_in"][best.picks["ffn.w_in"]].spec
    assert all(w_in.axes)


@pytest.mark.parametrize(
    ("name", "phase", "config"),
    [("gshard", "prefill", ROUTED), ("switch-expert-model", "decode", ROUTED), ("megatron-1d", "prefill", ROUTED),
     ("gshard", "decode", SHARED)],
)  # fmt: skip
def test_a_preset_costs_what_its_program_with_experts_is_traced_to(name, phase, config, only_planned):
    pytest.importorskip("libtpu")
    mesh, layout = topology("tpu-v4:2x2x2").mesh(MESH), Layout.load(name).lowered("blocking")
    of = Candidate(problem_of(config, phase), CHIP.hbm_bytes)
    wanted, program = traced(config, layout, mesh, phase)
    found = picks_of(of, Search(of.unlimited), program.layout)
    assert found.seconds == pytest.approx(wanted, rel=1e-6)
    weights = jax.tree.leaves(program.arguments[0])
    held = sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in weights)
    stored = sum(
        term.bytes[tuple(found.picks[name] for name in term.of)]
        for term in of.problem.terms
        if term.name.startswith("stored: ")
    )
    assert stored == held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "shared", "shape"), [(2, 0, MESH), (1, 0, {"x": 4, "y": 2}), (2, 1, {"x": 4, "y": 2})]
)
def test_random_layouts_of_the_space_generate_what_one_device_does(every, shared, shape, tmp_path):
    experts = MoEConfig(experts=8, every=every, router="top-k", shared=shared)
    config = replace(TINY, vocabulary=256, kv_heads=4, tied=False, moe=experts)

    def texts(layout, sizes):
        axes = (jax.sharding.AxisType.Explicit,) * len(sizes)
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axes)
        with jax.set_mesh(mesh), gspmd.lowering("blocking"):
            generate = Generator(build(config, layout, mesh, jax.random.key(0)))
            prompts = [[*b"to be or not"], [*b"that is the"]] * 4
            return generate(prompts, tokens=6, sampling=Sampling(temperature=0)).texts

    wanted = texts(Layout.load("replicated"), {"x": 1, "y": 1, "z": 1})
    found = ServingProblem(Workload(config, CHIP, 8, 32, "float32", "decode"), shape)
    problem, rng = found.problem(), random.Random(every)
    for _ in range(3):
        assert texts(layout_of(found.lines(drawn(problem, rng)), tmp_path, tuple(shape)), shape) == wanted


REFUSED = {
    "its experts are in parallel blocks": {"moe": MoEConfig(experts=8), "block": "parallel"},
    "the experts of router expert-choice choose among tokens": {"moe": MoEConfig(experts=8, router="expert-choice")},
}


@pytest.mark.parametrize(("words", "changes"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_searched_is_refused(words, changes):
    with pytest.raises(PlanError, match=f"cannot search layouts to serve this model: {words}"):
        problem_of(replace(SERIAL, **changes), "decode")
