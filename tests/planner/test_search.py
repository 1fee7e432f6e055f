"""The search against brute force: every placement of every operand, every chain in and out."""

import random

import pytest

import gspmd
from gspmd import PlanError
from gspmd.hardware.chips import chip
from gspmd.planner.graph import paths
from gspmd.planner.graph.transitions import Arcs
from gspmd.planner.steps import total_cost
from tests.references import brute
from tests.references.volume import scaled

CHIPS = ("tpu-v4", "h100", "tpu-v5e")
MESHES = ({"x": 2, "y": 2}, {"x": 3, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 4, "z": 4})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_products(mesh):
    _agree_on_random(mesh, 20 if len(mesh) < 3 else 6, members=1)


@pytest.mark.parametrize("mesh", MESHES[:3], ids=str)
def test_groups(mesh):
    _agree_on_random(mesh, 8 if len(mesh) < 3 else 3, members=2)


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_at_length(mesh, members):
    _agree_on_random(mesh, scaled(50 if members == 1 else 16), members, seed=1)


@pytest.mark.parametrize("sizes", [{"B": 4, "L": 64}, {"B": 64, "L": 2048}, {"B": 2, "L": 1}], ids=str)
@pytest.mark.parametrize("equation", ["BLE_xy, E_xF_y -> BLF_yx", "BLF_y, F_yE_x -> BLE_xy", "BLE_xy, EF -> BLF_yx"])
def test_batch_and_length(equation, sizes):
    """Either may be sharded on the way, and neither in the equation."""
    _agree(equation, {**sizes, "E": 512, "F": 2048}, {"x": 2, "y": 4}, "tpu-v4")


@pytest.mark.parametrize(
    "equation",
    [
        "BE_xyz, E_xF_yz -> BF_yzx",
        "BF_yz, F_yzE_x -> BE_xyz",
        "B_xE_yz, E_xF_yz -> B_xF_yz",
        "B_xyzE, E_xF_yz -> B_xyzF",
        "BE_x, E_yzF -> B_yF_zx",
    ],
)
@pytest.mark.parametrize("tokens", [64, 1 << 20])
def test_three_axes(equation, tokens):
    _agree(equation, {"B": tokens, "E": 512, "F": 2048}, {"x": 2, "y": 2, "z": 4}, "tpu-v4")


def _agree_on_random(mesh, cases: int, members: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(cases):
        _agree(*brute.random_product(rng, mesh, members), mesh, rng.choice(CHIPS))


def _agree(equation: str, sizes, mesh, name: str) -> None:
    best = brute.cheapest_product(equation, sizes, mesh, "bfloat16", chip(name))
    message = f"{equation} {sizes} {mesh} {name}"
    if best == brute.FAR:
        with pytest.raises(PlanError, match="no steps bring"):
            gspmd.plan(equation, sizes, mesh, chip=name, lowering="blocking")
    else:
        plan = gspmd.plan(equation, sizes, mesh, chip=name, lowering="blocking")
        assert total_cost(plan.steps) == best, f"{message}\n{plan}"


# -- sums and gradients: wherever their products are added -------------------------------------------------------------

SUMS = [
    ("BF_y, F_yE_x + BH_y, H_yE_x -> BE_xy", {"x": 2, "y": 2}),
    ("BF_yx, F_yE + BH_x, H_xE_y -> B_xE_y", {"x": 3, "y": 2}),
    ("B_xF_y, FE_y + BH_yx, HE -> BE_x", {"x": 2, "y": 2}),
]


@pytest.mark.parametrize(("equation", "mesh"), SUMS)
@pytest.mark.parametrize("tokens", [6, 6 << 14])
def test_sums(equation, mesh, tokens):
    """Every placement in which the terms can be added: each brought there for itself, their sum settled from there."""
    sizes, dtype = {"B": tokens, "E": 96, "F": 192, "H": 48}, "bfloat16"
    terms, output = equation.split(" -> ")
    output = gspmd.Spec.parse(output)
    made = brute.tensor(output.dims, sizes, mesh, dtype, chip("tpu-v4"), mesh)
    rest = made.costs_to(brute.placement(output))
    best = min(
        brute.plus(settle, *(_term(term, place, sizes, mesh, dtype, output) for term in terms.split(" + ")))
        for place, settle in rest.items()
    )
    assert total_cost(gspmd.plan(equation, sizes, mesh, lowering="blocking").steps) == best


def _term(term: str, place, sizes, mesh, dtype: str, output) -> brute.Cost:
    common = gspmd.Spec(output.dims, place[0], tuple(place[1]))
    return brute.cheapest_product(f"{term} -> {common}", sizes, mesh, dtype, chip("tpu-v4"))


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"x": 3, "y": 2}], ids=str)
@pytest.mark.parametrize("equation", ["BE_xy, E_xF_y -> BF_yx", "B_xE_y, E_yF -> BF_x", "BE_x, EF_y -> BF_xy"])
def test_gradients(equation, mesh):
    """The gradients of a product are a group: the cotangent meets what was kept of the operands."""
    sizes = {"B": 24, "E": 96, "F": 48}
    plan = gspmd.plan(equation, sizes, mesh, lowering="blocking")
    left, right = plan.equation.operands[0].specs[0], plan.equation.operands[1].specs[0]
    group = f"{plan.equation.outputs[0]}, ({plan.kept[1]}, {plan.kept[0]}) -> ({left}, {right})"
    assert total_cost(plan.backward.steps) == brute.cheapest_product(group, sizes, mesh, "bfloat16", chip("tpu-v4"))


