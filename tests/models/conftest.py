"""A tiny model, its batch, and its parameters sharded by any layout on any mesh."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import gspmd_models as models
from gspmd.commands.file import File
from gspmd.layouts import Layout
from gspmd.layouts.initial import nested
from gspmd.training import load_toml
from tests.references.models import TINY

BATCH, LENGTH = 8, 16
CONFIGS = Path(__file__).parents[2] / "configs"


def load(name: str) -> models.ModelConfig:
    """Return the model of configs/NAME.toml."""
    return load_toml(File, CONFIGS / f"{name}.toml").model


@pytest.fixture
def config():
    """Return a function (changes) -> ModelConfig, small, but divisible by 8 wherever a preset divides."""
    return partial(replace, TINY)


@pytest.fixture
def tokens() -> np.ndarray:
    """Return [B, L+1] tokens with something to learn: each is its predecessor plus one of two steps."""
    steps = np.random.default_rng(0).choice([1, 5], size=(BATCH, LENGTH + 1))
    return (np.cumsum(steps, axis=1) % 64).astype(np.int32)


@pytest.fixture
def one_device(make_mesh):
    """Return a function (config) -> model on a single device, fresh from key 0."""
    layout = Layout.load("replicated")
    mesh = make_mesh(layout.mesh_for(1))
    return lambda config: models.build(config, layout, mesh, jax.random.key(0))


@pytest.fixture
def placed():
    """Return a function (model, layout, mesh) -> the same model, its parameters sharded by the layout on the mesh."""

    def place(model: models.Transformer, layout: Layout, mesh: jax.sharding.Mesh) -> models.Transformer:
        specs = models.parameter_specs(model.config, layout)
        values = {
            path: jax.device_put(np.asarray(value), jax.sharding.NamedSharding(mesh, specs[path][0].partition_spec()))
            for path, value in models.arrays(model).items()
        }
        return models.Transformer(model.config, layout, nested(values), model.dtype)

    return place


def put(tokens: np.ndarray, layout: Layout, mesh: jax.sharding.Mesh) -> jax.Array:
    """Return a batch on the mesh, sharded as in the layout."""
    return jax.device_put(tokens, jax.sharding.NamedSharding(mesh, models.batch_spec(layout).partition_spec()))
