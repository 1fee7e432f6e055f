"""Packing: first-fit, nothing lost or split, and a position that any number of processes can go on from."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspmd.training.data import packing
from gspmd.training.data.packing import PackedBatches, PackedRows, count_rows, first_fit


def reference(sizes, rooms):
    """First-fit, item by item."""
    rows = []

    def fits(item, row):
        return all(sum(sizes[each][side] for each in [*row, item]) <= room for side, room in enumerate(rooms))

    for item in range(len(sizes)):
        row = next((row for row in rows if fits(item, row)), None)
        if row is None:
            rows.append(row := [])
        row.append(item)
    return rows


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_first_fit_is_first_fit(sizes):
    rows = first_fit(np.array(sizes, int).reshape(-1, 2), (9, 7))
    assert rows == reference(sizes, (9, 7))
    assert sorted(item for row in rows for item in row) == [*range(len(sizes))]
    assert all(row == sorted(row) for row in rows)


def test_an_item_larger_than_a_row_is_an_error():
    with pytest.raises(ValueError, match=r"item 1 has \[3, 9\] tokens, but a row has room for \[4, 8\]"):
        first_fit([[1, 1], [3, 9]], (4, 8))


class Numbers:
    """Items whose row is their numbers."""

    rooms = (10,)

    def __init__(self, sizes):
        self._sizes = np.array(sizes)[:, None]

    def __len__(self):
        return len(self._sizes)

    def sizes(self, items):
        return self._sizes[items]

    def row(self, items):
        return {"items": np.array([*items, *[-1] * (10 - len(items))])}


@pytest.fixture
def numbers(monkeypatch):
    """A hundred items of sizes 1 to 10, packed seven at a time."""
    monkeypatch.setattr(packing, "WINDOW", 7)
    return Numbers(np.random.default_rng(0).integers(1, 11, 100))


def test_an_epoch_has_every_item_once_in_another_order(numbers):
    batches, epochs = PackedBatches(numbers, 1, range(1), seed=3), []
    for _ in range(2):
        epoch = []
        while len(epoch) < 100:
            row = next(batches)["items"][0]
            epoch += [*row[row >= 0]]
            assert numbers.sizes(row[row >= 0]).sum() <= 10
        epochs.append(epoch)
    assert [sorted(epoch) for epoch in epochs] == [[*range(100)]] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_pack_the_rows_of_one_batch_and_go_on_anywhere(numbers, processes):
    each = 6 // processes
    whole = PackedBatches(numbers, 6, range(6), seed=1)
    parts = [PackedBatches(numbers, 6, range(at * each, (at + 1) * each), seed=1) for at in range(processes)]
    for number in range(40):
        assert all(part.get_state() == whole.get_state() for part in parts)
        if number == 17:
            again = PackedBatches(numbers, 6, range(6), seed=1)
            again.set_state(whole.get_state())
        wanted = next(whole)["items"]
        np.testing.assert_array_equal(np.concatenate([next(part)["items"] for part in parts]), wanted)
        if number >= 17:
            np.testing.assert_array_equal(next(again)["items"], wanted)


def test_seeds_differ(numbers):
    one, two = (next(PackedBatches(numbers, 6, range(6), seed=seed))["items"] for seed in (0, 1))
    assert (one != two).any()


def test_rows_in_order(numbers):
    rows = PackedRows(numbers)
    items = np.concatenate([rows.row(at, np.random.default_rng())["items"] for at in range(len(rows))])
    assert sorted(items[items >= 0]) == [*range(100)]
    assert [count_rows(numbers, most) for most in (3, 1000)] == [3, len(rows)]
