"""Parsing is pure text: no module of it imports JAX, and the room imports nothing from the rooms that stand on it."""

import ast
from pathlib import Path

import pytest

import gspmd

ROOM = Path(gspmd.__file__).parent / "annotate"
WITH_JAX = {"arrays.py", "gshard.py"}


def _imported(path: Path) -> set[str]:
    """Everything that a module imports as it is loaded."""
    statements = ast.parse(path.read_text()).body
    names = {alias.name for s in statements if isinstance(s, ast.Import) for alias in s.names}
    return names | {s.module for s in statements if isinstance(s, ast.ImportFrom)}


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.name)
def test_imports(path):
    names = _imported(path)
    assert not {n for n in names if n.startswith("gspmd.") and not n.startswith(("gspmd.annotate", "gspmd.display"))}
    if path.name not in WITH_JAX:
        assert not {n for n in names if n.split(".")[0] in ("jax", "numpy")}
