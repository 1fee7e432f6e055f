"""The house: rooms import in one direction, without cycles, and an einsum needs only the lowering that it asks for."""

import ast
import subprocess
import sys
from importlib import import_module

import pytest

from tests.house import FILES, imports, imports_for_checkers, imports_to_run, room_of

# From the foundation up: a room may import those on the floors below it.
FLOORS = (
    {"gspmd.writing"},
    {
        "gspmd.host",
        "gspmd.frozen",
        "gspmd.deferred",
        "gspmd.display",
        "gspmd.interruption",
        "gspmd.jax_internals",
        "gspmd.reading",
    },
    {"gspmd.annotate"},
    {"gspmd.hardware", "gspmd.figures"},
    {"gspmd.planner"},
    {"gspmd.lowerings"},
    {"gspmd.ops"},
    {"gspmd.tracing"},
    {"gspmd.layouts", "gspmd.audit", "gspmd.pipeline"},
    {"gspmd.moe", "gspmd.search"},
    {"gspmd.training"},
    {"models"},
    {"gspmd.page"},
    {"gspmd.commands"},
)
MAY_IMPORT = {room: set().union(*FLOORS[:floor]) for floor, rooms in enumerate(FLOORS) for room in rooms}
for _room in ("gspmd.moe", "gspmd.training", "models"):
    MAY_IMPORT[_room] -= {"gspmd.audit"}  # what compilers make of a model is no concern of the model
# The front door, which imports what is asked for when it is asked for.
for _room in ("gspmd.training", "models", "gspmd.page", "gspmd.commands"):
    MAY_IMPORT[_room] |= {"gspmd"}

ONLY_TRAINING = {"flax", "optax", "orbax", "grain", "tyro", "tensorboardX", "matplotlib"}
WITHOUT_JAX = (
    "gspmd.display",
    "gspmd.figures",
    "gspmd.frozen",
    "gspmd.interruption",
    "gspmd.reading",
    "gspmd.search",
    "gspmd.annotate",
    "gspmd.hardware",
    "gspmd.planner",
    "gspmd.writing",
)
PLACES_ARRAYS = {f"gspmd.annotate{name}" for name in ("", ".annotation", ".arrays", ".gshard")}
READS_PROGRAMS = {f"gspmd.search.{name}" for name in ("finding", "held", "labels", "pricing", "program")}
# A class imports its drawings when it is asked for one; they name the class for type checkers alone.
DRAWINGS = {
    "gspmd.audit.simulation.figure": "gspmd.audit.simulation.timeline",
    "gspmd.planner.drawing": "gspmd.planner.plan",
    "gspmd.planner.figures.plan": "gspmd.planner.plan",
    "gspmd.planner.figures.steps": "gspmd.planner.plan",
}


@pytest.mark.parametrize("module", sorted({*FILES} - {"gspmd", "gspmd.__main__"}))
def test_imports_point_one_way(module):
    used = {room_of(name) for name in imports(module) if name.split(".")[0] in ("gspmd", "models", "scripts", "tests")}
    assert used - {room_of(module)} <= MAY_IMPORT[room_of(module)]


def test_there_are_no_cycles():
    below = {name: {each for each in imports(name) if each in FILES} - {name, "gspmd"} for name in FILES}
    for drawing, drawn in DRAWINGS.items():
        assert imports_for_checkers(drawing) == (drawn,)
        assert drawn not in imports_to_run(drawing)
        below[drawing].remove(drawn)
    while leaves := {name for name, used in below.items() if not used}:
        below = {name: used - leaves for name, used in below.items() if name not in leaves}
    assert not below, "these import one another, or what does: " + ", ".join(sorted(below))


@pytest.mark.parametrize("module", sorted(name for name in FILES if room_of(name) != "gspmd.training"))
def test_only_training_knows_its_libraries(module):
    allowed = {
        "models": {"flax"},
        "gspmd.audit": {"matplotlib"},
        "gspmd.pipeline": {"matplotlib"},
        "gspmd.commands": {"tyro", "matplotlib"},
    }
    allowed = allowed.get(room_of(module), set())
    assert {name.split(".")[0] for name in imports(module)} & ONLY_TRAINING <= allowed


