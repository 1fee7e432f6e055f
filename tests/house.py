"""The files of the house, what they import, and what there is to read of them.

python -m tests.house        what one blocking einsum needs, in reading order, with lines and lines of code
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHER_LOWERINGS = ("gspmd.lowerings.looped", "gspmd.lowerings.xla")
EINSUM = ("gspmd.ops._einsum", "gspmd.lowerings.blocking.lowering")
"""Where a call begins, and the one lowering that it chooses."""


def module_of(path: Path) -> str:
    """The name under which a file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(path): path for room in ("gspmd", "models") for path in sorted((ROOT / room).rglob("*.py"))}


def room_of(module: str) -> str:
    """`gspmd.planner` of `gspmd.planner.graph.search`."""
    return ".".join(module.split(".")[:2]) if module.startswith("gspmd.") else module.split(".")[0]


@cache
def imports(module: str, everywhere: bool = True) -> tuple[str, ...]:
    """What a file imports, in its order: in functions and for type checkers too, or only as it is loaded."""
    tree = ast.parse(FILES[module].read_text())
    names: dict[str, None] = {}
    for node in ast.walk(tree) if everywhere else _at_once(tree.body):
        if isinstance(node, ast.Import):
            names |= {alias.name: None for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            source = _absolute(module, node.module, node.level)
            source = source.replace("gspmd_models", "models")  # the folder, and what it is installed as
            full = [f"{source}.{alias.name}" for alias in node.names]
            names |= {name if name in FILES else source: None for name in full}
    return tuple(name.replace("gspmd_models", "models") for name in names)


def _absolute(module: str, name: str, level: int) -> str:
    """What `from name import` means in a file, with `level` dots before it."""
    if not level:
        return name
    package = module.split(".") if FILES[module].name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*package[: len(package) - level + 1], name])


def _at_once(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node


def closure(*starts: str, without: tuple[str, ...] = (), everywhere: bool = False) -> list[str]:
    """All files that these need, a file before those that it imports; the package's own front door left out."""
    seen: dict[str, None] = {}
    waiting = list(reversed(starts))
    while waiting:
        module = waiting.pop()
        if module not in seen and module != "gspmd" and not module.startswith(without or ("-",)):
            seen[module] = None
            packages = [".".join(module.split(".")[:n]) for n in range(2, module.count(".") + 1)]
            waiting += reversed([name for name in (*packages, *imports(module, everywhere)) if name in FILES])
    return list(seen)


def lines(module: str) -> tuple[int, int]:
    """Lines of a file, and those of them that are code: no blanks, comments and docstrings."""
    text = FILES[module].read_text()
    strings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr) and _is_text(node.value)]
    said = {number for node in strings for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    written = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return len(written), len([line for number, line in written if line and line[0] != "#" and number not in said])


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def total(modules: Iterable[str]) -> tuple[int, int, int]:
    """Files that have code, their lines, and those of code."""
    sizes = [size for size in map(lines, modules) if size[1]]
    return len(sizes), sum(size for size, _ in sizes), sum(code for _, code in sizes)


def main() -> None:
    """Print the table."""
    needed = [module for module in closure(*EINSUM, without=OTHER_LOWERINGS) if lines(module)[1]]
    for module in needed:
        print("{:5} {:5}  {}".format(*lines(module), module))
    print("{1:5} {2:5}  in {0} files".format(*total(needed)))


if __name__ == "__main__":
    main()
