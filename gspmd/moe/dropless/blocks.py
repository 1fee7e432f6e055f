"""Grouped products as loops over blocks of rows, for devices on which `lax.ragged_dot` is dense, such as CPUs."""

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.moe.platform import BLOCKS


def rows_times_weights(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """Multiply each row by its expert's matrix in `weights` [X, E, F], or by the transpose if `transposed`.

    Rows [R, E] become [R, F] or, if `transposed`, rows [R, F] become [R, E].
    """
    ends, contracted = jnp.cumsum(sizes), ((1,), (1 if transposed else 0,))

    def of_expert(expert, out):
        weight, first, done = weights[expert], ends[expert] - sizes[expert], 0
        for block, number in _cut(sizes[expert], len(rows)):

            def of_block(n, out, start=first + done, block=block):
                at, own = _window(start + n * block, ends[expert], block, len(rows))
                product = lax.dot_general(
                    lax.dynamic_slice_in_dim(rows, at, block), weight, (contracted, ((), ())),
                    preferred_element_type=jnp.float32,
                )  # fmt: skip
                kept = jnp.where(own, product.astype(out.dtype), lax.dynamic_slice_in_dim(out, at, block))
                return lax.dynamic_update_slice_in_dim(out, kept, at, 0)

            out = lax.fori_loop(0, number, of_block, out)
            done += number * block
        return out

    out = jnp.zeros((len(rows), weights.shape[1 if transposed else 2]), rows.dtype)
    return lax.fori_loop(0, len(weights), of_expert, out) if len(rows) else out


def rows_times_rows(left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sum the outer products left ⊗ right over each expert's rows: [R, E], [R, F] to [X, E, F] float32."""
    ends, shape = jnp.cumsum(sizes), (left.shape[1], right.shape[1])

    def of_block(start, end, block):
        at, own = _window(start, end, block, len(left))
        pair = [jnp.where(own, lax.dynamic_slice_in_dim(x, at, block), 0) for x in (left, right)]
        return lax.dot_general(*pair, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def of_expert(expert, out):
        first, end = ends[expert] - sizes[expert], ends[expert]
        # The remaining rows get one product of a fitting size, and not several small ones, since each product adds to
        # all weights.
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
    """Return pairs (block size, number of blocks) that cover `size` rows; the last block may extend beyond the rows."""
    *large, last = sorted({min(block, rows) for block in BLOCKS}, reverse=True)
    cuts = []
    for block in large:
        cuts.append((block, size // block))
        size = size % block
    return [*cuts, (last, -(-size // last))]


def _tails(rows: int) -> tuple[int, list[int]]:
    """Return the size of a large block, and the sizes to which the remaining rows of an expert may be rounded up."""
    large, small = min(BLOCKS[0], rows), min(BLOCKS[-1], rows)
    return large, [*range(small, large, small), large]


def _window(start: jax.Array, end: jax.Array, block: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the first row to read for a block that begins at row `start`, and a mask of the rows in [start, end).

    The mask has shape [block, 1]. The first row to read is before `start` if the block would go past the last row.
    """
    # dynamic_slice would silently clamp a start too near the end. It is clamped here, so that the mask fits.
    at = jnp.minimum(start, rows - block)
    row = at + jnp.arange(block, dtype=jnp.int32)
    return at, ((row >= start) & (row < end))[:, None]
