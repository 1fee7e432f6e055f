"""The threshold at which the tokens above it reach a goal, over a vocabulary that lies on several devices.

It is found exactly, four bits at a time: an all-reduce adds up what lies at or above each of sixteen candidates. So the
top k of a row, or its nucleus, takes eight small all-reduces, whatever k and the vocabulary are, and no device sends a
logit. Masses are fixed-point numbers: the sum of integers does not depend on their order, and so not on the layout.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gspmd.ops.interface.planned_op import Chains, float32

_DIGIT = 4
ROUNDS = 32 // _DIGIT
"""How many all-reduces find a threshold."""
CANDIDATES = 1 << _DIGIT
"""How many numbers per row and word each of them adds up."""
WORDS = 3
"""How many words of int32 a mass has."""


def ordered(x: jax.Array) -> jax.Array:
    """Integers that are ordered as float32 numbers are, and equal where they are."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def threshold(order: jax.Array, weights: list[jax.Array], enough: Callable, chains: Chains, name: str) -> jax.Array:
    """The largest integer such that the tokens of that order and above are enough, by [..., candidates, words] totals.

    `enough` says so for each candidate, given its totals and those of all tokens; all tokens always are.
    """
    found = jnp.full((*order.shape[:-1], 1), jnp.iinfo(jnp.int32).min, jnp.int32)
    everything = None
    for n in range(ROUNDS):
        shift = 32 - _DIGIT * (n + 1)
        candidates = found + (
            jax.lax.broadcasted_iota(jnp.int32, (*found.shape[:-1], CANDIDATES), found.ndim - 1) << shift
        )
        above = order[..., None, :] >= candidates[..., None]
        local = [jnp.sum(jnp.where(above, word[..., None, :], 0), axis=-1, dtype=jnp.int32) for word in weights]
        totals = chains.send(f"{name}{n}", jnp.stack(local, axis=-1))
        everything = totals[..., :1, :] if everything is None else everything
        digit = jnp.sum(enough(totals, everything), axis=-1, keepdims=True, dtype=jnp.int32) - 1
        found += digit << shift
    return found


def words(weights: jax.Array, bits: int) -> list[jax.Array]:
    """Weights of at most 1 as fixed-point numbers, in words of so many bits, the first with all there is above them."""
    split = []
    for n in range(WORDS):
        weights = weights * 2.0**bits
        word = jnp.floor(weights) if n < WORDS - 1 else jnp.round(weights)
        split.append(word.astype(jnp.int32))
        weights = weights - word
    return split


def mass(totals: jax.Array, bits: int) -> jax.Array:
    """The number that sums of words [..., 3] stand for, rounded so that the larger one is never the smaller."""
    high, middle, low = (totals[..., n] for n in range(WORDS))
    middle += low >> bits
    high += middle >> bits
    below = [float32(word & ((1 << bits) - 1)) for word in (middle, low)]
    return float32(high) + (below[0] + below[1] * 2.0**-bits) * 2.0**-bits
