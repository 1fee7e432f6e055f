"""The cost of serving in a search, against `gspmd.trace` of the program that serves."""

import math
import random
from dataclasses import replace

import jax
import pytest

import gspmd
from gspmd.annotate import PlanError
from gspmd.audit import topology
from gspmd.hardware.chips import CHIPS
from gspmd.moe import MoEConfig
from gspmd.search import Search
from gspmd_models import ModelConfig
from gspmd_models.decoding import serving_program
from gspmd_models.search.costs import Costs
from gspmd_models.search.serving import ServingProblem
from tests.search.layouts import drawn, layout_of

SIZES = {"embed": 1024, "layers": 2, "heads": 16, "head_size": 64, "feed_forward": 4096, "vocabulary": 2048}
PARALLEL = ModelConfig(**SIZES, kv_heads=1, block="parallel", activation="swiglu")
SERIAL = ModelConfig(**SIZES, kv_heads=4, tied=False)
BATCH, LENGTH = 16, 256
MESH = {"x": 2, "y": 2, "z": 2}


@pytest.fixture
def only_planned(monkeypatch):
    """Costs without what no plan counts: passes over memory, and attention's own products."""
    monkeypatch.setattr(Costs, "in_memory", lambda *_: 0.0)
    monkeypatch.setattr("gspmd_models.search.parts.serving.CachedAttention._attended", lambda *_: 0.0)


@pytest.mark.turns(2)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("config", [PARALLEL, SERIAL], ids=["parallel", "serial"])
def test_a_layout_costs_what_its_program_is_traced_to(config, phase, only_planned, tmp_path):
    pytest.importorskip("libtpu")  # what is merged and hoisted is the compiler's
    mesh = topology("tpu-v4:2x2x2").mesh(MESH)
    found = ServingProblem(config, MESH, CHIPS["tpu-v4"], phase, BATCH, LENGTH)
    problem, rng = found.problem(), random.Random(f"{phase} {config.block}")
    for _ in range(2):
        picks = drawn(problem, rng)
        if "block.output" in picks:  # where two products are added: no line of a layout, and so the planner's to choose
            count = len(found.choices["block.output"])
            picks = min(({**picks, "block.output": n} for n in range(count)), key=problem.cost)
        layout = layout_of(found.lines(picks), tmp_path).lowered("blocking")
        with gspmd.lowering("blocking"), jax.set_mesh(mesh):
            program = serving_program(config, layout, mesh, phase, batch=BATCH, length=LENGTH, room=LENGTH)
            wanted = gspmd.trace(program.step, *program.arguments).seconds
        # A prompt's last position is picked by a product that the search leaves out.
        assert problem.cost(picks) == pytest.approx(wanted, rel=1e-6 if phase == "decode" else 5e-3)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("config", [PARALLEL, SERIAL], ids=["parallel", "serial"])
def test_biases_and_norms_of_heads_send_nothing_and_hold_float32(config, phase, only_planned, tmp_path):
    """Beside the model without them: they lie as what they are added to, without lines of their own."""
    pytest.importorskip("libtpu")
    vectors = {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "output_bias": True, "qk_norm": True}
    mesh, told, wanted, held, kept = topology("tpu-v4:2x2x2").mesh(MESH), [], [], [], []
    rng, picks = random.Random(phase), None
    for each in (replace(config, norm="layer"), replace(config, norm="layer", norm_bias=True, **vectors)):
        found = ServingProblem(each, MESH, CHIPS["tpu-v4"], phase, BATCH, LENGTH)
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
        kept.append(sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in weights))
    assert told[0] == told[1]
    assert wanted[0] == pytest.approx(wanted[1], rel=1e-12)
    assert held[1] - held[0] == kept[1] - kept[0] > 0


def test_two_dimensional_weight_stationary_layouts_are_cheaper_for_few_tokens():
    """Pope et al., section 3.2.2: from 16 chips on, E and F are both sharded where few tokens are decoded."""
    wide = ModelConfig(**SIZES | {"embed": 18432, "heads": 48, "head_size": 256, "feed_forward": 73728},
                       kv_heads=1, block="parallel", activation="swiglu")  # fmt: skip
    found = ServingProblem(wide, {"x": 4, "y": 4, "z": 4}, CHIPS["tpu-v4"], "decode", 64, 2048)
    best = Search(found.problem(0.9 * CHIPS["tpu-v4"].hbm_bytes)).best()
    w_in = found.choices["ffn.w_in"][best.picks["ffn.w_in"]].spec
    assert all(w_in.axes)


def test_experts_are_refused():
    config = ModelConfig(**SIZES, moe=MoEConfig(experts=8))
    with pytest.raises(PlanError, match="cannot search layouts to serve this model"):
        ServingProblem(config, MESH, CHIPS["tpu-v4"], "decode", BATCH, LENGTH)
