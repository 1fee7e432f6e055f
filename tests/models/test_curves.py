"""A layout never changes a result: twenty steps of training give one device's losses, whatever sends what where."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout, presets
from gspmd.moe import MoEConfig
from gspmd.training.state import initial
from tests.models.conftest import put
from tests.references.models import TINY

STEPS, TOLERANCE = 20, 1e-4
# Without remat half of the compilation; test_transformer.py recomputes.
SERIAL = replace(TINY, remat=False, moe=MoEConfig(experts=8, every=2))
PARALLEL = replace(TINY, block="parallel", moe=MoEConfig(experts=8, every=2, router="gshard"))

LOWERINGS = ("blocking", "xla", "looped")
# Each kind of layout and each lowering: weights that stay, weights that are gathered, optimizer state apart from them,
# and experts apart from attention. What the presets send is in the fast suite too, in tests/audit/test_presets.py.
FAST = {"weight-stationary-2d", "weight-gathered-xy", "zero-1", "megatron-folded"}
ONCE = [
    pytest.param(
        name,
        8,
        LOWERINGS[at % 3],
        ("explicit", "auto")[at // 3 % 2 if name != "pipeline" else 0],  # under Auto axes it refuses lowering "xla"
        (SERIAL, PARALLEL)[at % 4 == 2],
        id=name,
        marks=() if name in FAST else pytest.mark.slow,
    )
    for at, name in enumerate(presets())
]
# A Latin square: a preset meets every lowering and every number of devices once, and both types of axes; at 8 devices
# another lowering than in ONCE. On one device nothing is sent by any lowering, so a few presets do.
SQUARE = [
    (name, devices, LOWERINGS[(at + number) % 3], ("explicit", "auto")[(at + number) % 2])
    for at, name in enumerate(presets())
    for number, devices in enumerate((2, 4, 8))
]
SQUARE += [(name, 1, LOWERINGS[at % 3], "explicit") for at, name in enumerate(presets()[::4])]


@pytest.mark.turns(1)
@pytest.mark.parametrize(("name", "devices", "lowering", "kind", "config"), ONCE)
def test_every_preset_trains_as_one_device_does(make_mesh, placed, name, devices, lowering, kind, config):
    compare(make_mesh, placed, name, devices, lowering, kind, config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices", "lowering", "kind"), SQUARE)
def test_every_preset_on_every_mesh(make_mesh, placed, name, devices, lowering, kind):
    compare(make_mesh, placed, name, devices, lowering, kind, SERIAL)


def compare(make_mesh, placed, name, devices, lowering, kind, config):
    """Trains in the layout and alone, and holds the losses together."""
    layout = Layout.load(name)
    mesh = make_mesh(layout.mesh_for(devices, config.sizes(8, 16)), kind)
    losses, loads = train(placed(fresh(config), layout, mesh), mesh, lowering)
    wanted, wanted_loads = alone(config)
    assert wanted[-1] < wanted[0] - 0.5, "there is nothing to compare in a curve that does not fall"
    # A token that changes its expert takes one from a count and adds one to another.
    moved = np.abs(loads - wanted_loads).sum() / 2 * config.moe.choices * 8 * 16
    np.testing.assert_allclose(
        losses, wanted, rtol=TOLERANCE, err_msg=f"at least {moved:.0f} router assignments flipped"
    )


@cache
def fresh(config):
    layout = Layout.load("replicated")
    return models.build(config, layout, single(), jax.random.key(0))


@cache
def alone(config):
    return train(fresh(config), single(), "blocking")


def single():
    return jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])


def train(model, mesh, lowering):
    """Losses [steps] and expert loads [steps, expert layers, X] of AdamW on one repeating text."""
    transform = optax.adamw(1e-2)

    def update(values, state, ids, key):
        def loss(values):
            return models.loss(models.with_arrays(model, values), ids, key=key)

        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(values)
        updates, state = transform.update(gradients, state, values)
        return optax.apply_updates(values, updates), state, value, aux["load"]

    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        begin = initial(models.arrays(model), transform, mesh)
        values, state, losses, loads = begin.params, begin.optimizer, [], []
        # Kept where they are, so that one program runs every step.
        keep = jax.tree.map(lambda leaf: leaf.sharding, (values, state))
        step = jax.jit(update, out_shardings=(*keep, None, None))
        for number in range(STEPS):
            ids = put(text(number), model.layout, mesh)
            values, state, value, load = step(values, state, ids, jax.random.fold_in(jax.random.key(1), number))
            losses.append(float(value))
            loads.append(np.asarray(load))
    return np.array(losses), np.stack(loads)


def text(number):
    """[8, 17] tokens, each its predecessor plus 1 or 5."""
    steps = np.random.default_rng(number).choice([1, 5], size=(8, 17))
    return (np.cumsum(steps, axis=1) % 64).astype(np.int32)
