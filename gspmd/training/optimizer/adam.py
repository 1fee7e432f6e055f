"""AdamW, its learning rate schedule, and clipping by the global norm."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspmd.training.config import OptimizerConfig
from gspmd.training.optimizer.int8 import scale_by_int8_adam

Tree = Any
Norm = Callable[[Tree], jax.Array]


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate schedule: linear warm-up, then cosine decay to the final fraction.

    Args:
        config: the settings. Only `learning_rate`, `warmup` and `final_fraction` are used.
        steps: total number of updates.

    Example:
        >>> rate = schedule(OptimizerConfig(learning_rate=1.0, warmup=0.1, final_fraction=0.0), steps=100)
        >>> [round(float(rate(step)), 3) for step in (0, 9, 55, 100)]
        [0.1, 1.0, 0.5, 0.0]

    Source: Loshchilov and Hutter, SGDR (arXiv 1608.03983), eq. 5, without restarts.
    Differs: the rate of the first update is not 0, but the rate after one step of the warm-up.
    """
    warmup = min(round(config.warmup * steps), steps - 1)
    first = config.learning_rate / (warmup or 1)
    rise = optax.linear_schedule(first, config.learning_rate, max(warmup - 1, 1))
    fall = optax.cosine_decay_schedule(config.learning_rate, max(steps - warmup, 1), config.final_fraction)
    return optax.join_schedules([rise, fall], [warmup])


def adamw(
    config: OptimizerConfig, steps: int, decayed: Tree | None = None, seed: int = 0
) -> optax.GradientTransformation:
    """Build AdamW with the scheduled learning rate, and with moments in the dtype of the configuration.

    Args:
        config: the settings of AdamW.
        steps: total number of updates.
        decayed: a tree like the parameters, with True for each parameter that has weight decay; None to decay all
            parameters.
        seed: the seed for stochastic rounding of int8 moments.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101), algorithm 2.
    """
    rate = schedule(config, steps)
    if config.moments == "int8":
        adam = scale_by_int8_adam(config.beta1, config.beta2, config.epsilon, block=config.moments_block, seed=seed)
        decay = optax.add_decayed_weights(config.weight_decay, decayed)
        return optax.chain(adam, decay, optax.scale_by_learning_rate(rate))
    return optax.adamw(rate, config.beta1, config.beta2, config.epsilon, weight_decay=config.weight_decay, mask=decayed)


def clip(gradients: Tree, limit: float, norm: Norm = optax.tree.norm) -> tuple[Tree, jax.Array]:
    """Scale gradients down to a global norm of at most `limit`.

    Args:
        gradients: any tree of arrays.
        limit: the largest global norm; 0 for no clipping.
        norm: the function that computes the global norm. For sharded gradients, use one with planned collectives.

    Returns:
        The scaled gradients, and the norm before scaling, a float32 scalar.

    Source: Pascanu et al. (arXiv 1211.5063), algorithm 1.
    """
    size = norm(gradients)
    if not limit:
        return gradients, size
    scale = jnp.minimum(1.0, limit / jnp.maximum(size, jnp.finfo(jnp.float32).tiny))
    # Computed in float32: a scale in bfloat16 would be off by up to 0.4%.
    return jax.tree.map(lambda gradient: gradient.astype(jnp.float32) * scale, gradients), size
