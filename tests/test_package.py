"""The front door: what `gspmd` offers, and what importing it takes."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import gspmd

ROOMS = ("audit", "host", "layouts", "moe", "ops", "pipeline", "search", "training")


def test_the_version_is_that_of_the_package():
    assert gspmd.__version__ == version("gspmd")


def test_everything_offered_is_there():
    assert {*gspmd.__all__, *ROOMS} == set(dir(gspmd))
    assert all(getattr(gspmd, name) is not None for name in dir(gspmd))
    assert {getattr(gspmd, name).__name__ for name in ROOMS} == {f"gspmd.{name}" for name in ROOMS}
    with pytest.raises(AttributeError, match="has no attribute 'layout'"):
        gspmd.layout  # noqa: B018


def _fresh(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_importing_it_imports_nothing_but_jax_and_the_notation():
    """So `import gspmd` takes as long as `import jax`, and a function that shares a package's name stays one."""
    loaded = _fresh(
        "import sys, jax; before = set(sys.modules); import gspmd;"
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith(('gspmd.annotate', 'jax'))));"
        "import gspmd.annotate.spec, gspmd.planner.plan; print(callable(gspmd.annotate), gspmd.plan.__name__)"
    ).splitlines()
    assert loaded == ["gspmd gspmd.host", "True plan"]
