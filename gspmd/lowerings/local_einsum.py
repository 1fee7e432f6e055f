"""The product of one device's operands, accumulated in float32, in the form that each compiler multiplies fastest:

CPUs   a batched product becomes a product of batches of matrices, which XLA:CPU multiplies in their memory order
TPUs   the same if there is one batch dimension and the rows fill tiles; a single row gets a second row of zeros
GPUs   a single row of a narrow dtype gets a second row of zeros; otherwise `jnp.einsum`
other  `jnp.einsum`
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.lowerings import in_force

ONE_ROW = "one_row"
"""The named scope of a product to which a row of zeros was added. FLOP counts halve the operations in this scope."""


def local_einsum(letters: str, *operands: jax.Array, precision: Any = None, into: Any = None) -> jax.Array:
    """Compute an einsum of one device's operands, accumulated in float32, int32 or uint32 if they are narrower.

    Args:
        letters: the equation, as in `jnp.einsum`.
        precision: the precision of the product.
        into: the dtype of the matrix unit's result; by default the dtype of the accumulator. Accelerators accumulate in
            float32 whatever `into` is. Partial sums that the compiler reduces over devices have the dtype `into`.
    """
    wide, on_cpu = accumulator(*(x.dtype for x in operands)), in_force.is_host()
    floating = [x.dtype for x in operands if jnp.issubdtype(x.dtype, jnp.floating)]
    if len(floating) == 1 and floating[0].itemsize > 1:  # 8-bit operands are exact in this dtype
        operands = tuple(x.astype(floating[0]) if x.dtype.itemsize == 1 else x for x in operands)
    einsum: Callable[..., jax.Array] = jnp.einsum
    if len(operands) == 1 or on_cpu or len({x.dtype for x in operands}) > 1:
        # The operands are cast for three reasons: a sum has no accumulator; XLA:CPU has no batched product of narrow
        # operands with a wide result; and two operands may have no joint dtype narrower than the accumulator's.
        operands, into = tuple(x.astype(wide) for x in operands), None if len(operands) == 1 or on_cpu else into
    if on_cpu:
        einsum = _einsum_on_cpu
    elif in_force.is_tpu():
        einsum = _einsum_on_tpu
    elif in_force.is_gpu():
        einsum = _einsum_on_gpu
    return einsum(letters, *operands, precision=precision, preferred_element_type=into or wide)


def accumulator(*dtypes) -> jnp.dtype:
    """Return the dtype in which a product of operands with these dtypes accumulates.

    It is float32, int32 or uint32 if the operands are narrower. Otherwise it is the dtype to which JAX promotes the
    operands.
    """
    with jax.numpy_dtype_promotion("standard"):  # the user may have set a stricter promotion for other code
        return jnp.result_type(*map(_widened, dtypes))


def _widened(dtype: jnp.dtype) -> jnp.dtype:
    # Each dtype is widened before promotion: JAX does not promote 8-bit floats and 4-bit integers.
    if dtype.itemsize >= 4:
        return dtype
    floating, unsigned = (jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.unsignedinteger))
    return jnp.dtype(jnp.float32 if floating else jnp.uint32 if unsigned else jnp.int32)


# -- by device ---------------------------------------------------------------------------------------------------------


def _einsum_on_cpu(
    letters: str, *operands: jax.Array, precision: Any = None, preferred_element_type: Any = None
) -> jax.Array:
    """Compute an einsum, as a product of batches of matrices if the einsum has a batch dimension."""
    if len(operands) == 2 and _are_whole() and (in_order := batched(letters)):
        return in_order(*operands, precision)
    return jnp.einsum(letters, *operands, precision=precision, preferred_element_type=preferred_element_type)


def _einsum_on_tpu(
    letters: str, *operands: jax.Array, precision: Any = None, preferred_element_type: Any = None
) -> jax.Array:
    """Compute an einsum; if a single row multiplies a matrix, append a row of zeros and drop its result.

    libtpu 0.0.42 multiplies a single row elementwise on the vector unit. On a v4, two products with an int8 matrix
    [4096, 2048] take 58 µs each with one row, and 14 µs each with two rows. While one token is decoded, every product
    has a single row.
    """
    options = {"precision": precision, "preferred_element_type": preferred_element_type}
    found = _row(letters, *operands) if len(operands) == 2 else None
    if found is None:
        return einsum_in_tiles(letters, *operands, **options)
    return _in_two_rows(letters, found, *operands, **options)


def _einsum_on_gpu(
    letters: str, *operands: jax.Array, precision: Any = None, preferred_element_type: Any = None
) -> jax.Array:
    """Compute an einsum; if a single row multiplies a matrix of a narrow dtype, append a row of zeros.

    cuBLAS has no product of a vector and a matrix in bfloat16 with a result in float32, so XLA converts the whole
    matrix to float32. On an H100, [1, 4096] x [4096, 16384] takes 250 µs, and 49 µs with two rows. Batches of such
    products are not changed, because XLA computes them by kernels of its own, which convert nothing in memory.
    """
    options = {"precision": precision, "preferred_element_type": preferred_element_type}
    narrow = len(operands) == 2 and all(x.dtype.itemsize < 4 for x in operands)
    found = _row(letters, *operands) if narrow and not _batch(letters, *operands) else None
    if found is None:
        return jnp.einsum(letters, *operands, **options)
    return _in_two_rows(letters, found, *operands, **options)


def _batch(letters: str, *operands: jax.Array) -> bool:
    """Return whether a product of two operands has a batch dimension larger than 1."""
    inputs, result = letters.split("->")
    one, other = inputs.split(",")
    return any(size > 1 and dim in other and dim in result for dim, size in zip(one, operands[0].shape))


def _in_two_rows(letters: str, found: tuple[int, str], *operands: jax.Array, **options: Any) -> jax.Array:
    """Append a row of zeros to the single row of a product, compute the product, and drop the added row's result.

    `found` is what `_row` has returned for this product.
    """
    number, dim = found
    inputs, result = letters.split("->")
    x, pair = operands[number], list(operands)
    padding = [(0, 1 if each == dim else 0, 0) for each in inputs.split(",")[number]]
    pair[number] = lax.pad(x, jnp.zeros((), x.dtype), padding)
    with jax.named_scope(ONE_ROW):
        two = jnp.einsum(letters, *pair, **options)
    return lax.slice_in_dim(two, 0, 1, axis=result.index(dim))


def _row(letters: str, *operands: jax.Array) -> tuple[int, str] | None:
    """Return the index of an operand that is a single row, and the dimension to which a second row can be added.

    This dimension is the last one of the operand that the result also has and the other operand lacks. `_row` returns
    None if this is not a product of a single row and a matrix, or if the row has no such dimension.
    """
    inputs, result = letters.split("->")
    held = inputs.split(",")
    sizes = {dim: size for dims, x in zip(held, operands) for dim, size in zip(dims, x.shape)}
    own = [[dim for dim in dims if dim in result and dim not in other] for dims, other in zip(held, reversed(held))]
    rows = [prod(sizes[dim] for dim in dims) for dims in own]
    summed = prod(sizes[dim] for dim in held[0] if dim in held[1] and dim not in result)
    if summed == 1 or 1 not in rows or rows == [1, 1]:
        return None
    number = rows.index(1)
    return (number, own[number][-1]) if own[number] else None


# This need not be part of jit's cache key: it is read while a program is traced, and set only by that program.
_IN_TILES = ContextVar("in_tiles", default=True)


@contextmanager
def as_compiled() -> Iterator[None]:
    """Leave batched einsums as they are inside a `with` block, instead of rewriting them as products of matrices.

    The compiler then chooses their memory order.
    """
    token = _IN_TILES.set(False)
    try:
        yield
    finally:
        _IN_TILES.reset(token)


def einsum_in_tiles(
    letters: str, *operands: jax.Array, precision: Any = None, preferred_element_type: Any = None
) -> jax.Array:
    """Compute an einsum, as a product of batches of matrices if it has one batch dimension and its rows fill tiles.

    This form is for layers of experts (dimension X). For tensors such as `[G, X, C, F]`, libtpu 0.0.42 chooses a memory
    order for each product, and copies tensors between products with different orders. With 8 slots per group and
    expert, a layer took 6.3 ms, of which copies of hidden layers took 0.9 ms. As products of matrices the layer takes
    5.2 ms. A single product gains nothing. If the dimensions do not fill tiles, merging the dimensions is itself a
    copy: with 4 slots the layer took 2.5 times as long.
    """
    if len(operands) == 2 and _IN_TILES.get() and _are_whole():
        product = batched(letters)
        if product and product.fills_tiles(*(x.shape for x in operands)):
            return product(*operands, precision, preferred_element_type)
    return jnp.einsum(letters, *operands, precision=precision, preferred_element_type=preferred_element_type)


def _are_whole() -> bool:
    """Return whether arrays are local to one device.

    That is so if there is only one device, or inside a shard_map over all mesh axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size == 1 or mesh.are_all_axes_manual


