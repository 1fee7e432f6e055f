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
# Plain code is made in half the time, and by the emitters that XLA had before its present ones in half of that. The
# partitioner, and so every collective, is not affected. In the environment too, for the processes that tests start.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
jax.config.update("jax_disable_most_optimizations", True)
# XLA reads its flags when a backend starts, and one that it does not know ends the process, as this one in jax 0.12.
if jax.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = f"--xla_cpu_use_fusion_emitters=false {os.environ.get('XLA_FLAGS', '')}"
# Python's readline, which pytest loads, tells processes started later that there are 80 columns, such as pytest's own
# workers. What a test shows in a file is as wide as it is; a test of a narrow terminal says so itself.
for _name in ("COLUMNS", "LINES"):
    os.environ[_name] = ""  # readline tells the C library, of which os.environ has not heard
    del os.environ[_name]
# Tokens and programs that tests write, and the processes they start, are kept apart from those of the user, in one
# folder for all of pytest's workers. Commands that are started as processes keep programs there, as they do for a user.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["GSPMD_CACHE"] = tempfile.mkdtemp(prefix="gspmd-tests-")
    atexit.register(shutil.rmtree, os.environ["GSPMD_CACHE"], ignore_errors=True)
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
jax.config.update("jax_compilation_cache_dir", None)
# Here programs are compiled in the test that needs them.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "true"
jax.config.update("jax_enable_compilation_cache", False)
# What tracing leaves behind is kept in caches, so looking for garbage every 700 objects takes a tenth of the time.
gc.set_threshold(100_000, 20, 20)

# Where the suite is started in the background of a script, or under nohup, these are ignored, and all that tests start
# would inherit that: whoever tests an interrupt would wait for its answer.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

# On a machine that is loaded a case may take any time; what is slow is no fault of what is tested.
hypothesis.settings.register_profile("loaded", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("loaded")

host.use_host_devices(8)
jax.config.update("jax_platforms", "cpu")
# Now, not when a test first needs it: whether a test may ask for another number does not depend on those before it.
jax.devices()
jax.config.update("jax_numpy_rank_promotion", "raise")


class _Models(MetaPathFinder):
    """Finds `gspmd_models` in this tree: what is installed by that name may be the folder models/ of another one."""

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
    """Mark and leave out the cases that are not drawn; see tests/references/volume.py."""
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
    """The cases that are slow, of tests of which only some cases are fast."""
    marks = {item: item.get_closest_marker("turns") for item in items if not item.get_closest_marker("slow")}
    turning = [item for item, mark in marks.items() if mark]
    # By the file, so that tests of one file that share their programs draw the same ones.
    now = (
        volume.sampled(random.Random(name.partition("::")[0]), cases, marks[cases[0]].args[0])
        for name, cases in _by_test(turning)
    )
    return set(turning).difference(item for cases in now for item in cases)


def shuffled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests in an order of the seed, with the cases of each next to one another, since they share programs."""
    tests = [*_by_test(items)]
    random.Random(f"{volume.SEED} order").shuffle(tests)
    return [item for _, cases in tests for item in cases]


_began = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that begins after the minutes that are given, each worker's counted from its start."""
    if time.monotonic() - _began > 60 * volume.MINUTES:
        pytest.skip(f"the {volume.MINUTES:g} minutes of this run are over")


def _by_test(items: Iterable[pytest.Item]) -> ItemsView[str, list[pytest.Item]]:
    """The cases of every test."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return tests.items()


_counted = 0.0


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[None]:
    """Lets a module's tests import the scripts of benchmarks/, which import one another from their own folder."""
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.fixture(autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Forgets compiled programs before they are too many: each holds memory maps, and a process may have 65530.

    XLA ends in a segmentation fault where the kernel refuses it another one. To list 20000 of them takes the kernel
    25 ms, longer than most tests, and compiling makes 200 in a second: they are counted once in ten seconds of work.
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
