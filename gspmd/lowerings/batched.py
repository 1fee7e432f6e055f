"""Batched products as batches of matrices, whose order in memory is multiplied as it stands: on CPUs, and on TPUs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def einsum(letters: str, *operands: jax.Array, precision: Any = None, preferred_element_type: Any = None) -> jax.Array:
    """`jnp.einsum` for CPUs: a batched product in that order, where dimensions can be merged."""
    if len(operands) == 2 and _are_whole() and (in_order := batched(letters)):
        return in_order(*operands, precision)
    return jnp.einsum(letters, *operands, precision=precision, preferred_element_type=preferred_element_type)


_IN_TILES = ContextVar("in_tiles", default=True)


@contextmanager
def as_compiled() -> Iterator[None]:
    """Products inside lie as the compiler chooses, also where they would be those of matrices."""
    token = _IN_TILES.set(False)
    try:
        yield
    finally:
        _IN_TILES.reset(token)


def einsum_in_tiles(
    letters: str, *operands: jax.Array, precision: Any = None, preferred_element_type: Any = None
) -> jax.Array:
    """`jnp.einsum` for TPUs: a product of one batch dimension as one of matrices, where every row stays in its tile.

    It is for layers of experts, X. Of `[G, X, C, F]` libtpu 0.0.42 chooses an order in memory for each product, and
    copies what is between two that chose differently: with 8 slots of a group for each expert a layer took 6.3 ms, 0.9
    of them to copy hidden layers, and takes 5.2. Alone such a product gains nothing. Where the dimensions do not fill
    tiles, merging them is a copy itself: with 4 slots the layer took 2.5 times as long.
    """
    if len(operands) == 2 and _IN_TILES.get() and _are_whole():
        product = batched(letters)
        if product and product.fills_tiles(*(x.shape for x in operands)):
            return product(*operands, precision, preferred_element_type)
    return jnp.einsum(letters, *operands, precision=precision, preferred_element_type=preferred_element_type)


def _are_whole() -> bool:
    """Return whether an array is what one device holds."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size == 1 or mesh.are_all_axes_manual


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

    def __call__(self, x: jax.Array, w: jax.Array, precision: Any = None, into: Any = None) -> jax.Array:
        """Multiply arrays that lie whole on this device."""
        left, right, result = self.letters
        sizes = dict(zip(left + right, x.shape + w.shape))
        x, x_contracts = self._matrices(x, left, self.left, sizes)
        w, w_contracts = self._matrices(w, right, self.right, sizes)
        numbers = (((x_contracts,), (w_contracts,)), ((0,), (0,)))
        y = lax.dot_general(x, w, numbers, precision=precision, preferred_element_type=into)
        dims = (*self.batch, *self.left, *self.right)
        return y.reshape([sizes[dim] for dim in dims]).transpose([dims.index(dim) for dim in result])

    def fills_tiles(self, *shapes: tuple[int, ...]) -> bool:
        """Return whether it is one matrix a batch, whose merged rows fill tiles of 8 on a TPU; lanes are not merged."""
        if len(self.batch) > 1 or not self.left or not self.right:
            return False
        sizes = {dim: size for dims, shape in zip(self.letters, shapes) for dim, size in zip(dims, shape)}
        rows = [dims[-1] for dims in (self.contracted, self.left, self.right) if len(dims) > 1]
        lanes = {dims[-1] for dims in self.letters}
        return all(sizes[dim] % 8 == 0 and dim not in lanes for dim in rows)

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
    """Return how to multiply two operands batch by batch; None for an einsum that is no such product.

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
