"""Building of the training step, the state and the evaluation of any model in any layout.

They are built for arrays, or for abstract arguments: shapes, dtypes and shardings without values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.layouts import Layout
from gspmd.layouts.initial import abstract, abstract_key
from gspmd.ops._einsum import reshard
from gspmd.ops._global_norm import global_norm
from gspmd.training.config import Update
from gspmd.training.model.trainable import Batch, Trainable
from gspmd.training.optimizer import adamw
from gspmd.training.optimizer import schedule as rate_by_step
from gspmd.training.optimizer.int8 import block_faults
from gspmd.training.optimizer.masters import with_masters
from gspmd.training.state import TrainState, abstract_initial, initial, shardings
from gspmd.training.step.microbatches import Microbatches
from gspmd.training.step.moves import plan_moves
from gspmd.training.step.update import Step, make_step
from gspmd.training.toml import ConfigError

T = TypeVar("T")
Parameters = Mapping[str, Any]


def abstract_program(
    model: Trainable, update: Update, batch: int, length: int
) -> Callable[[Layout, jax.sharding.Mesh], tuple[Step, TrainState, Any, Any]]:
    """Return a function that makes an uncompiled update and its abstract arguments for a layout and a mesh.

    The function is (layout, mesh) -> (update, state, batch, key), and allocates nothing. The layout must be resolved,
    and must fit the model (`Trainable.check`). Trace, lower or compile the update under `jax.set_mesh(mesh)`. The mesh
    may belong to an offline topology. For `gspmd.trace` an abstract mesh without devices is enough.

    Args:
        model: a custom model (`gspmd.training.model.Own`), or a `gspmd_models.step.Language`.
        update: the settings of the update.
        batch: number of sequences in a batch, over all devices.
        length: number of tokens that each sequence predicts.
    """

    def of(layout: Layout, mesh: jax.sharding.Mesh) -> tuple[Step, TrainState, Any, Any]:
        state = abstract_state(model, layout, abstract_parameters(model, layout, mesh), update, mesh)
        tokens = abstract_batch(model, layout, mesh, batch, length)
        return training_step(model, layout, update), state, tokens, abstract_key(mesh)

    return of


def abstract_parameters(model: Trainable, layout: Layout, mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and shardings of all parameters, with dtype float32."""
    return {path: abstract(row.spec, row.shape, jnp.float32, mesh) for path, row in model.rows(layout).items()}


def abstract_batch(model: Trainable, layout: Layout, mesh: jax.sharding.Mesh, batch: int, length: int) -> Any:
    """Return the shape and sharding of a batch, int32 [B, L+1]; if it has several arrays, return those of each."""
    spec = model.batch_spec(layout)
    arrays = {name: abstract(spec, (batch, width), jnp.int32, mesh) for name, width in model.widths(length).items()}
    return arrays["tokens"] if len(arrays) == 1 else arrays


