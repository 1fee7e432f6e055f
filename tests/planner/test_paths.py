"""Limits of the planner's numbers and memory: large tensors, many mesh axes, many dimensions, much that is kept."""

import gc
import sys
import time

import numpy as np
import pytest

import gspmd
from gspmd.annotate import PlanError
from gspmd.hardware.chips import chip
from gspmd.planner.graph import paths, placements
from gspmd.planner.graph.placements import check_permutes, fitting
from gspmd.planner.graph.transitions import Graph
from tests.references import brute

V4 = chip("tpu-v4")


@pytest.mark.parametrize("exponent", [19, 24, 26, 36])
def test_a_large_move_is_counted_exactly_or_refused(exponent):
    sizes = {"B": 2**exponent, "E": 2**20}
    if exponent <= 24:
        plan = gspmd.plan("B_xE -> BE", sizes, {"x": 4}, dtype="bfloat16", lowering="blocking")
        assert plan.wire_bytes == 2 * 2**exponent * 2**20 * 3 // 4
    else:
        with pytest.raises(PlanError, match=rf"operand of {2**exponent}x{2**20}, .*: on every path a device\n"):
            gspmd.plan("B_xE -> BE", sizes, {"x": 4}, dtype="bfloat16")


def test_a_large_product_is_refused_and_names_the_operand():
    sizes = dict.fromkeys("BEF", 2**24)
    with pytest.raises(PlanError, match=r"cannot plan operand 1 of .* PB: on every path a device\n.*Check"):
        gspmd.plan("BE_x, E_xF -> BF", sizes, {"x": 4, "y": 4}, "float32")


def test_a_large_tensor_whose_pieces_are_small_is_planned():
    plan = gspmd.plan("B_xyE -> B_xE_y", {"B": 2**22, "E": 2**22}, {"x": 256, "y": 256}, "float32", lowering="blocking")
    assert [step.kind for step in plan.steps if step.is_collective] == ["all-to-all"]


def test_more_mesh_axes_than_can_be_searched_are_refused():
    mesh = dict.fromkeys("abcdefg", 2)
    with pytest.raises(PlanError, match=r"cannot plan on 7 mesh axes .*\n.*\n  Merge mesh axes"):
        gspmd.plan("BE_a -> BE", {"B": 1024, "E": 1024}, mesh)


TEN = "A_aB_bC_cD_dE_e, E_fD_gC_hF_iG_j -> A_jB_iF_hG_g"


@pytest.mark.parametrize("names", ["abcdefghij", "abcdefg", "abcdefghijklmnopqrstuvwxyz"])
def test_so_many_placements_that_listing_them_takes_minutes_are_refused_at_once(names):
    equation = TEN if len(names) == 10 else "A_aB_bC_cD_dE_e, E_fD_gF -> ABCF"
    began = time.process_time()
    with pytest.raises(
        PlanError, match=rf"(?s)cannot plan on {len(names)} mesh axes .*more than the limit.*Merge mesh"
    ):
        gspmd.plan(equation, dict.fromkeys("ABCDEFG", 16), dict.fromkeys(names, 2))
    assert time.process_time() - began < 3


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3, 2), (2, 2, 2, 2)])
@pytest.mark.parametrize("partial", [0, 0b11])
def test_permutes_are_at_least_as_many_as_counted_in_advance(monkeypatch, mesh, partial):
    allowed = tuple(fitting(size, mesh) for size in (8, 12, 4))
    permutes = len(Graph(mesh, allowed, partial).permutes.code)
    monkeypatch.setattr(placements, "MOST_PERMUTES", permutes)
    check_permutes(mesh, allowed, partial)
    monkeypatch.setattr(placements, "MOST_PERMUTES", permutes / 20)
    with pytest.raises(PlanError, match="for this tensor at least"):
        check_permutes(mesh, allowed, partial)


def test_pieces_of_many_dimensions_are_told_apart():
    """Their shapes as one number would outgrow 64 bits."""
    everywhere = tuple(frozenset(range(8)) for _ in range(24))
    graph = Graph((2, 3, 5), everywhere, 0)
    parts = graph.nodes.parts[graph.nodes.sequences.mask[graph.nodes.rows]]
    permutes = graph.permutes
    there = np.repeat(permutes._heads, permutes._counts)
    assert np.array_equal(parts[permutes.tail], parts[there])


def graphs() -> list[Graph]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is Graph]


@pytest.mark.slow
def test_what_is_kept_is_bounded(monkeypatch):
    paths.forget()
    before = graphs()  # what other tests hold
    monkeypatch.setattr(paths, "_MOST_ARCS", 20_000)
    mesh = (("x", 2), ("y", 3), ("z", 5))
    for number in range(40):  # of other divisors: a graph each
        paths.shortest_paths((2**number, 3 * 5 * 7**number), mesh, 2, V4, frozenset())
    arcs = [each.arcs for each in graphs() if not any(each is other for other in before)]
    assert 0 < sum(arcs) <= 20_000 + max(arcs)


def interrupted(call, moment):
    """Whether a call is interrupted as its Python function of this number begins, as a signal does; or over before."""
    calls = 0

    def trace(frame, event, value):
        nonlocal calls
        calls += 1
        if calls == moment:
            sys.settrace(before)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_moment_comes_out_and_spoils_nothing():
    """Interrupt the hash of a chip too: Python code that C calls, which might raise another error in its place."""
    paths.forget()
    mesh, sizes = (("x", 2), ("y", 2)), (8, 16, 32)
    latest = lambda: [paths.shortest_paths((size,), mesh, 2, V4, frozenset()) for size in sizes]  # noqa: E731
    wanted = [shortest.costs_from(0) for shortest in latest()]
    moment = 1
    while interrupted(latest, moment):
        assert [list(shortest.costs_from(0)) for shortest in latest()] == [list(costs) for costs in wanted]
        moment += 1
    assert moment > 10


def test_costs_that_are_kept_cannot_be_written_to():
    shortest = paths.shortest_paths((8, 8), (("x", 2),), 2, V4, frozenset())
    with pytest.raises(ValueError, match="read-only"):
        shortest.costs_from(0)[0] = 1


@pytest.mark.parametrize("count", [1, 3, 1 << 16])
@pytest.mark.parametrize("shape", [(8, 12), (4, 6, 8)])
def test_costs_of_placements_searched_together_are_those_of_dijkstra(monkeypatch, count, shape):
    mesh, dims = (("x", 2), ("y", 3), ("z", 2)), "ABC"[: len(shape)]
    paths.forget()
    shortest = paths.shortest_paths(shape, mesh, 2, V4, frozenset("xyz"))
    monkeypatch.setattr(paths, "TOGETHER", count * len(shortest.graph.coming.tail))
    known = brute.tensor(dims, dict(zip(dims, shape)), dict(mesh), "bfloat16", V4, tuple("xyz"))
    numbers = range(0, len(shortest.nodes), 5)
    places = [brute.placement(shortest.spec(tuple(dims), number)) for number in range(len(shortest.nodes))]
    for side, every in (("from", known.costs_from), ("to", known.costs_to)):
        for number, costs in zip(numbers, shortest.costs(side, numbers)):
            wanted = every(places[number])
            for place, cost in zip(places, costs):
                seconds, sent, steps = wanted.get(place, (np.inf, 0, 0))
                assert cost == complex(seconds, sent * paths.STEPS + steps)
