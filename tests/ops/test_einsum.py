"""einsum: under every transformation, with every dtype; what is accumulated, and what crosses the wire."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.hardware.chips import CHIPS
from tests.references import compiled
from tests.references.random_equations import Case, check

MESH = {"x": 2, "y": 2, "z": 2}
EQUATION = "BE_xyz, E_xF_yz -> BF_yzx"

FIXED = [
    ("BE_xyz, E_xF_yz -> BF_yzx", "explicit"),
    ("BF_yz, F_yzE_x + BH_yz, H_yzE_x -> BE_xyz", "auto"),
    ("BE_xyz, (E_xF_yz, E_xH_yz) -> (BF_yzx, BH_yzx)", "explicit"),
    ("E partialsum-x, (E partialsum-x, E_y) -> (E partialsum-x, E)", "explicit"),
    ("partialsum-x, E_xF -> F_x", "explicit"),
    ("B_xE, -> E_xB", "auto"),
    ("HE_x partialsum-y, partialsum-y -> E partialsum-xy", "explicit"),
    ("F_xH, (, E_xF) -> (F_xH, )", "explicit"),
    ("BE_x -> B partialsum-x", "explicit"),
]


@pytest.mark.turns(3)
@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize(("equation", "axis_type"), FIXED)
def test_values_and_gradients(equation, axis_type, lowering):
    sizes = dict.fromkeys(sorted({c for c in equation if c.isupper()}), 8)
    check(Case(equation, tuple(sizes.items()), tuple(MESH.items()), axis_type, lowering))


@pytest.mark.parametrize("equation", ["E partialsum-x -> E partialsum-x", "E, partialsum-x -> E partialsum-x"])
def test_one_device_owes_sums_too(equation):
    check(Case(equation, (("E", 2),), (("x", 1),), "explicit", "blocking"))


@pytest.fixture
def operands(make_mesh):
    """A function (axis_type, dtype) -> mesh, x, w, and their product by numpy."""

    def make(axis_type="explicit", dtype=jnp.float32):
        rng = np.random.default_rng(0)
        x, w = rng.integers(-3, 4, (8, 16)), rng.integers(-3, 4, (16, 32))
        mesh = make_mesh(MESH, axis_type)
        with jax.set_mesh(mesh):
            return mesh, gspmd.annotate(x.astype(dtype), "BE_xyz"), gspmd.annotate(w.astype(dtype), "E_xF_yz"), x @ w

    return make


@pytest.mark.turns(2)
@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_under_scan_and_remat(operands, axis_type, lowering):
    """Three layers in and out again; the loss is a plain sum, so that gradients are known."""
    mesh, x, w, _ = operands(axis_type)
    out = np.random.default_rng(1).integers(-1, 2, (32, 16)).astype(np.float32)

    def layer(w, out, x):
        h = gspmd.einsum(EQUATION, x, w, lowering=lowering)
        return gspmd.einsum("BF_yzx, F_yzE_x -> BE_xyz", h, out, lowering=lowering)

    def loss(x, w, out):
        step = jax.checkpoint(lambda x, _: (layer(w, out, x), None))
        return jax.lax.scan(step, x, None, length=3)[0].sum()

    with jax.set_mesh(mesh):
        placed = gspmd.annotate(out, "F_yzE_x")
        value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, w, placed)
    plain = lambda x, w, out: (x @ w @ out @ w @ out @ w @ out).sum()  # noqa: E731
    arrays = [np.asarray(a) for a in (x, w, placed)]
    wanted = jax.value_and_grad(plain, argnums=(0, 1, 2))(*map(jnp.asarray, arrays))
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    for got, want in zip(gradients, wanted[1]):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_under_vmap(operands, axis_type, lowering):
    mesh, x, w, want = operands(axis_type)
    with jax.set_mesh(mesh):
        xs = jnp.stack([x, 2 * x])
        got = jax.jit(jax.vmap(partial(gspmd.einsum, EQUATION, lowering=lowering), in_axes=(0, None)))(xs, w)
    np.testing.assert_array_equal(got, np.stack([want, 2 * want]))


def test_forward_mode_under_xla(operands):
    mesh, x, w, want = operands()
    with jax.set_mesh(mesh):
        _, tangent = jax.jvp(lambda x: gspmd.einsum(EQUATION, x, w, lowering="xla"), (x,), (x,))
        with pytest.raises(gspmd.PlanError, match="plans reverse mode only"):
            jax.jvp(lambda x: gspmd.einsum(EQUATION, x, w, lowering="blocking"), (x,), (x,))
    np.testing.assert_array_equal(tangent, want)


# -- dtypes -----------------------------------------------------------------------------------------------------------


def _primitives(jaxpr, name: str):
    """Every equation of a primitive, inside jits, loops and shard_maps too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner, name)


