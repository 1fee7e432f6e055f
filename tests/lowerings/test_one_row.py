"""Products of one row on TPUs and GPUs: two rows as compiled, and one in values, plans and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.lowerings import in_force
from gspmd.lowerings.local_einsum import local_einsum

LONE = ["BLE,EF->BLF", "BLE,VE->BLV", "FE,BLF->LEB", "BLHD,HDE->BLE", "XCE,XEF->XCF", "BE,EHD->BHD"]
SEVERAL = ["ME,EF->MF", "BLE,BLE->BL", "BE,BLF->EF", "BTE,TBE->BT", "E,EF->F", "BL,EF->BLEF"]
SIZES = dict(zip("BLCEFVHDXMT", (1, 1, 1, 6, 4, 5, 2, 3, 2, 3, 4)))


def on_a(kind):
    """Make a fixture under which devices are of this kind; programs that were traced for others are forgotten."""

    @pytest.fixture
    def devices(monkeypatch):
        monkeypatch.setattr(in_force, "device_kind", lambda: kind)
        jax.clear_caches()
        yield
        jax.clear_caches()

    return devices


on_a_tpu, on_a_gpu = on_a("TPU v4"), on_a("NVIDIA H100 80GB HBM3")


def operands(letters):
    rng = np.random.default_rng(0)
    shapes = ([SIZES[dim] for dim in dims] for dims in letters.split("->")[0].split(","))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def made(letters, *arrays):
    """Return how many numbers leave the product."""
    program = jax.make_jaxpr(lambda *given: local_einsum(letters, *given))(*arrays)
    (product,) = (each for each in program.eqns if each.primitive.name == "dot_general")
    return product.outvars[0].aval.size


@pytest.mark.turns(6)
@pytest.mark.usefixtures("on_a_tpu")
@pytest.mark.parametrize("letters", [*LONE, *SEVERAL])
def test_a_lone_row_goes_with_a_second_and_nothing_else_changes(letters):
    arrays = operands(letters)
    want = np.einsum(letters, *arrays)
    np.testing.assert_allclose(local_einsum(letters, *arrays), want, rtol=1e-5, atol=1e-6)
    assert made(letters, *arrays) == want.size * (2 if letters in LONE else 1)


@pytest.mark.turns(6)
@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("letters", [*LONE, *SEVERAL])
def test_on_a_gpu_a_lone_narrow_row_of_one_matrix_goes_with_a_second(letters):
    arrays = operands(letters)
    narrow = [jnp.asarray(each, jnp.bfloat16) for each in arrays]
    want = np.einsum(letters, *(np.asarray(each, np.float32) for each in narrow))
    np.testing.assert_allclose(local_einsum(letters, *narrow), want, rtol=1e-5, atol=1e-6)
    batched = letters == "XCE,XEF->XCF"
    assert made(letters, *narrow) == want.size * (2 if letters in LONE and not batched else 1)
    assert made(letters, *arrays) == want.size


def test_on_other_devices_it_stays_alone():
    assert made("BE,EF->BF", *operands("BE,EF->BF")) == SIZES["F"]


@pytest.mark.usefixtures("on_a_tpu")
def test_a_row_of_int8_weights_stays_exact():
    x, w = jnp.ones((1, 300), jnp.float32), jnp.full((300, 2), -127, jnp.int8)
    assert local_einsum("BE,EF->BF", x, w).tolist() == [[-38100.0] * 2]
    assert local_einsum("BE,EF->BF", x[:0], w).shape == (0, 2), "no row is not one row"


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_plan_value_and_gradient_of_one_token(make_mesh, place, monkeypatch, lowering):
    """A program on a TPU has the plan that it has elsewhere: the second row is no work of the model's."""
    equation, mesh = "BLE_xy, (E_xF_y, E_xF_y) -> (BLF_yx, BLF_yx)", make_mesh({"x": 2, "y": 2})
    rng = np.random.default_rng(0)
    x, v, w = (rng.normal(size=size).astype(np.float32) for size in ((1, 1, 8), (8, 16), (8, 16)))

    def loss(x, v, w):
        return sum(jnp.sum(jnp.sin(y)) for y in gspmd.einsum(equation, x, (v, w), lowering=lowering))

    def plan():
        jax.clear_caches()
        with jax.set_mesh(mesh):
            given = [place(mesh, each, spec) for each, spec in zip((x, v, w), ("BLE_xy", "E_xF_y", "E_xF_y"))]
            planned = gspmd.trace(jax.value_and_grad(loss), *given)
            return planned, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*given)

    elsewhere, _ = plan()
    monkeypatch.setattr(in_force, "is_tpu", lambda: True)
    planned, gradients = plan()
    assert (planned.flops, planned.wire_bytes) == (elsewhere.flops, elsewhere.wire_bytes)
    assert planned.seconds == pytest.approx(elsewhere.seconds)
    slopes = np.cos(x[0] @ v), np.cos(x[0] @ w)
    want = (slopes[0] @ v.T + slopes[1] @ w.T)[None], x[0].T @ slopes[0], x[0].T @ slopes[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradients, want)
    jax.clear_caches()
