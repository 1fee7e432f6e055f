"""Blocks that are written out one after the other are those of the loop: values, gradients, and what they send."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

import gspmd_models as models
from gspmd import PlanError
from gspmd.layouts import Layout, presets
from gspmd.moe import MoEConfig
from gspmd.training import OptimizerConfig
from gspmd_models import step
from gspmd_models.config import REMATS
from tests.audit import steps
from tests.audit.test_presets import hold
from tests.models.conftest import put


def of_both(settings, layout, mesh, tokens):
    """The text that is compiled of a loss and its gradients, and what they are: of the loop, and written out."""
    values = models.arrays(models.build(settings, layout, mesh, jax.random.key(0)))
    args = values, put(tokens, layout, mesh), jax.random.key(1)
    for scan_layers in (True, False):
        model = models.abstract(replace(settings, scan_layers=scan_layers), layout, mesh)

        def loss(values, ids, key, model=model):
            return models.loss(models.with_arrays(model, values), ids, key=key)[0]

        with jax.set_mesh(mesh):
            lowered = jax.jit(jax.value_and_grad(loss)).lower(*args)
            yield lowered.as_text(), lowered.compile()(*args)


def same(found):
    (_, (wanted, gradients)), (_, (loss, others)) = found
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(others[path], gradient, rtol=1e-4, atol=1e-6, err_msg=path)


def test_gradients_are_those_of_the_loop(config, make_mesh, tokens):
    found = [
        *of_both(config(layers=3, remat="none"), Layout.load("replicated"), make_mesh({"x": 1, "y": 1, "z": 1}), tokens)
    ]
    same(found)
    loops = [text.count("stablehlo.while") for text, _ in found]
    assert loops == [2, 0]  # forward and backward


@pytest.mark.parametrize(
    ("preset", "microbatches", "where"), [("zero-3", 2, "in 2 m"), ("pipeline", 1, "in the stages of")]
)
def test_another_loop_around_them_is_refused(make_mesh, preset, microbatches, where):
    layout, settings = Layout.load(preset), replace(steps.SMALL, scan_layers=False)
    mesh = make_mesh(layout.mesh_for(8))
    with pytest.raises(PlanError, match=re.escape(f"cannot write blocks out (scan_layers = false) {where}")):
        step.training_step(models.abstract(settings, layout, mesh), OptimizerConfig(), 100, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("remat", REMATS)
def test_gradients_with_experts_are_those_of_the_loop(config, make_mesh, tokens, remat):
    layout = Layout.load("gshard")
    settings = config(layers=4, moe=MoEConfig(experts=8, every=2), remat=remat)
    same([*of_both(settings, layout, make_mesh(layout.mesh_for(8)), tokens)])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [*enumerate(name for name in presets() if name != "pipeline")])
def test_what_is_planned_is_compiled(number, name):
    remat = REMATS[number % len(REMATS)]
    hold(steps.training(name, replace(steps.SMALL, scan_layers=False, remat=remat)))
