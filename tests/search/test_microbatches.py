"""Numbers of microbatches: what bounds them, and the best of them, against each of them searched alone."""

import random
from dataclasses import replace
from functools import cache, partial
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest

from gspmd.hardware.chips import CHIPS
from gspmd.hardware.chips import chip as called
from gspmd.moe import MoEConfig
from gspmd.search import Answer, NothingFits, Problem, Search, Term
from gspmd.search.answers import Candidate, NoneFits, Space, find, microbatches
from gspmd.search.answers.candidate import GAIN, NEAR, TOLERANCE
from gspmd.search.answers.finding import BestFirstSearch
from gspmd.search.answers.microbatches import several, smallest
from gspmd.search.answers.presets import placed_presets
from gspmd.search.finding import NORM
from gspmd_models.search import phases
from gspmd_models.search.phases import problem_of, several_of
from gspmd_models.search.training import RelaxedTraining
from gspmd_models.search.workload import Workload
from tests.references.models import TINY
from tests.search.blocks import small
from tests.search.layouts import drawn

CHIP = CHIPS["tpu-v5p"]
DENSE = replace(TINY, heads=4, kv_heads=2)
ROUTED = replace(DENSE, layers=4, kv_heads=4, activation="relu", moe=MoEConfig(experts=4, every=2, router="gshard"))
SHARED = replace(ROUTED, tied=False, activation="swiglu", moe=replace(ROUTED.moe, shared=2))
ROWS = replace(ROUTED, moe=replace(ROUTED.moe, dispatch="dropless"))
WIDE = replace(DENSE, embed=4096, feed_forward=16384, head_size=128, heads=32, kv_heads=8)
SMALL = replace(CHIPS["tpu-v5p"], hbm_bytes=10**9)
"""It gathers activations of 1,024 rows of 4,096 tokens of `DENSE` more slowly in two microbatches than in four."""
LENGTH = 32


def picked(of, other, picks):
    """The picks of one problem in another, which has all of its options, if not the axes of the norm."""
    found = {}
    options = {option.name: option for option in other.question.prices.choices}
    for option in of.question.prices.choices:
        assert options[option.name].unknowns == option.unknowns
        (number,) = np.flatnonzero((options[option.name].rows == option.rows[picks[option.name]]).all(axis=1))
        found[option.name] = int(number)
    return found | {NORM: picks[NORM]} if NORM in other.choices and NORM in picks else found


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["tpu-v5p", "h100"])
@pytest.mark.parametrize(
    ("config", "remat", "mesh", "batch"),
    [(DENSE, "none", {"x": 4}, 16), (replace(DENSE, tied=False), "full", {"x": 2, "y": 2}, 16),
     (ROUTED, "dots-except-hidden", {"x": 2, "y": 2}, 16),
     *(pytest.param(*each, marks=pytest.mark.slow) for each in (
         (DENSE, "dots", {"x": 2, "y": 4}, 24), (replace(DENSE, norm="layer"), "selective", {"x": 2, "y": 2}, 512),
         (replace(ROUTED, moe=replace(ROUTED.moe, groups=4, capacity_factor=1.1)), "full", {"x": 4}, 16),
         (SHARED, "full", {"x": 2, "y": 2}, 16), (replace(SHARED, layers=2), "none", {"x": 2, "y": 4}, 64),
         (ROWS, "dots", {"x": 2, "y": 2}, 16),
         (replace(ROWS, moe=replace(ROWS.moe, experts=20, groups=4)), "selective", {"x": 4}, 16)))],
)  # fmt: skip
def test_no_layout_costs_or_holds_less_than_its_bound_or_in_fewer_microbatches(config, remat, mesh, batch, chip):
    draw = random.Random(f"{remat} {batch}")
    workload = Workload(replace(config, remat=remat), CHIPS[chip], batch, LENGTH)
    relaxed, counts, former = RelaxedTraining(workload, mesh), several(batch)[:4], None
    for count in counts:
        phase = problem_of(replace(workload, microbatches=count), mesh)
        problem = phase.problem()
        bounds = [relaxed.between(*each) for each in ((count, count), (2, counts[-1]))]
        for _ in range(6):
            picks = drawn(problem, draw)
            seconds, held = problem.cost(picks), problem.bytes_of(picks)
            for bound in bounds:
                there = picked(phase, relaxed, picks)
                assert bound.cost(there) <= seconds * (1 + 1e-9)
                assert bound.bytes_of(there) <= held * (1 + 1e-9)
            if former and not (config.moe and config.moe.groups):  # whose groups are others in other microbatches
                there = picked(phase, former, picks)
                assert former.problem().cost(there) <= seconds * (1 + 1e-9)
                assert former.problem().bytes_of(there) >= held * (1 - 1e-9)
        former = phase


