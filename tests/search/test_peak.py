"""A limit that holds at several moments, against all assignments of small problems."""

import itertools
import math
from contextlib import suppress

import numpy as np
import pytest

from gspmd.search import Choice, NothingFits, Problem, Term
from gspmd.search.peak import PeakSearch


class Case:
    """Three choices of up to four options, with terms of their own and between them, and bytes at each moment."""

    def __init__(self, seed, moments):
        self.rng = np.random.default_rng(seed)
        self.choices = [Choice(name, tuple(range(self.rng.integers(2, 5)))) for name in "abc"]
        self.of = [("a",), ("b",), ("c",), ("a", "b"), ("b", "c")]
        sizes = {choice.name: len(choice.options) for choice in self.choices}
        shapes = [[sizes[name] for name in of] for of in self.of]
        self.seconds = [self.rng.integers(1, 20, shape).astype(float) for shape in shapes]
        self.held = {
            (moment,): [self.rng.integers(0, 20, shape).astype(float) for shape in shapes] for moment in range(moments)
        }
        every = [*map(dict, (zip(sizes, each) for each in itertools.product(*map(range, sizes.values()))))]
        self.points = [(self.cost(self.seconds, picks), self.peak(picks)[1], picks) for picks in every]
        peaks = sorted(held for _, held, _ in self.points)
        self.limit = peaks[int(self.rng.integers(0, len(peaks) // 2))] - (seed % 5 == 0)

    def cost(self, tables, picks):
        return sum(float(table[tuple(picks[name] for name in of)]) for table, of in zip(tables, self.of))

    def peak(self, picks):
        sums = {moment: self.cost(tables, picks) for moment, tables in self.held.items()}
        return max(sums.items(), key=lambda each: each[1])

    def counted(self, shares):
        held = [sum(share * self.held[moment][n] for moment, share in shares.items()) for n in range(len(self.of))]
        terms = (Term("".join(of), of, *tables) for of, *tables in zip(self.of, self.seconds, held))
        return Problem(self.choices, terms)

    def search(self, limit):
        return PeakSearch(self.counted, self.peak, (0,), limit)

    def cheapest(self, limit, ok=lambda picks: True):
        return min((seconds for seconds, held, picks in self.points if held <= limit and ok(picks)), default=math.inf)

    @property
    def smallest(self):
        return min(held for _, held, _ in self.points)


def check(case, answer, want, ok=lambda picks: True):
    """An answer fits at every moment, and its bound holds; if it is complete, it is the cheapest."""
    assert ok(answer.picks)
    assert answer.bytes == case.peak(answer.picks)[1] <= case.limit
    assert answer.seconds == case.cost(case.seconds, answer.picks)
    assert answer.bound <= want * (1 + 1e-9) <= answer.seconds * (1 + 2e-9)
    assert answer.bound <= answer.seconds
    if answer.complete:
        assert answer.seconds == answer.bound == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(("moments", "proved", "found"), [(1, 1.0, 1.0), (2, 0.8, 0.97), (5, 0.5, 0.9)])
def test_answers_fit_at_every_moment_and_are_the_cheapest_if_they_say_so(moments, proved, found):
    """With a single moment, everything is proved. Tables of several moments have nothing in common here."""
    solved, more, slower = [], [], []
    for seed in range(50):
        case = Case(seed, moments)
        search, want = case.search(case.limit), case.cheapest(case.limit)
        if want == math.inf:
            with pytest.raises(NothingFits):
                search.best()
            continue
        try:
            answer = search.best()
        except NothingFits as error:
            _check_unproved(case, error, want)
            solved.append(None)
            continue
        check(case, answer, want)
        slower.append(answer.seconds / want)
        assert search.best() == answer
        assert search.so_far.seconds == answer.seconds
        assert search.so_far.bound <= want * (1 + 1e-9)
        solved.append(answer)
        for name in "abc":
            differs = lambda picks, name=name, best=answer: picks[name] != best.picks[name]  # noqa: E731
            want, other = case.cheapest(case.limit, differs), search.next_best(answer, name)
            if other is not None:
                check(case, other, want, differs)
            if want < math.inf:
                more.append(other)
        fixed = {"b": answer.picks["b"]}
        check(case, search.best(fixed), case.cheapest(case.limit, lambda picks, b=fixed: picks["b"] == b["b"]))
    assert len(solved) > 35
    assert sum(each is not None and each.complete for each in solved) >= proved * len(solved)
    assert sum(each is not None for each in solved) >= found * len(solved)
    assert sum(slower) / len(slower) <= 1 + 0.01 * moments
    assert sum(each is not None for each in more) >= (found - 0.1 * (moments > 1)) * len(more)


def _check_unproved(case, error, want):
    assert not error.proved
    assert error.nearest.bytes == case.peak(error.nearest.picks)[1] > case.limit
    assert -math.inf < error.nearest.bound <= want * (1 + 1e-9)


@pytest.mark.parametrize(("moments", "equal"), [(1, 1.0), (2, 0.7), (5, 0.4)])
def test_the_smallest_peak_is_found_or_nearly(moments, equal):
    found = 0
    for seed in range(50):
        case = Case(seed, moments)
        search = case.search(None)
        least = search.least()
        assert least.bytes == case.peak(least.picks)[1]
        assert search.floor() <= case.smallest <= least.bytes <= 1.5 * case.smallest
        found += least.bytes == case.smallest
    assert found >= equal * 50


def test_without_a_limit_the_bytes_are_those_of_the_peak():
    case = Case(3, 5)
    answer = case.search(None).best()
    assert answer.seconds == answer.bound == case.cheapest(math.inf)
    assert answer.bytes == case.peak(answer.picks)[1]


def test_bounds_hold_for_every_option():
    for seed in range(20):
        case = Case(seed, 3)
        search = case.search(case.limit)
        if case.cheapest(case.limit) == math.inf or search.find() is None:
            continue
        for name, bounds in search.bounds().items():
            for option, bound in enumerate(bounds):
                want = case.cheapest(case.limit, lambda picks, name=name, option=option: picks[name] == option)
                assert bound <= want * (1 + 1e-9)


def test_each_relaxation_has_a_budget_of_its_own_and_a_stop_ends_the_search():
    starts, tight = [], [case for case in (Case(seed, 5) for seed in range(50)) if case.smallest < case.limit]
    for case in tight[:30]:
        counted = []

        def following(shares, case=case, counted=counted):
            counted.append(shares)
            return case.counted(shares)

        search = PeakSearch(following, case.peak, (0,), case.limit, start=lambda: starts.append(1))
        with suppress(NothingFits):
            search.find()
        stopped = PeakSearch(case.counted, case.peak, (0,), case.limit, stop=lambda: True)
        with suppress(NothingFits):
            answer = stopped.best()
            check(case, answer, case.cheapest(case.limit))
        assert len(starts) >= len(counted) > 0
        starts.clear()


def test_an_interrupt_in_a_later_relaxation_leaves_what_fits_with_a_bound():
    """By then the relaxations have proved a bound, and limits are lowered."""
    known = 0
    for seed in range(50):
        case, left = Case(seed, 5), 7

        def interrupted():
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

        search = PeakSearch(case.counted, case.peak, (0,), case.limit, start=interrupted)
        try:
            search.find()
        except NothingFits:
            continue
        except KeyboardInterrupt:
            assert search.is_asked
            if search.so_far:
                known += 1
                want = case.cheapest(case.limit)
                assert not search.so_far.complete
                check(case, search.so_far, want)
    assert known