def training_step(model: Trainable, layout: Layout, update: Update) -> Step:
    """Build an uncompiled training step, a function (state, batch, key) -> (state, metrics).

    If the loss receives a parameter as `EF reduced-x` (see `Trainable.for_loss`), the loss leaves the parameter's
    gradient as a partial sum. The gradient is reduced only once, on its way to the parameter's spec in [optimizer].

    Args:
        model: any model.
        layout: the layout, resolved for the mesh.
        update: the settings of the update. Loss and metrics are those of the whole batch: if there are several
            microbatches, they are averages over the microbatches. Every microbatch has its own random draws. Frozen
            parameters have no gradients and no optimizer state.

    Returns:
        A pure function of a state (`initial_state`, `abstract_state`), tokens [B, L+1] sharded as
        `Trainable.batch_spec`, and a random key. Call or lower the function under `jax.set_mesh`.
    """
    trained = model.trained(layout, update.frozen)
    for_loss = model.for_loss(layout, update.microbatches)
    own, taken = _specs(model, layout), _specs(model, for_loss)
    kept, given = _of(trained, model.optimizer_specs(layout)), _of(trained, model.gradient_specs(layout))
    # A gradient that stays a partial sum has the spec in which the loss leaves it.
    gradients = {path: taken[path].cotangent if spec.partial else spec for path, spec in given.items()}
    moves = plan_moves(_of(trained, own), kept, reshard, gradients, _of(trained, taken))
    held = {path: spec for path, spec in own.items() if path not in kept}
    frozen_moves = plan_moves(held, held, reshard, loss=_of(list(held), taken))
    optimizer, batch = update.optimizer, model.batch_spec(layout)

    def step(state: TrainState, tokens: Batch, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        if held and moves.partial and not jax.sharding.get_abstract_mesh().are_all_axes_explicit:
            raise PlanError(
                "cannot keep gradients as partial sums with frozen parameters under Auto mesh axes.\n"
                "  Use Explicit axes, or one microbatch and [gradients] without partialsum-."
            )
        still = {path: value for path, value in state.params.items() if path in held}
        there = frozen_moves.to_loss(still)

        def of_trained(
            params: Parameters, tokens: Batch, key: jax.Array, total: jax.Array | None = None
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            value, figures = model.loss(for_loss, {**there, **params}, tokens, key, update.microbatches, total)
            return value, dict(figures)

        made = make_step(
            of_trained,
            _transform(model, layout, update, trained),
            rate_by_step(optimizer, update.steps),
            limit=optimizer.clip,
            norm=partial(global_norm, specs=kept),
            moves=moves,
            microbatches=Microbatches(model.cut(layout, update.microbatches), batch),
            total=partial(model.predicted, for_loss),
        )
        state, metrics = made(replace(state, params=_of(trained, state.params)), tokens, key)
        still, figures = model.adjusted(layout, still, metrics, update.microbatches, update.frozen)
        return replace(state, params={**still, **state.params}), dict(figures)

    return step


def initial_state(
    model: Trainable, layout: Layout, values: Parameters, update: Update, mesh: jax.sharding.Mesh
) -> TrainState:
    """Return the state before the first update: all parameters, and optimizer state for the trained parameters.

    Args:
        model, layout, update: see `training_step`.
        values: the parameters in float32, placed on the mesh, by path.
        mesh: the mesh of the parameters.
    """
    return _state(initial, model, layout, values, update, mesh)


def abstract_state(
    model: Trainable, layout: Layout, values: Parameters, update: Update, mesh: jax.sharding.Mesh
) -> TrainState:
    """Return the shapes, dtypes and shardings of the state that `initial_state` returns.

    The parameters may be `jax.ShapeDtypeStruct`s.
    """
    return _state(abstract_initial, model, layout, values, update, mesh)


def _state(begin, model, layout, values, update, mesh) -> TrainState:
    trained, rows = model.trained(layout, update.frozen), model.rows(layout)
    kept, optimizer = _of(trained, model.optimizer_specs(layout)), update.optimizer
    if optimizer.moments == "int8":
        shapes = {path: rows[path].shape for path in trained}
        local = {path: spec.local_shape(shapes[path], dict(mesh.shape)) for path, spec in kept.items()}
        if faults := block_faults(shapes, local, optimizer.moments_block):
            raise ConfigError("cannot keep the optimizer's moments:", faults)
    state = begin(_of(trained, values), _transform(model, layout, update, trained), mesh, kept)
    dtypes = {path: jnp.float32 if row.float32 else update.parameter_dtype for path, row in rows.items()}
    return replace(state, params={path: _cast(value, dtypes[path]) for path, value in values.items()})


def _cast(value: jax.Array | jax.ShapeDtypeStruct, dtype: Any) -> jax.Array | jax.ShapeDtypeStruct:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, dtype, sharding=value.sharding)
    return value.astype(dtype)


def abstract_gradients(
    model: Trainable, layout: Layout, params: Parameters, mesh: jax.sharding.Mesh, frozen: Sequence[str] = ()
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes, dtypes and shardings of the gradients of all trained parameters.

    A gradient that is a partial sum has the optimizer's sharding here, as if it were already reduced (as in ZeRO-2).

    Args:
        model, layout, frozen: see `training_step`.
        params: the parameters, or their shapes and dtypes.
        mesh: the mesh.
    """
    specs, kept = model.gradient_specs(layout), model.optimizer_specs(layout)
    placed = shardings({path: kept[path] if spec.partial else spec for path, spec in specs.items()}, mesh)
    shapes = {path: params[path] for path in model.trained(layout, frozen)}
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed[path]) for path, x in shapes.items()}


def evaluation_step(
    model: Trainable, layout: Layout, microbatches: int = 1
) -> Callable[[Parameters, Batch], jax.Array]:
    """Return a function (parameters, tokens [B, L+1]) -> mean cross-entropy in nats, without random draws.

    Args:
        model, layout: see `training_step`.
        microbatches: number of parts of a batch that go through pipeline stages one after another.
    """
    return lambda params, tokens: model.cross_entropy(layout, params, tokens, microbatches)


def _transform(model: Trainable, layout: Layout, update: Update, trained: Sequence[str]) -> Any:
    """Return AdamW with weight decay for matrices only. A vector stacked over layers, [N, E], is not a matrix."""
    decayed = {path: row.is_matrix for path, row in _of(trained, model.rows(layout)).items()}
    transform = adamw(update.optimizer, update.steps, decayed)
    return transform if jnp.dtype(update.parameter_dtype) == jnp.float32 else with_masters(transform)


def _specs(model: Trainable, layout: Layout) -> dict[str, Spec]:
    return {path: row.spec for path, row in model.rows(layout).items()}


def _of(paths: Sequence[str], values: Mapping[str, T]) -> dict[str, T]:
    return {path: values[path] for path in paths}
