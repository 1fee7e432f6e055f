"""Walks: every shard comes to every device once, from neighbour to neighbour, whatever the sizes of the axes."""

from collections import Counter
from itertools import product
from math import prod

import pytest

from gspmd.lowerings.looped.rings import shard_parts, walk
from gspmd.planner.overlap import SCHEDULES
from gspmd.planner.spans import cut

MESHES = [{"x": n} for n in range(1, 9)] + [
    {"x": 4, "y": 2},
    {"x": 3, "y": 2},
    {"x": 5, "y": 3},
    {"x": 4, "y": 2, "z": 1},
    {"x": 4, "y": 2, "z": 2},
    {"x": 4, "y": 4, "z": 4},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("schedule", "sign"), [(name, sign) for name in SCHEDULES for sign in (1, -1)])
def test_every_shard_arrives_once(mesh, schedule, sign):
    hops = walk(tuple(mesh), mesh, schedule, sign)
    places = [tuple(hop.offset.get(axis, 0) % size for axis, size in mesh.items()) for hop in hops]
    assert sorted(places) == sorted(set(product(*map(range, mesh.values()))) - {(0,) * len(mesh)})
    assert len(hops) == prod(mesh.values()) - 1


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_hop_goes_on_from_one_before_it_to_a_neighbour(mesh, schedule):
    hops = walk(tuple(mesh), mesh, schedule)
    for number, hop in enumerate(hops, 1):
        assert hop.source < number
        before = hops[hop.source - 1].offset if hop.source else {}
        assert {**before, hop.axis: before.get(hop.axis, 0) + hop.by} == hop.offset


@pytest.mark.parametrize("size", range(1, 9))
def test_pairs_share_the_ring_and_an_even_one_sends_one_more_ahead(size):
    ways = Counter(hop.by for hop in walk("x", {"x": size}, "paired"))
    assert (ways[1], ways[-1]) == (size // 2, (size - 1) // 2)  # ⌈(K-1)/2⌉ and ⌊(K-1)/2⌋
    waves = Counter(hop.wave for hop in walk("x", {"x": size}, "paired"))
    assert len(waves) == size // 2


def test_halves_go_opposite_ways():
    ways = [walk(part.axes, {"x": 5}, part.schedule, part.sign) for part in shard_parts("x", "halves")]
    assert [{hop.by for hop in hops} for hops in ways] == [{1}, {-1}]
    assert [len(hops) for hops in ways] == [4, 4]


def test_turns_load_the_links_of_all_axes_alike():
    mesh, busy = {"x": 4, "y": 4, "z": 4}, Counter()
    for part in shard_parts("xyz", "halves", 3):
        busy.update((hop.axis, hop.by) for hop in walk(part.axes, mesh, part.schedule, part.sign))
    assert set(busy.values()) == {63}
    assert len(busy) == 6


@pytest.mark.parametrize(("size", "number"), [(8, 2), (5, 2), (7, 3), (1, 2), (2, 4), (6, 1)])
def test_parts_cover_a_size(size, number):
    found = cut(size, number)
    assert [start for start, _ in found] == [sum(n for _, n in found[:i]) for i in range(len(found))]
    assert sum(length for _, length in found) == size
    assert max(n for _, n in found) - min(n for _, n in found) <= 1
