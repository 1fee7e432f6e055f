"""The experts' nonlinearities and their gradients, against the plain ones; and what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.moe.experts.activation import ACTIVATIONS, GATED

PLAIN = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "swiglu_clamped": lambda gate, up: (
        jnp.where(gate > 7, 7, gate)
        / (1 + jnp.exp(-1.702 * jnp.where(gate > 7, 7, gate)))
        * (1 + jnp.where(jnp.abs(up) > 7, 7 * jnp.sign(up), up))
    ),
    "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: x * (1 + jax.scipy.special.erf(x / np.sqrt(2.0).astype(x.dtype))) / 2,
    "relu": jax.nn.relu,
    "silu": lambda x: x / (1 + jnp.exp(-x)),
}


@pytest.mark.turns(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_is_the_plain_one(name, dtype):
    *hidden, cotangent = jax.random.normal(jax.random.key(0), (3 if name in GATED else 2, 5, 7)).astype(dtype)
    hidden[0] = hidden[0].at[0, :3].set(jnp.array([-40.0, 0.0, 40.0], dtype))
    hidden[-1] = hidden[-1].at[1, :2].set(jnp.array([-40.0, 40.0], dtype))
    found, pullback = jax.vjp(ACTIVATIONS[name], *hidden)
    wanted, plain = jax.vjp(PLAIN[name], *hidden)
    rtol, atol = (1e-6, 1e-6) if dtype == "float32" else (2**-6, 2**-7)
    close = lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol, atol=atol)  # noqa: E731
    jax.tree.map(close, (found, pullback(cotangent)), (wanted, plain(cotangent)))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gradient_keeps_the_inputs_alone(name):
    hidden = [jnp.ones((4, 8))] * (2 if name in GATED else 1)
    _, pullback = jax.vjp(ACTIVATIONS[name], *hidden)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size > 1]
    assert len(kept) == len(hidden)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_gradient_of_every_input_stands_behind_a_barrier_of_its_own(name):
    """Without it a compiler keeps what two of them have in common, [X, C, F] more."""
    hidden = [jnp.ones((4, 8))] * (2 if name in GATED else 1)
    gradient = jax.make_jaxpr(lambda *hidden: jax.vjp(ACTIVATIONS[name], *hidden)[1](jnp.ones((4, 8))))(*hidden)
    assert str(gradient).count("optimization_barrier") == len(hidden)
