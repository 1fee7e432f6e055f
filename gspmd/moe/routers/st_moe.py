"""The ST-MoE router: each token goes to its two best experts, with a z-loss on large logits."""

import jax

from gspmd.moe.config import MoEConfig
from gspmd.moe.routers.losses import load_balance
from gspmd.moe.routers.routing import Routing, assigned, best_pair
from gspmd.moe.routers.rule import router


@router("st-moe")
def route(logits: jax.Array, config: MoEConfig, draws: jax.Array | None, mask: jax.Array) -> Routing:
    """Send each token to its two most probable experts, without a random draw, and penalize large logits.

        p = softmax(logits)    p1, e1, p2, e2 = top2(p)    gates p1/(p1 + p2), p2/(p1 + p2)    C = (2 L / X) · factor
        aux = α · X · Σ_i f_i · P_i, of first choices      α = config.aux_weight
        z = c_z · mean (log Σ_i exp(logit_i))²             c_z = config.z_weight, 1e-3 if it is None

    Args:
        logits: [G, L, X]; cast to float32.
        config: its capacity factors, aux_weight and z_weight are used. The paper trains with a capacity factor of 1.25
            and evaluates with 2.
        key: not used.
        mask: [G, L] bool, False for padding, which takes no slot and enters no loss; None if every token is real.

    Returns:
        Routing of arrays [G, L, 2] and losses {"aux": [G], "z": [G]}.

    Example:
        >>> import jax.numpy as jnp
        >>> routing = route(jnp.zeros((1, 4, 2)), MoEConfig(experts=2, router="st-moe", capacity_factor=0.5))
        >>> routing.gate[0].tolist()
        [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]
        >>> round(float(routing.losses["z"][0]), 6)  # 1e-3 · (log 2)²
        0.00048

    Source: Zoph et al., *ST-MoE: Designing Stable and Transferable Sparse Expert Models*, arXiv 2202.08906, §2, §3.3
    (z-loss, equations 5 and 6) and appendix A (load balance).

    Differs: the gates in the paper's text are p itself. The authors' public layer (Mesh TensorFlow, top-2) divides the
        two p by their sum, and so does this function. To get p itself, use `top-k` with renormalize = false. The
        authors' layer can also drop the second expert, at random or by a threshold on its gate; here every token has
        two experts.
    """
    gates, expert, pair = best_pair(logits)
    losses = {"aux": config.aux_weight * load_balance(gates, expert[..., 0], mask)}
    return assigned(expert, pair, logits, config, mask, losses)
