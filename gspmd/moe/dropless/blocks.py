"""Grouped products as loops over blocks of rows of one expert, for platforms whose own grouped product is dense.

The loop over experts takes each one's weights once. Blocks are large, and the smaller ones behind them few: every
product reads all weights of its expert, and what the last block has too much is computed for nothing. On two CPU cores,
256 and then 64 rows took 1.1 to 1.25 times as long as one dense product of all rows, 128 alone 1.3 to 2 times.
"""

import jax
import jax.numpy as jnp
from jax import lax

BLOCKS = (256, 64)
"""Rows of the blocks that an expert's rows are cut into, as many of the first as there are, and then of the next."""


def rows_times_weights(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """Each row by its expert's matrix, or by its transpose: [R, E], [X, E, F] to [R, F], or [R, F] to [R, E]."""
    ends, contracted = jnp.cumsum(sizes), ((1,), (1 if transposed else 0,))

    def of_expert(expert, out):
        weight, first, done = weights[expert], ends[expert] - sizes[expert], 0
        for block, number in _cut(sizes[expert], len(rows)):

            def of_block(n, out, start=first + done, block=block):
                at, own = _window(start + n * block, ends[expert], block, len(rows))
                found = lax.dot_general(
                    lax.dynamic_slice_in_dim(rows, at, block), weight, (contracted, ((), ())),
                    preferred_element_type=jnp.float32,
                )  # fmt: skip
                kept = jnp.where(own, found.astype(out.dtype), lax.dynamic_slice_in_dim(out, at, block))
                return lax.dynamic_update_slice_in_dim(out, kept, at, 0)

            out = lax.fori_loop(0, number, of_block, out)
            done += number * block
        return out

    out = jnp.zeros((len(rows), weights.shape[1 if transposed else 2]), rows.dtype)
    return lax.fori_loop(0, len(weights), of_expert, out) if len(rows) else out


def rows_times_rows(left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
    """The sum over each expert's rows of left ⊗ right: [R, E], [R, F] to [X, E, F] float32."""
    ends, shape = jnp.cumsum(sizes), (left.shape[1], right.shape[1])

    def of_block(start, end, block):
        at, own = _window(start, end, block, len(left))
        pair = [jnp.where(own, lax.dynamic_slice_in_dim(x, at, block), 0) for x in (left, right)]
        return lax.dot_general(*pair, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def of_expert(expert, out):
        first, end = ends[expert] - sizes[expert], ends[expert]
        # Here one product of the right size is cheaper than several, each of which adds to all weights of an expert.
        block, tails = _tails(len(left))
        number = sizes[expert] // block
        start = first + number * block
        last = sum((end - start > tail).astype(jnp.int32) for tail in (0, *tails[:-1]))
        nothing = lambda start: jnp.zeros(shape, jnp.float32)  # noqa: E731
        total = lax.switch(last, [nothing, *(lambda at, t=t: of_block(at, end, t) for t in tails)], start)
        total = lax.fori_loop(0, number, lambda n, so_far: so_far + of_block(first + n * block, end, block), total)
        return lax.dynamic_update_index_in_dim(out, total, expert, 0)

    out = jnp.zeros((len(sizes), *shape), jnp.float32)
    return lax.fori_loop(0, len(sizes), of_expert, out) if len(left) else out


def _cut(size: jax.Array, rows: int) -> list[tuple[int, jax.Array]]:
    """Blocks, and how many of each an expert of `size` rows has, the last of which may be more than it needs."""
    *large, last = sorted({min(block, rows) for block in BLOCKS}, reverse=True)
    found = []
    for block in large:
        found.append((block, size // block))
        size = size % block
    return [*found, (last, -(-size // last))]


def _tails(rows: int) -> tuple[int, list[int]]:
    """The large block, and the sizes, up to its own, that the rest of an expert's rows is rounded up to."""
    large, small = min(BLOCKS[0], rows), min(BLOCKS[-1], rows)
    return large, [*range(small, large, small), large]


def _window(start: jax.Array, end: jax.Array, block: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Where a block of the rows from `start` to `end` is read, and which of it they are: [block, 1]."""
    # A slice beyond the last row would be moved forward by itself, and its rows would be taken for others.
    at = jnp.minimum(start, rows - block)
    row = at + jnp.arange(block, dtype=jnp.int32)
    return at, ((row >= start) & (row < end))[:, None]
