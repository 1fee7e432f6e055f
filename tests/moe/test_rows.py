"""Rows of dropless: where each is sent, the order in which it is multiplied, and back; against loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.moe.dropless.rows import ReceivedRows, holders, most_rows, place_rows, place_rows_here
from gspmd.moe.routers.routing import Routing, queue

G, L, K, X = 3, 10, 2, 6


def _routing(seed=0):
    """Random choices, two experts for each token, some not kept; slots as a router without capacity has them."""
    draw = np.random.default_rng(seed)
    expert = np.stack([[draw.permutation(X)[:K] for _ in range(L)] for _ in range(G)]).astype(np.int32)
    kept = draw.random((G, L, K)) < 0.8
    slot = np.asarray(queue(jnp.asarray(expert), jnp.asarray(kept), X))
    return Routing(jnp.asarray(expert), jnp.asarray(slot), None, jnp.asarray(kept), {})


def _buffers(routing, shards, chunks):
    """Return what each group sends each shard, chunk by chunk, by loops: expert, slot, token and choice of a row."""
    expert, slot, kept = (np.asarray(x) for x in (routing.expert, routing.slot, routing.kept))
    buffers, start = np.empty((G, shards, len(chunks)), object), 0
    for n, size in enumerate(chunks):
        for g in range(G):
            for s in range(shards):
                rows = [
                    (expert[g, t, k], slot[g, t, k], t, k)
                    for t in range(start, start + size)
                    for k in range(K)
                    if kept[g, t, k] and expert[g, t, k] // (X // shards) == s
                ]
                buffers[g, s, n] = sorted(rows)
        start += size
    return buffers


@pytest.mark.turns(6)
@pytest.mark.parametrize("chunks", [(L,), (5, 5), (4, 3, 3)], ids=str)
@pytest.mark.parametrize("shards", [1, 2, 3, 6])
def test_rows_stand_in_their_shards_buffer_sorted_by_expert(shards, chunks):
    routing = _routing()
    place, counts = place_rows(routing, X, shards, chunks)
    capacity = most_rows(L, K, X, shards)
    assert capacity == L * min(K, X // shards)
    for (g, s, n), rows in np.ndenumerate(_buffers(routing, shards, chunks)):
        first = s * capacity + sum(most_rows(size, K, X, shards) for size in chunks[:n])
        assert [int(place[g, t, k]) for _, _, t, k in rows] == list(range(first, first + len(rows)))
        own = np.bincount([x for x, *_ in rows], minlength=X)
        of_shard = slice(s * (X // shards), (s + 1) * (X // shards))
        np.testing.assert_array_equal(counts[g, of_shard, n], own[of_shard])
    assert np.all(np.asarray(place)[~np.asarray(routing.kept)] == shards * capacity)


def test_where_nothing_is_sent_all_groups_are_sorted_together():
    routing = _routing(1)
    place, counts = place_rows_here(routing, X)
    expert, slot = np.asarray(routing.expert), np.asarray(routing.slot)
    rows = sorted((expert[g, t, k], g, slot[g, t, k], t, k) for g, t, k in np.argwhere(np.asarray(routing.kept)))
    assert [int(place[0, g * L + t, k]) for _, g, _, t, k in rows] == list(range(len(rows)))
    np.testing.assert_array_equal(np.sum(counts, axis=(0, 2)), np.bincount([x for x, *_ in rows], minlength=X))


def test_holders_are_places_the_other_way_round():
    place, _ = place_rows(_routing(2), X, 2, (L,))
    rows = 2 * most_rows(L, K, X, 2)
    holder = np.asarray(holders(place, rows))
    for g, t, k in np.ndindex(place.shape):
        if place[g, t, k] < rows:
            assert holder[g, place[g, t, k]] == t * K + k
    assert np.sum(holder < L * K) == np.sum(np.asarray(place) < rows)


@pytest.mark.parametrize("counts", [[[2, 0, 1], [0, 3, 1]], [[0, 0, 0], [0, 0, 0]], [[4, 0, 0], [0, 0, 4]]], ids=str)
def test_rows_are_sorted_over_groups_and_back(counts):
    counts, capacity = np.array(counts, np.int32), 4
    arrived = [(x, g, slot) for g in range(2) for x in range(3) for slot in range(counts[g, x])]
    x = np.zeros((2, 1, capacity, 1), np.float32)
    for g in range(2):
        own = [row for row in arrived if row[1] == g]
        x[g, 0, : len(own), 0] = [1 + 100 * e + 10 * g + slot for e, _, slot in own]
    rows = ReceivedRows(jnp.asarray(counts), capacity, False)
    wanted = [1 + 100 * e + 10 * g + slot for e, g, slot in sorted(arrived)]
    found = rows.sort(jnp.asarray(x))
    assert found.ravel().tolist() == [*wanted, *(0.0 for _ in range(8 - len(wanted)))]
    np.testing.assert_array_equal(rows.unsort(found), x)
    group, expert, slot, real = (np.asarray(each) for each in rows.origin())
    assert list(zip(expert[real], group[real], slot[real])) == sorted(arrived)
    np.testing.assert_array_equal(rows.sizes, counts.sum(axis=0))
