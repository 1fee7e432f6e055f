"""The cost of a parallel block that is trained, against plans of its equations and `gspmd.trace` of whole steps."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from gspmd.annotate import PlanError
from gspmd.audit import topology
from gspmd.layouts import Layout
from gspmd.ops._plan import plan
from gspmd.search import Search
from gspmd_models.config import REMATS
from gspmd_models.remat.prediction import predicted
from gspmd_models.search.parts.ends import Stream
from gspmd_models.search.pipeline import StageProblem
from gspmd_models.search.training import TrainingProblem
from gspmd_models.search.workload import Workload
from tests.references.models import WIDE
from tests.search.layouts import drawn, layout_of
from tests.search.test_training import BATCH, CHIP, LENGTH, MESH, problem_of, traced

PARALLEL = replace(WIDE, block="parallel")


@cache
def one_layer(gated: bool, kv_heads: int) -> TrainingProblem:
    config = replace(PARALLEL, layers=1, kv_heads=kv_heads, activation="swiglu" if gated else "gelu")
    return problem_of(config, mesh={"x": 2, "y": 4})


@pytest.mark.parametrize(("gated", "kv_heads"), [(True, 16), (False, 1)])
def test_a_block_costs_what_the_plans_of_its_two_equations_say(gated, kv_heads):
    found = one_layer(gated, kv_heads)
    problem, rng, sizes = found.problem(), random.Random(kv_heads), found.costs.sizes
    for _ in range(15):
        picks = drawn(problem, rng)
        at = {name: options[picks[name]] for name, options in found.choices.items()}
        (qs, ks), (ins,), (os,), (outs,) = (
            found.vias[f"{name}_via"].via(picks[f"{name}_via"])
            for name in ("attention.in", "ffn.in", "attention.out", "ffn.out")
        )
        residual, heads, hidden = at["residual"], at["heads"], at["ffn.hidden"]
        weights = ("attention.w_q", "attention.w_k", "attention.w_o", "ffn.w_in", "ffn.w_out")
        w_q, w_k, w_o, w_in, w_out = (replace(at[name].spec, reduced=at[name].reduced) for name in weights)
        gates, comma = 1 + gated, ", ".join
        into = comma(map(str, [w_q, w_k, w_k, *[w_in] * gates]))
        made = comma(map(str, [heads.query, heads.key, heads.key, *[hidden] * gates]))
        pinned = comma(map(str, [qs.specs[1], *[ks.specs[1]] * 2, *[ins.specs[1]] * gates]))
        told = sum(s for n, s in problem.seconds_of(picks).items() if n.startswith(("block", "attention.", "ffn.")))
        wanted = 0.0
        for equation, via in [
            (f"{residual}, ({into}) -> ({made})", f"{qs.specs[0]}, ({pinned})"),
            (
                f"{hidden}, {w_out} + {heads.query}, {w_o} -> {residual}",
                f"{outs.specs[0]}, {outs.specs[1]} + {os.specs[0]}, {os.specs[1]}",
            ),
        ]:
            made_plan = plan(equation, sizes, found.costs.mesh, "bfloat16", CHIP, lowering="blocking", via=via)
            wanted += made_plan.seconds + sum(each.seconds for each in made_plan.gradients)
        assert told == pytest.approx(wanted, rel=1e-9, abs=1e-10)  # picoseconds are rounded in each table


def against_trace(remat: str, microbatches: int, draws: int, folder, **changes) -> None:
    pytest.importorskip("libtpu")  # what is merged and hoisted is the compiler's
    config, mesh = replace(PARALLEL, remat=remat, **changes), topology("tpu-v5p:2x2x2").mesh(MESH)
    found = problem_of(config, microbatches)
    problem, rng = found.problem(), random.Random(f"{remat} {microbatches} {changes}")
    for _ in range(draws):
        picks = drawn(problem, rng)
        layout = layout_of(found.lines(picks), folder)
        layout.check(config.sizes(BATCH, LENGTH), MESH)
        wanted = traced(config, layout, mesh, microbatches)
        assert problem.cost(picks) == pytest.approx(wanted, rel=1e-6)


BIASED = {"out_bias": True, "ffn_bias": True}
"""Both outputs, which are added: their gradients are one."""


@pytest.mark.parametrize(("remat", "changes"), [("dots-except-hidden", {}), ("full", BIASED)])
def test_a_layout_costs_what_its_training_step_is_traced_to(remat, changes, only_planned, tmp_path):
    against_trace(remat, 1, 1, tmp_path, **changes)


OTHERS = [{"kv_heads": 1}, {"kv_heads": 16, "activation": "gelu", "norm": "layer", "norm_bias": True}, BIASED]


@pytest.mark.slow
@pytest.mark.parametrize("changes", OTHERS, ids=["multiquery", "multihead", "biased"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("remat", REMATS)
def test_so_do_others_with_every_choice_of_remat(remat, microbatches, changes, only_planned, tmp_path):
    against_trace(remat, microbatches, 4, tmp_path, **changes)


def test_the_best_is_the_cheapest_of_many():
    found = problem_of(PARALLEL, mesh={"x": 2, "y": 4})
    problem, rng = found.problem(), random.Random(0)
    best = Search(problem).best()
    assert best.complete
    assert best.seconds == pytest.approx(problem.cost(best.picks))
    assert all(problem.cost(drawn(problem, rng)) >= best.seconds * (1 - 1e-12) for _ in range(100))


@pytest.mark.slow
def test_what_a_block_keeps_less_than_a_serial_one_is_what_is_predicted():
    mesh = topology("tpu-v5p:2x2x2").mesh(MESH)
    layout, residual = Layout.load("data-parallel"), BATCH * LENGTH // 8 * WIDE.embed * 2
    kept = {}
    for config in (WIDE, PARALLEL):
        for row in predicted(config, layout, mesh, BATCH, LENGTH, "bfloat16"):
            kept[config.block, row.remat] = row.layer_bytes
    for remat in REMATS:
        less = (kept["serial", remat] - kept["parallel", remat]) / residual
        held = []
        for config in (WIDE, PARALLEL):
            found = problem_of(replace(config, remat=remat))
            stream = next(part for part in found.parts if isinstance(part, Stream))
            held.append(stream.arrays[remat])
        assert held[0] - held[1] == round(less)
        assert abs(less - round(less)) < 0.02  # statistics of norms


def test_stages_of_parallel_blocks_are_refused():
    with pytest.raises(PlanError, match="cannot search stages of this model: its blocks are parallel"):
        StageProblem(Workload(PARALLEL, CHIP, BATCH, LENGTH), 2, {"x": 2, "y": 2})


def test_vias_meet_where_they_have_what_they_share_in_one_place():
    """All that do, and no others: outputs may be partial sums over different mesh axes."""
    found = one_layer(True, 16)
    tables = {term.name: term.seconds for term in found.terms}
    for ends, place in (
        ("in", lambda via: via.specs[0]),
        ("out", lambda via: (via.specs[0].axes_of("B"), via.specs[0].axes_of("L"), via.specs[1].axes_of("E"))),
    ):
        names = [f"{part}.{ends}_via" for part in ("attention", "ffn")]
        one, other = (np.isfinite(tables[f"{name}: block.{ends}put"]).astype(int) for name in names)
        first, second = ([place(via[0]) for via in map(found.vias[n].via, found.choices[n])] for n in names)
        assert (one.T @ other > 0).tolist() == [[here == there for there in second] for here in first]
