"""Draws of a long product: so many cases, the same ones for a seed, and all of them over many seeds."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import waiting
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
    assert 160 < sum(map(bool, drawn)) < 240  # one in two
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


def test_cases_take_turns_and_all_of_them_have_one(monkeypatch):
    """Tests without the mark take no part; tests of one file have the same turn."""
    turns, slow = pytest.mark.turns(3), pytest.mark.slow
    one, other = cases("file.py::one", 8, turns), cases("file.py::other", 8, turns)
    items = [
        *one,
        *other,
        *cases("file.py::few", 3, turns),
        *cases("file.py::all", 8),
        *cases("file.py::long", 8, slow, turns),
    ]
    had = set()
    for seed in range(100):
        monkeypatch.setattr(volume, "SEED", str(seed))
        later = waiting(items)
        assert later <= {*one, *other}
        now = [[number for number, item in enumerate(each) if item not in later] for each in (one, other)]
        assert now[0] == now[1]
        assert len(now[0]) == 3
        had.update(now[0])
    assert had == {*range(8)}


def test_the_seed_is_the_commit(pytestconfig):
    """So that every run at a commit draws the same, and the next commit others; without git it is "0"."""
    commit = volume.commit()
    folder = pytestconfig.rootpath
    assert commit == "0" or (len(commit) == 40 and int(commit, 16))
    assert commit != "0" or not (folder / ".git").exists()
    assert volume.commit(Path("/")) == "0"
