"""The Switch router: each token goes to its best expert."""

import jax
import jax.numpy as jnp

from gspmd.moe.config import MoEConfig
from gspmd.moe.routers.losses import load_balance
from gspmd.moe.routers.routing import Routing, assigned, chosen, top_choices
from gspmd.moe.routers.rule import router


@router("switch")
def route(logits: jax.Array, config: MoEConfig, draws: jax.Array | None, mask: jax.Array) -> Routing:
    """Send each token to its most probable expert, in the order of the tokens, while the expert has free slots.

        p = softmax(logits)          i = argmax p          gate = p_i          C = (L / X) · factor
        aux = α · X · Σ_i f_i · P_i                        α = config.aux_weight

    Args:
        logits: [G, L, X]; cast to float32.
        config: its capacity_factor and aux_weight are used.
        key: not used. The random jitter of this router is applied before, to the router's input (see `jittered`).
        mask: [G, L] bool, False for padding, which takes no slot and enters no loss; None if every token is real.

    Returns:
        Routing of arrays [G, L, 1] and losses {"aux": [G]}.

    Example:
        >>> logits = jnp.array([[[0., 1.], [2., 0.], [0., 3.], [0., 1.]]])
        >>> routing = route(logits, MoEConfig(experts=2, capacity_factor=1.0))
        >>> routing.expert[0, :, 0].tolist(), routing.kept[0, :, 0].tolist()
        ([1, 0, 1, 1], [True, True, True, False])

    Source: Fedus, Zoph, Shazeer, *Switch Transformers*, arXiv 2101.03961, §2.1 and §2.2, equations 1 to 6.

    Differs: tokens are routed in groups, each with its own capacity, as in the paper's public code. Capacity is rounded
    up. As in the paper, a token without a slot has gate 0, so it only passes through the residual connection.
    """
    gates = jax.nn.softmax(logits, axis=-1)
    expert = top_choices(logits, 1)
    losses = {"aux": config.aux_weight * load_balance(gates, expert[..., 0], mask)}
    return assigned(expert, chosen(gates, expert), logits, config, mask, losses)


def jittered(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Cast the router's input to float32 and, in training, multiply it by factors drawn from U(1 − ε, 1 + ε).

    Args:
        x: [G, L, E], of any dtype.
        factor: [G, L, E] float32; None outside training.

    Source: Fedus et al., arXiv 2101.03961, §2.4 (selective precision) and appendix C (input jitter), with ε = 1e-2.
    """
    x = x.astype(jnp.float32)
    return x if factor is None else x * factor
