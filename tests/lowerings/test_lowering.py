"""The default lowering: a context, part of jit's cache key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.lowerings.in_force import current, resolve
from tests.references import compiled

EQUATION = "BE_x, E_xF -> BF_x"


def test_contexts_nest_and_end():
    assert current() == "auto"
    with gspmd.lowering("xla"):
        assert current() == "xla"
        with gspmd.lowering("blocking"):
            assert current() == "blocking"
        assert current() == "xla"
    assert current() == "auto"


def test_auto_stays_what_it_is_until_an_equation_is_planned():
    assert resolve(None) == "auto"
    with gspmd.lowering("xla"):
        assert (resolve(None), resolve("looped:paired"), resolve("auto")) == ("xla", "looped:paired", "auto")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (
            "loop",
            "Did you mean 'looped'? Known: auto, xla, blocking, looped, looped:halves, looped:paired.",
        ),
        ("looped:one-way", "Did you mean 'looped'? Known: auto, xla, blocking, looped, looped:halves, looped:paired."),
        ("looped:halfs", "Did you mean 'looped:halves'? Known: "),
    ],
)
def test_an_unknown_lowering(name, remedy):
    with pytest.raises(gspmd.PlanError) as error, gspmd.lowering(name):
        pass
    assert str(error.value).startswith(f"no lowering is called {name!r}.\n  {remedy}")


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
        for name in ("blocking", "xla", "looped", "looped:paired") * 2:
            with gspmd.lowering(name):
                result = program(x, w)
                assert np.asarray(result)[0, 0] == 16
    assert traces == ["blocking", "xla", "looped", "looped:paired"]


def test_an_argument_beats_the_context(make_mesh):
    with jax.set_mesh(make_mesh({"x": 8})), gspmd.lowering("xla"):
        x, w = gspmd.annotate(jnp.ones((8, 16)), "BE_x"), gspmd.annotate(jnp.ones((16, 32)), "E_xF")
        program = jax.jit(lambda x, w: gspmd.einsum(EQUATION, x, w, lowering="blocking"))
        text = program.lower(x, w).compile().as_text()
    assert dict(compiled.collectives(text)) == {"reduce-scatter": 1}
    assert "step1.reduce-scatter.x" in text
