"""Expert choice: each expert chooses its best tokens, so all slots are filled and loads are equal."""

import jax
import jax.numpy as jnp

from gspmd.moe.config import MoEConfig
from gspmd.moe.routers.routing import Routing, log_odds_against
from gspmd.moe.routers.rule import router


@router("expert-choice")
def route(logits: jax.Array, config: MoEConfig, draws: jax.Array | None, mask: jax.Array) -> Routing:
    """Send each expert the C tokens of a group that have the highest probabilities for this expert.

    Experts choose independently of each other.

        S = softmax(logits) over the experts     I, G = topC(Sᵀ) over the tokens     C = (L / X) · factor

    A token's experts depend on the whole group, including later tokens. So a decoder that is trained with this router
    sees the future, and cannot generate text. `config.causal` is therefore False.

    Args:
        logits: [G, L, X]; cast to float32.
        config: its capacity_factor, the mean number of experts per token, is used.
        key: not used.
        mask: [G, L] bool, False for padding, which takes no slot; None if every token is real.

    Returns:
        Routing of arrays [G, L, X], in which choice i of every token is expert i. The slot of choice i is the token's
        rank for expert i, or -1 if the expert does not take the token. The only loss is the z-loss, if the config has
        one.

    Example:
        >>> logits = jnp.array([[[0.0, 1.0], [0.0, 3.0], [2.0, 0.0], [0.0, 0.0]]])
        >>> routing = route(logits, MoEConfig(experts=2, router="expert-choice", capacity_factor=1.0))
        >>> routing.slot[0].tolist()
        [[-1, 1], [-1, 0], [0, -1], [1, -1]]

    Source: Zhou et al., *Mixture-of-Experts with Expert Choice Routing*, arXiv 2202.09368, §3.2, equations 1 and 2.

    Differs: experts choose within a group. Ties go to the first token. Tokens are ranked by log S/(1 - S), which has
        the order of S without ties due to rounding. The variant that bounds the experts per token is not implemented.
    """
    capacity = config.capacity(logits.shape[1])
    rank = _ranks(logits, mask, capacity)
    kept = mask[..., None] & (rank < capacity)
    expert = jnp.broadcast_to(jnp.arange(config.experts, dtype=jnp.int32), logits.shape)
    gate = jnp.where(kept, jax.nn.softmax(logits, axis=-1), 0)
    return Routing(expert, jnp.where(kept, rank, -1), gate, kept, {})


def _ranks(logits: jax.Array, mask: jax.Array, capacity: int) -> jax.Array:
    """Rank the tokens of a group for each expert, best first: [G, L, X] int32.

    Ranks from the capacity C on are returned as C. Padding comes last.
    """
    odds = -jnp.minimum(log_odds_against(logits), jnp.finfo(jnp.float32).max)
    # Make -0.0 equal to 0.0: lax.top_k orders 0.0 before -0.0.
    odds = jnp.where(mask[..., None], jnp.where(odds == 0, 0, odds), -jnp.inf).swapaxes(1, 2)
    _, taken = jax.lax.top_k(odds, capacity)
    place = jnp.arange(capacity, dtype=jnp.int32)
    whole = jnp.full(odds.shape[-1:], capacity, jnp.int32)
    ranks = jax.vmap(jax.vmap(lambda tokens: whole.at[tokens].set(place, unique_indices=True)))(taken)
    return ranks.swapaxes(1, 2)
