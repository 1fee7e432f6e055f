"""Rows of tokens sorted by expert: their positions in the send buffers, and their order for the grouped product.

A group sends each shard of the experts one buffer of rows, sorted by expert, with the number of rows of each expert.
The receiving shard sorts the buffers of all groups into one sequence by expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from gspmd.annotate.spec import Spec
from gspmd.moe.routers.routing import Routing, queue


def most_rows(tokens: int, choices: int, experts: int, shards: int) -> int:
    """Return the largest number of rows that a group may send to one shard of the experts.

    A token sends an expert at most one row.

    >>> most_rows(tokens=100, choices=2, experts=8, shards=8), most_rows(tokens=100, choices=2, experts=8, shards=1)
    (100, 200)
    """
    return tokens * min(choices, experts // shards)


@dataclass(frozen=True)
class RowSizes:
    """The sizes of buffers of rows, for any number of shards of the experts.

    Attributes:
        sizes: the sizes of G, X, C, E and F, where C is the size of a buffer if the experts are not sharded.
        choices: k, the number of experts to which each token is sent.
    """

    sizes: tuple[tuple[str, int], ...]
    choices: int

    def sent(self, at: Spec, mesh: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of buffers if X is sharded as in `at`; in the result X is the number of buffers."""
        sizes = dict(self.sizes)
        shards, experts = prod(mesh[axis] for axis in at.axes_of("X")), sizes["X"]
        tokens = sizes["C"] // most_rows(1, self.choices, experts, 1)
        return sizes | {"X": shards, "C": most_rows(tokens, self.choices, experts, shards)}

    def multiplied(self, at: Spec, mesh: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes for products of rows.

        C is computed as if every expert had the same number of rows, and is rounded up.
        """
        sent, experts = self.sent(at, mesh), dict(self.sizes)["X"]
        return sent | {"X": experts, "C": -(-sent["C"] * sent["X"] // experts)}


def place_rows(routing: Routing, experts: int, shards: int, tokens: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the row of every choice in its group's send buffers, and the number of rows of each expert.

    In each chunk of a buffer, rows are sorted by expert.

    Args:
        routing: the arrays expert, slot and kept, [G, L, k], are used. A choice that is not kept has no row, or a row
            of zeros.
        experts, shards: the number of experts, X, and the number of devices over which X is sharded.
        tokens: the number of tokens in each chunk; the sum is L.

    Returns:
        place: [G, L, k] int32, the row of each choice among the shards · C rows that its group sends, where C is the
            number of rows in a buffer; shards · C for a choice without a row.
        counts: [G, X, chunks] int32, the number of rows of each expert in each chunk.
    """
    choices = routing.expert.shape[-1]
    capacities = [most_rows(size, choices, experts, shards) for size in tokens]
    start, base, places, counts = 0, 0, [], []
    for size, capacity in zip(tokens, capacities):
        expert, slot, kept = (x[:, start : start + size] for x in (routing.expert, routing.slot, routing.kept))
        if len(tokens) > 1:  # every chunk has its own queues of the experts
            slot = queue(expert, kept, experts)
        count = rows_of_experts(expert, slot, experts)
        first = _before(count.reshape(-1, shards, experts // shards)).reshape(count.shape)
        shard = expert // (experts // shards)
        place = shard * sum(capacities) + base + _of_expert(first, expert) + slot
        places.append(jnp.where(kept, place, shards * sum(capacities)))
        counts.append(count)
        start, base = start + size, base + capacity
    return jnp.concatenate(places, axis=1), jnp.stack(counts, axis=-1)


def place_rows_here(routing: Routing, experts: int) -> tuple[jax.Array, jax.Array]:
    """Return `place` and `counts`, like `place_rows`, for rows that are not sent to other devices.

    The rows of all groups are sorted together, so that `place` is [1, G · L, k], and `counts` is [G, X, 1].
    """
    count = rows_of_experts(routing.expert, routing.slot, experts)
    total = jnp.sum(count, axis=0)
    first = (_before(total)[None] + jnp.cumsum(count, axis=0) - count).astype(jnp.int32)
    place = jnp.where(routing.kept, _of_expert(first, routing.expert) + routing.slot, routing.expert.size)
    return place.reshape(1, -1, place.shape[-1]), count[..., None]


def holders(place: jax.Array, rows: int) -> jax.Array:
    """Invert `place`: return the choice that each row holds, as the number token · k + choice.

    The result, [G, rows] int32, is computed from `place`, [G, L, k]. The number is L · k for an empty row.
    """
    flat = place.reshape(len(place), -1)
    empty, number = jnp.full((rows,), flat.shape[1], jnp.int32), jnp.arange(flat.shape[1], dtype=jnp.int32)
    return jax.vmap(lambda at: empty.at[at].set(number, mode="drop"))(flat)


def rows_of_experts(expert: jax.Array, slot: jax.Array, experts: int) -> jax.Array:
    """Count the rows of each expert, [G, L, k] to [G, X] int32; choices with a negative slot have no row."""
    at = jnp.where(slot >= 0, expert, experts).reshape(len(expert), -1)
    empty = jnp.zeros(experts, jnp.int32)
    return jax.vmap(lambda at: empty.at[at].add(1, mode="drop"))(at)


def _before(counts: jax.Array) -> jax.Array:
    """Return the exclusive cumulative sum along the last dimension."""
    return (jnp.cumsum(counts, axis=-1) - counts).astype(jnp.int32)


@partial(jax.vmap, in_axes=(0, 0))
def _of_expert(values: jax.Array, expert: jax.Array) -> jax.Array:
    """Gather values [G, X] at the experts [G, L, k]."""
    return values[expert]


@dataclass(frozen=True)
class ReceivedRows:
    """The rows that a shard has received, [G, 1, C, E], and their order by expert over all groups.

    Attributes:
        counts: [G, X] int32, the number of rows that each group has for each expert of the shard.
        capacity: C, the number of rows in a buffer.
        sorted_already: whether the rows are already sorted, because nothing was sent.
    """

    counts: jax.Array
    capacity: int
    sorted_already: bool

    @property
    def sizes(self) -> jax.Array:
        """The number of rows of each expert, [X] int32."""
        return jnp.sum(self.counts, axis=0, dtype=jnp.int32)

    def sort(self, x: jax.Array) -> jax.Array:
        """Sort received rows [G, 1, C, E] by expert; unused rows come last and are zero."""
        if self.sorted_already:
            return x
        group, expert, slot, real = self.origin()
        first = _before(self.counts)
        return _gathered(x, jnp.where(real, group * self.capacity + first[group, expert] + slot, len(group)))

    def unsort(self, y: jax.Array) -> jax.Array:
        """Bring sorted rows back into the order in which they were received."""
        if self.sorted_already:
            return y
        ends = jnp.cumsum(self.counts, axis=1)
        at = jnp.arange(self.capacity, dtype=jnp.int32)
        expert = jax.vmap(lambda ends: jnp.searchsorted(ends, at, side="right"))(ends).astype(jnp.int32)
        first = _before(self.sizes)[None] + jnp.cumsum(self.counts, axis=0) - self.counts - _before(self.counts)
        place = at[None] + _of_expert(first, jnp.minimum(expert, self.counts.shape[1] - 1))
        return _gathered(y, jnp.where(at[None] < ends[:, -1:], place, len(self.counts) * self.capacity).reshape(-1))

    def origin(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return the origin of each sorted row, as four arrays.

        They are the local group, the expert, the position in the expert's queue, and whether the row is used.
        """
        groups, experts = self.counts.shape
        runs = self.counts.T.reshape(-1)
        at = jnp.arange(groups * self.capacity, dtype=jnp.int32)
        run = jnp.searchsorted(jnp.cumsum(runs), at, side="right").astype(jnp.int32)
        real = run < groups * experts
        run = jnp.minimum(run, groups * experts - 1)
        return run % groups, run // groups, at - _before(runs)[run], real


def _gathered(x: jax.Array, index: jax.Array) -> jax.Array:
    """Gather rows of [G, 1, C, ·] by flat indices; an index past the end gives a row of zeros."""
    flat = x.reshape(-1, x.shape[-1])
    return flat.at[index].get(mode="fill", fill_value=0).reshape(x.shape)
