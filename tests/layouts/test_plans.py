"""Costs of the presets, against the papers' formulas with every (K-1)/K; none of them needs a permute."""

import copy
import re
from fractions import Fraction
from itertools import pairwise
from math import prod

import pytest

from gspmd.annotate import Spec
from gspmd.layouts import Layout, Ranking, presets, rank
from gspmd.layouts.ranking import equations
from gspmd.layouts.rules.alternatives import singles
from gspmd.ops._plan import plan

MESHES = ({"x": 4, "y": 4, "z": 4}, {"x": 2, "y": 4, "z": 8}, {"x": 3, "y": 2, "z": 2})
POPE = (
    "weight-stationary-1d",
    "weight-stationary-2d",
    "weight-gathered-x",
    "weight-gathered-xy",
    "weight-gathered-xyz",
)


def sent(devices: int) -> Fraction:
    """The share of the larger buffer that each of K devices sends: (K-1)/K."""
    return Fraction(devices - 1, devices)


def elements(name: str, tokens: int, e: int, f: int, mesh: dict[str, int], matrices_in: int) -> Fraction:
    """Elements that one device sends for a feed-forward block (Pope et al. 2022, section 3.2 and appendix A)."""
    n, x, matrices = prod(mesh.values()), mesh["x"], matrices_in + 1
    if name == "weight-stationary-1d":
        return 2 * tokens * e * sent(n)
    if name == "weight-stationary-2d":
        return Fraction(2 * tokens * e, x) * sent(n // x) + Fraction(matrices * tokens * f * x, n) * sent(x)
    gathered = prod(mesh[axis] for axis in name.removeprefix("weight-gathered-"))
    weights = Fraction(matrices * e * f * gathered, n) * sent(gathered)
    return weights + Fraction(2 * tokens * e, gathered) * sent(n // gathered)


def detours(name: str, sizes: dict[str, int], mesh: dict[str, int], gated: bool) -> Fraction:
    """Elements that weights send to come to one dimension, from where one gather over more rings brings them all.

    The papers gather one dimension after the other. An all-to-all of a shard over K devices, before, sends (K-1)/K of
    it and saves more time than it takes; the bytes that are gathered are the same.
    """
    plans = [plan(equation, sizes=sizes, mesh=mesh, via=via) for equation, via in equations(Layout.load(name), gated)]
    steps = [step for each in plans for step in each.steps if step.kind == "all-to-all"]
    shard = 2 * Fraction(sizes["E"] * sizes["F"], prod(mesh.values()))
    assert all(step.wire_bytes == shard * sent(prod(mesh[axis] for axis in step.axes)) for step in steps)
    assert not steps or name in ("weight-gathered-xy", "weight-gathered-xyz")
    return Fraction(sum(step.wire_bytes for step in steps), 2)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "swiglu"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m.values())))
@pytest.mark.parametrize("name", POPE)
def test_feed_forward_sends_what_the_formula_says(name, mesh, gated):
    sizes = {"B": 192, "L": 4, "E": 384, "F": 1536}
    block = equations(Layout.load(name), gated)
    total = sum(plan(equation, sizes=sizes, mesh=mesh, dtype="bfloat16", via=via).wire_bytes for equation, via in block)
    formula = elements(name, 192 * 4, 384, 1536, mesh, 2 if gated else 1)
    assert total == 2 * (formula + detours(name, sizes, mesh, gated))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "swiglu"])
