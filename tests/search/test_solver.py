"""The search against all assignments of small problems, and its pace on a large one."""

import math
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gspmd.search import Answer, Choice, NothingFits, Problem, Search, Term, buckets, question, solver
from gspmd.search.buckets import Messages, eliminate
from gspmd.search.tables import Tables
from tests.search.blocks import block, knapsack, small

SEEDS = range(300)


def check(answer, problem, want, ok=lambda picks: True):
    """An answer is one of the assignments that were asked for, costs what it says, and as little as any."""
    assert ok(answer.picks)
    assert answer.seconds == pytest.approx(problem.cost(answer.picks), rel=1e-12)
    assert answer.bytes == problem.bytes_of(answer.picks)
    assert problem.limit is None or answer.bytes <= problem.limit
    assert answer.bound <= answer.seconds
    assert answer.complete
    assert answer.seconds == answer.bound == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("group", range(10))
def test_answers_are_those_of_all_assignments(group):
    for seed in SEEDS[group::10]:
        case = small(seed)
        search = Search(problem := case.problem())
        want = case.cheapest()
        if want == math.inf:
            with pytest.raises(NothingFits) as raised:
                search.best()
            _check_nearest(raised.value, case, problem)
            continue
        check(answer := search.best(), problem, want)
        for choice in case.choices:
            other = search.next_best(answer, choice.name)
            differs = lambda picks, name=choice.name: picks[name] != answer.picks[name]  # noqa: E731
            want = case.cheapest(differs)
            if other is None:
                assert want == math.inf
            else:
                check(other, problem, want, differs)
        assert search.best() == answer


def _check_nearest(error, case, problem):
    if case.fewest_bytes() == math.inf:
        assert error.nearest is None
        assert "no combination of options is allowed" in str(error)
    else:
        assert error.nearest.bytes == pytest.approx(case.fewest_bytes(), rel=1e-12)
        assert error.nearest.seconds == problem.cost(error.nearest.picks) < math.inf
        assert error.limit == problem.limit
        assert error.over == error.nearest.bytes - problem.limit > 0


