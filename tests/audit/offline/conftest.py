"""The scripts of benchmarks/ as modules, which import one another from their own folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[None]:
    """Lets a module's tests import them by name."""
    folder = str(Path(__file__).parents[3] / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)
