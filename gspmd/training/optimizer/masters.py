"""Float32 masters of narrower parameters: the optimizer updates the masters, and the parameters are rounded copies."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any


class MastersState(NamedTuple):
    """The masters, and the state of the optimizer that updates them, all sharded as optimizer state."""

    masters: Tree
    inner: Any


def with_masters(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Let an optimizer update float32 masters, of which the parameters are rounded copies.

    An update is the difference that `optax.apply_updates` adds to the parameters to get the rounded masters. An update
    of less than half a unit in a parameter's last place is not lost, because the master keeps it.

    Args:
        inner: the optimizer that updates the masters. It gets gradients and masters in float32.

    Returns:
        An optimizer whose `init` takes the parameters before they are rounded.

    Example:
        >>> optimizer = with_masters(optax.sgd(1.0))
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> state = optimizer.init(params)
        >>> for _ in range(4):  # 1/256 is half of bfloat16's last place below 1, and a quarter of that above
        ...     updates, state = optimizer.update(jnp.full(1, -1 / 512, jnp.bfloat16), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params.dtype.name, float(params[0]), float(state.masters[0])
        ('bfloat16', 1.0078125, 1.0078125)

    Source: Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), section 3.1; Rajbhandari et al. 2020,
        ZeRO (arXiv 1910.02054), section 3.1, for the bytes that masters take.
    """

    def init(params: Tree) -> MastersState:
        # Copies: a parameter that is already float32 may be donated beside its master.
        masters = jax.tree.map(lambda param: jnp.array(param, jnp.float32, copy=True), params)
        return MastersState(masters, inner.init(masters))

    def update(gradients: Tree, state: MastersState, params: Tree | None = None) -> tuple[Tree, MastersState]:
        if params is None:
            raise ValueError("masters need the parameters.\n  Pass them: update(gradients, state, params).")
        updates, of_inner = inner.update(jax.tree.map(_wide, gradients), state.inner, state.masters)
        masters = optax.apply_updates(state.masters, updates)
        added = jax.tree.map(lambda master, param: master - _wide(param), masters, params)
        return added, MastersState(masters, of_inner)

    return optax.GradientTransformation(init, update)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
