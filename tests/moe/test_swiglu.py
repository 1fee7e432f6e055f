"""The gated nonlinearity and its gradient, against the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.moe.swiglu import swiglu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_plain_one(dtype):
    gate, up, cotangent = jax.random.normal(jax.random.key(0), (3, 5, 7)).astype(dtype)
    gate = gate.at[0, :3].set(jnp.array([-40.0, 0.0, 40.0], dtype))
    found, pullback = jax.vjp(swiglu, gate, up)
    wanted, plain = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
    rtol, atol = (1e-6, 1e-6) if dtype == "float32" else (2**-6, 2**-7)
    close = lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol, atol=atol)  # noqa: E731
    jax.tree.map(close, (found, pullback(cotangent)), (wanted, plain(cotangent)))
