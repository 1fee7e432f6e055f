"""Parsing is pure text: no module of it imports JAX, and modules import one way, in functions and for types too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gspmd

ROOM = Path(gspmd.__file__).parent / "annotate"
WITH_JAX = {"annotation.py", "arrays.py", "gshard.py"}
# Each may import those before it.
ORDER = (
    *("errors", "diagnosis.message", "parser", "validation"),
    *("diagnosis.nodes", "diagnosis.reader", "diagnosis.operands", "diagnosis.rules", "diagnosis.refusals"),
    *("diagnosis.sizes", "diagnosis.placement"),
    *("spec", "equation", "arrays", "annotation", "gshard"),
)


def _imported(path: Path, everywhere: bool = False) -> set[str]:
    """Everything that a module imports as it is loaded; or ever."""
    tree = ast.parse(path.read_text())
    statements = list(ast.walk(tree)) if everywhere else tree.body
    names = {alias.name for s in statements if isinstance(s, ast.Import) for alias in s.names}
    return names | {s.module for s in statements if isinstance(s, ast.ImportFrom)}


@pytest.mark.parametrize("path", sorted(ROOM.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOM)))
def test_imports(path):
    names = _imported(path)
    assert not {n for n in names if n.startswith("gspmd.") and not n.startswith(("gspmd.annotate", "gspmd.display"))}
    if path.name not in WITH_JAX:
        assert not {n for n in names if n.split(".")[0] in ("jax", "numpy")}


def test_modules_import_one_way():
    files = {".".join(path.relative_to(ROOM).with_suffix("").parts): path for path in ROOM.rglob("*.py")}
    assert {name for name in files if "__init__" not in name} == set(ORDER)
    # The errors draw themselves by diagnosis.message, which imports none of them.
    for at, name in enumerate(ORDER):
        own = {n.removeprefix("gspmd.annotate.") for n in _imported(files[name], everywhere=True) if "gspmd.annot" in n}
        assert own - {"diagnosis.message"} <= set(ORDER[:at])
    assert not {n for n in _imported(files["diagnosis.message"], everywhere=True) if n.startswith("gspmd")}


def test_what_can_be_read_is_read_without_the_diagnosis():
    program = (
        "import sys; from gspmd.annotate.equation import parse_equation;"
        "equation = parse_equation('B_xE, (EF, EF) -> (BF, BF)'); equation.check(dict(B=4, E=4, F=4), {'x': 2});"
        "equation.sizes([(4, 4), ((4, 4), (4, 4))]);"
        "print(*[m for m in sys.modules if m.startswith(('gspmd.annotate.diagnosis', 'gspmd.display'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
