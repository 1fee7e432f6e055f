"""Expert dropout: the same hidden activations on every mesh and in every form, in training alone."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.moe import MoEConfig
from gspmd.moe.experts.dropout import Dropout
from tests.moe import placed
from tests.moe.placed import LAYOUTS, X

CONFIG = MoEConfig(experts=X, router="gshard", dispatch="sort", capacity_factor=float(X), dropout=0.4)
ALL = {**LAYOUTS, "2d": placed.TWO_DIMENSIONAL}
CASES = [
    ("one axis", "explicit", "looped", "sort"),
    ("experts x data", "explicit", "looped", "dropless"),
]
SLOW = [
    ("data", "auto", "xla", "dropless"),
    ("experts x model", "explicit", "blocking", "sort"),
    ("2d", "explicit", "looped", "dropless"),
    ("experts x data x model", "auto", "xla", "onehot"),
    ("experts x data x model", "explicit", "looped", "sort"),
    ("experts x zero", "explicit", "looped", "sort"),
]


def _run(make_mesh, name, axes, lowering, form, config=CONFIG):
    with jax.set_mesh(make_mesh(ALL[name].mesh, axes)), gspmd.lowering(lowering):
        program = placed.program(ALL[name], replace(config, dispatch=form), "relu")
        return jax.tree.map(np.asarray, program(*placed.arrays(ALL[name])))


@cache
def _one_device():
    mesh = jax.make_mesh((1, 1), ("x", "y"), devices=jax.devices()[:1])
    return _run(lambda *_: mesh, "replicated", "explicit", "blocking", "onehot")


def _check(make_mesh, case):
    found = _run(make_mesh, *case)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, _one_device())


@pytest.mark.turns(1)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_neither_a_layout_nor_a_form_changes_what_is_dropped(case, make_mesh):
    _check(make_mesh, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=" ".join)
def test_no_layout_and_no_form_changes_what_is_dropped(case, make_mesh):
    _check(make_mesh, case)


def test_the_share_that_is_dropped_is_the_rate_and_the_rest_makes_up_for_it():
    dropout, place = Dropout(0.25, 64, 128), jnp.arange(64)[None]
    words = jax.random.bits(jax.random.key(0), (2,), jnp.uint32)
    scale = np.asarray(dropout.scale(words, jnp.zeros((1, 64), int), 0 * place, place, 0, 128))
    np.testing.assert_allclose(np.unique(scale), [0, 1 / 0.75], rtol=1e-6)
    assert abs(np.mean(scale == 0) - 0.25) < 0.02
    part = dropout.scale(words, jnp.zeros((1, 64), int), 0 * place, place, 32, 64)
    np.testing.assert_array_equal(part, scale[..., 32:96])


def test_evaluation_drops_nothing(make_mesh):
    """Nor does training without a key."""
    layout = LAYOUTS["replicated"]
    with jax.set_mesh(make_mesh({"x": 1, "y": 1})):
        arrays = placed.arrays(layout)
        plain, dropped = (
            jax.jit(placed.layer(layout, replace(CONFIG, dropout=rate)))(*arrays)[0] for rate in (0.0, 0.4)
        )
    np.testing.assert_array_equal(plain, dropped)
