"""Rooms import in one direction, only training knows the libraries of training, and parsing knows no JAX."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIAGNOSIS = ("nodes", "reader", "operands", "rules")
PURE = ("errors", "validation", "spec", "equation", *(f"diagnosis/{name}" for name in DIAGNOSIS))

# From the foundation up: a room may import those before it. What stands in braces may not import one another.
ORDER = (
    {"gspmd.host", "gspmd.frozen", "gspmd.display"},
    {"gspmd.annotate"},
    {"gspmd.hardware"},
    {"gspmd.planner"},
    {"gspmd.lowerings"},
    {"gspmd.ops"},
    {"gspmd.tracing"},
    {"gspmd.layouts", "gspmd.audit"},
    {"gspmd.moe"},
    {"gspmd.training"},
    {"models"},
    {"gspmd.commands"},
)
MAY_IMPORT = {room: set().union(*ORDER[:floor]) for floor, rooms in enumerate(ORDER) for room in rooms}
MAY_IMPORT["gspmd.moe"] -= {"gspmd.audit"}
MAY_IMPORT["gspmd.training"] -= {"gspmd.audit"}
MAY_IMPORT["models"] -= {"gspmd.audit"}
ONLY_TRAINING = {"flax", "optax", "orbax", "grain", "tyro", "tensorboardX", "matplotlib"}

FILES = sorted(path for room in ("gspmd", "models") for path in (ROOT / room).rglob("*.py"))


def _imported(path: Path, everywhere: bool = True) -> set[str]:
    """Modules that a file imports, in functions too, less what only a type checker sees."""
    tree = ast.parse(path.read_text())
    unseen = {id(inner) for node in ast.walk(tree) if _is_type_checking(node) for inner in ast.walk(node)}
    nodes = [node for node in (ast.walk(tree) if everywhere else tree.body) if id(node) not in unseen]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _room(module: str) -> str:
    parts = module.split(".")
    if parts[0] == "gspmd" and len(parts) > 1 and (ROOT / "gspmd" / parts[1]).exists():
        return ".".join(parts[:2])
    return ".".join(parts[:2]) if parts[:2] in (["gspmd", "host"], ["gspmd", "frozen"]) else parts[0]


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_point_one_way(path):
    own = _room(_module(path))
    if path in (ROOT / "gspmd" / "__init__.py", ROOT / "gspmd" / "__main__.py"):
        return  # the front doors
    used = {_room(name) for name in _imported(path) if name.split(".")[0] in ("gspmd", "models", "scripts", "tests")}
    front = {"gspmd"} if own in ("gspmd.training", "models", "gspmd.commands") else set()
    assert used - {own} <= MAY_IMPORT[own] | front


@pytest.mark.parametrize("path", [path for path in FILES if _room(_module(path)) != "gspmd.training"], ids=_module)
def test_only_training_knows_its_libraries(path):
    allowed = {"models": {"flax"}, "gspmd.audit": {"matplotlib"}, "gspmd.commands": {"tyro"}}
    assert {name.split(".")[0] for name in _imported(path)} & ONLY_TRAINING <= allowed.get(_room(_module(path)), set())


@pytest.mark.parametrize("name", PURE)
def test_parsing_knows_no_jax(name):
    used = {module.split(".")[0] for module in _imported(ROOT / "gspmd" / "annotate" / f"{name}.py", everywhere=False)}
    assert not used & {"jax", "jaxlib", "numpy", "flax"}
