"""One update: loss, gradients, moves between the parameters' layout and the optimizer's, and the new state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspmd.annotate.spec import Spec
from gspmd.training.optimizer import Norm, clip
from gspmd.training.state import TrainState

Tree = Any
Loss = Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
Reshard = Callable[[jax.Array, str], jax.Array]
Step = Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, dict[str, jax.Array]]]


@dataclass(frozen=True)
class Moves:
    """How gradients and parameters go to the optimizer's layout, and the new parameters back.

    Where both layouts agree nothing moves. Where the optimizer shards further (ZeRO-1) the way there is a slice, or a
    reduce-scatter where the gradient is partial, and the way back an all-gather.

    Source: Rajbhandari et al., ZeRO (arXiv 1910.02054), section 5.
    """

    gradients_to_optimizer: Callable[[Tree], Tree] = lambda tree: tree
    to_optimizer: Callable[[Tree], Tree] = lambda tree: tree
    to_parameters: Callable[[Tree], Tree] = lambda tree: tree


def plan_moves(parameters: Tree, optimizer: Tree, reshard: Reshard, gradients: Tree | None = None) -> Moves:
    """The moves between two trees of specs.

    Args:
        parameters: a spec per parameter.
        optimizer: a spec per parameter, for the optimizer's state; the same dimensions.
        reshard: moves an array by an equation, such as `gspmd.reshard`.
        gradients: a spec per parameter, where its gradient lies on the way; None for as the parameter.
    """
    first = _mover(parameters, parameters if gradients is None else gradients, reshard)
    then = _mover(parameters if gradients is None else gradients, optimizer, reshard)
    there, back = _mover(parameters, optimizer, reshard), _mover(optimizer, parameters, reshard)
    return Moves(lambda tree: then(first(tree)), there, back)


def make_step(
    loss: Loss,
    transform: optax.GradientTransformation,
    rate: optax.Schedule,
    *,
    limit: float = 0.0,
    norm: Norm = optax.tree.norm,
    moves: Moves | None = None,
) -> Step:
    """The training step, not yet compiled: (state, batch, key) -> (state, metrics).

    Args:
        loss: (params, batch, key) -> (loss, a dictionary of further figures); batch is [B, L+1].
        transform: the optimizer, whose state stands in its own layout.
        rate: learning rate by step, for the metrics.
        limit: largest global norm of the gradients; 0 for none.
        norm: computes the global norm of gradients in the optimizer's layout.
        moves: between the two layouts; None where they agree.

    Returns:
        A pure function. The key is folded with the step, so that a resumed run draws what an unbroken one would have.
    """
    moves = moves or Moves()

    def step(state: TrainState, batch: jax.Array, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(key, state.step)
        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, batch, key)
        gradients, size = clip(moves.gradients_to_optimizer(gradients), limit, norm)
        params = moves.to_optimizer(state.params)
        updates, optimizer = transform.update(gradients, state.optimizer, params)
        params = moves.to_parameters(optax.apply_updates(params, updates))
        metrics = {"loss": value, **aux, "gradient_norm": size, "learning_rate": jnp.asarray(rate(state.step))}
        return TrainState(state.step + 1, params, optimizer), metrics

    return step


def jit_step(step: Step, state: TrainState) -> Step:
    """The step compiled for a state's placement, which it keeps; the state that goes in is given up for the new one."""
    keep = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(keep, None))


def _mover(sources: Tree, targets: Tree, reshard: Reshard) -> Callable[[Tree], Tree]:
    def move(source: Spec, target: Spec, leaf: jax.Array) -> jax.Array:
        return leaf if source == target else reshard(leaf, f"{source} -> {target}")

    return lambda tree: jax.tree.map(move, sources, targets, tree, is_leaf=lambda leaf: isinstance(leaf, Spec))
