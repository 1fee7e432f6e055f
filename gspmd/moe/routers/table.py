"""The table of routers by name."""

import jax

from gspmd.moe import inputs
from gspmd.moe.config import MoEConfig
from gspmd.moe.routers import expert_choice, gshard, noisy_top_k, st_moe, switch, top_k
from gspmd.moe.routers.routing import Routing
from gspmd.moe.routers.rule import Router

_ALL = (noisy_top_k.route, gshard.route, switch.route, st_moe.route, top_k.route, expert_choice.route)
BY_NAME = {each.name: each for each in _ALL}


def named(config: MoEConfig) -> Router:
    """Return the router that the layer's configuration names."""
    return BY_NAME[config.router]


def route(
    logits: jax.Array,
    config: MoEConfig,
    *,
    key: jax.Array | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> Routing:
    """Route the tokens of each group by the router that the config names.

    Args:
        logits: [G, L, X]. Router noisy-top-k also takes [G, L, 2X], whose second half is for its noise.
        config: the settings, which name the router. Each router is described in its module, for example in
            `gspmd.moe.routers.switch.route`.
        key: the random key for routers that use random numbers in training; None for evaluation.
        mask: [G, L] bool, False for padding; None if every token is real.
        bias: [X] float32, added to the scores by which experts are chosen. It is required if the config has
            `choice_bias`, and must be None otherwise.

    Returns:
        Routing of arrays [G, L, k].

    Raises:
        PlanError: `config` is not a MoEConfig, `key` is not a random key, or a bias is missing or superfluous.
        SpecError: the shape of logits, mask or bias does not fit the config.

    Example:
        >>> import jax.numpy as jnp
        >>> route(jnp.zeros((2, 8, 4)), MoEConfig(experts=4, router="gshard")).gate.shape
        (2, 8, 2)
    """
    inputs.settings("route", config)
    return named(config)(logits, config, key=key, mask=mask, bias=bias)
