"""Fingerprints of programs: equal where the programs do the same, and only there."""

import jax
import jax.numpy as jnp
import pytest

from gspmd.tracing.jaxprs import fingerprint


@jax.custom_vjp
def squared(x):
    return x * x


squared.defvjp(lambda x: (x * x, x), lambda x, cotangent: (2 * x * cotangent,))


def looped(scale=2.0, trips=3, body=jnp.sin):
    def run(x):
        return jax.lax.scan(lambda carry, _: (squared(body(carry) * scale), carry), x, None, length=trips)

    return jax.make_jaxpr(run)(jnp.ones(4))


def test_programs_that_are_traced_anew_are_the_same():
    """`squared` has a rule of differentiation, which JAX wraps anew in every trace."""
    assert fingerprint(looped()) == fingerprint(looped())


@pytest.mark.parametrize("other", [{"scale": 3.0}, {"trips": 4}, {"body": jnp.cos}])
def test_what_differs_in_a_loop_differs(other):
    assert fingerprint(looped()) != fingerprint(looped(**other))


def test_operands_are_told_apart():
    one = jax.make_jaxpr(lambda x, y: x - y)(1.0, 2.0)
    other = jax.make_jaxpr(lambda x, y: y - x)(1.0, 2.0)
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) != fingerprint(jax.make_jaxpr(lambda x, y: x - y)(jnp.ones(2), 2.0))
