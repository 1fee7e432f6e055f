"""The update: loss and gradients, the optimizer in its own layout, and the new state."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.stages import Wrapped

from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.jax_internals import has_no_rule_for_partial_sums
from gspmd.training.optimizer import Norm, clip
from gspmd.training.state import TrainState
from gspmd.training.step.microbatches import Loss, Microbatches
from gspmd.training.step.moves import Moves

Tree = Any
Step = Callable[[TrainState, Any, jax.Array], tuple[TrainState, dict[str, jax.Array]]]


def make_step(
    loss: Loss,
    transform: optax.GradientTransformation,
    rate: optax.Schedule,
    *,
    limit: float = 0.0,
    norm: Norm = optax.tree.norm,
    moves: Moves | None = None,
    microbatches: Microbatches | None = None,
    total: Callable[[Tree], jax.Array | None] | None = None,
) -> Step:
    """Build an uncompiled training step, a function (state, batch, key) -> (state, metrics).

    A gradient that is a partial sum is reduced only once, when it moves to the optimizer, even if many microbatches,
    layers or uses of the parameter contribute to it. Partial sums are part of an array's type under Explicit mesh axes,
    but Auto axes have no such types. So on a mesh with Auto axes, such gradients are computed and reduced under
    Explicit axes of the same mesh.

    Args:
        loss: a function (params, batch, key) -> (loss, dictionary of metrics). `batch` is [B, L+1], or a tree of such
            arrays; `params` are sharded by the specs `moves.loss`.
        transform: the optimizer, whose state has a layout of its own.
        rate: a function from the number of earlier updates to the learning rate, which is reported in the metrics.
        limit: the global norm to which gradients are clipped; 0 for no clipping.
        norm: a function for the global norm of gradients in the optimizer's layout.
        moves: the moves between layouts; None if all layouts agree.
        microbatches: the split of the batch, and the batch's spec; needed if gradients are partial sums.
        total: a function of the whole batch. Its result, such as the number of tokens over which the loss is averaged,
            is passed to the loss of each microbatch as `total`. If the function or its result is None, the loss gets no
            `total`.

    Returns:
        A pure function. The step number is folded into the key, so that a resumed run has the same random draws as an
        uninterrupted run. If the loss or the gradients' norm is not finite, the metric `non_finite` is 1 and only the
        step number advances, while parameters and optimizer state stay unchanged. The choice between new and old values
        is made in the optimizer's layout.
    """
    moves = moves or Moves()
    if microbatches is None and moves.partial:
        raise ValueError("gradients are partial sums over mesh axes of the batch.\n  Pass `microbatches`.")

    def gradients_of(params: Tree, batch: Tree, key: jax.Array) -> tuple[Any, Tree]:
        params = moves.to_loss(params)
        of_all = None if total is None else total(batch)
        of_part = loss if of_all is None else partial(loss, total=of_all)
        try:
            if microbatches is None or microbatches.count == 1:
                figures, gradients = jax.value_and_grad(of_part, has_aux=True)(params, batch, key)
            else:
                figures, gradients = microbatches.value_and_gradients(of_part, moves.loss, params, batch, key)
        except (NotImplementedError, ValueError) as error:
            if not (moves.partial and has_no_rule_for_partial_sums(error)):
                raise
            raise _no_partial_sum(error, moves) from error
        with jax.named_scope("optimizer"):
            return figures, moves.gradients_to_optimizer(gradients)

    def differentiate(params: Tree, batch: Tree, key: jax.Array) -> tuple[Any, Tree]:
        if microbatches is None or not moves.partial or jax.sharding.get_abstract_mesh().are_all_axes_explicit:
            return gradients_of(params, batch, key)
        partitions = jax.tree.map(Spec.partition_spec, moves.parameters, is_leaf=lambda leaf: isinstance(leaf, Spec))
        placed = partitions, jax.tree.map(lambda _: microbatches.batch.partition_spec(), batch), jax.P()
        return jax.sharding.explicit_axes(gradients_of, in_sharding=placed)(params, batch, key)

    def step(state: TrainState, batch: Tree, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(key, state.step)
        (value, aux), gradients = differentiate(state.params, batch, key)
        with jax.named_scope("optimizer"):
            gradients, size = clip(gradients, limit, norm)
            params = moves.to_optimizer(state.params)
            updates, optimizer = transform.update(gradients, state.optimizer, params)
            updated = optax.apply_updates(params, updates), optimizer
            finite = jnp.isfinite(value) & jnp.isfinite(size)
            kept = jax.tree.map(lambda new, old: jax.lax.select(finite, new, old), updated, (params, state.optimizer))
            params, optimizer = moves.to_parameters(kept[0]), kept[1]
        # The optimizer counts only the updates that were not skipped, and its learning rate follows that count.
        count = next((count for _, count in optax.tree.get_all_with_path(state.optimizer, "count")), state.step)
        metrics = {"loss": value, **aux, "gradient_norm": size, "learning_rate": jnp.asarray(rate(count))}
        metrics["non_finite"] = 1 - finite.astype(jnp.int32)
        return TrainState(state.step + 1, params, optimizer), metrics

    return step


def _no_partial_sum(error: Exception, moves: Moves) -> PlanError:
    """Return an error that lists the parameters whose gradients are partial sums.

    The model uses one of these parameters in an operation for which JAX has no rule for partial sums.
    """
    operation = re.search(r"rule for (\w+)", str(error))
    named = f"the operation {operation[1]}" if operation else "an operation of the model"
    specs = jax.tree_util.tree_flatten_with_path(moves.loss, is_leaf=lambda leaf: isinstance(leaf, Spec))[0]
    partial_sums = [jax.tree_util.keystr(path, simple=True, separator=".") for path, spec in specs if spec.reduced]
    return PlanError(
        f"cannot differentiate the loss: JAX has no rule for partial sums in {named}.\n"
        "  In [gradients], write the parameter on which the model computes it without partialsum-. It is one of: "
        f"{', '.join(partial_sums)}."
    )


def jit_step(step: Step, state: TrainState, compiler_options: Mapping[str, str] | None = None) -> Wrapped:
    """Jit a step so that the new state has the shardings of the old state; the old state is donated."""
    keep = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(keep, None), compiler_options=dict(compiler_options or {}))
