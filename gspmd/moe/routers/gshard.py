"""The GShard router: each token goes to its best expert and, at random, to its second best."""

import jax
import jax.numpy as jnp

from gspmd.moe.config import MoEConfig
from gspmd.moe.routers.losses import gshard_balance
from gspmd.moe.routers.routing import Routing, assigned, best_pair
from gspmd.moe.routers.rule import one_per_token, router


@router("gshard", one_per_token)
def route(logits: jax.Array, config: MoEConfig, draws: jax.Array | None, mask: jax.Array) -> Routing:
    """Send each token to its two most probable experts while slots are free; all first choices come before second ones.

        g = softmax(logits)     g1, e1, g2, e2 = top2(g)     gates g1/(g1 + g2), g2/(g1 + g2)     C = (2 L / X) · factor
        the second choice is kept with probability min(1, 2 · g2), where g2 is normalized
        ℓ_aux = (1/X) Σ_e (c_e / S) · m_e, times k = config.aux_weight · X²

    Args:
        logits: [G, L, X]; cast to float32.
        config: its experts, capacity factors, aux_weight and priority are used.
        key: the random key for second choices. If None, as in evaluation, all second choices are kept.
        mask: [G, L] bool, False for padding, which takes no slot and enters no loss; None if every token is real.

    Returns:
        Routing of arrays [G, L, 2] and losses {"aux": [G]}.

    Example:
        >>> routing = route(jnp.zeros((1, 4, 2)), MoEConfig(experts=2, router="gshard", capacity_factor=0.5))
        >>> routing.slot[0].tolist()
        [[0, 0], [1, 1], [2, 2], [3, 3]]
        >>> routing.kept[0].tolist()
        [[True, True], [True, True], [False, False], [False, False]]

    Source: Lepikhin et al., *GShard*, arXiv 2006.16668, §2.2 and Algorithm 1.

    Differs: where the paper and its authors' later public layer disagree, this function follows
      - the paper for a second choice that the draw rejects: this choice still advances its expert's count, and its slot
        stays empty, while the later layer drops the choice before counting;
      - the paper for gates: they are normalized once, before capacity is applied, even if one of the experts overflows;
      - the later layer for the coefficient of the loss: with X², the loss of balanced experts is `aux_weight` for every
        X, while the paper's form, `losses.gshard_balance`, is 1/X² for balanced experts.
    Capacity is rounded up.
    """
    gates, expert, pair = best_pair(logits)
    losses = {"aux": config.aux_weight * config.experts**2 * gshard_balance(gates, expert[..., 0], mask)}
    granted = None if draws is None else jnp.stack([jnp.ones_like(mask), 2 * pair[..., 1] > draws], axis=-1)
    return assigned(expert, pair, logits, config, mask, losses, granted=granted)