@pytest.mark.parametrize(
    "module", sorted(n for n in FILES if room_of(n) in WITHOUT_JAX and n not in PLACES_ARRAYS | READS_PROGRAMS)
)
def test_parsing_and_planning_know_no_jax(module):
    assert not {name.split(".")[0] for name in imports(module, everywhere=False)} & {"jax", "jaxlib", "flax"}


_BLOCKED = """
import sys
from importlib import import_module
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
want = jax.grad(lambda x, w: (jnp.tanh(x @ w / 30000) ** 2).sum(), argnums=(0, 1))(x, w)
with jax.set_mesh(mesh):
    placed = gspmd.annotate(x, "B_xE_y"), gspmd.annotate(w, "E_xF_y")
    for lowering in ("blocking", "xla", "auto"):
        loss = lambda x, w: (jnp.tanh(gspmd.einsum(equation, x, w, lowering=lowering) / 30000) ** 2).sum()
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


_PICTURES = """
import sys
from gspmd.layouts import Layout
from gspmd.audit import timeline
from gspmd.search.answers import SearchResult
import gspmd
plan, layout = gspmd.plan("B_xE -> BE", {"B": 4, "E": 8}, {"x": 4}), Layout.load("replicated")
assert str(plan) and str(layout)
print([name for name in sys.modules if name.startswith("gspmd.figures")])
plan.figure(), layout.figure()
print("gspmd.figures.canvas" in sys.modules)
"""


def test_pictures_are_imported_when_they_are_asked_for():
    shown = subprocess.run([sys.executable, "-c", _PICTURES], capture_output=True, text=True, check=True, timeout=300)
    assert shown.stdout.split() == ["[]", "True"]


_TRAINS = """
import sys
from importlib import import_module
from gspmd.commands import main

argv = ["train", "--config", "tiny", "--steps", "1", "--batch", "8", "--length", "16", "--data", "text.txt", "--out",
        "run", "--devices", "1", "--mesh", "x=1", "--final-validation-batches", "1", "--sample-bytes", "0"]
print(main.main(argv), sorted({".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("gspmd")}))
"""


@pytest.mark.slow
def test_a_run_imports_neither_the_search_nor_the_audit(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    shown = subprocess.run(
        [sys.executable, "-c", _TRAINS], capture_output=True, text=True, check=True, timeout=300, cwd=tmp_path
    )
    code, _, rooms = shown.stdout.splitlines()[-1].partition(" ")
    assert code == "0"
    assert "'gspmd.training'" in rooms
    assert "gspmd.search" not in rooms
    assert "gspmd.audit" not in rooms


DEFERRED = [name for name, path in FILES.items() if "deferred(__name__" in path.read_text()]


@pytest.mark.parametrize("module", DEFERRED)
def test_names_that_are_imported_when_asked_for_are_those_that_type_checkers_see(module):
    package = import_module(module.replace("models", "gspmd_models", 1) if module == "models" else module)
    names = {name for listed in package._HOMES.values() for name in listed.split()}
    seen = {
        alias.name
        for block in ast.parse(FILES[module].read_text()).body if isinstance(block, ast.If)
        for line in block.body if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }  # fmt: skip
    assert names == seen == {*package.__all__}
    assert all(getattr(package, name) is not None for name in names)
    assert names <= {*dir(package)}
    # A module of the package would take the place of the name once it is imported.
    assert not {f"{module}.{name}" for name in names} & {*FILES}
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'absent'"):
        _ = package.absent


def test_names_that_are_read_without_jax_are_those_of_the_code():
    from gspmd.lowerings.names import LOWERINGS
    from gspmd.moe.experts import activation, names
    from gspmd.planner.overlap import SCHEDULES

    public = [f"looped:{name}" for name, each in SCHEDULES.items() if each.is_public]
    assert [*LOWERINGS] == ["auto", "xla", "blocking", "looped", *public]
    assert ([*activation.GATED], [*activation.PLAIN]) == ([*names.GATED], [*names.PLAIN])
