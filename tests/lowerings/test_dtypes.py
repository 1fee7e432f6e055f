"""Operands of every dtype: as jnp.einsum has it under each lowering, or one error; and what a wire may be."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gspmd
from gspmd.hardware.chips import CHIPS
from gspmd.hardware.matmul import product_seconds
from gspmd.lowerings.local_einsum import local_einsum
from gspmd.planner.overlap import SCHEDULES

pytestmark = pytest.mark.usefixtures("every_schedule")

MESH = {"x": 4}
LOWERINGS = ["blocking", "looped", "xla"]
FORMS = [("BE_x, E_xF -> BF_x", None), ("B_xE, EF_x -> BF_x", "BE, EF_x"), ("BE_x, E_xF -> BF", None)]
DTYPES = ["bool", "int4", "uint4", "int8", "uint8", "int32", "float16", "bfloat16", "float32", "complex64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2"]


def numbers(name: str, shape, seed: int) -> jax.Array:
    """Zeros and ones, which every dtype holds, as it does their sums of up to eight."""
    drawn = np.random.default_rng(seed).integers(0, 2, shape)
    return jnp.asarray(drawn).astype(getattr(ml_dtypes, name, name))


def operands(name: str, equation: str) -> list[jax.Array]:
    left, right = equation.split(" -> ")[0].split(", ")
    return [gspmd.annotate(numbers(name, (4, 8), 0), left), gspmd.annotate(numbers(name, (8, 4), 1), right)]


OFTEN = [("bool", "standard"), ("int4", "standard"), ("bfloat16", "strict"), ("float8_e4m3fn", "standard")]
EVERY = [(name, promotion) for name in DTYPES for promotion in ("standard", "strict")]


@pytest.mark.parametrize(
    ("name", "promotion"),
    [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow) for case in EVERY],
)
def test_values_and_gradients_are_those_of_jnp_einsum(name, promotion, make_mesh):
    wide = jnp.complex64 if name == "complex64" else jnp.float32
    x, w = numbers(name, (4, 8), 0), numbers(name, (8, 4), 1)
    want = jnp.einsum("be,ef->bf", x, w)
    with jax.set_mesh(make_mesh(MESH)), jax.numpy_dtype_promotion(promotion):
        for number, (equation, via) in enumerate(FORMS):
            lowering = LOWERINGS[(number + DTYPES.index(name)) % 3]  # each dtype under each lowering
            compute = lambda x, w, e=equation, v=via, n=lowering: gspmd.einsum(e, x, w, via=v, lowering=n)  # noqa: E731
            placed = operands(name, equation)
            got = jax.jit(compute)(*placed)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got.astype(wide), want.astype(wide), err_msg=f"{equation} {lowering}")
            if not jnp.issubdtype(want.dtype, jnp.inexact):
                continue
            total = lambda x, w, f=compute: jnp.real(f(x, w).astype(wide)).sum()  # noqa: E731
            gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(*placed)
            sums = (
                np.asarray(w.astype(wide)).sum(1)[None] + np.zeros((4, 1)),
                np.asarray(x.astype(wide)).sum(0)[:, None],
            )
            for gradient, like, expected in zip(gradients, (x, w), sums):
                assert gradient.dtype == like.dtype
                np.testing.assert_array_equal(gradient.astype(wide), np.broadcast_to(expected, like.shape))


SCALARS = [2, 2.0, True, 1j, np.float32(2), np.int8(2)]


@pytest.mark.parametrize("name", ["bfloat16", "int32", "float8_e4m3fn", "bool"])
def test_a_number_beside_an_array_takes_on_its_dtype(name, make_mesh):
    """Promotion is that of `jnp.einsum`: a Python number has no dtype of its own."""
    x = numbers(name, (4,), 0)
    with jax.set_mesh(make_mesh({"x": 2})):
        for number in SCALARS:
            try:
                want = jnp.einsum("b,->b", x, number)
            except ValueError:  # float8 is promoted to nothing
                with pytest.raises(gspmd.PlanError, match="have no joint dtype"):
                    gspmd.einsum("B, -> B", x, number)
                continue
            for lowering in LOWERINGS:
                got = gspmd.einsum("B, -> B", x, number, lowering=lowering)
                assert got.dtype == want.dtype, (number, lowering)
                np.testing.assert_array_equal(got.astype("complex64"), want.astype("complex64"))


def test_mixed_dtypes_under_strict_promotion_are_one_error(make_mesh):
    with jax.set_mesh(make_mesh(MESH)), jax.numpy_dtype_promotion("strict"), pytest.raises(gspmd.PlanError) as error:
        gspmd.einsum("BE, EF -> BF", jnp.ones((4, 8), "bfloat16"), jnp.ones((8, 4), "float32"))
    assert str(error.value) == (
        "cannot compute 'BE, EF -> BF': by JAX's rules of promotion bfloat16, float32 have no joint dtype.\n"
        "  Cast the operands to one dtype."
    )


def test_numbers_of_two_bits_are_one_error(make_mesh):
    """XLA:CPU overwrites memory that is not its own where it moves them."""
    with (
        jax.set_mesh(make_mesh(MESH)),
        pytest.raises(gspmd.PlanError, match="operand 1 is int2, which XLA cannot multiply"),
    ):
        gspmd.einsum("BE -> B", jnp.ones((4, 8), "int2"))


# -- int8 beside floating numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", ["blocking", "looped", "xla"])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_int8_moves_as_it_is_and_multiplies_exactly(name, lowering, make_mesh):
    equation, via, mesh = "B_xE, EF_x -> B_xF", "B_xE, EF", make_mesh(MESH)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-8, 9, (8, 16)), name)
    w = rng.integers(-127, 128, (16, 8)).astype(np.int8)
    with jax.set_mesh(mesh):
        compute = lambda x, w: gspmd.einsum(equation, x, w, via=via, lowering=lowering)  # noqa: E731
        both = jax.jit(lambda x, w: (compute(x, w), jax.grad(lambda x: compute(x, w).astype("float32").sum())(x)))
        placed = gspmd.annotate(x, "B_xE"), gspmd.annotate(w, "EF_x")
        y, gradient = both(*placed)
        program = jax.jit(compute)
        plan, ledger = gspmd.trace(program, *placed), gspmd.ledger(program.lower(*placed).compile(), mesh)
    assert y.dtype == gradient.dtype == x.dtype
    np.testing.assert_array_equal(y, (np.asarray(x, np.float32) @ w.astype(np.float32)).astype(x.dtype))
    sums = np.broadcast_to(w.astype(np.float32).sum(1), (8, 16))
    np.testing.assert_array_equal(gradient, sums.astype(x.dtype))
    planned = gspmd.plan(equation, {"B": 8, "E": 16, "F": 8}, MESH, dtype=(name, "int8"), via=via)
    assert planned.wire_bytes == 16 * 8 * 3 // 4  # one byte for each number
    if lowering != "xla":
        assert plan.wire_bytes == planned.wire_bytes
        assert ledger.compare(plan).agrees


@pytest.mark.parametrize("lowering", ["blocking", "looped", "xla"])
def test_int8_is_not_rounded_to_the_float8_beside_it(lowering, make_mesh):
    """Rounded to float8, 100 would be 96 and 17 would be 16."""
    x = jnp.asarray([[1, 1], [0, 0.5]], jnp.float8_e4m3fn)
    w = np.array([[100, 17], [-100, 17]], np.int8)
    with jax.set_mesh(make_mesh({"x": 2})):
        placed = gspmd.annotate(x, "BE_x"), gspmd.annotate(w, "E_xF")
        y = jax.jit(
            lambda x, w: gspmd.einsum("BE_x, E_xF -> BF", x, w, lowering=lowering, preferred_element_type="float32")
        )(*placed)
    np.testing.assert_array_equal(y, [[0, 34], [-50, 8.5]])


def test_accelerators_multiply_int8_in_the_dtype_beside_it():
    """On CPUs every product is one of float32; without a device JAX traces what an accelerator runs."""
    x, w = jax.ShapeDtypeStruct((4, 8), "bfloat16"), jax.ShapeDtypeStruct((8, 4), "int8")
    for letters, *operands in (("be,ef->bf", x, w), ("ef,be->bf", w, x)):
        traced = jax.make_jaxpr(partial(local_einsum, letters))(*operands)
        (product,) = [each for each in traced.eqns if each.primitive.name == "dot_general"]
        assert {str(operand.aval.dtype) for operand in product.invars} == {"bfloat16"}
        assert str(product.outvars[0].aval.dtype) == "float32"


def test_a_product_with_int8_is_priced_as_its_chip_does_it():
    """At the speed of bfloat16, reading one byte of every weight."""
    small, large = ({"B": batch, "E": 8192, "F": 8192} for batch in (1, 8192))
    cost = lambda sizes, *dtypes: gspmd.plan("BE, EF -> BF", sizes, {"x": 1}, dtypes).seconds  # noqa: E731
    wide = cost(large, "bfloat16", "bfloat16")
    assert 0.99 * wide < cost(large, "bfloat16", "int8") < wide  # Reading the weights overlaps with all but a little.
    read = 8192 * 2 + 8192 * 8192
    expected = product_seconds(1, 8192, 8192, chip=CHIPS["tpu-v4"], read_bytes=read)
    assert cost(small, "bfloat16", "int8") == pytest.approx(expected, rel=1e-6)


# -- 64 bits ----------------------------------------------------------------------------------------------------------


SIXTY_FOUR = [FORMS[1], ("BF_x, F_xE -> B_xE", None)]
MORE = [*FORMS, ("F_xB, F_xEB -> FE_xB", "FB, FE_xB"), ("BF_x, F_xE -> BE_x", None)]


@pytest.mark.parametrize("lowering", ["blocking", *(f"looped:{schedule}" for schedule in SCHEDULES)])
def test_values_and_gradients_with_64_bits(lowering, make_mesh):
    _check_wide("float64", lowering, SIXTY_FOUR, make_mesh)


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["blocking", *(f"looped:{schedule}" for schedule in SCHEDULES)])
@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "int64", "complex128"])
def test_every_dtype_where_jax_has_64_bits(name, lowering, make_mesh):
    _check_wide(name, lowering, MORE, make_mesh)


def _check_wide(name: str, lowering: str, forms, make_mesh) -> None:
    rng, differentiable = np.random.default_rng(0), name != "int64"

    def both(compute):
        total = lambda *xs: (jnp.real(compute(*xs)) ** 2).sum()  # noqa: E731
        return lambda *xs: (compute(*xs), jax.grad(total, argnums=(0, 1))(*xs) if differentiable else ())

    with jax.enable_x64(True), jax.set_mesh(make_mesh(MESH)):
        for equation, via in forms:
            specs = equation.split(" -> ")[0].split(", ")
            most = 1 if name == "bfloat16" else 3  # so that every sum is one that the dtype holds, in any order
            arrays = [
                jnp.asarray(rng.integers(-most, most + 1, [8] * sum(map(str.isupper, spec))), name) for spec in specs
            ]
            letters = "".join(c for c in equation if c.isupper() or c in ",->").lower()
            planned = both(lambda *xs, e=equation, v=via: gspmd.einsum(e, *xs, via=v, lowering=lowering))
            got = jax.jit(planned)(*(gspmd.annotate(x, spec) for x, spec in zip(arrays, specs)))
            want = both(lambda *xs, n=letters: jnp.einsum(n, *xs))(*arrays)
            assert got[0].dtype == want[0].dtype == name
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, got), want)


# -- wires ------------------------------------------------------------------------------------------------------------

MOVED = "BE_x, E_xF -> BF"
HOLD = "does not hold such numbers.\n"
WHOLE = HOLD + "  Only floating numbers can be sent in a narrower dtype. Leave it out."
REAL = HOLD + "  Only floating numbers can be sent in a narrower dtype. Use a floating wire_dtype, such as bfloat16."
REFUSED = [
    ("complex64", None, "float32", "operand 1 is complex64, and float32 " + WHOLE),
    ("int32", None, "int8", "operand 1 is int32, and int8 " + WHOLE),
    ("int32", None, "bfloat16", "operand 1 is int32, and bfloat16 " + WHOLE),
    ("bool", None, "int8", "operand 1 is bool, and int8 " + WHOLE),
    ("float32", None, "int32", "operand 1 is float32, and int32 " + REAL),
    ("float32", None, "complex64", "operand 1 is float32, and complex64 " + REAL),
    (
        "float32",
        None,
        "float8_e8m0fnu",
        "operand 1 is float32, and float8_e8m0fnu " + REAL,
    ),
    ("float32", None, "float4_e2m1fn", "operand 1 is float32, and float4_e2m1fn " + REAL),
    ("int8", "float32", "int8", "the result is float32, and int8 " + REAL),
]


@pytest.mark.parametrize(("name", "preferred", "wire", "fact"), REFUSED)
def test_a_wire_holds_what_is_sent(name, preferred, wire, fact, make_mesh):
    with jax.set_mesh(make_mesh(MESH)), pytest.raises(gspmd.PlanError) as error:
        gspmd.einsum(MOVED, *operands(name, MOVED), wire_dtype=wire, preferred_element_type=preferred)
    assert str(error.value) == f"cannot send '{MOVED}' as {wire}: {fact}"


def test_each_operand_is_looked_at_by_itself(make_mesh):
    with jax.set_mesh(make_mesh(MESH)):
        x, w = operands("float32", MOVED)
        with pytest.raises(gspmd.PlanError, match="operand 2 is int32, and bfloat16 does not hold"):
            gspmd.einsum(MOVED, x, w.astype("int32"), wire_dtype="bfloat16")


@pytest.mark.parametrize("option", ["wire_dtype", "preferred_element_type"])
def test_64_bits_that_jax_has_not(option, make_mesh):
    with jax.set_mesh(make_mesh(MESH)), pytest.raises(gspmd.PlanError) as error:
        gspmd.einsum(MOVED, *operands("float32", MOVED), **{option: "float64"})
    doing = "send" if option == "wire_dtype" else "give the result of"
    assert str(error.value) == (
        f"cannot {doing} '{MOVED}' as float64: JAX has no dtypes of 64 bits as it is configured.\n"
        f"  Use a narrower {option}, or jax.config.update('jax_enable_x64', True)."
    )


ALLOWED = [("float32", "bfloat16"), ("float32", "float16"), ("float32", "float8_e4m3fn"), ("bfloat16", "float32")]
ALLOWED += [("int32", "int32"), ("complex64", "complex64")]


@pytest.mark.parametrize("lowering", ["blocking", "looped"])
@pytest.mark.parametrize(("name", "wire"), ALLOWED)
def test_small_whole_numbers_cross_every_wire_unharmed(name, wire, lowering, make_mesh):
    with jax.set_mesh(make_mesh(MESH)):
        x, w = operands(name, MOVED)
        got = jax.jit(lambda x, w: gspmd.einsum(MOVED, x, w, lowering=lowering, wire_dtype=wire))(x, w)
        want = jnp.einsum("be,ef->bf", numbers(name, (4, 8), 0), numbers(name, (8, 4), 1))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype("complex64"), want.astype("complex64"))


@pytest.mark.parametrize(("name", "preferred"), [("float32", "int32"), ("complex64", "float32"), ("int32", "bool")])
def test_a_result_holds_what_is_computed(name, preferred, make_mesh):
    with jax.set_mesh(make_mesh(MESH)), pytest.raises(gspmd.PlanError, match=f"which {preferred} cannot hold"):
        gspmd.einsum(MOVED, *operands(name, MOVED), preferred_element_type=preferred)
