"""Training, evaluation and forward steps of a model, for arrays as for their shapes.

Not imported with `models`, since it imports `gspmd.training` and its libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

import gspmd
from gspmd.ops._global_norm import global_norm
from gspmd.training.config import OptimizerConfig
from gspmd.training.optimizer import adamw
from gspmd.training.optimizer import schedule as rate_by_step
from gspmd.training.state import TrainState, abstract_initial, initial
from gspmd.training.step import Microbatches, Step, make_step, plan_moves

from .objective import batch_spec, loss
from .parameters import gradient_specs, nested, optimizer_specs, parameter_specs, stages_axes
from .transformer import Transformer, arrays, with_arrays

Parameters = Mapping[str, jax.Array]


def training_step(
    model: Transformer, optimizer: OptimizerConfig, steps: int, microbatches: int = 1, schedule: str = "1f1b"
) -> Step:
    """Build one update, not compiled: (state, batch, key) -> (state, metrics).

    A gradient is reduced once, by the move that brings it to where [optimizer] has it, if the layout's [gradients] has
    it as a partial sum, or if there are several microbatches (see `Layout.for_loss`).

    Args:
        model: a model, possibly abstract; only its config, layout and dtype are used.
        optimizer: rates and decays.
        steps: total number of updates.
        microbatches: number of parts of a batch that are computed one after the other, which takes less memory, or that
            follow one another through the stages of a pipeline. The loss and its figures are those of the whole batch;
            of experts, groups that span sequences, their capacity and auxiliary losses are those of a microbatch, and
            every microbatch has random draws of its own.
        schedule: of a pipeline, `"1f1b"`, `"gpipe"` or `"zero-bubble"`.

    Returns:
        A pure function of a state of `initial_state` or `abstract_state`, tokens [B, L+1] placed as `batch_spec`, and a
        random key. Call or lower it under `jax.set_mesh`.
    """
    specs = {path: spec for path, (spec, _) in parameter_specs(model.config, model.layout).items()}
    kept, gradients = optimizer_specs(model.config, model.layout), gradient_specs(model.config, model.layout)
    # The stages of a pipeline take the microbatches, and the loss is that of the whole batch.
    in_stages = bool(stages_axes(model.layout))
    stages = {"microbatches": microbatches, "schedule": schedule} if in_stages else {}
    layout = model.layout if in_stages else model.layout.for_loss(microbatches)
    taken = {path: spec for path, (spec, _) in parameter_specs(model.config, layout).items()}

    def of_parameters(params: Parameters, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return loss(Transformer(model.config, layout, nested(params), model.dtype), tokens, key=key, **stages)

    return make_step(
        of_parameters,
        _transform(model, optimizer, steps),
        rate_by_step(optimizer, steps),
        limit=optimizer.clip,
        norm=partial(global_norm, specs=kept),
        moves=plan_moves(specs, kept, gspmd.reshard, gradients, taken),
        microbatches=Microbatches(1 if in_stages else microbatches, batch_spec(model.layout)),
    )


def initial_state(model: Transformer, optimizer: OptimizerConfig, steps: int, mesh: jax.sharding.Mesh) -> TrainState:
    """The state before the first update: the model's parameters and the initial optimizer state."""
    kept = optimizer_specs(model.config, model.layout)
    return initial(arrays(model), _transform(model, optimizer, steps), mesh, kept)


def abstract_state(model: Transformer, optimizer: OptimizerConfig, steps: int, mesh: jax.sharding.Mesh) -> TrainState:
    """Shapes, dtypes and shardings of `initial_state`; the model may be abstract."""
    kept = optimizer_specs(model.config, model.layout)
    return abstract_initial(arrays(model), _transform(model, optimizer, steps), mesh, kept)


def evaluation_step(model: Transformer, microbatches: int = 1) -> Callable[[Parameters, jax.Array], jax.Array]:
    """Build (parameters, tokens [B, L+1]) -> mean next-token cross-entropy in nats, without random draws.

    Args:
        model: as for `training_step`.
        microbatches: parts of a batch that follow one another through the stages of a pipeline.
    """

    def evaluate(params: Parameters, tokens: jax.Array) -> jax.Array:
        stages = {"microbatches": microbatches} if stages_axes(model.layout) else {}
        return loss(with_arrays(model, params), tokens, train=False, **stages)[1]["cross_entropy"]

    return evaluate


def forward_step(model: Transformer) -> Callable[[Parameters, jax.Array], jax.Array]:
    """Build (parameters, tokens [B, L]) -> float32 logits [B, L, V], placed by the layout; no key/value cache."""

    def forward(params: Parameters, tokens: jax.Array) -> jax.Array:
        return with_arrays(model, params)(tokens)[0]

    return forward


def _transform(model: Transformer, optimizer: OptimizerConfig, steps: int) -> Any:
    """AdamW with weight decay for matrices only: norms have one dimension besides the stacked N."""
    rows = parameter_specs(model.config, model.layout)
    decayed = {path: len(set(spec.dims) - {"N"}) > 1 for path, (spec, _) in rows.items()}
    return adamw(optimizer, steps, decayed)
