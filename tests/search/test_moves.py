"""Tables of moves between all placements, against the planner's plans of single moves and their gradients."""

from itertools import islice, product, takewhile

import numpy as np
import pytest

import gspmd
from gspmd.hardware.chips import CHIPS
from gspmd.planner.steps import Environment
from gspmd.search.moves import HOISTED, MoveCosts

CHIP, SIZES = CHIPS["tpu-v5p"], {"B": 32, "E": 64}


def costs(mesh):
    environment = Environment.of(tuple(SIZES.items()), tuple(mesh.items()), CHIP)
    return MoveCosts(environment, tuple(SIZES), 2)


def whole(found):
    """The nodes of all placements that are no partial sums, and their specs."""
    specs = (found.paths.spec(("B", "E"), number) for number in range(len(found.paths.nodes)))
    return zip(*((number, spec) for number, spec in enumerate(specs) if not spec.partial))


def described(steps):
    return [(step.kind, step.axes, str(step.before), str(step.after)) for step in steps if step.kind != "einsum"]


def test_a_searched_move_of_a_partial_sum_has_the_steps_of_a_gradient():
    """The gradient of B -> A reduced-x is a partial sum over x."""
    mesh = {"x": 2, "y": 4}
    found = costs(mesh)
    specs = [found.paths.spec(("B", "E"), number) for number in range(len(found.paths.nodes))]
    partial = [number for number, spec in enumerate(specs) if spec.partial]
    final = [number for number, spec in enumerate(specs) if not spec.partial]
    there = found.steps_between(np.array(partial), np.array(final), searched=True)
    for (row, source), (column, target) in product(enumerate(partial), enumerate(final)):
        reduced = f"{specs[source].without_partial()} reduced-{''.join(specs[source].partial)}"
        plan = gspmd.plan(f"{specs[target]} -> {reduced}", SIZES, mesh, chip="tpu-v5p", dtype="bfloat16")
        assert described(there[row][column]) == described(plan.backward.steps)


@pytest.mark.parametrize(("mesh", "every"), [({"x": 2, "y": 4}, 1), ({"x": 2, "y": 2, "z": 2}, 37)])
def test_a_searched_move_has_the_steps_of_a_gradient(mesh, every):
    """A move A -> B is the gradient of B -> A."""
    found = costs(mesh)
    nodes, specs = whole(found)
    there = found.steps_between(np.array(nodes), np.array(nodes), searched=True)
    pairs = islice(product(range(len(nodes)), repeat=2), 0, None, every)
    for source, target in pairs:
        plan = gspmd.plan(f"{specs[target]} -> {specs[source]}", SIZES, mesh, chip="tpu-v5p", dtype="bfloat16")
        assert described(there[source][target]) == described(plan.backward.steps)


def in_common(one, other):
    seconds, leaving, leaves = 0.0, 0.0, True
    for step, same in zip(one, other):
        if step != same:
            break
        leaves = leaves and step.kind in HOISTED
        seconds += step.seconds
        leaving += step.seconds * leaves
    return seconds, leaving


@pytest.mark.parametrize("searched", [(False, False), (True, False), (False, True), (True, True)])
def test_shared_steps_are_the_common_beginning_of_two_chains(searched):
    found = costs({"x": 2, "y": 2, "z": 2})
    nodes = np.array([node for node, spec in zip(*whole(found))])
    sources, ends, others = nodes[::7], nodes[3::11], nodes[1::9]
    seconds, leaving = found.shared(sources, ends, others, searched=searched)
    chains = [
        found.steps_between(sources, targets, searched=on_way) for targets, on_way in zip((ends, others), searched)
    ]
    hoisted = found.hoisted(sources, ends, searched=searched[0])
    for source, end, other in product(*map(range, seconds.shape)):
        first = takewhile(lambda step: step.kind in HOISTED, chains[0][source][end])
        assert hoisted[source, end] == pytest.approx(sum(step.seconds for step in first), abs=1e-11)
        wanted = in_common(chains[0][source][end], chains[1][source][other])
        assert (seconds[source, end, other], leaving[source, end, other]) == pytest.approx(wanted, abs=1e-11)
    assert (seconds > 0).any()
    assert (hoisted > 0).any()


def test_a_transposed_gradient_shares_no_step_after_its_transposition():
    found = costs({"x": 2, "y": 2, "z": 2})
    nodes = np.array([node for node, spec in zip(*whole(found))])
    sources, ends = nodes[::5], nodes[2::5]
    seconds, _ = found.shared(sources, ends, ends, searched=(True, True), transposed=(True, False))
    middles = found._middles(sources, ends)
    assert any(middle not in (start, end) for start, row in zip(sources, middles) for middle, end in zip(row, ends))
    for (row, start), (column, _) in product(enumerate(sources), enumerate(ends)):
        assert seconds[row, column, column] == pytest.approx(
            found.between(np.array([start]), np.array([middles[row, column]])).item(), abs=1e-11
        )
