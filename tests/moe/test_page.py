"""The examples of docs/moe.md run."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from gspmd.moe import MoEConfig, config, route, routers

PAGE = (Path(__file__).parents[2] / "docs" / "moe.md").read_text()
LAYER, ROUTER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_example_runs():
    found = {}
    exec(LAYER, found)
    assert found["slots"].shape == (4, 8, 40, 64)
    assert found["y"].shape == (4, 128, 64)


@pytest.fixture
def tables(monkeypatch):
    """Routers that a test adds are gone after it."""
    monkeypatch.setattr(config, "ROUTERS", known := dict(config.ROUTERS))
    monkeypatch.setattr(routers, "BY_NAME", dict(routers.BY_NAME))
    return known


def test_router_runs(tables):
    exec(ROUTER, {})
    assert "by-position" in tables
    routing = route(jnp.zeros((1, 4, 2)), MoEConfig(experts=2, router="by-position", capacity_factor=0.5))
    assert routing.kept[0, :, 0].tolist() == [True, True, False, False]
