"""The training state: step count, parameters and optimizer state, each sharded by its own spec."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd.annotate.spec import Spec

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of training after `step` updates.

    Attributes:
        step: int32 scalar.
        params: the parameters, as a tree.
        optimizer: the optimizer state, which may be sharded over more axes than the parameters (ZeRO-1).
    """

    step: jax.Array
    params: Tree
    optimizer: Tree


def shardings(specs: Tree, mesh: Mesh) -> Tree:
    """Convert a tree of specs to a tree of shardings over a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec.partition_spec()), specs, is_leaf=_is_spec)


def initial(params: Tree, transform: optax.GradientTransformation, mesh: Mesh, specs: Tree | None = None) -> TrainState:
    """Return the state before the first update.

    Args:
        params: the parameters, as a tree of placed arrays.
        transform: the optimizer, as an optax transformation.
        mesh: the mesh of the state.
        specs: the spec of each parameter's optimizer state; by default the parameter's own sharding.

    Returns:
        The state. Moments are sharded as `specs` says, and the step and other counts are replicated.
    """
    shapes = abstract_initial(params, transform, mesh, specs)
    placed = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    optimizer = jax.jit(transform.init, out_shardings=placed.optimizer)(params)
    return TrainState(jax.device_put(jnp.int32(0), placed.step), params, optimizer)


def abstract_initial(
    params: Tree, transform: optax.GradientTransformation, mesh: Mesh, specs: Tree | None = None
) -> TrainState:
    """Return the shapes, dtypes and shardings of the state that `initial` returns.

    The parameters may be `jax.ShapeDtypeStruct`s.
    """
    like = jax.tree.map(lambda leaf: leaf.sharding, params) if specs is None else shardings(specs, mesh)
    everywhere = NamedSharding(mesh, P())
    # This runs outside the current mesh, because the optimizer computes a few numbers here, and the mesh may be that of
    # an offline topology.
    with jax.set_mesh(None):
        shapes = jax.eval_shape(transform.init, jax.tree.map(lambda leaf: _placed(leaf, None), params))
        optimizer = optax.tree_map_params(
            transform, _placed, shapes, like, transform_non_params=lambda leaf: _placed(leaf, everywhere)
        )
    step = _placed(jax.ShapeDtypeStruct((), jnp.int32), everywhere)
    return TrainState(step, abstract(params), optimizer)


def abstract(state: Tree) -> Tree:
    """Return the shapes, dtypes and shardings of a state or of a part of a state."""
    return jax.tree.map(lambda leaf: _placed(leaf, leaf.sharding), state)


def _placed(leaf: Any, sharding: NamedSharding | None) -> Any:
    """Return a `jax.ShapeDtypeStruct` for an array of a state, with the given sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, Spec)