@pytest.mark.parametrize("sizes", [{"B": 24, "E": 96, "F": 48}, {"B": 3 << 14, "E": 96, "F": 48}], ids=str)
def test_gradients_of_a_group(sizes):
    """Both members contribute to the shared operand's: added wherever that is cheapest, settled from there.

    A move that both contributions need is made once, so the routine may cost less than its two searches.
    """
    mesh, row = {"x": 2, "y": 2}, chip("tpu-v4")
    plan = gspmd.plan("BE_xy, (EF_y, E_xF) -> (BF_y, BF_yx)", sizes, mesh, lowering="blocking")
    shared, (one, two) = plan.equation.operands[0].specs[0], plan.equation.operands[1].specs
    kept = {move.source: spec for move, spec in zip(plan.routine.moves, plan.kept)}
    rest = brute.tensor(shared.dims, sizes, mesh, "bfloat16", row, mesh).costs_to(brute.placement(shared))

    def through(place) -> brute.Cost:
        common = gspmd.Spec(shared.dims, place[0], tuple(place[1]))
        members = [
            f"{output}, ({kept[number]}, {kept[0]}) -> ({common}, {weight})"
            for number, weight, output in zip((1, 2), (one, two), plan.equation.outputs)
        ]
        costs = (brute.cheapest_product(member, sizes, mesh, "bfloat16", row) for member in members)
        return brute.plus(rest[place], *costs)

    assert total_cost(plan.backward.steps) <= min(map(through, rest))


@pytest.mark.parametrize(
    ("equation", "mesh", "limit"),
    [
        ("B_wLE_xyz, E_xH_yzD -> B_wLH_yzxD", {"w": 2, "x": 4, "y": 4, "z": 4}, 700_000),
        ("B_vwLE_xyz, E_xH_yzD -> B_vwLH_yzxD", {"v": 2, "w": 2, "x": 4, "y": 4, "z": 4}, 10_000_000),
    ],
    ids=["four axes", "five axes"],
)
def test_a_plan_looks_at_few_arcs(monkeypatch, equation, mesh, limit):
    """Planning takes its time for arcs of all rounds of all tensors; the limits are 15% above the counts."""
    looked_at = []
    relax = Arcs.relax

    def counted(arcs, *given):
        looked_at.append(len(arcs.tail))
        return relax(arcs, *given)

    monkeypatch.setattr(Arcs, "relax", counted)
    paths.forget()  # and no other test plans these sizes
    gspmd.plan(equation, {"B": 512, "L": 2176, "E": 18432, "H": 64, "D": 264}, mesh, lowering="blocking")
    assert 0 < sum(looked_at) <= limit
