"""Distributions from which initial parameters are drawn.

Tables of a model's tensors name these distributions. JAX is imported only when values are drawn, so that the tables can
be read without importing JAX.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

Initialiser = Callable[["jax.Array", tuple[int, ...]], "jax.Array"]
"""A function that takes a random key and a shape and returns float32 values, such as `jax.nn.initializers.zeros`."""


@dataclass(frozen=True)
class Normal:
    """Initializer that draws values from a truncated normal distribution.

    Initializers with the same deviation are equal, so that their parameters can share a compiled program.

    Attributes:
        deviation: the standard deviation of the values. The distribution is truncated at about 2.3 times this number.

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
    """Initializer that sets all entries to one value.

    Example:
        >>> import jax
        >>> Constant(0.5)(jax.random.key(0), (2,)).tolist()
        [0.5, 0.5]
    """

    value: float

    def __call__(self, key: "jax.Array", shape: tuple[int, ...]) -> "jax.Array":
        import jax.numpy as jnp

        return jnp.full(shape, self.value, jnp.float32)
