"""Allocation of local arrays that are then written part by part."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


def blank(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Allocate a local array whose entries will all be overwritten.

    Unlike the result of `lax.empty`, the array is never batched by `vmap`.
    """
    # JAX refuses a result that has a batch dimension where none is expected, as in the value of a `jax.hessian`.
    made = jax.custom_batching.custom_vmap(lambda: lax.empty(tuple(shape), dtype))
    made.def_vmap(lambda size, batched: (made(), False))
    return made()
