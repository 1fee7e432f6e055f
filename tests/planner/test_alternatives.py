"""The ranked alternatives to a plan, against every `via` that the notation can write, planned one by one."""

from itertools import permutations, product

import pytest

import gspmd
from gspmd import PlanError, Spec, SpecError
from gspmd.planner.steps import total_cost

MESH = {"x": 2, "y": 4}
SIZES = {"B": 64, "E": 4096, "F": 8192, "D": 512}


def _plan(equation: str, via: str | None = None, mesh=MESH) -> gspmd.Plan:
    return gspmd.plan(equation, SIZES, mesh, lowering="blocking", via=via)


def _specs(dims: tuple[str, ...], mesh) -> list[Spec]:
    """List every spec of these dimensions without a partial sum."""
    found = []
    for homes in product((None, *dims), repeat=len(mesh)):
        held = {dim: [axis for axis, home in zip(mesh, homes) if home == dim] for dim in dims}
        found += [Spec(dims, axes) for axes in product(*(permutations(held[dim]) for dim in dims))]
    return found


def _choice(specs) -> frozenset:
    """Return which dimension each axis shards, without the order of axes."""
    return frozenset((dim, axis) for spec in specs for dim, axes in zip(spec.dims, spec.axes) for axis in axes)


@pytest.mark.parametrize(
    "equation", ["BE_xy, E_xF_y -> BF_yx", "B_xE_y, EF_xy -> B_xF", "B_xyE, EF_xy -> B_xyF", "BE_y, EF -> BF_x"]
)
def test_a_product_s_alternatives_are_the_best_of_every_via(equation):
    operands = [operand.specs[0].dims for operand in _plan(equation).equation.operands]
    best: dict[frozenset, tuple] = {}
    for pair in product(*(_specs(dims, MESH) for dims in operands)):
        try:
            plan = _plan(equation, ", ".join(map(str, pair)))
        except (PlanError, SpecError):  # The operands shard a common dimension differently, or reuse an axis.
            continue
        choice = _choice(pair)
        best[choice] = min(best.get(choice, (float("inf"),)), total_cost(plan.steps))
    ranked = _plan(equation).alternatives(1000)
    assert [total_cost(each.steps) for each in ranked] == sorted(best.values())
    for each in ranked:
        choice = _choice(spec for move in each.routine.moves for spec in [move.spec])
        assert total_cost(each.steps) == best[choice]


EQUATIONS = [
    "BE_xy, E_xF_y -> BF_yx",
    "BE_xy, (E_xF_y, E_xF_y) -> (BF_yx, BF_yx)",
    "(E_xF_y, E_xF_y), BE_xy -> (BF_yx, BF_yx)",
    "BF_y, F_yE_x + BD_y, D_yE_x -> BE_xy",
    "B_xyE -> BE_xy",
    "BE partialsum-x, EF_xy -> BF_xy",
    "B_xF -> F_y",
]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_the_first_alternative_is_the_plan(equation):
    plan = _plan(equation)
    ranked = plan.alternatives(6)
    assert ranked[0].routine == plan.routine
    assert ranked[0].seconds == plan.seconds
    costs = [total_cost(each.steps) for each in ranked]
    assert costs == sorted(costs)
    assert len({each.routine for each in ranked}) == len(ranked)


@pytest.mark.parametrize("equation", [each for each in EQUATIONS if "+" not in each])
def test_its_via_gives_the_same_plan(equation):
    for each in _plan(equation).alternatives(6):
        again = _plan(equation, each.via)
        assert again.routine == each.routine
        assert again.gradients[0].seconds == each.gradients[0].seconds


def test_the_alternatives_of_a_sum_are_the_placements_in_which_it_is_added():
    equation = "BF_y, F_yE_x + BD_y, D_yE_x -> BE_xy"
    best = {}
    for spec in _specs(("B", "E"), MESH):
        for partial in ((), ("x",), ("y",), ("x", "y")):
            if not set(partial) & spec.used:
                added = spec.with_partial(partial)
                try:
                    apart = [_plan(f"{pair} -> {added}") for pair in ("BF_y, F_yE_x", "BD_y, D_yE_x")]
                    parts = [*apart, _plan(f"{added} -> BE_xy")]
                except PlanError:  # Nothing makes the partial sum.
                    continue
                cost = tuple(map(sum, zip(*(total_cost(part.steps) for part in parts))))
                choice = _choice([spec]), partial
                best[choice] = min(best.get(choice, (float("inf"),)), cost)
    assert [total_cost(each.steps) for each in _plan(equation).alternatives(1000)] == sorted(best.values())


def test_a_move_s_alternatives_differ_in_their_collectives():
    ranked = _plan("B_xyE -> BE_xy").alternatives(5)
    assert len({tuple(step.name for step in each.steps) for each in ranked}) == len(ranked) == 5
    by_way = {total_cost(_plan("B_xyE -> BE_xy", str(spec)).steps) for spec in _specs(("B", "E"), MESH)}
    assert {total_cost(each.steps) for each in ranked} <= by_way
    assert total_cost(ranked[0].steps) == min(by_way)


def test_a_pinned_plan_has_the_alternatives_of_the_free_one():
    free, pinned = _plan("BE_xy, E_xF_y -> BF_yx"), _plan("BE_xy, E_xF_y -> BF_yx", "BE, EF_xy")
    assert [each.via for each in pinned.alternatives(5)] == [each.via for each in free.alternatives(5)]


def test_results_that_no_common_placement_gives_have_only_their_plan():
    equation = "BE_xy, (E_xyF, E_xyF) -> (BF partialsum-x, BF partialsum-y)"
    plan = _plan(equation)
    assert [each.routine for each in plan.alternatives()] == [plan.routine]


def test_a_gradient_has_none_of_its_own():
    with pytest.raises(PlanError, match=r"cannot list alternatives to 'BF_yx, E_xF_y -> BE_xy', a gradient"):
        _plan("BE_xy, E_xF_y -> BF_yx").gradients[0].alternatives()


@pytest.mark.parametrize("count", [0, -1, 2.0, "3", None, True])
def test_a_count_is_a_positive_whole_number(count):
    with pytest.raises(PlanError, match="Give a positive whole number"):
        _plan("BE_xy, E_xF_y -> BF_yx").alternatives(count)
