"""Moves: the cheapest chain, by brute force where there are few placements; the shortcut equal to the search."""

import heapq
import random
from itertools import pairwise, permutations, product
from math import prod

import pytest

from gspmd import PlanError, Spec
from gspmd.collectives.chips import chip
from gspmd.collectives.cost import collective_seconds, wire_bytes
from gspmd.collectives.moves import _Problem, cheapest, move, move_within, straight
from gspmd.collectives.plan import picoseconds, total_cost

V4 = chip("tpu-v4")
MESHES = ({"x": 2}, {"x": 4}, {"x": 2, "y": 2}, {"x": 3, "y": 2}, {"x": 4, "y": 2})


# -- every placement, and every way on ---------------------------------------------------------------------------------


def _placements(dims: str, shape, mesh) -> list[Spec]:
    """Every spec of these dimensions on this mesh that divides the shape."""
    found = []
    for places in product([*dims, "-", "+"], repeat=len(mesh)):
        held = {d: [a for a, p in zip(mesh, places) if p == d] for d in dims}
        partial = tuple(a for a, p in zip(mesh, places) if p == "+")
        for orders in product(*(permutations(held[d]) for d in dims)):
            spec = Spec(tuple(dims), orders, partial)
            if all(n % prod(mesh[a] for a in axes) == 0 for n, axes in zip(shape, orders)):
                found.append(spec)
    return found


def _towards(spec: Spec, dst: Spec, mesh, specs):
    """(kind, axes, spec afterwards): every collective after which some axis is nearer to where the target has it."""
    wanted = lambda group, d: list(group) == [a for a in dst.axes_of(d) if a in group]  # noqa: E731
    free = [a for a in mesh if a not in spec.used and a not in spec.partial]
    for d in spec.dims:
        held = spec.axes_of(d)
        for count in range(1, len(held) + 1):
            gathered, group = spec.with_axes(d, held[:-count]), held[-count:]
            yield "all-gather", group, gathered
            for other in spec.dims:
                if other != d and set(group) <= set(dst.axes_of(other)):
                    yield "all-to-all", group, gathered.with_axes(other, spec.axes_of(other) + group)
        for group in filter(lambda group: wanted(group, d), _ordered_subsets(free)):
            yield "slice", group, spec.with_axes(d, held + group)
        for group in filter(lambda group: wanted(group, d), _ordered_subsets(spec.partial)):
            left = [a for a in spec.partial if a not in group]
            yield "reduce-scatter", group, spec.with_partial(left).with_axes(d, held + group)
    for group in _ordered_subsets(spec.partial):
        if list(group) == sorted(group) and not set(group) & set(dst.partial):
            yield "all-reduce", group, spec.with_partial([a for a in spec.partial if a not in group])
    for other in specs:
        moved = [a for a in mesh if any((a in h or a in w) and h != w for h, w in zip(spec.axes, other.axes))]
        within = all(set(h) == set(w) for h, w in zip(spec.axes, other.axes))
        same = spec.partial == other.partial and _counts(spec, mesh) == _counts(other, mesh)
        if moved and same and (within or other == dst):
            yield "collective-permute", moved, other


def _counts(spec: Spec, mesh) -> list[int]:
    return [prod(mesh[a] for a in axes) for axes in spec.axes]


def _ordered_subsets(axes):
    return [order for count in range(1, len(axes) + 1) for order in permutations(axes, count)]


def _best(src: Spec, dst: Spec, shape, mesh, specs) -> tuple[int, int]:
    """Dijkstra without bounds or shortcuts: the least picoseconds, and the least bytes among those."""
    sizes = dict(zip(src.dims, shape))
    local = lambda s: 4 * prod(s.local_shape(sizes, mesh))  # noqa: E731
    fits = lambda s: all(sizes[d] % prod(mesh[a] for a in s.axes_of(d)) == 0 for d in s.dims)  # noqa: E731
    queue, done, number = [((0, 0), 0, src)], set(), 0
    while queue:
        cost, _, here = heapq.heappop(queue)
        if here == dst:
            return cost
        if here in done:
            continue
        done.add(here)
        for kind, axes, there in _towards(here, dst, mesh, specs):
            if there not in done and fits(there):
                buffer, number = max(local(here), local(there)), number + 1
                seconds = picoseconds(collective_seconds(kind, axes, mesh, buffer, V4))
                sent = wire_bytes(kind, prod(mesh[a] for a in axes), buffer)
                heapq.heappush(queue, ((cost[0] + seconds, cost[1] + sent), number, there))
    raise AssertionError(f"no way from {src} to {dst}")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("scale", [1, 1 << 20])
