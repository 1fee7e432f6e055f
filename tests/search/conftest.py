"""Costs as `gspmd.trace` counts them."""

import pytest

from gspmd_models.search.costs import Costs


@pytest.fixture
def only_planned(monkeypatch):
    """Costs without what no plan counts: passes over memory, and attention's own products."""
    monkeypatch.setattr(Costs, "in_memory", lambda *_: 0.0)
    monkeypatch.setattr("gspmd_models.search.parts.attention.Attention._products", lambda *_: 0.0)
    monkeypatch.setattr("gspmd_models.search.parts.serving.CachedAttention._attended", lambda *_: 0.0)
