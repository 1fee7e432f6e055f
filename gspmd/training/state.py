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
    like = jax.tree.map(lambda leaf: leaf.sharding, params) if specs is None else shardings(specs, mesh)
    everywhere = NamedSharding(mesh, P())
    shapes = jax.eval_shape(transform.init, params)
    placed = optax.tree_map_params(
        transform, lambda _, sharding: sharding, shapes, like, transform_non_params=lambda _: everywhere
    )
    optimizer = jax.jit(transform.init, out_shardings=placed)(params)
    return TrainState(jax.device_put(jnp.int32(0), everywhere), params, optimizer)


def abstract(state: TrainState) -> TrainState:
    """The state's shapes, types and shardings, without its values."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, Spec)
