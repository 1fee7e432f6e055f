"""Tokens that are read and not predicted: the loss is the mean over the others, however a batch is cut and sharded."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.training import OptimizerConfig, jit_step
from gspmd.training.step import Update, building
from gspmd_models import step
from tests.conftest import AXIS_TYPES

BATCH, LENGTH, OPTIMIZER = 16, 8, OptimizerConfig(learning_rate=1e-2, clip=0.0)
CONFIG = models.ModelConfig(
    vocabulary=64, embed=16, layers=4, heads=8, kv_heads=8, head_size=2, feed_forward=32, remat=False
)


def tokens():
    """[B, L+1]: the first rows have long prompts, the last none, and one has nothing else."""
    drawn = np.random.default_rng(0).integers(0, 64, (BATCH, LENGTH + 1)).astype(np.int32)
    lengths = np.array([9, *np.linspace(7, 0, BATCH - 1).round()])
    return np.where(np.arange(LENGTH + 1) < lengths[:, None], ~drawn, drawn)


@cache
def update(name, microbatches=1, kind="explicit"):
    """Loss, norm of gradients and predicted tokens of one step; and of the plan and the compiled program the bytes."""
    layout = Layout.load(name)
    sizes = layout.mesh_for(1 if name == "replicated" else 8)
    devices, types = jax.devices()[: np.prod([*sizes.values()])], (AXIS_TYPES[kind],) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
    subject, how = step.Language(CONFIG, masked=True), Update(OPTIMIZER, 10, microbatches=microbatches)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        model = models.build(CONFIG, layout, mesh, jax.random.key(0))
        state = building.initial_state(subject, layout, models.arrays(model), how, mesh)
        batch = jax.device_put(tokens(), jax.NamedSharding(mesh, subject.batch_spec(layout).partition_spec()))
        arguments = state, batch, jax.random.key(1)
        made = jit_step(building.training_step(subject, layout, how), state)
        plan, compiled = gspmd.trace(made, *arguments), made.lower(*arguments).compile()
        ledger = gspmd.ledger(compiled, mesh)
        _, found = compiled(*arguments)
    return {name: float(found[name]) for name in ("loss", "gradient_norm", "predicted")}, plan, ledger


def plainly():
    """The mean by numpy, of the logits of the whole model on one device."""
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    read = np.where(tokens() < 0, ~tokens(), tokens())
    with jax.set_mesh(mesh):
        model = models.build(CONFIG, Layout.load("replicated"), mesh, jax.random.key(0))
        logits = np.asarray(jax.jit(lambda x: model(x)[0])(jnp.asarray(read[:, :-1])), np.float64)
    each = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, read[:, 1:, None], -1)[..., 0]
    predicted = tokens()[:, 1:] >= 0
    return each[predicted].mean(), predicted.sum()


def test_the_loss_is_the_mean_over_predicted_tokens():
    found, _, _ = update("replicated")
    loss, count = plainly()
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["predicted"] == count


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("name", "microbatches", "kind"),
    [
        ("replicated", 4, "explicit"),
        ("zero-2", 2, "explicit"),
        ("zero-3", 2, "auto"),
        ("megatron-sequence", 1, "auto"),
        ("context-parallel", 2, "explicit"),
        ("pipeline", 4, "explicit"),
        ("pipeline", 2, "auto"),
    ],
)
def test_it_is_the_same_in_parts_and_on_every_device(name, microbatches, kind):
    """Though the microbatches have from no predicted token to all of them."""
    wanted, _, _ = update("replicated")
    found, plan, ledger = update(name, microbatches, kind)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert ledger.by_kind_and_axes() == plan.by_kind_and_axes()
