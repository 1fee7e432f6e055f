"""Noisy top-k gating, with a smooth estimate of each expert's load in its loss."""

from functools import reduce
from operator import add

import jax
import jax.numpy as jnp

from gspmd.moe.config import MoEConfig
from gspmd.moe.routers.losses import squared_variation
from gspmd.moe.routers.routing import Routing, assigned, chosen, counts, finite, per_expert, top_choices
from gspmd.moe.routers.rule import normal_per_logit, router

_LEAST_WIDTH = 1e-6
# The argument of Φ is clipped to ±40, so that the quotient by a small noise width does not overflow; in float32 Φ
# saturates much earlier.
_FARTHEST = 40.0


@router("noisy-top-k", normal_per_logit)
def route(logits: jax.Array, config: MoEConfig, draws: jax.Array | None, mask: jax.Array) -> Routing:
    """Send each token to the k experts with the largest noisy logits, while slots are free.

        H_i = c_i + N(0, 1) · σ_i,    c = x · W_g,   σ = softplus(x · W_noise)
        gates = softmax(the k largest of H)          C = (k L / X) · factor
        importance = w_importance · CV²(Σ_tokens gates)
        load = w_load · CV²(Σ_tokens P),   P_i = Φ((c_i - kth largest of H without H_i) / σ_i)

    P_i is the probability that expert i is chosen if only the noise of expert i is drawn anew. Unlike a count, P is
    smooth.

    Args:
        logits: [G, L, 2X], c followed by x · W_noise. If W_noise is 0, also [G, L, X], which is only c. Cast to
            float32.
        config: its k, capacity_factor, importance_weight and load_weight are used.
        key: the random key of the noise. If None, as in evaluation, there is no noise.
        mask: [G, L] bool, False for padding, which takes no slot and enters no loss; None if every token is real.

    Returns:
        Routing of arrays [G, L, k] and losses {"importance": [G], "load": [G]}.

    Example:
        >>> config = MoEConfig(experts=4, router="noisy-top-k", k=1, capacity_factor=4.0)
        >>> routing = route(jnp.zeros((1, 1000, 4)), config, key=jax.random.key(0))
        >>> all(200 < int((routing.expert == i).sum()) < 300 for i in range(4))
        True
        >>> bool(routing.losses["load"][0] < routing.losses["importance"][0])
        True

    Source: Shazeer et al., *Outrageously Large Neural Networks*, arXiv 1701.06538, §2.1, equations 3 to 5, §4,
    equations 6 and 7, and appendix A, equations 8 to 11; in appendix C of the paper both weights are 0.1.

    Differs: the paper has no capacity; to route without one, use dispatch "dropless". The variance over the experts is
        the population variance. Losses are per group, as in the other routers. σ is at least 1e-6. If k = X, every
        expert is always chosen, and P is 1. Without noise, P is 1 for chosen experts and 0 for all others, and has no
        gradient, as in the authors' public code.
    """
    clean, width = _clean_and_width(logits, config.experts)
    noisy = clean if draws is None else finite(clean + draws * width)
    ranked = top_choices(noisy, min(config.choices + 1, config.experts))
    expert = ranked[..., : config.choices]
    gates = jax.nn.softmax(chosen(noisy, expert), axis=-1)
    importance = jnp.sum(per_expert(jnp.where(mask[..., None], gates, 0), expert, config.experts), axis=1)
    if draws is None or config.choices == config.experts:
        load = reduce(add, (counts(expert[..., k], mask, config.experts) for k in range(config.choices)))
    else:
        load = jnp.sum(jnp.where(mask[..., None], _probability(clean, noisy, width, ranked), 0), axis=1)
    losses = {
        "importance": config.importance_weight * squared_variation(importance),
        "load": config.load_weight * squared_variation(load),
    }
    return assigned(expert, gates, noisy, config, mask, losses)


def _clean_and_width(logits: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """Split logits into the logits without noise and the widths of the noise, each [G, L, X]."""
    clean, raw = logits[..., :experts], logits[..., experts:]
    return clean, jnp.maximum(jax.nn.softplus(raw if raw.shape[-1] else jnp.zeros_like(clean)), _LEAST_WIDTH)


def _probability(clean: jax.Array, noisy: jax.Array, width: jax.Array, ranked: jax.Array) -> jax.Array:
    """Compute P(x, i) of the paper's equation 9, [G, L, X], from the k + 1 best experts of each token."""
    values = chosen(noisy, ranked)
    is_in = jnp.any(jax.nn.one_hot(ranked[..., :-1], clean.shape[-1], dtype=bool), axis=-2)
    threshold = jnp.where(is_in, values[..., -1:], values[..., -2:-1])
    ahead = jnp.clip(clean - threshold, -_FARTHEST * width, _FARTHEST * width)
    return jax.scipy.special.ndtr(ahead / width)
