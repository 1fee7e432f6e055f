"""Training, evaluation and forward steps of a model, for arrays as for their shapes.

Not imported with `models`, since it imports `gspmd.training` and its libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.errors import PlanError
from gspmd.ops._global_norm import global_norm
from gspmd.training.config import OptimizerConfig
from gspmd.training.optimizer import adamw
from gspmd.training.optimizer import schedule as rate_by_step
from gspmd.training.optimizer.int8 import block_faults
from gspmd.training.optimizer.masters import with_masters
from gspmd.training.state import TrainState, abstract_initial, initial, shardings
from gspmd.training.step import Microbatches, Step, make_step, plan_moves
from gspmd.training.toml import ConfigError

from .config import ModelConfig
from .finetuning.freezing import trained_paths
from .objective import batch_spec, check_rounds, for_stages, loss
from .parameters import gradient_specs, nested, optimizer_specs, parameter_specs, parameters, stages_axes
from .shapes import stored_dtype
from .transformer import Transformer, arrays, with_arrays

T = TypeVar("T")
Parameters = Mapping[str, jax.Array]


def training_step(
    model: Transformer,
    optimizer: OptimizerConfig,
    steps: int,
    microbatches: int = 1,
    schedule: str = "1f1b",
    rounds: int = 1,
    *,
    frozen: Sequence[str] = (),
    parameter_dtype: Any = jnp.float32,
) -> Step:
    """Build one update, not compiled: (state, batch, key) -> (state, metrics).

    A gradient is reduced once, by the move that brings it to where [optimizer] has it, if the layout's [gradients] has
    it as a partial sum, or if there are several microbatches (see `Layout.for_loss`); in a pipeline, over the mesh axes
    along which pipelines run side by side (`gspmd_models.objective.for_stages`).

    Args:
        model: a model, possibly abstract; only its config, layout and dtype are used.
        optimizer: rates and decays.
        steps: total number of updates.
        microbatches: number of parts of a batch that are computed one after the other, which takes less memory, or that
            follow one another through the stages of a pipeline. The loss and its figures are those of the whole batch;
            of experts, groups that span sequences, their capacity and auxiliary losses are those of a microbatch, and
            every microbatch has random draws of its own.
        schedule: of a pipeline, `"1f1b"`, `"gpipe"` or `"zero-bubble"`.
        rounds: of a pipeline, chunks of layers of each stage; with more than one it is interleaved.
        frozen: patterns of parameters that stay as they are, as of `trained_paths`. They have no gradient, so none is
            reduced, and no optimizer state. With adapters (`ModelConfig.lora`) all other parameters stay too.
        parameter_dtype: what matrices are stored in; if not float32, the optimizer has float32 masters.

    Returns:
        A pure function of a state of `initial_state` or `abstract_state`, tokens [B, L+1] placed as `batch_spec`, and a
        random key. Call or lower it under `jax.set_mesh`.

    Raises:
        PlanError: more than one round, and no stages; or [gradients] has a partial sum that stages cannot leave.
    """
    check_rounds(rounds, model.layout)
    config, trained = model.config, trained_paths(model.config, model.layout, frozen)
    # The stages of a pipeline take the microbatches, and the loss is that of the whole batch.
    in_stages = bool(stages_axes(model.layout))
    stages = {"microbatches": microbatches, "schedule": schedule, "rounds": rounds} if in_stages else {}
    layout = for_stages(config, model.layout) if in_stages else model.layout.for_loss(microbatches)
    taken = _specs(config, layout)
    specs, kept, gradients = (
        _of(trained, each(config, model.layout)) for each in (_specs, optimizer_specs, gradient_specs)
    )
    # A partial sum comes as the loss leaves it.
    gradients = {path: taken[path].cotangent if spec.partial else spec for path, spec in gradients.items()}
    moves = plan_moves(specs, kept, gspmd.reshard, gradients, _of(trained, taken))
    held = {path: spec for path, spec in _specs(config, model.layout).items() if path not in specs}
    frozen_moves = plan_moves(held, held, gspmd.reshard, loss=_of(list(held), taken))

    def step(state: TrainState, tokens: jax.Array, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        if held and moves.partial and not jax.sharding.get_abstract_mesh().are_all_axes_explicit:
            raise PlanError(
                "cannot keep gradients partial sums beside frozen parameters under Auto mesh axes.\n"
                "  Use Explicit axes, or one microbatch and [gradients] without partialsum-."
            )
        still = {path: value for path, value in state.params.items() if path in held}
        there = frozen_moves.to_loss(still)

        def of_trained(params: Parameters, tokens: jax.Array, key: jax.Array):
            of_all = Transformer(config, layout, nested({**there, **params}), model.dtype)
            return loss(of_all, tokens, key=key, **stages)

        update = make_step(
            of_trained,
            _transform(model, optimizer, steps, trained, parameter_dtype),
            rate_by_step(optimizer, steps),
            limit=optimizer.clip,
            norm=partial(global_norm, specs=kept),
            moves=moves,
            microbatches=Microbatches(1 if in_stages else microbatches, batch_spec(model.layout)),
        )
        state, metrics = update(replace(state, params=_of(trained, state.params)), tokens, key)
        return replace(state, params={**still, **state.params}), metrics

    return step


def initial_state(
    model: Transformer,
    optimizer: OptimizerConfig,
    steps: int,
    mesh: jax.sharding.Mesh,
    *,
    frozen: Sequence[str] = (),
    parameter_dtype: Any = jnp.float32,
) -> TrainState:
    """The state before the first update: all parameters, and the initial optimizer state of those that are trained."""
    return _state(initial, model, optimizer, steps, mesh, frozen, parameter_dtype)


def abstract_state(
    model: Transformer,
    optimizer: OptimizerConfig,
    steps: int,
    mesh: jax.sharding.Mesh,
    *,
    frozen: Sequence[str] = (),
    parameter_dtype: Any = jnp.float32,
) -> TrainState:
    """Shapes, dtypes and shardings of `initial_state`; the model may be abstract."""
    return _state(abstract_initial, model, optimizer, steps, mesh, frozen, parameter_dtype)


def _state(begin, model, optimizer, steps, mesh, frozen, parameter_dtype) -> TrainState:
    trained, values = trained_paths(model.config, model.layout, frozen), arrays(model)
    rows, kept = parameters(model.config, model.layout), _of(trained, optimizer_specs(model.config, model.layout))
    if optimizer.moments == "int8":
        shapes = {path: rows[path].shape for path in trained}
        local = {path: spec.local_shape(shapes[path], dict(mesh.shape)) for path, spec in kept.items()}
        if faults := block_faults(shapes, local, optimizer.moments_block):
            raise ConfigError("cannot keep the optimizer's moments:", faults)
    state = begin(_of(trained, values), _transform(model, optimizer, steps, trained, parameter_dtype), mesh, kept)
    stored = {path: _cast(value, stored_dtype(rows[path], parameter_dtype)) for path, value in values.items()}
    return replace(state, params=stored)


def _cast(value: jax.Array | jax.ShapeDtypeStruct, dtype: Any) -> jax.Array | jax.ShapeDtypeStruct:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, dtype, sharding=value.sharding)
    return value.astype(dtype)


def abstract_gradients(
    model: Transformer, params: Parameters, mesh: jax.sharding.Mesh, frozen: Sequence[str] = ()
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the gradients of all parameters that are trained, once they are no partial sums.

    Partial ones are settled in the optimizer's layout, as ZeRO-2 has it.

    Args:
        model: possibly abstract.
        params: the parameters, or their shapes.
        mesh: the mesh.
        frozen: as of `training_step`.
    """
    specs, kept = gradient_specs(model.config, model.layout), optimizer_specs(model.config, model.layout)
    placed = shardings({path: kept[path] if spec.partial else spec for path, spec in specs.items()}, mesh)
    shapes = {path: params[path] for path in trained_paths(model.config, model.layout, frozen)}
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed[path]) for path, x in shapes.items()}


