"""A mesh over a torus: whole torus axes wherever sizes allow."""

from math import prod

import pytest

from gspmd.hardware.torus import lay, nearest

WHOLE = [
    ((4, 4, 4), (4, 4, 4), ((4, 1, 1), (1, 4, 1), (1, 1, 4))),
    ((4, 4, 8), (8, 4, 4), ((1, 4, 1), (1, 1, 4), (8, 1, 1))),
    ((4, 4, 8), (8, 16), ((1, 4), (1, 4), (8, 1))),
    ((16, 16), (256,), ((16,), (16,))),
    ((2, 2, 1), (1, 4), ((1, 2), (1, 2), (1, 1))),
    # a greedy choice for the last axis, 8 = 2 * 4, would split the others
    ((2, 4, 8, 2), (4, 4, 8), ((2, 1, 1), (1, 4, 1), (1, 1, 8), (2, 1, 1))),
]


@pytest.mark.parametrize(("torus", "sizes", "rows"), WHOLE, ids=str)
def test_whole_axes(torus, sizes, rows):
    assert lay(torus, sizes) == rows


SPLIT = [
    ((4, 4), (2, 8), ((2, 2), (1, 4))),
    ((4, 4, 4), (2, 8, 4), ((2, 2, 1), (1, 4, 1), (1, 1, 4))),  # the last one keeps a whole axis
    ((16, 16), (8, 32), ((8, 2), (1, 16))),
    ((16, 20, 28), (10, 14, 64), ((1, 1, 16), (10, 2, 1), (1, 7, 4))),
]


@pytest.mark.parametrize(("torus", "sizes", "rows"), SPLIT, ids=str)
def test_parts_of_axes_where_sizes_do_not_allow_more(torus, sizes, rows):
    assert lay(torus, sizes) == rows
    assert [prod(row) for row in rows] == list(torus)
    assert [prod(column) for column in zip(*rows)] == list(sizes)


def test_nearest_are_sorted_by_their_ratios():
    assert nearest(64, (4, 8)) == [(4, 16), (8, 8), (2, 32)]
    assert nearest(64, (63,)) == [(64,)]
    assert nearest(7, (7, 7), most=9) == [(1, 7), (7, 1)]
