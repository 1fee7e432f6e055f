"""Numbers of microbatches: what bounds them, and the best of them, against each of them searched alone."""

import random
from dataclasses import replace
from functools import partial
from math import inf

import pytest

from gspmd.hardware.chips import CHIPS
from gspmd.moe import MoEConfig
from gspmd.search import NothingFits, Search
from gspmd_models import ModelConfig
from gspmd_models.search.answers import Candidate, NoneFits, find, problem_of
from gspmd_models.search.answers.candidate import GAIN, NEAR, TOLERANCE
from gspmd_models.search.answers.microbatches import Range, several, smallest
from gspmd_models.search.answers.presets import placed_presets
from gspmd_models.search.relaxed import Relaxed
from gspmd_models.search.training import TrainingProblem
from tests.search.blocks import small
from tests.search.layouts import drawn

CHIP = CHIPS["tpu-v5p"]
DENSE = ModelConfig(
    vocabulary=64, embed=32, layers=2, heads=4, kv_heads=2, head_size=8, feed_forward=64, activation="swiglu"
)
ROUTED = replace(DENSE, layers=4, kv_heads=4, activation="relu", moe=MoEConfig(experts=4, every=2, router="gshard"))
LENGTH = 32


def picked(of, other, picks):
    """The picks of one problem in another, which has all of its options."""
    options = {name: of.choices[name][number] for name, number in picks.items() if name not in of.vias}
    found = {name: other.choices[name].index(option) for name, option in options.items()}
    return found | {name: other.vias[name].number(via.via(picks[name])) for name, via in of.vias.items()}


@pytest.mark.parametrize(
    ("config", "remat", "mesh", "batch"),
    [(DENSE, "none", {"x": 4}, 16), (replace(DENSE, tied=False), "full", {"x": 2, "y": 2}, 16),
     (DENSE, "dots", {"x": 2, "y": 4}, 24), (replace(DENSE, norm="layer"), "selective", {"x": 2, "y": 2}, 512),
     (ROUTED, "dots-except-hidden", {"x": 2, "y": 2}, 16),
     (replace(ROUTED, moe=replace(ROUTED.moe, groups=4, capacity_factor=1.1)), "full", {"x": 4}, 16)],
)  # fmt: skip
def test_no_layout_costs_or_holds_less_than_its_bound_or_in_fewer_microbatches(config, remat, mesh, batch):
    draw, asked = random.Random(f"{remat} {batch}"), (replace(config, remat=remat), mesh, CHIP, batch, LENGTH)
    relaxed, counts, former = Relaxed(*asked), several(batch)[:4], None
    for count in counts:
        phase = TrainingProblem(*asked, microbatches=count)
        problem = phase.problem()
        bounds = [relaxed.between(*each) for each in ((count, count), (2, counts[-1]))]
        for _ in range(6):
            picks = drawn(problem, draw)
            seconds, held = problem.cost(picks), problem.bytes_of(picks)
            for bound in bounds:
                there = picked(phase, relaxed, picks)
                assert bound.cost(there) <= seconds * (1 + 1e-9)
                assert bound.bytes_of(there) <= held * (1 + 1e-9)
            if former:
                there = picked(phase, former, picks)
                assert former.problem().cost(there) <= seconds * (1 + 1e-9)
                assert former.problem().bytes_of(there) >= held * (1 - 1e-9)
        former = phase


def test_a_bound_is_near_what_large_products_cost():
    """So that a number of microbatches that cannot win is not made: weights move as often as they do."""
    config = replace(DENSE, embed=1024, feed_forward=4096, head_size=64, heads=16, kv_heads=16, remat="full")
    asked = config, {"x": 4, "y": 4}, CHIP, 256, 1024
    for count in (2, 8):
        exact = TrainingProblem(*asked, microbatches=count)
        limit = 2 * Candidate(exact, 0.0).least.bytes
        found = Search(exact.problem(limit)).best().seconds
        assert 0.95 * found < Search(Relaxed(*asked).between(count, count, limit)).at_least() <= found


@pytest.mark.parametrize("seed", range(40))
def test_a_bound_is_below_the_cheapest_and_infinite_where_nothing_fits(seed):
    problem = small(seed)
    search, cheapest = Search(problem.problem()), problem.cheapest()
    bound = search.at_least()
    assert bound <= cheapest * (1 + 1e-9)
    assert (bound == float("inf")) == (cheapest == float("inf"))
    if bound < float("inf"):
        assert search.best().seconds == pytest.approx(cheapest)
        assert search.at_least(0.9 * bound) >= 0.9 * bound