def test_rank_goes_from_stationary_to_gathered_at_the_exact_crossings(gated):
    e, f, mesh, order = 18432, 73728, MESHES[0], POPE[1:]
    more = lambda name: detours(name, {"B": 64, "L": 1, "E": e, "F": f}, mesh, gated)  # noqa: E731
    for before, after in pairwise(order):
        at = _crossing(before, after, e, f, mesh, 2 if gated else 1, more)
        for tokens in (-(-at // 64) * 64 - 64, at // 64 * 64 + 64):  # the nearest that 64 chips divide, on each side
            sizes = {"B": tokens, "L": 1, "E": e, "F": f}
            ranked = rank(POPE, sizes=sizes, mesh=mesh, objective="wire_bytes", gated=gated)
            assert ranked[0].name == (before if tokens < at else after)
            assert [r.wire_bytes for r in ranked] == sorted(
                2 * (elements(name, tokens, e, f, mesh, 2 if gated else 1) + more(name)) for name in POPE
            )


def _crossing(first: str, second: str, e: int, f: int, mesh, matrices_in: int, more=lambda name: 0) -> Fraction:
    """The number of tokens at which two layouts send the same, `more` included: both costs are linear in it."""
    (a0, a1), (b0, b1) = (
        [elements(name, tokens, e, f, mesh, matrices_in) + more(name) for tokens in (0, 1)] for name in (first, second)
    )
    return (b0 - a0) / ((a1 - a0) - (b1 - b0))


def test_the_shares_leave_the_crossings_where_they_are_on_a_cube():
    """PaLM 540B's sizes on 4x4x4: every (K-1)/K telescopes, so that exact and approximate formulas cross alike."""
    exact = [_crossing(first, second, 18432, 73728, MESHES[0], 1) for first, second in pairwise(POPE[1:])]
    assert exact == [18_432, 73_728, 1_179_648]


def test_rank_by_seconds_and_layouts_that_do_not_fit():
    sizes = {"B": 1, "L": 2048, "E": 18432, "F": 73728}
    ranked = rank(presets(), sizes=sizes, mesh=MESHES[0])
    assert [r.seconds for r in ranked] == sorted(r.seconds for r in ranked)
    unfit = {r.name: r.reason for r in ranked if r.reason}
    assert "weight-gathered-xyz" in unfit
    assert "weight-stationary-2d" not in unfit
    assert unfit["weight-gathered-x"] == "dimension B has size 1, which mesh axis x (size 4) does not divide."
    assert str(ranked[-1]).endswith(f"does not fit: {ranked[-1].reason}")
    with pytest.raises(ValueError, match="cannot rank layouts by 'bytes'"):
        rank(presets(), sizes=sizes, mesh=MESHES[0], objective="bytes")


def test_a_ranking_is_short_by_itself_and_a_table_when_printed():
    sizes = {"B": 1, "L": 2048, "E": 18432, "F": 73728}
    ranked = rank(("zero-3", "megatron-1d"), sizes=sizes, mesh={"x": 1, "y": 4})
    assert repr(ranked) == "<Ranking of 2: megatron-1d, zero-3>"
    assert re.fullmatch(r"<Ranked 'megatron-1d': 113 MB sent [\d.]+ ms>", repr(ranked[0]))
    head, *rows = str(ranked).splitlines()
    assert head == "feed-forward block  B=1 L=2048 E=18432 F=73728  mesh x=1 y=4  bfloat16  tpu-v4  by seconds"
    assert [row.split()[0] for row in rows] == ["megatron-1d", "zero-3"]
    assert ranked._repr_html_().count("<tr>") == 3  # with the headings
    assert copy.deepcopy(Ranking([], "nothing")).title == "nothing"


def test_one_name_is_a_list_of_one():
    sizes, mesh = {"B": 8, "L": 16, "E": 64, "F": 128}, {"x": 2}
    for one in ("megatron-1d", Layout.load("megatron-1d")):
        assert [entry.name for entry in rank(one, sizes=sizes, mesh=mesh)] == ["megatron-1d"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": None}, "cannot rank None.\n  Give names of layouts"),
        ({"names": [None]}, "cannot load a layout from None."),
        ({"names": ["zer-3"]}, "no layout is called 'zer-3'.\n  Did you mean 'zero-3'?"),
        ({"sizes": None}, "cannot rank layouts without the size of B, L, E and F."),
        ({"sizes": {"B": 8, "L": 1, "E": 8}}, "cannot rank layouts without the size of F.\n  A feed-forward block has"),
        ({"sizes": {"B": 8, "L": 1, "E": 8, "F": "8"}}, "dimension F has size '8'."),
        ({"mesh": None}, "cannot read a mesh from None."),
        ({"dtype": "bf"}, "no dtype is called 'bf'."),
        ({"chip": None}, "no chip is called None."),
        ({"objective": None}, "cannot rank layouts by None."),
    ],
)
def test_what_cannot_be_ranked(change, message):
    asked = {"names": ["zero-3"], "sizes": {"B": 8, "L": 1, "E": 8, "F": 8}, "mesh": {"x": 2}} | change
    with pytest.raises(ValueError) as error:
        rank(asked.pop("names"), **asked)
    assert message in str(error.value)


# -- no permutes ------------------------------------------------------------------------------------------------------


def model_equations(layout: Layout):
    """Every equation of a transformer with this layout, with its via: forward; the planner adds the gradients."""
    at, ffn, moe, out = (layout.section(part) for part in ("attention", "ffn", "moe", "output"))
    heads = at.via("residual, (w_q, w_k, w_v) -> (query, key, key)")
    yield f"{at.residual}, ({at.w_q}, {at.w_k}, {at.w_v}) -> ({at.query}, {at.key}, {at.key})", heads
    yield f"{at.query}, {at.w_o} -> {at.residual}", at.out_via
    yield from ((str(equation), via) for equation, via in equations(layout, gated=True))
    yield f"{ffn.hidden}, {ffn.w_out} + {at.query}, {at.w_o} -> {ffn.residual}", f"{ffn.out_via} + {at.out_via}"
    sequences = Spec.parse(moe.groups).rename({"G": "B"})
    yield from _there_and_back(ffn.residual, str(sequences))
    yield from _there_and_back(moe.dispatched, moe.expert_input)
    yield f"{moe.groups}, {moe.router} -> {Spec.parse(moe.groups).without('E')}X", None
    yield f"{moe.expert_input}, ({moe.w_in}, {moe.w_gate}) -> ({moe.hidden}, {moe.hidden})", moe.in_via
    yield f"{moe.hidden}, {moe.w_out} -> {moe.expert_input}", moe.out_via
    yield f"{ffn.residual}, {out.table} -> {out.logits}", out.in_via


def _there_and_back(here: str, there: str):
    if here != there:
        yield f"{here} -> {there}", None
        yield f"{there} -> {here}", None


def kinds(planned) -> list[str]:
    return [step.kind for step in planned.steps]


TINY = {"B": 16, "L": 32, "E": 96, "F": 192, "H": 16, "K": 16, "D": 16, "V": 256, "X": 16, "C": 10, "G": 16}
PALM = {"B": 512, "L": 128, "E": 18432, "F": 73728, "H": 64, "K": 64, "D": 256, "V": 262144, "X": 64, "C": 8, "G": 512}


@pytest.mark.parametrize("devices", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 16))])
@pytest.mark.parametrize("name", presets())
def test_no_plan_contains_a_permute(name, devices):
    layout = Layout.load(name)
    mesh = layout.mesh_for(devices)
    for equation, via in model_equations(layout):
        planned = plan(equation, sizes=TINY, mesh=mesh, dtype="float32", via=via)
        for each in (planned, *planned.gradients):
            assert "collective-permute" not in kinds(each), str(each)