@pytest.mark.parametrize(
    ("config", "remat", "mesh", "chip"),
    [
        (DENSE, "dots", {"x": 4, "y": 4, "z": 4}, SMALL),
        (WIDE, "full", {"x": 4}, "h100"),
        pytest.param(WIDE, "none", {"x": 4, "y": 4, "z": 4}, "tpu-v5p", marks=pytest.mark.slow),
        pytest.param(WIDE, "full", {"x": 4, "y": 4, "z": 4}, "tpu-v4", marks=pytest.mark.slow),
        pytest.param(WIDE, "selective", {"x": 4, "y": 16}, "tpu-v5e", marks=pytest.mark.slow),
        pytest.param(DENSE, "dots", {"x": 8, "y": 16}, "tpu-v5e", marks=pytest.mark.slow),
        pytest.param(WIDE, "dots-except-hidden", {"x": 8, "y": 8}, "h100", marks=pytest.mark.slow),
        pytest.param(ROWS, "full", {"x": 2, "y": 2}, "h100", marks=pytest.mark.slow),
        pytest.param(SHARED, "dots", {"x": 2, "y": 2}, "tpu-v5p", marks=pytest.mark.slow),
    ],
)
def test_no_layout_at_all_costs_less_than_its_bound(config, remat, mesh, chip):
    """Let the solver find the least difference of cost and bound over all layouts; it is not below 0."""
    workload = Workload(replace(config, remat=remat), called(chip), 1024, 4096)
    relaxed = RelaxedTraining(workload, mesh)
    for count in (4, 16):
        phase = problem_of(replace(workload, microbatches=count), mesh)
        least = Search(difference(phase, relaxed, relaxed.between(count, count))).best()
        assert least.complete
        assert least.seconds >= -1e-9 * phase.problem().cost(least.picks)


def difference(phase, relaxed, bound):
    """The problem whose cost is the cost of a layout, less its bound."""
    there = {option.name: option for option in relaxed.question.prices.choices}
    same = {}
    for option in phase.question.prices.choices:
        numbers = {tuple(row): number for number, row in enumerate(there[option.name].rows.tolist())}
        same[option.name] = [numbers[tuple(row)] for row in option.rows.tolist()]
    problem = phase.problem()
    terms = [Term(f"of the layout: {term.name}", term.of, term.seconds) for term in problem.terms]
    for term in bound.terms:
        seconds = np.asarray(term.seconds)[np.ix_(*(same[name] for name in term.of))]
        # No cost is above an infinite bound. A layout that is not allowed keeps its infinite cost.
        terms.append(Term(f"of the bound: {term.name}", term.of, np.where(np.isinf(seconds), -1e6, -seconds)))
    return Problem(problem.choices, terms)


@pytest.mark.slow
def test_a_bound_is_near_what_large_products_cost():
    """So that a number of microbatches that cannot win is not made: weights move as often as they do."""
    config = replace(DENSE, embed=2048, feed_forward=8192, head_size=128, heads=16, kv_heads=16, remat="full")
    workload, mesh = Workload(config, CHIP, 1024, 1024), {"x": 4, "y": 4}
    for count in (2, 8):
        exact = problem_of(replace(workload, microbatches=count), mesh)
        limit = 2 * Candidate(exact, 0.0).least.bytes
        found = Search(exact.problem(limit)).best().seconds
        bound = Search(RelaxedTraining(workload, mesh).between(count, count, limit)).at_least()
        assert 0.95 * found < bound <= found * (1 + 1e-12)  # Sums of the same seconds may differ in rounding.


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
    draw = random.Random(seed)
    for _ in range(4):
        without = {
            choice.name: draw.sample(range(len(choice.options)), draw.randrange(len(choice.options) + 1))
            for choice in draw.sample(problem.choices, 2)
        }
        rest = problem.cheapest(lambda picks, of=without: not any(picks[name] in gone for name, gone in of.items()))
        assert (fewer := search.at_least(without=without)) <= rest * (1 + 1e-9)
        assert (fewer == float("inf")) == (rest == float("inf"))


