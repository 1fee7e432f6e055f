"""Moves: the cheapest chain by brute force, the properties of a cost, chains by hand, and permutes as they run."""

import random
from itertools import pairwise
from math import prod

import pytest

from gspmd import PlanError, Spec
from gspmd.hardware.chips import chip
from gspmd.lowerings.blocking.collectives import permutation
from gspmd.planner.graph.resharding import move
from gspmd.planner.steps import total_cost
from tests.references import brute
from tests.references.volume import scaled

V4 = chip("tpu-v4")
CHIPS = ("tpu-v4", "h100", "tpu-v5e")
MESHES = ({"x": 2, "y": 2}, {"x": 3, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 4, "z": 4})


# -- the cheapest chain ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_chain_of_collectives_is_cheaper(mesh):
    _agree(mesh, 80 if len(mesh) < 3 else 30, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_chain_of_collectives_is_cheaper_at_length(mesh):
    _agree(mesh, scaled(250), seed=1)


def _agree(mesh, cases: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(cases):
        (src, dst, sizes), row = brute.random_move(rng, mesh), chip(rng.choice(CHIPS))
        steps = move(src, dst, sizes, mesh, 2, row)
        message = f"{src} -> {dst} {sizes} on {row.name}: {[(s.kind, s.axes) for s in steps]}"
        assert total_cost(steps) == brute.cheapest_move(src, dst, sizes, mesh, "bfloat16", row), message
        assert [step.before for step in steps] + [dst] == [src] + [step.after for step in steps], message


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_two_moves_never_beat_one(mesh):
    rng = random.Random(2)
    for _ in range(100):
        (src, between, sizes), row = brute.random_move(rng, mesh), chip(rng.choice(CHIPS))
        dst = brute.random_spec(rng, src.dims, mesh, between.partial)
        if brute.divides(dst, sizes, mesh):
            straight, there, on = (
                total_cost(move(*ends, sizes, mesh, 2, row)) for ends in ((src, dst), (src, between), (between, dst))
            )
            assert straight <= brute.plus(there, on), f"{src} -> {dst} by {between} {sizes} on {row.name}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_larger_tensor_never_moves_sooner(mesh):
    """The tensors divide alike: a larger one that divides in more ways has more chains to choose from."""
    rng = random.Random(3)
    for _ in range(100):
        (src, dst, sizes), row = brute.random_move(rng, mesh), chip(rng.choice(CHIPS))
        larger = {**sizes, (dim := rng.choice(src.dims)): sizes[dim] * rng.choice([5, 7, 35])}
        small, large = (total_cost(move(src, dst, each, mesh, 2, row)) for each in (sizes, larger))
        wide = total_cost(move(src, dst, sizes, mesh, rng.choice([3, 4, 8]), row))
        assert small[0] <= min(large[0], wide[0]), f"{src} -> {dst} {sizes} {larger} on {row.name}"


def test_the_detours_that_were_missed():
    """A move that gathered what it should have split first, and one that crossed where a permute is enough."""
    mesh, sizes = {"x": 4, "y": 4, "z": 4}, {"B": 4096, "E": 4096}
    cases = [("BE_z", "BE_zx", "B_zxE"), ("B_yE_x", "B_yE_xz", "B_xyE")]
    for src, between, dst in (map(Spec.parse, case) for case in cases):
        straight, there, on = (
            sum(step.seconds for step in move(*ends, sizes, mesh, 2, V4))
            for ends in ((src, dst), (src, between), (between, dst))
        )
        assert straight <= there + on


def test_a_maximum_is_never_reduce_scattered():
    """There is no such collective; and of a sum, the chain without one is not the cheapest."""
    src, dst, mesh = Spec.parse("B_y partialsum-x"), Spec.parse("B_y"), {"x": 4, "y": 4, "z": 4}
    summed = move(src, dst, {"B": 1 << 24}, mesh, 4, V4)
    largest = move(src, dst, {"B": 1 << 24}, mesh, 4, V4, reduce="max")
    assert "reduce-scatter" in {step.kind for step in summed}
    assert "reduce-scatter" not in {step.kind for step in largest}
    assert largest[-1].after == dst


# -- permutes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2, "z": 2}, {"y": 2, "x": 4, "z": 2}, {"x": 3, "z": 2}], ids=str)
def test_a_permute_brings_every_piece_where_it_belongs_along_its_own_axes(mesh):
    """Between all placements with pieces of one shape, some held by several devices: as planned, so lowered."""
    devices = [dict(zip(mesh, place)) for place in _coordinates(mesh)]
    whole = brute.Tensor((prod(mesh.values()),) * 2, mesh, 2, V4, {"x"})
    met = 0
    for here in whole.places:
        for kind, axes, there in whole._ways(here):
            if kind == "collective-permute" and (met := met + 1) % 3 == 0:
                before, after = (Spec(("A", "B"), axes, tuple(owed)) for axes, owed in (here, there))
                pairs = permutation(before, after, mesh)
                assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == list(range(len(devices)))
                for source, target in pairs:
                    sender, receiver = devices[source], devices[target]
                    assert _piece(before, sender, mesh) == _piece(after, receiver, mesh), f"{before} -> {after}"
                    assert all(sender[axis] == receiver[axis] for axis in mesh if axis not in axes)
    assert met > 3


def _coordinates(mesh) -> list[tuple[int, ...]]:
    places = [()]
    for size in mesh.values():
        places = [(*place, index) for place in places for index in range(size)]
    return places


def _piece(spec: Spec, device, mesh) -> list[int]:
    index = [device[axis] for axis in spec.partial]
    for axes in spec.axes:
        at = 0
        for axis in axes:
            at = at * mesh[axis] + device[axis]
        index.append(at)
    return index


# -- by hand ----------------------------------------------------------------------------------------------------------

BY_HAND = [
    ("E_xyz -> E_x", [("all-gather", "yz")]),
    ("E_x -> E_xyz", [("slice", "yz")]),
    ("E_xyz -> E_yz", [("collective-permute", "xyz"), ("all-gather", "x")]),
    ("E_xyz -> E_yxz", [("collective-permute", "xy")]),
    ("F_yz partialsum-x -> F_yzx", [("reduce-scatter", "x")]),
    ("F_yz partialsum-x -> F_yz", [("all-reduce", "x")]),
    ("F partialsum-xy -> F_x partialsum-y", [("reduce-scatter", "x")]),
    ("B_xE -> BE_x", [("all-to-all", "x")]),
    ("BE_xy -> B_yE_x", [("all-to-all", "y")]),
    ("BE_xy -> B_xyE", [("all-to-all", "xy")]),
    ("E_xy -> E_yx", [("collective-permute", "xy")]),
    ("E_x -> E_y", [("slice", "y"), ("collective-permute", "xy"), ("all-gather", "x")]),
    ("G_yxXCE -> G_yX_xCE", [("all-to-all", "x")]),
    ("G_xyXCE -> G_yX_xCE", [("all-to-all", "xy"), ("all-to-all", "y")]),
    ("B_xE_y -> B_xE_y", []),
]

WITH_A_FREE_AXIS = [
    ("BE_z -> B_zxE", [("slice", "x"), ("all-to-all", "zx")]),
    ("B_xE -> BE_x", [("all-to-all", "x")]),  # a gather over z and y, round one ring, takes longer than is saved
    ("B_yE_x -> B_xyE", [("slice", "z"), ("collective-permute", "xyz"), ("all-gather", "z")]),
    ("E_xy -> E_yx", [("slice", "z"), ("collective-permute", "xy"), ("all-gather", "z")]),
    ("E_x -> E_y", [("slice", "zy"), ("collective-permute", "xy"), ("all-gather", "zx")]),
    ("E_yz partialsum-x -> E_yz", [("all-reduce", "x")]),
    ("E_y partialsum-x -> E_y", [("slice", "z"), ("reduce-scatter", "x"), ("all-gather", "zx")]),
]


@pytest.mark.parametrize(("equation", "steps"), BY_HAND)
def test_steps_by_hand(equation, steps):
    """On a mesh of the axes that the move names."""
    _by_hand(equation, {axis: 4 for axis in "xyz" if axis in equation}, steps)


@pytest.mark.parametrize(("equation", "steps"), WITH_A_FREE_AXIS)
def test_an_axis_over_which_nothing_is_sharded_helps(equation, steps):
    """A replicated tensor is sliced for nothing: less travels the slow way."""
    _by_hand(equation, {"x": 4, "y": 4, "z": 4}, steps)


def _by_hand(equation: str, mesh, steps) -> None:
    src, dst = map(Spec.parse, equation.split(" -> "))
    sizes = dict.fromkeys(src.dims, (1 << 24) // len(src.dims) if len(src.dims) == 1 else 1 << 11)
    moved = move(src, dst, sizes, mesh, 4, V4)
    assert [(step.kind, "".join(step.axes)) for step in moved] == steps
    assert all(before.after == after.before for before, after in pairwise(moved))


def test_a_gather_of_everything_sends_all_but_ones_own():
    (step,) = move(Spec.parse("BE_xy"), Spec.parse("BE"), {"B": 8, "E": 64}, {"x": 4, "y": 2}, 2, V4)
    assert step.wire_bytes == 8 * 64 * 2 * 7 // 8
    assert (step.before, step.after, step.operand) == (Spec.parse("BE_xy"), Spec.parse("BE"), "")


def test_axes_of_size_one_are_no_steps():
    assert move(Spec.parse("B_xE_y"), Spec.parse("BE_xy"), {"B": 4, "E": 4}, {"x": 1, "y": 4}, 4, V4) == ()
    assert move(Spec.parse("B partialsum-x"), Spec.parse("B"), {"B": 4}, {"x": 1}, 4, V4) == ()


def test_nothing_makes_a_partial_sum():
    with pytest.raises(PlanError) as error:
        move(Spec.parse("B_x"), Spec.parse("B partialsum-x"), {"B": 4}, {"x": 2}, 4, V4)
    assert (
        str(error.value) == "cannot move 'B_x' to 'B partialsum-x'\n  the source is not a partial sum over mesh axis x."
    )


def test_sizes_that_divide_on_no_way():
    with pytest.raises(PlanError, match="do not divide the sizes"):
        move(Spec.parse("A"), Spec.parse("A_x"), {"A": 3}, {"x": 2}, 4, V4)
