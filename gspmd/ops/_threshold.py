"""The search for the largest threshold at or above which enough tokens lie, over a sharded vocabulary.

The threshold is found exactly, three bits at a time: each all-reduce adds up the tokens at or above each of eight
candidates. So the search for the k most likely tokens of a row, or for the row's nucleus (top-p), takes eleven small
all-reduces for any k and any vocabulary, and no device sends logits. Probability masses are fixed-point numbers,
because sums of integers do not depend on the order of summation, and so do not depend on the layout.
"""

from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp

from gspmd.ops.interface.planned_op import Chains, float32

# The bits of the threshold are found in groups of three, and two in the last. These are the lowest bits of the groups.
_PLACES = (32, *range(29, 0, -3), 0)
CANDIDATES = tuple((1 << high - low) - (high < 32) for high, low in pairwise(_PLACES))
"""Number of candidates in each all-reduce: 8 in the first, then 7, and 3 in the last.

After the first all-reduce, the sum of the lowest candidate is known already, so this candidate is left out.
"""
WORDS = 3
"""The number of int32 words that hold a probability mass."""


def ordered(x: jax.Array) -> jax.Array:
    """Return int32 numbers in the same order as the float32 values `x`; equal values have equal integers."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def threshold(order: jax.Array, weights: list[jax.Array], enough: Callable, chains: Chains, name: str) -> jax.Array:
    """Find the largest integer threshold at or above which enough tokens lie.

    Args:
        order: [..., V] integers, one for each token, which are compared with the threshold.
        weights: the weight of each token, as a list of int32 arrays [..., V], one for each word of the weights.
        enough: a function that returns, for each candidate, whether enough tokens lie at or above the candidate. Its
            first argument has the total weights of these tokens, [..., candidates, words]. Its second argument has the
            total weight of all tokens, [..., 1, words], which must be enough.
        chains: the chains with the all-reduces.
        name: the beginning of the all-reduces' names in `chains`; the number of the all-reduce follows.
    """
    found = jnp.full((*order.shape[:-1], 1), jnp.iinfo(jnp.int32).min, jnp.int32)
    everything = None
    for n, (high, low) in enumerate(pairwise(_PLACES)):
        step = jnp.int32(1 << low)
        above = [order >= found + digit * step for digit in range(n > 0, 1 << high - low)]
        # All sums are computed in one pass: the TPU compiler's code for a sum of a broadcast over candidates takes
        # three times as long.
        each = [jnp.where(some, word, 0) for some in above for word in weights]
        sums = jax.lax.reduce(each, [jnp.int32(0)] * len(each), _added, (order.ndim - 1,))
        totals = jnp.stack(sums, axis=-1).reshape(*order.shape[:-1], len(above), len(weights))
        totals = chains.send(f"{name}{n}", totals)
        everything = totals[..., :1, :] if n == 0 else everything
        found += (jnp.sum(enough(totals, everything), axis=-1, keepdims=True, dtype=jnp.int32) - (n == 0)) * step
    return found


def _added(one: list[jax.Array], other: list[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(one, other)]


def words(weights: jax.Array, bits: int) -> list[jax.Array]:
    """Return weights of at most 1 as fixed-point numbers in three words of `bits` bits, the highest bits first."""
    split = []
    for n in range(WORDS):
        weights = weights * 2.0**bits
        word = jnp.floor(weights) if n < WORDS - 1 else jnp.round(weights)
        split.append(word.astype(jnp.int32))
        weights = weights - word
    return split


def mass(totals: jax.Array, bits: int) -> jax.Array:
    """Return the total weights that sums of words [..., 3] represent, as float32 numbers in units of 2^-bits.

    Rounding to float32 does not change the order of totals.
    """
    high, middle, low = (totals[..., n] for n in range(WORDS))
    middle += low >> bits
    high += middle >> bits
    below = [float32(word & ((1 << bits) - 1)) for word in (middle, low)]
    return float32(high) + (below[0] + below[1] * 2.0**-bits) * 2.0**-bits
