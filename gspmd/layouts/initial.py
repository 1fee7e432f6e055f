"""Initial parameters: abstract arrays, and functions that initialize each shard on its own device."""

import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding

from gspmd.annotate import Spec
from gspmd.layouts.distributions import Initialiser


def abstract(spec: Spec, shape: tuple[int, ...], dtype: Any, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """Return an abstract array with this shape and dtype, sharded by the spec."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec.partition_spec()))


def abstract_key(mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """Return an abstract random key that is replicated over the mesh."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, jax.P()))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a mapping with dotted paths to a tree: `{"a.b": 1, "a.c": 2}` becomes `{"a": {"b": 1, "c": 2}}`."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *inner, last = path.split(".")
        branch = tree
        for name in inner:
            branch = branch.setdefault(name, {})
        branch[last] = value
    return tree


def folded(key: jax.Array, path: str) -> jax.Array:
    """Return the random key of one parameter: the model's key, folded with the parameter's path."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()))


@lru_cache(maxsize=256)
def drawer(
    begin: Initialiser, shape: tuple[int, ...], placed: jax.P, stacked: bool
) -> Callable[[jax.Array], jax.Array]:
    """Return a jitted function that draws an initial array from a random key.

    Parameters with the same distribution, shape and sharding get the same function. No device ever holds more than its
    own shard, and the values do not depend on the sharding. Call the function under `jax.set_mesh`.

    Args:
        begin: the initializer, a function that draws one array.
        shape: the shape of the parameter, with N first if layers are stacked.
        placed: the sharding of the parameter, as a partition spec.
        stacked: whether the array is a stack of layers. Each layer is then drawn with a key of its own.
    """

    def draw(key: jax.Array) -> jax.Array:
        if not stacked:
            return begin(key, shape)
        # A loop that draws one layer after another compiles faster than drawing the whole stack.
        return jax.lax.map(lambda key: begin(key, shape[1:]), jax.random.split(key, shape[0]))

    # Under Explicit axes the drawn array would have a replicated type, so every device would hold all of it.
    return jax.jit(lambda key: jax.sharding.auto_axes(draw, out_sharding=placed)(key), out_shardings=placed)
