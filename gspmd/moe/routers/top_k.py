"""The top-k router of Mixtral, DeepSeek and other open models: each token goes to its k best experts."""

import jax
import jax.numpy as jnp

from gspmd.moe.config import MoEConfig
from gspmd.moe.routers.losses import load_balance
from gspmd.moe.routers.routing import Routing, assigned, chosen, exact_sum, log_scores, per_expert, top_choices
from gspmd.moe.routers.rule import router


@router("top-k")
def route(
    logits: jax.Array, config: MoEConfig, draws: jax.Array | None, mask: jax.Array, bias: jax.Array | None
) -> Routing:
    """Send each token to its k best experts, while slots are free; with dispatch "dropless", slots are always free.

        s = softmax(logits), or sigmoid(logits)                  config.scores
        e1 .. ek = topk(s + bias)                                bias only with config.choice_bias
        gates s / (sum of s of e1 .. ek) · factor                with config.renormalize; factor is config.gate_factor
        gates s · factor                                         without config.renormalize
        aux = α · X · Σ_i f_i · P_i, over all k choices          α = config.aux_weight, P_i the mean of s_i / Σ s
        C = (k L / X) · capacity_factor

    With `expert_groups`, only experts of the best `kept_groups` groups can be chosen, as if s were -∞ for all other
    experts. The score of a group is the sum of its `group_best` largest s + bias. Sums with a bias are compared
    exactly, so that scores count even if the bias is large. With softmax, renormalized gates are the softmax of the
    chosen logits (Mixtral, gpt-oss).

    Args:
        logits: [G, L, X]; cast to float32.
        config: the settings named above are used.
        key: not used.
        mask: [G, L] bool, False for padding, which takes no slot and enters no loss; None if every token is real.
        bias: [X], if the config has `choice_bias`; the bias has no gradient.

    Returns:
        Routing of arrays [G, L, k] and losses {"aux": [G]}.

    Example:
        >>> gates = [
        ...     route(jnp.zeros((1, 1, 4)), MoEConfig(experts=4, router="top-k", renormalize=divided)).gate
        ...     for divided in (True, False)
        ... ]
        >>> [gate[0, 0].tolist() for gate in gates]
        [[0.5, 0.5], [0.25, 0.25]]
        >>> v3 = MoEConfig(experts=4, router="top-k", scores="sigmoid", choice_bias=True, gate_factor=2.5)
        >>> routing = route(jnp.zeros((1, 1, 4)), v3, bias=jnp.array([0.0, 0.1, 0.0, 0.2]))
        >>> routing.expert[0, 0].tolist(), routing.gate[0, 0].tolist()
        ([3, 1], [1.25, 1.25])

    Source: Jiang et al., *Mixtral of Experts*, arXiv 2401.04088, §2.1 (gates); Dai et al., *DeepSeekMoE*,
    arXiv 2401.06066, §3.3, equations 12 to 14 (loss), whose gates are not renormalized; *DeepSeek-V2*,
    arXiv 2405.04434, §2.2.2 (groups, by their best expert); *DeepSeek-V3*, arXiv 2412.19437, §2.1.2, equations 13 to
    16 and 17 to 20 (sigmoid, bias, loss), whose groups are scored by their two best experts.

    Differs: Mixtral has no capacity; to route without one, use dispatch "dropless". The Mixtral paper has no loss.
    Public code for Mixtral omits the factor 1/k of f_i, so that the loss of balanced experts is k · α. Here the loss is
    per group of tokens. By default every sequence is a group, and the loss is DeepSeek-V3's loss per sequence.
    """
    log_score = log_scores(logits, config)
    probabilities = jax.nn.softmax(log_score, axis=-1)
    scores = jax.nn.sigmoid(logits) if config.scores == "sigmoid" else probabilities
    expert = _choices(logits, scores, config, bias)
    # A softmax of logarithms, because a sum of small scores may be 0 in float32.
    gates = jax.nn.softmax(chosen(log_score, expert), axis=-1) if config.renormalize else chosen(scores, expert)
    losses = {"aux": config.aux_weight * load_balance(probabilities, expert, mask)}
    return assigned(expert, config.gate_factor * gates, log_score, config, mask, losses)


def _choices(logits: jax.Array, scores: jax.Array, config: MoEConfig, bias: jax.Array | None) -> jax.Array:
    """Return the experts [G, L, k] of each token, best first."""
    if bias is None:  # logits have the order of scores, without ties due to rounding
        ranked, high, low = logits, logits if config.group_best == 1 else scores, None
    else:
        high, low = exact_sum(scores, jnp.broadcast_to(bias, scores.shape))
        ranked = high
    if config.chosen_groups < config.expert_groups:
        ranked = jnp.where(_in_best_groups(high, low, config), ranked, -jnp.inf)
    return top_choices(ranked, config.choices, low)


def _in_best_groups(high: jax.Array, low: jax.Array | None, config: MoEConfig) -> jax.Array:
    """Return whether each expert is in one of the best groups, [..., X].

    The score of an expert is the exact sum high + low, or only high if `low` is None.
    """
    apart = lambda x: x.reshape(*x.shape[:-1], config.expert_groups, -1)  # noqa: E731
    high, low = apart(high), None if low is None else apart(low)
    best = top_choices(high, config.group_best, low)
    total, *more = jnp.moveaxis(chosen(high, best), -1, 0)
    rest = jnp.zeros_like(total) if low is None else jnp.sum(chosen(low, best), axis=-1)
    for each in more:
        total, error = exact_sum(total, each)
        rest += error
    total, rest = exact_sum(total, rest)
    groups = top_choices(total, config.chosen_groups, rest)
    kept = per_expert(jnp.ones_like(groups), groups, config.expert_groups) > 0
    return jnp.repeat(kept, high.shape[-1], axis=-1)
