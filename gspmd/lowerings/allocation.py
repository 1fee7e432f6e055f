"""Local tensors that are allocated before they are written, place by place."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


def blank(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Allocate a local tensor that will be written completely; unlike with `lax.empty`, it is never batched."""
    # JAX refuses a result with a needless batch dimension where it expects none, as in the value of a `jax.hessian`.
    made = jax.custom_batching.custom_vmap(lambda: lax.empty(tuple(shape), dtype))
    made.def_vmap(lambda size, batched: (made(), False))
    return made()
