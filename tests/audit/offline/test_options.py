"""Options of the compiler are checked by what the compiler says of them, whatever mesh is in force."""

import jax
import pytest

import gspmd
from gspmd.audit import check_compiler_options

KNOWN = "xla_cpu_enable_fast_math"
MESHES = [None, {"x": 8}, {"x": 2, "y": 2}, {"x": 1}]
by_mesh = pytest.mark.parametrize("mesh", MESHES, ids=str)


@pytest.fixture
def in_force(mesh, make_mesh):
    """Sets a mesh, or none."""
    if mesh is None:
        yield
        return
    with jax.set_mesh(make_mesh(mesh)):
        yield


@by_mesh
@pytest.mark.parametrize("device", [None, 0, 7])
def test_the_mesh_in_force_does_not_matter(in_force, device):
    device = None if device is None else jax.devices("cpu")[device]
    check_compiler_options({KNOWN: True, "xla_cpu_enable_fast_min_max": False}, device)
    with pytest.raises(gspmd.PlanError, match=r"(?s)cannot compile with xla_cpu_wrong=1 on cpu.*xla_cpu_wrong"):
        check_compiler_options({KNOWN: True, "xla_cpu_wrong": 1}, device)
    with pytest.raises(gspmd.PlanError, match="'perhaps' is not a valid bool value"):
        check_compiler_options({KNOWN: "perhaps"}, device)
