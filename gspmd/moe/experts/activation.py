"""The nonlinearities of an expert, whose gradients keep no more than their inputs."""

from collections.abc import Callable
from functools import update_wrapper

import jax
from jax import lax


def keeping_inputs(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """An elementwise function whose gradient keeps its inputs alone, and computes what else it needs again.

    A compiler that sees a sigmoid several times computes it once, and keeps it from the first to the last, [X, C, F]
    more. Behind barriers it cannot see that the value, and the gradient of each input, are of the same inputs.
    """
    of_inputs = update_wrapper(lambda *inputs: function(*inputs), function)
    del of_inputs.__wrapped__  # whose signature may have options, such as gelu's
    kept = jax.custom_vjp(of_inputs)

    def forward(*inputs):
        return function(*inputs), inputs

    def backward(inputs, cotangent):
        found = []
        for place in range(len(inputs)):
            inputs = lax.optimization_barrier(inputs)
            of_one = lambda x, at=place, given=inputs: function(*given[:at], x, *given[at + 1 :])  # noqa: E731
            found += jax.vjp(of_one, inputs[place])[1](cotangent)
        return tuple(found)

    kept.defvjp(forward, backward)
    return kept


@keeping_inputs
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) · up, of arrays of one shape.

    Example:
        >>> import jax.numpy as jnp
        >>> swiglu(jnp.zeros(2), jnp.ones(2)).tolist()
        [0.0, 0.0]

    Source: Shazeer, *GLU Variants Improve Transformer*, arXiv 2002.05202, equation 6.
    """
    return jax.nn.silu(gate) * up


#: By name; swiglu takes the gate's hidden activations first, and then those that it gates.
ACTIVATIONS = {"swiglu": swiglu, "gelu": keeping_inputs(jax.nn.gelu), "relu": keeping_inputs(jax.nn.relu)}
