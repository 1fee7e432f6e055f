"""Batched products in the one order of dimensions that XLA:CPU multiplies as it stands."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def einsum(letters: str, *operands: jax.Array, precision: Any = None, preferred_element_type: Any = None) -> jax.Array:
    """`jnp.einsum` for CPUs: a batched product in that order, where dimensions can be merged."""
    mesh = jax.sharding.get_abstract_mesh()
    if len(operands) == 2 and (mesh.size == 1 or mesh.are_all_axes_manual) and (in_order := batched(letters)):
        return in_order(*operands, precision)
    return jnp.einsum(letters, *operands, precision=precision, preferred_element_type=preferred_element_type)


@dataclass(frozen=True)
class Batched:
    """An einsum of two operands as a product of batches of matrices.

    Attributes:
        letters: dimensions of the left operand, the right one and the result.
        batch, contracted, left, right: dimensions by what becomes of them, those of the result in its order.
    """

    letters: tuple[str, str, str]
    batch: tuple[str, ...]
    contracted: tuple[str, ...]
    left: tuple[str, ...]
    right: tuple[str, ...]

    def __call__(self, x: jax.Array, w: jax.Array, precision=None) -> jax.Array:
        """Multiply arrays that lie whole on this device."""
        left, right, result = self.letters
        sizes = dict(zip(left + right, x.shape + w.shape))
        x, x_contracts = self._matrices(x, left, self.left, sizes)
        w, w_contracts = self._matrices(w, right, self.right, sizes)
        y = lax.dot_general(x, w, (((x_contracts,), (w_contracts,)), ((0,), (0,))), precision=precision)
        dims = (*self.batch, *self.left, *self.right)
        return y.reshape([sizes[dim] for dim in dims]).transpose([dims.index(dim) for dim in result])

    def _matrices(self, x: jax.Array, dims: str, free: Sequence[str], sizes: dict) -> tuple[jax.Array, int]:
        """An operand as [batch, rows, columns], and which of the two is contracted: the one that stands first stays."""
        # XLA:CPU multiplies either order of the two; so only what is scattered has to be copied.
        first = next(dim for dim in dims if dim not in self.batch)
        parts = (self.contracted, free) if first in self.contracted else (free, self.contracted)
        order = [dims.index(dim) for dim in (*self.batch, *parts[0], *parts[1])]
        shape = [prod(sizes[dim] for dim in part) for part in (self.batch, *parts)]
        return x.transpose(order).reshape(shape), 1 if parts[0] is self.contracted else 2


@lru_cache(maxsize=1024)
def batched(letters: str) -> Batched | None:
    """How to multiply two operands batch by batch; None for an einsum that is no such product.

    `jnp.einsum` puts the batch in front, and leaves the order of what else there is to the compiler, which on CPUs
    copies operands, results and gradients into other orders: a mixture of experts took 1.6 times as long.

    Args:
        letters: as in `jnp.einsum`, of two operands.

    Example:
        >>> batched("GXCE,XEF->GXCF").batch, batched("GXCE,XEF->GXCF").left
        (('X',), ('G', 'C'))
        >>> batched("BE,EF->BF") is None
        True
    """
    operands, result = letters.split("->")
    left, right = operands.split(",")
    shared = [dim for dim in left if dim in right]
    batch = tuple(dim for dim in result if dim in shared)
    contracted = tuple(dim for dim in shared if dim not in result)
    free = [tuple(dim for dim in result if dim in one and dim not in shared) for one in (left, right)]
    counted = [len(batch) + len(contracted) + len(each) for each in free]
    if not batch or not contracted or counted != [len(left), len(right)]:
        return None
    return Batched((left, right, result), batch, contracted, *free)
