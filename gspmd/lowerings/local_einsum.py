"""The product of what a device holds, accumulated in float32."""

from typing import Any

import jax
import jax.numpy as jnp

from gspmd.lowerings import target


def local_einsum(letters: str, *operands: jax.Array, precision: Any = None, into: Any = None) -> jax.Array:
    """An einsum of what a device holds, accumulated in float32 (or int32) where the operands are narrower.

    Args:
        letters: as in `jnp.einsum`.
        precision: of the product.
        into: the dtype that it leaves the matrix unit in; the accumulator's own if not given. Accelerators accumulate
            in float32 either way, and what the compiler sums over devices has this dtype.
    """
    wide, on_cpu = accumulator(*(x.dtype for x in operands)), target.is_host()
    floating = [x.dtype for x in operands if jnp.issubdtype(x.dtype, jnp.floating)]
    if len(floating) == 1 and floating[0].itemsize > 1:  # what has 8 bits beside it, as quantized weights, is exact
        operands = tuple(x.astype(floating[0]) if x.dtype.itemsize == 1 else x for x in operands)
    einsum: Any = jnp.einsum
    if len(operands) == 1 or on_cpu or len({x.dtype for x in operands}) > 1:
        # A sum has no accumulator of its own, XLA:CPU has no batched product of narrow operands into a wide one, and
        # two dtypes may have no joint one but the accumulator's.
        operands, into = tuple(x.astype(wide) for x in operands), None if len(operands) == 1 or on_cpu else into
    if on_cpu:
        from gspmd.lowerings.batched import einsum
    elif target.is_tpu():
        from gspmd.lowerings.one_row import einsum
    return einsum(letters, *operands, precision=precision, preferred_element_type=into or wide)


def accumulator(*dtypes) -> jnp.dtype:
    """Float32 or int32 for what is narrower, the operands' own joint dtype for what is not."""
    with jax.numpy_dtype_promotion("standard"):  # what is accumulated is cast by hand, whatever a user allows his own
        return jnp.result_type(*map(_widened, dtypes))


def _widened(dtype: jnp.dtype) -> jnp.dtype:
    # Each by itself, before it meets another: the floats of 8 bits and the integers of 4 are promoted to nothing.
    if dtype.itemsize >= 4:
        return dtype
    floating, unsigned = (jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.unsignedinteger))
    return jnp.dtype(jnp.float32 if floating else jnp.uint32 if unsigned else jnp.int32)
