"""The gated nonlinearity of an expert, and a gradient that keeps no more than its inputs."""

import jax
from jax import lax


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) · up, whose gradient keeps gate and up alone, and computes the sigmoid again.

    Args:
        gate, up: arrays of one shape.

    Example:
        >>> import jax.numpy as jnp
        >>> swiglu(jnp.zeros(2), jnp.ones(2)).tolist()
        [0.0, 0.0]

    Source: Shazeer, *GLU Variants Improve Transformer*, arXiv 2002.05202, equation 6.
    """
    return jax.nn.silu(gate) * up


def _forward(gate, up):
    return swiglu(gate, up), (gate, up)


def _backward(saved, cotangent):
    # A compiler that sees the sigmoid twice computes it once and keeps it, [X, C, F] more: so here it sees three gates.
    gate, up = lax.optimization_barrier(saved)
    share = jax.nn.sigmoid(gate)
    of_gate = cotangent * up * share * (1 + gate * (1 - share))
    return of_gate, cotangent * jax.nn.silu(lax.optimization_barrier(gate))


swiglu.defvjp(_forward, _backward)
