"""Eight host devices for every test, set before JAX starts, and meshes over them."""

from collections.abc import Iterator
from pathlib import Path

from gspmd import host

host.use_host_devices(8)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Programs here are compiled once and run on toy sizes: cheap machine code halves the suite's time. The partitioner, and
# so every collective, is not affected.
jax.config.update("jax_disable_most_optimizations", True)

AXIS_TYPES = {"explicit": jax.sharding.AxisType.Explicit, "auto": jax.sharding.AxisType.Auto}


@pytest.fixture(autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Forgets compiled programs before they are too many: each holds memory maps, and a process may have 65530.

    XLA ends in a segmentation fault where the kernel refuses it another one.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()


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
