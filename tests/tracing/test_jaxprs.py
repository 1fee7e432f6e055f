"""The programs that a program's equations are told to have."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from gspmd.tracing.jaxprs import is_reshape


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x: lax.reshape(x, (6,)), True),
        (lambda x: lax.squeeze(x[None], (0,)), True),
        (lambda x: lax.broadcast_in_dim(x, (1, 2, 1, 3), (1, 3)), True),
        (lambda x: lax.reshape(x, (6,), dimensions=(1, 0)), False),  # of the transpose
        (lambda x: lax.broadcast_in_dim(x, (3, 2), (1, 0)), False),  # a transpose
        (lambda x: lax.broadcast_in_dim(x, (4, 2, 3), (1, 2)), False),
        (lambda x: lax.transpose(x, (1, 0)), False),
    ],
)
def test_a_reshape_keeps_every_element_in_its_order(operation, expected):
    *_, last = jax.make_jaxpr(operation)(jnp.ones((2, 3))).jaxpr.eqns
    assert is_reshape(last) is expected