def test_no_chain_of_collectives_is_cheaper(mesh, scale):
    shape = (12, 4 * scale)
    specs = _placements("AB", shape, mesh)
    pairs = [(s, d) for s in specs for d in specs if set(d.partial) <= set(s.partial)]
    for src, dst in random.Random(0).sample(pairs, min(len(pairs), 150)):
        steps = move(src, dst, dict(zip("AB", shape)), mesh, 4, V4)
        message = f"{src} -> {dst}: {[(s.kind, s.axes) for s in steps]}"
        assert total_cost(steps)[:2] <= _best(src, dst, shape, mesh, specs), message


@pytest.mark.parametrize("mesh", [{"x": 4, "y": 2, "z": 2}, {"x": 3, "y": 2, "z": 4}], ids=str)
def test_where_there_is_nothing_to_search_the_search_agrees(mesh):
    rng, met = random.Random(0), 0
    for _ in range(3000):
        src, dst = (_random_spec(rng, mesh) for _ in range(2))
        dst = dst.with_partial([a for a in src.partial if a not in dst.used and rng.random() < 0.3])
        shape = tuple(rng.choice([48, 48 << 16]) for _ in src.dims)
        problem = _Problem(dst, shape, mesh, 4, V4)
        start = (src.axes, frozenset(src.partial))
        shortcut = straight(problem, start)
        if shortcut:
            met += 1
            searched = cheapest(problem, start)
            assert _cost(problem, shortcut) == _cost(problem, searched), f"{src} -> {dst} of {shape}"
    assert met > 200


def _cost(problem: _Problem, path) -> tuple[int, int, int]:
    return total_cost(tuple(problem.step(("A", "B", "C"), *edge, "") for edge in path))


def _random_spec(rng: random.Random, mesh) -> Spec:
    held, partial = {d: [] for d in "ABC"}, []
    for axis in rng.sample(list(mesh), len(mesh)):
        place = rng.choice([*"ABC", "", "+"])
        if place == "+":
            partial.append(axis)
        elif place:
            held[place].append(axis)
    return Spec(tuple("ABC"), tuple(map(tuple, held.values())), tuple(partial))


def test_a_limit_ends_the_search_and_changes_no_answer():
    mesh, sizes = {"x": 4, "y": 2, "z": 2}, {"A": 48, "B": 48, "C": 1 << 20}
    rng = random.Random(1)
    for _ in range(300):
        src, dst = _random_spec(rng, mesh), _random_spec(rng, mesh).without_partial()
        spent = total_cost(move(src, dst, sizes, mesh, 2, V4, "told apart"))[0]
        for limit in (spent - 1, spent, spent + 1):
            within = move_within(limit, src, dst, sizes, mesh, 2, V4, f"{limit}")
            assert within is None or total_cost(within)[0] == spent
            assert within is not None or limit < spent


# -- by hand ----------------------------------------------------------------------------------------------------------

BY_HAND = [
    ("E_xyz -> E_x", [("all-gather", "yz")]),
    ("E_x -> E_xyz", [("slice", "yz")]),
    ("E_xyz -> E_yz", [("collective-permute", "xyz"), ("all-gather", "x")]),
    ("F_yz partialsum-x -> F_yzx", [("reduce-scatter", "x")]),
    ("F_yz partialsum-x -> F_yz", [("all-reduce", "x")]),
    ("F partialsum-xy -> F_x partialsum-y", [("reduce-scatter", "x")]),
    ("B_xE -> BE_x", [("all-to-all", "x")]),
    ("BE_xy -> B_yE_x", [("all-to-all", "y")]),
    ("BE_xy -> B_xyE", [("all-to-all", "xy")]),
    ("E_xy -> E_yx", [("collective-permute", "xy")]),
    ("E_x -> E_y", [("slice", "y"), ("collective-permute", "xy"), ("all-gather", "x")]),
    ("G_yxXCE -> G_yX_xCE", [("all-to-all", "x")]),
    ("G_xyXCE -> G_yX_xCE", [("collective-permute", "xy"), ("all-to-all", "x")]),
    ("B_xE_y -> B_xE_y", []),
]


@pytest.mark.parametrize(("equation", "steps"), BY_HAND)
def test_steps_by_hand(equation, steps):
    src, dst = map(Spec.parse, equation.split(" -> "))
    sizes = dict.fromkeys(src.dims, 1 << 24 // len(src.dims))
    moved = move(src, dst, sizes, {"x": 4, "y": 4, "z": 4}, 4, V4)
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
        str(error.value) == "cannot move 'B_x' to 'B partialsum-x'\n  nothing makes the partial sum over mesh axis x."
    )


def test_sizes_that_divide_on_no_way():
    with pytest.raises(PlanError, match="divides the sizes"):
        move(Spec.parse("A"), Spec.parse("A_x"), {"A": 3}, {"x": 2}, 4, V4)
