"""Layers come to the stages that need them, and their gradients back, in as few permutes as there can be."""

from collections import Counter

import jax
import numpy as np
import pytest

import gspmd
from gspmd.annotate import PlanError, SpecError
from gspmd.pipeline import in_rounds
from gspmd.pipeline.interleaving import matchings, routes


def test_matchings_are_as_few_as_the_most_edges_of_a_vertex():
    draw = np.random.default_rng(0)
    for _ in range(200):
        edges = draw.integers(0, draw.integers(1, 9), size=(draw.integers(0, 40), 2)).tolist()
        found = matchings(edges)
        assert sorted(number for each in found for number in each) == list(range(len(edges)))
        for each in found:
            for side in zip(*(edges[number] for number in each)):
                assert len(set(side)) == len(side), "a vertex has two edges in one matching"
        most = max((n for side in zip(*edges) for n in Counter(side).values()), default=0)
        assert len(found) == most


def test_every_chunk_comes_to_its_stage():
    for stages in range(1, 9):
        for rounds in range(1, 9):
            stored = np.arange(stages * rounds).reshape(stages, rounds)  # which chunk a stage has where
            stay, *permutes = routes(stages, rounds)
            needed = np.full((stages, rounds), -1)
            for chunk in (*stay, *(chunk for permute in permutes for chunk in permute)):
                needed[chunk.target, chunk.round] = stored[chunk.source, chunk.place]
            np.testing.assert_array_equal(needed, np.arange(stages * rounds).reshape(rounds, stages).T)
            assert all(chunk.source == chunk.target for chunk in stay)
            assert len(permutes) <= rounds - rounds // stages


@pytest.mark.parametrize(("stages", "rounds", "kind"), [(2, 2, "explicit"), (4, 3, "auto"), (1, 2, "explicit")])
def test_layers_and_their_gradients_are_those_of_a_reshape_and_the_bytes_planned(make_mesh, stages, rounds, kind):
    layers, draw = 2 * stages * rounds, np.random.default_rng(0).normal
    x, back = (draw(size=shape).astype(np.float32) for shape in ((layers, 4), (rounds, layers // rounds, 4)))
    with jax.set_mesh(make_mesh({"p": stages, "x": 2}, kind)), gspmd.lowering("blocking"):
        arrays = gspmd.annotate(x, "N_pE_x"), gspmd.annotate(back, "RN_pE_x")

        def both(x, cotangent):
            made, transposed = jax.vjp(lambda x: in_rounds(x, "N_pE_x", rounds), x)
            return made, *transposed(cotangent)

        program = jax.jit(both).lower(*arrays).compile()
        made, gradient = program(*arrays)
        ledger, plan = gspmd.ledger(program), gspmd.trace(both, *arrays)
    np.testing.assert_array_equal(made, x.reshape(rounds, -1, 4))
    np.testing.assert_array_equal(gradient, back.reshape(-1, 4))
    assert made.sharding.spec == jax.P(None, "p", "x")
    comparison = ledger.compare(plan)
    assert comparison.agrees
    assert not comparison.differing
    chunk = 2 * 4 * 4 // 2  # layers, E, bytes of a float32, half of it on a device
    assert ledger.wire_bytes == 2 * (len(routes(stages, rounds)) - 1) * chunk


@pytest.mark.slow
def test_a_compiler_may_choose(make_mesh):
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    with jax.set_mesh(make_mesh({"p": 2, "x": 2})), gspmd.lowering("xla"):
        made = jax.jit(lambda x: in_rounds(x, "N_pE_x", 3))(gspmd.annotate(x, "N_pE_x"))
    np.testing.assert_array_equal(made, x.reshape(3, 4, 2))


def test_layers_that_do_not_make_rounds(make_mesh):
    with jax.set_mesh(make_mesh({"p": 2, "x": 2})):
        x = gspmd.annotate(np.ones((6, 2), np.float32), "N_pE")
        with pytest.raises(PlanError) as error:
            in_rounds(x, "N_pE", 2)
        with pytest.raises(PlanError, match="cannot bring layers 'N_pE' into 0 rounds"):
            in_rounds(x, "N_pE", 0)
        with pytest.raises(SpecError, match="dimension E has size 3, which mesh axis x"):
            in_rounds(gspmd.annotate(np.ones((6, 3), np.float32), "N_pE"), "N_pE_x", 3)
    assert str(error.value) == (
        "6 stacked layers do not make 2 rounds of 2 stages.\n  Their number must be a multiple of 4."
    )
