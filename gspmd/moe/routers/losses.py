"""Load-balancing losses and the z-loss of each group, computed over its real tokens."""

import jax
import jax.numpy as jnp

from gspmd.moe.routers.routing import counts


def load_balance(gates: jax.Array, expert: jax.Array, mask: jax.Array) -> jax.Array:
    """Compute Switch Transformer's loss X · Σ_i f_i · P_i, which is 1 for balanced experts.

    f_i is the fraction of tokens whose first choice is expert i, whether or not the choice got a slot. P_i is the mean
    probability of expert i. If all k choices are given, f_i is the fraction of choices that are expert i.

    Args:
        gates: [G, L, X] float32, the router's softmax.
        expert: [G, L] int32, first choices; or [G, L, k], all choices.
        mask: [G, L] bool, real tokens.

    Returns:
        [G] float32, before the factor α; 0 for a group with padding only.

    Source: Fedus et al., arXiv 2101.03961, §2.2, equations 4 to 6; for k choices, Dai et al., *DeepSeekMoE*,
    arXiv 2401.06066, §3.3, equations 12 to 14.

    Differs: in the paper, means are over a batch. Here they are over a group, as in the paper's public code.

    Example:
        >>> gates = jnp.full((1, 4, 2), 0.5)
        >>> float(load_balance(gates, jnp.array([[0, 1, 0, 1]]), jnp.ones((1, 4), bool))[0])
        1.0
    """
    return gates.shape[-1] * _overlap(gates, expert, mask)


def gshard_balance(gates: jax.Array, expert: jax.Array, mask: jax.Array) -> jax.Array:
    """Compute GShard's ℓ_aux = (1/X) Σ_e (c_e / S) · m_e, which is 1/X² for balanced experts.

    Of the group's S tokens, c_e have expert e as their first choice, and m_e is the mean gate of expert e.

    Args:
        gates: [G, L, X] float32, the router's softmax.
        expert: [G, L] int32, first choices.
        mask: [G, L] bool, real tokens.

    Returns:
        [G] float32, without the paper's coefficient k; 0 for a group with padding only.

    Source: Lepikhin et al., arXiv 2006.16668, Algorithm 1, line 13.
    """
    return _overlap(gates, expert, mask) / gates.shape[-1]


def z_loss(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Compute ST-MoE's z-loss, the mean of (log Σ_i exp(logit_i))², which keeps logits and their rounding errors small.

    Args:
        logits: [G, L, X] float32.
        mask: [G, L] bool, real tokens.

    Returns:
        [G] float32, before the factor c_z; 0 for a group with padding only.

    Source: Zoph et al., *ST-MoE*, arXiv 2202.08906, §3.3, equation 5.

    Differs: in the paper, the mean is over a batch. Here it is over a group, and the layer averages over the groups.

    Example:
        >>> z_loss(jnp.zeros((1, 3, 1)) + 2, jnp.ones((1, 3), bool)).tolist()
        [4.0]
    """
    squares = jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.sum(jnp.where(mask, squares, 0), axis=-1) / _tokens(mask)


def squared_variation(values: jax.Array) -> jax.Array:
    """Compute CV² = variance / mean² over the experts' values: [..., X] to [...]; 0 if the mean is 0.

    Source: Shazeer et al., arXiv 1701.06538, §4, equation 7.

    Example:
        >>> float(squared_variation(jnp.array([1.0, 3.0])))
        0.25
    """
    mean = jnp.mean(values, axis=-1, keepdims=True)
    # Values are divided by the mean first, so that no large load is squared. A mean of 0 is replaced by 1, which keeps
    # the gradient finite.
    return jnp.mean((values / jnp.where(mean > 0, mean, 1) - (mean > 0)) ** 2, axis=-1)


def _tokens(mask: jax.Array) -> jax.Array:
    """Return the number of real tokens of each group, [G], or 1 for a group that has none."""
    return jnp.maximum(1, jnp.sum(mask, axis=-1, dtype=jnp.float32))


def _overlap(gates: jax.Array, expert: jax.Array, mask: jax.Array) -> jax.Array:
    """Compute Σ_e (fraction of choices of e) · (mean gate of e) over the real tokens of each group."""
    tokens, choices = _tokens(mask)[:, None], expert if expert.ndim > mask.ndim else expert[..., None]
    chosen = [counts(choices[..., k], mask, gates.shape[-1]) for k in range(choices.shape[-1])]
    share = sum(chosen) / (len(chosen) * tokens)
    mean = jnp.sum(jnp.where(mask[..., None], gates, 0), axis=-2) / tokens
    return jnp.sum(share * mean, axis=-1)
