"""Narrow training state: bfloat16 parameters with float32 masters, and Adam's moments in eight bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gspmd.training import OptimizerConfig
from gspmd.training.optimizer.int8 import block_faults, decode, encode, scale_by_int8_adam
from gspmd.training.optimizer.masters import with_masters
from gspmd.training.toml import ConfigError


def codes(extra):
    """All codes of one sign, by the paper's construction: decades of 2^k equal parts, each with its middle."""
    bounds = [np.linspace(0.1, 1, 2 ** (k + extra) + 1) * 10.0 ** (k - 6) for k in range(7)]
    middles = [(each[1:] + each[:-1]) / 2 for each in bounds]
    return np.concatenate([[0.0], *middles])


@pytest.mark.parametrize("extra", [0, 1])
def test_codes_are_the_papers(extra):
    table = codes(extra)
    numbers = np.arange(len(table))
    assert len(table) == 127 * 2**extra + 1
    found = decode(jnp.asarray(numbers), jnp.float32(1), extra)
    np.testing.assert_allclose(found, table / table[-1], rtol=1e-5)
    for draw in (0.01, 0.5, 0.99):  # a code itself is never rounded to another one
        np.testing.assert_array_equal(encode(found * 3, jnp.float32(3), jnp.full(found.shape, draw), extra), numbers)


@pytest.mark.parametrize("extra", [0, 1])
def test_roundings_are_to_neighbours_and_unbiased(extra):
    table, rng = codes(extra) / codes(extra)[-1], np.random.default_rng(0)
    x = np.concatenate([10 ** rng.uniform(-8, 0, 200), [1.0, 0.0]]).astype(np.float32)
    draws = jax.random.uniform(jax.random.key(0), (4000, len(x)))
    many = jnp.broadcast_to(x, draws.shape)
    found = np.asarray(decode(encode(many, jnp.float32(1), draws, extra), jnp.float32(1), extra))
    above = np.clip(np.searchsorted(table, x, side="left"), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    near = np.isclose(found, low, rtol=1e-4) | np.isclose(found, high, rtol=1e-4)
    assert near.all()
    error = np.abs(found.mean(axis=0) - x)
    assert (error <= 5 * (high - low) / 2 / np.sqrt(4000) + 1e-6 * x).all()


def steps_of(transform, steps=200):
    """Distance to the optimum of a badly scaled regression, and how far updates went."""
    rng = np.random.default_rng(0)
    x, wanted = rng.standard_normal((256, 64)) * np.logspace(-2, 0, 64), rng.standard_normal((64, 8))
    x, y, params, farthest = jnp.asarray(x), jnp.asarray(x @ wanted), jnp.zeros((64, 8)), 0.0
    state = transform.init(params)

    @jax.jit
    def step(params, state):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(params)
        updates, state = transform.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value, jnp.max(jnp.abs(updates))

    losses = []
    for _ in range(steps):
        params, state, value, farther = step(params, state)
        losses.append(float(value))
        farthest = max(farthest, float(farther))
    return np.array(losses), farthest, state


def test_int8_moments_follow_float32s():
    rate = optax.scale_by_learning_rate(0.02)
    wide, far, _ = steps_of(optax.chain(optax.scale_by_adam(0.9, 0.98), rate))
    narrow, as_far, state = steps_of(optax.chain(scale_by_int8_adam(0.9, 0.98, block=16), rate))
    np.testing.assert_allclose(narrow[:100], wide[:100], rtol=0.05)
    assert as_far < 1.5 * far  # no moment was rounded to a 0 that divides
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.size == 512} == {"int8", "uint8"}


def test_roundings_do_not_depend_on_the_layout(make_mesh, place, axis_type):
    mesh, transform = make_mesh({"x": 2, "y": 4}, axis_type), scale_by_int8_adam(block=8)
    gradient = jax.random.normal(jax.random.key(0), (6, 64))
    whole, held = transform.init(gradient), place(mesh, gradient, "EF_{y,x}")
    wanted = gradient
    with jax.set_mesh(mesh):
        state = jax.jit(transform.init)(held)
        for _ in range(3):
            wanted, whole = jax.jit(transform.update)(wanted, whole)
            held, state = jax.jit(transform.update)(held, state)
    assert held.sharding.spec == jax.P(None, ("y", "x"))
    for found, each in zip(jax.tree.leaves((held, state)), jax.tree.leaves((wanted, whole))):
        np.testing.assert_allclose(found, each, rtol=1e-6)


def test_blocks_that_a_layout_cuts_are_named():
    assert block_faults({"a": (4, 96), "b": (32,)}, {"a": (4, 24), "b": (32,)}, 64) == [
        "moments in int8 have blocks of 32 values, but a device has 24 of a's 96; set moments_block to 8."
    ]
    with pytest.raises(ConfigError, match="moments must be one of 'float32', 'int8', but is 'int4'"):
        OptimizerConfig(moments="int4")


def test_masters_collect_updates_that_parameters_round_away():
    transform = with_masters(optax.adamw(1e-3))
    params = jax.random.normal(jax.random.key(0), (64,))
    state, narrow, wide = transform.init(params), params.astype(jnp.bfloat16), params
    plain, of_plain = optax.adamw(1e-3), optax.adamw(1e-3).init(params)
    for number in range(30):
        gradient = jax.random.normal(jax.random.key(number + 1), (64,)).astype(jnp.bfloat16)
        updates, state = transform.update(gradient, state, narrow)
        narrow = optax.apply_updates(narrow, updates)
        updates, of_plain = plain.update(gradient.astype(jnp.float32), of_plain, wide)
        wide = optax.apply_updates(wide, updates)
        assert narrow.dtype == jnp.bfloat16
        np.testing.assert_array_equal(narrow, state.masters.astype(jnp.bfloat16))
    np.testing.assert_allclose(state.masters, wide, rtol=1e-6)
