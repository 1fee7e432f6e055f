"""Programs for TPU slices that are not there are planned with the shape of the slice."""

from importlib import util

import jax
import pytest

import gspmd
from gspmd.audit import topology
from gspmd.hardware.chips import CHIPS
from gspmd.lowerings import in_force
from gspmd.lowerings.program import context

pytestmark = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")


@pytest.mark.parametrize(
    ("name", "shape"),
    [("tpu-v4:2x2x4", (2, 2, 4)), ("tpu-v5e:4x4", (4, 4)), ("tpu-v4:2x2x1", (2, 2)), ("tpu-v5e:2x2*2", ()),
     ("tpu7x:2x2x1", ())],
)  # fmt: skip
def test_the_chip_of_a_program_knows_the_shape_of_its_slice(name, shape):
    target = topology(name)
    mesh = target.mesh({"x": target.num_devices})
    with jax.set_mesh(mesh):
        assert in_force.slice_shape() == context().chip.slice_shape == shape
    part = jax.sharding.Mesh(mesh.devices.flat[[0, 1, -1]], ("x",))  # no box of the torus
    with jax.set_mesh(part):
        assert in_force.slice_shape() == ()


def test_host_devices_have_no_shape(make_mesh):
    with jax.set_mesh(make_mesh({"x": 4})):
        assert context().chip == CHIPS["tpu-v4"]


def test_one_function_is_planned_for_each_slice():
    """JAX keeps what it traced by the shape of the mesh: both meshes are x=16 of TPU v5e."""
    x = jax.ShapeDtypeStruct((256, 4096), "float32")

    def seconds(name):
        with jax.set_mesh(topology(name).mesh({"x": 16})):
            return gspmd.trace(moved, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.P("x", None))).seconds

    @jax.jit
    def moved(x):
        return gspmd.reshard(x, "B_xE -> BE_x")

    assert seconds("tpu-v5e:4x4") < 0.8 * seconds("tpu-v5e:2x8")