# -- the best of all ---------------------------------------------------------------------------------------------------

MESHES = ({"x": 4}, {"x": 2, "y": 2})
BATCH = 16


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Make each problem once, whichever limit it is searched under."""
    monkeypatch.setattr(phases, "problem_of", known)


def known(workload, mesh):
    return _known(workload, tuple(mesh.items()))


@cache
def _known(workload, mesh):
    return problem_of(workload, dict(mesh))


def spaces(remats=("none", "full")):
    for mesh in MESHES:
        for remat in remats:
            workload = Workload(replace(DENSE, remat=remat), CHIP, BATCH, LENGTH)
            yield Space(partial(known, workload, mesh), partial(several_of, workload, mesh))


@cache
def alone(limit):
    """Return every candidate of every number of microbatches, each of which is solved once for all tests."""
    ranges = [space.several(limit) for space in spaces()]
    every, found = [space.phase() for space in spaces()], []
    for phase in every + [each.make(count) for each in ranges for count in each.counts]:
        try:
            found.append(Candidate(phase, limit))
        except NothingFits:
            continue
    return found


@cache
def cheapest_of(candidate):
    """Return the seconds of the cheapest layout, infinite if none fits."""
    try:
        return candidate.phase.search(candidate.limit).best().seconds
    except NothingFits:
        return inf


@cache
def least():
    """Return the fewest bytes of any layout."""
    return min(each.least.bytes for each in alone(1e9))


@cache
def free():
    """Return the bytes of the layout that is fastest if memory does not matter."""
    return min(alone(1e9), key=lambda each: each.free.seconds).free.bytes


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5, 0.2, 0.05, 0.01])
def test_the_best_is_the_best_of_all_searched_alone(share, monkeypatch):
    # The search of one layout gives up after so many steps, and then says how far from the best it may be.
    monkeypatch.setattr("gspmd.search.answers.candidate.MOST", 10**9)
    limit = least() + share * (free() - least())
    known = [(cheapest_of(each), each.microbatches) for each in alone(limit)]
    finding = find(spaces(), limit)
    one, more = (min((took for took, count in known if (count == 1) == first), default=inf) for first in (True, False))
    cheapest = more if more < one * (1 - GAIN) else one
    assert cheapest * (1 - TOLERANCE) * (1 - 1e-9) <= finding.bound <= cheapest * (1 + 1e-9)
    assert cheapest * (1 - 1e-9) <= finding.answer.seconds <= cheapest * (1 + 2 * NEAR)
    assert finding.answer.bytes <= limit
    assert finding.microbatches == (1, 2, 4, 8, 16)
    assert finding.best.microbatches in [count for seconds, count in known if seconds <= finding.answer.seconds]


@pytest.mark.slow
@pytest.mark.parametrize(  # From 3% to 4% of the way, layouts in 4, 8 and 16 microbatches fit.
    ("share", "gain", "microbatches", "fitting"), [(1.0, GAIN, 1, 5), (0.035, GAIN, 4, 3), (0.5, 0.8, 1, 5)]
)
def test_what_is_proved_of_another_answer_is_true_of_all(share, gain, microbatches, fitting, monkeypatch):
    """A compiled program in several microbatches may be the fastest, though its layout was not the cheapest."""
    monkeypatch.setattr("gspmd.search.answers.candidate.GAIN", gain)
    limit, counts = least() + share * (free() - least()), set()
    every = [each for each in alone(limit) if each.least.bytes <= limit]
    cheapest, finding = min(map(cheapest_of, every)), find(spaces(), limit)
    for each in every:
        taken = finding.taking(each, each.solve())
        assert (taken.best, taken.answer) == (each, each.solve())
        of_one = finding.best.microbatches == each.microbatches == 1
        assert taken.bound <= (finding.answer.seconds if of_one else cheapest) * (1 + 1e-9)
        counts.add(each.microbatches)
    assert (finding.best.microbatches, len(counts)) == (microbatches, fitting)


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.0, 1.0])
def test_several_microbatches_have_to_gain_what_plans_do_not_know(gain, monkeypatch):
    """Brute force takes several only if they gain at least `GAIN`, or if one does not fit."""
    limit = least() + 0.1 * (free() - least())
    fits = [each for each in alone(limit) if each.least.bytes <= limit]
    first = min((each.solve().seconds for each in fits if each.microbatches == 1), default=inf)
    then = min(each.solve().seconds for each in fits if each.microbatches > 1)
    monkeypatch.setattr("gspmd.search.answers.candidate.GAIN", gain)
    finding = find(spaces(), limit)
    wanted = min(first, then) if gain == 0 or first == inf else first
    assert finding.answer.seconds == pytest.approx(wanted, rel=2 * NEAR)


@pytest.mark.slow
def test_where_nothing_fits_the_nearest_is_the_smallest_of_all():
    limit = 0.99 * least()
    with pytest.raises(NoneFits) as none:
        find(spaces(), limit)
    assert none.value.nearest.bytes == least()
    assert none.value.over == least() - limit
    assert none.value.candidate.microbatches > 1
    assert smallest([], [space.several(limit) for space in spaces()]).least.bytes == least()


def test_sizes_are_those_of_a_microbatch_where_their_number_is_known():
    every, seen = [space.several(1e9) for space in spaces()], {}
    for each in every:
        assert each.sizes["B"] == BATCH // (each.counts[0] if len(each.counts) == 1 else 2)  # which all are parts of
        if len(each.counts) == 1:
            seen[each.counts[0]] = each.sizes["B"]
        else:
            every += each.halves
    assert seen == {2: 8, 4: 4, 8: 2, 16: 1}


def test_few_numbers_are_made_and_an_interrupt_leaves_the_best_so_far():
    every = [*spaces()]
    assert len(find(every, 1e9).candidates) < 2 * len(every)

    def interrupted(limit):
        raise KeyboardInterrupt

    alone = [replace(space, several=None) for space in every]
    finding = find([replace(every[0], several=interrupted), *alone[1:]], 1e9)
    assert not finding.complete
    assert finding.answer == find(alone, 1e9).answer


@pytest.mark.parametrize(
    ("known", "left"),
    [([(1, 1.0), (4, 0.99)], 1), ([(1, 1.0), (4, 0.97)], 4), ([(4, 2.0)], 4), ([(2, 1.5), (8, 1.2), (1, 1.3)], 8),
     ([(1, None), (2, 1.0)], 2), ([(1, 3.0), (2, None)], 1), ([(1, None), (2, None)], None), ([], None)],
)  # fmt: skip
def test_at_an_interrupt_several_microbatches_have_to_gain_too(known, left):
    """Candidates that are known to fit at an interrupt are left, and others are not."""
    search = BestFirstSearch(1.0, print)
    for count, seconds in known:
        answer = seconds and Answer({}, seconds, 1.0, 0.5, True)
        free = Answer({}, 0.5, 2.0, 0.5, True)
        search.candidates.append(SimpleNamespace(free=free, so_far=answer, answer=None, axes=1, microbatches=count))
    found = search.so_far()
    assert (found and found.best.microbatches) == left
    if found:
        assert found.answer.seconds == dict(known)[left]
        assert not found.complete


@pytest.mark.slow
def test_a_preset_takes_the_number_of_microbatches_that_is_best_for_it(monkeypatch):
    limit = least() + 0.05 * (free() - least())
    every = {}
    for each in placed_presets([*alone(limit)]):
        every[each.name] = each
    finding = find(spaces(), limit)
    ones, made = [each for each in finding.candidates if each.microbatches == 1], []
    monkeypatch.setattr(microbatches, "Candidate", lambda *asked: made.append(asked) or Candidate(*asked))
    found = {each.name: each for each in placed_presets(ones, finding.ranges)}
    assert not made  # of all others a bound says enough
    assert any(each.fits and each.candidate.microbatches > 1 for each in found.values())
    for name, each in found.items():
        assert each.fits == every[name].fits
        if each.fits:
            assert each.answer.seconds == pytest.approx(every[name].answer.seconds, rel=1e-9)
            assert each.answer.seconds >= finding.bound


def test_a_batch_that_two_microbatches_do_not_divide_is_searched():
    """Memory in more microbatches is counted as in two, where there are two."""
    whole = Workload(DENSE, CHIP, batch=9, length=LENGTH)
    one, found = (
        problem_of(replace(whole, microbatches=count), {"x": 2}).question.answer(None, lambda: False)
        for count in (1, 3)
    )
    assert found.complete
    assert found.planned_seconds == pytest.approx(found.priced_seconds, rel=1e-5)
    assert found.bytes <= one.bytes