def test_fixed_and_excluded_options():
    rng = random.Random(0)
    fitted = 0
    for seed in SEEDS[:150]:
        case = small(seed)
        search = Search(problem := case.problem())
        for _ in range(3):
            first, second = rng.sample(case.choices, 2)
            fixed = {first.name: rng.randrange(len(first.options))}
            without = {second.name: set(rng.sample(range(len(second.options)), len(second.options) // 2))}

            def ok(picks, fixed=fixed, without=without):
                kept = all(picks[name] == option for name, option in fixed.items())
                return kept and not any(picks[name] in options for name, options in without.items())

            want = case.cheapest(ok)
            if want == math.inf:
                with pytest.raises(NothingFits):
                    search.best(fixed, without)
            else:
                check(answer := search.best(fixed, without), problem, want, ok)
                fitted += 1
                differs = lambda picks, name=second.name, a=answer, ok=ok: ok(picks) and picks[name] != a.picks[name]  # noqa: E731
                want = case.cheapest(differs)
                other = search.next_best(answer, second.name, fixed, without)
                assert (other is None) == (want == math.inf)
                if other is not None:
                    check(other, problem, want, differs)
    assert fitted > 200


@pytest.mark.parametrize("block_size", [buckets.BLOCK, 7])
@pytest.mark.parametrize("rate", [0.0, 0.4, None])
def test_the_least_of_each_option_is_that_of_all_assignments(rate, block_size, monkeypatch):
    monkeypatch.setattr(buckets, "BLOCK", block_size)
    for seed in SEEDS[:30]:
        case = small(seed)
        tables = Tables.whole(case.problem())
        costs = [s + rate * b if rate is not None else b + (0 if s < math.inf else s) for _, s, b in case.combinations]
        messages = Messages(tables, eliminate(tables), rate)
        assert messages.total() == pytest.approx(min(costs))
        for choice, least in zip(case.choices, messages.by_option() if rate is not None else []):
            for option, cost in enumerate(least):
                of = [c for c, (picks, *_) in zip(costs, case.combinations) if picks[choice.name] == option]
                assert cost == pytest.approx(min(of), rel=1e-12)


def test_few_options_first_find_the_same(monkeypatch):
    monkeypatch.setattr(question, "FEW", 1)
    monkeypatch.setattr(solver, "FIRST", 1)
    test_answers_are_those_of_all_assignments(0)
    test_fixed_and_excluded_options()


def test_branching_alone_finds_the_same(monkeypatch):
    monkeypatch.setattr(question, "RATES", 0)
    limited = 0
    for seed in SEEDS:
        case = small(seed)
        want = case.cheapest()
        if case.limit is not None and want < math.inf:
            check(Search(problem := case.problem()).best(), problem, want)
            limited += 1
    assert limited > 100


def test_a_limit_is_kept_to_the_last_bit():
    terms = [Term(f"t{b}", ("a",), np.zeros(1), np.full(1, b)) for b in (0.1, 0.2)]
    assert Search(Problem([Choice("a", "o")], terms, 0.1 + 0.2)).best().bytes == 0.1 + 0.2 > 0.3
    with pytest.raises(NothingFits) as raised:
        Search(Problem([Choice("a", "o")], terms, 0.3)).best()
    assert 0 < raised.value.over < 1e-16


@pytest.mark.parametrize("few", [question.FEW, 1])
def test_a_stopped_search_gives_valid_picks_and_a_valid_bound(monkeypatch, few):
    monkeypatch.setattr(question, "FEW", few)  # few options first, and stopped among them
    stopped = 0
    for seed in SEEDS[:150]:
        case = small(seed)
        want = case.cheapest()
        for polls in (0, 1, 3):
            left = iter([False] * polls)
            search = Search(problem := case.problem(), stop=lambda left=left: next(left, True))
            if want == math.inf:
                with pytest.raises(NothingFits):
                    search.best()
                continue
            answer = search.best()
            assert answer == search.so_far
            assert -math.inf < answer.bound <= want * (1 + 1e-12) <= answer.seconds * (1 + 1e-9)
            assert answer.seconds == pytest.approx(problem.cost(answer.picks), rel=1e-12) != math.inf
            assert problem.limit is None or problem.bytes_of(answer.picks) <= problem.limit
            assert not answer.complete or answer.seconds == pytest.approx(want, rel=1e-9)
            stopped += not answer.complete
    assert stopped > 100


def test_an_interrupt_leaves_the_best_so_far():
    def interrupted():
        raise KeyboardInterrupt

    term = Term("t", ("a",), np.array([0.0, 1.0, 3.0]), np.array([9.0, 6.0, 2.0]))
    search = Search(Problem([Choice("a", "xyz")], [term], limit=8.0), stop=interrupted)
    with pytest.raises(KeyboardInterrupt):
        search.best()
    assert search.so_far == Answer({"a": 2}, 3.0, 2.0, 0.0, False)
    search.stop = lambda: False
    assert search.best() == search.so_far == Answer({"a": 1}, 1.0, 6.0, 1.0, True)


def test_the_order_of_terms_changes_nothing():
    for seed in SEEDS[:100]:
        case = small(seed)
        if case.cheapest() == math.inf:
            continue
        shuffled = random.Random(seed).sample(case.terms, len(case.terms))
        answers = [Search(Problem(case.choices, terms, case.limit)).best() for terms in (case.terms, shuffled)]
        assert answers[0] == answers[1]


def test_of_equals_the_first_options_are_taken():
    tables = {"t": np.ones((3, 4)), "u": np.ones((4, 2)), "v": np.ones(3)}
    choices = [Choice("a", range(3)), Choice("b", range(4)), Choice("c", range(2))]
    terms = [Term("t", ("a", "b"), tables["t"]), Term("u", ("b", "c"), tables["u"])]
    assert Search(Problem(choices, terms)).best().picks == {"a": 0, "b": 0, "c": 0}


_HASHED = """
from gspmd.search import Search
from gspmd.search.buckets import Messages, eliminate
from gspmd.search.tables import Tables
from tests.search.blocks import block
print(Search(block(scale=0.1, fraction=0.1)).best())
"""


def test_hash_seeds_change_nothing():
    root = str(Path(__file__).parents[2])
    said = {
        subprocess.run(
            [sys.executable, "-c", _HASHED],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    assert "complete=True" in said.pop()


# -- large -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_gap_of_a_multiplier_is_closed_in_few_nodes(seed):
    polls = []
    problem, want = knapsack(seed)
    answer = Search(problem, stop=lambda: bool(polls.append(None))).best()
    check(answer, problem, want)
    assert len(polls) < 30_000  # without remembering prefixes, up to a million


@pytest.mark.parametrize("fraction", [None, 0.05, 0.3])
def test_a_block_is_searched_in_seconds(fraction):
    search = Search(problem := block(layers=3, scale=0.5, fraction=fraction))
    start = time.perf_counter()
    answer = search.best()
    found = time.perf_counter()
    others = [search.next_best(answer, choice.name) for choice in problem.choices]
    # Print it with -s.
    print(f"best {found - start:.2f} s, {len(others)} next best {time.perf_counter() - found:.2f} s")
    assert answer.complete
    assert problem.limit is None or answer.bytes <= problem.limit
    assert all(other.complete and other.seconds >= answer.seconds for other in others)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_errors_name_the_fault():
    a, b = Choice("a", (1, 2)), Choice("b", ())
    with pytest.raises(ValueError, match="choice 'b' has no options"):
        Problem([a, b], [])
    with pytest.raises(ValueError, match="several choices are called 'a'"):
        Problem([a, a], [])
    with pytest.raises(ValueError, match="term 't' depends on 'c', which is not a choice"):
        Problem([a], [Term("t", ("c",), np.zeros(2))])
    with pytest.raises(ValueError, match=r"table of shape \(3,\), and its choices a have \(2,\) options"):
        Problem([a], [Term("t", ("a",), np.zeros(3))])
    with pytest.raises(ValueError, match="has seconds that are nan or -inf"):
        Problem([a], [Term("t", ("a",), np.array([math.nan, 0]))])
    with pytest.raises(ValueError, match="it has options 0 to 1"):
        Search(Problem([a], [])).best({"a": 2})
    with pytest.raises(ValueError, match="it is not a choice"):
        Search(Problem([a], [])).best(without={"c": [0]})


def test_a_problem_without_terms_costs_nothing():
    assert Search(Problem([Choice("a", (1, 2))], [])).best() == Answer({"a": 0}, 0.0, 0.0, 0.0, True)
    assert Search(Problem([], [])).best() == Answer({}, 0.0, 0.0, 0.0, True)


def test_a_choice_without_another_option_has_no_next_best():
    one, two = Choice("one", "ab"), Choice("two", "cd")
    search = Search(Problem([one, two], [Term("seconds", ("one", "two"), np.array([[1.0, 2.0], [3.0, 4.0]]))], 1.0))
    answer = search.best()
    assert search.next_best(answer, "one", without={"one": [1]}) is None
    assert search.next_best(answer, "one", without={"one": [0, 1]}) is None
    with pytest.raises(NothingFits) as fault:
        search.best(without={"two": [0, 1]})
    assert fault.value.nearest is None


@pytest.mark.parametrize("seed", range(60))
def test_a_bound_of_an_option_is_below_all_that_fit_with_it(seed):
    problem = small(seed)
    search = Search(problem.problem())
    if seed % 2 and problem.cheapest() < math.inf:
        search.best()  # which learns what a byte is worth
    for name, costs in search.bounds().items():
        for option, bound in enumerate(costs):
            least = problem.cheapest(lambda picks, name=name, option=option: picks[name] == option)
            assert bound <= least * (1 + 1e-9)
