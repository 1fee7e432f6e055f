"""Activation functions of feed-forward layers, some of which keep only their inputs for the gradient."""

from collections.abc import Callable
from functools import update_wrapper

import jax
import jax.numpy as jnp
from jax import lax

_LIMIT = 7.0


def keeping_inputs(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wrap an elementwise function so that only its inputs are kept for the gradient, which recomputes all else.

    If a compiler sees the same sigmoid several times, it computes the sigmoid once. The result, a further array
    [X, C, F], is then kept from the first use to the last. Optimization barriers prevent this, because they hide that
    the forward pass and the gradient have the same inputs.
    """
    of_inputs = update_wrapper(lambda *inputs: function(*inputs), function)
    del of_inputs.__wrapped__  # otherwise its signature might have options, as that of gelu has
    kept = jax.custom_vjp(of_inputs)

    def forward(*inputs):
        return function(*inputs), inputs

    def backward(inputs, cotangent):
        cotangents = []
        for place in range(len(inputs)):
            inputs = lax.optimization_barrier(inputs)
            of_one = lambda x, at=place, given=inputs: function(*given[:at], x, *given[at + 1 :])  # noqa: E731
            cotangents += jax.vjp(of_one, inputs[place])[1](cotangent)
        return tuple(cotangents)

    kept.defvjp(forward, backward)
    return kept


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute silu(gate) · up elementwise, for arrays of the same shape.

    Example:
        >>> import jax.numpy as jnp
        >>> swiglu(jnp.zeros(2), jnp.ones(2)).tolist()
        [0.0, 0.0]

    Source: Shazeer, *GLU Variants Improve Transformer*, arXiv 2002.05202, equation 6.
    """
    return jax.nn.silu(gate) * up


def swiglu_clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute g · sigmoid(1.702 g) · (u + 1) elementwise from clamped inputs g and u, for arrays of the same shape.

    g is min(gate, 7), and u is `up` clipped to [-7, 7].

    Example:
        >>> import jax.numpy as jnp
        >>> [round(float(x), 2) for x in swiglu_clamped(jnp.array([7.0, 70.0]), jnp.array([-1.0, 70.0]))]
        [0.0, 56.0]

    Source: gpt-oss, arXiv 2508.10925, §2.2, and its public code (`swiglu`).
    """
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute gelu(gate) · up elementwise, with the tanh form of gelu, for arrays of the same shape.

    Example:
        >>> import jax.numpy as jnp
        >>> geglu(jnp.zeros(2), jnp.ones(2)).tolist()
        [0.0, 0.0]

    Source: Shazeer, *GLU Variants Improve Transformer*, arXiv 2002.05202, equation 6.
    """
    return jax.nn.gelu(gate) * up


def gelu_exact(x: jax.Array) -> jax.Array:
    """Compute x · Φ(x), where Φ is the normal cumulative distribution; activation "gelu" approximates Φ by tanh."""
    return jax.nn.gelu(x, approximate=False)


GATED: dict[str, Callable[..., jax.Array]] = {"swiglu": swiglu, "swiglu_clamped": swiglu_clamped, "geglu": geglu}
"""Gated activation functions by name. Each has two arguments, the gate and the array that is multiplied by the gate."""

PLAIN: dict[str, Callable[..., jax.Array]] = {
    **GATED, "gelu": jax.nn.gelu, "gelu_exact": gelu_exact, "relu": jax.nn.relu, "silu": jax.nn.silu
}  # fmt: skip
"""Activation functions by name, for dense layers."""

ACTIVATIONS = {name: keeping_inputs(function) for name, function in PLAIN.items()}
"""Activation functions of experts by name. Only their inputs are kept for gradients, since arrays [X, C, F] are large.
"""