# -- batched products as batches of matrices ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Batched:
    """An einsum of two operands as a product of batches of matrices.

    Attributes:
        letters: the dimensions of the left operand, of the right operand and of the result.
        batch: the dimensions that both operands and the result have, in the order of the result.
        contracted: the dimensions that both operands have and the result lacks.
        left: the dimensions that only the left operand and the result have, in the order of the result.
        right: the dimensions that only the right operand and the result have, in the order of the result.
    """

    letters: tuple[str, str, str]
    batch: tuple[str, ...]
    contracted: tuple[str, ...]
    left: tuple[str, ...]
    right: tuple[str, ...]

    def __call__(self, x: jax.Array, w: jax.Array, precision: Any = None, into: Any = None) -> jax.Array:
        """Multiply arrays that are local to this device."""
        left, right, result = self.letters
        sizes = dict(zip(left + right, x.shape + w.shape))
        x, x_contracts = self._matrices(x, left, self.left, sizes)
        w, w_contracts = self._matrices(w, right, self.right, sizes)
        numbers = (((x_contracts,), (w_contracts,)), ((0,), (0,)))
        y = lax.dot_general(x, w, numbers, precision=precision, preferred_element_type=into)
        dims = (*self.batch, *self.left, *self.right)
        return y.reshape([sizes[dim] for dim in dims]).transpose([dims.index(dim) for dim in result])

    def fills_tiles(self, *shapes: tuple[int, ...]) -> bool:
        """Return whether the product needs no copies on a TPU, given the shapes of the operands.

        There must be one batch dimension, and each operand must have a dimension of its own. Dimensions that are merged
        into rows must fill tiles of 8 rows. The last dimension of an array fills the lanes, and must not be merged.
        """
        if len(self.batch) > 1 or not self.left or not self.right:
            return False
        sizes = {dim: size for dims, shape in zip(self.letters, shapes) for dim, size in zip(dims, shape)}
        rows = [dims[-1] for dims in (self.contracted, self.left, self.right) if len(dims) > 1]
        lanes = {dims[-1] for dims in self.letters}
        return all(sizes[dim] % 8 == 0 and dim not in lanes for dim in rows)

    def _matrices(self, x: jax.Array, dims: str, free: Sequence[str], sizes: dict) -> tuple[jax.Array, int]:
        """Return an operand as [batch, rows, columns], and the index of its contracted dimension: 1 or 2."""
        # XLA:CPU multiplies rows and columns in either order, so an operand is copied only if its rows or its columns
        # are not together in memory.
        first = next(dim for dim in dims if dim not in self.batch)
        parts = (self.contracted, free) if first in self.contracted else (free, self.contracted)
        order = [dims.index(dim) for dim in (*self.batch, *parts[0], *parts[1])]
        shape = [prod(sizes[dim] for dim in part) for part in (self.batch, *parts)]
        return x.transpose(order).reshape(shape), 1 if parts[0] is self.contracted else 2


@lru_cache(maxsize=1024)
def batched(letters: str) -> Batched | None:
    """Return an einsum of two operands as a product of batches of matrices, or None if the einsum has no such form.

    `jnp.einsum` puts the batch first, and leaves the order of the other dimensions to the compiler. On CPUs the
    compiler copies operands, results and gradients into other orders, and a mixture of experts took 1.6 times as long.

    Args:
        letters: the equation of two operands, as in `jnp.einsum`.

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
