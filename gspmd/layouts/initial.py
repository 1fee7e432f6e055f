"""Initial parameters: their shapes, their distributions, and drawing each shard on its device."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gspmd.annotate import Spec

Initialiser = Callable[[jax.Array, tuple[int, ...]], jax.Array]
"""A function from a random key and a shape to float32 values, such as the functions of `jax.nn.initializers`."""


@dataclass(frozen=True)
class Normal:
    """Truncated normal initializer; equal ones share a compiled program.

    Example:
        >>> round(float(Normal(0.5)(jax.random.key(0), (1000,)).std()), 1)
        0.5
    """

    deviation: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        # A unit normal truncated at two standard deviations has a standard deviation of 0.8796.
        return jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32) * (self.deviation / 0.87962566)


@dataclass(frozen=True)
class Constant:
    """Constant initializer.

    Example:
        >>> Constant(0.5)(jax.random.key(0), (2,)).tolist()
        [0.5, 0.5]
    """

    value: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jnp.full(shape, self.value, jnp.float32)


def abstract(spec: Spec, shape: tuple[int, ...], dtype: Any, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """Return the abstract array of a shape and dtype, sharded as a spec says."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec.partition_spec()))


def abstract_key(mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """Return an abstract random key, replicated."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, jax.P()))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert paths to a tree: `{"a.b": 1, "a.c": 2}` to `{"a": {"b": 1, "c": 2}}`."""
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
    """Compile key -> initial array; parameters of equal distribution, shape and sharding share the program.

    No device ever holds more than its own shard, and the values do not depend on the sharding. Call it under
    `jax.set_mesh`.

    Args:
        begin: the function that draws one array.
        shape: the shape of the parameter, with N first if layers are stacked.
        placed: the sharding of the parameter.
        stacked: whether layers are stacked; each layer is then drawn with its own key.
    """

    def draw(key: jax.Array) -> jax.Array:
        if not stacked:
            return begin(key, shape)
        # A loop over layers compiles faster than one draw of the whole stack.
        return jax.lax.map(lambda key: begin(key, shape[1:]), jax.random.split(key, shape[0]))

    # Under Explicit axes the type of a drawn array would be replicated, so every device would hold all of it.
    return jax.jit(lambda key: jax.sharding.auto_axes(draw, out_sharding=placed)(key), out_shardings=placed)
