"""The cost of serving in a search, against `gspmd.trace` of the program that serves."""

import random
from dataclasses import replace
from math import prod

import jax
import pytest

import gspmd
from gspmd.annotate import PlanError
from gspmd.hardware.chips import CHIPS
from gspmd.hardware.matmul import EFFICIENCIES
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.search.answers import Candidate
from gspmd.search.answers.presets import picks_of
from gspmd.search.finding import planned_seconds
from gspmd_models import ModelConfig, build
from gspmd_models.decoding import Generator, Sampling
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
BOTH = replace(PARALLEL, moe=MoEConfig(experts=8, every=1, router="top-k"))
VECTORS = {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "output_bias": True, "qk_norm": True}
BIASED = replace(SERIAL, norm="layer", norm_bias=True, **VECTORS)
T5 = replace(SERIAL, kv_heads=16, tied=True, encoder_layers=4, positions="relative", attention_scale=1.0)
SWITCH = replace(T5, activation="relu", moe=MoEConfig(experts=8, every=2, router="switch"))
ENCODER_DECODERS = {"t5": T5, "switch": SWITCH}
MODELS = {
    "parallel": PARALLEL, "serial": SERIAL, "experts": ROUTED, "experts everywhere": NOISY, "shared experts": SHARED,
    "experts in parallel blocks": BOTH, "biases and norms of heads": BIASED, **ENCODER_DECODERS,
}  # fmt: skip
BATCH, LENGTH, SOURCE = 16, 256, 384
CHIP = CHIPS["tpu-v4"]
MESH, FLAT = {"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2}


def problem_of(config: ModelConfig, phase: Phase, mesh=FLAT, **stored) -> ServingProblem:
    return ServingProblem(Workload(config, CHIP, BATCH, LENGTH, phase=phase, source_length=SOURCE, **stored), mesh)


def check(found: ServingProblem, draws: int, folder, seed: str):
    """Check planned seconds, and bytes of arguments, of random layouts."""
    problem, rng, question = found.problem(), random.Random(seed), found.question
    for _ in range(draws):
        picks = drawn(problem, rng)
        at = [picks[option.name] for option in question.prices.choices]
        layout = layout_of(found.lines(picks), folder, tuple(question.mesh))
        wanted = planned_seconds(question.build, layout, question.mesh, CHIP)
        assert added(question.planned, at) == pytest.approx(wanted, rel=1e-6)
        mesh = jax.sharding.AbstractMesh(tuple(question.mesh.values()), tuple(question.mesh))
        with jax.sharding.use_abstract_mesh(mesh):
            arguments = jax.tree.leaves(question.build(layout, mesh)[1:])
        held = sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arguments)
        assert added(question.spread(question.stored), at) == held


def added(tables, picks):
    return sum(float(table[tuple(picks[number] for number in of)]) for of, table in tables)


STORED = {"as computed": {}, "int8": {"weights": "int8", "cache": "int8"}}


PROGRAMS = [(name, phase) for name in MODELS for phase in ("prefill", "decode")]
PROGRAMS += [(name, "encode") for name in ENCODER_DECODERS]


@pytest.mark.turns(1)
@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
@pytest.mark.parametrize(("name", "phase"), PROGRAMS)
def test_a_layout_costs_what_its_program_is_traced_to(name, phase, stored, tmp_path):
    check(problem_of(MODELS[name], phase, **stored), 2, tmp_path, phase)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MESH, FLAT], ids=["three axes", "two axes"])
@pytest.mark.parametrize(("name", "phase"), PROGRAMS)
def test_many_layouts_cost_what_their_programs_are_traced_to(name, phase, mesh, tmp_path):
    check(problem_of(MODELS[name], phase, mesh), 12, tmp_path, "many")


def test_a_layout_has_the_lines_of_its_model_alone():
    """No line of cross-attention for a decoder; and for a program without logits the lines that every layout has."""
    for config, phase, cross in ((SERIAL, "decode", False), (T5, "encode", True)):
        found = problem_of(config, phase)
        lines = {(line.section, line.key) for line in found.lines(dict.fromkeys(found.choices, 0))}
        assert any(key.startswith("cross.") for _, key in lines) == cross
        assert ("", "output.logits") in lines
        assert (("cache", "attention.key") in lines) == (phase == "decode")


@pytest.mark.slow
def test_two_dimensional_weight_stationary_layouts_are_cheaper_for_few_tokens():
    """Pope et al., section 3.2.2: from 16 chips on, E and F are both sharded where few tokens are decoded."""
    wide = replace(PARALLEL, embed=18432, heads=48, head_size=256, feed_forward=73728)
    found = ServingProblem(Workload(wide, CHIP, 64, 2048, phase="decode"), {"x": 4, "y": 4, "z": 4})
    best = Candidate(found, 0.9 * CHIP.hbm_bytes).solve()
    (w_in,) = (line.text for line in found.lines(best.picks) if line.key == "ffn.w_in")
    assert all(gspmd.Spec.parse(w_in).axes)


def test_reading_weights_and_cache_decides_what_a_step_of_decoding_costs():
    """Each of them is read once: what is written into a cache, or read of a table, is a few rows."""
    few = replace(PARALLEL, embed=16384, feed_forward=65536)  # so that starting a product is little beside it
    found = ServingProblem(Workload(few, CHIP, 1, 8192, phase="decode"), {"x": 1})
    problem = found.problem()
    picks = dict.fromkeys(found.choices, 0)
    read = problem.bytes_of(picks) / CHIP.hbm_bandwidth
    # Products of one row read their weights at less than the full bandwidth; the cache is read at all of it.
    assert 0.95 * read < problem.cost(picks) < 1.1 * read / EFFICIENCIES[CHIP.name].read_efficiency


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "phase", "config"),
    [("gshard", "prefill", ROUTED), ("switch-expert-model", "decode", ROUTED), ("megatron-1d", "prefill", ROUTED),
     ("gshard", "decode", SHARED)],
)  # fmt: skip
def test_a_preset_costs_what_its_program_with_experts_is_traced_to(name, phase, config):
    of = Candidate(problem_of(config, phase, MESH), CHIP.hbm_bytes)
    question, layout = of.phase.question, Layout.load(name).phase(phase).lowered("blocking")
    found = picks_of(of, of.unlimited_search, layout.resolved(of.sizes, MESH))
    at = [found.picks[option.name] for option in question.prices.choices]
    assert added(question.planned, at) == pytest.approx(planned_seconds(question.build, layout, MESH, CHIP), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "shared", "shape", "block"),
    [(2, 0, MESH, "serial"), (1, 0, FLAT, "serial"), (2, 1, FLAT, "serial"), (2, 0, FLAT, "parallel")],
)
def test_random_layouts_of_the_space_generate_what_one_device_does(every, shared, shape, block, tmp_path):
    experts = MoEConfig(experts=8, every=every, router="top-k", shared=shared)
    config = replace(TINY, vocabulary=256, kv_heads=4, tied=False, moe=experts, block=block)

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


def test_experts_that_choose_among_tokens_are_refused():
    words = "cannot search layouts to serve this model: the experts of router expert-choice choose among tokens"
    with pytest.raises(PlanError, match=words):
        problem_of(replace(SERIAL, moe=MoEConfig(experts=8, router="expert-choice")), "decode")
