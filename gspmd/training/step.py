"""The training step: loss, gradients, resharding to the optimizer's layout and back, and the new state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspmd.annotate.equation import Equation
from gspmd.annotate.spec import Spec
from gspmd.training.optimizer import Norm, clip
from gspmd.training.state import TrainState

Tree = Any
Loss = Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
Reshard = Callable[[jax.Array, Equation], jax.Array]
Step = Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, dict[str, jax.Array]]]


@dataclass(frozen=True)
class Moves:
    """Functions that reshard gradients and parameters to the optimizer's layout, and new parameters back.

    If both layouts agree, nothing moves. If the optimizer shards further (ZeRO-1), parameters are sliced, gradients
    sliced, or reduce-scattered if they are partial sums, and new parameters all-gathered.

    Source: Rajbhandari et al., ZeRO (arXiv 1910.02054), section 5.
    """

    gradients_to_optimizer: Callable[[Tree], Tree] = lambda tree: tree
    to_optimizer: Callable[[Tree], Tree] = lambda tree: tree
    to_parameters: Callable[[Tree], Tree] = lambda tree: tree


def plan_moves(parameters: Tree, optimizer: Tree, reshard: Reshard, gradients: Tree | None = None) -> Moves:
    """Build the moves between two trees of specs.

    Args:
        parameters: a spec per parameter.
        optimizer: a spec per parameter, for the optimizer's state; the same dimensions.
        reshard: moves an array by an equation, such as `gspmd.reshard`.
        gradients: a spec per parameter, for its gradient before the optimizer; None for that of the parameter.
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
    """Build the training step, not compiled: (state, batch, key) -> (state, metrics).

    Args:
        loss: (params, batch, key) -> (loss, dictionary of further figures); batch is [B, L+1].
        transform: the optimizer, whose state has its own layout.
        rate: learning rate by step, for the metrics.
        limit: largest global norm of the gradients; 0 for none.
        norm: computes the global norm of gradients in the optimizer's layout.
        moves: between the two layouts; None if they agree.

    Returns:
        A pure function. The key is folded with the step, so that a resumed run has the draws of an uninterrupted one.
        If the loss or the gradients' norm is not finite, the metric `non_finite` is 1 and only the step counts on:
        parameters and optimizer state are those from before, chosen where the optimizer's state is.
    """
    moves = moves or Moves()

    def step(state: TrainState, batch: jax.Array, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(key, state.step)
        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, batch, key)
        gradients, size = clip(moves.gradients_to_optimizer(gradients), limit, norm)
        params = moves.to_optimizer(state.params)
        updates, optimizer = transform.update(gradients, state.optimizer, params)
        updated = optax.apply_updates(params, updates), optimizer
        finite = jnp.isfinite(value) & jnp.isfinite(size)
        kept = jax.tree.map(lambda new, old: jax.lax.select(finite, new, old), updated, (params, state.optimizer))
        params, optimizer = moves.to_parameters(kept[0]), kept[1]
        # The optimizer counts the updates that were not skipped, and its rate is that of its own count.
        count = next((count for _, count in optax.tree.get_all_with_path(state.optimizer, "count")), state.step)
        metrics = {"loss": value, **aux, "gradient_norm": size, "learning_rate": jnp.asarray(rate(count))}
        metrics["non_finite"] = 1 - finite.astype(jnp.int32)
        return TrainState(state.step + 1, params, optimizer), metrics

    return step


def jit_step(step: Step, state: TrainState) -> Step:
    """Jit the step so that it keeps the state's shardings, and donates the old state."""
    keep = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(keep, None))


def _mover(sources: Tree, targets: Tree, reshard: Reshard) -> Callable[[Tree], Tree]:
    def move(source: Spec, target: Spec, leaf: jax.Array) -> jax.Array:
        return leaf if source == target else reshard(leaf, Equation.move(source, target))

    return lambda tree: jax.tree.map(move, sources, targets, tree, is_leaf=lambda leaf: isinstance(leaf, Spec))