# -- the best of all ---------------------------------------------------------------------------------------------------

MESHES = ({"x": 4}, {"x": 2, "y": 2})
BATCH = 16


def spaces(limit, remats=("none", "full")):
    every = [(replace(DENSE, remat=remat), mesh, CHIP, BATCH, LENGTH) for mesh in MESHES for remat in remats]
    return [partial(problem_of, "train", *asked) for asked in every], [
        partial(Range.of, limit, *asked) for asked in every
    ]


def alone(limit):
    """Every candidate of every number of microbatches."""
    makers, ranges = spaces(limit)
    every = [make() for make in makers] + [
        each.make(count) for make in ranges for each in [make()] for count in each.counts
    ]
    for phase in every:
        try:
            yield Candidate(phase, limit)
        except NothingFits:
            continue


LEAST = min(each.least.bytes for each in alone(1e9))
FREE = min(alone(1e9), key=lambda each: each.free.seconds).free.bytes


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2, 0.05, 0.01])
def test_the_best_is_the_best_of_all_searched_alone(share):
    limit = LEAST + share * (FREE - LEAST)
    known = []
    for each in alone(limit):
        try:
            known.append((Search(each.problem).best().seconds, each.microbatches))
        except NothingFits:
            continue
    makers, ranges = spaces(limit)
    finding = find(makers, limit, ranges=ranges)
    one, more = (min((took for took, count in known if (count == 1) == first), default=inf) for first in (True, False))
    cheapest = more if more < one * (1 - GAIN) else one
    assert cheapest * (1 - TOLERANCE) * (1 - 1e-9) <= finding.bound <= cheapest * (1 + 1e-9)
    assert cheapest * (1 - 1e-9) <= finding.answer.seconds <= cheapest * (1 + 2 * NEAR)
    assert finding.answer.bytes <= limit
    assert finding.microbatches == (1, 2, 4, 8, 16)
    assert finding.best.microbatches in [count for seconds, count in known if seconds <= finding.answer.seconds]


@pytest.mark.parametrize("gain", [0.0, 1.0])
def test_several_microbatches_have_to_gain_what_plans_do_not_know(gain, monkeypatch):
    """By brute force: several that are cheaper are taken for no less than `GAIN`, or where nothing fits in one."""
    limit = LEAST + 0.1 * (FREE - LEAST)
    fits = [each for each in alone(limit) if each.least.bytes <= limit]
    first = min((each.solve().seconds for each in fits if each.microbatches == 1), default=inf)
    then = min(each.solve().seconds for each in fits if each.microbatches > 1)
    monkeypatch.setattr("gspmd_models.search.answers.candidate.GAIN", gain)
    makers, ranges = spaces(limit)
    finding = find(makers, limit, ranges=ranges)
    wanted = min(first, then) if gain == 0 or first == inf else first
    assert finding.answer.seconds == pytest.approx(wanted, rel=2 * NEAR)


def test_where_nothing_fits_the_nearest_is_the_smallest_of_all():
    limit = 0.99 * LEAST
    makers, ranges = spaces(limit)
    with pytest.raises(NoneFits) as none:
        find(makers, limit, ranges=ranges)
    assert none.value.nearest.bytes == LEAST
    assert none.value.over == LEAST - limit
    assert none.value.candidate.microbatches > 1
    assert smallest([], [make() for make in ranges]).least.bytes == LEAST


def test_few_numbers_are_made_and_an_interrupt_leaves_the_best_so_far():
    makers, ranges = spaces(1e9)
    finding = find(makers, 1e9, ranges=ranges)
    assert len(finding.candidates) < 2 * len(makers)

    def interrupted():
        raise KeyboardInterrupt

    finding = find(makers, 1e9, ranges=[interrupted])
    assert not finding.complete
    assert finding.answer == find(makers, 1e9).answer


def test_a_preset_takes_the_number_of_microbatches_that_is_best_for_it():
    limit = LEAST + 0.1 * (FREE - LEAST)
    every = {}
    for each in placed_presets([*alone(limit)]):
        every[each.name] = each
    makers, ranges = spaces(limit)
    finding = find(makers, limit, ranges=ranges)
    ones = [each for each in finding.candidates if each.microbatches == 1]
    found = {each.name: each for each in placed_presets(ones, finding.ranges)}
    assert any(each.fits and each.candidate.microbatches > 1 for each in found.values())
    for name, each in found.items():
        assert each.fits == every[name].fits
        if each.fits:
            assert each.answer.seconds == pytest.approx(every[name].answer.seconds, rel=1e-9)
            assert each.answer.seconds >= finding.bound