@pytest.mark.parametrize("name", [name for name in presets() if len([*singles(Layout.load(name))]) > 1])
def test_no_alternative_of_serving_needs_a_permute(name):
    phases = [Layout.load(name).phase(phase) for phase in ("prefill", "decode")]
    assert phases[0].table == phases[1].table
    for layout in singles(phases[1]):
        mesh = {"x": 2, "y": 2, "z": 2}
        for equation, via in [*model_equations(layout)][:2]:
            planned = plan(equation, sizes=TINY | {"L": 1}, mesh=mesh, dtype="float32", via=via)
            assert "collective-permute" not in kinds(planned), str(planned)


@pytest.mark.parametrize("length", [1, pytest.param(2048, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", presets())
def test_no_plan_contains_a_permute_at_the_papers_scale(name, length):
    layout = Layout.load(name) if length > 1 else Layout.load(name).one_position()
    for equation, via in model_equations(layout):
        planned = plan(equation, sizes=PALM | {"L": length}, mesh=MESHES[0], via=via)
        for each in (planned, *planned.gradients):
            assert "collective-permute" not in kinds(each), str(each)


@pytest.mark.parametrize("name", presets())
def test_tokens_travel_by_one_all_to_all_each_way(name):
    moe = Layout.load(name).section("moe")
    for there, back in ((moe.dispatched, moe.expert_input), (moe.expert_input, moe.dispatched)):
        steps = plan(f"{there} -> {back}", sizes=TINY, mesh={"x": 2, "y": 2, "z": 2}).steps
        assert [s.kind for s in steps if s.is_collective] == (["all-to-all"] if there != back else [])


def test_replicated_and_data_parallel_send_nothing_forward():
    for name in ("replicated", "data-parallel"):
        layout = Layout.load(name)
        for equation, via in model_equations(layout):
            assert plan(equation, sizes=TINY, mesh=layout.mesh_for(8), via=via).wire_bytes == 0, equation


def test_zero_3_gathers_weights_only():
    layout = Layout.load("zero-3")
    for equation, via in model_equations(layout):
        if "X" not in equation:
            steps = _steps(layout, equation, via)
            assert {step.kind for step in steps} == {"all-gather"}, equation
            assert not any("B" in step.before.dims for step in steps), equation


def _steps(layout: Layout, equation: str, via: str | None):
    planned = plan(equation, sizes=TINY, mesh=layout.mesh_for(8), via=via)
    return [step for step in planned.steps if step.is_collective]