def _dtypes(jaxpr, name: str) -> list[str]:
    return [str(equation.outvars[0].aval.dtype) for equation in _primitives(jaxpr, name)]


def _jaxpr(operands, **options):
    mesh, x, w, _ = operands(dtype=jnp.bfloat16)
    with jax.set_mesh(mesh):
        return jax.make_jaxpr(lambda x, w: gspmd.einsum(EQUATION, x, w, via="BE_x, E_xF_yz", **options))(x, w)


def test_narrow_operands_accumulate_in_float32_and_travel_narrow(operands):
    jaxpr = _jaxpr(operands)
    assert _dtypes(jaxpr.jaxpr, "dot_general") == ["float32"]
    assert _dtypes(jaxpr.jaxpr, "all_gather") == ["bfloat16"]
    assert _dtypes(jaxpr.jaxpr, "reduce_scatter") == ["bfloat16"]
    assert [str(out.dtype) for out in jaxpr.out_avals] == ["bfloat16"]


def test_wire_dtype_is_what_travels(operands):
    jaxpr = _jaxpr(operands, wire_dtype=jnp.float32)
    assert _dtypes(jaxpr.jaxpr, "all_gather") == ["float32"]
    assert _dtypes(jaxpr.jaxpr, "reduce_scatter") == ["float32"]
    assert [str(out.dtype) for out in jaxpr.out_avals] == ["bfloat16"]


def test_preferred_element_type_is_the_results(operands):
    jaxpr = _jaxpr(operands, preferred_element_type=jnp.float32)
    assert _dtypes(jaxpr.jaxpr, "dot_general") == ["float32"]
    assert _dtypes(jaxpr.jaxpr, "all_gather") == ["bfloat16"]
    assert [str(out.dtype) for out in jaxpr.out_avals] == ["float32"]


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
def test_sums_over_many_narrow_numbers_are_exact(make_mesh, lowering):
    """A running sum of ones in bfloat16 stops at 256."""
    with jax.set_mesh(make_mesh({"x": 2})):
        x = gspmd.annotate(jnp.ones((4096,), jnp.bfloat16), "E_x")
        total = jax.jit(lambda x: gspmd.einsum("E_x, E_x -> ", x, x, lowering=lowering))(x)
        moved = jax.jit(lambda x: gspmd.reshard(x, "E_x -> ", lowering=lowering))(x)
    assert (float(total), float(moved)) == (4096, 4096)


def test_gradients_have_the_operands_dtypes(operands):
    mesh, x, w, _ = operands(dtype=jnp.bfloat16)
    with jax.set_mesh(mesh):
        loss = lambda x, w: gspmd.einsum(EQUATION, x, w, preferred_element_type=jnp.float32).sum()  # noqa: E731
        gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, w.astype(jnp.float32))
    assert [str(g.dtype) for g in gradients] == ["bfloat16", "float32"]


def test_precision_reaches_the_local_product(operands):
    jaxpr = _jaxpr(operands, precision=jax.lax.Precision.HIGHEST)
    (dot,) = _primitives(jaxpr.jaxpr, "dot_general")
    assert dot.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


