"""The files of the house, and what each of them imports."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def module_of(path: Path) -> str:
    """Return the name under which a file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(path): path for room in ("gspmd", "models") for path in sorted((ROOT / room).rglob("*.py"))}


def room_of(module: str) -> str:
    """Return the room of a module: `gspmd.planner` for `gspmd.planner.graph.search`."""
    return ".".join(module.split(".")[:2]) if module.startswith("gspmd.") else module.split(".")[0]


@cache
def imports(module: str, everywhere: bool = True) -> tuple[str, ...]:
    """Return the imports of a file, in its order: all of them, or only those that loading it executes."""
    tree = ast.parse(FILES[module].read_text())
    return _names(module, ast.walk(tree) if everywhere else _at_once(tree.body))


@cache
def imports_for_checkers(module: str) -> tuple[str, ...]:
    """Return the imports of a file that only type checkers execute."""
    tree = ast.parse(FILES[module].read_text())
    return _names(module, (each for node in tree.body if _is_for_checkers(node) for each in ast.walk(node)))


@cache
def imports_to_run(module: str) -> tuple[str, ...]:
    """Return the imports of a file that a program may execute: all but those for type checkers."""
    tree = ast.parse(FILES[module].read_text())
    return _names(module, (each for node in _at_once(tree.body) for each in ast.walk(node)))


def _names(module: str, nodes: Iterable[ast.AST]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name: None for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            source = _absolute(module, node.module, node.level)
            source = source.replace("gspmd_models", "models")  # the folder, and the name of its installed package
            full = [f"{source}.{alias.name}" for alias in node.names]
            names |= {name if name in FILES else source: None for name in full}
    return tuple(name.replace("gspmd_models", "models") for name in names)


def _absolute(module: str, name: str, level: int) -> str:
    """Return the module that `from name import` means in a file, with `level` dots before it."""
    if not level:
        return name
    package = module.split(".") if FILES[module].name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*package[: len(package) - level + 1], name])


def _at_once(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if not _is_for_checkers(node):
            yield node


def _is_for_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
