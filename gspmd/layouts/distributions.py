"""The distributions of initial parameters, for tables of a model's tensors that are read without importing JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

Initialiser = Callable[["jax.Array", tuple[int, ...]], "jax.Array"]
"""A function from a random key and a shape to float32 values, such as those of `jax.nn.initializers`."""


@dataclass(frozen=True)
class Normal:
    """Truncated normal initializer; equal ones share a compiled program.

    Example:
        >>> import jax
        >>> round(float(Normal(0.5)(jax.random.key(0), (1000,)).std()), 1)
        0.5
    """

    deviation: float

    def __call__(self, key: "jax.Array", shape: tuple[int, ...]) -> "jax.Array":
        import jax

        # A unit normal truncated at two standard deviations has a standard deviation of 0.8796.
        return jax.random.truncated_normal(key, -2.0, 2.0, shape, "float32") * (self.deviation / 0.87962566)


@dataclass(frozen=True)
class Constant:
    """Constant initializer.

    Example:
        >>> import jax
        >>> Constant(0.5)(jax.random.key(0), (2,)).tolist()
        [0.5, 0.5]
    """

    value: float

    def __call__(self, key: "jax.Array", shape: tuple[int, ...]) -> "jax.Array":
        import jax.numpy as jnp

        return jnp.full(shape, self.value, jnp.float32)
