"""Eight host devices for every test, set before JAX starts, and meshes over them."""

import atexit
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import ItemsView, Iterable, Iterator
from importlib.abc import MetaPathFinder
from importlib.util import spec_from_file_location
from math import isfinite
from pathlib import Path

import hypothesis
import jax
import pytest

import gspmd
from gspmd import host
from tests.references import schedules, volume

# Programs here are compiled once and run on toy sizes, so most of the suite's time is spent on making machine code.
# Unoptimized code takes half the time, and XLA's previous emitters take half of that. The partitioner, and so every
# collective, is not affected. The flags are set in the environment too, for the processes that tests start.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
jax.config.update("jax_disable_most_optimizations", True)
# XLA reads its flags when a backend starts. A flag that it does not know, as this one in jax 0.12, ends the process.
if jax.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = f"--xla_cpu_use_fusion_emitters=false {os.environ.get('XLA_FLAGS', '')}"
# Python's readline, which pytest loads, tells processes started later that there are 80 columns, such as pytest's own
# workers. So these variables are removed: output to a file keeps its width, and tests of narrow terminals set theirs.
for _name in ("COLUMNS", "LINES"):
    os.environ[_name] = ""  # readline sets it in the C library, so os.environ does not have it
    del os.environ[_name]
# Tokens and programs that tests and their processes write are kept apart from the user's, in one folder for all of
# pytest's workers. Commands that are started as processes keep programs there, as they do for a user.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["GSPMD_CACHE"] = tempfile.mkdtemp(prefix="gspmd-tests-")
    atexit.register(shutil.rmtree, os.environ["GSPMD_CACHE"], ignore_errors=True)
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
jax.config.update("jax_compilation_cache_dir", None)
# Here programs are compiled in the test that needs them.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "true"
jax.config.update("jax_enable_compilation_cache", False)
# Objects of tracing are kept in caches, so looking for garbage every 700 objects would take a tenth of the time.
gc.set_threshold(100_000, 20, 20)

# If the suite is started in the background of a script, or under nohup, these signals are ignored. Processes that tests
# start would inherit that, and a test of an interrupt would wait forever.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

# On a loaded machine a case may take any time, so a slow case is not a fault.
hypothesis.settings.register_profile("loaded", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("loaded")

host.use_host_devices(8)
jax.config.update("jax_platforms", "cpu")
# The backend starts now, not when a test first needs it, so the number of devices does not depend on the order of
# tests.
jax.devices()
jax.config.update("jax_numpy_rank_promotion", "raise")


class _Models(MetaPathFinder):
    """Finds `gspmd_models` in this tree: the installed package may be the folder models/ of another tree."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        folder = Path(__file__).parents[1] / "models"
        if name == "gspmd_models":
            return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        return None


sys.meta_path.insert(0, _Models)

AXIS_TYPES = {"explicit": jax.sharding.AxisType.Explicit, "auto": jax.sharding.AxisType.Auto}


def pytest_report_header() -> str:
    share = f"{volume.SCALE:g} of the slow suite's draws; " if volume.SCALE != 1 else ""
    limit = f"for {volume.MINUTES:g} minutes; " if isfinite(volume.MINUTES) else ""
    return f"{share}{limit}cases drawn by DRAWS_SEED={volume.SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases, and leave out those that are not drawn; see tests/references/volume.py."""
    for item in waiting(items):
        item.add_marker(pytest.mark.slow)
    slow = [item for item in items if item.get_closest_marker("slow")]
    left = set(slow).difference(item for name, cases in _by_test(slow) for item in volume.drawn(name, cases))
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    if isfinite(volume.MINUTES):
        items[:] = shuffled(items)


def waiting(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the slow cases of tests that have both fast and slow cases."""
    marks = {item: item.get_closest_marker("turns") for item in items if not item.get_closest_marker("slow")}
    turning = [item for item, mark in marks.items() if mark]
    # Drawn by the file, so that tests of one file draw the same cases and can share their programs.
    now = (
        volume.sampled(random.Random(name.partition("::")[0]), cases, marks[cases[0]].args[0])
        for name, cases in _by_test(turning)
    )
    return set(turning).difference(item for cases in now for item in cases)


def shuffled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return tests in an order drawn by the seed; the cases of a test stay together, since they share programs."""
    tests = [*_by_test(items)]
    random.Random(f"{volume.SEED} order").shuffle(tests)
    return [item for _, cases in tests for item in cases]


_began = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that could not end within the given minutes, which each worker counts from its start."""
    left = volume.MINUTES - (time.monotonic() - _began) / 60
    if left < 0:
        pytest.skip(f"the {volume.MINUTES:g} minutes of this run are over")
    takes = item.get_closest_marker("takes")
    if takes and left < takes.args[0]:
        pytest.skip(f"the test takes {takes.args[0]:g} minutes, and {left:.1f} of {volume.MINUTES:g} are left")


def _by_test(items: Iterable[pytest.Item]) -> ItemsView[str, list[pytest.Item]]:
    """Return the cases of every test."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return tests.items()


_counted = 0.0


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[None]:
    """Lets a module's tests import the scripts of benchmarks/, which import one another from that folder."""
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.fixture(autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Forgets compiled programs before they are too many: each holds memory maps, and a process may have 65530.

    XLA ends in a segmentation fault if the kernel refuses another one. Listing 20000 of them takes the kernel 25 ms,
    longer than most tests, and compiling makes 200 in a second. So they are counted once in ten seconds of work.
    """
    global _counted
    yield
    maps, now = Path("/proc/self/maps"), time.process_time()
    if now > _counted + 10 and maps.exists():
        _counted = now
        if maps.read_bytes().count(b"\n") > 25_000:
            jax.clear_caches()


@pytest.fixture(scope="module")
def every_schedule() -> Iterator[None]:
    """Lets a module's tests ask for `looped:one-way`."""
    with schedules.every_schedule():
        yield


@pytest.fixture
def make_mesh():
    """A function (sizes, axis_type="explicit") -> Mesh over the first devices, such as make_mesh({"x": 4, "y": 2})."""

    def make(sizes: dict[str, int], axis_type: str = "explicit") -> jax.sharding.Mesh:
        count = 1
        for size in sizes.values():
            count *= size
        types = (AXIS_TYPES[axis_type],) * len(sizes)
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=jax.devices()[:count])

    return make


@pytest.fixture(params=["explicit", "auto"])
def axis_type(request) -> str:
    """Runs a test under Explicit and under Auto mesh axes."""
    return request.param


@pytest.fixture
def place():
    """A function (mesh, array, spec) -> the array on the mesh."""

    def put(mesh, array, spec):
        return jax.device_put(array, jax.NamedSharding(mesh, gspmd.Spec.parse(spec).partition_spec()))

    return put
