"""What is drawn of a long product: so many cases, the same ones for a seed, and all of them over many seeds."""

import pytest

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


def test_short_products_are_whole(monkeypatch):
    monkeypatch.setattr(volume, "SCALE", 0.5)
    assert volume.drawn("a test", range(volume.LONG - 1)) == [*range(volume.LONG - 1)]
