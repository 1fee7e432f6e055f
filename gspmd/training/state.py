"""What a step of training carries: the count, the parameters and the optimizer's state, each placed by its own spec."""

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
        params: tree of parameters.
        optimizer: what the optimizer remembers; may be sharded over more axes than the parameters (ZeRO-1).
    """

    step: jax.Array
    params: Tree
    optimizer: Tree


def shardings(specs: Tree, mesh: Mesh) -> Tree:
    """A tree of specs as the same tree of shardings over a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec.partition_spec()), specs, is_leaf=_is_spec)


def initial(params: Tree, transform: optax.GradientTransformation, mesh: Mesh, specs: Tree | None = None) -> TrainState:
    """The state before the first update.

    Args:
        params: tree of placed parameters.
        transform: the optimizer.
        mesh: the mesh that the state stands on.
        specs: a spec per parameter, for what the optimizer keeps of it; None to place it as the parameter.

    Returns:
        The state; moments are placed by their specs, counts are on every device.
    """
    shapes = abstract_initial(params, transform, mesh, specs)
    placed = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    optimizer = jax.jit(transform.init, out_shardings=placed.optimizer)(params)
    return TrainState(jax.device_put(jnp.int32(0), placed.step), params, optimizer)


def abstract_initial(
    params: Tree, transform: optax.GradientTransformation, mesh: Mesh, specs: Tree | None = None
) -> TrainState:
    """Shapes, types and shardings of `initial`, whose parameters may be `jax.ShapeDtypeStruct`s; nothing is made."""
    like = jax.tree.map(lambda leaf: leaf.sharding, params) if specs is None else shardings(specs, mesh)
    everywhere = NamedSharding(mesh, P())
    # Away from the mesh in force: the optimizer makes a few numbers, and its devices may exist for a compiler only.
    with jax.set_mesh(None):
        shapes = jax.eval_shape(transform.init, jax.tree.map(lambda leaf: _placed(leaf, None), params))
        optimizer = optax.tree_map_params(
            transform, _placed, shapes, like, transform_non_params=lambda leaf: _placed(leaf, everywhere)
        )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere), abstract(params), optimizer)


def abstract(state: Tree) -> Tree:
    """A state's shapes, types and shardings, or those of a part of it, without the values."""
    return jax.tree.map(lambda leaf: _placed(leaf, leaf.sharding), state)


def _placed(leaf: Any, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, Spec)
