"""The house: rooms import in one direction, without cycles, and what one einsum needs stays small enough to be read."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the foundation up: a room may import those on the floors below it.
FLOORS = (
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
MAY_IMPORT = {room: set().union(*FLOORS[:floor]) for floor, rooms in enumerate(FLOORS) for room in rooms}
for _room in ("gspmd.moe", "gspmd.training", "models"):
    MAY_IMPORT[_room] -= {"gspmd.audit"}  # what compilers make of a model is no concern of the model
# The front door, which imports what is asked for when it is asked for.
MAY_IMPORT |= {room: rooms | {"gspmd"} for room, rooms in MAY_IMPORT.items() if room in FLOORS[-1] | FLOORS[-2] | FLOORS[-3]}

ONLY_TRAINING = {"flax", "optax", "orbax", "grain", "tyro", "tensorboardX", "matplotlib"}
WITHOUT_JAX = ("gspmd.display", "gspmd.frozen", "gspmd.annotate", "gspmd.hardware", "gspmd.planner")
PLACES_ARRAYS = {"gspmd.annotate", "gspmd.annotate.arrays", "gspmd.annotate.gshard"}

SEPARATE = ("gspmd.lowerings.looped", "gspmd.lowerings.xla")
"""What lowering `blocking` has nothing to do with."""


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {_module(path): path for room in ("gspmd", "models") for path in (ROOT / room).rglob("*.py")}


@cache
def _imports(module: str, everywhere: bool = True) -> frozenset[str]:
    """What a file imports: in functions, and for a type checker alone, too, or only as it is loaded."""
    tree = ast.parse(FILES[module].read_text())
    names = set()
    for node in ast.walk(tree) if everywhere else _at_once(tree.body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {alias: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in FILES else node.module for name in full.values()}
    return frozenset(name.replace("gspmd_models", "models") for name in names)


def _at_once(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _at_once(node.body)
        yield node


def _room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "gspmd" else parts[0]


@pytest.mark.parametrize("module", sorted({*FILES} - {"gspmd"}))
def test_imports_point_one_way(module):
    used = {_room(name) for name in _imports(module) if name.split(".")[0] in ("gspmd", "models", "scripts", "tests")}
    assert used - {_room(module)} <= MAY_IMPORT[_room(module)]


def test_there_are_no_cycles():
    below = {name: {each for each in _imports(name) if each in FILES} - {name, "gspmd"} for name in FILES}
    while leaves := {name for name, used in below.items() if not used}:
        below = {name: used - leaves for name, used in below.items() if name not in leaves}
    assert not below, "these import one another, or what does: " + ", ".join(sorted(below))


@pytest.mark.parametrize("module", sorted(name for name in FILES if _room(name) != "gspmd.training"))
def test_only_training_knows_its_libraries(module):
    allowed = {"models": {"flax"}, "gspmd.audit": {"matplotlib"}, "gspmd.commands": {"tyro"}}.get(_room(module), set())
    assert {name.split(".")[0] for name in _imports(module)} & ONLY_TRAINING <= allowed


@pytest.mark.parametrize("module", sorted(n for n in FILES if _room(n) in WITHOUT_JAX and n not in PLACES_ARRAYS))
def test_parsing_and_planning_know_no_jax(module):
    assert not {name.split(".")[0] for name in _imports(module, everywhere=False)} & {"jax", "jaxlib", "flax"}


@pytest.mark.parametrize("floor", sorted({path.parent for path in FILES.values()}), ids=lambda path: path.name)
def test_a_floor_has_at_most_a_dozen_files(floor):
    assert len([path for path in floor.glob("*.py") if path.name != "__init__.py"]) <= 12


# -- what there is to read ---------------------------------------------------------------------------------------------


def _closure(*starts: str, everywhere: bool = False) -> set[str]:
    seen, waiting = set(), list(starts)
    while waiting:
        module = waiting.pop()
        if module in seen or module == "gspmd" or module.startswith(SEPARATE):
            continue
        seen.add(module)
        waiting += [name for name in _imports(module, everywhere) if name in FILES]
    return seen


def _lines(module: str) -> tuple[int, int]:
    """Lines of a file, and those of them that are code: no blanks, comments and docstrings."""
    text = FILES[module].read_text()
    said = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, node.end_lineno + 1)
    }
    lines = list(enumerate(text.splitlines(), 1))
    code = [line for number, line in lines if line.strip() and not line.strip().startswith("#") and number not in said]
    return len(lines), len(code)


def _read(title: str, modules: set[str]) -> tuple[int, int, int]:
    sizes = {module: _lines(module) for module in sorted(modules) if _lines(module)[1]}
    total, code = (sum(column) for column in zip(*sizes.values()))
    print(f"\n{title}: {len(sizes)} files, {total} lines, {code} of them code")
    for module, (lines, own) in sizes.items():
        print(f"{lines:6}{own:6}  {module}")
    return len(sizes), total, code


def test_what_one_blocking_einsum_needs_is_short(capsys):
    with capsys.disabled() if False else capsys:
        files, lines, code = _read("gspmd.einsum", _closure("gspmd.ops._einsum", "gspmd.lowerings.blocking.lowering"))
    assert files <= 40 and lines <= 6000 and code <= 4000


_BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("gspmd.lowerings.looped"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from gspmd import host
host.use_host_devices(4)
import jax, jax.numpy as jnp, numpy as np, gspmd
mesh = jax.make_mesh((2, 2), ("x", "y"))
x, w = np.arange(32.0, dtype="float32").reshape(4, 8), np.arange(64.0, dtype="float32").reshape(8, 8)
equation = "B_xE_y, E_xF_y -> BF_xy"
want = jax.grad(lambda x, w: (jnp.tanh(x @ w / 300) ** 2).sum(), argnums=(0, 1))(x, w)
with jax.set_mesh(mesh):
    placed = gspmd.annotate(x, "B_xE_y"), gspmd.annotate(w, "E_xF_y")
    for lowering in ("blocking", "xla", "auto"):
        loss = lambda x, w: (jnp.tanh(gspmd.einsum(equation, x, w, lowering=lowering) / 300) ** 2).sum()
        got = jax.jit(jax.grad(loss, argnums=(0, 1)))(*placed)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
        print(gspmd.trace(jax.grad(loss), *placed).wire_bytes > 0)
    print(gspmd.plan(equation, {"B": 4, "E": 8, "F": 8}, mesh, lowering="blocking").gradients[0].wire_bytes > 0)
    try:
        gspmd.einsum(equation, *placed, lowering="looped")
    except ImportError:
        print("looped is not there")
"""


def test_blocking_and_xla_need_nothing_of_looped():
    shown = subprocess.run([sys.executable, "-c", _BLOCKED], capture_output=True, text=True, check=True, timeout=300)
    assert shown.stdout.split("\n") == [*["True"] * 4, "looped is not there", ""]
