"""Draws of long products: so many cases, the same ones for a seed, and all of them over many seeds."""

from dataclasses import dataclass
from math import inf

import pytest

from tests.conftest import pytest_runtest_setup, shuffled, waiting
from tests.references import volume


@pytest.mark.parametrize(("scale", "count"), [(0.5, 20), (0.1, 4), (1, 40), (5, 40)])
def test_so_many_are_drawn_and_in_time_all_of_them(monkeypatch, scale, count):
    monkeypatch.setattr(volume, "SCALE", scale)
    cases, seen = [*range(40)], set()
    for seed in range(200):
        monkeypatch.setattr(volume, "SEED", str(seed))
        drawn = volume.drawn("a test", cases)
        assert len(drawn) == count
        assert drawn == sorted(set(drawn)) == volume.drawn("a test", cases)
        seen.update(drawn)
    assert seen == {*cases}


def test_short_products_are_whole_or_left_out(monkeypatch):
    monkeypatch.setattr(volume, "SCALE", 0.5)
    cases, drawn = [*range(volume.LONG - 1)], []
    for seed in range(400):
        monkeypatch.setattr(volume, "SEED", str(seed))
        drawn.append(volume.drawn("a test", cases))
        assert drawn[-1] in (cases, [])
    assert 120 < sum(map(bool, drawn)) < 200  # two in five
    monkeypatch.setattr(volume, "SCALE", 1)
    assert volume.drawn("a test", cases) == cases


@dataclass(eq=False)
class Item:
    """The part of a test case that is asked for: its name, and its marks."""

    nodeid: str
    marks: tuple[pytest.Mark, ...] = ()

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)


def cases(test: str, count: int, *marks: pytest.MarkDecorator) -> list[Item]:
    return [Item(f"{test}[{number}]", tuple(mark.mark for mark in marks)) for number in range(count)]


def test_a_test_that_turns_has_so_many_fast_cases_and_always_the_same():
    """Tests without the mark take no part; tests of one file have the same cases."""
    turns, slow = pytest.mark.turns(3), pytest.mark.slow
    one, other = cases("file.py::one", 8, turns), cases("file.py::other", 8, turns)
    items = [
        *one,
        *other,
        *cases("file.py::few", 3, turns),
        *cases("file.py::all", 8),
        *cases("file.py::long", 8, slow, turns),
    ]
    later = waiting(items)
    assert later == waiting(items) <= {*one, *other}
    now = [[number for number, item in enumerate(each) if item not in later] for each in (one, other)]
    assert now[0] == now[1]
    assert len(now[0]) == 3


def test_the_order_is_drawn_by_the_seed_and_keeps_the_cases_of_a_test_together(monkeypatch):
    items, orders = [*cases("a.py::one", 3), *cases("a.py::two", 2), *cases("b.py::three", 2)], set()
    for seed in range(60):
        monkeypatch.setattr(volume, "SEED", str(seed))
        names = [item.nodeid for item in shuffled(items)]
        assert sorted(names) == [item.nodeid for item in items]
        order = tuple(dict.fromkeys(name.partition("[")[0] for name in names))
        assert names == sorted(names, key=lambda name: (order.index(name.partition("[")[0]), name))
        orders.add(order)
    assert len(orders) == 6


def test_a_test_that_begins_too_late_is_skipped(monkeypatch):
    monkeypatch.setattr(volume, "MINUTES", inf)
    pytest_runtest_setup(cases("a.py::one", 1)[0])
    monkeypatch.setattr(volume, "MINUTES", 0)
    with pytest.raises(pytest.skip.Exception, match=r"the 0 minutes of this run are over$"):
        pytest_runtest_setup(cases("a.py::one", 1)[0])


def test_a_test_that_would_end_too_late_is_skipped(monkeypatch):
    test = cases("a.py::one", 1, pytest.mark.takes(1e5))[0]
    monkeypatch.setattr(volume, "MINUTES", inf)
    pytest_runtest_setup(test)
    monkeypatch.setattr(volume, "MINUTES", 1e5)
    with pytest.raises(pytest.skip.Exception, match="the test takes 100000 minutes, and"):
        pytest_runtest_setup(test)
