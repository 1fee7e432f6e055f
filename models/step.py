"""The programs that a model is trained and used by, the same for arrays and for shapes of arrays.

Not imported with `models`: the step of training is `gspmd.training`'s, with its libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

import gspmd
from gspmd.ops._global_norm import global_norm
from gspmd.training.config import OptimizerConfig
from gspmd.training.optimizer import adamw, schedule
from gspmd.training.state import TrainState, abstract_initial, initial
from gspmd.training.step import Step, make_step, plan_moves
from models.objective import loss
from models.parameters import gradient_specs, optimizer_specs, parameter_specs
from models.transformer import Transformer, arrays, with_arrays

Parameters = Mapping[str, jax.Array]


def training_step(model: Transformer, optimizer: OptimizerConfig, steps: int) -> Step:
    """One update, not yet compiled: (state, batch, key) -> (state, metrics).

    Args:
        model: a placed model, or an abstract one; only its config, layout and dtype are read.
        optimizer: rates and decays.
        steps: number of updates in all.

    Returns:
        A pure function of a state, as `initial_state` or `abstract_state` give it; tokens [B, L+1], placed as
        `batch_spec`; and a random key. Call or lower it under `jax.set_mesh`.
    """
    specs = {path: spec for path, (spec, _) in parameter_specs(model.config, model.layout).items()}
    kept, gradients = optimizer_specs(model.config, model.layout), gradient_specs(model.config, model.layout)

    def of_parameters(params: Parameters, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return loss(with_arrays(model, params), tokens, key=key)

    return make_step(
        of_parameters,
        _transform(model, optimizer, steps),
        schedule(optimizer, steps),
        limit=optimizer.clip,
        norm=partial(global_norm, specs=kept),
        moves=plan_moves(specs, kept, gspmd.reshard, gradients),
    )


def initial_state(model: Transformer, optimizer: OptimizerConfig, steps: int, mesh: jax.sharding.Mesh) -> TrainState:
    """What the first training step is called with: the model's parameters, and an optimizer's that has seen nothing."""
    kept = optimizer_specs(model.config, model.layout)
    return initial(arrays(model), _transform(model, optimizer, steps), mesh, kept)


def abstract_state(model: Transformer, optimizer: OptimizerConfig, steps: int, mesh: jax.sharding.Mesh) -> TrainState:
    """Shapes, types and shardings of `initial_state`; the model may be an abstract one."""
    kept = optimizer_specs(model.config, model.layout)
    return abstract_initial(arrays(model), _transform(model, optimizer, steps), mesh, kept)


def evaluation_step(model: Transformer) -> Callable[[Parameters, jax.Array], jax.Array]:
    """(parameters, tokens [B, L+1]) -> mean cross-entropy in nats of the next token; no router draws."""

    def evaluate(params: Parameters, tokens: jax.Array) -> jax.Array:
        return loss(with_arrays(model, params), tokens, train=False)[1]["cross_entropy"]

    return evaluate


def forward_step(model: Transformer) -> Callable[[Parameters, jax.Array], jax.Array]:
    """(parameters, tokens [B, L] placed as `embedding.tokens`) -> logits [B, L, V], placed as `output.logits`, float32.

    What it leaves out: nothing is kept of keys and values, so a sequence is as long as the tokens that are given.
    """

    def forward(params: Parameters, tokens: jax.Array) -> jax.Array:
        return with_arrays(model, params)(tokens)[0]

    return forward


def _transform(model: Transformer, optimizer: OptimizerConfig, steps: int) -> Any:
    """AdamW, whose decay leaves norms alone: they have one dimension besides the stacked N."""
    rows = parameter_specs(model.config, model.layout)
    decayed = {path: len(set(spec.dims) - {"N"}) > 1 for path, (spec, _) in rows.items()}
    return adamw(optimizer, steps, decayed)