@pytest.mark.parametrize("lowering", ["blocking", "looped"])
def test_plans_price_the_precision_of_the_local_product(lowering, make_mesh):
    square, options = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), {"lowering": lowering}

    def seconds(precision=None, default=None):
        loss = lambda *args: gspmd.einsum("B_xE, E_xF -> B_xF", *args, precision=precision, **options).sum()  # noqa: E731
        with jax.default_matmul_precision(default), jax.set_mesh(make_mesh({"x": 8})):
            args = [gspmd.annotate(square, spec) for spec in ("B_xE", "E_xF")]
            return gspmd.trace(jax.grad(loss, argnums=(0, 1)), *args).seconds

    fast, middle, slow = map(seconds, (None, "high", jax.lax.Precision.HIGHEST))
    assert seconds("BF16_BF16_F32") == seconds("default") == fast
    # The products of both gradients on a device, in one, three and six passes of bfloat16; memory hides a part.
    one = 2 * 2 * 4096**3 / 8 / CHIPS["tpu-v4"].bf16_flops
    assert middle - fast > 1.2 * one
    assert slow - middle > 2 * one
    assert seconds(default="highest") == seconds(("high", "highest")) == slow
    assert seconds("default", default="highest") == fast


# -- a transformer block against the same by hand ----------------------------------------------------------------------

BLOCK = {"x": 2, "y": 4}
SHAPES = {"x": (8, 16, 64), "wq": (64, 8, 16), "wo": (8, 16, 64), "w1": (64, 256), "w2": (256, 64)}
PLACES = {"x": "B_xLE_y", "wq": "EH_yD", "wo": "H_yDE", "w1": "EF_y", "w2": "F_yE"}


def _block(x, wq, wo, w1, w2):
    h = gspmd.einsum("B_xLE_y, EH_yD -> B_xLH_yD", x, wq)
    x = x + gspmd.einsum("B_xLH_yD, H_yDE -> B_xLE_y", jnp.tanh(h), wo)
    h = gspmd.einsum("B_xLE_y, EF_y -> B_xLF_y", x, w1)
    return x + gspmd.einsum("B_xLF_y, F_yE -> B_xLE_y", jax.nn.relu(h), w2)


def _by_hand(x, wq, wo, w1, w2):
    place = lambda x, spec: jax.lax.with_sharding_constraint(x, gspmd.Spec.parse(spec).partition_spec())  # noqa: E731
    h = place(jnp.einsum("ble,ehd->blhd", x, wq), "B_xLH_yD")
    x = x + place(jnp.einsum("blhd,hde->ble", jnp.tanh(h), wo), "B_xLE_y")
    h = place(jnp.einsum("ble,ef->blf", x, w1), "B_xLF_y")
    return x + place(jnp.einsum("blf,fe->ble", jax.nn.relu(h), w2), "B_xLE_y")


def test_a_block_sends_no_more_than_one_written_by_hand(make_mesh):
    def text(block):
        def loss(x, weights):
            return jax.lax.scan(lambda x, _: (block(x, *weights), None), x, None, length=3)[0].sum()

        shaped = [
            jax.ShapeDtypeStruct(SHAPES[n], jnp.float32, sharding=jax.NamedSharding(mesh, _partition(n)))
            for n in SHAPES
        ]
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(shaped[0], tuple(shaped[1:])).compile().as_text()

    mesh = make_mesh(BLOCK, "auto")
    with jax.set_mesh(mesh):
        planned, by_hand = text(_block), text(_by_hand)
    assert compiled.dot_flops(planned) == compiled.dot_flops(by_hand) > 0
    assert 0 < compiled.bytes_sent(planned) <= compiled.bytes_sent(by_hand)


def _partition(name: str):
    return gspmd.Spec.parse(PLACES[name]).partition_spec()
