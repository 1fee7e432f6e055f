"""The default lowering: a context, part of jit's cache key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.collectives.lowering import current, resolve
from tests.collectives import compiled

EQUATION = "BE_x, E_xF -> BF_x"


def test_contexts_nest_and_end():
    assert current() == "auto"
    with gspmd.lowering("xla"):
        assert current() == "xla"
        with gspmd.lowering("blocking"):
            assert current() == "blocking"
        assert current() == "xla"
    assert current() == "auto"


def test_auto_is_the_one_whose_cost_is_known():
    assert resolve(None) == "blocking"
    with gspmd.lowering("xla"):
        assert (resolve(None), resolve("blocking"), resolve("auto")) == ("xla", "blocking", "blocking")


def test_a_context_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), gspmd.lowering("xla"):
        raise ZeroDivisionError
    assert current() == "auto"


def test_jit_compiles_again_under_another_lowering(make_mesh):
    """A context variable that jit does not know would give a stale program."""
    traces = []

    @jax.jit
    def program(x, w):
        traces.append(current())
        return gspmd.einsum(EQUATION, x, w)

    with jax.set_mesh(make_mesh({"x": 8})):
        x, w = gspmd.annotate(jnp.ones((8, 16)), "BE_x"), gspmd.annotate(jnp.ones((16, 32)), "E_xF")
        for name in ("blocking", "xla", "blocking", "xla"):
            with gspmd.lowering(name):
                result = program(x, w)
                assert np.asarray(result)[0, 0] == 16
    assert traces == ["blocking", "xla"]


def test_an_argument_beats_the_context(make_mesh):
    with jax.set_mesh(make_mesh({"x": 8})), gspmd.lowering("xla"):
        x, w = gspmd.annotate(jnp.ones((8, 16)), "BE_x"), gspmd.annotate(jnp.ones((16, 32)), "E_xF")
        program = jax.jit(lambda x, w: gspmd.einsum(EQUATION, x, w, lowering="blocking"))
        text = program.lower(x, w).compile().as_text()
    assert dict(compiled.collectives(text)) == {"reduce-scatter": 1}
    assert "step1.reduce-scatter.x" in text
