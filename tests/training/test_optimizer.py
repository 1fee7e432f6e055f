"""Learning rate, clipping, and where weight decay applies."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gspmd.training.config import OptimizerConfig
from gspmd.training.optimizer import adamw, clip, schedule


def test_rate_rises_then_falls():
    config = OptimizerConfig(learning_rate=2.0, warmup=0.2, final_fraction=0.1)
    rates = np.array([schedule(config, 50)(step) for step in range(51)])
    assert rates[0] == pytest.approx(0.2)
    assert rates.argmax() in (9, 10)
    assert rates.max() == pytest.approx(2.0)
    assert (np.diff(rates[10:]) < 0).all()
    assert rates[50] == pytest.approx(0.2)


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_short_runs_have_a_rate(steps):
    rates = [float(schedule(OptimizerConfig(), steps)(step)) for step in range(steps)]
    assert all(0 < rate <= OptimizerConfig().learning_rate * 1.0001 for rate in rates)


def test_clip_scales_down_only():
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    clipped, size = clip(gradients, 1.0)
    assert float(size) == pytest.approx(5.0)
    np.testing.assert_allclose(clipped["a"], [0.6, 0.0], rtol=1e-6)
    same, _ = clip(gradients, 10.0)
    np.testing.assert_array_equal(same["b"], [4.0])
    unclipped, size = clip(gradients, 0.0)
    assert unclipped is gradients
    assert float(size) == pytest.approx(5.0)


def test_clip_of_nothing_is_nothing():
    clipped, size = clip({"a": jnp.zeros(3)}, 1.0)
    assert float(size) == 0.0
    np.testing.assert_array_equal(clipped["a"], jnp.zeros(3))


def test_clip_uses_the_norm_it_is_given():
    _, size = clip({"a": jnp.ones(3)}, 1.0, norm=lambda tree: jnp.float32(7))
    assert float(size) == 7.0


def test_decay_leaves_masked_leaves_alone():
    params = {"w": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    transform = adamw(OptimizerConfig(weight_decay=0.5), 10, {"w": True, "norm": False})
    zero = {"w": jnp.zeros((2, 2)), "norm": jnp.zeros(2)}
    updates, _ = transform.update(zero, transform.init(params), params)
    new = optax.apply_updates(params, updates)
    assert (new["w"] < 1).all()
    np.testing.assert_array_equal(new["norm"], params["norm"])
