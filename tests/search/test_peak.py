"""A limit that holds at several moments, against all assignments of small problems."""

import itertools
import math

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


def check(case, answer, limit, want, ok=lambda picks: True):
    """An answer fits at every moment, and its bound holds; if it is complete, it is the cheapest."""
    assert ok(answer.picks)
    assert answer.bytes == case.peak(answer.picks)[1] <= limit
    assert answer.seconds == case.cost(case.seconds, answer.picks)
    assert answer.bound <= want * (1 + 1e-9) <= answer.seconds * (1 + 2e-9)
    assert answer.bound <= answer.seconds
    if answer.complete:
        assert answer.seconds == pytest.approx(want, rel=1e-9)
    return answer.complete


@pytest.mark.parametrize("moments", [1, 2, 5])
def test_answers_fit_at_every_moment_and_are_the_cheapest_if_they_say_so(moments):
    """Where nothing is found, nothing fits; the layout with the smallest peak is found, or one that is nearly so."""
    complete = total = least = 0
    for seed in range(120):
        case = Case(seed, moments)
        search, want = case.search(case.limit), case.cheapest(case.limit)
        smallest = min(held for _, held, _ in case.points)
        least += search.least().bytes == smallest
        if want == math.inf:
            with pytest.raises(NothingFits) as raised:
                search.best()
            assert raised.value.nearest.bytes == search.least().bytes > case.limit
            continue
        try:
            answer = search.best()
        except NothingFits:  # nothing is claimed: not even the smallest that was found fits
            assert search.least().bytes > case.limit
            total += 1
            continue
        complete += check(case, answer, case.limit, want)
        total += 1
        for name in "abc":
            differs = lambda picks, name=name, best=answer: picks[name] != best.picks[name]  # noqa: E731
            other = search.next_best(answer, name)
            if other is not None:
                check(case, other, case.limit, case.cheapest(case.limit, differs), differs)
        assert search.best().bytes <= case.limit
    print(moments, complete, total, least)
