"""The top-k router of Mixtral and other open models: each token goes to its k best experts."""

import jax

from gspmd.moe.config import MoEConfig
from gspmd.moe.routers.losses import load_balance
from gspmd.moe.routers.routing import Routing, assigned, chosen, top_choices
from gspmd.moe.routers.rule import router


@router("top-k")
def route(logits: jax.Array, config: MoEConfig, draws: jax.Array | None, mask: jax.Array) -> Routing:
    """Send each token to its k most probable experts while slots are free; dispatch "dropless" has no limit.

        p = softmax(logits)          e1 .. ek = topk(p)          C = (k L / X) · factor
        gates softmax(logits of e1 .. ek) = p / Σ p              with config.renormalize, as Mixtral
        gates p                                                  without
        aux = α · X · Σ_i f_i · P_i, of all k choices            α = config.aux_weight

    Args:
        logits: [G, L, X]; cast to float32.
        config: its k, renormalize, capacity_factor and aux_weight are used.
        key: not used.
        mask: [G, L] bool, False for padding, which takes no slot and enters no loss; None if every token is real.

    Returns:
        Routing of arrays [G, L, k] and losses {"aux": [G]}.

    Example:
        >>> import jax.numpy as jnp
        >>> gates = [
        ...     route(jnp.zeros((1, 1, 4)), MoEConfig(experts=4, router="top-k", renormalize=divided)).gate
        ...     for divided in (True, False)
        ... ]
        >>> [gate[0, 0].tolist() for gate in gates]
        [[0.5, 0.5], [0.25, 0.25]]

    Source: Jiang et al., *Mixtral of Experts*, arXiv 2401.04088, §2.1 (gates); Dai et al., *DeepSeekMoE*,
    arXiv 2401.06066, §3.3, equations 12 to 14 (loss), whose gates are not renormalised.

    Differs: Mixtral has no capacity: use dispatch "dropless". Its paper gives no loss; public code for it omits the
    factor 1/k of f_i, so that balanced experts cost k · α.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    expert = top_choices(logits, config.choices)
    gates = jax.nn.softmax(chosen(logits, expert), axis=-1) if config.renormalize else chosen(probabilities, expert)
    losses = {"aux": config.aux_weight * load_balance(probabilities, expert, mask)}
    return assigned(expert, gates, logits, config, mask, losses)