def evaluation_step(
    model: Transformer, microbatches: int = 1, rounds: int = 1
) -> Callable[[Parameters, jax.Array], jax.Array]:
    """Build (parameters, tokens [B, L+1]) -> mean next-token cross-entropy in nats, without random draws.

    Args:
        model: as for `training_step`.
        microbatches: parts of a batch that follow one another through the stages of a pipeline.
        rounds: how often each goes round them.

    Raises:
        PlanError: more than one round, and no stages.
    """
    check_rounds(rounds, model.layout)

    stages = {"microbatches": microbatches, "rounds": rounds} if stages_axes(model.layout) else {}

    def entropy(params: Parameters, tokens: jax.Array) -> jax.Array:
        return loss(with_arrays(model, params), tokens, train=False, **stages)[1]["cross_entropy"]

    def evaluate(params: Parameters, tokens: jax.Array) -> jax.Array:
        if not stages or jax.sharding.get_abstract_mesh().are_all_axes_explicit:
            return entropy(params, tokens)
        # Under Auto axes stages train under Explicit ones of the same mesh, which take every lowering.
        specs = {path: spec.partition_spec() for path, spec in _specs(model.config, model.layout).items()}
        placed = specs, batch_spec(model.layout).partition_spec()
        return jax.sharding.explicit_axes(entropy, in_sharding=placed)(dict(params), tokens)

    return evaluate


def forward_step(model: Transformer) -> Callable[[Parameters, jax.Array], jax.Array]:
    """Build (parameters, tokens [B, L]) -> float32 logits [B, L, V], placed by the layout; no key/value cache."""

    def forward(params: Parameters, tokens: jax.Array) -> jax.Array:
        return with_arrays(model, params)(tokens)[0]

    return forward


def _transform(
    model: Transformer, optimizer: OptimizerConfig, steps: int, trained: Sequence[str], parameter_dtype: Any
) -> Any:
    """AdamW with weight decay for matrices only: norms have one dimension besides the stacked N."""
    rows = _of(trained, parameter_specs(model.config, model.layout))
    decayed = {path: len(set(spec.dims) - {"N"}) > 1 for path, (spec, _) in rows.items()}
    transform = adamw(optimizer, steps, decayed)
    return transform if jnp.dtype(parameter_dtype) == jnp.float32 else with_masters(transform)


def _specs(config: ModelConfig, layout: Any) -> dict[str, Spec]:
    return {path: spec for path, (spec, _) in parameter_specs(config, layout).items()}


def _of(paths: Sequence[str], values: Mapping[str, T]) -> dict[str, T]:
    return {path: values[path] for path in paths}
