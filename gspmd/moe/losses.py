"""Losses that keep the experts equally loaded; each over one group, from what its real tokens chose."""

import jax
import jax.numpy as jnp

from gspmd.moe.routing import counts


def load_balance(gates: jax.Array, expert: jax.Array, mask: jax.Array) -> jax.Array:
    """Switch Transformer's loss X · Σ_i f_i · P_i, which is 1 when balanced.

    f_i is the share of tokens whose first choice is expert i, with a slot or without; P_i is the mean probability of i.

    Args:
        gates: [G, L, X] float32, the router's softmax.
        expert: [G, L] int32, first choices.
        mask: [G, L] bool, real tokens.

    Returns:
        [G] float32, not yet multiplied by α. 0 for a group of padding alone.

    Source: Fedus et al., arXiv 2101.03961, §2.2, equations 4 to 6.

    Differs: the paper takes the means over a batch; here they are over a group, as its public code does.

    Example:
        >>> gates = jnp.full((1, 4, 2), 0.5)
        >>> float(load_balance(gates, jnp.array([[0, 1, 0, 1]]), jnp.ones((1, 4), bool))[0])
        1.0
    """
    return gates.shape[-1] * _overlap(gates, expert, mask)


def gshard_balance(gates: jax.Array, expert: jax.Array, mask: jax.Array) -> jax.Array:
    """GShard's ℓ_aux = (1/X) Σ_e (c_e / S) · m_e, which is 1/X² when balanced.

    c_e counts the first choices of expert e among the group's S tokens, m_e is its mean gate.

    Args:
        gates: [G, L, X] float32, the router's softmax.
        expert: [G, L] int32, first choices.
        mask: [G, L] bool, real tokens.

    Returns:
        [G] float32, without the coefficient k that the paper multiplies it by. 0 for a group of padding alone.

    Source: Lepikhin et al., arXiv 2006.16668, Algorithm 1, line 13.
    """
    return _overlap(gates, expert, mask) / gates.shape[-1]


def _overlap(gates: jax.Array, expert: jax.Array, mask: jax.Array) -> jax.Array:
    """Σ_e (share of first choices of e) · (mean gate of e), over the real tokens of each group."""
    tokens = jnp.maximum(1, jnp.sum(mask, axis=-1, dtype=jnp.float32))[:, None]
    share = counts(expert, mask, gates.shape[-1]) / tokens
    mean = jnp.sum(jnp.where(mask[..., None], gates, 0), axis=-2) / tokens
    return jnp.sum(share * mean, axis=-1)
